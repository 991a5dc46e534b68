#!/usr/bin/python3
"""Draws what `sbtrain bench skip --json` measured: keys read, time of attention and change of the loss over length.

    sbtrain bench skip --checkpoint runs/lengths/sb --lengths 512,2048,8192 --json > skip.jsonl
    scripts/plot_skip.py skip.jsonl -o skip.png

    scripts/plot_skip.py --speed --labels stick-breaking,RoPE sb.jsonl rope.jsonl -o speed.png

There is one line for each skip_epsilon. Times are those of attention forward and backward together, relative to
attention that skips nothing. --speed draws the tokens per second of a forward and backward pass over the length, one
line for each file: with its lowest skip_epsilon above 0, and where it has one also, dashed, without skipping. The
script needs matplotlib (Debian and Ubuntu: apt-get install python3-matplotlib).
"""

import argparse
import json
import sys
from pathlib import Path

from plotting import COLOURS, MARKERS, PlotError, labels_of, length_axis, load_pyplot, save, style_axes


def read(path):
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise PlotError(f"{path}: {error}") from error


def attention(row):
    return row["attention_forward_seconds"] + row["attention_backward_seconds"]


def lines_of(rows):
    """{epsilon: [(length, share of keys read, share of attention's time, change of the loss)]}, epsilon not 0."""
    full = {row["length"]: row for row in rows if row["epsilon"] == 0}
    lines = {}
    for row in rows:
        if row["epsilon"] == 0:
            continue
        whole = full[row["length"]]
        lines.setdefault(row["epsilon"], []).append(
            (row["length"], row["keys_read"], attention(row) / attention(whole), row["loss"] - whole["loss"]))
    if not lines:
        raise PlotError("no row has a skip_epsilon above 0")
    return {epsilon: sorted(points) for epsilon, points in sorted(lines.items())}


PANELS = (("keys read", "share of all pairs of query and key"),
          ("time of attention", "forward and backward, relative to no skipping"),
          ("change of the loss", "nats per token"))


def draw(lines, title, output):
    plt = load_pyplot()
    figure, panels = plt.subplots(1, len(PANELS), figsize=(11.4, 3.8), constrained_layout=True)
    lengths = sorted({point[0] for points in lines.values() for point in points})
    for column, (axes, (name, unit)) in enumerate(zip(panels, PANELS), start=1):
        for i, (epsilon, points) in enumerate(lines.items()):
            axes.plot([point[0] for point in points], [point[column] for point in points],
                      color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], markersize=4.5,
                      markerfacecolor="white", linewidth=1.6, label=f"epsilon {epsilon:.2g}")
        length_axis(axes, lengths)
        style_axes(axes)
        if column < len(PANELS):
            axes.set_ylim(0, 1.05)
        axes.set_xlabel("tokens in the window")
        axes.set_ylabel(unit, fontsize=9)
        axes.set_title(name, loc="left", fontsize=10)
    panels[0].legend(frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    save(figure, output)


def speeds(rows, epsilon):
    """[(length, tokens per second)] of a pass forward and backward, with this skip_epsilon."""
    return sorted((row["length"], row["batch_tokens"] / row["model_training_seconds"]) for row in rows
                  if row["epsilon"] == epsilon)


def draw_speeds(runs, labels, title, output):
    plt = load_pyplot()
    figure, axes = plt.subplots(figsize=(7.6, 4.6), constrained_layout=True)
    lengths = set()
    for i, (rows, label) in enumerate(zip(runs, labels)):
        epsilons = sorted({row["epsilon"] for row in rows})[:2]
        for epsilon in epsilons:
            points = speeds(rows, epsilon)
            skips = epsilon == epsilons[-1]
            axes.plot([point[0] for point in points], [point[1] for point in points], "-" if skips else "--",
                      color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], markersize=5,
                      markerfacecolor="white", linewidth=1.6, label=label if skips else f"{label}, without skipping")
            lengths |= {point[0] for point in points}
    length_axis(axes, sorted(lengths))
    axes.set_yscale("log")
    style_axes(axes)
    axes.set_xlabel("tokens in the window")
    axes.set_ylabel("tokens per second, forward and backward")
    axes.legend(frameon=False, fontsize=8)
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    save(figure, output)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="JSONL", nargs="+", help="what `sbtrain bench skip --json` has printed")
    parser.add_argument("--speed", action="store_true", help="draw tokens per second; takes several files")
    parser.add_argument("--labels", help="names of the files' lines with --speed; default: the names of the runs")
    parser.add_argument("-o", "--output", metavar="PNG", help="default: skip.png beside the file")
    parser.add_argument("--title")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        files = arguments.files
        output = Path(arguments.output or Path(files[0]).parent / ("speed.png" if arguments.speed else "skip.png"))
        if arguments.speed:
            runs = [read(file) for file in files]
            labels = [label or rows[0]["name"] for label, rows in zip(labels_of(arguments), runs)]
            draw_speeds(runs, labels, arguments.title, output)
        elif len(files) > 1 or arguments.labels:
            raise PlotError("several files, and --labels, are for --speed")
        else:
            draw(lines_of(read(files[0])), arguments.title, output)
    except (KeyError, TypeError, IndexError) as error:
        sys.exit(f"plot_skip: {', '.join(arguments.files)}: no result of `sbtrain bench skip --json`: {error!r}")
    except PlotError as error:
        sys.exit(f"plot_skip: {error}")
    print(output)


if __name__ == "__main__":
    main()
