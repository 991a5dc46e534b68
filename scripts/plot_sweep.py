#!/usr/bin/python3
"""Draws how good a sweep's variants are over one key of its grid, as a PNG.

    scripts/plot_sweep.py runs/mqrar                     # writes runs/mqrar/accuracy.png
    scripts/plot_sweep.py runs/mqrar -x train.lr -o lr.png
    scripts/plot_sweep.py runs/mqrar --metric loss       # writes runs/mqrar/loss.png
    scripts/plot_sweep.py runs/a runs/b -o both.png      # the runs of several sweeps

Each point is the best of the runs that share a variant and a value of the key: the highest accuracy or,
where no run has an accuracy, as on text, the lowest validation loss. If `seed` is a key of the grid, runs
that differ only in it are taken together: a point is then their mean, that of the best combination of the
other keys, with a bar over their range. Runs without this metric are left out. The script needs matplotlib (Debian and
Ubuntu: apt-get install python3-matplotlib).
"""

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import mean

from plotting import COLOURS, MARKERS, PlotError, load_pyplot, save, set_title, style_axes

SEED = "seed"  # the key of the grid whose values are samples of one point


def results_file(argument):
    path = Path(argument)
    path = path / "sweep.json" if path.is_dir() else path
    if not path.is_file():
        raise PlotError(f"{path}: no such file; give the folder of a sweep or its sweep.json")
    return path


def read_runs(path):
    try:
        sweep = json.loads(path.read_text(encoding="utf-8"))
        return sweep["name"], sweep["best_over"], sweep["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise PlotError(f"{path}: not the results of a sweep ({error})") from error


def default_key(runs, best_over):
    """The first key of the grid that the sweep does not choose the best of, or the first of all."""
    keys = [key for key in runs[0]["grid"] if key != SEED] if runs else []
    keys.sort(key=lambda key: key in best_over)
    if not keys:
        raise PlotError("the sweep's grid has no key to draw over; name one with -x")
    return keys[0]


def choose_metric(runs):
    return "accuracy" if any(run["best_accuracy"] is not None for run in runs) else "loss"


def place_of(run, key):
    """The value of the key, as a number."""
    if key not in run["grid"]:
        raise PlotError(f"{key} is not in the grid, which has {', '.join(run['grid'])}")
    try:
        return float(run["grid"][key])
    except ValueError as error:
        raise PlotError(f"{key}: {run['grid'][key]} is no number to draw over") from error


def best_runs(runs, key, metric):
    """{variant: {x: runs}} in the order of the sweep: of each point the runs, one for each seed, of the combination
    of the other keys that is best. One that has been run with more seeds goes before one with fewer. Runs that
    have failed do not count: one that has diverged may have had a good loss before."""
    sign = 1 if metric == "accuracy" else -1

    def value(run):
        return sign * run[f"best_{metric}"]

    variants = {}
    for run in runs:
        if run[f"best_{metric}"] is None or run.get("status") == "failed":
            continue
        others = frozenset(item for item in run["grid"].items() if item[0] not in (key, SEED))
        combinations = variants.setdefault(run["variant"], {}).setdefault(place_of(run, key), {})
        seeds = combinations.setdefault(others, {})
        seed = run["grid"].get(SEED)
        seeds[seed] = max(seeds.get(seed, run), run, key=value)
    if not variants:
        raise PlotError(f"no run of the sweep has a validation {metric} yet")

    def best(combinations):
        candidates = [list(seeds.values()) for seeds in combinations.values()]
        return max(candidates, key=lambda group: (len(group), mean(map(value, group))))

    return {variant: {x: best(combinations) for x, combinations in points.items()}
            for variant, points in variants.items()}


def best_points(runs, key, metric):
    """{variant: {x: accuracies or losses, one for each seed}} of best_runs."""
    return {variant: {x: [run[f"best_{metric}"] for run in group] for x, group in points.items()}
            for variant, points in best_runs(runs, key, metric).items()}


def is_geometric(values):
    """Whether the values, such as learning rates, are better spread by a logarithmic axis."""
    return values[0] > 0 and values[-1] / values[0] >= 8


# What keys of a configuration are called in a picture; others are shown as they are.
NAMES = {"data.task.pairs": "pairs of key and value", "model.width": "width of the model",
         "train.lr": "learning rate", "train.sequence_length": "tokens of a row"}  # fmt: skip


def named(variants, labels):
    """The points of the variants under the names to show."""
    if not labels:
        return {name.replace("_", " "): points for name, points in variants.items()}
    names = re.split(r",(?! )", labels)
    if len(names) != len(variants):
        raise PlotError(f"{len(names)} labels for {len(variants)} variants: {', '.join(variants)}")
    return dict(zip(names, variants.values()))


def draw(variants, key, metric, title, output):
    plt = load_pyplot()
    figure, axes = plt.subplots(figsize=(6.8, 4.2), constrained_layout=True)
    values = sorted({x for points in variants.values() for x in points})
    for i, (name, points) in enumerate(variants.items()):
        x = sorted(points)
        means = [mean(points[value]) for value in x]
        spread = [[m - min(points[value]) for m, value in zip(means, x)],
                  [max(points[value]) - m for m, value in zip(means, x)]]
        axes.errorbar(x, means, yerr=spread if any(map(any, spread)) else None, capsize=3,
                      color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], markersize=6,
                      linewidth=1.9, elinewidth=1.2, label=name, clip_on=False, zorder=3)
    style_axes(axes)
    if is_geometric(values):
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(NAMES.get(key, key))
    if metric == "accuracy":
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("held-out accuracy")
    else:
        axes.set_ylabel("validation loss (nats per token)")
    set_title(axes, title)
    axes.legend(frameon=False, fontsize=9, loc="best")
    save(figure, output)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", metavar="SWEEP", nargs="+", help="folder of a sweep or its sweep.json")
    parser.add_argument("-x", "--key", help="key of the grid; default: the first, if possible one that "
                                            "the sweep does not choose the best of")
    parser.add_argument("--metric", choices=["accuracy", "loss"],
                        help="default: accuracy where a run has one, else loss")
    parser.add_argument("-o", "--output", metavar="PNG",
                        help="default: accuracy.png or loss.png beside the results")
    parser.add_argument("--labels", metavar="A,B,...", help="names of the variants, in their order")
    parser.add_argument("--title", help="default: the name of the sweep")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        path = results_file(arguments.sweeps[0])
        name, best_over, runs = read_runs(path)
        for more in arguments.sweeps[1:]:
            runs += read_runs(results_file(more))[2]
        key = arguments.key or default_key(runs, best_over)
        metric = arguments.metric or choose_metric(runs)
        output = Path(arguments.output) if arguments.output else path.parent / f"{metric}.png"
        points = named(best_points(runs, key, metric), arguments.labels)
        draw(points, key, metric, arguments.title or name, output)
    except PlotError as error:
        sys.exit(f"plot_sweep: {error}")
    print(output)


if __name__ == "__main__":
    main()
