#!/usr/bin/env python3
"""The GPUs that a program started here would see, a line each, by the names that CUDA_VISIBLE_DEVICES gives them.

That variable names them where it is set, even if it names none, and `nvidia-smi` lists them otherwise. Without a GPU or
a driver nothing is printed.
"""
import os
import subprocess


def listed():
    """[index, MiB] of each GPU that nvidia-smi lists."""
    command = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if row[0].isdigit()]  # not "No devices were found"


def visible_gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = [name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
        return names[:names.index("-1")] if "-1" in names else names  # none is visible from there on
    return [row[0] for row in listed()]


def smallest_memory():
    """GiB of the machine's smallest GPU; 0 without one."""
    return min((float(row[1]) / 1024 for row in listed()), default=0)


if __name__ == "__main__":
    print("".join(f"{name}\n" for name in visible_gpus()), end="")
