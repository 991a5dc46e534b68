#!/usr/bin/env python3
"""Writes the wheel sbtrain-kernels around a library that package_kernels.sh has linked.

    scripts/package_kernels.py --library LIBRARY [--output dist] [--any-system]

The library has to load on every system of the wheel's tag; --any-system takes one that may not (a test's). The files
stand in the namespace package `sbtrain`, which the program's wheel fills too. Files are in the order of their names and of
one time, so that the same library gives the same bytes.
"""
import argparse
import pathlib
import re
import subprocess
import sys

from wheel_writer import PackageError, write_wheel

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "python/sbtrain-kernels"
TAG = "py3-none-manylinux_2_24_x86_64"
# What systems of the tag have: https://peps.python.org/pep-0600/ and auditwheel's policies.
NEWEST = {"GLIBC": (2, 24), "GLIBCXX": (3, 4, 22), "CXXABI": (1, 3, 10), "GCC": (6, 0, 0)}
LIBRARIES = {
    "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
}

METADATA = """Metadata-Version: 2.4
Name: sbtrain-kernels
Version: {version}
Summary: Stick-breaking and softmax attention for NVIDIA GPUs, in PyTorch
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.9
Provides-Extra: torch
Requires-Dist: torch>=2.4; extra == "torch"
Description-Content-Type: text/markdown

{description}"""
WHEEL = f"""Wheel-Version: 1.0
Generator: sbtrain package_kernels.py
Root-Is-Purelib: false
Tag: {TAG}
"""


def readelf(flag, library):
    done = subprocess.run(["readelf", "-W", flag, str(library)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise PackageError(f"readelf: {done.stderr.strip()}")
    return done.stdout


def check_systems(library):
    """Refuses a library that systems of the tag cannot load."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", library)))
    if needed - LIBRARIES:
        raise PackageError(f"{library} needs {', '.join(sorted(needed - LIBRARIES))}, which not every system has")
    for name, version in set(re.findall(r"\b([A-Z]+)_(\d+(?:\.\d+)+)\b", readelf("-V", library))):
        if name in NEWEST and tuple(int(x) for x in version.split(".")) > NEWEST[name]:
            raise PackageError(f"{library} needs {name}_{version}, which systems of {TAG} lack: link with zig")


def version_of_project():
    return re.search(r"^project\(sbtrain VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.M).group(1)


def contents(library):
    """The wheel's name and {path in it: (bytes, whether it is executable)}."""
    version = version_of_project()
    info = f"sbtrain_kernels-{version}.dist-info"
    files = {
        str(path.relative_to(SOURCES)): path.read_bytes()
        for path in SOURCES.rglob("*")
        if path.suffix in (".py", ".h") and "__pycache__" not in path.parts
    }
    files["sbtrain/kernels/libsbtrain_attention.so"] = library.read_bytes()
    files["sbtrain/kernels/include/sbtrain/attention.h"] = (ROOT / "include/sbtrain/attention.h").read_bytes()
    description = (ROOT / "docs/python.md").read_text() if (ROOT / "docs/python.md").exists() else ""
    files[f"{info}/METADATA"] = METADATA.format(version=version, description=description).encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    executable = {path: (data, path.endswith(".so")) for path, data in files.items()}
    return f"sbtrain_kernels-{version}-{TAG}.whl", executable


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("dist"))
    parser.add_argument("--any-system", action="store_true")
    options = parser.parse_args()
    try:
        if not options.any_system:
            check_systems(options.library)
        name, files = contents(options.library)
        options.output.mkdir(parents=True, exist_ok=True)
        write_wheel(options.output / name, files)
    except (PackageError, OSError) as error:
        print(f"package_kernels: {error}", file=sys.stderr)
        return 1
    print(options.output / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
