"""scripts/optimizers.py and scripts/plot_optimizers.py from start to end, with a tiny model: runs that are stopped in the
middle, go on, and are not trained twice.

    optimizers_test.py SBTRAIN TEXT.jsonl
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM, TEXT = (str(Path(path).resolve()) for path in sys.argv[1:3])
SCRIPT = str(ROOT / "scripts/optimizers.py")
TINY = ["--device=cpu", "--model.width=32", "--model.inner=32", "--model.heads=1", "--model.layers=1",
        "--model.vocab=400", "--train.sequence_length=64", "--train.micro_batch=2", "--train.batch=2",
        "--validation.tokens=128"]


@unittest.skipUnless(shutil.which("zstd"), "zstd is missing")
class Optimizers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.out, data = self.folder / "out", self.folder / "data"
        corpus = self.folder / "corpus"
        corpus.mkdir()
        self.run_command(PROGRAM, "tokenizer", "train", "--input", TEXT, "--vocab", "400", "--output",
                         corpus / "tokenizer.model")
        for kind in ("train", "held_out"):
            self.run_command("zstd", "-q", TEXT, "-o", corpus / f"{kind}-00.jsonl.zst")
        self.run_command(SCRIPT, "pack", "--corpus", corpus, "--data", data, "--train-text", "0.07",
                         "--held-out-text", "0.07")
        self.common = ["--out", self.out, "--data", data, "--tokens-per-length", "128", "--rates", "1e-3,1e-2",
                       "--extend", "1"]

    def run_command(self, *words, code=0):
        environment = {**os.environ, "SBTRAIN": PROGRAM, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(list(map(str, words)), env=environment, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=250)
        self.assertEqual(result.returncode, code, result.stdout)
        return result.stdout

    def small(self, *options, variant=()):
        return [SCRIPT, "small", *self.common, *variant, "--models", "sb", "--decays", "0.1", "--seeds", "1,2",
                "--jobs", "2", "--grid-steps", "3", "--steps", "300", "--lengths", "32,64", "--", *TINY, *options]

    def results(self):
        return [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]

    def stop_after_the_grid(self, command, kind):
        """The results of a call that is stopped in the middle of the runs that take longer, of this kind."""
        environment = {**os.environ, "SBTRAIN": PROGRAM, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        while process.poll() is None and not any((self.out / "runs").glob(f"{kind}_*/metrics.jsonl")):
            time.sleep(0.005)
        process.terminate()
        self.assertEqual(process.wait(timeout=60), 85)
        self.assertTrue(any(path.is_dir() for path in (self.out / "runs").iterdir()))
        return self.results()

    def test_goes_on_after_a_stop(self):
        before = self.stop_after_the_grid(self.small(), "seed")
        file = self.out / "results.jsonl"
        with open(file, "a", encoding="utf-8") as results:
            results.write('{"run": {"kind"')  # a line that was cut off
        self.run_command(*self.small())
        results = self.results()
        self.assertEqual(results[:len(before)], before)
        # Of two rates the best is at an edge, beyond which one more is trained.
        self.assertEqual([sum(r["run"]["kind"] == kind for r in results) for kind in ("grid", "seed", "shorter")],
                         [6, 4, 4])
        self.assertEqual(self.run_command(*self.small()), "")  # nothing is left to do
        self.assertEqual(self.results(), results)
        self.assertEqual([path.name for path in (self.out / "runs").iterdir() if path.is_dir()], [])
        for run in results:
            self.assertEqual(run["validation"][-1][0], run["run"]["steps"] * 128)
            self.assertEqual(sorted(run.get("lengths", {})), ["32", "64"] if run["run"]["kind"] == "seed" else [])
        for optimizer in ("adamw", "muon"):
            grid = [r for r in results if r["run"]["kind"] == "grid" and r["run"]["optimizer"] == optimizer]
            chosen = min(grid, key=lambda r: r["validation"][-1][2])["run"]["lr"]
            self.assertEqual({r["run"]["lr"] for r in results if r["run"]["optimizer"] == optimizer
                              and r["run"]["kind"] != "grid"}, {chosen})
        self.a_variant_comes_last(results)
        tables = self.run_command(sys.executable, ROOT / "scripts/plot_optimizers.py", "--tables", self.out)
        self.assertIn("| sb, muon | 0.1 |", tables)
        self.assertIn("at AdamW's loss on the way", tables)
        self.assertIn("| sb, muon group | 0.1 |", tables)

    def a_variant_comes_last(self, before):
        variant = ["--variant", "muon group", "--train.optimizer=muon --train.qkv_matrices=group"]
        self.run_command(*self.small(variant=variant))
        results = self.results()
        self.assertEqual(results[:len(before)], before)
        more = [r["run"] for r in results[len(before):]]
        self.assertEqual({run["optimizer"] for run in more}, {"muon group"})
        self.assertEqual(sum(run["kind"] == "seed" for run in more), 2)
        chosen = next(r["run"]["lr"] for r in before if r["run"]["kind"] == "seed" and r["run"]["optimizer"] == "muon")
        rates = {run["lr"] for run in more if run["kind"] == "grid"}
        self.assertLessEqual({chosen / 10, chosen, chosen * 10}, rates)

    def test_a_large_model_has_rates_and_a_long_run(self):
        # With more steps than pass before the script is stopped.
        command = [SCRIPT, "large", *self.common, "--model", "350m_sb", "--steps", "60", "--", *TINY]
        before = self.stop_after_the_grid(command, "long")
        self.run_command(*command)
        results = self.results()
        self.assertEqual(results[:len(before)], before)
        self.assertEqual([(r["run"]["kind"], r["run"]["optimizer"], r["run"]["steps"]) for r in results],
                         [*[("grid", "adamw", 6)] * 2, *[("grid", "muon", 6)] * 2, ("grid", "adamw", 6),
                          ("grid", "muon", 6), ("long", "adamw", 60), ("long", "muon", 60)])
        for run in results[-2:]:
            tokens = [point[0] for point in run["training"]]
            self.assertEqual((tokens, len(set(tokens))), (sorted(tokens), 60))  # each step once
            self.assertLess(run["validation"][-1][1], 60)

    def test_long_runs_share_the_gpus(self):
        """On the CPU, which takes no notice of the GPUs that a run is given. The text comes in two files."""
        data = self.folder / "data"
        shutil.copy(data / "train.jsonl.zst", data / "train-01.jsonl.zst")
        (data / "train.jsonl.zst").rename(data / "train-00.jsonl.zst")
        self.run_command(SCRIPT, "large", *self.common, "--model", "350m_sb", "--steps", "20", "--gpus", "3,2,1,0",
                         "--gpus-per-run", "2", "--grid-steps", "4", "--keep", "--variant", "muon fp8",
                         "--train.optimizer=muon --train.precision=fp8", "--", *TINY)
        long = {r["run"]["optimizer"]: r for r in self.results() if r["run"]["kind"] == "long"}
        self.assertEqual(sorted(long), ["adamw", "muon", "muon fp8"])
        self.assertEqual({run["device"] for run in long.values()}, {"3,2", "1,0"})
        grid = [r for r in self.results() if r["run"]["kind"] == "grid"]
        self.assertEqual({r["device"] for r in grid}, {"0", "1", "2", "3"})
        self.assertEqual({r["run"]["steps"] for r in grid}, {4})
        self.assertEqual(long["muon fp8"]["run"]["lr"], long["muon"]["run"]["lr"])
        self.assertFalse(any(r["run"]["optimizer"] == "muon fp8" for r in self.results() if r["run"]["kind"] == "grid"))
        kept = [path.name for path in (self.out / "runs").iterdir() if path.is_dir()]
        self.assertEqual(sorted(name.split("_")[3] for name in kept), ["adamw", "muon", "muon-fp8"])
        one_file = data / "held_out.h5"  # as large as the text of one file
        self.assertGreater((data / "train.h5").stat().st_size, 1.5 * one_file.stat().st_size)
        tables = self.run_command(sys.executable, ROOT / "scripts/plot_optimizers.py", "--tables", self.out)
        self.assertIn("muon fp8", tables)
        self.assertIn("but there are 2 GPUs", self.run_command(SCRIPT, "large", *self.common, "--gpus", "0,1",
                                                                "--gpus-per-run", "3", code=1))

    def test_a_training_that_cannot_begin_is_no_result(self):
        output = self.run_command(*self.small("--model.heads=3"), code=1)
        self.assertIn("a training failed with exit code", output)
        self.assertFalse((self.out / "results.jsonl").exists())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
