#!/usr/bin/python3
"""Draws the loss of one or more runs from their metrics.jsonl as a PNG.

    scripts/plot_loss.py runs/tiny_sb                    # writes runs/tiny_sb/loss.png
    scripts/plot_loss.py runs/tiny_sb runs/tiny_rope -o compare.png

The names of several runs are the parts in which their paths differ: runs/m/sb/lr=1e-3 and
runs/m/rope/lr=1e-3 become "sb" and "rope".

The script needs matplotlib (Debian and Ubuntu: apt-get install python3-matplotlib).
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from plotting import COLOURS, PlotError, labels_of, load_pyplot, save, set_title, style_axes

WIDEST = 80  # characters of a title


@dataclass
class Series:
    tokens: list = field(default_factory=list)
    values: list = field(default_factory=list)

    def add(self, tokens, value):
        if isinstance(value, (int, float)) and math.isfinite(value):  # null: not finite
            self.tokens.append(tokens)
            self.values.append(value)


@dataclass
class Run:
    name: str
    loss: Series = field(default_factory=Series)
    validation: Series = field(default_factory=Series)
    lr: Series = field(default_factory=Series)


def metrics_file(argument):
    path = Path(argument)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise PlotError(f"{path}: no such file; give a run folder or its metrics.jsonl")
    return path


def names_of(paths):
    """One name for each metrics file: the parts of the paths that are not the same for all."""
    parts = [(path.resolve().parent if path.name == "metrics.jsonl"
              else path.resolve().with_suffix("")).parts for path in paths]
    if len(set(parts)) == 1:
        return [parts[0][-1]] * len(paths)
    while min(map(len, parts)) > 1 and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while min(map(len, parts)) > 1 and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    if len({len(part) for part in parts}) == 1:  # within them, too
        keep = [i for i in range(len(parts[0])) if len({part[i] for part in parts}) > 1]
        parts = [[part[i] for i in keep] for part in parts]
    return ["/".join(part) for part in parts]


def read_run(path, name):
    run = Run(name)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            tokens = record["tokens"]
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # a run that still writes may be inside its last line
                print(f"{path}:{number}: not a metrics record, left out", file=sys.stderr)
            continue
        run.loss.add(tokens, record.get("train/loss"))
        run.lr.add(tokens, record.get("train/lr"))
        run.validation.add(tokens, record.get("validation/loss"))
    if not run.loss.values and not run.validation.values:
        raise PlotError(f"{path}: holds no train/loss and no validation/loss")
    return run


def smooth(values, width):
    """Mean over a window centred on each point.

    At the start, where the loss falls fastest, the window shrinks on both sides alike, so that the
    mean does not lag; at the end it keeps its left half, so that the last record alone does not
    set the end of the curve.
    """
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    result = []
    for i in range(len(values)):
        left = min(width // 2, i)
        right = min(left, len(values) - 1 - i)
        result.append((sums[i + right + 1] - sums[i - left]) / (left + right + 1))
    return result


def token_unit(largest):
    for size, name in ((1e12, "trillion tokens"), (1e9, "billion tokens"), (1e6, "million tokens"),
                       (1e3, "thousand tokens")):
        if largest >= size:
            return size, name
    return 1, "tokens"


def loss_limits(runs):
    """Limits of the y axis that contain the start and the 99.5% quantile, so that a spike does not
    squeeze the curves."""
    values = sorted(v for run in runs for v in run.loss.values + run.validation.values)
    starts = [run.loss.values[0] for run in runs if run.loss.values]
    top = max([values[int(0.995 * (len(values) - 1))]] + starts)
    pad = 0.05 * (top - values[0]) or 0.1
    return values[0] - pad, top + pad


def draw_run(loss_axes, lr_axes, run, colour, unit, smoothing, single):
    def scaled(tokens):
        return [t / unit for t in tokens]

    label = "" if single else f"{run.name}, "
    x = scaled(run.loss.tokens)
    if smoothing > 1 and len(x) > 20:
        loss_axes.plot(x, run.loss.values, color=colour, alpha=0.28, linewidth=0.9)
    loss_axes.plot(x, smooth(run.loss.values, smoothing), color=colour, linewidth=1.9,
                   label=f"{label}training", solid_capstyle="round")
    if run.validation.values:
        last = run.validation.values[-1]
        accent = COLOURS[1] if single else colour
        loss_axes.plot(scaled(run.validation.tokens), run.validation.values, linestyle=":",
                       color=accent, linewidth=1.1, marker="o", markersize=5.5,
                       markerfacecolor="white", markeredgewidth=1.6,
                       label=f"{label}validation, last {last:.3f}", zorder=3)
    lr_axes.plot(scaled(run.lr.tokens), run.lr.values, color=colour, linewidth=1.6)


def draw(runs, title, smoothing, top, output):
    plt = load_pyplot()
    figure, (loss_axes, lr_axes) = plt.subplots(
        2, 1, sharex=True, figsize=(8.4, 5.4), constrained_layout=True,
        gridspec_kw={"height_ratios": [4, 1]})
    largest = max(t for run in runs for t in run.loss.tokens + run.validation.tokens)
    unit, unit_name = token_unit(largest)
    for i, run in enumerate(runs):
        width = smoothing or max(1, len(run.loss.values) // 40)
        draw_run(loss_axes, lr_axes, run, COLOURS[i % len(COLOURS)], unit, width, len(runs) == 1)
    for axes in (loss_axes, lr_axes):
        style_axes(axes)
    bottom, highest = loss_limits(runs)
    loss_axes.set_ylim(bottom, top or highest)
    loss_axes.set_ylabel("loss (nats per token)")
    set_title(loss_axes, title)
    entries = len(loss_axes.get_legend_handles_labels()[0])
    loss_axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=1 if entries <= 8 else 2)
    lr_axes.set_ylabel("learning rate", fontsize=9)
    lr_axes.set_ylim(bottom=0)
    lr_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    lr_axes.yaxis.get_offset_text().set_fontsize(8)
    lr_axes.set_xlabel(unit_name)
    lr_axes.set_xlim(0, 1.01 * largest / unit)
    figure.align_ylabels()
    save(figure, output)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="RUN", help="run folder or its metrics.jsonl")
    parser.add_argument("-o", "--output", metavar="PNG",
                        help="default: loss.png beside the first run's metrics")
    parser.add_argument("--title", help="default: the names of the runs, or how many there are")
    parser.add_argument("--labels", metavar="A,B,...", help="one for each run; default: its name")
    parser.add_argument("--top", type=float, metavar="NATS", help="where the axis of the loss ends")
    parser.add_argument("--smooth", type=int, default=0, metavar="N",
                        help="records in the smoothing window; default: a fortieth of the run")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        paths = [metrics_file(run) for run in arguments.files]
        names = [label or name for label, name in zip(labels_of(arguments), names_of(paths))]
        runs = [read_run(path, name) for path, name in zip(paths, names)]
        output = Path(arguments.output) if arguments.output else paths[0].parent / "loss.png"
        title = arguments.title or ", ".join(run.name for run in runs)
        if len(title) > WIDEST and not arguments.title:
            title = f"{len(runs)} runs"
        draw(runs, title, arguments.smooth, arguments.top, output)
    except PlotError as error:
        sys.exit(f"plot_loss: {error}")
    print(output)


if __name__ == "__main__":
    main()
