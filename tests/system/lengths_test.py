"""scripts/lengths.sh and scripts/needles.sh with a program that only says what it would measure, and scripts/tables.py
on its results."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from checkout import Checkout

ROOT = Path(__file__).resolve().parents[2]

# Records its command line. The loss of a model is its seed, and 10 more in windows of 1024 tokens; its score in texts of
# 512 tokens is 1 / seed, in longer ones 0.
PROGRAM = r"""#!/usr/bin/env python3
import json, os, sys
words = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(words) + "\n")
with open(os.environ["CALLS"] + ".gpus", "a") as gpus:
    gpus.write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\n")
value = lambda name: words[words.index(name) + 1]
if words[0] == "train":
    os.makedirs(value("--out"))
    seed = [word for word in words if word.startswith("--seed=")][-1:]
    open(value("--out") + "/seed", "w").write(seed[0][len("--seed="):] if seed else "7")
elif words[0] in ("data", "prepare"):
    open(value("--output"), "w").close()
elif "--tasks" in words:
    seed = float(open(value("--checkpoint") + "/seed").read())
    lengths = [{"length": n, "score": 1 / seed if n == 512 else 0.0, "low": 0.0, "high": 1.0}
               for n in map(int, value("--lengths").split(","))]
    json.dump({"name": "", "rope_scaling": "", "train_length": 512, "tasks": [
        {"task": task, "lengths": lengths} for task in value("--tasks").split(",")]}, open(value("--json"), "w"))
elif "--benefit" in words:
    full = int(value("--benefit"))
    rows = [{"context": n, "difference": 0.0, "by_document": {"store": [0, 0], "document": [3, 4], "tokens": [10, 30],
             "loss_sum": [10, 30]}} for n in (full // 2, full)]
    json.dump({"name": "lengths_" + os.path.basename(value("--checkpoint")), "rope_scaling": "", "full_context": full,
               "targets": int(value("--benefit-targets")), "benefit": rows}, open(value("--json"), "w"))
else:
    run = value("--checkpoint")
    seed = float(open(run + "/seed").read())
    lengths = [{"length": n, "loss": seed + (10 if n == 1024 else 0), "position_bin": 128,
                "loss_by_position": [seed] * (n // 128), "by_document": {"store": [0, 0], "document": [3, 4],
                "tokens": [10, 30], "loss_sum": [10 * seed + 5, 30 * seed - 5]}} for n in map(int, value("--lengths").split(","))]
    targets = int(value("--same-targets")) if "--same-targets" in words else 0
    scaling = value("--rope-scaling") if "--rope-scaling" in words else ""
    record = {"name": "lengths_" + os.path.basename(run), "rope_scaling": scaling, "train_length": 512,
              "same_targets": targets, "lengths": lengths}
    json.dump(record, open(value("--json"), "w"))
"""


class Script(Checkout):
    """A script in a checkout of its own, with the texts fetched."""

    def setUp(self):
        super().setUp()
        (self.folder / "corpus/lengths").mkdir(parents=True)
        for name in ("tokenizer.model", "train.h5", "val.h5"):
            (self.folder / "corpus/lengths" / name).touch()
        self.program = self.folder / "sbtrain"
        self.program.write_text(PROGRAM)
        self.program.chmod(0o755)
        self.calls = self.folder / "calls"

    def run_script(self, *arguments, code=0, gpus=""):
        """The calls of the program that the script makes, where the variable CUDA_VISIBLE_DEVICES is `gpus`."""
        self.calls.write_text("")
        environment = {**os.environ, "SBTRAIN": str(self.program), "PYTHON": sys.executable, "CALLS": str(self.calls),
                       "CUDA_VISIBLE_DEVICES": gpus}
        if gpus is None:
            del environment["CUDA_VISIBLE_DEVICES"]
        result = subprocess.run([self.folder / "scripts" / self.script, "--out", "out", *arguments], cwd=self.folder,
                                env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(result.returncode, code, result.stdout)
        self.output = result.stdout
        return [json.loads(line) for line in self.calls.read_text().splitlines()]


class Lengths(Script):
    script = "lengths.sh"

    def test_each_model_with_each_seed(self):
        arguments = ("--seeds", "1,2,6", "--lengths", "512,1024", "sb", "rope", "--", "--device=cpu")
        calls = self.run_script(*arguments)
        trained = [(call[2], call[4].rsplit("/out/")[1], call[-1]) for call in calls if call[0] == "train"]
        self.assertEqual(trained, [(f"configs/lengths_{model}.yaml", f"seed-{seed}/{model}", f"--seed={seed}")
                                   for model in ("sb", "rope") for seed in (1, 2, 6)])
        self.assertEqual(len([call for call in calls if call[0] == "eval"]), 3 * 3 + 3 * 6)
        text = (self.folder / "out/tables.md").read_text()
        row = "3.000 ± 2.646** | **13.000 ± 2.646** | 3 |"
        self.assertEqual(text.count(f"| stick-breaking | **{row}"), 2, text)
        self.assertEqual(text.count(f"| RoPE, dynamic NTK at evaluation | **{row}"), 2, text)
        self.assertEqual(text.count("| stick-breaking | 2.833 to 3.500 | 2.833 to 3.500 |"), 2, text)
        self.assertEqual(text.count("| RoPE | +0.000 (+0.000 to +0.000) | +0.000 (+0.000 to +0.000) |"), 2, text)
        self.assertEqual(self.run_script(*arguments), [])  # nothing is left to do

    def test_without_seeds(self):
        calls = self.run_script("--lengths", "512", "alibi")
        self.assertEqual([call[2:] for call in calls if call[0] == "train"],
                         [["configs/lengths_alibi.yaml", "--out", f"{self.folder}/out/alibi"]])
        self.assertIn("| ALiBi | 7.000 | 1 |", (self.folder / "out/tables.md").read_text())

    def test_rotary_positions_are_scaled_too(self):
        calls = self.run_script("--lengths", "512", "coca", "coca_strict", "rope_4096", "window", "alibi")
        scaled = [call[call.index("--checkpoint") + 1] for call in calls if "dynamic_ntk" in call]
        self.assertEqual(scaled, [f"{self.folder}/out/{model}" for model in ("coca", "coca_strict", "rope_4096")
                                  for _ in range(3)])
        self.assertIn("| CoCA, strict, dynamic NTK at evaluation |", (self.folder / "out/tables.md").read_text())

    def test_rates_of_models(self):
        calls = self.run_script("--lengths", "512", "--rates", "sb_bias=1e-3,sb*=4e-3", "sb", "sb_bias", "rope")
        rates = {Path(call[4]).name: [word for word in call if word.startswith("--train.lr")]
                 for call in calls if call[0] == "train"}
        self.assertEqual(rates, {"sb": ["--train.lr=4e-3"], "sb_bias": ["--train.lr=1e-3"], "rope": []})
        self.assertEqual(self.run_script("--rates", "4e-3", "sb", code=2), [])
        calls = self.run_script("--lengths", "512", "coca_strict", "none", "alibi")
        rates = {Path(call[4]).name: [word for word in call if word.startswith("--train.lr")]
                 for call in calls if call[0] == "train"}
        self.assertEqual(rates, {"coca_strict": ["--train.lr=2e-3"], "none": ["--train.lr=2e-3"], "alibi": []})

    def gpus_of_jobs(self, *arguments, **more):
        """The GPUs of all calls, and of how many jobs the script says so."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        (self.folder / "calls.gpus").unlink(missing_ok=True)
        self.run_script("--lengths", "512", "--seeds", "1,2,3,4", *arguments, "alibi", **more)
        return set((self.folder / "calls.gpus").read_text().split("\n")[:-1])

    def test_jobs_share_the_gpus(self):
        self.assertEqual(self.gpus_of_jobs(gpus="4,GPU-a,7"), {"4", "GPU-a", "7"})
        self.assertRegex(self.output, r"seed-1/alibi begins on GPU 4 (?s:.*)seed-3/alibi begins on GPU 7 ")
        self.assertEqual(self.gpus_of_jobs("--jobs", "2", gpus="0,1,2,3"), {"0,1", "2,3"})
        self.assertEqual(self.gpus_of_jobs("--jobs", "1", gpus="0,1"), {"0,1"})
        self.assertEqual(self.gpus_of_jobs("--jobs", "4", gpus="5,7"), {"5", "7"})
        self.assertRegex(self.output, r"seed-1/alibi begins on GPU 5 (?s:.*)seed-4/alibi begins on GPU 7 ")
        command = self.folder / "nvidia-smi"
        self.addCleanup(os.environ.__setitem__, "PATH", os.environ["PATH"])
        os.environ["PATH"] = f"{self.folder}:{os.environ['PATH']}"
        command.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
        command.chmod(0o755)
        self.assertEqual(self.gpus_of_jobs(gpus=None), {"0", "1"})
        command.write_text("#!/bin/sh\necho No devices were found\n")
        self.assertEqual(self.gpus_of_jobs(gpus=None), {"all"})

    def test_the_gpus_that_a_program_sees(self):
        for names, gpus in (("1,0", "1\n0\n"), (" GPU-a", "GPU-a\n"), ("2,-1,0", "2\n"), ("", "")):
            printed = subprocess.run([ROOT / "scripts/gpus.py"], env={**os.environ, "CUDA_VISIBLE_DEVICES": names},
                                     stdout=subprocess.PIPE, text=True, check=True).stdout
            self.assertEqual(printed, gpus, names)

    def test_a_seed_is_a_number(self):
        self.assertEqual(self.run_script("--seeds", "1,x", "sb", code=2), [])
        self.assertIn("'x' is no seed", self.output)


class Needles(Script):
    script = "needles.sh"

    def test_each_model_with_each_seed(self):
        arguments = ("--seeds", "1,2", "--lengths", "512,1024", "--text", "50", "sb", "rope", "--", "--device=cpu")
        calls = self.run_script(*arguments)
        out = self.folder / "out"
        self.assertEqual([call[0] for call in calls[:3]], ["data", "data", "prepare"])
        self.assertEqual(calls[2][2:4], [f"{out}/passkey.jsonl", f"{out}/niah.jsonl"])
        trained = [call[1:] for call in calls if call[0] == "train"]
        self.assertEqual(trained, [["--config", f"{out}/{model}-{seed}.yaml", "--out", f"{out}/{model}-{seed}",
                                    f"--seed={seed}", "--train.lr=2e-3", "--device=cpu"]
                                   for model in ("sb", "rope") for seed in (1, 2)])
        config = (out / "rope-2.yaml").read_text()
        self.assertIn(f"include: {self.folder}/configs/lengths_rope.yaml\n", config)
        self.assertIn("length: 50 steps\n    schedule: {type: constant, warmup: 10 steps}\n", config)
        self.assertIn(f"{{path: {out}/needles.h5, weight: 3}}", config)
        scaled = [call[call.index("--checkpoint") + 1] for call in calls if "dynamic_ntk" in call]
        self.assertEqual(scaled, [f"{out}/rope-1", f"{out}/rope-2"])
        text = (out / "tasks.md").read_text()
        for task in ("passkey", "niah_single_1", "niah_multikey_2"):
            self.assertIn(task, text)
        for model in ("sb", "rope", "rope_dynamic_ntk"):
            self.assertEqual(text.count(f"| {model} | 0.75 ± 0.35 | 0.00 ± 0.00 | 2 |"), 3, text)
        self.assertEqual(self.run_script(*arguments), [])  # nothing is left to do

    def test_two_at_a_time(self):
        arguments = ("--seeds", "1,2", "--lengths", "512", "--jobs", "2", "--rates", "rope=2e-3", "sb", "rope", "--",
                     "--device=cpu")
        calls = self.run_script(*arguments)
        self.assertEqual({call[4] for call in calls if "--train.lr=2e-3" in call},
                         {f"{self.folder}/out/rope-1", f"{self.folder}/out/rope-2"})
        self.assertEqual(len([call for call in calls if call[0] == "train"]), 4)
        self.assertEqual(self.output.count(" is done after "), 4, self.output)
        self.assertTrue((self.folder / "out/rope-2.log").is_file())
        lines = [json.loads(line) for line in (self.folder / "out/results.jsonl").read_text().splitlines()]
        self.assertEqual([(line["label"], line["file"]) for line in lines[:3]], [
            ("sb", "out/sb-1.json"), ("sb", "out/sb-2.json"), ("rope", "out/rope-1.json")])
        self.assertEqual(self.run_script(*arguments), [])
        self.run_script("--jobs", "0", "sb", code=2)

    def test_variable_tracking_in_longer_rows(self):
        calls = self.run_script("--tasks", "passkey,niah_multikey_2,vt", "--row", "1024", "coca", "alibi")
        written = [(call[call.index("--tasks") + 1], call[call.index("--lengths") + 1].split(",")[-1])
                   for call in calls if call[0] == "data"]
        self.assertEqual(written, [("passkey", "544"), ("niah_multikey_2", "624"), ("vt", "992")])
        config = (self.folder / "out/alibi-1.yaml").read_text()
        self.assertIn("train: {sequence_length: 1024, batch: 64, micro_batch: 32}\n", config)
        scaled = [call[call.index("--checkpoint") + 1] for call in calls if "dynamic_ntk" in call]
        self.assertEqual(scaled, [f"{self.folder}/out/coca-1"])

    def test_refuses_tasks_that_it_cannot_train(self):
        self.assertEqual(self.run_script("--tasks", "vt", "sb", code=2), [])
        self.assertIn("give --row 1024", self.output)
        self.assertEqual(self.run_script("--tasks", "cwe", "sb", code=2), [])
        self.assertEqual(self.run_script("--row", "100", "sb", code=2), [])

    def test_the_texts_are_those_of_lengths(self):
        (self.folder / "corpus/lengths/train.h5").unlink()
        self.assertEqual(self.run_script("sb", code=2), [])
        self.assertIn("scripts/lengths.sh fetches the text", self.output)


class Tables(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    def tables(self, *arguments, code=0):
        result = subprocess.run([sys.executable, ROOT / "scripts/tables.py", *arguments], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(result.returncode, code, result.stdout)
        return result.stdout

    def test_tasks(self):
        def record(name, *scores):
            lengths = [{"length": 2 ** (8 + i), **({"absent": "too short"} if s is None else {"score": s})}
                       for i, s in enumerate(scores)]
            return {"name": name, "rope_scaling": "", "tasks": [{"task": "passkey", "lengths": lengths}]}

        files = [self.write(f"{i}.json", r) for i, r in enumerate(
            (record("lengths_sb", None, 0.5), record("lengths_sb", None, 1.0), record("rope", 0.25, 0.25)))]
        self.assertIn("|  | 256 | 512 | seeds |\n| --- | --- | --- | --- |\n| sb |  | 0.75 ± 0.35 | 2 |\n"
                      "| rope | 0.25 | 0.25 | 1 |", self.tables(*files))

    def test_sweeps(self):
        def run(variant, pairs, lr, accuracy, epochs):
            return {"variant": variant, "grid": {"data.task.pairs": pairs, "train.lr": lr}, "best_loss": 1.0,
                    "best_accuracy": accuracy, "epochs": epochs}

        first = {"name": "a", "best_over": ["train.lr"], "runs": [run("sb", "64", "1", 0.9, 8), run("sb", "64", "2", 1, 2)]}
        second = {"name": "b", "best_over": ["train.lr"], "runs": [run("rope", "128", "1", 0.5, 16)]}
        files = [self.write("a/sweep.json", first), self.write("b/sweep.json", second)]
        text = self.tables(str(Path(files[0]).parent), files[1])
        self.assertIn("| sb | 1.000 (2) |  | 1 |\n| rope |  | 0.500 (16) | 1 |", text)
        self.assertIn("|  | 1 | 2 | seeds |", self.tables("-x", "train.lr", *files))
        other = run("based", "64", "1", 0.5, 4)
        other["grid"] = {"model.width": "64"}
        third = self.write("c/sweep.json", {"name": "c", "best_over": [], "runs": [other]})
        self.assertIn("by model.width:\n\n|  | 64 | seeds |\n| --- | --- | --- |\n| based | 0.500 (4) | 1 |",
                      self.tables(*files, third))

    def test_skipping(self):
        times = ["attention_forward_seconds", "attention_backward_seconds", "model_forward_seconds",
                 "model_training_seconds"]
        rows = [{"name": "sb", "length": 512, "epsilon": e, "batch_tokens": 1024, "keys_read": share, "loss": loss,
                 **{key: seconds for key in times}}
                for e, share, loss, seconds in ((0, 1, 3, 0.002), (0.01, 0.25, 3.5, 0.001))]
        file = self.write("skip.jsonl", "\n".join(map(json.dumps, rows)) + "\n")
        text = self.tables(file)
        self.assertIn("| 512 | 0 | 100.0% | 2.00 (+0%) | 2.00 (+0%) | 2.00 (+0%) | 2.00 (+0%) | 3.0000 |", text)
        self.assertIn("| 512 | 0.01 | 25.0% | 1.00 (-50%) | 1.00 (-50%) | 1.00 (-50%) | 1.00 (-50%) | +0.5000 |", text)

    def losses(self, name, *documents, same_targets=256):
        """A result of one length, in which each of 64 documents has 10 targets of these losses, in turns."""
        losses = [documents[n % len(documents)] for n in range(64)]
        sums = {"store": [0] * 64, "document": list(range(64)), "tokens": [10] * 64,
                "loss_sum": [10 * loss for loss in losses]}
        return {"name": name, "rope_scaling": "", "same_targets": same_targets,
                "lengths": [{"length": 512, "loss": sum(losses) / 64, "by_document": sums}]}

    def test_intervals_over_documents(self):
        files = [self.write(f"{i}.json", r) for i, r in enumerate(
            (self.losses("a", 2.0, 4.0), self.losses("a", 2.0, 4.2), self.losses("b", 2.5, 4.5)))]
        text = self.tables("--bootstrap", "400", "--against", "a", *files)
        self.assertIn("| a | **3.050 ± 0.071** | 2 |", text)
        # A mean of 64 losses of a deviation of 1.05 and 1 has intervals of 0.26 and 0.245 on each side.
        low, high = map(float, text.split("| a | ")[2].split(" |")[0].split(" to "))
        self.assertAlmostEqual(high - low, 2 * 1.96 * 1.05 / 8, delta=0.06)
        # On the same targets the model b has 0.5 and 0.4 more.
        self.assertRegex(text, r"\| b \| \+0\.450 \(\+0\.43\d to \+0\.46\d\) \|")
        self.assertNotIn("| a | +0", text)

    def test_many_results_in_one_file(self):
        files = [self.write(f"runs/{i}.json", r) for i, r in enumerate(
            (self.losses("lengths_a", 2.0, 4.0), self.losses("lengths_a", 2.0, 4.2), self.losses("b", 2.5, 4.5)))]
        tasks = {"name": "a", "checkpoint": str(self.folder / "run"), "rope_scaling": "dynamic_ntk", "tasks": [
            {"task": "vt", "lengths": [{"length": 512, "score": 1 / 3, "results": [{"score": 1}] * 100}]}]}
        files.append(self.write("runs/tasks.json", tasks))
        row = {"name": "sb", "length": 512, "epsilon": 0, "batch_tokens": 1024, "keys_read": 1, "loss": 3.0}
        times = ["attention_forward_seconds", "attention_backward_seconds", "model_forward_seconds",
                 "model_training_seconds"]
        files.append(self.write("skip.jsonl", json.dumps({**row, **{key: 0.002 for key in times}}) + "\n"))
        options = ("--bootstrap", "400", "--against", "a")
        kept = self.folder / "results.jsonl"
        self.write("run/run.json", {"git_revision": "abc"})
        subprocess.run([sys.executable, ROOT / "scripts/collect_results.py", *files, "-o", kept], check=True)
        self.assertEqual(self.tables(*options, *files), self.tables(*options, str(kept)))
        lines = [json.loads(line) for line in kept.read_text().splitlines()]
        self.assertEqual([(line["label"], line["file"], line.get("revision")) for line in lines[1:4:2]],
                         [("a", "runs/1.json", None), ("a, dynamic_ntk", "runs/tasks.json", "abc")])
        self.assertNotIn("checkpoint", lines[3])
        # Where both have been moved, the run is beside the result.
        self.write("runs/moved/run.json", {"git_revision": "def"})
        moved = self.write("runs/moved.json", {**tasks, "checkpoint": "/elsewhere/runs/moved"})
        subprocess.run([sys.executable, ROOT / "scripts/collect_results.py", moved, "-o", self.folder / "moved.jsonl"],
                       check=True)
        self.assertEqual(json.loads((self.folder / "moved.jsonl").read_text())["revision"], "def")
        again = self.folder / "again"
        subprocess.run([sys.executable, ROOT / "scripts/collect_results.py", "--unpack", kept, "-o", again], check=True,
                       stdout=subprocess.DEVNULL)
        self.assertEqual(self.tables(*options, *files), self.tables(
            *options, *(again / Path(*Path(file).parts[-2:]) for file in files)))
        sums = [line["lengths"][0]["by_document"] for line in lines[:3]]
        self.assertEqual([sorted(s) for s in sums], [["document", "loss_sum", "places", "store", "tokens"],
                                                     *[["loss_sum", "places"]] * 2])
        self.assertNotIn("results", kept.read_text().splitlines()[3].partition("tasks.json")[2])

    def test_curves_and_sweeps_are_kept_and_made_again(self):
        metrics = [{"step": 0, "tokens": 0, "validation/loss": 3.0}, {"step": 1, "tokens": 8, "train/loss": 2.123456789,
                   "train/lr": 0.1, "train/grad_norm": 1.0}, {"step": 1, "tokens": 8, "validation/loss": None}]
        self.write("runs/a/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in metrics))
        self.write("runs/a/status.json", {"exit_code": 6})
        self.write("runs/sweep/sweep.json", {"name": "s", "best_over": [], "runs": []})
        kept = self.folder / "kept.jsonl"
        script = [sys.executable, ROOT / "scripts/collect_results.py"]
        subprocess.run([*script, self.folder / "runs/a", self.folder / "runs/sweep", "-o", kept], check=True)
        self.assertEqual(json.loads(kept.read_text().splitlines()[0])["exit_code"], 6)
        subprocess.run([*script, "--unpack", kept, "-o", self.folder / "again"], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (self.folder / "again/runs/a/metrics.jsonl").read_text().splitlines()]
        self.assertEqual(lines, [{"tokens": 8, "train/loss": 2.12346, "train/grad_norm": 1.0, "train/lr": 0.1},
                                 {"tokens": 0, "validation/loss": 3.0}, {"tokens": 8, "validation/loss": None}])
        self.assertEqual(json.loads((self.folder / "again/runs/sweep/sweep.json").read_text())["name"], "s")

    def test_pairs_need_the_same_targets(self):
        other = self.losses("b", 2.5)
        other["lengths"][0]["by_document"]["tokens"][5] = 9
        files = [self.write("a.json", self.losses("a", 2.0)), self.write("b.json", other)]
        self.tables("--bootstrap", "10", *files)
        self.assertIn("not the same targets", self.tables("--bootstrap", "10", "--against", "a", *files, code=1))
        self.assertIn("no file has the label 'c'", self.tables("--bootstrap", "10", "--against", "c", *files, code=1))
        del other["lengths"][0]["by_document"]
        files[1] = self.write("b.json", other)
        self.assertIn("no losses by document", self.tables("--bootstrap", "10", *files, code=1))
        self.assertIn("--against needs --bootstrap", self.tables("--against", "a", *files, code=2))

    def test_benefit(self):
        rows = []
        for context, loss in ((64, 3.5), (128, 3.25), (256, 3.0)):
            result = self.losses("a", loss)["lengths"][0]
            rows.append({"context": context, "loss": loss, "difference": 3.0 - loss, "by_document": result["by_document"]})
        file = self.write("a.json", {"name": "a", "rope_scaling": "", "full_context": 256, "targets": 10,
                                     "benefit": rows})
        text = self.tables("--bootstrap", "10", file)
        self.assertIn("|  | 64 | 128 | seeds |\n| --- | --- | --- | --- |\n| a | -0.500 | -0.250 | 1 |", text)
        self.assertIn("| a | -0.500 to -0.500 | -0.250 to -0.250 |", text)

    def test_refuses_what_it_does_not_know(self):
        self.assertIn("no result that this script knows", self.tables(self.write("x.json", {}), code=1))
        self.assertIn("No such file", self.tables(str(self.folder / "none.json"), code=1))


if __name__ == "__main__":
    unittest.main()
