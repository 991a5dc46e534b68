"""tests/bench/several_gpus.py with programs in place of sbtrain, PyTorch and nvidia-smi: which options and GPUs each
measurement gets, what is measured again and what is not, and the tables.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = str(Path(__file__).resolve().parents[1] / "bench/several_gpus.py")
PROGRAM = """#!/usr/bin/env -S python3 -IS
import json, os, sys
words = sys.argv[1:]
if words[:2] == ["config", "show"]:
    sys.exit(print("model.width=1"))
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps({"gpus": gpus, "words": words}) + "\\n")
if os.environ.get("FAIL", "nothing") in " ".join(words):
    sys.exit(8)
count = len(gpus.split(","))
if "collectives" in words:
    sys.exit(print(json.dumps({"collective": "all_gather", "dtype": "bf16", "setting": "default", "bytes": 2**20,
                               "seconds": 1e-3, "bus_bytes_per_second": 2e11, "beside_products_seconds": 2e-3,
                               "products_slowdown": 1.25})))
if words[0] == "eval":
    layers = [{"layer": 0, "keys_read": 0.25, "hops": {"2": 1, "4": 3, "8": 7}}, {"layer": 1, "keys_read": None}]
    sys.exit(open(words[words.index("--json") + 1], "w").write(json.dumps({"reach": [{"layers": layers}]})) * 0)
if words[0] == "train":
    os.makedirs(words[words.index("--out") + 1])
    with open(words[words.index("--out") + 1] + "/metrics.jsonl", "w") as file:
        for step in range(1, 7):
            file.write(json.dumps({"step": step, "train/loss": 3 + count * 1e-4, "train/tokens_per_second": 100 * count,
                                   "train/exposed_communication": 0.125}) + "\\n")
    sys.exit(0)
slower = 0.5 if "copy_engines" in " ".join(words) else 1
print(json.dumps({"tokens_per_second": 1000 * count * slower, "step_seconds": 0.5, "memory_bytes": 2**30,
                  "parts": {"optimizer": 0.25, "attention": 0.5}, "parts_of_ranks": {"optimizer": [0.25, 0.125]}}))
"""


class SeveralGpus(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.out, self.calls_file = self.folder / "out", self.folder / "calls"
        self.add("sbtrain", PROGRAM)
        self.add("python", "#!/bin/sh\n" + r"""echo '{"tokens_per_second": 3200, "memory_bytes": 1}'""")
        self.smi("143771")

    def add(self, name, text):
        file = self.folder / name
        file.write_text(text)
        file.chmod(0o755)

    def smi(self, memory):
        self.add("nvidia-smi", "#!/bin/sh\n" + "".join(f"echo '{n}, {memory}'\n" for n in range(4)))

    def call(self, *words, code=0, **variables):
        self.calls_file.write_text("")
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "CALLS": str(self.calls_file),
                       "SBTRAIN": str(self.folder / "sbtrain"), "PYTHON": str(self.folder / "python"), **variables}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        result = subprocess.run([SCRIPT, *words, "--out", self.out] if "--" not in words else
                                [SCRIPT, "--out", self.out, *words], env=environment, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=60)
        self.assertEqual(result.returncode, code, result.stdout)
        return result.stdout

    def calls(self):
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    def test_each_measurement_once(self):
        listed = self.call("--list")
        self.assertIn("steps: 20 measurements", listed)
        self.assertIn("steps-3b_sb-copy_engines-4", listed)
        self.call()
        calls = self.calls()
        self.assertEqual(len(calls), 2 + 20 + 4 + 16 + 17)
        self.assertEqual(self.call(), "")
        self.assertEqual(self.calls(), [])
        self.assertEqual({call["gpus"] for call in calls}, {"0", "0,1", "0,1,2,3"})
        for call in calls:
            self.assertEqual(call["words"][-1], f"--gpus={len(call['gpus'].split(','))}")
        one = next(call["words"] for call in calls if "--train.reduce_engine=copy_engines" in call["words"]
                   and "3b_sb" in " ".join(call["words"]) and call["gpus"] == "0,1,2,3")
        for option in ("--train.micro_batch=4", "--train.batch=16", "--model.attention.skip_epsilon=0"):
            self.assertIn(option, one)
        tables = self.call("--tables")
        self.assertIn("| all_gather | bf16 | 4 | default | 1 | 1.000 | 200 | 2.000 | 25% |", tables)
        self.assertIn("| 1b_sb | 4 | copy engines | 500 | 50.0% | 100.0% | - |", tables)
        self.assertIn("| 1b_sb | 4 | kernels | 1,000 | 125 to 250 | 125 to 250 | 0.0 ms |", tables)
        self.assertIn("| 350m_sb, skipping | 262,144 | 4 | 2 | 4,000 | 4.00 |", tables)

    def test_several_at_a_time(self):
        self.call("--only", "steps,fsdp2", "--side-by-side")
        self.assertEqual(json.loads((self.out / "beside-1.json").read_text())["at_once"], 4)
        lines = [json.loads(file.read_text()) for file in self.out.glob("steps-*-kernels-1.json")]
        self.assertEqual({line["devices"] for line in lines}, {"0", "1", "2", "3"})
        lines = [json.loads(file.read_text()) for file in self.out.glob("steps-*-2.json")]
        self.assertEqual({line["devices"] for line in lines}, {"0,1", "2,3"})
        self.assertEqual(len(self.calls()), 20 + 2)  # the first of either size alone as well
        self.assertIn("| 1b_rope | 4 | kernels | 1,000 | 100.0% | 100.0% | 125.0% |", self.call("--tables"))

    def test_trained_weights(self):
        self.call("--only", "trained", "--run", self.folder / "run", "--data", self.folder / "long.h5", "--row", "4096")
        calls = [call["words"] for call in self.calls()]
        self.assertEqual([words[0] for words in calls], ["eval", "train", "train", "train"])
        for option in ("--train.sequence_length=4096", "--train.context_parallel=4", "--train.gpus=4"):
            self.assertIn(option, calls[-1])
        tables = self.call("--tables")
        self.assertIn("| run | 4 | 400 | 4.00 | 12.5% | 3.00040 | 3.0e-04 |", tables)
        self.assertIn("| layer 0 | 25% | 1 | 3 | 7 |", tables)

    def test_what_has_failed_is_measured_again(self):
        output = self.call("--only", "fp8", code=1, FAIL="3b_sb")
        self.assertIn("exit code 8", output)
        self.assertIn("failed: fp8-3b_sb-1, fp8-3b_sb-2, fp8-3b_sb-4, fp8-3b_sb-copy_engines-4", output)
        self.assertEqual(len(self.calls()), 16)
        self.call("--only", "fp8")
        self.assertEqual(len(self.calls()), 4)

    def test_limits_and_options(self):
        self.assertIn("goes on", self.call("--only", "steps", "--limit", "5", code=85))
        self.assertEqual(self.calls(), [])
        self.smi("81559")
        self.call("--only", "muon", "--gpus", "2", "--", "--train.batch=2", "--train.sharding=none")
        words = self.calls()[0]["words"]
        self.assertEqual([word for word in words if word.startswith("--train.batch")], ["--train.batch=2"])
        self.assertIn("--train.micro_batch=4", words)
        self.assertIn("--train.sharding=none", words)
        self.assertIn("this machine has 4", self.call("--gpus", "8", code=1))
        self.assertIn("needs --run", self.call("--only", "trained", code=2))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
