#!/usr/bin/env python3
"""Prints what experiments measured as tables in Markdown, with mean and spread over seeds.

    scripts/tables.py runs/lengths/seed-*/*.json       # sbtrain eval --lengths or --tasks, with --json FILE
    scripts/tables.py runs/mqrar runs/more/sweep.json  # sbtrain sweep: the best by the first key of the grid
    scripts/tables.py -x train.lr runs/mqrar           # or by another one
    scripts/tables.py skip.jsonl                       # sbtrain bench skip --json > skip.jsonl

Each kind of result becomes a table of its own, whatever the order of the files; so does each grid of sweeps.
Results with the same label are those of one model with different seeds: a cell is their mean, with the standard
deviation (of samples) after a ±, and the column `seeds` has their number. In tables of losses the lowest mean of a
column is bold.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import plot_sweep
from plotting import PlotError, by_label, labels_of


@dataclass
class Result:
    """What one run has at each length."""

    label: str
    values: dict


def spread(values, digits):
    text = f"{mean(values):.{digits}f}"
    return text + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table_by_length(results, digits, bold):
    """A row for each label and a column for each length. `bold`: the lowest mean of a column stands out."""
    groups = by_label(results)
    lengths = sorted({length for result in results for length in result.values})
    cells = {label: {length: [run.values[length] for run in runs if length in run.values] for length in lengths}
             for label, runs in groups.items()}
    rows = []
    for label, runs in groups.items():
        row = [label]
        for length in lengths:
            values = cells[label][length]
            text = spread(values, digits) if values else ""
            column = [mean(other[length]) for other in cells.values() if other[length]]
            lowest = bold and len(column) > 1 and values and round(mean(values), digits) <= round(min(column), digits)
            row.append(f"**{text}**" if lowest else text)
        rows.append([*row, str(len(runs))])
    return table(["", *map(str, lengths), "seeds"], rows)


def default_label(record):
    scaling = record["rope_scaling"]
    return record["name"].removeprefix("lengths_") + (f", {scaling}" if scaling else "")


def loss_tables(records):
    """Of `sbtrain eval --lengths`: one for windows of their own text, one for each number of same targets."""
    for targets in sorted({record["same_targets"] for _, record in records}):
        results = [Result(label, {r["length"]: r["loss"] for r in record["lengths"] if "absent" not in r})
                   for label, record in records if record["same_targets"] == targets]
        what = f"the last {targets} tokens of the longest windows" if targets else "windows"
        yield f"Loss (nats per token), {what}, by length", table_by_length(results, 3, bold=True)


def task_tables(records):
    for task in dict.fromkeys(task["task"] for _, record in records for task in record["tasks"]):
        results = [Result(label, {r["length"]: r["score"] for r in part["lengths"] if "absent" not in r})
                   for label, record in records for part in record["tasks"] if part["task"] == task]
        results = [result for result in results if result.values]
        if results:
            yield f"Score of {task}, by tokens of prompt and answer", table_by_length(results, 2, bold=False)


def by_grid(sweeps):
    """Sweeps in groups whose grids have the same keys."""
    groups = {}
    for sweep in sweeps:
        groups.setdefault(frozenset(key for run in sweep["runs"] for key in run["grid"]), []).append(sweep)
    return groups.values()


def sweep_table(sweeps, key):
    runs = [run for sweep in sweeps for run in sweep["runs"]]
    key = key or plot_sweep.default_key(runs, sweeps[0]["best_over"])
    metric = plot_sweep.choose_metric(runs)
    variants = plot_sweep.best_runs(runs, key, metric)
    places = sorted({x for points in variants.values() for x in points})

    def cell(group):
        values = spread([run[f"best_{metric}"] for run in group], 3)
        epochs = [run["epochs"] for run in group if run["epochs"] is not None]
        return values + (f" ({mean(epochs):.3g})" if epochs else "")

    rows = [[variant, *(cell(points[x]) if x in points else "" for x in places),
             str(max(len(group) for group in points.values()))] for variant, points in variants.items()]
    name = f"Best {metric} (and epochs) by {key}"
    return name, table(["", *(f"{x:g}" for x in places), "seeds"], rows)


def skip_table(rows):
    """Of `sbtrain bench skip`: times relative to those without skipping."""
    lines = []
    for row in rows:
        if row["epsilon"] == 0:
            full = row

        def saved(key):
            return f"{1e3 * row[key]:.2f} ({100 * (row[key] / full[key] - 1):+.0f}%)"

        lines.append([str(row["length"]), f"{row['epsilon']:.2g}", f"{100 * row['keys_read']:.1f}%",
                      saved("attention_forward_seconds"), saved("attention_backward_seconds"),
                      saved("model_forward_seconds"), saved("model_training_seconds"),
                      f"{row['loss']:.4f}" if row is full else f"{row['loss'] - full['loss']:+.4f}"])
    head = ["length", "epsilon", "keys read", "attention forward, ms", "attention backward, ms", "model forward, ms",
            "model forward and backward, ms", "loss"]
    return (f"Skipping keys: {rows[0]['name']}, {rows[0]['batch_tokens']} tokens in a batch", table(head, lines))


def read(argument):
    """The kind of the result that a file holds, and its content."""
    path = Path(argument)
    path = path / "sweep.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            if rows and "keys_read" in rows[0]:
                return "skip", rows
        else:
            record = json.loads(text)
            if "best_over" in record:
                return "sweep", record
            if "tasks" in record:
                return "tasks", record
            if "same_targets" in record:
                return "lengths", record
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlotError(f"{path}: {error}") from error
    raise PlotError(f"{path}: no result that this script knows")


def tables(files, labels, key):
    found = {"lengths": [], "tasks": [], "sweep": [], "skip": []}
    for file, label in zip(files, labels):
        kind, content = read(file)
        try:
            if kind in ("lengths", "tasks"):
                content = (label or default_label(content), content)
            found[kind].append(content)
        except KeyError as error:
            raise PlotError(f"{file}: no {error}") from error
    yield from loss_tables(found["lengths"])
    yield from task_tables(found["tasks"])
    for sweeps in by_grid(found["sweep"]):
        yield sweep_table(sweeps, key)
    yield from map(skip_table, found["skip"])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=__doc__.split("\n\n", 1)[1])
    parser.add_argument("files", nargs="+", metavar="FILE", help="results, or folders of sweeps")
    parser.add_argument("--labels", metavar="A,B,...",
                        help="one for each file; default: the names of the runs")
    parser.add_argument("-x", "--key", help="key of the sweeps' grid; default: the first that they do not choose the "
                                            "best of")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        for title, text in tables(arguments.files, labels_of(arguments), arguments.key):
            print(f"{title}:\n\n{text}\n")
    except PlotError as error:
        sys.exit(f"tables: {error}")


if __name__ == "__main__":
    main()
