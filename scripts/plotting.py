"""What the plot_*.py scripts share: colours, fonts, axes, loading matplotlib and saving a figure."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

# So many that no plot here needs one twice; the first ones are the easiest to tell apart.
COLOURS = ["#2563ab", "#d1622b", "#3a8f5c", "#8a5bb0", "#b8437a", "#6b7280", "#a98516", "#2f97a3", "#c0272d", "#6fa0dc",
           "#7a4b2a", "#8cb01f"]  # fmt: skip
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
INK = "#24292f"
GRID = "#e4e7eb"


class PlotError(Exception):
    """An error that the user can correct."""


def labels_of(arguments):
    """One label for each file of the command line: those of --labels, or "" for the name that the file has. A comma
    before a space is a part of a label."""
    labels = re.split(r",(?! )", arguments.labels) if arguments.labels else [""] * len(arguments.files)
    if len(labels) != len(arguments.files):
        raise PlotError(f"{len(labels)} labels for {len(arguments.files)} files")
    return labels


def name_of(record):
    """What a result is called where no label is given: its run, with what scaled its positions."""
    scaling = record.get("rope_scaling")
    return str(record.get("name", "")).removeprefix("lengths_") + (f", {scaling}" if scaling else "")


# What says where in the text a loss by document is: alike for all models, so that scripts/collect_results.py names it.
PLACES = ("store", "document", "tokens")


def objects_in(value):
    """The objects of a JSON value, each before those within it, which may be changed meanwhile."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from objects_in(item)


def give_places(lines):
    """Gives lists of losses by document the documents that an earlier one has (scripts/collect_results.py)."""
    places = {}
    for item in objects_in(lines):
        name = item.get("places")
        if name and "document" in item:
            places[name] = {key: item[key] for key in PLACES}
        elif name:
            item.update(places[name])


def curves_of(folder):
    """What a run folder's metrics.jsonl and status.json hold: {"curve": ..., "validation": ..., "exit_code": ...}, of the
    training at most some 200 points, evenly spread."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    training = [r for r in records if "train/loss" in r]
    training = training[::max(1, len(training) // 200)]
    validation = [r for r in records if "validation/loss" in r]
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    return {"name": folder.name, "exit_code": status.get("exit_code"),
            "curve": {"tokens": [r["tokens"] for r in training],
                      **{key: [r.get(f"train/{key}") for r in training] for key in ("loss", "grad_norm", "lr")}},
            "validation": {"tokens": [r["tokens"] for r in validation],
                           "loss": [r["validation/loss"] for r in validation]}}


def results_in(argument):
    """[(label, record)] of a file: the one that `sbtrain eval --json FILE` or a sweep has written (a folder stands for
    its sweep.json), the rows of `sbtrain bench skip --json` as {"rows": ...}, or what scripts/collect_results.py has
    put into one file. A run folder gives its curves."""
    path = Path(argument)
    try:
        if (path / "metrics.jsonl").is_file():
            return [(path.name, curves_of(path))]
        path = path / "sweep.json" if path.is_dir() else path
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            record = json.loads(text)
            return [(name_of(record), record)]
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if lines and "keys_read" in lines[0]:
            return [(name_of(lines[0]), {"rows": lines})]
        give_places(lines)
        return [(line["label"], line) for line in lines]
    except OSError as error:
        raise PlotError(f"{error.filename or path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlotError(f"{path}: no results: {error!r}") from error


def results_with(argument, key):
    """Those of results_in() that have `key`; all of them, for the caller to complain of, where none has."""
    results = results_in(argument)
    return [result for result in results if key in result[1]] or results


def by_label(runs):
    """Runs with a `label` as {label: runs}, in the order of their first ones. Runs with the same label are those of
    one model with different seeds."""
    groups = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


@dataclass
class Line:
    """The mean of several runs at the places that all of them have, and the range of their values."""

    label: str
    x: list
    mean: list
    low: list
    high: list


def line_of(label, points):
    """The Line of runs, each of which is given as ([x], [y])."""
    runs = [dict(zip(x, y)) for x, y in points]
    x = [place for place in runs[0] if all(place in run for run in runs)]
    values = [[run[place] for run in runs] for place in x]
    return Line(label, x, [mean(v) for v in values], [min(v) for v in values], [max(v) for v in values])


def load_pyplot(font_size=10):
    """matplotlib.pyplot, set up to draw to files; if it is missing, a PlotError says how to install it."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise PlotError(f"matplotlib is missing ({error}); install it with\n"
                        "    apt-get install python3-matplotlib\n"
                        f"and start this script with /usr/bin/python3 (this is {sys.executable})")
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK,
                         "axes.labelcolor": INK, "font.size": font_size})
    return plt


def length_axis(axes, lengths, **style):
    """A logarithmic axis of lengths in tokens, with a tick at each of them."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths], fontsize=8, **style)
    axes.set_xticks([], minor=True)


def style_axes(axes):
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c4c9d0")


def spread_out(places, gap):
    """The places, moved as little as it takes for any two to be `gap` apart, in the same order."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    groups = []  # of neighbours that touch: [sum of the wanted first places, number]
    for n, i in enumerate(order):
        groups.append([places[i] - n * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
    moved = [0.0] * len(places)
    n = 0
    for total, count in groups:
        for _ in range(count):
            moved[order[n]] = total / count + n * gap
            n += 1
    return moved


def label_ends(figure, axes, ends, fontsize=9):
    """Writes names beside the ends of lines, to the right of the axes, each in the colour of its line.

    ends: [(x, y, text, colour, bold)]; x is None for a line that has left the plot through its top. The limits of the
    y axis have to be set."""
    from matplotlib.transforms import ScaledTranslation

    figure.canvas.draw()  # the layout decides how high the axes are
    height = axes.get_window_extent().height * 72 / figure.dpi
    low, high = axes.get_ylim()
    places = spread_out([(y - low) / (high - low) * height for _, y, _, _, _ in ends], 1.35 * fontsize)
    beyond = max(0.0, max(places) - height)  # labels that would stand above the axes
    beside = axes.transAxes + ScaledTranslation(14 / 72, 0, figure.dpi_scale_trans)
    for (x, y, text, colour, bold), place in zip(ends, places):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3,
                  "relpos": (0, 0.5)}
        axes.annotate(text, (x or axes.get_xlim()[1], y), xytext=(1.0, (place - beyond) / height), textcoords=beside,
                      ha="left", va="center", fontsize=fontsize, color=colour, annotation_clip=False,
                      fontweight="bold" if bold else "normal", arrowprops=leader if x else None)


def set_title(axes, title):
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)


def save(figure, output, source=None):
    """Writes a PNG; `source` is kept in it, as its text "Source"."""
    try:
        figure.savefig(output, dpi=160, metadata={"Source": source} if source else None)
    except (OSError, ValueError) as error:
        raise PlotError(f"{output}: cannot write: {error}") from error
