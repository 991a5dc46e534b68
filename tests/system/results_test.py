"""What the documentation says against what was measured: tables of docs/ against the raw lines of docs/results, pictures
against the tables that they were drawn from."""

import math
import statistics
import subprocess
import sys
import unittest

from published import ROOT, SCRIPTS, best_accuracies, long_contexts, looking_up, page_of, raw_lines, runs_of, times_of

import plot_optimizers
import plot_results
import plot_sweep
from plotting import COLOURS


class Results(unittest.TestCase):
    """docs/results.md, and tables of other pages."""

    PAGE = page_of("docs/results")

    def test_pictures_are_those_of_the_tables(self):
        for name in plot_results.PICTURES:
            tables = plot_results.tables_of(name, self.PAGE)
            picture = (ROOT / f"docs/images/{name}.png").read_bytes()
            self.assertTrue(b"tEXtSource\0" + plot_results.digest(tables).encode() in picture,
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
                        ("Windows", 2, AGAINST), ("FIRE's threshold", 0, WINDOWS), ("FIRE's threshold", 1, AGAINST),
                        ("Longer rows", 0, WINDOWS), ("Longer rows", 1, SAME), ("Longer rows", 2, AGAINST)],
        "lengths_23m_cad232f5": [("The same once more", 0, WINDOWS), ("The same once more", 1, SAME),
                                 ("The same once more", 2, AGAINST)],
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
        command = [sys.executable, SCRIPTS / "tables.py", ROOT / f"docs/results/{name}.jsonl"]
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

    # Rates that a sweep has tried: (page, heading, which table, the variants of its rows).
    SWEEPS = {
        "rows_4096_23m": ("results", "Longer rows", 3, ("stickbreaking", "rope")),
        "rebased_gap_23m": ("results", "ReBased beside attention without positions", 0,
                            ("rebased", "rebased_learned", "rebased_deep", "rebased_gpt2", "none", "none_learned")),
        "mup_widths": ("optimizers", "Rates that carry over to other widths (muP)", 1,
                       ("width_64", "width_256", "width_64_mup", "width_256_mup")),
    }

    # Accuracies (and epochs) of a sweep: (heading, which table, the key of its columns, variants of its rows). A row is of
    # the best rate, or of the one beside its variant.
    ACCURACIES = {
        "rebased_kernel": ("The kernel of ReBased, part by part", 0, "model.width",
                           ("rebased", "no_beta", "no_gamma", "no_gamma_beta", "no_norm", "no_norm_beta", "no_norm_gamma",
                            "no_norm_gamma_beta")),
        "mqrar_head": (plot_results.RECALL, 0, "data.task.pairs",
                       [(variant, rate) for variant in ("stickbreaking", "softmax_rope") for rate in ("2.1544e-3", "4.6416e-4")]),
        "mqrar_192": (plot_results.RECALL, 1, "seed", ("stickbreaking", "softmax_rope")),
        "mqar_short": (plot_results.MQAR, 0, "train.lr", ("attention", "based", "rebased")),
        "mqar_512_short": (plot_results.MQAR, 1, "seed", [
            (variant, rate) for variant in ("based", "rebased") for rate in ("3e-3", "1e-2")]),
        "mqar_1024_short": (plot_results.MQAR, 2, "train.lr", ("based", "rebased")),
    }

    def test_accuracies_are_those_of_the_raw_lines(self):
        for name, (heading, n, key, variants) in self.ACCURACIES.items():
            table = plot_results.tables_below(self.PAGE, heading)[n]
            self.assertEqual(len(table.rows), len(variants), heading)
            for (label, cells), row in zip(table.rows, variants):
                variant, rate = (row, None) if isinstance(row, str) else row
                runs = [run for run in runs_of(name) if rate in (None, run["grid"].get("train.lr"))]
                points = plot_sweep.best_runs(runs, key, "accuracy")[variant]
                best = [points[float(column.removeprefix("seed "))] for column in table.columns]
                self.assertEqual(cells, [f"{run['best_accuracy']:.3f} ({run['epochs']:.0f})" for run, in best],
                                 f"docs/results.md, {heading}: {label}")

    def test_rates_are_those_of_the_raw_lines(self):
        for name, (page, heading, n, variants) in self.SWEEPS.items():
            losses = {(run["variant"], run["grid"]["train.lr"]): run["best_loss"] for run in runs_of(name)}
            table = plot_results.tables_below(page_of(f"docs/{page}"), heading)[n]
            self.assertEqual(len(table.rows), len(variants), heading)
            for (label, cells), variant in zip(table.rows, variants):
                self.assertEqual(cells, [f"{losses[variant, rate]:.3f}" for rate in table.columns],
                                 f"docs/{page}.md, {heading}: {label}")

    def test_rates_of_the_pair_are_those_of_the_raw_lines(self):
        losses = {line["label"]: line["validation"]["loss"][-1] for line in raw_lines("pair_350m")
                  if "validation" in line}
        table = plot_results.tables_below(self.PAGE, "Rates of the pair")[0]
        shown = {f"{model}, a tenth of the steps, rate {rate}": cell for model, cells in table.rows
                 for rate, cell in zip(table.columns, cells) if cell}
        self.assertEqual(shown, {label: f"{loss:.3f}" for label, loss in losses.items() if "a tenth" in label})

    def test_whole_schedules_of_the_pair_are_those_of_the_raw_lines(self):
        after = {(line["label"].removesuffix(", stopped"), tokens // (64 * 2048)): f"{loss:.3f}"
                 for line in raw_lines("pair_350m") if "validation" in line
                 for tokens, loss in zip(line["validation"]["tokens"], line["validation"]["loss"])}
        labels = {("stick-breaking", "1e-3"): "stick-breaking", ("RoPE", "1e-3"): "RoPE"}
        for label, cells in plot_results.tables_below(self.PAGE, "Rates of the pair")[1].rows:
            model, steps = label.removesuffix(" steps").split(", ")
            for rate, cell in zip(("5e-4", "1e-3", "2e-3"), cells):
                run = labels.get((model, rate), f"{model}, rate {rate}")
                self.assertEqual(cell, after.get((run, int(steps)), ""), f"docs/results.md, {label}, {rate}")

    def test_the_warmup_of_1b_is_that_of_the_raw_lines(self):
        table = plot_results.tables_below(self.PAGE, "1B at the paper's rate")[0]
        rows, columns = dict(table.rows), [int(column) for column in table.columns]
        lines = raw_lines("warmup_1b_sb")
        self.assertEqual([line["label"] for line in lines], ["with muP", "without"])
        for line in lines:
            label, curve, validation = line["label"], line["curve"], line["validation"]
            steps = [tokens // (64 * 4096) for tokens in curve["tokens"]]
            self.assertEqual(steps, list(range(1, 251)))
            losses = dict(zip((tokens // (64 * 4096) for tokens in validation["tokens"]), validation["loss"]))
            norms = [curve["grad_norm"][step - 50:step] for step in columns]
            self.assertEqual([float(cell) for cell in rows["rate"]], [curve["lr"][step - 1] for step in columns])
            self.assertEqual(rows[f"{label}, validation loss"], [f"{losses[step]:.3f}" for step in columns])
            self.assertEqual(rows[f"{label}, gradient norm, median"], [f"{statistics.median(n):.2f}" for n in norms])
            self.assertEqual(rows[f"{label}, gradient norm, largest"], [f"{max(n):.2f}" for n in norms])

    MODELS = {"ALiBi": "alibi", "CoCA": "coca", "FIRE": "fire", "no position": "none", "ReBased": "rebased",
              "ReBased and short convolutions in turns": "rebased_conv"}
    OPTIMIZED = {"stick-breaking": "sb", "RoPE": "rope", "AdamW": "adamw", "Muon": "muon",
                 "Muon, `train.precision: fp8`": "muon fp8"}  # names of scripts/optimizers.py

    def optimizers(self, name):
        return plot_optimizers.read(ROOT / f"docs/results/{name}.jsonl")[1]

    def test_rates_of_the_small_models_are_those_of_the_raw_lines(self):
        losses = {tuple(line["label"].split(" ")): line["validation"]["loss"][-1] for line in raw_lines("rates_23m")}
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
        page = plot_results.tables_below(page_of("docs/long_context"), "What trained weights give")
        names = {"RoPE in a window of 256": "window"}
        losses, found, times = long_contexts()
        seconds, read = {}, {}
        for (label, length), rows in times.items():
            for row in rows:
                skips = ", `skip_epsilon` 0" if label == "stick-breaking" and row["epsilon"] == 0 else ""
                seconds[label + skips, length] = row["batch_tokens"], row["model_training_seconds"]
                read[label + skips, length] = row["keys_read"]
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
        table = plot_results.tables_below(page_of("docs/experiments"), "A RoPE model turned into stick-breaking")[0]
        runs = {line["label"]: line["validation"] for line in raw_lines("from_rope_23m")}
        goal = runs["original"]["loss"][-1] + 0.05
        for rate, cells in table.rows:
            run = runs[f"rate {rate}"]
            first = next(tokens for tokens, loss in zip(run["tokens"], run["loss"]) if loss <= goal)
            self.assertEqual(cells, [f"{first / 1e6:.1f}M", f"{run['loss'][-1]:.3f}"], rate)

    def test_positions_are_those_of_the_raw_lines(self):
        def with_best(values, decimals, unit=""):
            return "{:.{n}f}{unit} ({:.{n}f}{unit})".format(statistics.mean(values), max(values), n=decimals, unit=unit)

        table = plot_results.tables_below(self.PAGE, plot_results.MQAR)[3]
        accuracies = {}
        for length, sweep in (("512", "mqar_512_short_cad232f5"), ("1024", "mqar_1024_short")):
            best = best_accuracies(sweep)
            accuracies |= {f"{label}, {length} tokens": f"{best[label.lower()]:.3f}" for label in ("Based", "ReBased")}
        lines = {line["label"]: line for line in raw_lines("mqar_positions")}
        self.assertEqual([label for label, _ in table.rows], list(lines))
        for label, cells in table.rows:
            heads = lines[label]["heads"]
            self.assertEqual(cells, [accuracies[label], str(len(looking_up(heads))),
                                     with_best([head["iou_soft"] for head in heads], 4),
                                     with_best([100 * head["mass"] for head in heads], 1, "%")], label)

    def test_overlap_is_that_of_the_raw_lines(self):
        table = plot_results.tables_below(self.PAGE, plot_results.MQAR)[4]
        heads = {line["label"].removeprefix("overlap_"): line["heads"] for line in raw_lines("overlap")}
        for label, (_, looking, overlap, of_all, _) in table.rows:
            of_model = [head["iou_soft"] for head in heads[label.lower()]]
            look = [head["iou_soft"] for head in looking_up(heads[label.lower()])]
            self.assertEqual([looking, overlap, of_all], [str(len(look)), f"{statistics.mean(look):.3f} (best {max(look):.3f})",
                                                          f"{statistics.mean(of_model):.3f}"], label)

    # (the lines, the heading, which table, decimals of its milliseconds)
    SKIPPING = [("skip_23m", "Skipping keys", 0, 2), ("pair_350m", plot_results.PAIR, 6, 1)]

    def test_skipping_is_that_of_the_raw_lines(self):
        for name, heading, n, digits in self.SKIPPING:
            rows = times_of(name)
            table = plot_results.tables_below(self.PAGE, heading)[n]
            self.assertGreater(len(table.rows), 0)
            for length, (epsilon, *cells) in table.rows:
                value = 2**-24 if epsilon == "2^-24" else float(epsilon)
                row = next(r for r in rows if r["length"] == int(length) and math.isclose(r["epsilon"], value, rel_tol=1e-5))
                none = next(r for r in rows if r["length"] == int(length) and r["epsilon"] == 0)
                expected = [f"{row['keys_read']:.1%}"]
                for key in ("attention_forward", "attention_backward", "model_forward", "model_training"):
                    seconds, whole = row[key + "_seconds"], none[key + "_seconds"]
                    change = "" if row is none else f" ({seconds / whole - 1:+.0%})"
                    expected.append(f"{1e3 * seconds:.{digits}f}{change}")
                self.assertEqual(cells[:-1], expected, f"docs/results.md, {heading}: {length}, {epsilon}")
                change = row["loss"] - (0 if row is none else none["loss"])
                self.assertAlmostEqual(float(cells[-1]), change, delta=7e-5)  # losses are kept with six digits

    def test_every_model_has_a_colour_of_its_own(self):
        self.assertEqual(len(set(plot_results.COLOUR.values())), len(plot_results.COLOUR))
        self.assertEqual(len(set(COLOURS)), len(COLOURS))


if __name__ == "__main__":
    unittest.main()
