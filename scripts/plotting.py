"""What the plot_*.py scripts share: colours, fonts, axes, loading matplotlib and saving a figure."""

import sys
from dataclasses import dataclass
from statistics import mean

COLOURS = ["#2563ab", "#d1622b", "#3a8f5c", "#8a5bb0", "#b8437a", "#6b7280", "#a98516", "#2f97a3"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
INK = "#24292f"
GRID = "#e4e7eb"


class PlotError(Exception):
    """An error that the user can correct."""


def labels_of(arguments):
    """One label for each file of the command line: those of --labels, or "" for the name that the file has."""
    labels = arguments.labels.split(",") if arguments.labels else [""] * len(arguments.files)
    if len(labels) != len(arguments.files):
        raise PlotError(f"{len(labels)} labels for {len(arguments.files)} files")
    return labels


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


def style_axes(axes):
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c4c9d0")


def set_title(axes, title):
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)


def save(figure, output):
    try:
        figure.savefig(output, dpi=160)
    except (OSError, ValueError) as error:
        raise PlotError(f"{output}: cannot write: {error}") from error
