#!/usr/bin/env python3
"""Trains models with AdamW and with Muon, and keeps what each run has given as one line of a file.

    scripts/optimizers.py pack                         # a part of corpus/packages (docs/corpus.md) of below 20 MB
    scripts/optimizers.py small                        # 23M models: a grid of rate and decay, then three seeds
    scripts/optimizers.py small --variant "muon head" "--train.optimizer=muon --train.qkv_matrices=head"
    scripts/optimizers.py large --minutes 10           # 350m_sb on all GPUs: rates, then one long run of each
    scripts/optimizers.py large --gpus-per-run 2 --variant "muon fp8" "--train.optimizer=muon --train.precision=fp8"
    scripts/plot_optimizers.py runs/optimizers         # tables and plots of what there is

`small` trains configs/lengths_sb.yaml and lengths_rope.yaml. It chooses rate and decay of each model and optimizer by
the validation loss after --grid-steps, trains these with three seeds for --steps, and Muon besides for parts of them,
to tell how many tokens it needs for AdamW's loss. Where the best of a grid is at its edge, the next rate or decay
beyond it is trained, too. A --variant comes last: it begins with the best rate and decay of the optimizer that it is a
variant of, and the rates beside it. Every run of `small` has one GPU, and every GPU one run, unless --jobs says that
more share them. `large` gives every long run all GPUs, or --gpus-per-run of them to as many at a time as there are GPUs
for, and one to each run while it looks for the rate. There a variant is trained with the rate of its optimizer.

A run that is done is a line of OUT/results.jsonl, and its folder is deleted. The same command does what is missing,
also with a results.jsonl that an earlier call has left: a run that was stopped goes on from its folder in OUT/runs.
--limit stops after so many seconds, with exit code 85, as does a signal; a stopped run saves first, which takes
seconds. What follows -- goes to every training. The variable SBTRAIN names a program to use instead of the release
build's.
"""

import argparse
import ctypes
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from gpus import visible_gpus

ROOT = Path(__file__).resolve().parent.parent
STOPPED = 85  # the exit code of a run that a signal has stopped after it had saved
DIVERGED = 6
KINDS = ("train", "held_out")
PAUSE = 10  # seconds; a validation or a save takes less
SHORTER = (0.5, 0.6, 0.7, 0.85)  # parts of --steps for which Muon is trained besides


class Wrong(Exception):
    """Something that the user can correct."""


@dataclass
class Run:
    """A training, by what tells it from others (and is in its line of the results), and its options."""

    key: dict
    options: list
    defaults: list = field(default_factory=list)  # options that what follows -- replaces
    lengths: list = field(default_factory=list)  # of the evaluation after it; none: no evaluation
    keep: bool = False  # the folder, when it is done

    @property
    def name(self):
        return "_".join(str(value) for value in self.key.values()).replace(" ", "-")


def result_name(result):
    return Run(result["run"], []).name


def numbers(text):
    return [float(part) for part in text.split(",")]


# ---- Data ----------------------------------------------------------------------------------------------------------


def first_lines(parts, size):
    """The first lines of compressed files, up to `size` bytes."""
    taken = []
    for part in parts:
        text = subprocess.run(["zstd", "-dcq", part], stdout=subprocess.PIPE, check=True).stdout
        for line in text.splitlines(keepends=True):
            size -= len(line)
            if size < 0:
                return b"".join(taken)
            taken.append(line)
    return b"".join(taken)


def pack(arguments):
    """The documents stand in the order of a hash, so that the first ones are a fair sample."""
    corpus, data = Path(arguments.corpus), Path(arguments.data)
    data.mkdir(parents=True, exist_ok=True)
    for kind, megabytes in zip(KINDS, (arguments.train_text, arguments.held_out_text)):
        parts = sorted(corpus.glob(f"{kind}-*.jsonl.zst"))
        if not parts:
            raise Wrong(f"{corpus}: no {kind}-*.jsonl.zst; make the corpus with data/package_corpus.py")
        text = first_lines(parts, megabytes * 1e6)
        subprocess.run(["zstd", "-q", "-f", "--ultra", "-22", "-o", data / f"{kind}.jsonl.zst"], input=text, check=True)
    shutil.copy(corpus / "tokenizer.model", data)
    size = sum(file.stat().st_size for file in data.iterdir() if file.suffix != ".h5")
    print(f"optimizers: {data}: {size / 1e6:.1f} MB")


def prepare(sbtrain, data):
    """Options of a training on the documents of `data`, whose stores are made where they are missing."""
    for kind in KINDS:
        store = data / f"{kind}.h5"
        if store.exists():
            continue
        texts = sorted(data.glob(f"{kind}*.jsonl.zst"))
        if not texts:
            raise Wrong(f"{data}/{kind}.jsonl.zst does not exist: make it with  scripts/optimizers.py pack")
        unfinished = data / f"{kind}.part.h5"
        unfinished.unlink(missing_ok=True)
        subprocess.run([sbtrain, "prepare", "--tokenizer", data / "tokenizer.model", "--input", *texts,
                        "--output", unfinished], check=True)
        unfinished.rename(store)
    return [f"--data.sources=[{{path: {data}/train.h5}}]", f"--data.validation=[{data}/held_out.h5]",
            f"--data.tokenizer={data}/tokenizer.model"]


# ---- Runs ----------------------------------------------------------------------------------------------------------


class Runner:
    """Trains runs, several at once, and keeps their results."""

    def __init__(self, arguments):
        self.sbtrain = subprocess.run([ROOT / "scripts/find_sbtrain.sh"], stdout=subprocess.PIPE, text=True,
                                      check=True).stdout.strip()
        self.out = Path(arguments.out)
        self.tokens_per_length = arguments.tokens_per_length
        self.gpus = arguments.gpus.split(",") if arguments.gpus else visible_gpus() or [""]
        self.options = prepare(self.sbtrain, Path(arguments.data).absolute()) + arguments.options
        self.jobs = arguments.jobs or len(self.gpus)
        self.device = next((o.removeprefix("--device=") for o in arguments.options if o.startswith("--device=")), "auto")
        self.results = self.out / "results.jsonl"
        self.out.mkdir(parents=True, exist_ok=True)
        self.lock, self.running, self.stopped = Lock(), set(), False
        self.end = time.monotonic() + arguments.limit if arguments.limit else math.inf

    def done(self):
        """The results that there are. A line that was cut off as it was written is no result."""
        if not self.results.exists():
            return []
        text = self.results.read_bytes()
        whole = text[:text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            self.results.write_bytes(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def results_of(self, runs, gpus_each=0):
        """The results of these runs, in their order; those that are missing are trained: --jobs at once on one GPU each,
        which more than there are GPUs share, or with `gpus_each` as many as there are so many GPUs for."""
        jobs = len(self.gpus) // gpus_each if gpus_each else self.jobs
        gpus_each = gpus_each or 1
        known = {result_name(result): result for result in self.done()}
        missing = [run for run in runs if run.name not in known]
        if missing:
            print(f"optimizers: {len(missing)} runs to do, {missing[0].name} first", flush=True)
        groups = [self.gpus[n:n + gpus_each] for n in range(0, len(self.gpus) - gpus_each + 1, gpus_each)]
        places = SimpleQueue()
        for group in itertools.islice(itertools.cycle(groups), jobs):
            places.put(",".join(group))

        def train(run):
            place = places.get()
            try:
                known[run.name] = self.train(run, place)
            finally:
                places.put(place)

        with ThreadPoolExecutor(jobs) as pool:
            waiting = [pool.submit(train, run) for run in missing]
            while not all(one.done() for one in waiting):
                time.sleep(0.2)
                if time.monotonic() > self.end:
                    self.stop()
        for one in waiting:
            one.result()
        return [known[run.name] for run in runs]

    def train(self, run, place):
        folder = self.out / "runs" / run.name
        began = time.time()
        code = self.call(place, folder, "train", "--out", folder, *run.defaults, *self.options, *run.options)
        if self.stopped or code == STOPPED:
            raise Stopped
        if code not in (0, DIVERGED):
            raise Wrong(f"a training failed with exit code {code}: see {folder}.log")
        result = {"run": run.key, "device": place or "cpu", "exit_code": code, **measured(folder)}
        if code == 0 and run.lengths:
            for name, more in (("lengths", []), ("same", ["--same-targets", str(min(256, run.lengths[0]))])):
                file = folder / f"{name}.json"
                if self.call(place, folder, "eval", "--checkpoint", folder, "--device", self.device, "--lengths",
                             ",".join(map(str, run.lengths)), "--tokens-per-length", str(self.tokens_per_length),
                             "--json", file, *more) != 0:
                    raise Stopped if self.stopped else Wrong(f"the evaluation failed: see {folder}.log")
                result[name] = {r["length"]: r["loss"] for r in json.loads(file.read_text())["lengths"] if "loss" in r}
        result["wall_seconds"] = round(time.time() - began, 1)
        with self.lock, open(self.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if not run.keep:
            shutil.rmtree(folder, ignore_errors=True)
        loss = result["validation"][-1][2] if result["validation"] else None
        print(f"optimizers: {run.name}: loss {loss} after {result['wall_seconds']} s", flush=True)
        return result

    def call(self, place, folder, *words):
        """The exit code of the program on one GPU, or on those of a list; it writes into a log beside the folder."""
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": place} if place else {})}
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.log", "a", encoding="utf-8") as log:
            with self.lock:
                if self.stopped:
                    raise Stopped
                process = subprocess.Popen([self.sbtrain, *words], stdout=log, stderr=log, env=environment, cwd=ROOT,
                                           start_new_session=True, preexec_fn=die_with_the_script)
                self.running.add(process)
            code = process.wait()
        with self.lock:
            self.running.discard(process)
        return code

    def stop(self, *_):
        """Lets the runs save and end; those that wait do not begin."""
        if not self.stopped:
            self.stopped = True
            for process in list(self.running):
                process.send_signal(signal.SIGTERM)


class Stopped(Exception):
    """The limit has passed, or a signal has come."""


def die_with_the_script():
    """In a run, before it begins: where the script is killed, the run is not in the way of the next one."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def measured(folder):
    """[tokens, seconds, loss] of each validation, and of the training twenty to a hundred times. The time of the first
    step is left out, as are pauses after which a run was resumed, which are PAUSE longer than the steps or more."""
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    validation, training, seconds, last = [], [], 0.0, None
    tokens = 0
    for record in map(json.loads, lines):
        if last:
            passed = record["time"] - last
            rate = record.get("train/tokens_per_second")
            steps = (record["tokens"] - tokens) / rate if rate else 0.0
            seconds += passed if passed < steps + PAUSE else steps
        last, tokens = (record["time"] if record["step"] > 0 else None), record["tokens"]
        place = [record["tokens"], round(seconds, 2)]
        if "validation/loss" in record:
            validation.append([*place, record["validation/loss"]])
        if "train/loss" in record:
            training.append([*place, record["train/loss"]])
    return {"validation": validation, "training": training[::max(1, len(training) // 50)]}


def schedule(steps, validations, saves):
    warmup = max(1, min(100, steps // 8))
    return [f"--stages.0.length={steps} steps", f"--stages.0.schedule.warmup={warmup} steps",
            f"--validation.every={max(1, steps // validations)} steps",
            f"--checkpoint.every={math.ceil(steps / saves) if saves else 0}", "--checkpoint.keep=1",
            f"--metrics.every={max(1, steps // 100)}", "--metrics.tensorboard=false"]


@dataclass(frozen=True)
class Pair:
    """A model with an optimizer, or with a variant of one."""

    model: str
    optimizer: str
    options: tuple
    defaults: tuple = ()

    def is_of(self, run):
        return (self.model, self.optimizer) == (run["model"], run["optimizer"])

    def run(self, kind, steps, validations, lr, decay, seed, lengths=(), saves=0):
        key = {"kind": kind, "model": self.model, "optimizer": self.optimizer, "lr": lr, "decay": decay,
               "steps": steps, "seed": seed}
        return Run(key, [*self.options, f"--train.lr={lr}", f"--train.weight_decay={decay}", f"--seed={seed}"],
                   ["--config", str(ROOT / f"configs/{self.model}.yaml"), *self.defaults,
                    *schedule(steps, validations, saves)], list(lengths))


def best(results):
    """Rate and decay of the grid's run with the lowest last loss. One that has failed does not count."""
    whole = [result for result in results if result["exit_code"] == 0 and result["validation"]]
    if not whole:
        raise Wrong(f"every run of a grid has failed, such as {results[0]['run']}; their logs are beside the results")
    run = min(whole, key=lambda result: result["validation"][-1][2] or math.inf)["run"]
    return run["lr"], run["decay"]


def next_beyond(points, first, point, axis, most):
    """The value of an axis that follows that of `point` if this is the lowest or the highest one: in the ratio of the
    last two, and at most `most` of them beyond the `first` points."""
    values = sorted({other[axis] for other in points})
    value, given = point[axis], [other[axis] for other in first]
    if len(values) < 2 or values[0] < value < values[-1]:
        return None
    lowest = value == values[0]
    tried = sum(v < min(given) if lowest else v > max(given) for v in values)
    return float(f"{value * value / values[1 if lowest else -2]:.3g}") if tried < most else None


def search(runner, first, steps, extend):
    """{pair: its best (rate, decay)}, for {pair: points to train}, each for so many steps. At an edge of a grid the
    next point is trained, up to `extend` times in each direction. Points of earlier calls belong to a grid."""
    grids = {pair: dict.fromkeys(points) for pair, points in first.items()}
    for run in (result["run"] for result in runner.done()):
        for pair, points in grids.items():
            if run["kind"] == "grid" and run["steps"] == steps and pair.is_of(run):
                points[run["lr"], run["decay"]] = None
    while True:
        runs = {pair: [pair.run("grid", steps, 2, *point, 1) for point in points] for pair, points in grids.items()}
        runner.results_of([run for part in runs.values() for run in part])
        chosen = {pair: best(runner.results_of(part)) for pair, part in runs.items()}
        more = False
        for pair, (lr, decay) in chosen.items():
            for axis in (0, 1):
                value = next_beyond(grids[pair], first[pair], (lr, decay), axis, extend)
                if value is not None:
                    grids[pair][(value, decay) if axis == 0 else (lr, value)] = None
                    more = True
        if not more:
            return chosen


def optimizers_of(arguments):
    """AdamW and Muon, and the variants that are neither: {name: options}."""
    named = {"adamw": ["--train.optimizer=adamw"], "muon": ["--train.optimizer=muon"]}
    variants = {}
    for name, options in arguments.variant:
        (named if name in named else variants)[name] = options.split()
    return named, variants


def small(arguments):
    runner = runner_of(arguments)
    models = [f"lengths_{model}" for model in arguments.models.split(",")]
    named, variants = optimizers_of(arguments)

    def pairs(optimizers):
        return [Pair(model, name, tuple(options)) for name, options in optimizers.items() for model in models]

    def searched(grids):
        return search(runner, grids, arguments.grid_steps, arguments.extend)

    def train_seeds(chosen):
        lengths = arguments.lengths.split(",")
        runner.results_of([pair.run("seed", arguments.steps, 20, *point, int(seed), map(int, lengths))
                           for seed in numbers(arguments.seeds) for pair, point in chosen.items()])

    rates, decays = numbers(arguments.rates), numbers(arguments.decays)
    chosen = searched({pair: list(itertools.product(rates, decays)) for pair in pairs(named)})
    train_seeds(chosen)
    runner.results_of([pair.run("shorter", round(part * arguments.steps), 2, *point, 1) for part in SHORTER
                       for pair, point in chosen.items() if pair.optimizer == "muon"])
    if variants:
        train_seeds(searched({pair: around(chosen, pair, rates) for pair in pairs(variants)}))


def best_of_optimizer(chosen, variant):
    """The best point of the optimizer that this is a variant of."""
    optimizer = "muon" if "--train.optimizer=muon" in variant.options else "adamw"
    return next(point for pair, point in chosen.items() if (pair.model, pair.optimizer) == (variant.model, optimizer))


def around(chosen, variant, rates):
    """The best point of the optimizer that this is a variant of, and with the rates beside it."""
    lr, decay = best_of_optimizer(chosen, variant)
    ratio = rates[1] / rates[0] if len(rates) > 1 else 2
    return [(float(f"{lr * factor:.3g}"), decay) for factor in (1, 1 / ratio, ratio)]


def large(arguments):
    runner = runner_of(arguments)
    gpus_each = arguments.gpus_per_run or len(runner.gpus)
    if gpus_each > len(runner.gpus):
        raise Wrong(f"--gpus-per-run {gpus_each}, but there are {len(runner.gpus)} GPUs")
    defaults = ("--train.batch=64", "--validation.tokens=1e6")
    steps = arguments.steps or round(60 * arguments.minutes * arguments.tokens_per_second / (64 * 2048))
    named, variants = optimizers_of(arguments)

    def pairs(optimizers):
        return [Pair(arguments.model, name, tuple(options), defaults) for name, options in optimizers.items()]

    rates = [(lr, 0.1) for lr in numbers(arguments.rates)]
    grid_steps = arguments.grid_steps or max(1, steps // 10)
    chosen = search(runner, {pair: rates for pair in pairs(named)}, grid_steps, arguments.extend)
    chosen |= {variant: best_of_optimizer(chosen, variant) for variant in pairs(variants)}
    runs = [pair.run("long", steps, 20, *point, 1, saves=4) for pair, point in chosen.items()]
    for run in runs:
        run.keep = arguments.keep
    runner.results_of(runs, gpus_each)


def runner_of(arguments):
    runner = Runner(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, runner.stop)
    return runner


# ---- The command line ----------------------------------------------------------------------------------------------


def add_common(parser, rates):
    parser.add_argument("--out", default="runs/optimizers", help="default: runs/optimizers")
    parser.add_argument("--data", default="corpus/optimizers", help="what pack has made (corpus/optimizers)")
    parser.add_argument("--gpus", help="such as 0,1; default: those that are visible")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="stop after so long; 0: never")
    parser.add_argument("--rates", default=rates, help=f"learning rates of the grid ({rates})")
    parser.add_argument("--jobs", type=int, default=0, metavar="N",
                        help="runs of one GPU at once; default: as many as there are GPUs")
    parser.add_argument("--extend", type=int, default=3, metavar="N",
                        help="rates, and decays, that are tried beyond an edge of the grid (3)")
    parser.add_argument("--variant", nargs=2, action="append", default=[], metavar=("NAME", "OPTIONS"),
                        help="train with these options, too; the names adamw and muon replace those")
    parser.add_argument("--tokens-per-length", type=int, default=524288, help="tokens to evaluate at each length")


def parse_arguments(words):
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="pack|small|large")
    part = commands.add_parser("pack", help="take a part of the corpus that is easy to carry")
    part.set_defaults(function=pack)
    part.add_argument("--corpus", default="corpus/packages")
    part.add_argument("--data", default="corpus/optimizers")
    part.add_argument("--train-text", type=float, default=80, metavar="MB", help="text of the training (80)")
    part.add_argument("--held-out-text", type=float, default=18, metavar="MB", help="text that is held out (18)")
    part = commands.add_parser("small", help="23M models")
    part.set_defaults(function=small)
    add_common(part, "2e-3,4e-3,8e-3,1.6e-2")
    decays = "0.5,1.0,2.0"
    part.add_argument("--decays", default=decays, help=f"weight decays of the grid ({decays})")
    part.add_argument("--models", default="sb,rope", help="of configs/lengths_*.yaml (sb,rope)")
    part.add_argument("--seeds", default="1,2,3")
    part.add_argument("--grid-steps", type=int, default=400, help="steps of a run of the grid (400)")
    part.add_argument("--steps", type=int, default=2000, help="steps of the runs with the rates chosen (2000)")
    part.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    part = commands.add_parser("large", help="350m_sb")
    part.set_defaults(function=large)
    add_common(part, "5e-4,1e-3,2e-3,4e-3")
    part.add_argument("--model", default="350m_sb", help="of configs/ (350m_sb)")
    part.add_argument("--minutes", type=float, default=10, help="of each long run (10)")
    part.add_argument("--tokens-per-second", type=float, default=320000,
                      help="of all GPUs together, which with --minutes makes the number of steps (320000)")
    part.add_argument("--steps", type=int, default=0, help="steps of the long runs, instead of --minutes")
    part.add_argument("--grid-steps", type=int, default=0, metavar="N",
                      help="steps of a run that looks for the rate (default: a tenth of those of a long run)")
    part.add_argument("--gpus-per-run", type=int, default=0, metavar="N",
                      help="of each long run; default: all, one run after the other")
    part.add_argument("--keep", action="store_true", help="keep the folders of the long runs in OUT/runs")
    arguments = parser.parse_args(words[:split])
    arguments.options = words[split + 1:]
    return arguments


def main():
    arguments = parse_arguments(sys.argv[1:])
    try:
        arguments.function(arguments)
    except Stopped:
        print("optimizers: stopped; the same command goes on", file=sys.stderr)
        sys.exit(STOPPED)
    except Wrong as error:
        sys.exit(f"optimizers: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"optimizers: {error.cmd[0]} failed with exit code {error.returncode}")


if __name__ == "__main__":
    main()
