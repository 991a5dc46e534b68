#!/usr/bin/env python3
"""Puts what experiments measured into one small file, a line of JSON for each result, to be kept with the tables that
were made of it.

    scripts/collect_results.py runs/lengths/seed-*/*.json -o docs/results/lengths.jsonl
    scripts/collect_results.py --labels A,A,B a1.json a2.json b.json -o results.jsonl
    scripts/collect_results.py runs/mqrar runs/pair_350m/skip.jsonl -o results.jsonl   # sweeps, and bench skip
    scripts/collect_results.py runs/warmup_1b_sb -o results.jsonl                      # curves of a run
    scripts/collect_results.py --unpack results.jsonl -o runs/kept                     # the files again

A line is the result as `sbtrain eval --json FILE`, `sbtrain sweep` or `sbtrain bench skip` wrote it, or the curves of a
run folder, with "label", the name of its row in tables (--labels; default: that of the run), "file", the names of the
folder and the file, and "revision", that of the program which trained the run, where its folder is still there. Numbers
have six digits, losses by single positions and single samples are left out, and the documents of a list of losses are a
name where an earlier line has the same ones. scripts/tables.py, plot_lengths.py and plot_tasks.py read such files;
--unpack makes files and run folders of them for the other plots (plot_sweep.py, plot_reach.py, plot_skip.py,
plot_loss.py).
"""

import argparse
import json
import re
import sys
from pathlib import Path

from plotting import PLACES, PlotError, labels_of, objects_in, results_in

LEFT_OUT = {"loss_at_position", "results", "checkpoint"}


def shortened(value, key=None):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, dict):
        return {key: shortened(item, key) for key, item in value.items() if key not in LEFT_OUT}
    if key == "config" and isinstance(value, str):  # where the source tree lies is of no interest
        return re.sub(r"^.*/(?=configs/)", "", value)
    return value


def name_places(value, names):
    """Names the documents of lists of losses: the first list of its kind has them, later ones refer to it."""
    for item in objects_in(value):
        sums = item.get("by_document")
        if isinstance(sums, dict):
            key = json.dumps([sums[place] for place in PLACES])
            if key in names:
                for place in PLACES:
                    del sums[place]
            sums["places"] = names.setdefault(key, f"places-{len(names) + 1}")


def revision_of(path, record):
    """That of the program that trained a run, or the first run of a sweep; None where no folder says it. A run that has
    been moved is looked for beside its result."""
    folder = Path(record.get("checkpoint") or path)
    if not folder.exists():
        folder = Path(path).parent / folder.name
    notes = [folder / "run.json", *(sorted(folder.glob("*/*/run.json")) if folder.is_dir() else [])]
    note = next((note for note in notes if note.is_file()), None)
    return json.loads(note.read_text(encoding="utf-8")).get("git_revision") if note else None


def lines(arguments):
    names = {}
    for path, label in zip(arguments.files, labels_of(arguments)):
        for own, record in results_in(path):
            revision = revision_of(path, record)
            record = shortened(record)
            name_places(record, names)
            head = {"label": label or own, "file": "/".join(Path(path).parts[-2:])}
            yield {**head, **({"revision": revision} if revision else {}), **record}


def metrics_of(record):
    """The lines of a metrics.jsonl that has these curves."""
    curve = record["curve"]
    for n, tokens in enumerate(curve["tokens"]):
        yield {"tokens": tokens, **{f"train/{key}": curve[key][n] for key in curve if key != "tokens"}}
    for tokens, loss in zip(record["validation"]["tokens"], record["validation"]["loss"]):
        yield {"tokens": tokens, "validation/loss": loss}


def unpack(path, folder):
    for label, record in results_in(path):
        parts = Path(record["file"]).parts
        if ".." in parts or len(parts) > 2:
            raise PlotError(f"{path}: {record['file']}: no name of a folder and a file")
        file = folder.joinpath(*parts)
        if "curve" in record:
            file /= "metrics.jsonl"
        elif "best_over" in record and file.suffix != ".json":
            file /= "sweep.json"
        content = metrics_of(record) if "curve" in record else record.get("rows", [record])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")
        print(f"{file}: {label}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="results, or folders of sweeps and runs")
    parser.add_argument("--labels", metavar="A,B,...", help="one for each file; default: the names of the runs")
    parser.add_argument("-o", "--output", required=True, metavar="JSONL", help="with --unpack: a folder")
    parser.add_argument("--unpack", action="store_true", help="make the files again that such a file was made of")
    arguments = parser.parse_args()
    try:
        if arguments.unpack:
            for path in arguments.files:
                unpack(path, Path(arguments.output))
            return
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines(arguments))
        Path(arguments.output).write_text(text, encoding="utf-8")
    except PlotError as error:
        sys.exit(f"collect_results: {error}")
    except OSError as error:
        sys.exit(f"collect_results: {arguments.output}: {error.strerror}")


if __name__ == "__main__":
    main()
