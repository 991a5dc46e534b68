#!/usr/bin/python3
"""Draws what `sbtrain eval --tasks ... --json FILE` measured: scores of tasks over length, or over length and depth.

    scripts/plot_tasks.py sb.json rope.json -o tasks.png               # a panel for each task, a line for each run
    scripts/plot_tasks.py sb.json --depth -o depth.png                 # heat maps: length by depth
    scripts/plot_tasks.py sb.json rope.json --depth --tasks passkey    # one for each run

Bands around lines are the 95% intervals. Files with the same label (--labels), which are those of one model with
different seeds, are drawn as their mean, with a band over their range. Dashed lines mark the length that the runs were
trained with. The script needs matplotlib (Debian and Ubuntu: apt-get install python3-matplotlib).
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from plotting import (COLOURS, INK, MARKERS, PlotError, by_label, labels_of, length_axis, line_of, load_pyplot,
                      results_with, save, set_title, style_axes)

COLUMNS = 4  # panels side by side
NUMBERED = 12  # heat maps of up to this many lengths have their scores written into them


@dataclass
class Run:
    label: str
    train_length: int
    tasks: dict  # name: results by length that are not absent, in ascending order


def run_of(record, label, path):
    try:
        tasks = {}
        for task in record["tasks"]:
            for absent in (r for r in task["lengths"] if "absent" in r):
                print(f"{path}: {task['task']}, {absent['length']}: {absent['absent']}", file=sys.stderr)
            results = sorted((r for r in task["lengths"] if "absent" not in r), key=lambda r: r["length"])
            if results:
                tasks[task["task"]] = results
        run = Run(label, record["train_length"], tasks)
    except (KeyError, TypeError) as error:
        raise PlotError(f"{path}: no result of `sbtrain eval --tasks`: {error!r}") from error
    if not run.tasks:
        raise PlotError(f"{path}: holds no task with a score")
    return run


def read(path, label):
    """The results of a file."""
    return [run_of(record, label or own, path) for own, record in results_with(path, "tasks")]


def task_names(runs, chosen):
    """The tasks of all runs in the order of their first file, or those that were chosen."""
    names = list(dict.fromkeys(name for run in runs for name in run.tasks))
    unknown = [name for name in chosen or [] if name not in names]
    if unknown:
        raise PlotError(f"--tasks: no file has a score of {', '.join(unknown)}; there are {', '.join(names)}")
    return chosen or names


def rows_of(results):
    """The depths of a heat map, from the top down, as (from, to); all that some length has."""
    return sorted({(d["from"], d["to"]) for r in results for d in r["depths"]})


def cells_of(results, rows):
    """Scores [depth][length]; None where a length has no sample of a depth."""
    by_length = [{(d["from"], d["to"]): d["score"] for d in r["depths"]} for r in results]
    return [[scores.get(row) for scores in by_length] for row in rows]


def panels(plt, count, width, height, columns=COLUMNS):
    columns = min(count, columns)
    rows = -(-count // columns)
    figure, grid = plt.subplots(rows, columns, squeeze=False, constrained_layout=True,
                                figsize=(width * columns, height * rows))
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return figure, list(grid.flat[:count])


def task_lines(runs, name):
    """A line for each label: the score of its run with the 95% interval, or of several the mean and the range."""
    lines = []
    for label, group in by_label(runs).items():
        results = [run.tasks.get(name, []) for run in group]
        line = line_of(label, [([r["length"] for r in each], [r["score"] for r in each]) for each in results])
        if len(group) == 1:
            line.low, line.high = ([r[end] for r in results[0]] for end in ("low", "high"))
        lines.append(line)
    return lines


def add_legend(figure, title, handles, labels):
    """Adds the legend beside the title, in as few rows as fit there."""
    renderer = figure.canvas.get_renderer()
    room = 0.98 * figure.bbox.width - title.get_window_extent(renderer).x1
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(handles, labels, frameon=False, fontsize=9, loc="upper right", ncol=columns)
        if columns == 1 or legend.get_window_extent(renderer).width <= room:
            break
        legend.remove()
    rows = -(-len(labels) // columns)
    title.set_text(title.get_text() + "\n" * (rows - 1))  # the layout leaves room for the title alone


def draw_lines(runs, names, title, output):
    plt = load_pyplot()
    few = len(names) == 1
    seeds = [len(group) for group in by_label(runs).values()]
    bands = "range of the seeds" if min(seeds) > 1 else "95% interval" + (", or range of seeds" if max(seeds) > 1 else "")
    below = f"tokens of prompt and answer; dashed: as trained; bands: {bands}"
    figure, all_axes = panels(plt, len(names), 7.2 if few else 3.4, 4.4 if few else 2.8)
    for n, (axes, name) in enumerate(zip(all_axes, names)):
        lengths = sorted({r["length"] for run in runs for r in run.tasks.get(name, [])})
        for i, line in enumerate(task_lines(runs, name)):
            colour = COLOURS[i % len(COLOURS)]
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.12, linewidth=0)
            axes.plot(line.x, line.mean, color=colour, linewidth=1.6,
                      linestyle=["-", "--", ":"][i // len(COLOURS) % 3], marker=MARKERS[i % len(MARKERS)],
                      markersize=4.5, markerfacecolor="white", markeredgewidth=1.4, label=line.label)
        length_axis(axes, lengths, rotation=0 if few or len(lengths) < 6 else 45)
        for train_length in sorted({run.train_length for run in runs}):
            if lengths[0] <= train_length <= lengths[-1]:
                axes.axvline(train_length, color="#9aa1ab", linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
        style_axes(axes)
        axes.set_ylim(-0.03, 1.03)
        if n % COLUMNS == 0:
            axes.set_ylabel("score")
        if few:
            axes.set_xlabel(below)
            set_title(axes, title or name)
        else:
            axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
    if not few:
        figure.supxlabel(below, fontsize=9)
        title = figure.suptitle(title or "Tasks by length", x=0.01, ha="left", fontsize=12, fontweight="bold")
    if len(by_label(runs)) > 1:
        if few:
            all_axes[0].legend(frameon=False, fontsize=9)
        else:
            add_legend(figure, title, *all_axes[0].get_legend_handles_labels())
    save(figure, output)


def draw_heat_map(axes, results, norm):
    """Length by depth: blue where the model finds what is hidden, grey where nothing was measured."""
    rows = rows_of(results)
    cells = cells_of(results, rows)
    axes.set_facecolor("#e9ebee")
    image = axes.imshow([[float("nan") if c is None else c for c in row] for row in cells], cmap="Blues",
                        norm=norm, aspect="auto", interpolation="nearest")
    if len(results) <= NUMBERED:
        for y, row in enumerate(cells):
            for x, score in enumerate(row):
                if score is not None:
                    axes.text(x, y, f"{score:.2f}", ha="center", va="center", fontsize=7,
                              color="white" if score > 0.55 else INK)
    axes.set_xticks(range(len(results)), [str(r["length"]) for r in results], fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{a:g}" if a == b else f"{a:.1f}\u2013{b:.1f}" for a, b in rows], fontsize=8)
    axes.tick_params(colors=INK, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return image


def draw_depths(runs, names, title, output):
    plt = load_pyplot()
    from matplotlib.colors import Normalize

    maps = [(run, name) for name in names for run in runs if "depths" in run.tasks.get(name, [{}])[0]]
    if not maps:
        raise PlotError("none of these tasks hides a single needle, so that there are no depths")
    widest = max(len(run.tasks[name]) for run, name in maps)
    deepest = max(len(rows_of(run.tasks[name])) for run, name in maps)
    figure, all_axes = panels(plt, len(maps), 1.4 + 0.55 * max(widest, 3), 1.3 + 0.24 * max(deepest, 4),
                              columns=len(runs) if len(runs) > 1 else COLUMNS)
    for axes, (run, name) in zip(all_axes, maps):
        image = draw_heat_map(axes, run.tasks[name], Normalize(0, 1))
        what = name if len(runs) == 1 else f"{name}, {run.label}" if len(names) > 1 else run.label
        axes.set_title(what, loc="left", fontsize=10, fontweight="bold")
    figure.supxlabel("tokens of prompt and answer", fontsize=9)
    figure.supylabel("depth", fontsize=9)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    rows = -(-len(maps) // (len(runs) if len(runs) > 1 else COLUMNS))
    bar = figure.colorbar(image, ax=all_axes, shrink=0.8 / rows, label="score")
    bar.ax.tick_params(labelsize=8, length=0)
    bar.outline.set_visible(False)
    save(figure, output)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="JSON",
                        help="results of `sbtrain eval --tasks ... --json JSON`")
    parser.add_argument("-o", "--output", metavar="PNG",
                        help="default: tasks.png or depths.png beside the first file")
    parser.add_argument("--labels", metavar="A,B,...", help="default: the names of the runs")
    parser.add_argument("--tasks", metavar="A,B,...", help="default: all")
    parser.add_argument("--depth", action="store_true", help="heat maps over length and depth")
    parser.add_argument("--title")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        runs = [run for path, label in zip(arguments.files, labels_of(arguments)) for run in read(path, label)]
        names = task_names(runs, arguments.tasks.split(",") if arguments.tasks else None)
        name = "depths.png" if arguments.depth else "tasks.png"
        output = Path(arguments.output or Path(arguments.files[0]).parent / name)
        (draw_depths if arguments.depth else draw_lines)(runs, names, arguments.title, output)
    except PlotError as error:
        sys.exit(f"plot_tasks: {error}")
    print(output)


if __name__ == "__main__":
    main()
