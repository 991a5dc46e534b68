#!/usr/bin/env python3
"""Runs what docs/results.md and docs/experiments.md call small experiments, on all GPUs of this machine, one after the
other: those that count most first.

    scripts/reproduce.py --list                          # what there is, and how long it takes on one H200
    scripts/reproduce.py                                 # everything
    scripts/reproduce.py --limit 1500 lengths needles    # these, for at most so many seconds
    scripts/reproduce.py --pack kept.tar.gz              # all results so far, without weights

NAME is a folder of OUT (runs/reproduced), which gets the runs and the results of that experiment. What is done is not
done again, and a run that was stopped goes on, so the same command continues after a stop: by --limit, SIGTERM or Ctrl-C,
before which the runs save; its exit code is 85. If an experiment fails, the others go on, and the exit code is that of
the first one that has. The text is that of --corpus, by default corpus/packages (docs/corpus.md).

--pack FILE puts results, curves and logs into an archive, by their names in OUT. Unpacked into an OUT elsewhere, they
count as done there. long, from_rope and skip use weights of lengths, which the archive lacks: give them an OUT of their
own, in which lengths runs anew.

--jobs N is the number of runs at a time, where they are small: of more than there are GPUs, several share one. What
follows -- goes to every training. The variable SBTRAIN names a program to use instead of the release build's, PYTHON
another python3 for tables and figures.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parent.parent
STOPPED = 85
PATIENCE = 60  # seconds for runs to save
LEFT_OUT = ("checkpoints", "tensorboard")
KEPT = (".json", ".jsonl", ".md", ".png", ".yaml", ".log", ".csv")

# The configurations of sweeps name another corpus.
TEXT = ("--data.sources=[{path: $CORPUS/train.h5}]", "--data.validation=[$CORPUS/held_out.h5]",
        "--data.tokenizer=$CORPUS/tokenizer.model")
LENGTHS = """sb rope alibi window coca coca_strict fire none window_128 window_512 fire_128 rope_4096 sb_4096 sb_bias
             sb_remainder sb_norm sb_norm_bias sb_gate sb_gate_penalty sb_heads3 sb_current rebased rebased_conv""".split()


@dataclass(frozen=True)
class Experiment:
    """Commands, each a list of words of which the first is a script of this folder, a file of configs/sweeps, or SBTRAIN;
    a last word that begins with > is the file for what it prints. `options` go to trainings. $OUT and $CORPUS stand for the
    folders of a call."""

    name: str
    seconds: int  # on one H200, an estimate
    what: str
    commands: tuple
    options: tuple = ()
    small: bool = True  # runs may share a GPU


def overlap(model):
    run = f"$OUT/overlap/{model}"
    return (["SBTRAIN", "train", "--config", f"configs/overlap_{model}.yaml", "--out", run, "--train.gpus=1"],
            ["SBTRAIN", "eval", "--checkpoint", run, "--task-positions", "10000", "--json", "-",
             f">$OUT/overlap/{model}.json"])


EXPERIMENTS = (
    Experiment("lengths", 3200, "loss by length of 23 models, three seeds", (
        ["lengths.sh", "--out", "$OUT/lengths", "--corpus", "$CORPUS", "--seeds", "1,2,3", *LENGTHS],)),
    Experiment("needles", 1500, "needles in texts 16 times as long as trained with; stick-breaking with five seeds", (
        ["needles.sh", "--out", "$OUT/needles", "--corpus", "$CORPUS", "--seeds", "1,2,3", "sb", "rope", "alibi", "window",
         "coca", "coca_strict"],
        ["needles.sh", "--out", "$OUT/needles_more", "--corpus", "$CORPUS", "--seeds", "4,5", "sb"])),
    Experiment("needles_vt", 500, "variable tracking among the needles", (
        ["needles.sh", "--out", "$OUT/needles_vt", "--corpus", "$CORPUS", "--seeds", "1,2,3", "--row", "1024", "--tasks",
         "passkey,vt", "sb", "rope"],)),
    Experiment("pair_350m", 5400, "stick-breaking against RoPE at 350M parameters", (
        ["pair_350m.sh", "--out", "$OUT/pair_350m", "--corpus", "$CORPUS"],), small=False),
    Experiment("long", 1800, "rows of 131,072 tokens, and windows of a million", (
        ["long_contexts.sh", "--out", "$OUT/long", "--from", "$OUT/lengths/seed-1", "--corpus", "$CORPUS", "--tasks",
         "passkey"],), small=False),
    Experiment("from_rope", 150, "a RoPE model turned into stick-breaking", (
        ["from_rope.sh", "--out", "$OUT/from_rope", "--from", "$OUT/lengths/seed-1/rope", "--corpus", "$CORPUS"],)),
    Experiment("gate_penalty", 250, "the weight of the forget gate's auxiliary loss", (["gate_penalty.yaml"],),
               TEXT),
    Experiment("overlap", 100, "attention against the true positions, in the setting of R's table 3",
               (*overlap("rebased"), *overlap("based"))),
    Experiment("skip", 60, "what skipping used-up keys saves", (
        ["SBTRAIN", "bench", "skip", "--checkpoint", "$OUT/lengths/seed-2/sb", "--data", "$CORPUS/held_out.h5", "--lengths",
         "512,2048,8192,16384", "--tokens", "16384", "--batches", "8", "--epsilons",
         "5.9604644775390625e-08,1e-4,1e-3,1e-2,1e-1", "--json", ">$OUT/skip/skip.jsonl"],), small=False),
    Experiment("rows_4096", 600, "rates for rows of 4096 tokens", (["rows_4096_lr.yaml"],), TEXT),
    Experiment("rebased_gap", 1600, "what ReBased lacks beside attention without positions", (["rebased_gap.yaml"],),
               TEXT),
    Experiment("mqrar_192", 900, "192 pairs of repeated associative recall", (["mqrar_192.yaml"],)),
    Experiment("rebased_kernel", 1600, "the kernel of ReBased, part by part", (["rebased_kernel_short.yaml"],)),
    *(Experiment(name, seconds, what, ([f"{name}.yaml"],)) for name, seconds, what in (
        ("mqrar_head", 900, "repeated associative recall, one seed"),
        ("mqar_short", 200, "associative recall in 256 tokens, one seed"),
        ("mqar_512_short", 450, "the same in 512 tokens, three seeds"),
        ("mqar_1024_short", 200, "the same in 1024 tokens, one seed"))),
    Experiment("rates", 1600, "rates of the 23M models", (["lengths_lr.yaml"],), TEXT),
    Experiment("rates_400", 400, "the same after 400 steps", (["lengths_lr_400.yaml"],), TEXT),
    *(Experiment(name, 1300, what, (["SBTRAIN", "train", "--config", f"configs/{name}.yaml", "--out", f"$OUT/{name}"],),
                 ("--stages.0.sources=[{path: $CORPUS/train.h5}]", *TEXT[1:])) for name, what in (
        ("warmup_1b_sb", "the paper's rate of 0.01 at 1B, through its warmup"),
        ("warmup_1b_sb_no_mup", "the same without muP"))),
)


class Wrong(Exception):
    """Something that the user can correct."""


class Stopped(Exception):
    """The limit has passed, or a signal has come."""


def words_of(experiment, command, sbtrain, arguments):
    """The words of a command, and the options of a training after them."""

    def meant(word):
        return Template(word).substitute(OUT=arguments.out, CORPUS=arguments.corpus)

    first, rest = command[0], [meant(word) for word in command[1:]]
    options = [*map(meant, experiment.options), *arguments.options]
    jobs = ["--jobs", str(arguments.jobs)] if arguments.jobs and experiment.small else []
    if first.endswith(".sh"):
        return [ROOT / "scripts" / first, *rest, *jobs, *(["--", *options] if options else [])]
    if first.endswith(".yaml"):
        keys = (word for option in options for word in ("--set", option.removeprefix("--")))
        return [sbtrain, "sweep", ROOT / "configs/sweeps" / first, "--out", arguments.out / experiment.name, *jobs, *keys]
    if rest[0] != "train":  # on the device of the training
        options = [option for option in options if option.startswith("--device=")]
    output = [rest.pop()] if rest[-1].startswith(">") else []
    return [sbtrain, *rest, *options, *output]


def is_complete(run):
    """As is_complete of scripts/experiment.sh: of a run from elsewhere the weights may be missing."""
    status = run / "status.json"
    return status.is_file() and json.loads(status.read_text(encoding="utf-8")).get("state") == "complete"


class Runner:
    def __init__(self, arguments):
        self.arguments = arguments
        self.sbtrain = subprocess.run([ROOT / "scripts/find_sbtrain.sh"], stdout=subprocess.PIPE, text=True,
                                      check=True).stdout.strip()
        self.end = time.monotonic() + arguments.limit if arguments.limit else math.inf
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)

    def stop(self, *_):
        self.end = -math.inf

    def stops(self):
        return time.monotonic() > self.end

    def call(self, words):
        """The exit code of a command; what it starts hears of a stop through it."""
        words = list(map(str, words))
        if words[1] == "train" and is_complete(Path(words[words.index("--out") + 1])):
            return 0
        if not words[-1].startswith(">"):
            return self.wait(words)
        result = Path(words.pop()[1:])
        if result.exists():
            return 0
        result.parent.mkdir(parents=True, exist_ok=True)
        unfinished = result.with_name(result.name + ".part")  # a file by its name is whole
        with open(unfinished, "w", encoding="utf-8") as file:
            code = self.wait(words, file)
        if code == 0:
            unfinished.rename(result)
        return code

    def wait(self, words, output=None):
        process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True,
                                   env={**os.environ, "SBTRAIN": self.sbtrain})
        asked = None
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                pass
            if asked is None and self.stops():
                process.send_signal(signal.SIGTERM)
                asked = time.monotonic()
            elif asked is not None and time.monotonic() > asked + PATIENCE:
                os.killpg(process.pid, signal.SIGKILL)

    def run(self, experiment):
        """The exit code of the first of its commands that fails, or 0."""
        print(f"reproduce: {experiment.name}: {experiment.what}", flush=True)
        began = time.monotonic()
        for command in experiment.commands:
            code = self.call(words_of(experiment, command, self.sbtrain, self.arguments))
            if self.stops():
                raise Stopped
            if code != 0:
                print(f"reproduce: {experiment.name} failed with exit code {code}", file=sys.stderr, flush=True)
                return code
        print(f"reproduce: {experiment.name} is done after {time.monotonic() - began:.0f} s", flush=True)
        return 0


def pack(out, archive):
    """Weights and what TensorBoard reads stay where they are, as do the notes of where the text lies."""
    count = 0
    with tarfile.open(archive, "w:gz") as tar:
        for file in sorted(out.rglob("*")):
            name = file.relative_to(out)
            if file.is_file() and file.suffix in KEPT and not set(name.parts) & set(LEFT_OUT):
                with contextlib.suppress(FileNotFoundError):  # of a run that goes on meanwhile
                    tar.add(file, name)
                    count += 1
    print(f"reproduce: {archive}: {count} files")


def chosen(names):
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    for name in names:
        if name not in known:
            raise Wrong(f"unknown experiment '{name}'; there are {', '.join(known)}")
    return [known[name] for name in names] or list(EXPERIMENTS)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments; all, in the order of --list, unless given")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/reproduced")
    parser.add_argument("--corpus", type=Path, default=ROOT / "corpus/packages")
    parser.add_argument("--jobs", type=int, metavar="N")
    parser.add_argument("--limit", type=float, metavar="SECONDS")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--pack", type=Path, metavar="FILE")
    words = sys.argv[1:]
    options = words[words.index("--") + 1:] if "--" in words else []
    arguments = parser.parse_args(words[:words.index("--")] if "--" in words else words)
    arguments.options = options
    arguments.out, arguments.corpus = arguments.out.absolute(), arguments.corpus.absolute()
    return arguments


def main():
    arguments = parse_arguments()
    try:
        experiments = chosen(arguments.names)
        if arguments.list:
            for experiment in experiments:
                print(f"{experiment.name:16}{experiment.seconds:6} s  {experiment.what}")
            return 0
        if arguments.pack:
            pack(arguments.out, arguments.pack)
            return 0
        if not (arguments.corpus / "tokenizer.model").exists():
            raise Wrong(f"{arguments.corpus} has no tokenizer.model: make it with data/package_corpus.py (docs/corpus.md)")
        arguments.out.mkdir(parents=True, exist_ok=True)
        runner = Runner(arguments)
        codes = [runner.run(experiment) for experiment in experiments]
        return next((code for code in codes if code != 0), 0)
    except Wrong as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2
    except Stopped:
        print("reproduce: stopped; the same command continues", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
