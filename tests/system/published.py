"""What was measured and published, docs/results, and the pages that say so: for the tests of these pages. Modules of
scripts/ can be imported after it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

from plotting import results_in  # noqa: E402


def page_of(name):
    return (ROOT / f"{name}.md").read_text(encoding="utf-8")


def raw_lines(name):
    return [record for _, record in results_in(ROOT / f"docs/results/{name}.jsonl")]


def runs_of(name):
    """The runs of a sweep that came to their end."""
    runs = next(line["runs"] for line in raw_lines(name) if "runs" in line)
    return [run for run in runs if run["status"] == "done"]


def best_accuracies(name):
    """{variant: the accuracy of its best run} of a sweep."""
    best = {}
    for run in runs_of(name):
        best[run["variant"]] = max(best.get(run["variant"], 0), run["best_accuracy"])
    return best


def looking_up(heads):
    """Those, of `sbtrain eval --task-positions`, that have their largest weight on the value for most queries."""
    return [head for head in heads if head["iou_top"] > 0.5]


def times_of(name):
    """The rows of `sbtrain bench skip`."""
    return next(line["rows"] for line in raw_lines(name) if "rows" in line)


def long_contexts():
    """By label and length: losses, what of the passkeys was found, and the rows of `sbtrain bench skip`, several of a
    length."""
    losses, found, times = {}, {}, {}
    for line in raw_lines("long_contexts"):
        label = line["label"].removesuffix(", joined documents")
        losses |= {(label, row["length"]): row["loss"] for row in line.get("lengths", [])}
        for task in line.get("tasks", []):
            found |= {(label, row["length"]): row for row in task["lengths"]}
        for row in line.get("rows", []):
            times.setdefault((label, row["length"]), []).append(row)
    return losses, found, times
