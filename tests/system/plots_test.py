"""What the plots show: names that tell runs apart, the best of a sweep, lines that leave the plot."""

import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import plot_lengths  # noqa: E402
import plot_loss  # noqa: E402
import plot_optimizers  # noqa: E402
import plot_overlap  # noqa: E402
import plot_results  # noqa: E402
import plot_skip  # noqa: E402
import plot_sweep  # noqa: E402
import plot_reach  # noqa: E402
import plot_tasks  # noqa: E402
from plotting import COLOURS, labels_of, line_of, results_in, spread_out  # noqa: E402

try:
    import matplotlib  # noqa: F401
    CAN_DRAW = True
except ImportError:
    CAN_DRAW = False


def names(*folders):
    return plot_loss.names_of([Path(folder) / "metrics.jsonl" for folder in folders])


class Names(unittest.TestCase):
    def test_what_differs(self):
        self.assertEqual(names("/r/m/sb/lr=1", "/r/m/rope/lr=1"), ["sb", "rope"])
        self.assertEqual(names("/r/m/sb/lr=1", "/r/m/sb/lr=2"), ["lr=1", "lr=2"])
        self.assertEqual(names("/r/a/x/lr=1", "/r/b/x/lr=2"), ["a/lr=1", "b/lr=2"])
        self.assertEqual(names("/r/a", "/r/b/c"), ["a", "b/c"])
        self.assertEqual(names("/r/a"), ["a"])
        self.assertEqual(names("/r/a", "/r/a"), ["a", "a"])

    def test_one_within_the_other(self):
        self.assertEqual(len(set(names("/r/a", "/r/a/a"))), 2)


def run_of(variant, x, accuracy, loss):
    return {"variant": variant, "grid": {"k": str(x)}, "best_accuracy": accuracy, "best_loss": loss}


class Sweeps(unittest.TestCase):
    def test_loss_where_there_is_no_accuracy(self):
        runs = [run_of("a", 1, None, 3.0), run_of("a", 1, None, 2.5), run_of("a", 2, None, None)]
        self.assertEqual(plot_sweep.choose_metric(runs), "loss")
        self.assertEqual(plot_sweep.best_points(runs, "k", "loss"), {"a": {1.0: [2.5]}})

    def test_accuracy_where_there_is_one(self):
        runs = [run_of("a", 1, 0.5, 3.0), run_of("a", 1, 0.7, 2.5)]
        self.assertEqual(plot_sweep.choose_metric(runs), "accuracy")
        self.assertEqual(plot_sweep.best_points(runs, "k", "accuracy"), {"a": {1.0: [0.7]}})

    def test_a_run_that_failed_is_not_the_best(self):
        runs = [run_of("a", 1, None, 3.0), run_of("a", 1, None, 2.5) | {"status": "failed"}]
        self.assertEqual(plot_sweep.best_points(runs, "k", "loss"), {"a": {1.0: [3.0]}})

    def test_seeds_are_averaged_before_the_best_is_chosen(self):
        def seed_run(lr, seed, accuracy):
            run = run_of("a", 1, accuracy, None)
            run["grid"].update({"lr": lr, "seed": seed})
            return run

        # The best single run has a learning rate that fails with the other seed.
        runs = [seed_run("1", "1", 1.0), seed_run("1", "2", 0.0), seed_run("2", "1", 0.75), seed_run("2", "2", 0.5)]
        self.assertEqual(plot_sweep.best_points(runs, "k", "accuracy"), {"a": {1.0: [0.75, 0.5]}})
        # A learning rate that has been run with fewer seeds has had less occasion to fail.
        runs.append(seed_run("3", "1", 0.9))
        self.assertEqual(plot_sweep.best_points(runs, "k", "accuracy"), {"a": {1.0: [0.75, 0.5]}})

    def test_names_of_variants(self):
        points = {"softmax_rope": {}, "based": {}}
        self.assertEqual(list(plot_sweep.named(points, "")), ["softmax rope", "based"])
        self.assertEqual(list(plot_sweep.named(points, "RoPE, softmax,Based")), ["RoPE, softmax", "Based"])
        with self.assertRaises(plot_sweep.PlotError):
            plot_sweep.named(points, "one")

    def test_draws_over_the_key_that_tells_most(self):
        runs = [{"grid": {"seed": 1, "lr": 1, "k": 2, "m": 3}}]
        self.assertEqual(plot_sweep.default_key(runs, ["lr"]), "k")
        self.assertEqual(plot_sweep.default_key(runs, ["lr", "k", "m"]), "lr")
        with self.assertRaises(plot_sweep.PlotError):
            plot_sweep.default_key([{"grid": {"seed": 1}}], [])

    def test_every_sweep_that_is_shipped_has_a_key_to_draw_over(self):
        for file in sorted((SCRIPTS.parent / "configs/sweeps").glob("*.yaml")):
            grid = re.search(r"^grid:.*\n((?:  .*\n)+)", file.read_text(), re.M)[1]
            keys = re.findall(r"^  ([\w.]+):", grid, re.M)
            plot_sweep.default_key([{"grid": dict.fromkeys(keys)}], [])

    @unittest.skipUnless(CAN_DRAW, "matplotlib is missing")
    def test_draws(self):
        with tempfile.TemporaryDirectory() as folder:
            seeds = [run_of("a", 1, None, 3.0), run_of("a", 1, None, 2.0)]
            for seed, run in enumerate(seeds):
                run["grid"]["seed"] = str(seed)
            sweep = {"name": "s", "best_over": [], "runs": seeds}
            (Path(folder) / "sweep.json").write_text(json.dumps(sweep))
            subprocess.run([sys.executable, SCRIPTS / "plot_sweep.py", folder, folder], check=True,
                           capture_output=True)
            self.assertTrue((Path(folder) / "loss.png").is_file())


class Results(unittest.TestCase):
    """The pictures of docs/results.md against its tables."""

    PAGE = (SCRIPTS.parent / "docs/results.md").read_text(encoding="utf-8")

    def test_pictures_are_those_of_the_tables(self):
        for name in plot_results.PICTURES:
            tables = plot_results.tables_of(name, self.PAGE)
            picture = (SCRIPTS.parent / f"docs/images/{name}.png").read_bytes()
            self.assertIn(b"tEXtSource\0" + plot_results.digest(tables).encode(), picture,
                          f"{name}.png is older than its table: scripts/plot_results.py {name}")

    def test_reads_means_and_spreads(self):
        page = "# A\n\n| | 1 | 2 |\n|---|---|---|\n| a | **1.5 \u00b1 0.5** | 2 (3 epochs) |\n| b | | 4.0 |\n\n# B\n"
        a, b = plot_results.tables_below(page, "A")[0].numbers()
        self.assertEqual((a.x, a.mean, a.low, a.high), ([1, 2], [1.5, 2.0], [1.0, 2.0], [2.0, 2.0]))
        self.assertEqual((b.label, b.x, b.mean), ("b", [2], [4.0]))
        with self.assertRaises(plot_results.PlotError):
            plot_results.tables_below(page, "B")

    # What a table of the page shows: (heading, which table, the title of that of tables.py, or for differences from
    # stick-breaking titles and columns).
    WINDOWS, SAME = "token), windows, by length", "token), the last 256 tokens of the longest windows, by length"
    AGAINST = [(WINDOWS, "512"), (WINDOWS, "4096"), (WINDOWS, "16384"), (SAME, "4096"), (SAME, "16384")]
    RAW = {
        "lengths_23m": [("Three seeds", 0, WINDOWS), ("Three seeds", 1, SAME), ("Three seeds", 2, AGAINST),
                        ("Variants of stick-breaking", 0, WINDOWS), ("Variants of stick-breaking", 1, SAME),
                        ("Variants of stick-breaking", 2, AGAINST), ("Windows", 0, WINDOWS), ("Windows", 1, SAME),
                        ("FIRE's threshold", 0, WINDOWS), ("Longer rows", 0, WINDOWS), ("Longer rows", 1, SAME)],
        "needles_23m": [("Needles beyond the trained length", n, task) for n, task in enumerate(
            ("Score of passkey", "Score of niah_single_1", "Score of niah_multikey_2"))],
        "needles_vt_23m": [("Needles beyond the trained length", 3, "Score of vt")],
        "pair_350m": [(plot_results.PAIR, 0, WINDOWS), (plot_results.PAIR, 1, SAME),
                      (plot_results.PAIR, 2, [(WINDOWS, "2048"), (WINDOWS, "8192"), (WINDOWS, "32768")]),
                      (plot_results.PAIR, 3, [(SAME, "2048"), (SAME, "8192"), (SAME, "32768")]),
                      (plot_results.PAIR, 4, "Score of passkey"), (plot_results.PAIR, 5, "Score of niah_single_1")],
    }

    def tables_of(self, name, against=None):
        """{title: table} of the raw lines of docs/results."""
        command = [sys.executable, SCRIPTS / "tables.py", SCRIPTS.parent / f"docs/results/{name}.jsonl"]
        if against or name.startswith(("lengths", "pair")):
            command += ["--bootstrap", "1000", "--against", against or "stick-breaking"]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        parts = text.strip().split("\n\n")
        return {title: plot_results.Table(table.splitlines()) for title, table in zip(parts[::2], parts[1::2])}

    def column(self, tables, what, column, against):
        """{label: cell} of the table whose title has `what`."""
        titles = [t for t in tables if what in t and ("minus that of" in t) == against and
                  (against or "interval" not in t)]
        self.assertEqual(len(titles), 1, (what, list(tables)))
        table = tables[titles[0]]
        at = table.columns.index(column)
        left_out = " \u00b1 0.00" if "Score" in what else ""
        return {label: cells[at].removesuffix(left_out) for label, cells in table.rows}

    def test_tables_are_those_of_the_raw_lines(self):
        for name, shown in self.RAW.items():
            raw = self.tables_of(name)
            for heading, n, what in shown:
                table = plot_results.tables_below(self.PAGE, heading)[n]
                against = not isinstance(what, str)
                places = what if against else [(what, column) for column in table.columns]
                self.assertEqual(len(places), len(table.columns))
                for i, (title, column) in enumerate(places):
                    cells = self.column(raw, title, column, against)
                    for label, row in table.rows:
                        expected = cells.get(label) or cells[f"stick-breaking, {label}"]
                        self.assertEqual(row[i], expected, f"docs/results.md, {heading}: {label}, {column}")

    # Rates that a sweep has tried: (heading, which table, the variants of its rows).
    SWEEPS = {
        "rows_4096_23m": ("Longer rows", 2, ("stickbreaking", "rope")),
        "rebased_gap_23m": ("ReBased beside attention without positions", 0,
                            ("rebased", "rebased_learned", "rebased_deep", "rebased_gpt2", "none", "none_learned")),
    }

    # Accuracies (and epochs) of the best rate of a sweep: (heading, which table, the key of its columns, variants of its
    # rows).
    ACCURACIES = {
        "rebased_kernel": ("The kernel of ReBased, part by part", 0, "model.width",
                           ("rebased", "no_beta", "no_gamma", "no_gamma_beta", "no_norm", "no_norm_beta", "no_norm_gamma")),
        "mqrar_192": (plot_results.RECALL, 2, "seed", ("stickbreaking", "softmax_rope")),
    }

    def test_accuracies_are_those_of_the_raw_lines(self):
        for name, (heading, n, key, variants) in self.ACCURACIES.items():
            best = {}
            for run in next(line["runs"] for line in self.raw_lines(name) if "runs" in line):
                if run["status"] == "done":
                    place = run["variant"], run["grid"][key]
                    best[place] = max(best.get(place, (0, 0)), (run["best_accuracy"], run["epochs"]))
            table = plot_results.tables_below(self.PAGE, heading)[n]
            self.assertEqual(len(table.rows), len(variants), heading)
            for (label, cells), variant in zip(table.rows, variants):
                expected = [best[variant, column.removeprefix("seed ")] for column in table.columns]
                self.assertEqual(cells, [f"{accuracy:.3f} ({epochs:.0f})" for accuracy, epochs in expected],
                                 f"docs/results.md, {heading}: {label}")

    def raw_lines(self, name):
        return [record for _, record in results_in(SCRIPTS.parent / f"docs/results/{name}.jsonl")]

    def test_rates_are_those_of_the_raw_lines(self):
        for name, (heading, n, variants) in self.SWEEPS.items():
            runs = next(line["runs"] for line in self.raw_lines(name) if "runs" in line)
            losses = {(run["variant"], run["grid"]["train.lr"]): run["best_loss"] for run in runs}
            table = plot_results.tables_below(self.PAGE, heading)[n]
            self.assertEqual(len(table.rows), len(variants), heading)
            for (label, cells), variant in zip(table.rows, variants):
                self.assertEqual(cells, [f"{losses[variant, rate]:.3f}" for rate in table.columns],
                                 f"docs/results.md, {heading}: {label}")

    def test_rates_of_the_pair_are_those_of_the_raw_lines(self):
        losses = {line["label"]: line["validation"]["loss"][-1] for line in self.raw_lines("pair_350m")
                  if "validation" in line}
        table = plot_results.tables_below(self.PAGE, "Rates of the pair")[0]
        shown = {f"{model}, a tenth of the steps, rate {rate}": cell for model, cells in table.rows
                 for rate, cell in zip(table.columns, cells) if cell}
        self.assertEqual(shown, {label: f"{loss:.3f}" for label, loss in losses.items() if "a tenth" in label})

    def test_whole_schedules_of_the_pair_are_those_of_the_raw_lines(self):
        after = {(line["label"].removesuffix(", stopped"), tokens // (64 * 2048)): f"{loss:.3f}"
                 for line in self.raw_lines("pair_350m") if "validation" in line
                 for tokens, loss in zip(line["validation"]["tokens"], line["validation"]["loss"])}
        labels = {("stick-breaking", "1e-3"): "stick-breaking", ("RoPE", "1e-3"): "RoPE, rate 1e-3, on one GPU"}
        for label, cells in plot_results.tables_below(self.PAGE, "Rates of the pair")[1].rows:
            model, steps = label.removesuffix(" steps").split(", ")
            for rate, cell in zip(("5e-4", "1e-3", "2e-3"), cells):
                run = labels.get((model, rate), f"{model}, rate {rate}")
                self.assertEqual(cell, after.get((run, int(steps)), ""), f"docs/results.md, {label}, {rate}")

    def test_the_warmup_of_1b_is_that_of_the_raw_lines(self):
        line = self.raw_lines("warmup_1b_sb")[0]
        curve, validation = line["curve"], line["validation"]
        table = plot_results.tables_below(self.PAGE, "1B at the paper's rate")[0]
        rows, columns = dict(table.rows), [int(column) for column in table.columns]
        steps = [tokens // (64 * 4096) for tokens in curve["tokens"]]
        self.assertEqual(steps, list(range(1, 251)))
        losses = dict(zip((tokens // (64 * 4096) for tokens in validation["tokens"]), validation["loss"]))
        norms = [curve["grad_norm"][step - 50:step] for step in columns]
        self.assertEqual([float(cell) for cell in rows["rate"]], [curve["lr"][step - 1] for step in columns])
        self.assertEqual(rows["validation loss"], [f"{losses[step]:.3f}" for step in columns])
        self.assertEqual(rows["gradient norm, median"], [f"{statistics.median(n):.1f}" for n in norms])
        self.assertEqual(rows["gradient norm, largest"], [f"{max(n):.1f}" for n in norms])

    MODELS = {"ALiBi": "alibi", "CoCA": "coca", "FIRE": "fire", "no position": "none", "ReBased": "rebased",
              "ReBased and short convolutions in turns": "rebased_conv"}
    OPTIMIZED = {"stick-breaking": "sb", "RoPE": "rope", "AdamW": "adamw", "Muon": "muon",
                 "Muon, `train.precision: fp8`": "muon fp8"}  # names of scripts/optimizers.py

    def optimizers(self, name):
        return plot_optimizers.read(SCRIPTS.parent / f"docs/results/{name}.jsonl")[1]

    def test_rates_of_the_small_models_are_those_of_the_raw_lines(self):
        losses = {tuple(line["label"].split(" ")): line["validation"]["loss"][-1] for line in self.raw_lines("rates_23m")}
        for (model, _), group in plot_optimizers.of_kind(self.optimizers("optimizers_23m"), "grid").items():
            for result in group:
                if result["run"]["optimizer"] == "adamw" and result["run"]["decay"] == 1:
                    rate = f"{1e3 * result['run']['lr']:g}e-3"
                    losses[model.removeprefix("lengths_"), rate] = plot_optimizers.last_loss(result)
        table = plot_results.tables_below(self.PAGE, "Rates and decay")[0]
        for label, cells in table.rows:
            model = {**self.MODELS, **self.OPTIMIZED}[label]
            expected = [f"{losses[model, rate]:.3f}" if (model, rate) in losses else "" for rate in table.columns]
            self.assertEqual(cells, expected, f"docs/results.md, Rates and decay: {label}")

    def test_optimizers_are_those_of_the_raw_lines(self):
        def of_lines(text):
            return {label: cells for label, cells in plot_results.Table(text.splitlines()).rows}

        def raw_name(label):
            return ", ".join(self.OPTIMIZED[part] for part in label.split(", ", 1))

        small, large = self.optimizers("optimizers_23m"), self.optimizers("optimizers_350m")
        page = plot_results.tables_below(self.PAGE, "AdamW and Muon")
        grid = plot_results.Table(plot_optimizers.grid_table(small).splitlines())
        shown, label = [], ""
        for first, cells in page[0].rows:
            label = first or label
            shown.append((raw_name(label), cells))
        self.assertEqual(sorted(shown), sorted(grid.rows))
        seeds = of_lines(plot_optimizers.seeds_table(small, "seed"))
        for label, (rate, loss, seconds, *needed) in page[1].rows:
            raw = seeds[raw_name(label)]
            self.assertEqual([float(part) for part in rate.split(", ")], [float(part) for part in raw[0].split(", ")])
            self.assertEqual([loss, seconds, *needed], [*raw[2:4], raw[4] or raw[1], raw[5] or raw[1]], label)
        for n, name in ((3, "lengths"), (4, "same")):
            rows = of_lines(plot_optimizers.lengths_table(small, name))
            self.assertEqual({raw_name(label): cells for label, cells in page[n].rows}, rows, name)

        page = plot_results.tables_below(self.PAGE, "AdamW and Muon at 367M parameters")
        grid = of_lines(plot_optimizers.grid_table(large))
        self.assertEqual({f"350m_sb, {self.OPTIMIZED[label]}": cells for label, cells in page[0].rows},
                         {label: cells[1:] for label, cells in grid.items()})
        long = of_lines(plot_optimizers.seeds_table(large, "long"))
        for label, (rate, loss, seconds, needed) in page[1].rows:
            raw = long[f"350m_sb, {self.OPTIMIZED[label]}"]
            self.assertEqual(float(rate), float(raw[0].split(", ")[0]))
            self.assertEqual([loss, seconds, needed], [*raw[2:4], raw[4] or raw[1]], label)

    def test_lengths_of_optimizers_are_those_of_the_raw_lines(self):
        page = plot_results.tables_below(self.PAGE, "AdamW and Muon at 367M parameters")[2]
        raw = {base: self.tables_of("optimizers_350m_lengths", base) for base in ("AdamW", "Muon")}
        base, start = {"Muon": "AdamW", "Muon in fp8": "Muon"}, {"windows": "token), windows", "same targets": self.SAME}
        for label, cells in page.rows:
            if label:
                what, model = label.split(", ")
                for column, cell in zip(page.columns, cells):
                    self.assertEqual(cell, self.column(raw["AdamW"], start[what], column, False)[model], (label, column))
            else:
                for column, cell in zip(page.columns, cells):
                    whole = self.column(raw[base[model]], start[what], column, True)[model]
                    self.assertEqual(cell, whole[whole.index("("):], (what, model, column))

    def test_long_contexts_are_those_of_the_raw_lines(self):
        page = plot_results.tables_below((SCRIPTS.parent / "docs/long_context.md").read_text(encoding="utf-8"),
                                         "What trained weights give")
        names = {"RoPE in a window of 256": "window"}
        losses, found, seconds, read = {}, {}, {}, {}
        for line in self.raw_lines("long_contexts"):
            label = line["label"].removesuffix(", joined documents")
            for row in line.get("lengths", []):
                losses[label, row["length"]] = row["loss"]
            for task in line.get("tasks", []):
                for row in task["lengths"]:
                    found[label, row["length"]] = row
            for row in line.get("rows", []):
                skips = ", `skip_epsilon` 0" if label == "stick-breaking" and row["epsilon"] == 0 else ""
                seconds[label + skips, row["length"]] = row["batch_tokens"], row["model_training_seconds"]
                read[label + skips, row["length"]] = row["keys_read"]
        for label, cells in page[0].rows:
            for column, cell in zip(page[0].columns, cells):
                loss = losses[names.get(label, label), int(column.replace(",", ""))]
                self.assertAlmostEqual(float(cell), loss, delta=5.1e-4, msg=f"{label}, {column}")
        for label, cells in page[1].rows:
            for column, cell in zip(page[1].columns, cells):
                row = found[names.get(label, label), int(column.replace(",", ""))]
                self.assertIn(cell, (f"{row['score']:.0%}", f"{row['score']:.0%} ({row['low']:.0%} to {row['high']:.0%})"))
        for label, cells in page[2].rows:
            for column, cell in zip(page[2].columns, cells):
                length = int(column.replace(",", ""))
                if label == "of the keys it reads":
                    self.assertEqual(cell, f"{read['stick-breaking', length]:.0%}")
                else:
                    tokens, time = seconds[names.get(label, label), length]
                    self.assertAlmostEqual(float(cell.replace(",", "")), max(tokens, length) / time,
                                           delta=1e-5 * tokens / time + 1, msg=f"{label}, {column}")

    def test_a_rope_model_that_is_turned_is_that_of_the_raw_lines(self):
        page = (SCRIPTS.parent / "docs/experiments.md").read_text(encoding="utf-8")
        table = plot_results.tables_below(page, "A RoPE model turned into stick-breaking")[0]
        runs = {line["label"]: line["validation"] for line in self.raw_lines("from_rope_23m")}
        goal = runs["original"]["loss"][-1] + 0.05
        for rate, cells in table.rows:
            run = runs[f"rate {rate}"]
            first = next(tokens for tokens, loss in zip(run["tokens"], run["loss"]) if loss <= goal)
            self.assertEqual(cells, [f"{first / 1e6:.1f}M", f"{run['loss'][-1]:.3f}"], rate)

    def test_rates_of_widths_are_those_of_the_raw_lines(self):
        page = (SCRIPTS.parent / "docs/optimizers.md").read_text(encoding="utf-8")
        table = plot_results.tables_below(page, "Rates that carry over to other widths (muP)")[1]
        losses = {(run["variant"], run["grid"]["train.lr"]): run["best_loss"] for run in self.raw_lines("mup_widths")[0]["runs"]}
        for label, cells in table.rows:
            variant = label.replace(", muP", "_mup").replace(" ", "_")
            self.assertEqual(cells, [f"{losses[variant, rate]:.3f}" for rate in table.columns], label)

    def test_overlap_is_that_of_the_raw_lines(self):
        table = plot_results.tables_below(self.PAGE, "Associative recall, MQAR (after R)")[2]
        heads = {line["label"].removeprefix("overlap_"): line["heads"] for line in self.raw_lines("overlap")}
        for label, (_, looking, overlap, of_all, _) in table.rows:
            of_model = [head["iou_soft"] for head in heads[label.lower()]]
            look = [head["iou_soft"] for head in heads[label.lower()] if head["iou_top"] > 0.5]
            self.assertEqual([looking, overlap, of_all], [str(len(look)), f"{statistics.mean(look):.3f} (best {max(look):.3f})",
                                                          f"{statistics.mean(of_model):.3f}"], label)

    def test_skipping_is_that_of_the_raw_lines(self):
        rows = self.raw_lines("skip_23m")[0]["rows"]
        table = plot_results.tables_below(self.PAGE, "Skipping keys")[0]
        for length, (epsilon, *cells) in table.rows:
            value = 2**-24 if epsilon == "2^-24" else float(epsilon)
            row = next(r for r in rows if r["length"] == int(length) and math.isclose(r["epsilon"], value, rel_tol=1e-5))
            none = next(r for r in rows if r["length"] == int(length) and r["epsilon"] == 0)
            expected = [f"{row['keys_read']:.1%}"]
            for key in ("attention_forward", "attention_backward", "model_forward", "model_training"):
                seconds, whole = row[key + "_seconds"], none[key + "_seconds"]
                expected.append(f"{1e3 * seconds:.2f}" + ("" if row is none else f" ({seconds / whole - 1:+.0%})"))
            self.assertEqual(cells[:-1], expected, f"docs/results.md, Skipping keys: {length}, {epsilon}")
            change = row["loss"] - (0 if row is none else none["loss"])
            self.assertAlmostEqual(float(cells[-1]), change, delta=7e-5)  # losses are kept with six digits

    def test_every_model_has_a_colour_of_its_own(self):
        self.assertEqual(len(set(plot_results.COLOUR.values())), len(plot_results.COLOUR))
        self.assertEqual(len(set(COLOURS)), len(COLOURS))


class Labels(unittest.TestCase):
    def test_move_as_little_as_they_must(self):
        self.assertEqual(spread_out([1.0, 5.0], 2.0), [1.0, 5.0])
        self.assertEqual(spread_out([5.0, 5.0], 2.0), [4.0, 6.0])
        self.assertEqual(spread_out([3.0, 1.0, 1.0, 9.0], 1.0), [3.0, 0.5, 1.5, 9.0])

    def test_a_label_may_hold_a_comma(self):
        arguments = type("", (), {"labels": "RoPE, dynamic NTK,ALiBi", "files": ["a", "b"]})
        self.assertEqual(labels_of(arguments), ["RoPE, dynamic NTK", "ALiBi"])


class Lengths(unittest.TestCase):
    def test_positions_are_averaged_over_parts_of_an_octave(self):
        losses = [1.0, 2.0, None, 4.0] + [5.0, 6.0] * 30
        measured = plot_lengths.Measured("a", 4, 0, [{"length": 64, "position_bin": 1, "loss_by_position": losses}])
        x, y = plot_lengths.over_position(measured)
        self.assertEqual((x[:3], y[:3]), ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]))
        self.assertLessEqual(len(x), 8 * 6)
        self.assertTrue(all(5.0 < loss < 6.0 for loss in y[-8:-1]))

    def test_exits_are_where_the_line_crosses(self):
        self.assertEqual(plot_lengths.exits([512, 2048], [3.0, 4.0], 5.0), [])
        self.assertAlmostEqual(plot_lengths.exits([512, 2048], [4.0, 6.0], 5.0)[0], 1024)
        self.assertEqual(plot_lengths.exits([512, 2048], [6.0, 7.0], 5.0), [512])

    def test_the_lowest_comes_first(self):
        lines = [line_of("", [points]) for points in
                 (([1, 2], [3.0, 4.0]), ([1, 2], [3.5, 3.5]), ([1], [1.0]))]
        self.assertEqual(plot_lengths.ranked(lines), [1, 0, 2])

    def test_runs_of_one_label_are_seeds_of_one_line(self):
        line = line_of("sb", [([1, 2, 4], [3.0, 4.0, 5.0]), ([1, 4], [4.0, 5.5])])
        self.assertEqual((line.x, line.mean, line.low, line.high),
                         ([1, 4], [3.5, 5.25], [3.0, 5.0], [4.0, 5.5]))

    @unittest.skipUnless(CAN_DRAW, "matplotlib is missing")
    def test_draws(self):
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for name, last in (("a", 9.0), ("b", 3.5)):
                record = {"name": name, "rope_scaling": "", "train_length": 8, "same_targets": 0,
                          "lengths": [{"length": length, "loss": loss, "position_bin": 4,
                                       "loss_by_position": [loss] * (length // 4)}
                                      for length, loss in ((8, 4.0), (16, last))]}
                files.append(Path(folder) / f"{name}.json")
                files[-1].write_text(json.dumps(record))
            for more in ([], ["--positions"], ["--labels", "both,both"]):
                subprocess.run([sys.executable, SCRIPTS / "plot_lengths.py", *files, "--max-loss",
                                "5", *more], check=True, capture_output=True)
            self.assertTrue((Path(folder) / "lengths.png").is_file())
            self.assertTrue((Path(folder) / "positions.png").is_file())


class Collected(unittest.TestCase):
    """What scripts/collect_results.py has put into one file: results of several kinds."""

    def test_those_of_one_kind(self):
        rows = [{"length": 8, "loss": 4.0}]
        lines = [{"label": "a", "train_length": 8, "same_targets": 0, "lengths": rows},
                 {"label": "a", "train_length": 8, "same_targets": 4, "lengths": rows},
                 {"label": "a", "benefit": rows},
                 {"label": "a", "train_length": 8, "tasks": [{"task": "passkey", "lengths": rows}]}]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            self.assertEqual([m.targets for m in plot_lengths.read(path, "", True)], [4])
            self.assertEqual([m.targets for m in plot_lengths.read(path, "", False)], [0])
            self.assertEqual(plot_tasks.read(path, "")[0].tasks, {"passkey": rows})
            path.write_text(json.dumps(lines[2]) + "\n")
            with self.assertRaisesRegex(plot_lengths.PlotError, "no result of `sbtrain eval --lengths`"):
                plot_lengths.read(path, "", False)
            with self.assertRaisesRegex(plot_tasks.PlotError, "no result of `sbtrain eval --tasks`"):
                plot_tasks.read(path, "")


class Reach(unittest.TestCase):
    def write(self, folder):
        path = Path(folder) / "heads.json"
        layers = [{"layer": 0, "module": "stickbreaking", "keys_read": 0.5, "heads": [0.25, 0.75]},
                  {"layer": 1, "module": "softmax", "keys_read": None, "heads": [None, None]}]
        path.write_text(json.dumps({"name": "lengths_sb", "reach": [
            {"length": length, "windows": 1, "keys_read": 0.5, "layers": layers} for length in (1024, 512)]}))
        return path

    def test_shares_by_layer_and_head(self):
        with tempfile.TemporaryDirectory() as folder:
            name, results = plot_reach.read(self.write(folder))
        self.assertEqual(name, "sb")
        self.assertEqual([result["length"] for result in results], [512, 1024])
        self.assertEqual(results[0]["shares"][0], [25, 75])
        self.assertEqual(str(results[0]["shares"][1]), "[nan, nan]")
        self.assertEqual(plot_reach.chosen(results, [1024]), results[1:])
        with self.assertRaisesRegex(plot_reach.PlotError, "no length 2048"):
            plot_reach.chosen(results, [512, 2048])

    @unittest.skipUnless(CAN_DRAW, "matplotlib is missing")
    def test_draws(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, SCRIPTS / "plot_reach.py", self.write(folder)], check=True,
                           capture_output=True)
            self.assertTrue((Path(folder) / "reach.png").is_file())


def scored(length, score, depths=None):
    """A length's result, with depths as {(from, to): score}."""
    result = {"length": length, "samples": 10, "score": score, "low": score / 2, "high": (1 + score) / 2}
    if depths is not None:
        result["depths"] = [{"from": a, "to": b, "samples": 5, "score": s, "low": 0, "high": 1}
                            for (a, b), s in depths.items()]
    return result


class Tasks(unittest.TestCase):
    def run_of(self, folder, name, tasks):
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps({
            "name": name, "train_length": 512, "rope_scaling": "", "seed": 42, "depths": [],
            "tasks": [{"task": task, "tokens_to_generate": 64, "lengths": lengths}
                      for task, lengths in tasks.items()]}))
        return path

    def test_depths_that_a_length_lacks_stay_empty(self):
        results = [scored(512, 1, {(0.0, 0.1): 1.0, (0.5, 0.6): 0.5}), scored(1024, 0, {(0.9, 1.0): 0.25})]
        rows = plot_tasks.rows_of(results)
        self.assertEqual(rows, [(0.0, 0.1), (0.5, 0.6), (0.9, 1.0)])
        self.assertEqual(plot_tasks.cells_of(results, rows), [[1.0, None], [0.5, None], [None, 0.25]])

    def test_tasks_of_all_files_without_absent_lengths(self):
        with tempfile.TemporaryDirectory() as folder:
            absent = {"length": 256, "absent": "vt needs 700 tokens at least"}
            a = self.run_of(folder, "a", {"vt": [scored(2048, 0.5), absent, scored(1024, 1)]})
            b = self.run_of(folder, "b", {"cwe": [scored(1024, 1)], "fwe": [absent]})
            runs = [*plot_tasks.read(a, ""), *plot_tasks.read(b, "other")]
            self.assertEqual([r["length"] for r in runs[0].tasks["vt"]], [1024, 2048])
            self.assertEqual(runs[1].label, "other")
            self.assertEqual(plot_tasks.task_names(runs, None), ["vt", "cwe"])
            with self.assertRaisesRegex(plot_tasks.PlotError, "fwe"):
                plot_tasks.task_names(runs, ["fwe"])

    def test_a_run_has_its_interval_and_seeds_their_range(self):
        with tempfile.TemporaryDirectory() as folder:
            files = [self.run_of(folder, name, {"vt": [scored(1024, score)]})
                     for name, score in (("a", 0.5), ("b", 1), ("c", 0))]
            runs = [run for file, label in zip(files, ("one", "two", "two")) for run in plot_tasks.read(file, label)]
            one, two = plot_tasks.task_lines(runs, "vt")
            self.assertEqual((one.label, one.x, one.mean, one.low, one.high), ("one", [1024], [0.5], [0.25], [0.75]))
            self.assertEqual((two.label, two.x, two.mean, two.low, two.high), ("two", [1024], [0.5], [0], [1]))

    @unittest.skipUnless(CAN_DRAW, "matplotlib is missing")
    def test_a_long_legend_has_several_rows_beside_the_title(self):
        plt = plot_tasks.load_pyplot()
        for count in (1, 3, 20):
            figure, (axes, _) = plot_tasks.panels(plt, 2, 3.4, 2.8)
            labels = [f"model {i}" for i in range(count)]
            title = figure.suptitle("Tasks", x=0.01, ha="left", fontsize=12)
            plot_tasks.add_legend(figure, title, [axes.plot([0, 1])[0] for _ in labels], labels)
            figure.canvas.draw()
            self.assertGreater(figure.legends[0].get_window_extent().x0, title.get_window_extent().x1)
            texts = figure.legends[0].get_texts()
            self.assertEqual(len(texts), count)
            self.assertGreater(min(text.get_window_extent().y0 for text in texts), axes.get_window_extent().y1)
            plt.close(figure)

    @unittest.skipUnless(CAN_DRAW, "matplotlib is missing")
    def test_draws(self):
        with tempfile.TemporaryDirectory() as folder:
            depths = {(0.0, 0.0): 1.0, (1.0, 1.0): 0.0}
            files = [self.run_of(folder, name, {"passkey": [scored(512, 1, depths), scored(1024, 0.4, depths)],
                                                "vt": [scored(1024, 0.2)]}) for name in ("a", "b")]
            for more in ([], ["--depth"], ["--tasks", "passkey"], ["--tasks", "passkey", "--depth", "--title", "t"]):
                for chosen in (files, files[:1]):
                    subprocess.run([sys.executable, SCRIPTS / "plot_tasks.py", *chosen, *more], check=True,
                                   capture_output=True)
            self.assertTrue((Path(folder) / "tasks.png").is_file())
            self.assertTrue((Path(folder) / "depths.png").is_file())
            refused = subprocess.run([sys.executable, SCRIPTS / "plot_tasks.py", files[0], "--tasks", "vt", "--depth"],
                                     capture_output=True, text=True)
            self.assertEqual(refused.returncode, 1)
            self.assertIn("no depths", refused.stderr)


def skip_row(length, epsilon, keys_read, seconds, loss):
    return {"name": "sb", "length": length, "epsilon": epsilon, "keys_read": keys_read, "loss": loss,
            "attention_forward_seconds": seconds, "attention_backward_seconds": 3 * seconds}


class Skipping(unittest.TestCase):
    ROWS = [skip_row(1024, 0, 1, 2.0, 3.0), skip_row(1024, 0.5, 0.25, 1.0, 3.5), skip_row(512, 0, 1, 1.0, 4.0),
            skip_row(512, 0.5, 0.5, 0.75, 4.0), skip_row(512, 0.1, 0.75, 1.0, 4.0)]

    def test_relative_to_the_same_length(self):
        self.assertEqual(plot_skip.lines_of(self.ROWS), {0.1: [(512, 0.75, 1.0, 0.0)],
                                                         0.5: [(512, 0.5, 0.75, 0.0), (1024, 0.25, 0.5, 0.5)]})
        with self.assertRaises(plot_skip.PlotError):
            plot_skip.lines_of(self.ROWS[:1])

    def test_speeds_are_tokens_over_seconds(self):
        rows = [row | {"batch_tokens": 4096, "model_training_seconds": row["length"] / 512} for row in self.ROWS]
        self.assertEqual(plot_skip.speeds(rows, 0), [(512, 4096.0), (1024, 2048.0)])
        self.assertEqual(plot_skip.speeds(rows, 0.1), [(512, 4096.0)])

    @unittest.skipUnless(CAN_DRAW, "matplotlib is missing")
    def test_draws_the_speed_of_several(self):
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("a.jsonl", "b.jsonl")]
            for file, rows in zip(files, (self.ROWS, [self.ROWS[0]])):  # b skips nothing
                rows = [row | {"name": file.stem, "batch_tokens": 4096, "model_training_seconds": 1.0} for row in rows]
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))

            def run(*arguments):
                return subprocess.run([sys.executable, SCRIPTS / "plot_skip.py", *files, *arguments], capture_output=True,
                                      text=True)

            self.assertEqual(run("--speed").returncode, 0)
            self.assertTrue((Path(folder) / "speed.png").is_file())
            self.assertIn("for --speed", run().stderr)
            self.assertIn("1 labels for 2 files", run("--speed", "--labels", "a").stderr)

    @unittest.skipUnless(CAN_DRAW, "matplotlib is missing")
    def test_draws(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in self.ROWS))
            subprocess.run([sys.executable, SCRIPTS / "plot_skip.py", path, "--title", "t"], check=True,
                           capture_output=True)
            self.assertTrue((Path(folder) / "skip.png").is_file())
            path.write_text("{}\n")
            refused = subprocess.run([sys.executable, SCRIPTS / "plot_skip.py", path], capture_output=True, text=True)
            self.assertEqual(refused.returncode, 1)
            self.assertIn("no result of", refused.stderr)


def trace_event(stream, name, part, begin, duration):
    return {"ph": "X", "name": name, "cat": part, "pid": 0, "tid": stream, "ts": begin, "dur": duration}


class Overlap(unittest.TestCase):
    TRACE = {"traceEvents": [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}},
                             {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "communication"}},
                             trace_event(0, "linear", "matrix products", 1000, 2000),
                             trace_event(0, "await", "communication", 3000, 500),
                             trace_event(1, "all_gather", "collective", 1500, 1000)]}

    def test_counts_from_the_first_op_that_computes(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.json"
            path.write_text(json.dumps(self.TRACE))
            rows = plot_overlap.read(path)
            self.assertEqual(rows, [("compute", "matrix products", 0, 2), ("compute", "communication", 2, 0.5),
                                    ("communication", "all_gather", 0.5, 1)])
            self.assertEqual(plot_overlap.summary(rows), ["step 2.5 ms", "all_gather: 1 calls, 1.0 ms",
                                                          "the computing stream waits 0.5 ms"])
            path.write_text('{"traceEvents": []}')
            with self.assertRaises(plot_overlap.PlotError):
                plot_overlap.read(path)
            path.write_text("[]")
            with self.assertRaises(plot_overlap.PlotError):
                plot_overlap.read(path)

    @unittest.skipUnless(CAN_DRAW, "matplotlib is missing")
    def test_draws(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.json"
            path.write_text(json.dumps(self.TRACE))
            subprocess.run([sys.executable, SCRIPTS / "plot_overlap.py", path, "--at", "1,2", "--width", "1", "-o",
                            Path(folder) / "step.png"], check=True, capture_output=True)
            self.assertTrue((Path(folder) / "step.png").is_file())


if __name__ == "__main__":
    unittest.main()
