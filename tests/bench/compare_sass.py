#!/usr/bin/env python3
"""Compares the machine code of the same kernels in two builds; no GPU is needed.

  tests/bench/compare_sass.py OLD NEW [--only PATTERN] [--rename PATTERN REPLACEMENT]...

OLD and NEW are object files, or folders with the objects of CUDA sources. Prints of each kernel, before and after
where it changed:

- its instructions, and those of each innermost loop with products (HGMMA), which takes nearly all of the time;
- the registers of a thread: as the kernel starts, and the highest one in use, which setmaxnreg may allow to be more;
- accesses to local memory (LDL, STL), which are spills, and static shared memory in bytes;
- `same` where the instructions are the same but for the numbers of registers; otherwise whether this holds of the
  loops with products, or whether these have the same instructions in another order, and how many of the whole kernel
  are new and gone, those that moved included.

--only takes kernels whose names have the pattern, --rename gives kernels of OLD the names that they have in NEW.
Exit status 0: all kernels are the same. 1: some differ, or are in one build alone.
"""
import argparse
import collections
import difflib
import itertools
import pathlib
import re
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
import sass_test  # noqa: E402

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
TARGET = re.compile(r"^((?:@\S+ )?(?:BRA|BSSY|CALL|WARPSYNC)\b.*?)0x([0-9a-f]+)$")
REGISTER = re.compile(r"\b(UR|UP|R|P|B)(\d+)\b")
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:\d+ SHARED:(\d+)")

Kernel = collections.namedtuple("Kernel", "code loops registers highest spills shared")


def normalised(instructions):
    """Registers are numbered by their first use; targets of branches are distances, or all the same further away."""
    names = {}
    first, last = instructions[0][0], instructions[-1][0]
    lines = []
    for address, text in instructions:
        target = TARGET.search(text)
        if target:
            to = int(target[2], 16)
            text = target[1] + (str(to - address) if first <= to <= last else "further")
        lines.append(REGISTER.sub(lambda m: names.setdefault(m[0], f"{m[1]}#{len(names)}"), text))
    return lines


def loops_with_products(instructions):
    """The innermost loops that have products. Waits that are rare stand behind the end of the kernel and branch back
    from there; what lies between is no loop."""
    index = {address: i for i, (address, _) in enumerate(instructions)}
    loops = []
    for i, (_, text) in enumerate(instructions):
        target = TARGET.search(text)
        begin = index.get(int(target[2], 16), i) if target else i
        inside = " ".join(x for _, x in instructions[begin:i])
        if "HGMMA" in inside and "EXIT" not in inside:
            loops.append((begin, i + 1))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [normalised(instructions[begin:end]) for begin, end in inner]


def short_names(kernels):
    """Without namespaces, parameters and what makes names of one source file unique."""
    tool = shutil.which("cu++filt", path=sass_test.search_path()) or shutil.which("c++filt")
    if tool:
        text = subprocess.run([tool], input="\n".join(kernels), check=True, capture_output=True, text=True).stdout
    else:
        text = "\n".join(kernels)
    names = []
    for name in text.splitlines():
        name = re.sub(r"\(anonymous namespace\)|<unnamed>|\w*_INTERNAL_\w+", "", name)
        name = re.sub(r"^(static )?void ", "", re.sub(r"\b\w*::", "", name.replace(" ", "\0")).replace("\0", " "))
        names.append(re.sub(r"\((int|bool|unsigned)\)", "", name).split("(")[0].replace(" ", ""))
    return names


def kernels_of(path):
    """{object's name and kernel's name: Kernel}"""
    path = pathlib.Path(path)
    objects = sorted(path.rglob("*.cu.o")) if path.is_dir() else [path]
    found = {}
    for file in objects:
        usage = {name: (int(registers), int(shared))
                 for name, registers, shared in USAGE.findall(sass_test.run("cuobjdump", "-res-usage", file))}
        parts = sass_test.FUNCTION.split(sass_test.run("cuobjdump", "-sass", file))
        for name, mangled, text in zip(short_names(parts[1::2]), parts[1::2], parts[2::2]):
            instructions = [(int(address, 16), line) for address, line in INSTRUCTION.findall(text)]
            registers, shared = usage.get(mangled, (0, 0))
            highest = max((int(n) for n in re.findall(r"\bR(\d+)\b", text)), default=0)
            spills = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for _, line in instructions)
            found[file.name.split(".")[0] + ": " + name] = Kernel(
                normalised(instructions), loops_with_products(instructions), registers, highest, spills, shared)
    return found


def without_registers(code):
    return [re.sub(r"#\d+|\.reuse|(?<=(?:BRA|SSY|ALL|YNC)\b).*", "", line) for line in code]


def verdict(old, new):
    if old.code == new.code:
        return "same"
    before, after = without_registers(old.code), without_registers(new.code)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    kept = sum(block.size for block in matcher.get_matching_blocks())
    loops = ""
    if old.loops and old.loops == new.loops:
        loops = "same loops; "
    elif old.loops and all(sorted(without_registers(a)) == sorted(without_registers(b))
                           for a, b in itertools.zip_longest(old.loops, new.loops, fillvalue=[])):
        loops = "loops in another order; "
    return f"{loops}{len(after) - kept} new, {len(before) - kept} gone"


def change(old, new):
    return str(new) if old == new else f"{old} -> {new}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--rename", nargs=2, action="append", default=[], metavar=("PATTERN", "REPLACEMENT"))
    arguments = parser.parse_args()
    old = {}
    for name, kernel in kernels_of(arguments.old).items():
        for pattern, replacement in arguments.rename:
            name = re.sub(pattern, replacement, name)
        old[name] = kernel
    new = kernels_of(arguments.new)
    names = [name for name in sorted(old.keys() | new.keys()) if re.search(arguments.only, name)]
    print("| kernel | instructions | loops with products | registers | highest | spills | shared | |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = not names
    for name in names:
        if name not in old or name not in new:
            print(f"| {name} | | | | | | | only in {'NEW' if name in new else 'OLD'} |")
            wrong = True
            continue
        a, b = old[name], new[name]
        result = verdict(a, b)
        wrong = wrong or result != "same"
        columns = [change(len(a.code), len(b.code))]
        columns.append(change(*(" ".join(str(len(loop)) for loop in x.loops) for x in (a, b))))
        columns += [change(getattr(a, field), getattr(b, field)) for field in Kernel._fields[2:]]
        print(f"| {name} | {' | '.join(columns)} | {result} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
