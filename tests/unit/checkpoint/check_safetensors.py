"""Reads a safetensors file with nothing but Python's own modules and checks it against the format.

Usage: check_safetensors.py FILE; prints one line per tensor: name, dtype, shape, sum of bytes.
"""
import json
import struct
import sys

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
         "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}

with open(sys.argv[1], "rb") as file:
    content = file.read()
(length,) = struct.unpack("<Q", content[:8])
header = json.loads(content[8:8 + length])
data = content[8 + length:]
assert (8 + length) % 8 == 0, "data is not aligned"
metadata = header.pop("__metadata__", {})
assert all(isinstance(value, str) for value in metadata.values())

at = 0
for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
    begin, end = entry["data_offsets"]
    count = 1
    for size in entry["shape"]:
        count *= size
    assert begin == at, f"{name}: hole or overlap"
    assert end - begin == count * SIZES[entry["dtype"]], f"{name}: size"
    assert (8 + length + begin) % SIZES[entry["dtype"]] == 0, f"{name}: alignment"
    print(name, entry["dtype"], entry["shape"], sum(data[begin:end]))
    at = end
assert at == len(data), "bytes behind the last tensor"
