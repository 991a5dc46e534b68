"""The C interface of sbtrain's attention kernels (include/sbtrain/attention.h) by ctypes.

It needs no package, and no GPU until a kernel is called; sbtrain.torch stands on it. The header says what the fields
mean. Structs are made by their name, and functions raise AttentionError with the library's text:

    from sbtrain import kernels
    x = kernels.StickBreaking(compute_capability=90, heads=24, head_dim=64, tokens=4096, sequences=1, max_seqlen=4096)
    x.workspace_bytes = kernels.workspace("stickbreaking", x, backward=False)
    kernels.call("sbtrain_stickbreaking_forward", x)
"""
import ctypes
import functools
import os
import pathlib
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

VERSION = 1
LIBRARY = "libsbtrain_attention.so"

REMAINDERS = {"none": 0, "value": 1, "vector": 2}
BIASES = {"none": 0, "alibi": 1, "fire": 2}
CODES = {1: "invalid", 2: "unsupported", 3: "version", 4: "driver", 5: "cuda", 6: "internal"}


class AttentionError(RuntimeError):
    """What a call was refused with: `code`, a value of CODES, and the library's text."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = CODES.get(code, str(code))


class Rows(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64)]


class Fire(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("c", "m", "w1", "b1", "w2", "b2")]


class FireGradients(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("c", "m", "w1", "b1", "w2")]


# How all structs begin, and how those of packed documents go on.
_CALL = [
    ("struct_size", c_uint64),
    ("version", c_uint32),
    ("device", c_int32),
    ("stream", c_void_p),
]
_PACK = [
    *_CALL,
    ("compute_capability", c_int32),
    ("heads", c_int32),
    ("kv_heads", c_int32),
    ("head_dim", c_int32),
    ("tokens", c_int64),
    ("key_tokens", c_int64),
    ("sequences", c_int64),
    ("max_seqlen", c_int64),
    ("cu_seqlens", c_void_p),
    ("key_cu_seqlens", c_void_p),
]


class _Call(ctypes.Structure):
    """A struct that begins with its size and the version."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(type(self)), version=VERSION, **fields)


class StickBreaking(_Call):
    _fields_ = [
        *_PACK,
        ("scale", c_float),
        ("attend_current", c_int32),
        ("remainder", c_int32),
        ("skip_epsilon", c_float),
        ("q", Rows),
        ("o", Rows),
        ("k", Rows),
        ("v", Rows),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("remainder_vector", c_void_p),
        ("log2_remainder", c_void_p),
        ("stop", c_void_p),
        ("d_o", Rows),
        ("dq", Rows),
        ("dk", Rows),
        ("dv", Rows),
        ("d_remainder", c_void_p),
        ("d_gate", c_void_p),
        ("d_gate_stride", c_int64),
        ("d_remainder_vector", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
    ]


class Softmax(_Call):
    _fields_ = [
        *_PACK,
        ("scale", c_float),
        ("bias", c_int32),
        ("window", c_int64),
        ("fire", Fire),
        ("q", Rows),
        ("o", Rows),
        ("k", Rows),
        ("v", Rows),
        ("lse", c_void_p),
        ("d_o", Rows),
        ("dq", Rows),
        ("dk", Rows),
        ("dv", Rows),
        ("d_fire", FireGradients),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
    ]


class Decode(_Call):
    _fields_ = [
        *_CALL,
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("scale", c_float),
        ("batch", c_int64),
        ("capacity", c_int64),
        ("q", Rows),
        ("o", Rows),
        ("k", Rows),
        ("v", Rows),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("lengths", c_void_p),
        ("attend_current", c_int32),
        ("remainder", c_int32),
        ("skip_epsilon", c_float),
        ("gate_cache", c_void_p),
        ("remainder_vector", c_void_p),
        ("bias", c_int32),
        ("window", c_int64),
        ("fire", Fire),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
    ]


STRUCTS = {"sbtrain_stickbreaking": StickBreaking, "sbtrain_softmax": Softmax, "sbtrain_decode": Decode}


def library_path():
    """$SBTRAIN_ATTENTION_LIBRARY, or the library that lies beside this file."""
    given = os.environ.get("SBTRAIN_ATTENTION_LIBRARY")
    return pathlib.Path(given) if given else pathlib.Path(__file__).with_name(LIBRARY)


@functools.lru_cache(maxsize=1)
def library():
    """The loaded library, whose functions check their arguments' types."""
    path = library_path()
    if not path.exists():
        raise AttentionError(
            6, f"{path} does not exist: install the wheel sbtrain-kernels, or set SBTRAIN_ATTENTION_LIBRARY to the "
            f"{LIBRARY} of a build folder"
        )
    lib = ctypes.CDLL(str(path))
    lib.sbtrain_attention_version.restype = c_uint32
    for name in ("sbtrain_last_error", "sbtrain_attention_build"):
        getattr(lib, name).restype = ctypes.c_char_p
    for name, struct in STRUCTS.items():
        if name == "sbtrain_decode":
            lib.sbtrain_decode_workspace.argtypes = [ctypes.POINTER(struct), ctypes.POINTER(c_uint64)]
            functions = ["sbtrain_stickbreaking_decode", "sbtrain_softmax_decode"]
        else:
            getattr(lib, f"{name}_workspace").argtypes = [ctypes.POINTER(struct), ctypes.c_int, ctypes.POINTER(c_uint64)]
            functions = [f"{name}_forward", f"{name}_backward"]
        for function in functions:
            getattr(lib, function).argtypes = [ctypes.POINTER(struct)]
    if lib.sbtrain_attention_version() < VERSION:
        raise AttentionError(3, f"{path} is older than this package: reinstall sbtrain-kernels")
    return lib


def _check(code):
    if code:
        raise AttentionError(code, library().sbtrain_last_error().decode())


def build():
    """The library's release, and the CUDA toolkit and architectures that it was built with."""
    return library().sbtrain_attention_build().decode()


def check_driver():
    """Raises AttentionError where there is no driver, or one that is too old; the text names the one needed."""
    _check(library().sbtrain_check_driver())


def call(function, struct):
    """Calls a function of the library that takes one struct."""
    _check(getattr(library(), function)(struct))


def workspace(kind, struct, backward=None):
    """The bytes of workspace of "stickbreaking", "softmax" or "decode", which has no backward pass."""
    count = c_uint64()
    passes = [] if backward is None else [int(backward)]
    _check(getattr(library(), f"sbtrain_{kind}_workspace")(ctypes.byref(struct), *passes, ctypes.byref(count)))
    return count.value
