"""What the tests of `sbtrain serve` share: a small trained model, and a server that runs."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

MODEL = """
name: served
seed: 3
device: cpu
model: {layers: 2, width: 32, inner: 44, heads: 2, vocab: %d, init_std: 0.1, attention: %s}
train: {sequence_length: 64, micro_batch: 8, batch: 8, lr: 1e-2}
data: {sources: [{path: a.h5}], validation: [a.h5], tokenizer: tokenizer.model}
stages: [{name: first, length: %d steps}]
checkpoint: {every: 60 steps}
"""
STICKBREAKING = "{type: stickbreaking, remainder: value}"


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}


class Folder:
    """A folder with a tokenizer, a store and a run, in which commands run."""

    def __init__(self, program, text, attention=STICKBREAKING, tokenizer="sentencepiece", vocab=400, steps=60):
        self.program = program
        self.text = text
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name)
        self.run("tokenizer", "train", "--input", text, "--vocab", "400", "--type", tokenizer, "--output",
                 "tokenizer.model")
        self.run("prepare", "--input", text, "--tokenizer", "tokenizer.model", "--output", "a.h5")
        (self.path / "config.yaml").write_text(MODEL % (vocab, attention, steps))
        self.run("train", "--config", "config.yaml", "--out", "run")

    def close(self):
        self._folder.cleanup()

    def run(self, *arguments):
        result = subprocess.run([self.program, *arguments], cwd=self.path, env=environment(), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
        assert result.returncode == 0, (arguments, result.stdout, result.stderr)
        return result.stdout


class Server:
    """`sbtrain serve` of the folder's run on a free port. `stack` limits that of each thread, in bytes."""

    def __init__(self, folder, *options, variables=None, stack=None):
        limit = ["prlimit", f"--stack={stack}"] if stack else []
        self.log = open(folder.path / "server.log", "w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [*limit, folder.program, "serve", "--checkpoint", "run", "--port", "0", *options], cwd=folder.path,
            env={**environment(), **(variables or {})}, stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        if not match:
            self.process.wait(timeout=60)
            raise AssertionError(f"the server has not started: {line} {self.messages()}")
        self.port = int(match.group(1))

    def messages(self):
        return Path(self.log.name).read_text(encoding="utf-8")

    def stop(self, number=signal.SIGTERM, seconds=60):
        """Asks the server to end, and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.process.stdout.close()
            self.log.close()

    def connect(self, timeout=120):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def socket(self, timeout=60):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def call(self, method, path, body=None, headers=None):
        """The status, and the JSON or text of the answer."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            text = answer.read().decode()
            json_type = answer.headers.get("Content-Type", "").startswith("application/json")
            return answer.status, json.loads(text) if json_type else text
        finally:
            connection.close()

    def complete(self, **fields):
        status, answer = self.call("POST", "/v1/completions", fields)
        assert status == 200, (status, answer)
        return answer

    def stream(self, **fields):
        """The events of a streamed completion; the last one is "[DONE]"."""
        status, text = self.call("POST", "/v1/completions", {**fields, "stream": True})
        assert status == 200, (status, text)
        events = text.split("\n\n")
        assert events[-1] == "" and all(event.startswith("data: ") for event in events[:-1]), text
        data = [event[len("data: "):] for event in events[:-1]]
        assert data[-1] == "[DONE]", text
        return [json.loads(event) for event in data[:-1]]

    def metrics(self):
        return self.metrics_of({})

    def metrics_of(self, headers):
        text = self.call("GET", "/metrics", None, headers)[1]
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def wait_until_idle(self, seconds=30):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            metrics = self.metrics()
            if metrics["sbtrain_sequences_running"] + metrics["sbtrain_sequences_waiting"] == 0:
                return metrics
            time.sleep(0.02)
        raise AssertionError("sequences are still running")
