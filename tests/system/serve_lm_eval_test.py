"""lm-evaluation-harness, unmodified, against the server: its losses are those of `sbtrain eval`, and a task that
asks for greedy text and one of choices run to their end.

    serve_lm_eval_test.py SBTRAIN TEXT.jsonl

Skipped (exit status 77) where the package lm_eval is missing.
"""

import json
import math
import os
import sys
import unittest
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
try:
    import lm_eval
    from lm_eval.tasks import TaskManager
except ImportError as error:
    print(f"skipped: {error}; lm-evaluation-harness is 'pip install lm-eval[api]'")
    sys.exit(77)

from serving import Folder, Server

PROGRAM, TEXT = (str(Path(path).resolve()) for path in sys.argv[1:3])

LOSS = """
task: tiny_loss
dataset_path: json
dataset_kwargs: {data_files: {test: %(data)s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %(data)s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text[:40]}}"
doc_to_choice: ["{{text[40:60]}}", " zqxj zqxj"]
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GREEDY = """
task: tiny_greedy
dataset_path: json
dataset_kwargs: {data_files: {test: %(data)s}}
test_split: test
output_type: generate_until
doc_to_text: "{{text[:40]}}"
doc_to_target: "{{text[40:60]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""


class Harness(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Folder(PROGRAM, TEXT)
        folder = cls.folder.path
        with open(TEXT, encoding="utf-8") as file:
            texts = [json.loads(line)["text"][:400] for line in file][:6]
        cls.texts = [text for text in texts if len(text) > 100]
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in cls.texts))
        (folder / "tasks").mkdir()
        for name, task in (("loss", LOSS), ("choice", CHOICE), ("greedy", GREEDY)):
            (folder / "tasks" / f"{name}.yaml").write_text(task % {"data": json.dumps(str(folder / "data.jsonl"))})
        cls.server = Server(cls.folder)

    @classmethod
    def tearDownClass(cls):
        code = cls.server.stop()
        cls.folder.close()
        assert code == 0, code

    def evaluate(self, task, **arguments):
        os.environ["HF_HOME"] = str(self.folder.path / "cache")
        model = {"model": "served", "base_url": f"http://127.0.0.1:{self.server.port}/v1/completions", **arguments}
        results = lm_eval.simple_evaluate(model="local-completions", model_args=model, tasks=[task], log_samples=True,
                                          task_manager=TaskManager(include_path=str(self.folder.path / "tasks")),
                                          bootstrap_iters=0, cache_requests=False)
        return results["results"][task], results["samples"][task]

    def test_losses_are_those_of_eval(self):
        """eval scores a document's end and not its first token; the harness, which begins each document with bos,
        scores the first token and no end. What the server says of each is compared with what each of them says."""
        info = self.server.call("GET", "/tokenizer_info")[1]
        bos, eos = self.tokens(info["bos_token"]), self.tokens(info["eos_token"])
        results, samples = self.evaluate("tiny_loss")
        for more in ({"num_concurrent": 4}, {"batch_size": 4}):
            self.assertEqual(self.evaluate("tiny_loss", **more)[0]["bits_per_byte,none"],
                             results["bits_per_byte,none"])
        scored = 0
        for text in self.texts:
            (self.folder.path / "one.jsonl").write_text(json.dumps({"text": text}) + "\n")
            self.folder.run("prepare", "--input", "one.jsonl", "--tokenizer", "tokenizer.model", "--output", "one.h5")
            measured = json.loads(self.folder.run("eval", "--checkpoint", "run", "--data", "one.h5", "--json",
                                                  "--sequence-length", "1000"))
            with_end = self.score(self.tokens(text) + eos)
            self.assertEqual(len(with_end), measured["tokens"])
            self.assertAlmostEqual(-sum(with_end) / len(with_end), measured["loss"], places=5)
            scored += sum(self.score(bos + self.tokens(text)))
        count = sum(len(text.encode()) for text in self.texts)
        self.assertAlmostEqual(results["bits_per_byte,none"], -scored / count / math.log(2), places=5)

    def tokens(self, text):
        return self.server.call("POST", "/tokenize", {"prompt": text})[1]["tokens"]

    def score(self, ids):
        answer = self.server.complete(prompt=ids, max_tokens=0, echo=True, logprobs=0)
        return answer["choices"][0]["logprobs"]["token_logprobs"][1:]

    def test_choices(self):
        samples = self.evaluate("tiny_choice", num_concurrent=3)[1]
        self.assertEqual(len(samples), len(self.texts))
        for sample in samples:
            for (context, choice), (logprob, _) in zip(sample["arguments"], sample["filtered_resps"]):
                known = context.rstrip()  # spaces at the end count as the choice's
                scores = self.score(self.tokens(context + choice))
                self.assertAlmostEqual(logprob, sum(scores[len(self.tokens(known)) - 1:]), places=4)

    def test_greedy_text(self):
        samples = self.evaluate("tiny_greedy")[1]
        for text, sample in zip(self.texts, sorted(samples, key=lambda s: s["doc_id"])):
            answer = self.server.complete(prompt=text[:40], temperature=0, max_tokens=12, stop=["\n\n"])
            self.assertEqual(sample["resps"][0][0], answer["choices"][0]["text"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
