#!/usr/bin/env python3
"""The wheel sbtrain-kernels around the library of the build folder: the same bytes twice, a record that is right, and an
installation that imports beside another part of the namespace package.

Exit status: 0 good, 1 not good, 77 there is no library, or no pip.
"""
import base64
import csv
import hashlib
import importlib.util
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = pathlib.Path(os.environ.get("SBTRAIN_ATTENTION_LIBRARY", "/nowhere"))
if not LIBRARY.exists():
    print("skipped: SBTRAIN_ATTENTION_LIBRARY names no library (build the target sbtrain_c_api)")
    sys.exit(77)
if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
    print("skipped: this Python has no pip")
    sys.exit(77)


def make(folder, *options):
    command = [sys.executable, str(ROOT / "scripts/package_kernels.py"), "--library", str(LIBRARY), "--output", str(folder)]
    return subprocess.run([*command, *options], capture_output=True, text=True)


class Wheel(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)

    def wheel(self, name):
        done = make(self.folder / name, "--any-system")
        self.assertEqual(done.returncode, 0, done.stderr)
        return pathlib.Path(done.stdout.strip())

    def test_the_same_bytes_twice_and_a_true_record(self):
        first, second = self.wheel("a"), self.wheel("b")
        self.assertEqual(first.read_bytes(), second.read_bytes())
        with zipfile.ZipFile(first) as archive:
            names = archive.namelist()
            self.assertNotIn("sbtrain/__init__.py", names)
            (record,) = [x for x in names if x.endswith("RECORD")]
            rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
            self.assertEqual({x[0] for x in rows}, set(names))
            for name, digest, size in rows:
                if digest:
                    data = archive.read(name)
                    found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                    self.assertEqual((f"sha256={found}", str(len(data))), (digest, size), name)

    def test_it_runs_in_a_fresh_environment_beside_the_program(self):
        venv.create(self.folder / "venv", with_pip=True, symlinks=True)
        python = self.folder / "venv/bin/python3"
        (site,) = (self.folder / "venv/lib").glob("python3*/site-packages")
        other = site / "sbtrain/program"  # of the program's wheel
        other.mkdir(parents=True)
        (other / "__init__.py").write_text("here = True\n")
        install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", self.wheel("c")]
        done = subprocess.run(install, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        code = (
            "import sbtrain.program, sbtrain.kernels as k\n"
            "assert sbtrain.program.here\n"
            "x = k.StickBreaking(compute_capability=90, heads=4, head_dim=64, tokens=64, sequences=1, max_seqlen=64)\n"
            "print(k.library_path(), k.build(), k.workspace('stickbreaking', x, True))\n"
        )
        environment = {"PATH": "/usr/bin:/bin"}
        if importlib.util.find_spec("torch"):  # which is not installed once more for this
            environment["PYTHONPATH"] = str(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])
            code += (
                "import torch\n"
                "if hasattr(torch.library, 'custom_op'):  # else older than 2.4\n"
                "    from sbtrain.torch import stickbreaking_attention\n"
                "    q = torch.randn(1, 9, 2, 8, requires_grad=True)\n"
                "    stickbreaking_attention(q, q, q)[0].sum().backward()\n"
                "    assert q.grad.shape == q.shape\n"
            )
        done = subprocess.run([python, "-c", code], env=environment, cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith(str(site)), done.stdout)

    def test_a_library_of_a_newer_system_is_refused(self):
        done = make(self.folder / "d")
        if done.returncode == 0:
            self.skipTest("the build's own linker makes a library for old systems")
        self.assertIn("link with zig", done.stderr)


if __name__ == "__main__":
    unittest.main()
