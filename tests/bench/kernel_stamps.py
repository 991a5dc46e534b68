#!/usr/bin/env python3
"""Shows where the time of the kernels that decode goes.

Build with -DSBTRAIN_KERNEL_STAMPS=ON and CMAKE_CUDA_ARCHITECTURES=90a-real, then

  KERNEL_STAMPS=/tmp/stamps build/release/sbtrain bench decode --config configs/1b_sb.yaml --sequences 1
  tests/bench/kernel_stamps.py /tmp/stamps

A row is a kernel and the one in front of it, with medians over all steps, in microseconds after the last block of the
kernel in front ended: when blocks start, when they may use what that kernel wrote, when their inputs are there, when
their first weights are, when their sums are done (median and last block), and when the last block ends. Only kernels
that began before that end count, which are those of recorded steps. The stamps themselves take a tenth of the time.
"""
import collections
import glob
import sys

import numpy as np

STAMP = np.dtype([("at", "<u8", 6), ("n", "<i4"), ("k", "<i4"), ("block", "<i4"), ("padding", "<i4")])
LONGEST_NS = 80_000  # from the end of one kernel to that of the next


def read(path):
    count = int(np.fromfile(path, "<u4", 1)[0])
    return np.fromfile(path, STAMP, offset=4)[:count]


def launches(file, stamps, first):
    """The name of each launch, and an array [blocks, 6] in ns since `first`."""
    for n, k in sorted(set(zip(stamps["n"].tolist(), stamps["k"].tolist()))):
        mine = stamps[(stamps["n"] == n) & (stamps["k"] == k)]
        at = (mine["at"] - np.uint64(first)).astype(np.int64)
        at = at[np.argsort(at[:, 1], kind="stable")]
        blocks = int(mine["block"].max()) + 1
        for group in np.split(at, np.nonzero(np.diff(at[:, 1]) > 4000)[0] + 1):
            if 0.97 * blocks <= len(group) <= blocks:
                yield (file if n == 0 else f"{file} {n} x {k}"), group


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    files = {path.removeprefix(sys.argv[1] + "."): read(path) for path in glob.glob(glob.escape(sys.argv[1]) + ".*")}
    if not files:
        sys.exit(f"there is no {sys.argv[1]}.*; was KERNEL_STAMPS set, and SBTRAIN_KERNEL_STAMPS=ON in the build?")
    first = min(int(stamps["at"][:, 0].min()) for stamps in files.values())
    ordered = sorted((x for file in files.items() for x in launches(*file, first)), key=lambda x: x[1][:, 1].min())
    rows = collections.defaultdict(list)
    for (before, previous), (name, at) in zip(ordered, ordered[1:]):
        end = previous[:, 5].max()
        if at[:, 0].min() >= end or at[:, 5].max() - end > LONGEST_NS:
            continue
        columns = [np.median(at[:, i]) for i in range(4)] + [np.median(at[:, 4]), at[:, 4].max(), at[:, 5].max()]
        rows[name, before].append([(x - end) / 1000 for x in columns])
    print(f"{'kernel':>24} {'in front of it':>24} {'times':>6}  start   may  inputs weights  sums  last    end")
    for (name, before), values in sorted(rows.items(), key=lambda x: -len(x[1])):
        medians = " ".join(f"{x:6.2f}" for x in np.median(np.array(values), axis=0))
        print(f"{name:>24} {before:>24} {len(values):6d} {medians}")


if __name__ == "__main__":
    main()
