"""What the plots show: names that tell runs apart, the best of a sweep, lines that leave the plot."""

import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import plot_lengths  # noqa: E402
import plot_loss  # noqa: E402
import plot_overlap  # noqa: E402
import plot_skip  # noqa: E402
import plot_sweep  # noqa: E402
import plot_reach  # noqa: E402
import plot_tasks  # noqa: E402
from plotting import labels_of, line_of, spread_out  # noqa: E402

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
