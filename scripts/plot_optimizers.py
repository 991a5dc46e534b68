#!/usr/bin/python3
"""Prints tables of what scripts/optimizers.py has measured, and draws two plots.

    scripts/plot_optimizers.py runs/optimizers    # its results.jsonl; writes tokens.png and lengths.png beside it
    scripts/plot_optimizers.py runs/large         # with long runs: tokens.png and seconds.png

The first plot has the validation loss over tokens, the second that over the length of the windows or over seconds. A
line of several seeds is their mean, with a band from the lowest to the highest. --tables draws nothing; otherwise the
script needs matplotlib (Debian and Ubuntu: apt-get install python3-matplotlib).
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

from plotting import COLOURS, MARKERS, PlotError, line_of, load_pyplot, save, set_title, style_axes
from tables import spread, table


def read(argument):
    path = Path(argument)
    path = path / "results.jsonl" if path.is_dir() else path
    try:
        return path, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise PlotError(f"{path}: {error}; give the folder of scripts/optimizers.py") from error


def of_kind(results, *kinds):
    """{(model, optimizer): results} of these kinds. Runs that are no part of a grid count with the best rate and decay
    of their grid alone: others were trained before the grid was extended."""
    groups = {}
    for result in results:
        run = result["run"]
        if run["kind"] in kinds:
            groups.setdefault((run["model"], run["optimizer"]), []).append(result)
    if kinds == ("grid",):
        return groups
    grids = of_kind(results, "grid")
    chosen = {key: [r for r in group if key not in grids or point(r) == best_point(grids[key])]
              for key, group in groups.items()}
    return {key: group for key, group in chosen.items() if group}


def point(result):
    return result["run"]["lr"], result["run"]["decay"]


def best_point(grid):
    whole = [r for r in grid if last_loss(r) is not None]
    return point(min(whole, key=last_loss)) if whole else None


def label(model, optimizer):
    return f"{model.removeprefix('lengths_')}, {optimizer}"


def last_loss(result):
    whole = result["exit_code"] == 0 and result["validation"]
    return result["validation"][-1][2] if whole else None


def cell(losses):
    whole = [loss for loss in losses if loss is not None]
    return spread(whole, 3) if whole else "diverged"


def grid_table(results):
    """A row for each model, optimizer and decay, a column for each rate."""
    groups = of_kind(results, "grid")
    rates = sorted({result["run"]["lr"] for group in groups.values() for result in group})
    rows = []
    for key, group in groups.items():
        losses = {(r["run"]["decay"], r["run"]["lr"]): last_loss(r) for r in group}
        lowest = min((loss for loss in losses.values() if loss is not None), default=None)
        for decay in sorted({decay for decay, _ in losses}):
            cells = [cell([losses[decay, lr]]) if (decay, lr) in losses else "" for lr in rates]
            rows.append([label(*key), f"{decay:g}",
                         *(f"**{text}**" if losses.get((decay, lr)) == lowest is not None else text
                           for lr, text in zip(rates, cells))])
    return table(["", "decay", *(f"{lr:g}" for lr in rates)], rows)


def crossing(curve, loss):
    """The tokens at which a curve of [tokens, seconds, loss] first is at the loss, between two points by a line."""
    for (t0, _, l0), (t1, _, l1) in zip(curve, curve[1:]):
        if l1 <= loss:
            return t0 + (t1 - t0) * (min(1.0, (l0 - loss) / (l0 - l1)) if l0 > l1 else 1.0)
    return None


def tokens_needed(results, model, goal):
    """Of Muon's whole schedules of several lengths, the tokens for a loss, between two lengths by a line."""
    runs = [r for key, group in of_kind(results, "shorter", "seed").items() if key == (model, "muon") for r in group
            if r["run"]["seed"] == 1 and last_loss(r) is not None]
    ends = sorted(r["validation"][-1] for r in runs)
    if not ends:
        return "not measured"
    if ends[0][2] <= goal:
        return f"below {ends[0][0] / 1e6:.1f}M"
    tokens = crossing(ends, goal)
    return f"{tokens / 1e6:.1f}M" if tokens else f"above {ends[-1][0] / 1e6:.1f}M"


def seeds_table(results, kind):
    groups = of_kind(results, kind)
    rows = []
    for (model, optimizer), group in groups.items():
        run = group[0]["run"]
        whole = [r for r in group if last_loss(r) is not None]
        tokens = [r["validation"][-1][0] for r in whole]
        row = [label(model, optimizer), f"{run['lr']:g}, {run['decay']:g}", f"{mean(tokens) / 1e6:.1f}M" if tokens else "",
               cell([last_loss(r) for r in group]), f"{mean(r['validation'][-1][1] for r in whole):.0f}" if whole else ""]
        other = [last_loss(r) for r in groups.get((model, "adamw"), []) if last_loss(r) is not None]
        if optimizer == "adamw" or not other:
            row += ["", ""]
        else:
            on_the_way = [crossing(r["validation"], mean(other)) for r in whole]
            row += [f"{mean(on_the_way) / 1e6:.1f}M" if whole and all(on_the_way) else "not reached",
                    tokens_needed(results, model, mean(other)) if optimizer == "muon" else ""]
        rows.append([*row, str(len(group))])
    return table(["", "rate, decay", "tokens", "loss", "seconds", "at AdamW's loss on the way",
                  "at AdamW's loss with a schedule of that length", "seeds"], rows)


def lengths_table(results, name):
    groups = {key: [r for r in group if name in r] for key, group in of_kind(results, "seed").items()}
    lengths = sorted({length for group in groups.values() for r in group for length in r[name]}, key=int)
    rows = [[label(*key), *(cell([r[name].get(length) for r in group]) for length in lengths)]
            for key, group in groups.items() if group]
    return table(["", *lengths], rows)


def tables(results):
    if of_kind(results, "grid"):
        yield "Validation loss by learning rate, one seed and a shorter training", grid_table(results)
    for kind, what in (("seed", "Validation loss with the best of these"), ("long", "One long run with the best")):
        if of_kind(results, kind):
            yield what, seeds_table(results, kind)
    for name, what in (("lengths", "windows"), ("same", "the last targets of the longest windows")):
        if any(name in r for r in results):
            yield f"Loss (nats per token), {what}, by length", lengths_table(results, name)


def draw(groups, points_of, axis, title, output, logarithmic):
    """`points_of` a result: its points as (x, loss). A dashed line is AdamW's."""
    plt = load_pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4.4), constrained_layout=True)
    models = list(dict.fromkeys(model for model, _ in groups))
    optimizers = list(dict.fromkeys(optimizer for _, optimizer in groups))
    ends = []
    for (model, optimizer), group in groups.items():
        runs = [list(zip(*points_of(r))) for r in group]
        if not all(runs):
            continue
        line = line_of(label(model, optimizer), runs)
        colour = COLOURS[(models.index(model) if len(models) > 1 else optimizers.index(optimizer)) % len(COLOURS)]
        axes.plot(line.x, line.mean, color=colour, linestyle="--" if optimizer == "adamw" else "-",
                  marker=MARKERS[optimizers.index(optimizer) % len(MARKERS)], markersize=4.5, linewidth=1.7,
                  label=line.label)
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        ends += [loss for x, loss in zip(line.x, line.high) if x >= 0.1 * line.x[-1]]
    style_axes(axes)
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xticks(line.x, [f"{x:g}" for x in line.x])
    elif ends:
        axes.set_ylim(top=max(ends) + 0.1)  # the first tenth, in which the loss falls fastest, is cut off
    axes.set_xlabel(axis)
    axes.set_ylabel("validation loss (nats per token)")
    set_title(axes, title)
    axes.legend(frameon=False, fontsize=9)
    save(figure, output)
    print(output)


def draw_all(results, folder):
    for kind in ("seed", "long"):
        groups = {key: [r for r in group if last_loss(r) is not None] for key, group in of_kind(results, kind).items()}
        groups = {key: group for key, group in groups.items() if group}
        if not groups:
            continue

        def over(place, unit):
            return lambda r: [(point[place] / unit, point[2]) for point in r["validation"] if point[0] > 0]

        draw(groups, over(0, 1e6), "million tokens", "Loss by tokens", folder / "tokens.png", False)
        if kind == "long":
            draw(groups, over(1, 1), "seconds of training", "Loss by time", folder / "seconds.png", False)
        elif all("lengths" in r for group in groups.values() for r in group):
            draw(groups, lambda r: [(int(x), loss) for x, loss in r["lengths"].items()], "tokens of a window",
                 "Loss in windows longer than trained with", folder / "lengths.png", True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="the folder, or its results.jsonl")
    parser.add_argument("--tables", action="store_true", help="draw nothing")
    arguments = parser.parse_args()
    try:
        path, results = read(arguments.results)
        for title, text in tables(results):
            print(f"{title}:\n\n{text}\n")
        if not arguments.tables:
            draw_all(results, path.parent)
    except PlotError as error:
        sys.exit(f"plot_optimizers: {error}")


if __name__ == "__main__":
    main()
