"""The limits of the server: bodies, headers, queues, connections and memory, and how it ends.

    serve_limits_test.py SBTRAIN TEXT.jsonl
"""

import json
import select
import signal
import subprocess
import time
import unittest

from served import ALL, PROGRAM, Served, folder, run_tests
from serving import Server, environment


class Limits(Served):
    options = ("--max-length", "2048", "--slots", "2", "--queue", "4", "--body-kib", "64", "--connections", "40",
               "--time-limit", "3")

    def test_body(self):
        self.error(413, "POST", "/v1/completions", {"prompt": "a" * 70000})
        for framing in ("Transfer-Encoding: chunked\r\n\r\n" + "1000\r\n" + "a" * 4096 + "\r\n",
                        "Content-Length: 99999999999\r\n\r\n" + "a" * 4096):
            with self.server.socket() as connection:
                head, body = framing.split("\r\n\r\n", 1)
                connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode())
                try:
                    for _ in range(100):
                        connection.sendall(body.encode())
                except OSError:
                    pass  # refused in the middle
                self.assertIn(b" 413 ", connection.recv(4096)[:20])

    def test_headers(self):
        for head in ("GET /health HTTP/1.1\r\n" + "X: a\r\n" * 100000, "GET /" + "a" * 10 ** 6,
                     "GET /health HTTP/1.1\r\nX: " + "a" * 10 ** 6):
            with self.server.socket() as connection:
                try:
                    connection.sendall(head.encode())
                    answer = connection.recv(4096)
                except OSError:
                    answer = b""
                self.assertFalse(b" 200 " in answer)
        self.assertEqual(self.server.call("GET", "/health")[0], 200)

    def test_queue(self):
        def ask(_):
            return self.server.call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1500, "stop": ["\x00"]})[0]
        statuses = list(ALL.map(ask, range(20)))
        self.assertTrue(set(statuses) <= {200, 429, 504}, statuses)
        self.assertIn(429, statuses)
        self.server.wait_until_idle()

    def test_connections(self):
        open_ones = [self.server.socket() for _ in range(60)]
        time.sleep(0.3)
        answers = 0
        for connection in open_ones[40:]:
            try:
                answers += b" 503 " in connection.recv(4096)
            except OSError:
                pass
        self.assertGreater(answers, 10)
        for connection in open_ones:
            connection.close()
        deadline = time.monotonic() + 20
        status = 0
        while status != 200 and time.monotonic() < deadline:
            try:
                status = self.server.call("GET", "/health")[0]
            except OSError:
                time.sleep(0.01)  # turned away before the request was sent: some of the others are still open
        self.assertEqual(status, 200)

    def test_memory(self):
        result = subprocess.run([PROGRAM, "serve", "--checkpoint", "run", "--slots", "1024", "--max-length",
                                 str(1 << 24), "--port", "0"], cwd=folder.path, env=environment(), timeout=60,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(result.returncode, 8, result.stdout)
        self.assertIn("GiB", result.stdout)
        self.assertIn("fewer --slots or a smaller --max-length", result.stdout)

    def test_length(self):
        for length, code in (("1", 2), ("-1", 2)):
            result = subprocess.run([PROGRAM, "serve", "--checkpoint", "run", "--max-length", length, "--port", "0"],
                                    cwd=folder.path, env=environment(), timeout=60, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, text=True)
            self.assertEqual(result.returncode, code, result.stdout)
            self.assertIn("--max-length", result.stdout)
        server = Server(folder, "--max-length", "2")
        self.assertEqual(server.complete(prompt=[5], max_tokens=1)["usage"]["prompt_tokens"], 1)
        self.assertEqual(server.stop(), 0)

    def test_port_in_use(self):
        result = subprocess.run([PROGRAM, "serve", "--checkpoint", "run", "--port", str(self.server.port)],
                                cwd=folder.path, env=environment(), timeout=60, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn("--port", result.stdout)

    def test_address_of_another_machine(self):
        result = subprocess.run([PROGRAM, "serve", "--checkpoint", "run", "--port", "0", "--host", "192.0.2.1"],
                                cwd=folder.path, env=environment(), timeout=60, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn("choose another with --host", result.stdout)


class Bodies(unittest.TestCase):
    """What bodies may cost."""

    def test_a_body_is_not_awaited_in_vain(self):
        server = Server(folder, "--max-length", "64", variables={"SERVE_TOKEN": "secret"})
        head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n{}\r\n"
        before = server.metrics_of({"Authorization": "Bearer secret"})
        for path, headers, status in (("/v1/completions", "", b"401"),
                                      ("/tokenize", "Authorization: Bearer no\r\n", b"401"),
                                      ("/v1/completions", "Expect: 100-continue\r\n", b"401"), ("/nothing", "", b"404"),
                                      ("/health", "", b"405"), ("/tokenize", "Origin: http://evil.example\r\n", b"403")):
            with server.socket(timeout=10) as connection:
                connection.sendall(head.format(path, headers).encode())
                self.assertEqual(connection.recv(12), b"HTTP/1.1 " + status, (path, headers))
        after = server.metrics_of({"Authorization": "Bearer secret"})
        name = 'sbtrain_request_seconds_count{path="/v1/completions",status="401"}'
        self.assertEqual(after[name] - before.get(name, 0), 2)
        # Whoever has the token is asked for the body.
        body = b'{"prompt": "a"}'
        with server.socket(timeout=10) as connection:
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
                               b"Expect: 100-continue\r\nContent-Length: 15\r\n\r\n")
            self.assertIn(b" 100 ", connection.recv(100))
            connection.sendall(body)
            self.assertIn(b" 200 ", connection.recv(100))
        self.assertEqual(server.stop(), 0)

    def test_all_together(self):
        # Each byte counts as 40: there is room for two of these bodies, of 29 MiB, and not for three.
        server = Server(folder, "--max-length", "4096", "--body-kib", "1024", "--bodies-mib", "64")
        rest = json.dumps({"prompt": "The", "max_tokens": 4000, "temperature": 2, "stream": True,
                           "x": [{}] * 250000}, separators=(",", ":")).encode()
        self.assertLess(len(rest), 1 << 20)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(rest)}\r\n\r\n"
        whole = head.encode() + rest

        def status(request=whole):
            with server.socket() as connection:
                try:
                    connection.sendall(request)
                    return connection.recv(12)[9:]
                except OSError:
                    return b""
        self.assertEqual(status(), b"200")
        deadline = time.monotonic() + 60

        def hold():  # a body of which the server awaits the end; it refuses it while it still has an earlier one
            while time.monotonic() < deadline:
                connection = server.socket()
                try:
                    connection.sendall(whole[:-1])
                    if not select.select([connection], [], [], 0.5)[0]:
                        return connection
                except OSError:
                    pass
                connection.close()
            self.fail("the server keeps no room for a second body")
        held = [hold() for _ in range(2)]
        broken = whole[:-1] + b"x"  # of the same size, and refused with 400: no generation takes the processors
        while (got := status(broken)) != b"503" and time.monotonic() < deadline:
            time.sleep(0.05)  # until the two have been read
        self.assertEqual(got, b"503")
        self.assertEqual(server.call("GET", "/health")[0], 200)
        # The memory is there again once a body has been read, though its answer goes on.
        for connection in held:
            connection.sendall(whole[-1:])
            self.assertIn(b" 200 ", connection.recv(4096))
        self.assertEqual(status(), b"200")
        for connection in held:
            connection.close()
        self.assertEqual(server.stop(), 0)

    def test_plan(self):
        def serve(*options):
            result = subprocess.run([PROGRAM, "serve", "--checkpoint", "run", "--port", "0", *options], cwd=folder.path,
                                    env=environment(), timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                    text=True)
            return result.returncode, result.stdout
        code, text = serve("--bodies-mib", str(1 << 24))
        self.assertEqual(code, 8, text)
        self.assertIn("16384.00 GiB", text)
        self.assertIn("--bodies-mib", text)
        code, text = serve("--bodies-mib", "100", "--body-kib", "4096")
        self.assertEqual(code, 2, text)
        self.assertIn("may take 160 MiB", text)


class Ends(unittest.TestCase):
    def wait_until_accepted(self, server, count):
        """Until the server has as many sequences, of which on a slow machine some may have ended."""
        deadline = time.monotonic() + 60
        accepted = 0
        while accepted < count and time.monotonic() < deadline:
            metrics = server.metrics()
            accepted = sum(metrics[f"sbtrain_sequences_{name}"] for name in ("running", "waiting", "finished_total"))
            time.sleep(0.01)
        self.assertEqual(accepted, count)

    def test_answers_that_have_begun_are_completed(self):
        server = Server(folder, "--max-length", "8192", "--slots", "2", "--drain-time", "100")
        # The likeliest tokens never end the text of this model.
        bodies = [{"prompt": "The", "max_tokens": 8000, "temperature": 0, "stream": i % 2 == 0} for i in range(4)]
        answers = [ALL.submit(server.call, "POST", "/v1/completions", body) for body in bodies]
        idle = server.connect()
        idle.request("GET", "/health")
        idle.getresponse().read()
        self.wait_until_accepted(server, 4)
        self.assertEqual(server.stop(seconds=120), 0)
        for answer in answers:
            status, body = answer.result(10)
            self.assertEqual(status, 200)
            if isinstance(body, str):
                self.assertTrue(body.endswith("data: [DONE]\n\n"), body[-300:])
                self.assertNotIn('"error"', body)

    def test_the_rest_is_cut_off(self):
        server = Server(folder, "--max-length", "65536", "--slots", "2", "--drain-time", "5")
        answers = [ALL.submit(server.call, "POST", "/v1/completions",
                              {"prompt": [9], "max_tokens": 65000, "temperature": 0, "stream": i % 2 == 0})
                   for i in range(60)]
        self.wait_until_accepted(server, 60)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        self.assertEqual(server.call("GET", "/health")[0], 503)
        self.assertEqual(server.call("POST", "/v1/completions", {"prompt": "a"})[0], 503)
        self.assertEqual(server.stop(signal.SIGTERM, 60), 0)
        cut_off = 0
        for answer in answers:
            status, body = answer.result(10)
            self.assertIn(status, (200, 503))
            cut_off += "'error'" in str(body) or '"error"' in str(body)
            self.assertTrue(isinstance(body, dict) or body.endswith("data: [DONE]\n\n"), str(body)[-200:])
        self.assertGreater(cut_off, 0)

    def test_signals(self):
        for number, code in ((signal.SIGINT, 0), (signal.SIGUSR1, 0)):
            self.assertEqual(Server(folder).stop(number), code)


if __name__ == "__main__":
    run_tests()
