"""data/fineweb_edu.sh and data/slimpajama.sh, on small files with the schema of the data sets.

    recipes_test.py SBTRAIN TEXT.jsonl
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM, TEXT = (str(Path(path).resolve()) for path in sys.argv[1:3])
PYTHON = subprocess.run([ROOT / "scripts" / "python.sh"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def has_pyarrow():
    return subprocess.run([PYTHON, "-c", "import pyarrow"], stderr=subprocess.DEVNULL).returncode == 0


def zstd(data):
    """A Zstandard frame of blocks that are stored as they are (RFC 8878, section 3.1.1)."""
    frame = b"\x28\xb5\x2f\xfd\xa0" + len(data).to_bytes(4, "little")
    for at in range(0, len(data), 65536):
        block = data[at:at + 65536]
        frame += (len(block) << 3 | (at + 65536 >= len(data))).to_bytes(3, "little") + block
    return frame


WRITE_PARQUET = """
import json, sys, pyarrow as pa, pyarrow.parquet as pq
rows = json.load(sys.stdin)
n = len(rows)
pq.write_table(pa.table({"text": [r["text"] for r in rows], "id": [f"<urn:uuid:{i}>" for i in range(n)],
    "dump": [r["dump"] for r in rows], "url": ["http://x"] * n, "file_path": ["s3://x"] * n,
    "language": ["en"] * n, "language_score": [0.9] * n, "token_count": [len(r["text"]) for r in rows],
    "score": [3.5] * n, "int_score": [4] * n}), sys.argv[1], compression="snappy", row_group_size=50)
"""


class Recipes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        with open(TEXT, encoding="utf-8") as file:
            text = "\n".join(json.loads(line)["text"] for line in file)
        self.paragraphs = [p for p in text.split("\n\n") if len(p) > 40]

    def run_recipe(self, name, *arguments):
        environment = {**os.environ, "SBTRAIN": PROGRAM, "VOCAB": "500", "SPLIT": "0.1",
                       "SBTRAIN_PYTHON": PYTHON}
        command = [str(ROOT / "data" / name), *map(str, arguments), "--threads", "1"]
        result = subprocess.run(command, env=environment, cwd=self.folder, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stdout)

    def info(self, store):
        """The number of documents, and what `sbtrain data info` says."""
        result = subprocess.run([PROGRAM, "data", "info", str(store)], stdout=subprocess.PIPE, text=True, check=True)
        return int(re.search(r"documents\s+(\d+)", result.stdout).group(1)), result.stdout

    def test_slimpajama(self):
        copy = self.folder / "SlimPajama-627B"
        for part, name in (("train/chunk1", "example_train_0"), ("train/chunk2", "example_train_1"),
                           ("validation/chunk1", "example_holdout_0"), ("test/chunk1", "example_holdout_0")):
            (copy / part).mkdir(parents=True)
            paragraphs = self.paragraphs[:20] if "train" not in part else self.paragraphs[20:]
            lines = [json.dumps({"text": p, "meta": {"redpajama_set_name": f"RedPajama{'AB'[i % 2]}"}})
                     for i, p in enumerate(paragraphs)]
            (copy / part / f"{name}.jsonl.zst").write_bytes(zstd("\n".join(lines).encode()))
        (copy / "README.md").write_text("about the data")
        self.run_recipe("slimpajama.sh", copy, "t.model", "out")
        train, text = self.info(self.folder / "out/train.h5")
        self.assertEqual(train, 2 * (len(self.paragraphs) - 20))
        self.assertIn("RedPajamaA", text)
        self.assertIn("RedPajamaB", text)
        self.assertEqual(self.info(self.folder / "out/validation.h5")[0], 20)

    @unittest.skipUnless(has_pyarrow(), f"{PYTHON} has no pyarrow (scripts/setup.sh python)")
    def test_fineweb_edu(self):
        copy = self.folder / "fineweb-edu"
        rows = [{"text": p, "dump": f"CC-MAIN-2024-1{i % 2}"} for i, p in enumerate(self.paragraphs)]
        (copy / "sample/10BT").mkdir(parents=True)
        (copy / "README.md").write_text("about the data")
        half = len(rows) // 2
        for name, part in (("000_00000.parquet", rows[:half]), ("001_00000.parquet", rows[half:])):
            subprocess.run([PYTHON, "-c", WRITE_PARQUET, str(copy / "sample/10BT" / name)],
                           input=json.dumps(part), text=True, check=True)
        self.run_recipe("fineweb_edu.sh", copy, "t.model", "out")
        train, text = self.info(self.folder / "out/train.h5")
        held, _ = self.info(self.folder / "out/train.validation.h5")
        self.assertEqual(train + held, len(rows))
        self.assertGreater(held, 0)
        self.assertIn("CC-MAIN-2024-10", text)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
