#!/usr/bin/python3
"""Draws what `sbtrain eval --lengths ... --json FILE` measured: loss over the length of the context.

    scripts/plot_lengths.py sb.json rope.json -o lengths.png
    scripts/plot_lengths.py sb.json rope.json --positions -o positions.png
    scripts/plot_lengths.py --labels sb,sb,rope,rope sb1.json sb2.json rope1.json rope2.json
    scripts/plot_lengths.py runs/lengths/results.jsonl --same-targets -o same.png    # many results in one file

Files with the same label, which are those of one model with different seeds, are drawn as their mean and a band
over their range. The last loss of each line stands beside it, and the line that ends lowest is drawn strongest. Marks
show where lines leave the plot through its top (--max-loss). With --positions it draws the loss by position in the
longest windows, averaged over an eighth of an octave. The script needs matplotlib (Debian and Ubuntu: apt-get install
python3-matplotlib).
"""

import argparse
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from plotting import (COLOURS, MARKERS, PlotError, by_label, label_ends, labels_of, length_axis, line_of, load_pyplot,
                      results_with, save, set_title, style_axes)


@dataclass
class Measured:
    label: str
    train_length: int
    targets: int
    lengths: list = field(default_factory=list)  # the results that are not absent


def measured_of(record, label, path):
    try:
        results = [r for r in record["lengths"] if "absent" not in r]
        for absent in (r for r in record["lengths"] if "absent" in r):
            print(f"{path}: {absent['length']}: {absent['absent']}", file=sys.stderr)
        measured = Measured(label, record["train_length"], record["same_targets"],
                            sorted(results, key=lambda r: r["length"]))
    except (KeyError, TypeError) as error:
        raise PlotError(f"{path}: no result of `sbtrain eval --lengths`: {error!r}") from error
    if not measured.lengths:
        raise PlotError(f"{path}: holds no length with a loss")
    return measured


def read(path, label, same_targets):
    """The results of a file. Of many results in one, those of the same targets or the others."""
    measured = [measured_of(record, label or own, path) for own, record in results_with(path, "lengths")]
    if len(measured) == 1:
        return measured
    chosen = [m for m in measured if bool(m.targets) == same_targets]
    if not chosen:
        raise PlotError(f"{path}: no result is one {'of' if same_targets else 'without'} --same-targets")
    return chosen


def over_length(measured):
    return [r["length"] for r in measured.lengths], [r["loss"] for r in measured.lengths]


def over_position(measured):
    """Bins of the longest windows, at the middle of their positions, counted from 1. Those within an eighth of an
    octave are one: on an axis of powers of two the last ones, which stand close, would hide the lines."""
    result = measured.lengths[-1]
    bin_size = result["position_bin"]
    groups = {}
    for i, loss in enumerate(result["loss_by_position"]):
        if loss is not None:
            begin, end = i * bin_size, min((i + 1) * bin_size, result["length"])
            middle = (begin + end + 1) / 2
            groups.setdefault(math.floor(8 * math.log2(middle)), []).append((middle, loss))
    return ([mean(x for x, _ in group) for group in groups.values()],
            [mean(y for _, y in group) for group in groups.values()])


def ranked(lines):
    """Their indices, the one that ends lowest first; lines that reach less far come later."""
    return sorted(range(len(lines)), key=lambda i: (-lines[i].x[-1], lines[i].mean[-1]))


def exits(x, y, top):
    """Where a line crosses `top` on its way up, on an axis of powers of two: [x]."""
    at = [x[0]] if y[0] > top else []
    for i in range(1, len(x)):
        if y[i - 1] <= top < y[i]:
            share = (top - y[i - 1]) / (y[i] - y[i - 1])
            at.append(x[i - 1] * (x[i] / x[i - 1]) ** share)
    return at


def set_lengths(axes, ticks, train_lengths):
    length_axis(axes, ticks)
    for train_length in train_lengths:
        axes.axvline(train_length, color="#9aa1ab", linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
    style_axes(axes)


def draw_line(axes, line, colour, strong, marker):
    axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(line.x, line.mean, color=colour, linewidth=3.0 if strong else 1.6, zorder=5 if strong else 2,
              marker=marker, markersize=4.5, markerfacecolor="white", markeredgewidth=1.4)


def end_of(line, top):
    """(x, y, text) of the label of a line; see label_ends."""
    text = f"{line.label}  {line.mean[-1]:.2f}"
    if top and line.mean[-1] > top:
        return None, top, f"\u25b2 {text}"
    return line.x[-1], line.mean[-1], text


def draw(all_measured, arguments, output):
    plt = load_pyplot()
    points = over_position if arguments.positions else over_length
    lines = [line_of(label, map(points, runs)) for label, runs in by_label(all_measured).items()]
    for line in lines:
        if not line.x:
            raise PlotError(f"the files of {line.label} have no length in common")
    figure, axes = plt.subplots(figsize=(9.6, 5.2), constrained_layout=True)
    order = ranked(lines)
    losses = [loss for line in lines for loss in line.mean]
    top = arguments.max_loss if arguments.max_loss and max(losses) > arguments.max_loss > min(losses) else None
    ticks = sorted({r["length"] for m in all_measured for r in m.lengths})
    if arguments.positions:
        ticks = [2**n for n in range(7, max(ticks).bit_length())]
    set_lengths(axes, ticks, sorted({m.train_length for m in all_measured}))
    ends = []
    for i in order:
        colour, best = COLOURS[i % len(COLOURS)], i == order[0] and len(order) > 1
        draw_line(axes, lines[i], colour, best, None if arguments.positions else MARKERS[i % len(MARKERS)])
        for at in exits(lines[i].x, lines[i].mean, top) if top else []:
            axes.plot([at], [top], marker="^", markersize=7, color=colour, clip_on=False, zorder=6)
        ends.append((*end_of(lines[i], top), colour, best))
    if top:
        axes.set_ylim(min(losses) - 0.04 * (top - min(losses)), top)
    targets = {m.targets for m in all_measured}
    what = "of the same targets " if targets != {0} and len(targets) == 1 else ""
    axes.set_ylabel(f"loss {what}(nats per token)")
    bands = "; bands: range of the seeds" if len(all_measured) > len(lines) else ""
    axes.set_xlabel(("position in the window" if arguments.positions else "tokens in the window")
                    + "; dashed: as trained" + bands)
    set_title(axes, arguments.title or "Loss beyond the trained length")
    label_ends(figure, axes, ends)
    save(figure, output)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="JSON",
                        help="results of `sbtrain eval --lengths ... --json JSON`")
    parser.add_argument("-o", "--output", metavar="PNG",
                        help="default: lengths.png or positions.png beside the first file")
    parser.add_argument("--labels", metavar="A,B,...", help="default: the names of the runs")
    parser.add_argument("--positions", action="store_true",
                        help="loss over the position in the longest windows")
    parser.add_argument("--max-loss", type=float, metavar="NATS", help="where the y axis ends")
    parser.add_argument("--same-targets", action="store_true",
                        help="of many results in one file, those of the same targets")
    parser.add_argument("--title")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        measured = [m for path, label in zip(arguments.files, labels_of(arguments))
                    for m in read(path, label, arguments.same_targets)]
        name = "positions.png" if arguments.positions else "lengths.png"
        output = Path(arguments.output or Path(arguments.files[0]).parent / name)
        draw(measured, arguments, output)
    except PlotError as error:
        sys.exit(f"plot_lengths: {error}")
    print(output)


if __name__ == "__main__":
    main()
