#!/usr/bin/env python3
"""The ctypes layer of the attention kernels, without a package and without a GPU: its structs are those of the header,
and the library's sizes, refusals and errors come through.

    SBTRAIN_ATTENTION_LIBRARY=build/release/kernels/c_api/libsbtrain_attention.so python3 tests/torch/c_interface_test.py

Exit status: 0 good, 1 not good, 77 there is no library, which builds without CUDA do not make.
"""
import ctypes
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python/sbtrain-kernels"))
sys.dont_write_bytecode = True
from sbtrain import kernels  # noqa: E402

if not kernels.library_path().exists():
    print(f"skipped: {kernels.library_path()} does not exist (build the target sbtrain_c_api)")
    sys.exit(77)

TYPES = {
    "uint64_t": ctypes.c_uint64,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "sbtrain_rows": kernels.Rows,
    "sbtrain_fire": kernels.Fire,
    "sbtrain_fire_gradients": kernels.FireGradients,
}


def header_structs():
    """Each struct's fields and their ctypes types, as the header declares them."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "include/sbtrain/attention.h").read_text(), flags=re.S)
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\}", text, flags=re.S):
        fields = []
        for declaration in filter(None, (x.strip() for x in body.split(";"))):
            kind, names = re.fullmatch(r"(?:const )?(\w+)\s*(.*)", declaration, flags=re.S).groups()
            for field in (x.strip() for x in names.split(",")):
                fields.append((field.lstrip("* "), ctypes.c_void_p if field.startswith("*") else TYPES[kind]))
        yield name, fields


def problem(**changes):
    fields = {"compute_capability": 90, "heads": 8, "head_dim": 64, "tokens": 2000, "sequences": 2, "max_seqlen": 1000}
    return kernels.StickBreaking(**{**fields, **changes})


class CInterface(unittest.TestCase):
    def test_the_structs_are_those_of_the_header(self):
        ours = {**kernels.STRUCTS, "sbtrain_rows": kernels.Rows, "sbtrain_fire": kernels.Fire}
        ours["sbtrain_fire_gradients"] = kernels.FireGradients
        found = dict(header_structs())
        self.assertEqual(set(found), set(ours))
        for name, fields in found.items():
            self.assertEqual([x[:2] for x in ours[name]._fields_], fields, name)

    def test_workspace(self):
        forward = kernels.workspace("stickbreaking", problem(), backward=False)
        backward = kernels.workspace("stickbreaking", problem(), backward=True)
        self.assertGreaterEqual(forward, 4 * 2000)
        self.assertGreater(backward, forward)
        grouped = kernels.workspace("stickbreaking", problem(kv_heads=2), backward=True)
        self.assertGreaterEqual(grouped, backward)
        softmax = kernels.Softmax(
            compute_capability=80, heads=8, head_dim=64, tokens=2000, sequences=2, max_seqlen=1000, bias=2
        )
        self.assertGreater(kernels.workspace("softmax", softmax, backward=True), 4 * 2000 * 8)
        decode = kernels.Decode(heads=8, head_dim=64, batch=2, capacity=4096)
        self.assertGreater(kernels.workspace("decode", decode), 0)

    def test_refusals_have_a_code_and_name_the_field(self):
        for code, text, fields in (
            ("invalid", "head_dim", {"head_dim": 60}),
            ("unsupported", "head_dim", {"head_dim": 264}),
            ("unsupported", "key_tokens", {"key_tokens": 4000}),
            ("invalid", "remainder", {"remainder": 7}),
            ("invalid", "skip_epsilon", {"skip_epsilon": -1.0}),
        ):
            with self.assertRaises(kernels.AttentionError) as refused:
                kernels.workspace("stickbreaking", problem(**fields), backward=True)
            self.assertEqual(refused.exception.code, code)
            self.assertIn(text, str(refused.exception))

    def test_versions(self):
        self.assertRegex(kernels.build(), r"sbtrain \d+\.\d+.*CUDA \d+\.\d+")
        later = problem()
        later.version = kernels.VERSION + 1
        with self.assertRaises(kernels.AttentionError) as refused:
            kernels.workspace("stickbreaking", later, backward=False)
        self.assertEqual(refused.exception.code, "version")

    def test_without_a_driver_the_error_names_the_one_that_is_needed(self):
        try:
            kernels.check_driver()
        except kernels.AttentionError as error:
            self.assertEqual(error.code, "driver")
            self.assertIn("nvidia-smi", str(error))


if __name__ == "__main__":
    unittest.main()
