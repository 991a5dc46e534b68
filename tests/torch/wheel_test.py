#!/usr/bin/env python3
"""The wheel sbtrain-kernels around the library of the build folder: the same bytes twice, a record that is right, and an
installation that imports beside another part of the namespace package.

Exit status: 0 good, 1 not good, 77 there is no library, or no pip.
"""
import base64
import csv
import hashlib
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
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

    def test_it_installs_and_imports_beside_the_program(self):
        target = self.folder / "site"
        install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(target)]
        done = subprocess.run([*install, str(self.wheel("c"))], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        other = self.folder / "other/sbtrain/program"  # of the program's wheel
        other.mkdir(parents=True)
        (other / "__init__.py").write_text("here = True\n")
        code = "import sbtrain.program, sbtrain.kernels as k; assert sbtrain.program.here; print(k.library_path(), k.build())"
        environment = {"PYTHONPATH": f"{self.folder / 'other'}:{target}"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(str(target), done.stdout)

    def test_a_library_of_a_newer_system_is_refused(self):
        done = make(self.folder / "d")
        if done.returncode == 0:
            self.skipTest("the build's own linker makes a library for old systems")
        self.assertIn("link with zig", done.stderr)


if __name__ == "__main__":
    unittest.main()
