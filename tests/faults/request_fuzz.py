"""Requests that no client should send, to a server that must answer or refuse each of them.

    request_fuzz.py SBTRAIN TEXT.jsonl [--seed N] [--requests N] [--seconds N] [--only NUMBER]

Each request follows from the seed and its number alone, so `--only` sends again the one that a failure names.
FAULT_ROUNDS multiplies the number of requests where neither it nor a time is given. What is expected of the server:

- every answer is well-formed HTTP with one of the statuses that docs/serving.md has, and never 500; a body of JSON
  is JSON, a refusal has OpenAI's shape, and a stream ends with [DONE];
- a request whose end is beyond doubt gets exactly one answer;
- between the batches nothing is left over: no sequence, no connection, no descriptor, no memory, and a good request
  gets the answer that it got in the beginning, to the last digit;
- in the end the server stops with 0, and neither it nor a sanitizer has complained.
"""

import argparse
import concurrent.futures
import json
import os
import random
import re
import socket
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "system"))
from serving import Folder, Server  # noqa: E402  pylint: disable=wrong-import-position

BATCH = 100
SILENCE = 0.2  # seconds without a byte after which a request of which nobody knows the end is ended
PATIENCE = 120  # seconds after which the server hangs
GROWTH = 512 << 20  # bytes by which the server may grow, quarantines of a sanitizer included
OPTIONS = ("--max-length", "256", "--slots", "4", "--body-kib", "64", "--bodies-mib", "64", "--time-limit", "10")
STATUSES = {100, 200, 400, 403, 404, 405, 413, 414, 415, 417, 429, 431, 499, 501, 503, 504}
GOOD = {"prompt": "The first of these", "max_tokens": 24, "temperature": 0, "logprobs": 3, "echo": True}


class Raw:
    """Bytes that stand in JSON as they are."""

    def __init__(self, data):
        self.data = data


def dump(value):
    """JSON of a value; objects are lists of pairs, so that names may come twice."""
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, tuple):
        return b"{" + b",".join(dump(name) + b":" + dump(of) for name, of in value) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(dump(of) for of in value) + b"]"
    return json.dumps(value).encode()


NUMBERS = [b"0", b"1", b"-1", b"2", b"255", b"256", b"257", b"399", b"400", b"65536", b"2147483647", b"2147483648",
           b"4294967296", b"9007199254740993", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808",
           b"18446744073709551615", b"18446744073709551616", b"1" * 400, b"0.5", b"-0.0", b"1e-400", b"1e308", b"1e309",
           b"-1e999", b"1.5", b"5e-324"]
NO_JSON = [b"NaN", b"Infinity", b"-Infinity", b"01", b"1.", b".5", b"+1", b"1e", b"0x10", b"", b"'a'", b'"\\',
           b'"\\u12', b'"\x00"', b'"\x7f\x01"', b'"\\ud800"', b'"\\udc00"', b'"\\ud800\\ud800"', b'"\\ud800a"',
           b'"\\uD83D\\u"', b'"\\x41"', b'"\xff\xfe"', b'"\xc0\xaf"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"',
           b'"\xe2\x82"', b"[" * 30000]
TEXTS = [b'""', b'"a"', b'"The first of these"', b'"\\u0000"', b'"\\ud83d\\ude00"', b'"\xf0\x9f\x98\x80"', b'"</s>"',
         b'"<s></s><unk>"', b'"\xef\xbb\xbfa"', b'"\xe2\x96\x81"', b'"' + b"\xcc\x81" * 3000 + b'"',
         b'"' + b"a" * 20000 + b'"', b'"' + b" " * 20000 + b'"', b'"' + b"\\n" * 9000 + b'"']
NAMES = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "echo", "logprobs", "stream",
         "stream_options", "best_of", "logit_bias", "suffix", "model", "min_p", "min_tokens", "ignore_eos",
         "stop_token_ids", "repetition_penalty", "guided_json", "use_beam_search", "bad_words", "tokens", "layer",
         "head", "add_special_tokens", "include_usage", "response_format", "presence_penalty", "", "\x00", "x" * 5000]


def any_value(rng, depth=0):
    kind = rng.randrange(20)
    if kind < 7:
        return Raw(rng.choice(NUMBERS))
    if kind < 13:
        return Raw(rng.choice(TEXTS))
    if kind < 15:
        return rng.choice([None, True, False])
    if kind == 15:
        return Raw(rng.choice(NO_JSON))
    if kind < 18 and depth < 3:
        return [any_value(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 3, 17, 65]))]
    if kind == 18 and depth < 3:
        return tuple((rng.choice(NAMES), any_value(rng, depth + 1)) for _ in range(rng.randrange(4)))
    deep = rng.choice([4, 8, 9, 100, 5000, 30000])
    inner = rng.choice([b"", b"1", b'"a"'])
    return Raw(rng.choice([b"[" * deep + inner + b"]" * deep, b'{"a":' * (deep // 4) + b"1" + b"}" * (deep // 4),
                           b"[" * deep]))


def tokens(rng):
    return [rng.randrange(400) for _ in range(rng.choice([0, 1, 5, 5, 60, 60, 255, 256, 300]))]


def fields_of(rng, path):
    """Fields that the endpoint takes, most of the time."""
    text = rng.choice(["The", "", "It is the one that\n", "caf\u00e9 \U0001f600", "a" * 300])
    if path == "/tokenize":
        return [["prompt", text], ["add_special_tokens", rng.random() < 0.5]]
    if path == "/detokenize":
        return [["tokens", tokens(rng)]]
    if path == "/attention":
        return [rng.choice([["prompt", text], ["tokens", tokens(rng)]]), ["layer", rng.randrange(3)],
                ["head", rng.randrange(3)]]
    fields = [["prompt", rng.choice([text, tokens(rng), [text, "A"], [tokens(rng), tokens(rng)]])],
              ["max_tokens", rng.choice([0, 1, 1, 5, 5, 5, 20, 40, 255])]]
    for name, values in (("temperature", [0, 0.7, 30]), ("top_p", [0, 0.5, 1]), ("top_k", [0, 1, 500]),
                         ("n", [1, 3, 16]), ("stop", ["e", ["a", "the"], [" "] * 16]),
                         ("seed", [0, -5, 2 ** 63 - 1]), ("echo", [True]),
                         ("logprobs", [0, 1, 20]), ("stream", [True, True, False]), ("min_p", [0.1]),
                         ("stream_options", [(("include_usage", True),)]), ("min_tokens", [1, 30]),
                         ("ignore_eos", [True]), ("stop_token_ids", [[2], list(range(64))]),
                         ("repetition_penalty", [0.01, 1.3, 100])):
        if rng.random() < 0.25:
            fields.append([name, rng.choice(values)])
    return fields


def mutated(rng, data, times):
    """`data` with some bytes put in, taken out or changed."""
    data = bytearray(data)
    for _ in range(times):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        elif kind == 1:
            del data[at:at + rng.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = rng.choice([b"\r\n", b"\n", b"\r", b": ", b"%0a", b"%", b"%zz", b"\x00", b"9" * 30,
                                      b"[" * 50, b" ",
                                      b"\t", b"chunked", b"HTTP/9.9", b"\xf0\x9f", b"\r\n\r\n", b"../", b"?a=b&",
                                      b"#", b'"'])
        elif kind == 3:
            data[at:at] = data[rng.randrange(len(data) + 1):][:rng.randrange(1, 40)]
        elif kind == 4 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        else:
            del data[at:]
    return bytes(data)


def body_of(rng, path):
    fields = fields_of(rng, path)
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 4])):
        kind = rng.randrange(4)
        if kind == 0 and fields:
            rng.choice(fields)[1] = any_value(rng)
        elif kind == 1:
            fields.insert(rng.randrange(len(fields) + 1), [rng.choice(NAMES), any_value(rng)])
        elif kind == 2 and fields:
            fields.append(list(rng.choice(fields)))  # a name twice
        elif fields:
            del fields[rng.randrange(len(fields))]
    data = dump(tuple(map(tuple, fields)))
    if rng.random() < 0.1:
        data = mutated(rng, data, rng.randrange(1, 5))
    if rng.random() < 0.03:
        data = rng.choice([b"", b"null", b"[]", b"1", b'"a"', b"\xef\xbb\xbf{}", data + b"\x00", data + data,
                           b" " * 70000, data * 200])
    return data


HEADERS = [b"Accept: */*", b"Accept-Encoding: br, gzip, deflate", b"Range: bytes=0-1,5-",
           b"Range: bytes=" + b"0-," * 900 + b"0-",
           b"Origin: http://evil.example", b"Origin: null", b"Authorization: Bearer a", b"Authorization: Basic !",
           b"Expect: 100-continue", b"Expect: something", b"Connection: keep-alive",
           b"Connection: upgrade\r\nUpgrade: h2c",
           b"Content-Type: application/json", b"Content-Type: multipart/form-data; boundary=x",
           b"Content-Encoding: gzip",
           b"Content-Type: application/x-www-form-urlencoded", b"Keep-Alive: timeout=-1", b"X: " + b"a" * 5000,
           b"\r\n".join(b"X-%d: a" % i for i in range(60)), b"If-None-Match: *", b"X-Forwarded-For: \xff\xfe",
           b"Cookie: a=b; c", b"X:", b"TE: trailers", b"Via: 1.0 a", b"Content-Length: 0", b"Trailer: Content-Length"]


def chunked(rng, body, broken):
    """The body in chunks; where `broken`, with sizes and ends that are none."""
    data = b""
    at = 0
    while at < len(body) and data.count(b"\n") < 400:
        size = rng.choice([1, 2, 7, 50, 4096, len(body)])
        part = body[at:at + size]
        at += len(part)
        length = b"%x" % len(part)
        if broken and rng.random() < 0.3:
            length = rng.choice([b"", b"-1", b"0x5", b"g", b"ffffffffffffffff", b"7fffffffffffffff", b"1" * 40, b" 5",
                                 b"0", b"%x" % (len(part) + 1), b"00000000000000000001", b"5 ", b"5;" + b"a" * 3000])
        elif rng.random() < 0.1:
            length += b";name=value"
        after = rng.choice([b"", b"\n", b"xx"]) if broken and rng.random() < 0.2 else b"\r\n"
        data += length + b"\r\n" + part + after
    end = b"0\r\n" + (b"X: a\r\n" if rng.random() < 0.1 else b"") + b"\r\n"
    return data + (rng.choice([b"", b"0\r\n", b"\r\n", end]) if broken else end)


class Request:
    """What is sent, in pieces, and how the client then behaves."""

    def __init__(self, rng):
        self.whole = True  # where it ends is beyond doubt, and that it is the last one
        self.data = b"".join(self.one(rng, last) for last in self.lasts(rng))
        if rng.random() < 0.2:
            self.whole = False
            self.data = mutated(rng, self.data, rng.randrange(1, 6))
        self.head = b"HEAD" in self.data
        self.pieces = self.split(rng)
        # "half": says that nothing follows; "reset": is killed, having sent a part or read a part of the answer.
        self.end = rng.choice(["wait"] * 12 + ["half", "reset", "leave"])
        self.sent = rng.randrange(len(self.data) + 1) if self.end == "reset" else len(self.data)
        self.read = rng.choice([0, 1, 100, 3000])

    def lasts(self, rng):
        count = rng.choice([1] * 12 + [2, 3])
        self.whole = count == 1
        return [i + 1 == count for i in range(count)]

    def one(self, rng, last):
        post = ["/v1/completions"] * 6 + ["/tokenize", "/detokenize", "/attention"]
        get = ["/health", "/metrics", "/v1/models", "/v1/models/served", "/version", "/tokenizer_info", "/"]
        if rng.random() < 0.85:
            path = rng.choice(post)
            method = "POST"
        else:
            path = rng.choice(get)
            method = rng.choice(["GET", "GET", "HEAD"])
        if rng.random() < 0.05:
            method = rng.choice(["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "post", "PRI",
                                 "POST", ""])
            self.whole = False  # of a body that follows, the server cannot know
        body = body_of(rng, path) if method == "POST" else b""
        target = path.encode()
        if rng.random() < 0.05:
            target = rng.choice([target + b"?a=%00&b=%ff", b"/%2e%2e/" + target, b"http://localhost" + target, b"*",
                                 target + b"/",
                                 target + b"%", b"/" + b"a" * 3000, target.replace(b"o", b"%6f"),
                                 b"/v1/models/\xff%0d%0aX: a"])
        host = rng.choice([b"Host: localhost"] * 60 + [b"Host: evil.example", b"Host: ", b"Host: [::1]:80",
                                                       b"Host: a@b:c"])
        headers = [host] + ([b"Connection: close"] if last else [])
        if rng.random() < 0.25:
            more = [rng.choice(HEADERS) for _ in range(rng.randrange(1, 4))]
            self.whole = self.whole and not any(re.match(rb"Content-|Connection|Expect", header) for header in more)
            headers += more
        kind = rng.randrange(10)
        if method != "POST" and kind < 8:
            return self.join(method, target, headers, b"", rng)
        if kind < 6:
            headers.append(b"Content-Length: %d" % len(body))
        elif kind < 9:
            broken = kind == 8
            self.whole = self.whole and not broken
            headers.append(b"Transfer-Encoding: chunked")
            body = chunked(rng, body, broken)
        else:
            self.whole = False
            headers.append(rng.choice([b"Content-Length: %d" % rng.choice([len(body) + 1, max(0, len(body) - 3),
                                                                           2 ** 63, 2 ** 64]),
                                       b"Content-Length: 1, 1", b"Content-Length: +5", b"Content-Length: 0x10", b"X: a",
                                       b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity",
                                       b"Content-Length: 5\r\nTransfer-Encoding: chunked",
                                       b"Content-Length: \xd9\xa1"]))
        return self.join(method, target, headers, body, rng)

    def join(self, method, target, headers, body, rng):
        version = rng.choice([b"HTTP/1.1"] * 20 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.10", b"http/1.1"])
        self.whole = self.whole and version == b"HTTP/1.1"
        rng.shuffle(headers)
        return b"\r\n".join([method.encode() + b" " + target + b" " + version, *headers]) + b"\r\n\r\n" + body

    def split(self, rng):
        if rng.random() < 0.8 or len(self.data) < 2:
            return [self.data]
        cuts = sorted(rng.randrange(len(self.data)) for _ in range(rng.randrange(1, 6)))
        return [self.data[a:b] for a, b in zip([0] + cuts, cuts + [len(self.data)])]


# ---- Sending, and what comes back

def exchange(server, request):
    """The bytes of the answer, and whether the connection ended in order."""
    answer = b""
    with server.socket(timeout=PATIENCE) as connection:
        try:
            left = request.sent
            for piece in request.pieces:
                connection.sendall(piece[:left])
                left -= min(left, len(piece))
                if len(request.pieces) > 1:
                    time.sleep(0.002)
            if request.end == "reset":
                return reset(connection)
            if request.end == "half":
                connection.shutdown(socket.SHUT_WR)
            if not request.whole and request.end != "half":
                connection.settimeout(SILENCE)
            while True:
                try:
                    part = connection.recv(65536)
                except socket.timeout as silence:
                    if connection.gettimeout() != SILENCE:
                        raise AssertionError(f"no answer within {PATIENCE} s") from silence
                    connection.settimeout(PATIENCE)
                    connection.shutdown(socket.SHUT_WR)
                    request.end = "half"
                    continue
                if not part:
                    return answer, True
                answer += part
                if request.end == "leave" and len(answer) >= request.read:
                    return reset(connection)
        except (ConnectionError, OSError) as error:
            if isinstance(error, socket.timeout):
                raise AssertionError(f"no byte was taken or sent within {PATIENCE} s") from error
            return answer, False  # refused before all was sent


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return b"", False


class Cut(Exception):
    """The answer ends too early."""


def take(data, until):
    at = data.find(until)
    if at < 0:
        raise Cut(data[:200])
    return data[:at], data[at + len(until):]


def unchunked(data):
    body = b""
    while True:
        size, data = take(data, b"\r\n")
        assert re.fullmatch(rb"[0-9a-fA-F]{1,8}", size), ("a chunk of what size?", size)
        length = int(size, 16)
        if len(data) < length + 2:
            raise Cut(data[:200])
        assert data[length:length + 2] == b"\r\n", data[length:length + 20]
        body += data[:length]
        data = data[length + 2:]
        if length == 0:
            return body, data


def no_number(name):
    raise AssertionError(f"JSON has no {name}")


def check_body(status, kind, body):
    text = body.decode()  # every answer is UTF-8
    if kind.startswith("application/json"):
        content = json.loads(text, parse_constant=no_number)
        if status >= 400:
            assert set(content["error"]) == {"message", "type", "param", "code"}, content
            assert content["error"]["code"] == status, content
    elif kind == "text/event-stream":
        assert status == 200, status
        events = text.split("\n\n")
        assert events[-1] == "", events[-1]
        if events[-2:-1] != ["data: [DONE]"]:
            raise Cut(events[-2:])
        for event in events[:-2]:
            assert event.startswith("data: "), event
            json.loads(event[len("data: "):], parse_constant=no_number)
    else:
        assert status == 200 and kind.split(";")[0] in ("text/html", "text/plain"), (status, kind)


def one_answer(data, to_head):
    """The status of the first answer, and what follows it."""
    head, data = take(data, b"\r\n\r\n")
    lines = head.split(b"\r\n")
    match = re.fullmatch(rb"HTTP/1\.1 (\d\d\d) [ -~]*", lines[0])
    assert match, lines[0]
    status = int(match.group(1))
    assert status in STATUSES, head
    headers = {}
    for line in lines[1:]:
        field = re.fullmatch(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([ -~\t\x80-\xff]*)", line)
        assert field, line
        headers.setdefault(field.group(1).lower().decode(), []).append(field.group(2).decode())
    for name in ("content-length", "transfer-encoding", "content-type"):
        assert len(headers.get(name, [])) <= 1, headers
    if status == 100:
        return status, data
    assert not ("content-length" in headers and "transfer-encoding" in headers), headers
    assert "content-encoding" not in headers, headers
    if to_head and (not data or data.startswith(b"HTTP/1.1 ")):
        return status, data
    if "transfer-encoding" in headers:
        assert headers["transfer-encoding"] == ["chunked"], headers
        body, data = unchunked(data)
    elif "content-length" in headers:
        length = int(headers["content-length"][0])
        if len(data) < length:
            raise Cut(data[:200])
        body, data = data[:length], data[length:]
    else:  # to a client of HTTP/1.0
        body, data = data, b""
    check_body(status, headers.get("content-type", [""])[0], body)
    return status, data


def check(request, answer, in_order):
    """The statuses of the answers. Raises AssertionError."""
    statuses = []
    try:
        while answer:
            status, answer = one_answer(answer, request.head)
            statuses.append(status)
    except Cut as cut:
        assert not in_order or request.end == "half", f"the answer is cut off after {cut}"
    # Having said that nothing follows, a client may be taken for one that has left.
    if request.whole and request.end == "wait" and in_order:
        final = [status for status in statuses if status != 100]
        assert len(final) == 1, f"answers {statuses}"
        assert final != [499], "a client that waits is taken for one that has left"
    return statuses


# ---- The server between the batches

class Watch:
    """What the server is at rest."""

    def __init__(self, server):
        self.server = server
        self.expected = server.complete(**GOOD)["choices"]
        self.descriptors = None
        self.memory = None

    def measure(self):
        proc = Path("/proc") / str(self.server.process.pid)
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return len(os.listdir(proc / "fd")), int(status["VmRSS"].split()[0]) << 10

    def check(self):
        assert self.server.process.poll() is None, f"the server has ended: {self.server.process.poll()}"
        messages = self.server.messages()
        for word in ("Sanitizer", "runtime error", "terminate called"):
            assert word not in messages, messages[-5000:]
        metrics = self.server.wait_until_idle(60)
        assert self.server.complete(**GOOD)["choices"] == self.expected, "a good request gets another answer"
        deadline = time.monotonic() + 30
        while metrics["sbtrain_connections"] > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
            metrics = self.server.metrics()
        assert metrics["sbtrain_connections"] <= 1, f"{metrics['sbtrain_connections']} connections are open"
        descriptors, memory = self.measure()
        if self.descriptors is None:
            self.descriptors, self.memory = descriptors, memory
        assert descriptors <= self.descriptors + 4, f"{descriptors} descriptors, {self.descriptors} in the beginning"
        assert memory <= self.memory + GROWTH, f"{memory >> 20} MiB, {self.memory >> 20} MiB in the beginning"
        return memory


def send(server, seed, number):
    request = Request(random.Random(f"{seed}:{number}"))
    try:
        answer = b""
        answer, in_order = exchange(server, request)
        return check(request, answer, in_order)
    except Exception as error:  # noqa: B902  whatever it is, the request that led to it must be known
        data = request.data if len(request.data) < 3000 else request.data[:2000] + b" ... " + request.data[-500:]
        raise AssertionError(f"request {number} of seed {seed} ({request.end}, whole: {request.whole}): {error!r}\n"
                             f"sent: {data!r}\nanswer: {answer[:2000]!r}") from error


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("text", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    if given.requests is None and given.seconds is None:
        given.requests = 500 * max(1, int(os.environ.get("FAULT_ROUNDS", "1")))
    return given


def run(server, given):
    watch = Watch(server)
    seen = {}
    end = time.monotonic() + given.seconds if given.seconds else None
    number = 0
    memory = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as clients:
        while time.monotonic() < end if end else number < given.requests:
            for statuses in clients.map(lambda n: send(server, given.seed, n), range(number, number + BATCH)):
                for status in statuses or [0]:
                    seen[status] = seen.get(status, 0) + 1
            number += BATCH
            memory = watch.check()
    answers = ", ".join(f"{count} of {status}" for status, count in sorted(seen.items()) if status)
    print(f"{number} requests of seed {given.seed}, {seen.get(0, 0)} without an answer; answers: {answers}; "
          f"the server has {memory >> 20} MiB, {watch.memory >> 20} MiB after the first {BATCH}")
    for status in (200, 400, 404, 413):
        assert status in seen, f"no answer of {status}: the requests do not reach what they are meant to"


def main():
    given = arguments()
    # What is freed stays for a while, so that its use is found; not so much that a leak drowns in it.
    asan = os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=64"
    folder = Folder(given.program, given.text)
    try:
        server = Server(folder, *OPTIONS, variables={"ASAN_OPTIONS": asan.lstrip(":")})
        try:
            if given.only is not None:
                print(send(server, given.seed, given.only))
                Watch(server).check()
            else:
                run(server, given)
        except BaseException:
            print(server.messages()[-5000:], file=sys.stderr)
            server.process.kill()
            raise
        code = server.stop()
        assert code == 0, f"the server ended with {code}"
    finally:
        folder.close()


if __name__ == "__main__":
    main()
