#!/usr/bin/python3
"""Draws the pictures of the README and of docs/results.md from the tables of docs/results.md.

    scripts/plot_results.py                 # all of them, into docs/images
    scripts/plot_results.py lengths needles

They hold what the tables do: means of three seeds, with bands of one standard deviation. Each PNG names the table it
was drawn from by a digest, which a test compares with the page.
The script needs matplotlib (Debian and Ubuntu: apt-get install python3-matplotlib).
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

from plot_lengths import draw_line, end_of, exits, set_lengths
from plotting import (COLOURS, INK, MARKERS, Line, PlotError, label_ends, load_pyplot, save, set_title, style_axes)

ROOT = Path(__file__).resolve().parent.parent
GREY = "#b4bac2"
STICK = "stick-breaking"
STRONG = (STICK, "RoPE")  # drawn thick
NTK = "RoPE, dynamic NTK at evaluation"
WINDOW = "RoPE in a window of 256"
COLOUR = {STICK: COLOURS[0], "RoPE": COLOURS[8], NTK: COLOURS[1], "ALiBi": COLOURS[2], "FIRE": COLOURS[6],
          WINDOW: COLOURS[3], "CoCA": COLOURS[11], "CoCA, dynamic NTK at evaluation": COLOURS[9],
          "CoCA, strict": COLOURS[7], "CoCA, strict, dynamic NTK at evaluation": INK, "no position": COLOURS[5],
          "ReBased": COLOURS[10], "ReBased and short convolutions in turns": COLOURS[4]}


def cells_of(line):
    return [cell.strip().replace("**", "") for cell in line.strip().split("|")[1:-1]]


class Table:
    """A table in Markdown: the names of its columns, and rows of a name and cells."""

    def __init__(self, lines):
        self.lines = lines
        self.columns = cells_of(lines[0])[1:]
        self.rows = [(cells[0], cells[1:]) for cells in map(cells_of, lines[2:])]

    def numbers(self):
        """A line for each row: its numbers with their spread, over columns that are numbers."""
        return [self._line(*row) for row in self.rows]

    def _line(self, name, cells):
        x, mean, low, high = [], [], [], []
        for column, cell in zip(self.columns, cells):
            found = re.match(r"([\d.]+)(?: \u00b1 ([\d.]+))?", cell)
            if found:
                value, spread = float(found[1]), float(found[2] or 0)
                x.append(float(column))
                mean.append(value)
                low.append(value - spread)
                high.append(value + spread)
        return Line(name, x, mean, low, high)


def tables_below(page, heading):
    """The tables between a heading and the next one, in their order."""
    found, table, inside = [], [], False
    for line in [*page.splitlines(), ""]:
        if line.startswith("#"):
            inside = line.lstrip("# ") == heading
        if inside and line.startswith("|"):
            table.append(line)
        elif table:
            found.append(Table(table))
            table = []
    if not found:
        raise PlotError(f"docs/results.md has no table below '{heading}'")
    return found


def digest(tables):
    return hashlib.sha256("\n".join(line for table in tables for line in table.lines).encode()).hexdigest()[:16]


# ---- Lengths ----------------------------------------------------------------------------------

SEEDS = "Three seeds"
PAIR = "Stick-breaking against RoPE at 350M parameters"
RECALL = "Repeated associative recall, MQRAR (after P, figure 3)"
MQAR = "Associative recall, MQAR (after R)"
BANDS = "bands: standard deviation of three seeds; dashed: as trained"


def draw_named(axes, line, strong):
    """Draws a line of a table, grey where its model has no colour, and returns what label_ends writes at its end."""
    colour = COLOUR.get(line.label)
    draw_line(axes, line, colour or GREY, strong, "o")
    line.label = line.label.removesuffix(" at evaluation")
    return (*end_of(line, None), colour or INK, strong)


def draw_claim(tables, output):
    """What the README says: RoPE's rise in longer windows, and what more context is worth on the same targets."""
    plt = load_pyplot()
    figure, (axes, close) = plt.subplots(1, 2, figsize=(12.4, 5.0), width_ratios=[1.25, 1], constrained_layout=True)
    ends, close_ends = [], []
    for panel in (axes, close):
        set_lengths(panel, [int(c) for c in tables[0].columns], [512])
    for line in tables[0].numbers():
        if line.label in (*STRONG, NTK, "FIRE", "ALiBi"):
            ends.append(draw_named(axes, line, line.label in STRONG))
        else:
            axes.plot(line.x, line.mean, color=GREY, linewidth=1.1, zorder=1)
    for line in tables[1].numbers():
        if line.label in (*STRONG, WINDOW, "ALiBi"):
            end = draw_named(close, line, line.label in STRONG)
            if line.label != "RoPE":
                close_ends.append(end)
    axes.set_ylim(1.9, 5.4)
    axes.set_ylabel("loss on held-out text (nats per token)")
    axes.text(0.985, 0.985, "grey: the other models of the table", transform=axes.transAxes, ha="right", va="top",
              fontsize=8, color="#6b7280")
    set_title(axes, "Trained at 512 tokens: windows of that length and longer")
    close.text(560, 2.385, "RoPE", fontsize=9, color=COLOUR["RoPE"], fontweight="bold")
    close.set_ylim(1.95, 2.4)
    set_title(close, "The same targets with more and more context")
    figure.supxlabel(f"tokens in the window ({BANDS})", fontsize=9)
    label_ends(figure, axes, ends)
    label_ends(figure, close, close_ends)
    save(figure, output, digest(tables))


def draw_lengths(tables, output, title, what, top):
    """All models of a table, with names beside their ends."""
    plt = load_pyplot()
    many = len(tables[0].rows) > 6
    figure, axes = plt.subplots(figsize=(10.6, 6.0) if many else (9.6, 4.6), constrained_layout=True)
    set_lengths(axes, [int(c) for c in tables[0].columns], [512])
    lines = tables[0].numbers()
    ends = []
    for i, line in enumerate(lines):
        colour = COLOUR[line.label]
        draw_line(axes, line, colour, line.label == STICK, MARKERS[i % len(MARKERS)])
        for at in exits(line.x, line.mean, top):
            axes.plot([at], [top], marker="^", markersize=7, color=colour, clip_on=False, zorder=6)
        ends.append((*end_of(line, top), colour, line.label == STICK))
    low = min(min(line.low) for line in lines)
    axes.set_ylim(low - 0.04 * (top - low), top)
    axes.set_ylabel(what)
    axes.set_xlabel(f"tokens in the window ({BANDS})")
    set_title(axes, title)
    label_ends(figure, axes, ends)
    save(figure, output, digest(tables))


def draw_pair(tables, output):
    """Windows of their own text, and the same targets, of the models of 350M parameters."""
    plt = load_pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11.2, 4.6), sharey=True, constrained_layout=True)
    titles = ("350M parameters, trained at 2048 tokens", "The same targets with more and more context")
    ends = [[], []]
    for axes, table, title, named in zip(panels, tables, titles, ends):
        set_lengths(axes, [int(c) for c in table.columns], [2048])
        for line in table.numbers():
            named.append(draw_named(axes, line, line.label in STRONG))
        set_title(axes, title)
    for axes, named in zip(panels, ends):  # now that the axis they share has its range
        label_ends(figure, axes, named)
    panels[0].set_ylabel("loss on held-out text (nats per token)")
    figure.supxlabel("tokens in the window (one seed; dashed: as trained)", fontsize=9)
    save(figure, output, digest(tables))


# ---- Needles ----------------------------------------------------------------------------------


def draw_needles(tables, output):
    """A panel for each task, a line for each model."""
    plt = load_pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(13.6, 5.0))
    titles = ("passkey", "niah_single_1", "niah_multikey_2")
    for axes, table, title in zip(panels, tables, titles):
        set_lengths(axes, [int(c) for c in table.columns], [512])
        axes.set_xticks(axes.get_xticks(), axes.get_xticklabels(), rotation=45)
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        for line in table.numbers():
            model = line.label
            axes.fill_between(line.x, [max(0, v) for v in line.low], [min(1, v) for v in line.high],
                              color=COLOUR[model], alpha=0.15, linewidth=0)
            axes.plot(line.x, line.mean, color=COLOUR[model], linewidth=2.8 if model == STICK else 1.4,
                      zorder=5 if model == STICK else 2, marker="o", markersize=3.5, markerfacecolor="white",
                      label=model)
    panels[0].set_ylabel("share of prompts answered")
    panels[1].set_xlabel("tokens of prompt and answer (bands: standard deviation over seeds; dashed: as trained)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.005, 0.945), ncol=5,
                  frameon=False, fontsize=9)
    figure.suptitle("Needles in texts longer than trained", x=0.012, ha="left", fontsize=12, fontweight="bold")
    figure.tight_layout(rect=(0, 0, 1, 0.89))
    save(figure, output, digest(tables))


# ---- Skipping, recall -------------------------------------------------------------------------


def draw_skip(tables, output):
    plt = load_pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.9), constrained_layout=True)
    cells = {}
    for length, (epsilon, keys, forward, backward, *_) in tables[0].rows:
        time = sum(float(part.split()[0]) for part in (forward, backward))
        cells.setdefault(epsilon, []).append((int(length), float(keys.rstrip("%")) / 100, time))
    whole = {length: time for length, _, time in cells.pop("0")}
    names = {"2^-24": "2^-24 (default)"}
    order = sorted(cells, key=lambda epsilon: 0.0 if epsilon == "2^-24" else float(epsilon))
    for i, (epsilon, points) in enumerate((epsilon, cells[epsilon]) for epsilon in order):
        lengths = [length for length, _, _ in points]
        for axes, y in zip(panels, ([k for _, k, _ in points], [t / whole[n] for n, _, t in points])):
            axes.plot(lengths, y, color=COLOURS[i], linewidth=1.8, marker=MARKERS[i], markersize=5,
                      markerfacecolor="white", label=f"skip_epsilon {names.get(epsilon, epsilon)}",
                      linestyle="-" if len(points) > 1 else "none")
    for axes, what in zip(panels, ("pairs of query and key that are read (share)",
                                   "time of attention, relative to no skipping")):
        set_lengths(axes, sorted(whole), [])
        axes.set_ylim(0, 1.05)
        axes.set_ylabel(what, fontsize=9)
        axes.set_xlabel("tokens in the window")
    panels[0].legend(frameon=False, fontsize=8, loc="lower left")
    set_title(panels[0], "Skipping keys, forward and backward")
    save(figure, output, digest(tables))


def draw_accuracy(tables, rows, title, x, log, output):
    """Accuracies in tables of recall; rows: {row of a table: (label, colour, line style)}."""
    plt = load_pyplot()
    figure, axes = plt.subplots(figsize=(8.2, 4.2), constrained_layout=True)
    style_axes(axes)
    ends, ticks = [], set()
    for table in tables:
        for line in table.numbers():
            label, colour, style = rows[line.label]
            ticks.update(line.x)
            axes.plot(line.x, line.mean, color=colour, linestyle=style, linewidth=3.2 if style == "-" else 1.6,
                      marker="o", markersize=6 if style == "-" else 4, clip_on=False, zorder=3 if style == "-" else 4)
            ends.append((line.x[-1], line.mean[-1], f"{label}  {line.mean[-1]:.3f}", colour, False))
    if log:
        axes.set_xscale("log")
    axes.set_xticks(sorted(ticks), [f"{value:g}" for value in sorted(ticks)])
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(x)
    axes.set_ylabel("share of held-out answers that are right")
    set_title(axes, title)
    label_ends(figure, axes, ends)
    save(figure, output, digest(tables))


PAIRS = {"stick-breaking, at 10^(-10/3)": ("stick-breaking, at $10^{-10/3}$", COLOURS[0], "-"),
         "stick-breaking, at 10^(-8/3)": ("stick-breaking, at $10^{-8/3}$", COLOURS[3], "--"),
         "softmax with RoPE, at 10^(-10/3)": ("RoPE, at $10^{-10/3}$", COLOURS[8], "-"),
         "softmax with RoPE, at 10^(-8/3)": ("RoPE, at $10^{-8/3}$", COLOURS[1], "--")}
RATES = {"softmax attention": ("softmax attention", COLOURS[5], "-"), "Based": ("Based", COLOURS[1], "-"),
         "ReBased": ("ReBased", COLOURS[0], "-")}

# name: (heading, which of its tables, how they are drawn)
PICTURES = {
    "lengths": (SEEDS, slice(0, 2), draw_claim),
    "lengths_seeds": (SEEDS, slice(0, 1), lambda tables, output: draw_lengths(
        tables, output, "Loss beyond the trained length, three seeds", "loss (nats per token)", 5.3)),
    "lengths_same": (SEEDS, slice(1, 2), lambda tables, output: draw_lengths(
        tables, output, "The same targets with more and more context, three seeds",
        "loss of the same targets (nats per token)", 5.4)),
    "pair_350m": (PAIR, slice(0, 2), draw_pair),
    "needles": ("Needles beyond the trained length", slice(0, 3), draw_needles),
    "skip": ("Skipping keys", slice(0, 1), draw_skip),
    "mqrar": (RECALL, slice(0, 1), lambda tables, output: draw_accuracy(
        tables, PAIRS, "MQRAR in 16 epochs", "pairs of key and value", False, output)),
    "mqar": (MQAR, slice(0, 1), lambda tables, output: draw_accuracy(
        tables, RATES, "MQAR, 64 pairs in 256 tokens", "learning rate", True, output)),
}


def tables_of(name, page):
    heading, which, _ = PICTURES[name]
    return tables_below(page, heading)[which]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PICTURES)}")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images", metavar="FOLDER",
                        help="default: docs/images")
    arguments = parser.parse_args()
    try:
        page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
        for name in arguments.names or PICTURES:
            if name not in PICTURES:
                raise PlotError(f"no picture {name}; there are {', '.join(PICTURES)}")
            output = arguments.output / f"{name}.png"
            PICTURES[name][2](tables_of(name, page), output)
            print(output)
    except PlotError as error:
        sys.exit(f"plot_results: {error}")


if __name__ == "__main__":
    main()
