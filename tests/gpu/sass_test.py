#!/usr/bin/env python3
"""Reads the machine code of the Hopper kernels in object files; no GPU is needed.

  tests/gpu/sass_test.py build/release/kernels/CMakeFiles/sbtrain_hopper_kernels.dir/attention/*_hopper.cu.o

What only costs speed is seen by no test of results. Of each kernel whose name ends in `hopper_kernel`:

- its products run on wgmma (HGMMA in machine code);
- nothing is spilled: there are no accesses to local memory (LDL, STL);
- products run in the background: where the compiler sees a register of a product in use before the wait, it
  ends a group and waits after each single instruction (warnings C7510 to C7519). A product has at least two,
  so more than every second one that ends a group (gsb0) is a sign of that.

Exit status 0: all is well. 1: what is printed is wrong. 77: the objects have no code for sm_90a, or there are
no cuobjdump and nvdisasm. Both come with the CUDA toolkit; scripts/setup.sh test fetches them otherwise.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = ("cuobjdump", "nvdisasm")
SKIPPED = 77
KERNEL = re.compile(r"\d([a-z_]+_hopper_kernel)(.*)")
FUNCTION = re.compile(r"^\s+Function : (\S+)", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);", re.MULTILINE)


def search_path():
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    folders += [str(ROOT / "third_party" / f"cuda-{tool}" / "bin") for tool in TOOLS]
    return os.pathsep.join(folders)


def run(tool, *arguments):
    environment = {**os.environ, "PATH": search_path()}
    program = shutil.which(tool, path=environment["PATH"])
    return subprocess.run([program, *arguments], env=environment, check=True, capture_output=True, text=True).stdout


def instructions_by_kernel(disassembly):
    """{kernel: [(opcode, operands)]} of a text by `cuobjdump -sass`."""
    parts = FUNCTION.split(disassembly)
    return {name: INSTRUCTION.findall(body) for name, body in zip(parts[1::2], parts[2::2])}


def faults_of(instructions):
    opcodes = [opcode.split(".")[0] for opcode, _ in instructions]
    products = [operands for opcode, operands in instructions if opcode.startswith("HGMMA")]
    spills = sum(opcode in ("LDL", "STL") for opcode in opcodes)
    ends = sum("gsb0" in operands for operands in products)
    if not products:
        yield "no product runs on wgmma (there is no HGMMA)"
    if spills:
        yield f"{spills} accesses to local memory (LDL, STL): registers are spilled"
    if 2 * ends > len(products):
        yield f"products wait for each other: {ends} of {len(products)} HGMMA end a group"


def short_name(kernel):
    """The main loop and the numbers among its template arguments: StickForwardMainloop<64, 0, 0>."""
    arguments = KERNEL.search(kernel)[2]
    length, name = re.search(r"(\d+)([A-Z]\w*)", arguments).groups()
    return f"{name[:int(length)]}<{', '.join(re.findall('L[ib]([0-9]+)', arguments))}>"


def main(objects):
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=search_path())]
    if missing:
        print(f"skipped: there is no {' and no '.join(missing)} (scripts/setup.sh test)")
        return SKIPPED
    if not objects:
        print("there are no object files of Hopper kernels to read")
        return 1
    checked = wrong = 0
    for path in objects:
        if "sm_90a" not in run("cuobjdump", "-lelf", path):
            print(f"skipped: {path} has no code for sm_90a (CMAKE_CUDA_ARCHITECTURES)")
            return SKIPPED
        kernels = instructions_by_kernel(run("cuobjdump", "-sass", "-arch", "sm_90a", path))
        for kernel, instructions in sorted(kernels.items()):
            if not KERNEL.search(kernel):
                continue
            checked += 1
            for fault in faults_of(instructions):
                wrong += 1
                print(f"{short_name(kernel)}: {fault}")
    print(f"{checked} kernels read")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
