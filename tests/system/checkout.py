"""A checkout of their own for tests of scripts."""

import shutil
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Checkout(unittest.TestCase):
    """self.folder has scripts/ and configs/, and is removed after each test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for part in ("scripts", "configs"):
            shutil.copytree(ROOT / part, self.folder / part)
