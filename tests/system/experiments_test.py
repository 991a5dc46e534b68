"""scripts/lengths.sh, pair_350m.sh and others with the program itself, tiny models and two jobs at a time: jobs that
fail, that are stopped and go on, and that are not repeated; and scripts/reproduce.py, which runs them.

    experiments_test.py SBTRAIN TEXT.jsonl
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

from checkout import Checkout

try:
    import matplotlib  # noqa: F401
    CAN_DRAW = True
except ImportError:
    CAN_DRAW = False

PROGRAM, TEXT = (str(Path(path).resolve()) for path in sys.argv[1:3])
TINY = ["--device=cpu", "--model.width=32", "--model.inner=32", "--model.heads=1", "--model.layers=1",
        "--model.vocab=400", "--train.sequence_length=32", "--train.micro_batch=2", "--train.batch=2",
        "--validation.tokens=128"]


class Experiments(Checkout):
    def setUp(self):
        super().setUp()
        corpus = self.folder / "texts"
        corpus.mkdir()
        subprocess.run([PROGRAM, "tokenizer", "train", "--input", TEXT, "--vocab", "400", "--output",
                        corpus / "tokenizer.model"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in ("train", "held_out"):  # packed text, or stores
            if name == "train" and shutil.which("zstd"):
                subprocess.run(["zstd", "-q", TEXT, "-o", corpus / f"{name}.jsonl.zst"], check=True)
                continue
            subprocess.run([PROGRAM, "prepare", "--input", TEXT, "--tokenizer", corpus / "tokenizer.model", "--output",
                            corpus / f"{name}.h5"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.out = self.folder / "out"
        self.environment = {**os.environ, "SBTRAIN": PROGRAM, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
                            "CUDA_VISIBLE_DEVICES": ""}

    def start(self, script, *arguments, steps, options=()):
        command = [self.folder / "scripts" / script, "--out", self.out, "--corpus", "texts", *arguments, "--", *TINY,
                   *options, f"--stages.0.length={steps} steps", "--stages.0.schedule.warmup=1 steps"]
        return subprocess.Popen(list(map(str, command)), cwd=self.folder, env=self.environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run_script(self, script, *arguments, steps=3, options=(), code=0):
        process = self.start(script, *arguments, steps=steps, options=options)
        output = process.communicate(timeout=200)[0]
        self.assertEqual(process.returncode, code, output)
        return output

    lengths = ("lengths.sh", "--lengths", "256,320", "--tokens", "320", "--jobs", "2", "--seeds", "1,2")

    def test_two_at_a_time_of_which_one_fails(self):
        broken = self.folder / "configs/lengths_broken.yaml"
        broken.write_text("include: lengths_sb.yaml\nname: lengths_broken\ntrain: {lr: -1}\n")
        output = self.run_script(*self.lengths, "broken", "sb", "rope", code=3)
        log = self.out / "seed-1/broken.log"
        self.assertIn(f"lengths: seed-1/broken failed with exit code 3 (its output: {log})", output)
        self.assertIn("train.lr", log.read_text())
        self.assertRegex(output.splitlines()[-1], r"seed-./broken \(its output: .*\) failed first, with exit code 3")
        self.assertEqual(output.count(" is done after "), 4)
        for seed in (1, 2):
            for name in ("sb", "rope", "rope_dynamic_ntk"):
                for part in ("", "_same", "_benefit"):
                    self.assertTrue((self.out / f"seed-{seed}/{name}{part}.json").is_file(), name)
        self.assertEqual(len((self.out / "results.jsonl").read_text().splitlines()), 18)

        broken.write_text("include: lengths_sb.yaml\nname: lengths_broken\n")
        output = self.run_script(*self.lengths, "broken", "sb", "rope")
        self.assertEqual(output.count(" begins"), 2, output)  # those that had failed
        self.assertNotIn(" begins", self.run_script(*self.lengths, "broken", "sb", "rope"))
        self.assertIn("give another --out", self.run_script(*self.lengths, "--corpus", "corpus/lengths", code=2))

    def wait_for_steps(self, process):
        """Until both runs of the first two jobs have made steps."""
        for _ in range(600):
            files = list(self.out.glob("seed-*/*/metrics.jsonl"))
            if len(files) == 2 and all(file.stat().st_size > 0 for file in files):
                return
            self.assertIsNone(process.poll())
            time.sleep(0.1)
        self.fail("no run began")

    def test_a_stop_reaches_the_trainings(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            shutil.rmtree(self.out, ignore_errors=True)
            process = self.start(*self.lengths, "sb", steps=1000000)
            self.wait_for_steps(process)
            process.send_signal(number)
            output = process.communicate(timeout=100)[0]
            self.assertEqual(process.returncode, 85, output)
            self.assertEqual(output.count(" was stopped"), 2, output)
            for seed in (1, 2):
                status = json.loads((self.out / f"seed-{seed}/sb/status.json").read_text())
                self.assertEqual(status["exit_code"], 85, status)

    def test_a_pair_with_its_rates(self):
        arguments = ("pair_350m.sh", "--jobs", "2", "--rates", "1e-3,2e-3", "--needles", "2", "--lengths", "2048,4096",
                     "--tokens", "4096", "--samples", "1", "--asked", "1", "--skip", "2560")
        options = ("--train.batch=2", "--train.micro_batch=2")
        output = self.run_script(*arguments, options=options)
        self.assertEqual(output.count(" is done after "), 4 + 2, output)
        lines = [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]
        kinds = ("lengths", "benefit", "tasks", "rows", "curve", "reach")
        self.assertEqual([sum(kind in line for line in lines) for kind in kinds], [6, 3, 3, 1, 4 + 4, 1])
        best = []  # these runs are those of the pair, and the only ones whose weights are kept
        for model in ("sb", "rope"):
            losses = {rate: json.loads((self.out / f"rates/{model}-{rate}.jsonl").read_text())["validation"]["loss"][-1]
                      for rate in ("1e-3", "2e-3")}
            best.append(f"{model}-{min(losses, key=losses.get)}")
            curve = json.loads((self.out / f"rates/{best[-1]}.jsonl").read_text())["curve"]
            self.assertIn(curve, [line["curve"] for line in lines if line.get("file") == f"{self.out.name}/{model}"])
        self.assertEqual(sorted(path.name for path in (self.out / "rates").iterdir() if path.is_dir()), sorted(best))
        self.assertNotIn(" begins", self.run_script(*arguments, options=options))
        (self.out / "rope_tasks.json").unlink()
        self.assertEqual(self.run_script(*arguments, options=options).count(" begins"), 1)

        # A rate that is tried later and is better: nothing is lost, and the message says what to do.
        alone = [word if word != "1e-3,2e-3" else "1e-3,2e-3,4e-3" for word in arguments]
        output = self.run_script(*alone, "rope", options=options, code=2)
        self.assertIn(f"results of rates/{best[1]}, and rates/rope-4e-3 is better: remove {self.out}/rope*", output)
        self.assertTrue((self.out / "rates/rope-4e-3/checkpoints").is_dir())

        # One model at one rate. Where runs, or their weights, are gone, as from an archive, what is missing trains anew.
        self.out = self.folder / "alone"
        alone = [word if word != "1e-3,2e-3" else "1e-3" for word in arguments]
        self.run_script(*alone, "rope", options=options)
        self.assertEqual(len((self.out / "results.jsonl").read_text().splitlines()), 8 + 2 + 1)
        for gone in ("rates/rope-1e-3/checkpoints", "rope_needles"):
            shutil.rmtree(self.out / gone)
        (self.out / "rope_tasks.json").unlink()
        self.assertEqual(self.run_script(*alone, "rope", options=options).count(" begins"), 1)
        self.assertTrue((self.out / "rope_tasks.json").is_file())

    @unittest.skipUnless(shutil.which("zstd"), "zstd is not installed")
    def test_long_contexts(self):
        shutil.copy(self.folder / "texts/train.jsonl.zst", self.folder / "texts/held_out.jsonl.zst")
        arguments = ["--rows", "64,128", "--steps", "2,2", "--lengths", "128,256", "--tokens", "512", "--timed", "128,512",
                     "--needles", "2", "--tasks", "passkey", "--sizes", "512,1024", "--samples", "2", "--asked", "1",
                     "--ask-at", "1024", "--jobs", "2"]
        model = [option for option in TINY if "sequence_length" not in option]
        model.append("--stages.0.schedule.warmup=0 steps")

        def run(*models):
            command = [self.folder / "scripts/long_contexts.sh", "--out", self.out, "--corpus", "texts", *arguments,
                       *models, "--", *model]
            return subprocess.run(list(map(str, command)), cwd=self.folder, env=self.environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)

        for base in ("sb", "rope", "window"):  # 2000 steps are not for a test
            path = self.folder / f"configs/lengths_{base}.yaml"
            path.write_text(path.read_text() + "stages: [{name: train, length: 2 steps}]\n")
        done = run()
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(done.stdout.count(" is done after "), 3 + 4, done.stdout)
        lines = [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]
        kinds = ("lengths", "tasks", "rows", "curve")
        self.assertEqual([sum(kind in line for line in lines) for kind in kinds], [8, 4, 4, 4 * 3])
        factors = {name: (self.out / name / "config.yaml").read_text() for name in ("rope_ntk-128", "rope_yarn-needles")}
        for name, text in factors.items():
            self.assertRegex(text, r"rope_factor: 1\b", name)  # 128 tokens are fewer than 512
        tables = (self.out / "tables.md").read_text()
        self.assertIn("RoPE, YaRN", tables)
        self.assertIn("Skipping keys", tables)
        if CAN_DRAW:
            for plot in ("speed", "lengths", "positions"):
                self.assertTrue((self.out / f"{plot}.png").is_file(), plot)
        again = run()
        self.assertNotIn(" begins", again.stdout)
        (self.out / "window_tasks.json").unlink()
        self.assertEqual(run("window").stdout.count(" begins"), 1)

        # Without weights, as from an archive, what is measured stays, and for the rest the first model trains anew, too.
        for weights in list(self.out.rglob("checkpoints")):
            shutil.rmtree(weights)
        self.assertNotIn(" begins", run().stdout)
        (self.out / "window_tasks.json").unlink()
        done = run()
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(done.stdout.count(" begins"), 2, done.stdout)
        self.assertIn("--from: nowhere has no run sb", run("--from", "nowhere", "sb").stdout)

    def test_a_model_turned_into_stick_breaking(self):
        self.run_script(*self.lengths, "rope")
        arguments = ("from_rope.sh", "--from", self.out / "seed-1/rope", "--rates", "1e-3,2e-3", "--jobs", "2")
        self.out = self.folder / "turned"
        self.run_script(*arguments)
        text = (self.out / "from_rope.md").read_text()
        self.assertRegex(text, r"\| rate 1e-3 \| (not reached|0.0M) \| \d\.\d{3} \|\n\| rate 2e-3 ")
        self.assertNotIn(" begins", self.run_script(*arguments))

    def reproduce(self, *arguments, out="", code=0):
        command = [self.folder / "scripts/reproduce.py", "--out", out or self.out, "--corpus", "texts", *arguments]
        done = subprocess.run(list(map(str, command)), cwd=self.folder, env=self.environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
        self.assertEqual(done.returncode, code, done.stdout)
        return done.stdout

    def test_all_of_them(self):
        script = self.folder / "scripts/reproduce.py"
        text = script.read_text()
        head, rest = text.split('LENGTHS = """')
        script.write_text(head + "LENGTHS = ['sb_norm']" + rest.split(".split()", 1)[1].replace('"1,2,3"', '"1,2"'))
        few = ["--", *TINY, "--stages.0.length=3 steps", "--stages.0.schedule.warmup=1 steps"]
        sweep = self.folder / "configs/sweeps/gate_penalty.yaml"
        sweep.write_text(sweep.read_text().replace("[0, 1e-3, 1e-2, 1e-1, 1]", "[0]"))

        self.assertIn("unknown experiment 'length'; there are lengths, needles", self.reproduce("length", code=2))
        self.assertIn("has no tokenizer.model", self.reproduce("--corpus", "nowhere", code=2))
        self.assertRegex(self.reproduce("--list"), r"(?m)^lengths +\d+ s  loss by length")
        endless = [option.replace("=3 steps", "=1000000 steps") for option in few]
        stopped = self.reproduce("lengths", "gate_penalty", "--limit", "3", *endless, code=85)
        self.assertIn("the same command continues", stopped)
        self.assertNotIn("gate_penalty", stopped)
        self.assertTrue(list(self.out.glob("lengths/seed-1/sb_norm/checkpoints/step-*")))
        shutil.rmtree(self.out)

        model = self.folder / "configs/lengths_sb_norm.yaml"
        model.write_text(model.read_text() + "nonsense: 1\n")
        done = self.reproduce("--jobs", "2", "lengths", "gate_penalty", *few, code=3)
        self.assertIn("reproduce: lengths failed with exit code 3", done)
        self.assertRegex(done, r"lengths: seed-2/sb_norm begins \(its output: ")  # as those beside another do
        self.assertIn("reproduce: gate_penalty is done after", done)
        self.assertTrue((self.out / "gate_penalty/sweep.json").is_file())

        model.write_text(model.read_text().replace("nonsense: 1\n", ""))
        script.write_text(script.read_text().replace("seed-2/sb\"", "seed-2/sb_norm\"").replace("512,2048,8192,16384", "256")
                          .replace('"16384", "--batches", "8"', '"256", "--batches", "1"'))
        self.reproduce("lengths", "skip", *few)
        kept = self.out / "skip/skip.jsonl"
        self.assertEqual({json.loads(line)["length"] for line in kept.read_text().splitlines()}, {256})
        (self.out / "skip/skip.jsonl").write_text("kept\n")
        self.reproduce("skip", *few)
        self.assertEqual(kept.read_text(), "kept\n")

        archive, other = self.folder / "kept.tar.gz", self.folder / "other"
        self.assertIn("kept.tar.gz: ", self.reproduce("--pack", archive))
        shutil.unpack_archive(archive, other)
        self.assertEqual(list(other.rglob("checkpoints")), [])
        before = (other / "gate_penalty/sweep.json").read_bytes()
        self.reproduce("gate_penalty", *few, out=other)
        self.assertEqual(list(other.rglob("checkpoints")), [])  # nothing was trained
        self.assertEqual((other / "gate_penalty/sweep.json").read_bytes(), before)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
