#!/usr/bin/env python3
"""Prints what experiments measured as tables in Markdown, with mean and spread over seeds.

    scripts/tables.py runs/lengths/seed-*/*.json       # sbtrain eval --lengths or --tasks, with --json FILE
    scripts/tables.py runs/mqrar runs/more/sweep.json  # sbtrain sweep: the best by the first key of the grid
    scripts/tables.py -x train.lr runs/mqrar           # or by another one
    scripts/tables.py skip.jsonl                       # sbtrain bench skip --json > skip.jsonl
    scripts/tables.py --bootstrap 1000 --against rope runs/lengths/seed-*/{sb,rope}.json
    scripts/tables.py --bootstrap 1000 benefit.json    # sbtrain eval --benefit 16384 --json benefit.json

Each kind of result becomes a table of its own, whatever the order of the files; so does each grid of sweeps.
Results with the same label are those of one model with different seeds: a cell is their mean, with the standard
deviation (of samples) after a ±, and the column `seeds` has their number. In tables of losses the lowest mean of a
column is bold.

With --bootstrap N, losses get a second table with 95% intervals over documents: N times as many documents as there are
are drawn with replacement, the same for all models and seeds, and the seeds' mean is taken. With --against LABEL a third
one has the differences from that model on the same targets, whose intervals are narrower than those of both. They say
how far the choice of documents may have decided; what the seeds decide is the ± of the first table.
"""

import argparse
import functools
import random
import sys
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import mean, stdev

import plot_sweep
from plotting import PlotError, by_label, labels_of, results_in


@dataclass
class Result:
    """What one run has at each length."""

    label: str
    values: dict
    documents: dict = field(default_factory=dict)  # at each length {document: (sum of losses, tokens)}


def documents_of(result):
    """{(store, document): (sum of losses, tokens)} of one length of `sbtrain eval`; empty if the file has none."""
    sums = result.get("by_document")
    if not sums:
        return {}
    places = zip(sums["store"], sums["document"])
    return {place: (loss, tokens) for place, loss, tokens in zip(places, sums["loss_sum"], sums["tokens"]) if tokens}


@functools.cache
def draws_of(documents, count):
    """`count` functions that pick as many of a list of documents, always the same ones."""
    generator = random.Random(0)
    return [itemgetter(*generator.choices(range(documents), k=documents)) for _ in range(count)]


def interval(sums, count):
    """The 95% interval of the mean over tokens of [(sum, tokens)], by `count` draws of documents."""
    losses, tokens = zip(*sums)
    means = sorted(sum(draw(losses)) / sum(draw(tokens)) for draw in draws_of(len(sums), count))

    def at(share):
        place = share * (len(means) - 1)
        below = int(place)
        above = min(below + 1, len(means) - 1)
        return means[below] + (place - below) * (means[above] - means[below])

    return at(0.025), at(0.975)


def targets_of(documents):
    return {document: tokens for document, (_, tokens) in documents.items()}


def summed(runs, length):
    """Sums over the seeds of one model, by document: {document: (loss, tokens)}."""
    total = {}
    for run in runs:
        documents = run.documents.get(length)
        if not documents:
            raise PlotError(f"{run.label}, {length}: the file has no losses by document; measure it again")
        if targets_of(documents) != targets_of(runs[0].documents[length]):
            raise PlotError(f"{run.label}, {length}: the files of this model have different targets")
        for document, (loss, tokens) in documents.items():
            before = total.get(document, (0.0, 0))
            total[document] = (before[0] + loss, before[1] + tokens)
    return dict(sorted(total.items()))


def difference(runs, others, length):
    """[(difference of mean losses times tokens, tokens)] by document, of two models on the same targets."""
    mine, theirs = summed(runs, length), summed(others, length)
    targets = [{document: tokens // count for document, (_, tokens) in sums.items()}
               for sums, count in ((mine, len(runs)), (theirs, len(others)))]
    if targets[0] != targets[1]:
        raise PlotError(f"{runs[0].label} and {others[0].label}, {length}: not the same targets")
    return [(loss / len(runs) - theirs[document][0] / len(others), targets[0][document])
            for document, (loss, _) in mine.items()]


def mean_of(sums):
    return sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def table_of_intervals(results, count, sums_of, cell):
    """A row for each label; `sums_of(runs, length)` is [(sum, tokens)] by document, or None for a row without."""
    groups = by_label(results)
    lengths = sorted({length for result in results for length in result.values})
    rows = []
    for label, runs in groups.items():
        row = [label]
        for length in lengths:
            runs_here = [run for run in runs if length in run.values]
            sums = sums_of(runs_here, length) if runs_here else None
            row.append(cell(sums, interval(sums, count)) if sums and len(sums) > 1 else "")
        if any(row[1:]):
            rows.append(row)
    return table(["", *map(str, lengths)], rows)


def interval_tables(what, results, count, against):
    yield (f"{what}, 95% interval over documents",
           table_of_intervals(results, count, lambda runs, length: list(summed(runs, length).values()),
                              lambda _, limits: f"{limits[0]:.3f} to {limits[1]:.3f}"))
    if not against:
        return
    others = by_label(results).get(against)
    if not others:
        raise PlotError(f"--against: no file has the label '{against}'")

    def sums_of(runs, length):
        theirs = [run for run in others if length in run.values]
        return difference(runs, theirs, length) if theirs and runs[0].label != against else None

    yield (f"{what}, minus that of {against} on the same targets, with the 95% interval over documents",
           table_of_intervals(results, count, sums_of,
                              lambda sums, limits: f"{mean_of(sums):+.3f} ({limits[0]:+.3f} to {limits[1]:+.3f})"))


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


def losses_of(label, record):
    """Of `sbtrain eval --lengths`."""
    lengths = [r for r in record["lengths"] if "absent" not in r]
    return Result(label, {r["length"]: r["loss"] for r in lengths}, {r["length"]: documents_of(r) for r in lengths})


def loss_tables(records, bootstrap, against):
    """Of `sbtrain eval --lengths`: one for windows of their own text, one for each number of same targets."""
    for targets in sorted({record["same_targets"] for _, record in records}):
        results = [losses_of(label, record) for label, record in records if record["same_targets"] == targets]
        what = f"the last {targets} tokens of the longest windows" if targets else "windows"
        title = f"Loss (nats per token), {what}, by length"
        yield title, table_by_length(results, 3, bold=True)
        if bootstrap:
            yield from interval_tables(title, results, bootstrap, against)


def benefit_tables(records, bootstrap):
    """Of `sbtrain eval --benefit`: what the full context takes off the loss with the last tokens only."""
    for full, targets in sorted({(record["full_context"], record["targets"]) for _, record in records}):
        results = []
        for label, record in records:
            if (record["full_context"], record["targets"]) != (full, targets):
                continue
            whole = documents_of(record["benefit"][-1])
            rows = record["benefit"][:-1]
            results.append(Result(label, {r["context"]: r["difference"] for r in rows}, {
                r["context"]: {document: (whole[document][0] - loss, tokens)
                               for document, (loss, tokens) in documents_of(r).items()} for r in rows}))
        title = (f"Loss with {full} tokens of context minus the loss with only the last of them (nats per token, the last "
                 f"{targets} targets of each window), by these")
        yield title, table_by_length(results, 3, bold=False)
        if bootstrap:
            yield from interval_tables(title, results, bootstrap, None)


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

        lines.append([str(row["length"]), f"{row['epsilon']:.2g}",
                      "" if row["keys_read"] is None else f"{100 * row['keys_read']:.1f}%",
                      saved("attention_forward_seconds"), saved("attention_backward_seconds"),
                      saved("model_forward_seconds"), saved("model_training_seconds"),
                      f"{row['loss']:.4f}" if row is full else f"{row['loss'] - full['loss']:+.4f}"])
    head = ["length", "epsilon", "keys read", "attention forward, ms", "attention backward, ms", "model forward, ms",
            "model forward and backward, ms", "loss"]
    return (f"Skipping keys: {rows[0]['name']}, {rows[0]['batch_tokens']} tokens in a batch", table(head, lines))


KINDS = {"best_over": "sweep", "tasks": "tasks", "same_targets": "lengths", "benefit": "benefit", "rows": "skip",
         "reach": "reach", "curve": "curve"}
NO_TABLE = ("reach", "curve")  # scripts/plot_reach.py and plot_loss.py draw them


def kind_of(record):
    return next((kind for key, kind in KINDS.items() if key in record), None)


def tables(files, labels, key, bootstrap, against):
    found = {kind: [] for kind in KINDS.values()}
    for file, label in zip(files, labels):
        for own, record in results_in(file):
            kind = kind_of(record)
            if not kind:
                raise PlotError(f"{file}: no result that this script knows")
            found[kind].append((label or own, record))
    if all(kind in NO_TABLE for kind, records in found.items() if records):
        raise PlotError("no result that this script has a table for")
    try:
        yield from loss_tables(found["lengths"], bootstrap, against)
        yield from benefit_tables(found["benefit"], bootstrap)
        yield from task_tables(found["tasks"])
        for sweeps in by_grid([record for _, record in found["sweep"]]):
            yield sweep_table(sweeps, key)
        for _, record in found["skip"]:
            yield skip_table(record["rows"])
    except (KeyError, TypeError) as error:
        raise PlotError(f"a result lacks {error}") from error


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=__doc__.split("\n\n", 1)[1])
    parser.add_argument("files", nargs="+", metavar="FILE", help="results, or folders of sweeps")
    parser.add_argument("--labels", metavar="A,B,...",
                        help="one for each file; default: the names of the runs")
    parser.add_argument("-x", "--key", help="key of the sweeps' grid; default: the first that they do not choose the "
                                            "best of")
    parser.add_argument("--bootstrap", type=int, default=0, metavar="N",
                        help="draws of documents for 95%% intervals of losses; default: no intervals")
    parser.add_argument("--against", metavar="LABEL",
                        help="with --bootstrap: also differences from this model on the same targets")
    arguments = parser.parse_args()
    if arguments.against and arguments.bootstrap <= 0:
        parser.error("--against needs --bootstrap")
    return arguments


def main():
    arguments = parse_arguments()
    try:
        for title, text in tables(arguments.files, labels_of(arguments), arguments.key, arguments.bootstrap,
                                  arguments.against):
            print(f"{title}:\n\n{text}\n")
    except PlotError as error:
        sys.exit(f"tables: {error}")


if __name__ == "__main__":
    main()
