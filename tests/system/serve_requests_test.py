"""The server's other endpoints, who may ask, and where a request ends.

    serve_requests_test.py SBTRAIN TEXT.jsonl
"""

import http.client
import json
import random
import re
import socket
import struct
import subprocess
import threading
import time
import unittest

from served import ALL, PROGRAM, Served, folder, request_bytes, run_tests
from serving import Server, environment


class Endpoints(Served):
    def test_state(self):
        self.assertEqual(self.server.call("GET", "/health"), (200, {"status": "ok"}))
        status, models = self.server.call("GET", "/v1/models")
        self.assertEqual((status, models["data"][0]["id"]), (200, "served"))
        self.assertEqual(models["data"][0]["max_model_len"], 256)
        self.assertEqual(self.server.call("GET", "/v1/models/served"), (200, models["data"][0]))
        self.assertIn("'other'", self.error(404, "GET", "/v1/models/other")["message"])
        printed = folder.run("--version").split()  # sbtrain 1.2.3 (revision)
        self.assertEqual(self.server.call("GET", "/version"),
                         (200, {"version": printed[1], "revision": printed[2].strip("()")}))
        before = self.server.metrics()
        self.server.complete(prompt=[1, 2, 3], max_tokens=5, temperature=0)
        after = self.server.metrics()
        self.assertEqual(after["sbtrain_prompt_tokens_total"] - before["sbtrain_prompt_tokens_total"], 3)
        self.assertGreaterEqual(after["sbtrain_generated_tokens_total"], 1)
        self.assertIn('sbtrain_request_seconds_count{path="/v1/completions",status="200"}', after)
        status, page = self.server.call("GET", "/")
        self.assertEqual(status, 200)
        self.assertIn("<html", page)

    def test_head(self):
        connection = self.server.connect()
        connection.request("HEAD", "/health")
        answer = connection.getresponse()
        self.assertEqual((answer.status, answer.read()), (200, b""))
        connection.close()

    def test_tokenizer(self):
        text = "The first of these\n\tis caf\u00e9 \u20ac5 \U0001f600."
        status, answer = self.server.call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        self.assertEqual((status, answer["count"]), (200, len(answer["tokens"])))
        self.assertEqual(self.server.call("POST", "/detokenize", {"tokens": answer["tokens"]}),
                         (200, {"prompt": text}))
        info = self.server.call("GET", "/tokenizer_info")[1]
        for name in ("bos_token", "eos_token"):
            ids = self.server.call("POST", "/tokenize", {"prompt": info[name], "add_special_tokens": False})
            self.assertEqual(len(ids[1]["tokens"]), 1)
        self.error(400, "POST", "/detokenize", {"tokens": [400]})
        self.error(400, "POST", "/detokenize", {"tokens": "a"})
        self.error(400, "POST", "/detokenize", {})
        self.assertEqual(self.error(400, "POST", "/tokenize", {"text": "a"})["param"], "prompt")
        self.assertEqual(self.server.call("POST", "/tokenize", {"prompt": ""})[1]["count"], 0)

    def test_no_such_thing(self):
        self.error(404, "GET", "/nothing")
        self.error(404, "POST", "/v1/chat/completions", {})
        self.error(405, "GET", "/v1/completions")
        self.error(405, "POST", "/health", {})
        self.error(405, "DELETE", "/v1/completions")
        for path, allowed in (("/v1/completions", "POST"), ("/health", "GET, HEAD")):
            connection = self.server.connect()
            connection.request(*(("GET", path) if allowed == "POST" else ("POST", path, "{}")))
            self.assertEqual(connection.getresponse().headers["Allow"], allowed)
            connection.close()

    def test_pages_of_other_sites(self):
        body = {"prompt": "a", "max_tokens": 1}
        self.error(403, "POST", "/v1/completions", body, {"Origin": "http://evil.example"})
        own = f"http://127.0.0.1:{self.server.port}"
        self.assertEqual(self.server.call("POST", "/v1/completions", body, {"Origin": own})[0], 200)

    def test_other_names(self):
        # A page whose name has come to stand for this machine sends that name, as origin too.
        port = self.server.port
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[::2]", "localhost@evil:80"):
            self.error(403, "GET", "/v1/models", None, {"Host": host})
            self.error(403, "POST", "/tokenize", {"prompt": "a"}, {"Host": host, "Origin": f"http://{host}"})
        for host in ("localhost", f"localhost:{port}", "LocalHost", "127.0.0.1", f"127.0.0.1:{port}", "[::1]",
                     f"[::1]:{port}"):
            self.assertEqual(self.server.call("GET", "/v1/models", None, {"Host": host})[0], 200, host)

    def test_nothing_is_cut_or_compressed(self):
        whole = self.server.call("GET", "/v1/models")
        ranges = "bytes=" + ",".join(["0-"] * 2000)
        for headers in ({"Range": "bytes=0-1"}, {"Range": "bytes=5-,0-1"}, {"Range": ranges}, {"rANGE": "bytes=7-3"},
                        {"Range": "lines=0-1"}, {"Range": "bytes=" + "1" * 8000}, {"Range": ""},
                        {"Accept-Encoding": "br, gzip, deflate"}):
            connection = self.server.connect()
            connection.request("GET", "/v1/models", None, headers)
            answer = connection.getresponse()
            self.assertEqual((answer.status, json.loads(answer.read())), whole)
            self.assertIsNone(answer.getheader("Content-Encoding"))
            connection.close()
        with self.server.socket() as connection:  # not even a refusal of what cannot be read
            connection.sendall(b"GET /health HTTP/1.1\r\nAccept-Encoding: br\r\nX: " + b"a" * 9000 + b"\r\n\r\n")
            answer = connection.recv(4096)
            self.assertTrue(answer.startswith(b"HTTP/1.1 400"), answer)
            self.assertNotIn(b"Content-Encoding", answer)
        body = {"prompt": "The", "max_tokens": 20, "temperature": 0}
        text = self.server.complete(**body)["choices"][0]["text"]
        status, answer = self.server.call("POST", "/v1/completions", body, {"Range": ranges, "Accept-Encoding": "br"})
        self.assertEqual((status, answer["choices"][0]["text"]), (200, text))
        status, events = self.server.call("POST", "/v1/completions", {**body, "stream": True},
                                          {"Range": "bytes=0-1", "Accept-Encoding": "br"})
        self.assertEqual((status, events[-14:]), (200, "data: [DONE]\n\n"))

    def test_attention(self):
        status, answer = self.server.call("POST", "/attention", {"prompt": "one two three", "layer": 1, "head": 1})
        self.assertEqual(status, 200, answer)
        count = len(answer["tokens"])
        self.assertEqual([len(row) for row in answer["weights"]], list(range(1, count + 1)))
        for row, rest in zip(answer["weights"], answer["remainder"]):
            self.assertAlmostEqual(sum(row) + rest, 1, places=4)
        self.error(400, "POST", "/attention", {"prompt": "a", "layer": 2})
        self.error(400, "POST", "/attention", {"prompt": "a " * 600})


class Tokens(Served):
    """Clients must send a token."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server(folder, "--max-length", "64", variables={"SERVE_TOKEN": "a secret\n"})

    def test_token(self):
        body = {"prompt": "a", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "a secret"},
                        {"Authorization": "Bearer a secre"}, {"Authorization": "Bearer "},
                        {"Authorization": "Bearer a secreta secret"}):
            self.error(401, "POST", "/v1/completions", body, headers)
            self.error(401, "GET", "/metrics", None, headers)
        right = {"Authorization": "Bearer a secret"}
        self.assertEqual(self.server.call("POST", "/v1/completions", body, right)[0], 200)
        # The scheme, but not the token, has any case.
        self.assertEqual(self.server.call("GET", "/metrics", None, {"Authorization": "bearer a secret"})[0], 200)
        self.error(401, "GET", "/metrics", None, {"Authorization": "Bearer A secret"})
        self.assertEqual(self.server.call("GET", "/health")[0], 200)
        self.assertEqual(self.server.call("GET", "/")[0], 200)
        # A page that does not know the token wins nothing by a name that stands for this machine.
        self.assertEqual(self.server.call("GET", "/v1/models", None, {**right, "Host": "proxy.example"})[0], 200)

    def test_token_file(self):
        (folder.path / "token").write_text("of a file\n")
        server = Server(folder, "--token-file", "token", variables={"SERVE_TOKEN": "other"})
        self.assertEqual(server.call("GET", "/v1/models", None, {"Authorization": "Bearer of a file"})[0], 200)
        self.assertEqual(server.call("GET", "/v1/models", None, {"Authorization": "Bearer other"})[0], 401)
        self.assertEqual(server.stop(), 0)

    def test_impossible_tokens(self):
        # A server that nobody can speak to does not start, and says where it has the token from.
        (folder.path / "lines").write_text("one\ntwo\n")
        (folder.path / "empty").write_text("\n")
        for option, variable, message in (("lines", "", "lines: the token must be one line"),
                                          ("empty", "", "empty: the token is empty; write one"),
                                          ("", " ", "SERVE_TOKEN: the token is empty; unset"),
                                          ("", "a\x07", "SERVE_TOKEN: the token must be one line")):
            result = subprocess.run(
                [PROGRAM, "serve", "--checkpoint", "run", "--port", "0", *(["--token-file", option] if option else [])],
                cwd=folder.path, env={**environment(), "SERVE_TOKEN": variable}, timeout=60, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True)
            self.assertEqual(result.returncode, 2, result.stdout)
            self.assertIn(message, result.stdout)


class SmallStacks(unittest.TestCase):
    def test_long_headers(self):
        # Whatever is matched with a header must not recurse for each of its characters.
        server = Server(folder, "--max-length", "64", stack=1100 << 10)
        for name in ("Range", "Accept-Encoding", "Authorization", "Content-Type", "Host", "Origin", "X-Forwarded-For"):
            for value in ("bytes=" + "1" * 8000, "bytes=" + "0-," * 2600 + "0-", "a, " * 2600,
                          "multipart/form-data; " * 350):
                with server.socket(timeout=20) as connection:
                    connection.sendall(f"GET /health HTTP/1.1\r\n{name}: {value}\r\nHost: localhost\r\n\r\n".encode())
                    self.assertTrue(connection.recv(100).startswith(b"HTTP/1.1 "), (name, value[:30]))
        self.assertEqual(server.stop(), 0)


class ServerAt(Server):
    """A server that listens on another address than the usual one."""

    def __init__(self, host, *options):  # pylint: disable=super-init-not-called
        self.host = host
        self.log = open(folder.path / "server.log", "w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [PROGRAM, "serve", "--checkpoint", "run", "--port", "0", "--host", host, *options], cwd=folder.path,
            env=environment(), stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        self.port = int(line.rsplit(":", 1)[1].split("/")[0])

    def connect(self, timeout=120):
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)


class Names(unittest.TestCase):
    def test_others_may_use_any(self):
        server = ServerAt("0.0.0.0", "--max-length", "64")
        self.assertEqual(server.call("GET", "/v1/models", None, {"Host": "proxy.example"})[0], 200)
        self.assertEqual(server.stop(), 0)

    def test_the_name_that_was_given(self):
        server = ServerAt("127.0.0.2", "--max-length", "64")
        for host, status in ((f"127.0.0.2:{server.port}", 200), ("localhost", 200), ("127.0.0.3", 403)):
            self.assertEqual(server.call("GET", "/v1/models", None, {"Host": host})[0], status, host)
        self.assertEqual(server.stop(), 0)


class Clients(Served):
    """Clients that leave, wait, or send what is no HTTP."""

    options = ("--max-length", "4096", "--slots", "4")
    long = {"prompt": "The", "max_tokens": 4000, "temperature": 2}

    def test_clients_that_leave(self):
        for fields in ({}, {"stream": True}, {"n": 8}, {"n": 8, "stream": True}):
            connection = self.server.socket()
            connection.sendall(request_bytes({**self.long, **fields}))
            if "stream" in fields:
                self.assertIn(b" 200 ", connection.recv(100))
            else:
                time.sleep(0.2)
            # A reset, as of a client that was killed.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        self.assertGreater(self.server.wait_until_idle(10)["sbtrain_sequences_left_total"], 0)

    def test_long_prompts_of_a_harness(self):
        answer = self.server.complete(prompt=[[9] * 2047] * 8, max_tokens=1, temperature=0, echo=True, logprobs=1)
        self.assertEqual([len(c["logprobs"]["tokens"]) for c in answer["choices"]], [2048] * 8)

    def test_half_open(self):
        # What sends nothing, half a line, half a body, or one byte at a time holds nobody else up.
        held = []
        for data in (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"):
            for _ in range(5):
                connection = self.server.socket()
                connection.sendall(data)
                held.append(connection)
        self.assertEqual(len(self.server.complete(prompt="a", max_tokens=3)["choices"]), 1)
        for connection in held:
            connection.close()

    def test_slow_request(self):
        data = request_bytes({"prompt": "a", "max_tokens": 2}, close=True)
        with self.server.socket() as connection:
            for i in range(len(data)):
                connection.sendall(data[i:i + 1])
                time.sleep(0.001)
            self.assertIn(b" 200 ", connection.recv(100))

    def test_no_body_and_impossible_ones(self):
        # Each is answered at once, not after the time in which a body may arrive.
        for headers, status in ((b"", b" 400 "), (b"Content-Length: -5\r\n", b" 400 "),
                                (b"Content-Length: 1x\r\n", b" 400 "), (b"Content-Length: \r\n", b" 400 "),
                                (b"Content-Length: 999999999\r\n", b" 413 "),
                                (b"Content-Length: 99999999999999999999\r\n", b" 413 ")):
            with self.server.socket(timeout=10) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
                self.assertIn(status, connection.recv(100), headers)

    def test_client_that_does_not_read(self):
        with self.server.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request_bytes({"prompt": "The", "max_tokens": 2000, "stream": True, "logprobs": 20}))
            time.sleep(0.5)
            self.assertEqual(len(self.server.complete(prompt="a", max_tokens=3)["choices"]), 1)

    def test_connection_is_reused(self):
        connection = self.server.connect()
        for i in range(20):
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1 + i % 3}))
            answer = connection.getresponse()
            self.assertEqual(answer.status, 200)
            answer.read()
            # Clients that heed the header close their side when it says so.
            timeout, count = re.fullmatch(r"timeout=(\d+), max=(\d+)", answer.headers["Keep-Alive"]).groups()
            self.assertEqual(int(timeout), 60)
            self.assertGreater(int(count), 20)
        connection.close()

    def test_old_version(self):
        for stream in (False, True):
            with self.server.socket() as connection:
                data = request_bytes({"prompt": "a", "max_tokens": 4, "temperature": 0, "stream": stream}, close=True)
                connection.sendall(data.replace(b"HTTP/1.1", b"HTTP/1.0"))
                answer = b""
                while part := connection.recv(4096):
                    answer += part
                self.assertIn(b" 200 ", answer[:20])
                self.assertEqual(b"[DONE]" in answer, stream)

    def test_many_at_once(self):
        statuses = []
        barrier = threading.Barrier(500)

        def ask():
            barrier.wait()
            try:
                statuses.append(self.server.call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})[0])
            except OSError as error:
                statuses.append(str(error))
        threading.stack_size(256 << 10)
        threads = [threading.Thread(target=ask) for _ in range(500)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        self.assertEqual(len(statuses), 500)
        self.assertEqual(set(statuses), {200}, [s for s in statuses if s != 200][:5])

    def test_random_bytes(self):
        rng = random.Random(20261122)
        good = request_bytes({"prompt": "a", "max_tokens": 2, "temperature": 0, "stop": ["x"], "logprobs": 1})
        host = b"HTTP/1.1\r\nHost: localhost\r\n"
        heads = [b"GET / " + host + b"\r\n", b"POST /tokenize " + host + b"Content-Length: 14\r\n\r\n{\"prompt\":\"a\"}",
                 b"POST /v1/completions " + host + b"Content-Type: multipart/form-data; boundary=x\r\n"
                 b"Content-Length: 5\r\n\r\n--x\r\n", b"GET /metrics " + host + b"Range: bytes=0-1,5-\r\n\r\n",
                 b"POST /tokenize " + host + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
                 b"POST /tokenize " + host + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nab\r\n",
                 b"POST /v1/completions " + host + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}", good]

        def mutated():
            data = bytearray(rng.choice(heads))
            for _ in range(rng.randrange(8)):
                at = rng.randrange(len(data) + 1)
                kind = rng.randrange(4)
                if kind == 0:
                    data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(9)))
                elif kind == 1:
                    del data[at:at + rng.randrange(1, 9)]
                elif kind == 2:
                    data[at:at] = rng.choice([b"\r\n", b"\n", b": ", b"%0a", b"%", b"\x00", b"9" * 30, b"[" * 50,
                                              b"chunked", b"HTTP/9.9", b"\xf0\x9f"])
                else:
                    data[at:at] = data[:rng.randrange(20)]
            return bytes(data)

        def send(data):
            with self.server.socket(timeout=60) as connection:
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                except ConnectionError:
                    pass
        list(ALL.map(send, [mutated() for _ in range(600)]))
        self.assertIsNone(self.server.process.poll(), self.server.messages())
        self.assertEqual(len(self.server.complete(prompt="a", max_tokens=3)["choices"]), 1)

    def test_random_fields(self):
        rng = random.Random(5)
        values = [None, True, False, 0, 1, -1, 2 ** 40, 0.5, "", "a", "\u20ac", [], [1, 2], ["a", "b"], [[1], [2]],
                  {}, {"a": 1}, [[[]]], "\x00"]
        names = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "echo", "logprobs",
                 "stream", "stream_options", "best_of", "logit_bias", "suffix", "model", "min_p", "min_tokens",
                 "ignore_eos", "stop_token_ids", "repetition_penalty", "guided_json", "use_beam_search", "bad_words"]

        def ask(fields):
            return self.server.call("POST", "/v1/completions", fields)[0]
        bodies = [{"max_tokens": 3, **{rng.choice(names): rng.choice(values) for _ in range(rng.randrange(5))}}
                  for _ in range(300)]
        statuses = set(ALL.map(ask, bodies))
        self.assertTrue(statuses <= {200, 400}, statuses)
        self.assertEqual(len(statuses), 2)


class Framing(Served):
    """Where a request ends must not be in doubt: a proxy in front could see another request there."""

    def raw(self, data):
        """All that the server says until it closes the connection."""
        answer = b""
        with self.server.socket(timeout=20) as connection:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        return answer

    def test_ambiguous_requests(self):
        body = b'{"prompt": "a"}'
        length = b"Content-Length: 15\r\n"
        host = b"Host: localhost\r\n"
        chunked = b"Transfer-Encoding: chunked\r\n"
        for headers, status in (
                (host + length + length, b"400"), (host + length + b"Content-Length: 3\r\n", b"400"),
                (host + b"content-length: 3\r\n" + length, b"400"), (host + b"Content-Length: 15, 15\r\n", b"400"),
                (host + length + chunked, b"400"), (host + chunked + length, b"400"), (host + host + length, b"400"),
                (host + b"Host: other\r\n" + length, b"400"), (length, b"400"),
                (host + b"Content-Length : 15\r\n", b"400"),
                (host + length + b" folded\r\n", b"400"), (host + b"X: a\n" + length, b"400"),
                (host + b"X: a\rb\r\n" + length, b"400"), (host + b"no colon\r\n" + length, b"400"),
                (host + b": no name\r\n" + length, b"400"), (host + chunked + chunked, b"400"),
                (host + b"Transfer-Encoding: gzip, chunked\r\n", b"501"),
                (host + b"Transfer-Encoding: identity\r\n" + length, b"400"),
                (host + b"Transfer-Encoding: xchunked\r\n", b"501")):
            for method in (b"POST /tokenize", b"GET /health"):
                request = method + b" HTTP/1.1\r\n" + headers + b"\r\n" + body
                answer = self.raw(request + b"GET /health HTTP/1.1\r\n" + host + b"\r\n")
                self.assertTrue(answer.startswith(b"HTTP/1.1 " + status), (headers, answer))
                self.assertEqual(answer.count(b"HTTP/1.1 "), 1, (headers, answer))
                self.assertIn(b"\r\nConnection: close\r\n", answer)
        old = b"POST /tokenize HTTP/1.0\r\n" + host + chunked + b"\r\nf\r\n" + body + b"\r\n0\r\n\r\n"
        self.assertTrue(self.raw(old).startswith(b"HTTP/1.1 400"))

    def test_nothing_follows_chunks(self):
        data = (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"f\r\n{\"prompt\": \"a\"}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = self.raw(data)
        self.assertTrue(answer.startswith(b"HTTP/1.1 200"), answer)
        self.assertEqual(answer.count(b"HTTP/1.1 "), 1, answer)
        self.assertIn(b"\r\nConnection: close\r\n", answer)

    def test_the_end_of_an_answer_is_known(self):
        # Also of what is answered in place of 100 Continue.
        for method in (b"GET /version", b"GET /health", b"POST /tokenize", b"POST /nothing"):
            with self.server.socket(timeout=20) as connection:
                connection.sendall(method + b" HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\n")
                head = connection.recv(4096).split(b"\r\n\r\n")[0]
            self.assertTrue(b"\r\nContent-Length: " in head or b"\r\nConnection: close" in head, head)

    def test_an_old_client_without_a_host(self):
        # HTTP/1.0 knows no Host; the server answers to its own name alone.
        self.assertTrue(self.raw(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 403"))


if __name__ == "__main__":
    run_tests()
