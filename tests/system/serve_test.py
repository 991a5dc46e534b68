"""The server: every endpoint, and what clients may do to it.

    serve_test.py SBTRAIN TEXT.jsonl
"""

import concurrent.futures
import http.client
import json
import math
import random
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

from serving import Folder, Server, environment

PROGRAM, TEXT = (str(Path(path).resolve()) for path in sys.argv[1:3])
ALL = concurrent.futures.ThreadPoolExecutor(max_workers=64)


def setUpModule():
    global folder
    folder = Folder(PROGRAM, TEXT)


def tearDownModule():
    folder.close()


class Served(unittest.TestCase):
    """One server for all tests of a class."""

    options = ("--max-length", "256", "--slots", "4")

    @classmethod
    def setUpClass(cls):
        cls.server = Server(folder, *cls.options)

    @classmethod
    def tearDownClass(cls):
        code = cls.server.stop()
        assert code == 0, (code, cls.server.messages())

    def error(self, expected, method, path, body=None, headers=None):
        status, answer = self.server.call(method, path, body, headers)
        self.assertEqual(status, expected, answer)
        self.assertEqual(set(answer["error"]), {"message", "type", "param", "code"})
        return answer["error"]


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
        for headers in ({"Range": "bytes=0-1"}, {"Range": "bytes=5-,0-1"}, {"Range": ranges},
                        {"Accept-Encoding": "br, gzip, deflate"}):
            connection = self.server.connect()
            connection.request("GET", "/v1/models", None, headers)
            answer = connection.getresponse()
            self.assertEqual((answer.status, json.loads(answer.read())), whole)
            self.assertIsNone(answer.getheader("Content-Encoding"))
            connection.close()
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


class Completions(Served):
    def ids(self, text):
        return self.server.call("POST", "/tokenize", {"prompt": text})[1]["tokens"]

    def test_what_generate_writes(self):
        for prompt in ("The", "It is the one that", "", "\n\n"):
            written = folder.run("generate", "--checkpoint", "run", "--prompt", prompt, "--temperature", "0",
                                 "--max-tokens", "40")
            answer = self.server.complete(prompt=prompt, temperature=0, max_tokens=40)
            self.assertEqual(prompt + answer["choices"][0]["text"] + "\n", written)

    def test_same_whatever_else_runs(self):
        requests = [{"prompt": [5 + i, 7, 11 + i], "max_tokens": 20 + i, "temperature": (i % 2) / 2, "seed": i,
                     "logprobs": 3, "echo": i % 3 == 0} for i in range(24)]
        alone = [self.server.complete(**request)["choices"] for request in requests]
        together = list(ALL.map(lambda request: self.server.complete(**request)["choices"], requests))
        self.assertEqual(alone, together)

    def test_echo_and_logprobs(self):
        ids = self.ids("The first of these is the one that we know.")
        answer = self.server.complete(prompt=[ids, ids[:4]], max_tokens=1, temperature=0, logprobs=1, echo=True,
                                      seed=1234)
        self.assertEqual([choice["index"] for choice in answer["choices"]], [0, 1])
        for choice, prompt in zip(answer["choices"], (ids, ids[:4])):
            logprobs = choice["logprobs"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                self.assertEqual(len(logprobs[name]), len(prompt) + 1, name)
            self.assertIsNone(logprobs["token_logprobs"][0])
            for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:]):
                self.assertLessEqual(value, max(top.values()))
                self.assertTrue(math.isfinite(value))
            # The drawn token is the likeliest one: the same float stands in both lists.
            self.assertEqual(logprobs["token_logprobs"][-1], max(logprobs["top_logprobs"][-1].values()))
        first, second = (choice["logprobs"]["token_logprobs"] for choice in answer["choices"])
        for a, b in zip(first[1:4], second[1:4]):
            self.assertAlmostEqual(a, b, places=4)

    def test_logprobs_are_what_eval_measures(self):
        text = "The first of these is the one that we know, and it has no name of its own."
        (folder.path / "doc.jsonl").write_text(json.dumps({"text": text}) + "\n")
        folder.run("prepare", "--input", "doc.jsonl", "--tokenizer", "tokenizer.model", "--output", "doc.h5")
        measured = json.loads(folder.run("eval", "--checkpoint", "run", "--data", "doc.h5", "--json",
                                         "--sequence-length", "200"))
        eos = self.server.call("GET", "/tokenizer_info")[1]["eos_token"]
        ids = self.ids(text) + self.ids(eos)
        answer = self.server.complete(prompt=ids, max_tokens=0, logprobs=0, echo=True)
        scored = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
        self.assertEqual(len(scored), measured["tokens"])
        self.assertAlmostEqual(-sum(scored) / len(scored), measured["loss"], places=5)

    def test_offsets_and_names(self):
        text = "caf\u00e9 \u20ac5 \U0001f600 and"
        answer = self.server.complete(prompt=text, max_tokens=3, temperature=0, logprobs=2, echo=True)
        logprobs = answer["choices"][0]["logprobs"]
        shown = answer["choices"][0]["text"]
        self.assertTrue(shown.startswith(text))
        for name, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
            if not name.startswith("bytes:") and not name.startswith("<"):
                self.assertEqual(shown[offset:offset + len(name)], name)
        self.assertTrue(any(name.startswith("bytes:") for name in logprobs["tokens"]))

    def test_bytes_that_are_no_characters(self):
        # Offsets are those of the shown text, where each byte that is no character is one U+FFFD.
        stray, euro, b = self.ids("\u20ac")[1:], self.ids("\u20ac"), self.ids("b")
        self.assertEqual(len(euro), 3)
        for prompt, expected in ((stray + b, "\ufffd\ufffdb"), (euro[:2] + b, "\ufffd\ufffdb"),
                                 (euro[:2], "\ufffd\ufffd"), (euro + stray[1:] + b, "\u20ac\ufffdb")):
            choice = self.server.complete(prompt=prompt, max_tokens=0, logprobs=0, echo=True)["choices"][0]
            self.assertEqual(choice["text"], expected)
            if prompt[-1:] == b:
                self.assertEqual(choice["logprobs"]["text_offset"][-1], expected.index("b"))

    def test_n_and_seed(self):
        def texts(**fields):
            answer = self.server.complete(prompt=["The", "A"], n=3, max_tokens=12, temperature=1.5, **fields)
            self.assertEqual([c["index"] for c in answer["choices"]], list(range(6)))
            return [c["text"] for c in answer["choices"]]
        self.assertEqual(texts(seed=5), texts(seed=5))
        self.assertNotEqual(texts(seed=5), texts(seed=6))
        self.assertNotEqual(texts(), texts())
        self.assertGreater(len(set(texts(seed=5)[:3])), 1)
        one = self.server.complete(prompt="A", n=1, max_tokens=12, temperature=1.5, seed=6)["choices"][0]["text"]
        self.assertEqual(one, texts(seed=5)[4])

    def test_stop_strings(self):
        whole = self.server.complete(prompt="The", temperature=0, max_tokens=40)["choices"][0]["text"]
        self.assertGreater(len(whole), 12)
        for begin in range(2, 9):
            stop = whole[begin:begin + 3]
            expected = whole[:whole.index(stop)]
            for stops in (stop, [stop], ["\x00never", stop]):
                choice = self.server.complete(prompt="The", temperature=0, max_tokens=40, stop=stops)["choices"][0]
                self.assertEqual((choice["text"], choice["finish_reason"]), (expected, "stop"))
            events = self.server.stream(prompt="The", temperature=0, max_tokens=40, stop=stop)
            self.assertEqual("".join(e["choices"][0]["text"] for e in events), expected)

    def names(self):
        """The name of each token."""
        choices = self.server.complete(prompt=[[i] for i in range(400)], max_tokens=0, logprobs=0, echo=True)["choices"]
        return [choice["logprobs"]["tokens"][0] for choice in choices]

    def test_stop_tokens(self):
        request = {"prompt": "The", "temperature": 0, "max_tokens": 40}
        tokens = self.server.complete(**request, logprobs=0)["choices"][0]["logprobs"]["tokens"]
        # A letter may be a token of its own and one of the bytes.
        stops = [token for token, name in enumerate(self.names()) if name == tokens[7]]
        answer = self.server.complete(**request, logprobs=0, stop_token_ids=stops + [399])
        choice = answer["choices"][0]
        at = tokens.index(tokens[7])
        self.assertEqual((choice["finish_reason"], choice["logprobs"]["tokens"]), ("stop", tokens[:at + 1]))
        self.assertEqual(choice["text"], "".join(tokens[:at]))  # it is not a part of the text
        self.assertEqual(answer["usage"]["completion_tokens"], at + 1)
        later = self.server.complete(**request, logprobs=0, stop_token_ids=stops, min_tokens=at + 5)["choices"][0]
        self.assertEqual(later["logprobs"]["tokens"][:at], tokens[:at])
        self.assertNotIn(tokens[7], later["logprobs"]["tokens"][:at + 5])

    def test_the_end_of_the_document(self):
        request = {"prompt": "The", "max_tokens": 100, "temperature": 1.5}
        for seed in range(100):
            answer = self.server.complete(**request, seed=seed)
            drawn = answer["usage"]["completion_tokens"]
            if answer["choices"][0]["finish_reason"] == "stop" and 1 < drawn < 60:
                break
        self.assertLess(drawn, 60)
        text = answer["choices"][0]["text"]
        on = self.server.complete(**request, seed=seed, ignore_eos=True, logprobs=0)
        self.assertEqual((on["usage"]["completion_tokens"], on["choices"][0]["finish_reason"]), (100, "length"))
        self.assertTrue(on["choices"][0]["text"].startswith(text))
        self.assertIn(self.server.call("GET", "/tokenizer_info")[1]["eos_token"], on["choices"][0]["logprobs"]["tokens"])
        more = self.server.complete(**request, seed=seed, min_tokens=drawn + 20)
        self.assertGreaterEqual(more["usage"]["completion_tokens"], drawn + 20)
        whole = self.server.complete(prompt="The", temperature=0, max_tokens=40)["choices"][0]["text"]
        stop = whole[4:7]
        first = self.server.complete(prompt="The", temperature=0, max_tokens=40, stop=stop)
        passed = self.server.complete(prompt="The", temperature=0, max_tokens=40, stop=stop,
                                      min_tokens=first["usage"]["completion_tokens"])["choices"][0]["text"]
        self.assertGreater(len(passed), len(first["choices"][0]["text"]))
        self.assertTrue(whole.startswith(passed))

    def test_what_is_drawn(self):
        def text(**fields):
            return self.server.complete(prompt="The", max_tokens=30, **fields)["choices"][0]["text"]
        likeliest = text(temperature=0)
        self.assertEqual(text(temperature=3, min_p=1, seed=3), likeliest)
        self.assertEqual(text(temperature=3, min_p=0, seed=3), text(temperature=3, seed=3))
        self.assertNotEqual(text(temperature=3, min_p=0.3, seed=3), text(temperature=3, seed=3))
        self.assertEqual(text(temperature=0, repetition_penalty=1), likeliest)
        self.assertNotEqual(text(temperature=0, repetition_penalty=1.5), likeliest)
        self.assertEqual(text(temperature=0, repetition_penalty=1.5), text(temperature=0, repetition_penalty=1.5))
        # Probabilities that are shown are the model's.
        one = self.server.complete(prompt="The", max_tokens=1, temperature=0, logprobs=3)["choices"][0]["logprobs"]
        other = self.server.complete(prompt="The", max_tokens=1, temperature=0, logprobs=3, repetition_penalty=1.5,
                                     min_p=0.2)["choices"][0]["logprobs"]
        self.assertEqual(one["top_logprobs"][0], {**other["top_logprobs"][0], **one["top_logprobs"][0]})

    def test_streams(self):
        for fields in ({"temperature": 0}, {"temperature": 2, "seed": 9}, {"temperature": 2, "seed": 9, "echo": True},
                       {"temperature": 0, "logprobs": 2, "echo": True}, {"prompt": [[5], [6, 7]], "n": 2, "seed": 1}):
            request = {"prompt": "The \u20ac", "max_tokens": 30, **fields}
            whole = self.server.complete(**request)
            events = self.server.stream(**request, stream_options={"include_usage": True})
            self.assertEqual(events[-1]["usage"], whole["usage"])
            self.assertEqual({event["usage"] for event in events[:-1]}, {None})
            for choice in whole["choices"]:
                mine = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
                self.assertEqual("".join(c["text"] for c in mine), choice["text"])
                self.assertEqual([c["finish_reason"] for c in mine],
                                 [None] * (len(mine) - 1) + [choice["finish_reason"]])
                if "logprobs" in fields:
                    for name, values in choice["logprobs"].items():
                        self.assertEqual([v for c in mine for v in c["logprobs"][name]], values)

    def test_utf8(self):
        # A hot model writes bytes at random: whatever comes is valid, and the same in a stream.
        for seed in range(5):
            request = {"prompt": "\U0001f600", "max_tokens": 60, "temperature": 30, "seed": seed}
            whole = self.server.complete(**request)["choices"][0]["text"]
            events = self.server.stream(**request)
            self.assertEqual("".join(e["choices"][0]["text"] for e in events), whole)

    def test_many_logprobs(self):
        body = {"prompt": [9] * 200, "max_tokens": 56, "temperature": 0, "echo": True, "logprobs": 20}
        for fields in ({"n": 1024}, {"n": 196}, {"n": 196, "stream": True},
                       {"prompt": [[9] * 200] * 16, "n": 13}):  # of 256 * 21 entries each, where 2^20 are possible
            self.assertEqual(self.error(400, "POST", "/v1/completions", {**body, **fields})["param"], "logprobs")
        choices = self.server.complete(**{**body, "n": 100, "logprobs": 0})["choices"]
        self.assertEqual(len(choices), 100)

    def test_the_context_ends(self):
        answer = self.server.complete(prompt=[9] * 200, max_tokens=56, temperature=0)
        self.assertLessEqual(answer["usage"]["total_tokens"], 256)
        self.assertIn("context", self.error(400, "POST", "/v1/completions",
                                            {"prompt": [9] * 200, "max_tokens": 57})["message"])

    def test_refusals(self):
        wrong = [({"prompt": 5}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
                 ({"prompt": [400]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [1.5]}, "prompt"),
                 ({"prompt": [1, "a"]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [[1], 2]}, "prompt"),
                 ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"),
                 ({"max_tokens": 10 ** 30}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
                 ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"),
                 ({"top_p": 1.1}, "top_p"), ({"n": 0}, "n"), ({"n": 10 ** 6}, "n"), ({"logprobs": 21}, "logprobs"),
                 ({"logprobs": True}, "logprobs"), ({"echo": 1}, "echo"), ({"stream": "yes"}, "stream"),
                 ({"stop": 5}, "stop"), ({"stop": [""]}, "stop"), ({"stop": ["a"] * 17}, "stop"),
                 ({"seed": 0.5}, "seed"), ({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix"),
                 ({"logit_bias": {"5": 100}}, "logit_bias"), ({"presence_penalty": 1}, "presence_penalty"),
                 ({"prompt": [["a"] * 1025]}, "prompt"), ({"prompt": ["a"] * 1025}, "prompt"),
                 ({"stream_options": True}, "stream_options"), ({"stream_options": [True]}, "stream_options"),
                 ({"stream_options": {"include_usage": "yes"}}, "stream_options"),
                 ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": "2"}, "repetition_penalty"),
                 ({"min_p": -0.1}, "min_p"), ({"min_p": 1.5}, "min_p"), ({"min_tokens": 3}, "min_tokens"),
                 ({"min_tokens": -1}, "min_tokens"), ({"ignore_eos": 1}, "ignore_eos"),
                 ({"stop_token_ids": 5}, "stop_token_ids"), ({"stop_token_ids": [400]}, "stop_token_ids"),
                 ({"stop_token_ids": [1] * 65}, "stop_token_ids"), ({"best_of": 2}, "best_of"),
                 # What other servers have and this one has not.
                 ({"frequency_penalty": -1}, "frequency_penalty"), ({"use_beam_search": True}, "use_beam_search"),
                 ({"guided_json": {}}, "guided_json"), ({"guided_choice": ["a"]}, "guided_choice"),
                 ({"guided_regex": "a*"}, "guided_regex"), ({"guided_new": 0}, "guided_new"),
                 ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
                 ({"response_format": {"type": "json_object"}}, "response_format"), ({"num_beams": 4}, "num_beams"),
                 ({"length_penalty": 2.0}, "length_penalty"), ({"bad_words": ["a"]}, "bad_words"),
                 ({"allowed_token_ids": [1]}, "allowed_token_ids"), ({"max_new_tokens": 5}, "max_new_tokens"),
                 ({"skip_special_tokens": False}, "skip_special_tokens"),
                 ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
                 ({"add_special_tokens": False}, "add_special_tokens"), ({"typical_p": 0.9}, "typical_p"),
                 ({"do_sample": False}, "do_sample"), ({"messages": []}, "messages"),
                 ({"repeat_penalty": 1.1}, "repeat_penalty")]
        for fields, name in wrong:
            body = {"prompt": "a", "max_tokens": 2, **fields}
            self.assertEqual(self.error(400, "POST", "/v1/completions", body)["param"], name, fields)
        for body in ("", "{", "[]", "null", '{"prompt": "a", "prompt": "b"}', "[" * 100000, '{"a":' * 50000,
                     b"\xff\xfe", b'{"prompt": "a"}\x00', b'{"prompt": "a"}\x00, and more',
                     '{"prompt": "\\ud800"}', '{"n": 1e999}'):
            self.error(400, "POST", "/v1/completions", body)
        # What changes nothing may be there.
        self.server.complete(prompt="a", max_tokens=1, model="any", user="me", best_of=1, suffix=None, logit_bias={},
                             presence_penalty=0, n=None, stop=None, stream_options={"include_usage": None, "x": 1})
        self.server.complete(prompt="a", max_tokens=1, temperature=0, do_sample=False, use_beam_search=False, num_beams=1,
                             length_penalty=1.0, bad_words=[], guided_json=None, response_format={"type": "text"},
                             skip_special_tokens=True, frequency_penalty=0.0, allowed_token_ids=None, stop_token_ids=[],
                             min_tokens=1, min_p=0, repetition_penalty=1, ignore_eos=False, some_other_field=7)


class SpecialTokens(Served):
    """A tokenizer that reads the names of special tokens in a text as these tokens."""

    @classmethod
    def setUpClass(cls):
        cls.folder = Folder(PROGRAM, TEXT, tokenizer="bpe")
        cls.server = Server(cls.folder, *cls.options)

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.folder.close()

    def test_offsets(self):
        info = self.server.call("GET", "/tokenizer_info")[1]
        bos, eos = info["bos_token"], info["eos_token"]
        for text in (f"{bos}q", f"a{eos}b{bos}{bos}c", eos):
            for echo in (True, False):
                choice = self.server.complete(prompt=text, max_tokens=3, temperature=0, logprobs=0,
                                              echo=echo)["choices"][0]
                shown = choice["text"] if echo else text + choice["text"]
                self.assertTrue(shown.startswith(text))
                for name, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]):
                    if not name.startswith("bytes:"):
                        self.assertEqual(shown[offset:offset + len(name)], name, (text, echo))
        # Of ids, the text has no names.
        ids = [self.server.call("POST", "/tokenize", {"prompt": name})[1]["tokens"][0] for name in (eos, "a", bos, "b")]
        choice = self.server.complete(prompt=ids, max_tokens=0, logprobs=0, echo=True)["choices"][0]
        self.assertEqual((choice["text"], choice["logprobs"]["text_offset"]), ("ab", [0, 0, 1, 1]))


class PaddedVocabulary(Served):
    """A model with more tokens than its tokenizer, and nearly untrained, so that all are as likely."""

    @classmethod
    def setUpClass(cls):
        cls.folder = Folder(PROGRAM, TEXT, vocab=480, steps=1)
        cls.server = Server(cls.folder, *cls.options)

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.folder.close()

    def test_alternatives(self):
        choice = self.server.complete(prompt=list(range(5, 105)), max_tokens=50, temperature=1, seed=1, logprobs=20,
                                      echo=True)["choices"][0]
        logprobs = choice["logprobs"]
        listed = [set(top) for top in logprobs["top_logprobs"][1:]]
        beyond = [{int(name[4:-1]) for name in names if re.fullmatch(r"<id \d+>", name)} for names in listed]
        self.assertGreater(sum(map(len, beyond)), 100)
        self.assertTrue(all(400 <= token < 480 for tokens in beyond for token in tokens))
        self.assertFalse(any(name.startswith("<id ") for name in logprobs["tokens"]))
        # The likeliest stand there, whatever they are: as many as were asked for, names apart that several share.
        self.assertTrue(all(15 < len(names) <= 21 for names in listed))


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


def request_bytes(body, close=False):
    data = json.dumps(body).encode()
    end = "Connection: close\r\n" if close else ""
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{end}Content-Length: {len(data)}\r\n\r\n".encode() + data


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

    def test_an_old_client_without_a_host(self):
        # HTTP/1.0 knows no Host; the server answers to its own name alone.
        self.assertTrue(self.raw(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 403"))


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


class Positions(unittest.TestCase):
    """dynamic_ntk scales by the request, whatever --max-length."""

    @classmethod
    def setUpClass(cls):
        cls.folder = Folder(PROGRAM, TEXT, attention="{type: softmax, position: rope}")

    @classmethod
    def tearDownClass(cls):
        cls.folder.close()

    def test_what_generate_and_eval_compute(self):
        scaling = ("--rope-scaling", "dynamic_ntk", "--rope-factor", "4", "--rope-train-length", "16")
        text = "The first of these is the one that we know, and it has no name of its own."
        (self.folder.path / "doc.jsonl").write_text(json.dumps({"text": text}) + "\n")
        self.folder.run("prepare", "--input", "doc.jsonl", "--tokenizer", "tokenizer.model", "--output", "doc.h5")
        written = self.folder.run("generate", "--checkpoint", "run", "--prompt", text, "--temperature", "0",
                                  "--max-tokens", "30", *scaling)
        answers = []
        for length in ("128", "512", "4096"):
            server = Server(self.folder, "--max-length", length, *scaling)
            ids = server.call("POST", "/tokenize", {"prompt": text})[1]["tokens"]
            eos = server.call("GET", "/tokenizer_info")[1]["eos_token"]
            ids += server.call("POST", "/tokenize", {"prompt": eos})[1]["tokens"]
            answer = server.complete(prompt=text, temperature=0, max_tokens=30)
            self.assertEqual(text + answer["choices"][0]["text"] + "\n", written)
            choice = server.complete(prompt=ids, max_tokens=0, logprobs=0, echo=True)["choices"][0]
            scored = choice["logprobs"]["token_logprobs"][1:]
            measured = json.loads(self.folder.run("eval", "--checkpoint", "run", "--data", "doc.h5", "--json",
                                                  "--sequence-length", str(len(ids)), *scaling))
            self.assertEqual(len(scored), measured["tokens"])
            self.assertAlmostEqual(-sum(scored) / len(scored), measured["loss"], places=5)
            answers.append((answer["choices"], choice))
            self.assertEqual(server.stop(), 0)
        self.assertEqual(answers[1:], answers[:-1])


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
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
