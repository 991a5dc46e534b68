"""The server's completions: what they are, alone and beside others, and what is refused.

    serve_completions_test.py SBTRAIN TEXT.jsonl
"""

import json
import math
import re
import unittest

from served import ALL, PROGRAM, TEXT, Served, folder, run_tests
from serving import Folder, Server


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
                 ({"repeat_penalty": 1.1}, "repeat_penalty"), ({"eos_token_id": 5}, "eos_token_id"),
                 ({"stop_strings": ["a"]}, "stop_strings"), ({"suppress_tokens": [1]}, "suppress_tokens"),
                 ({"sequence_bias": {"a": 1.0}}, "sequence_bias"), ({"guidance_scale": 1.5}, "guidance_scale"),
                 ({"num_return_sequences": 2}, "num_return_sequences"), ({"max_time": 1}, "max_time"),
                 ({"regex": "a*"}, "regex"), ({"ebnf": "root ::= 'a'"}, "ebnf"), ({"stop_regex": "a"}, "stop_regex"),
                 ({"samplers": ["top_k"]}, "samplers"), ({"t_max_predict_ms": 5}, "t_max_predict_ms")]
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
                             min_tokens=1, min_p=0, repetition_penalty=1, ignore_eos=False, some_other_field=7,
                             guidance_scale=1, num_return_sequences=1, suppress_tokens=[], regex=None)


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


if __name__ == "__main__":
    run_tests()
