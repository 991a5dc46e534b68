#!/usr/bin/env python3
"""Makes a wheel of sbtrain's program from a tree that `cmake --install` has made.

    scripts/package.py program --tree TREE --output dist

The wheel has the tree in the folder sbtrain/program of the namespace package `sbtrain`, which other wheels fill too, and
a command `sbtrain` that runs the program there. auditwheel puts the libraries that it needs beside it and finds the tag
of the systems that it runs on. The archive is written anew at the end: files in the order of their names, all of one time.
"""

import argparse
import os
import pathlib
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import zipfile

from wheel_writer import PackageError, write_wheel

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What may be in a wheel; LICENSES.md says under which licences. Anything else has to be looked at first.
BUNDLED = re.compile(r"lib(aec|brotli(common|dec|enc)|cpp-httplib|crypto|fmt|gfortran|gomp|openblas|pcre2-8|quadmath|"
                     r"sentencepiece|sentencepiece_train|spdlog|ssl|sz|utf8proc|yaml-cpp|z|zstd)[-.]")

# The newest versions of symbols that the libstdc++ of RHEL 9 lacks, and what takes their place: of 3.4.30 nothing but
# condition_variable::wait is used, which every libstdc++ has as 3.4.11 too.
NEWER, OLDER = "GLIBCXX_3.4.30", "GLIBCXX_3.4.11"
EXPECTED = {"_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"}

LAUNCHER = '''"""The program sbtrain, which the command `sbtrain` runs."""
import os
import sys

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "sbtrain")


def name():
    """sbtrain, or the path of this command where PATH has no sbtrain or another: the program names commands to try."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        found = os.path.join(folder, "sbtrain")
        if os.path.isfile(found) and os.access(found, os.X_OK):
            return "sbtrain" if os.path.realpath(found) == os.path.realpath(sys.argv[0]) else sys.argv[0]
    return sys.argv[0]


def main():
    # What only Python does (Parquet, for one), this interpreter does.
    os.environ.setdefault("SBTRAIN_PYTHON", sys.executable)
    os.execv(PROGRAM, [name(), *sys.argv[1:]])
'''


def output_of(*command, **options):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          **options)
    if done.returncode:
        raise PackageError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


# ---- The libraries ------------------------------------------------------------------------------


def libraries_of(elf):
    """{soname: file} of all that the loader would load."""
    return dict(re.findall(r"^\s*(\S+) => (/\S+)", output_of("ldd", elf), flags=re.M))


def symbols_of_version(elf, version):
    table = output_of("objdump", "-T", elf)
    return {line.split()[-1] for line in table.splitlines() if f"({version})" in line or f" {version} " in line}


def lower_version(elf):
    """Asks for the older version of the one symbol of the newer: two fields of the ELF's version references."""
    used = symbols_of_version(elf, NEWER)
    if not used:
        return
    if used - EXPECTED:
        raise PackageError(f"{elf}: {sorted(used - EXPECTED)} of {NEWER} have no older version")
    data = bytearray(elf.read_bytes())
    sections = {name: (offset, size) for name, offset, size in elf_sections(data)}
    strings, size = sections[".dynstr"]
    name = data.find(OLDER.encode() + b"\0", strings, strings + size) - strings
    if name < 0:
        raise PackageError(f"{elf}: it uses nothing of {OLDER}, whose name would be needed")
    at = sections[".gnu.version_r"][0]
    while True:
        _, _, _, first, following = struct.unpack_from("<HHIII", data, at)
        item = at + first
        while True:
            _, _, _, text, next_item = struct.unpack_from("<IHHII", data, item)
            end = data.index(b"\0", strings + text)
            if data[strings + text:end] == NEWER.encode():
                struct.pack_into("<I", data, item, elf_hash(OLDER))
                struct.pack_into("<I", data, item + 8, name)
            if not next_item:
                break
            item += next_item
        if not following:
            break
        at += following
    elf.write_bytes(data)


def elf_sections(data):
    """(name, offset, size) of each section of a 64-bit little-endian ELF file."""
    table, = struct.unpack_from("<Q", data, 40)
    entry, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + entry * n) for n in range(count)]
    text = headers[names][4]
    for header in headers:
        end = data.index(b"\0", text + header[0])
        yield data[text + header[0]:end].decode(), header[4], header[5]


def elf_hash(name):
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


# ---- The tree -----------------------------------------------------------------------------------


def openblas_of(program):
    """The OpenBLAS that the program loads, which is not among those that it is linked with."""
    found = re.search(r"OpenBLAS .*\((/.*)\)", output_of(program, "doctor"))
    if not found:
        raise PackageError(f"{program} doctor names no OpenBLAS")
    return pathlib.Path(found.group(1)).resolve()


def lay_out(tree, site):
    """Puts an installed tree into a folder as it will be in site-packages; returns the program's path."""
    home = site / "sbtrain/program"
    shutil.copytree(tree, home, ignore=shutil.ignore_patterns("__pycache__"))
    (home / "__init__.py").write_text(LAUNCHER)
    program = home / "bin/sbtrain"
    openblas = home / "lib/sbtrain/libopenblas.so.0"
    openblas.parent.mkdir(parents=True)
    shutil.copy(openblas_of(program), openblas)
    output_of("strip", program)
    lower_version(program)
    nvidia = [f"$ORIGIN/../../../nvidia/{name}/lib" for name in ("cu13", "nccl", "cudnn")]
    output_of("patchelf", "--set-rpath", ":".join(nvidia), program)
    return program


def data_files(home, target):
    """Man page and completions go where the environment has such files."""
    for name in ("man", "bash-completion", "zsh"):
        if (home / "share" / name).exists():
            shutil.copytree(home / "share" / name, target / "share" / name)
            shutil.rmtree(home / "share" / name)


def section(name):
    """The lines of a section of scripts/dependencies.txt."""
    text = (ROOT / "scripts/dependencies.txt").read_text()
    found = re.search(rf"^\[{name}\]\n(.*?)(?=^\[|\Z)", text, flags=re.M | re.S)
    return [line for line in found.group(1).splitlines() if line and not line.startswith("#")]


def metadata(version, has_cuda):
    lines = ["Metadata-Version: 2.1", "Name: sbtrain", f"Version: {version}",
             "Summary: Pretrains Llama-style language models whose attention can be swapped",
             "License: Apache-2.0", "Requires-Python: >=3.8"]
    extras = {"plots": ["matplotlib"], **({"cuda": section("wheel-cuda")} if has_cuda else {})}
    for extra, packages in extras.items():
        lines.append(f"Provides-Extra: {extra}")
        for package in packages:
            lines.append(f'Requires-Dist: {package.removeprefix("wheel:")}; extra == "{extra}"')
    lines += ["Description-Content-Type: text/markdown", "", (ROOT / "README.md").read_text()]
    return "\n".join(lines)


def copyrights(files):
    """{name: text} of the copyright files of the distribution's packages that these files and the headers are from."""
    packages = {line.split()[0] for line in section("build") if line.split()[0].endswith("-dev")}
    for file in files:
        found = subprocess.run(["dpkg", "-S", str(file)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        packages |= {line.split(":")[0] for line in found.stdout.splitlines()}
    paths = {name: pathlib.Path("/usr/share/doc", name, "copyright") for name in sorted(packages)}
    return {name: path.read_bytes() for name, path in paths.items() if path.exists()}


def write_info(info, version, has_cuda, licences):
    info.mkdir()
    (info / "METADATA").write_text(metadata(version, has_cuda))
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: sbtrain\nRoot-Is-Purelib: false\n"
                                "Tag: py3-none-linux_x86_64\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nsbtrain = sbtrain.program:main\n")
    (info / "licenses").mkdir()
    for name in ("LICENSE", "LICENSES.md"):
        shutil.copy(ROOT / name, info / "licenses" / name)
    for name, text in licences.items():
        (info / "licenses" / f"{name}.txt").write_bytes(text)


# ---- The archive --------------------------------------------------------------------------------


def pack(site, wheel):
    """Writes a wheel of all that is in a folder."""
    files = {}
    for path in site.rglob("*"):
        if path.is_file():
            files[str(path.relative_to(site))] = path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR)
    write_wheel(wheel, files)


def read_wheel(wheel, site):
    """Unpacks a wheel with the permissions of its files, which zipfile leaves out."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            path = pathlib.Path(archive.extract(entry, site))
            if not entry.is_dir():
                path.chmod(entry.external_attr >> 16 & 0o777 or 0o644)


def with_libraries(wheel, elves, scratch):
    """The wheel with the libraries beside it and the tag that auditwheel finds."""
    lowered = scratch / "lowered"
    lowered.mkdir()
    for elf in elves:
        for soname, file in libraries_of(elf).items():
            if symbols_of_version(file, NEWER) and "libstdc++" not in soname:
                copy = pathlib.Path(shutil.copy(pathlib.Path(file).resolve(), lowered / soname))
                lower_version(copy)
    output_of(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", scratch / "repaired", wheel,
              env={**os.environ, "LD_LIBRARY_PATH": str(lowered)})
    repaired, = (scratch / "repaired").glob("*.whl")
    site = scratch / "repaired-site"
    read_wheel(repaired, site)
    for path in site.glob("sbtrain.libs/*"):
        if not BUNDLED.match(path.name):
            raise PackageError(f"{path.name} would be bundled: look at its licence, then add it to LICENSES.md and to "
                               "BUNDLED in scripts/package.py")
    return repaired.name, site


def pack_program(tree, output):
    with tempfile.TemporaryDirectory(prefix="sbtrain-package-") as folder:
        scratch = pathlib.Path(folder)
        site = scratch / "site"
        described = output_of(tree / "bin/sbtrain", "--version")
        version = described.split()[1]
        has_cuda = not re.search(r"CUDA backend +none", described)
        elves = [tree / "bin/sbtrain", openblas_of(tree / "bin/sbtrain")]
        bundled = {pathlib.Path(file).resolve() for elf in elves for file in libraries_of(elf).values()}
        program = lay_out(tree, site)
        data_files(program.parent.parent, site / f"sbtrain-{version}.data/data")
        write_info(site / f"sbtrain-{version}.dist-info", version, has_cuda, copyrights([*bundled, elves[1]]))
        wheel = scratch / f"sbtrain-{version}-py3-none-linux_x86_64.whl"
        pack(site, wheel)
        name, repaired = with_libraries(wheel, elves, scratch)
        output.mkdir(parents=True, exist_ok=True)
        pack(repaired, output / name)
        print(f"{output / name}: {(output / name).stat().st_size / 1e6:.1f} MB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=["program"])
    parser.add_argument("--tree", type=pathlib.Path, required=True, help="what cmake --install has made")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("dist"), help="where the wheel goes")
    arguments = parser.parse_args()
    try:
        pack_program(arguments.tree, arguments.output)
    except PackageError as error:
        sys.exit(f"package: {error}")


if __name__ == "__main__":
    main()
