"""log_wandb.py and log_mlflow.py, with modules in place of wandb and mlflow that write down what they receive."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

# Each call becomes a line of $FAKE_LOG. With $FAKE_FAILURES=N the first N records are refused.
FAKE = """
import json, os

def note(*call):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps(call) + "\\n")

def calls():
    try:
        return [json.loads(line) for line in open(os.environ["FAKE_LOG"])]
    except FileNotFoundError:
        return []

def receive(*call):
    if sum(c[0] == "failure" for c in calls()) < int(os.environ.get("FAKE_FAILURES", 0)):
        note("failure")
        raise RuntimeError("the server does not answer")
    note(*call)
"""
WANDB = FAKE + """
class Run:
    def __init__(self, id):
        self.id, self.tags = id, None
        self.step = 0  # as in the offline mode, also of a run that goes on
    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")
    def log(self, values, step):
        values = dict(values)
        values.pop("tokens")
        # W&B drops what is logged for a step before the last one.
        assert step >= self.step and step >= sum(c[0] == "record" and c[1] == self.id for c in calls())
        self.step = step
        receive("record", self.id, values.pop("step"), values)
    def finish(self, exit_code):
        note("finish", self.id, bool(self.tags))
        note("state", self.id, "failed" if exit_code else "finished")

def init(project, entity, name=None, config=None, id=None, resume=None):
    if id is not None:
        assert resume == "must"
        note("resume", id)
        return Run(id)
    id = f"id{sum(c[0] == 'start' for c in calls())}"
    note("start", id, name, config)
    return Run(id)
"""
MLFLOW = FAKE + """
from types import SimpleNamespace
entities = SimpleNamespace(Metric=lambda *a: a, Param=lambda *a: a)

class MlflowClient:
    def __init__(self, tracking_uri):
        self.superseded = set()
    def get_experiment_by_name(self, name):
        return None
    def create_experiment(self, name):
        return "7"
    def create_run(self, experiment, run_name):
        id = f"id{sum(c[0] == 'start' for c in calls())}"
        self.name = run_name
        return SimpleNamespace(info=SimpleNamespace(run_id=id))
    def log_batch(self, run, metrics=(), params=()):
        if params:
            note("start", run, self.name, dict(params))
        else:
            receive("record", run, metrics[0][3], {m[0]: m[1] for m in metrics})
    def update_run(self, run, status):
        note("resume", run)
    def set_tag(self, run, key, value):
        self.superseded.add(run)
    def set_terminated(self, run, status):
        note("finish", run, run in self.superseded)
        note("state", run, status)
"""


def train(step, loss=None, **more):
    return {"step": step, "tokens": 10 * step, "time": time.time(),
            "train/loss": 9 - step if loss is None else loss, "train/tokens_per_second": time.time(), **more}


def validation(step, loss=5.0):
    return {"step": step, "tokens": 10 * step, "time": time.time(), "validation/loss": loss}


class Tracker:
    """The tests, for a script and the module that it loads."""

    script = module = source = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / f"{self.module}.py").write_text(self.source)
        self.run_folder = self.folder / "runs" / "tiny"
        self.run_folder.mkdir(parents=True)
        (self.run_folder / "config.yaml").write_text("train:\n  lr: 0.5\nname: tiny\n")
        self.environment = {**os.environ, "PYTHONPATH": str(self.folder),
                            "FAKE_LOG": str(self.folder / "calls")}

    def write(self, *records):
        """Replaces the file, as a resumed run does."""
        text = "".join(json.dumps(r) + "\n" for r in records)
        (self.run_folder / "new").write_text(text)
        os.replace(self.run_folder / "new", self.run_folder / "metrics.jsonl")

    def append(self, text):
        with open(self.run_folder / "metrics.jsonl", "a") as file:
            file.write(text)

    def command(self, *options):
        return [sys.executable, str(SCRIPTS / self.script), str(self.run_folder), *options]

    def send(self, *options, code=0, **environment):
        result = subprocess.run(self.command(*options), env={**self.environment, **environment},
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        self.assertEqual(result.returncode, code, result.stdout)
        return result.stdout

    def calls(self, kind):
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [call[1:] for call in map(json.loads, lines) if call[0] == kind]

    def steps(self, run="id0"):
        return [(step, sorted(values)[0]) for id, step, values in self.calls("record") if id == run]

    def test_each_record_is_sent_once(self):
        self.write(train(1), train(2), validation(2))
        self.send()
        self.assertEqual(self.steps(), [(1, "train/loss"), (2, "train/loss"), (2, "validation/loss")])
        self.assertIn(["id0", 2, {"validation/loss": 5.0}], self.calls("record"))
        start = self.calls("start")[0]
        self.assertEqual(start[:2], ["id0", "tiny"])
        self.assertEqual(str(start[2].get("train.lr", "0.5")), "0.5")  # {} without PyYAML
        self.send()
        self.append(json.dumps(train(3)) + "\n" + json.dumps(train(4))[:20])  # the last is being written
        self.send()
        self.assertEqual(self.steps()[3:], [(3, "train/loss")])
        self.assertEqual(len(self.calls("start")), 1)
        self.assertEqual(self.calls("finish")[-1], ["id0", False])

    def test_a_resumed_run_repeats_what_was_sent(self):
        self.write(train(1), train(2), train(3))
        self.send()
        self.write(train(1), train(2))
        self.send()
        self.write(train(1), train(2), train(3), train(4))
        self.send()
        self.assertEqual([step for step, _ in self.steps()], [1, 2, 3, 4])
        self.assertEqual(len(self.calls("start")), 1)

    def test_another_course_is_another_run(self):
        self.write(train(1), train(2), train(3))
        self.send()
        self.write(train(1), train(2), train(3, loss=0.25), train(4))
        self.send()
        self.assertEqual([step for step, _ in self.steps("id1")], [1, 2, 3, 4])
        self.assertIn(["id0", True], self.calls("finish"))
        self.assertEqual(self.calls("start")[1][1], "tiny (2)")
        self.send()
        self.assertEqual(len(self.calls("record")), 7)

    def test_values_that_are_not_finite_are_left_out(self):
        self.write(train(1, **{"train/grad_norm": None, "train/mfu": 0.5}))
        self.send()
        self.assertEqual(set(self.calls("record")[0][2]),
                         {"train/loss", "train/mfu", "train/tokens_per_second"})

    def test_a_server_that_does_not_answer_is_asked_again(self):
        self.write(train(1), train(2))
        self.assertIn("does not answer", self.send(code=1, FAKE_FAILURES="1"))
        self.send(FAKE_FAILURES="1")
        self.assertEqual([step for step, _ in self.steps()], [1, 2])
        self.assertEqual(len(self.calls("start")), 1)

    def test_follows_until_it_is_told_to_stop(self):
        process = subprocess.Popen(self.command("--follow", "--every", "0.05"),
                                   env={**self.environment, "FAKE_FAILURES": "2"},
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            self.wait_for(lambda: (self.run_folder / f"follow_{self.module}.jsonl").exists())
            self.write(train(1), train(2))
            self.wait_for(lambda: len(self.steps()) == 2)
            self.append(json.dumps(train(3))[:30])
            time.sleep(0.2)
            self.append(json.dumps(train(3))[30:] + "\n")
            self.wait_for(lambda: len(self.steps()) == 3)
            self.write(train(1))
            time.sleep(0.2)
            self.append("".join(json.dumps(train(step)) + "\n" for step in (2, 3, 4)))
            self.wait_for(lambda: len(self.steps()) == 4)
            self.assertIn("another process", self.send(code=1))
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        self.assertEqual(process.returncode, 0, output)
        self.assertEqual([step for step, _ in self.steps()], [1, 2, 3, 4])
        self.assertEqual(self.calls("finish"), [["id0", False]])

    def test_may_be_started_before_the_run(self):
        self.run_folder.rename(self.folder / "later")
        process = subprocess.Popen(self.command("--follow", "--every", "0.05"), env=self.environment,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            time.sleep(0.5)
            (self.folder / "later").rename(self.run_folder)
            self.write(train(1))
            self.wait_for(lambda: self.steps())
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        self.assertEqual(process.returncode, 0, output)

    def test_a_signal_while_the_module_is_loaded_sends_what_is_there(self):
        module = self.folder / f"{self.module}.py"
        module.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n" + self.source)
        self.write(train(1))
        self.send("--follow")
        self.assertEqual(self.steps(), [(1, "train/loss")])

    def wait_for(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def test_a_missing_folder_and_a_missing_module_are_said(self):
        present, self.run_folder = self.run_folder, self.folder / "none"
        self.assertIn("no such run folder", self.send(code=1))
        self.run_folder = present
        (self.folder / f"{self.module}.py").write_text("raise ImportError('not here')")
        self.assertIn("pip install", self.send(code=1))


    # How the tracker calls a run that is complete, was stopped, has failed, or runs (None: nothing is said).
    states = {}

    def status(self, state, lock=""):
        (self.run_folder / "status.json").write_text(json.dumps({"state": state}))
        (self.run_folder / "lock").write_text(lock)

    def test_the_state_of_the_run_is_sent(self):
        held = f"pid {os.getpid()} on host {socket.gethostname()}\n"
        gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
        self.write(train(1))
        for state, lock, expected in (("running", held, "running"),
                                      ("running", f"pid {gone} on host {socket.gethostname()}\n", "failed"),
                                      ("running", "", "failed"), ("running", "pid 1 on host elsewhere\n", "running"),
                                      ("failed", "", "failed"), ("stopped", "", "stopped"),
                                      ("complete", "", "complete")):
            self.status(state, lock)
            before = len(self.calls("state"))
            self.append(json.dumps(train(2 + before)) + "\n")
            self.send()
            self.assertEqual([call[1] for call in self.calls("state")[before:]],
                             [self.states[expected]] if self.states[expected] else [], (state, lock))

    def test_a_state_that_comes_after_the_records_is_sent_once(self):
        self.status("running", f"pid {os.getpid()} on host {socket.gethostname()}\n")
        self.write(train(1))
        self.send()
        self.status("failed")
        self.send()
        self.send()
        states = [call[1] for call in self.calls("state")]
        self.assertEqual(states.count(self.states["failed"]), 1)
        self.assertEqual(states[-1], self.states["failed"])
        self.assertEqual(len(self.calls("record")), 1)


class Wandb(Tracker, unittest.TestCase):
    script, module, source = "log_wandb.py", "wandb", WANDB
    states = {"complete": "finished", "stopped": "finished", "failed": "failed", "running": "finished"}


class Mlflow(Tracker, unittest.TestCase):
    script, module, source = "log_mlflow.py", "mlflow", MLFLOW
    states = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "running": None}


if __name__ == "__main__":
    unittest.main()
