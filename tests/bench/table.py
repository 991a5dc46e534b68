#!/usr/bin/env python3
"""Prints what compare.sh measured: table.py RESULTS CONFIG..., one JSON object a line in each
RESULTS/<config>.{sbtrain,pytorch,pytorch-compiled} with at least `step_seconds` and `tokens_per_step`."""
import json
import os
import sys

LABELS = {"sbtrain": "sbtrain", "pytorch": "PyTorch", "pytorch-compiled": "PyTorch, compiled"}


def best(path):
    """The run with the smallest median; and all medians, to show the spread."""
    with open(path) as file:
        runs = [json.loads(line) for line in file if line.strip()]
    medians = sorted(run["step_seconds"] for run in runs)
    return min(runs, key=lambda run: run["step_seconds"]), medians


def main():
    folder, configs = sys.argv[1], sys.argv[2:]
    print(f"{'config':12} {'':24} {'ms/step':>9} {'rounds':>19} {'tokens/s':>10} {'against sbtrain':>16}")
    for config in configs:
        name = os.path.basename(config).removesuffix(".yaml")
        own = None
        for kind, label in LABELS.items():
            path = os.path.join(folder, f"{name}.{kind}")
            if not os.path.exists(path):
                continue
            run, medians = best(path)
            own = own or run
            if run["tokens_per_step"] != own["tokens_per_step"]:
                sys.exit(f"{name}: {label} has {run['tokens_per_step']} tokens in a step, sbtrain "
                         f"{own['tokens_per_step']}")
            label = run.get("framework", label)
            spread = f"{1000 * medians[0]:.1f} .. {1000 * medians[-1]:.1f}"
            ratio = run["step_seconds"] / own["step_seconds"]
            print(f"{name:12} {label:24} {1000 * run['step_seconds']:9.1f} {spread:>19} "
                  f"{run['tokens_per_step'] / run['step_seconds']:10.0f} {ratio:15.2f}x")


if __name__ == "__main__":
    main()
