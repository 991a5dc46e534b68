#!/usr/bin/env python3
"""Measures training steps on 1, 2, 4, ... GPUs of this machine, and prints what was measured as tables in Markdown.

    tests/bench/several_gpus.py                            # what is missing of all but fsdp2 and trained
    tests/bench/several_gpus.py --list                     # which measurements these are, and their estimated seconds
    tests/bench/several_gpus.py --only steps,fp8 --gpus 1,4 --side-by-side --limit 500
    tests/bench/several_gpus.py --only trained --run runs/long --data corpus/long.h5
    tests/bench/several_gpus.py --tables

Parts, in their order:

    collectives  what each collective takes alone and beside products, by NCCL's kernels and by the copy engines
    steps        1b and 3b, stick-breaking and RoPE, on every number of GPUs; on several both by NCCL's kernels and with
                 weights and gradients that move by the copy engines
    muon         1b_sb with Muon, with the time of every rank's optimizer, and on all GPUs by the copy engines, too
    fp8          the models of `steps` with train.precision fp8, likewise
    context      rows of 65,536 and of 262,144 tokens, which all GPUs share, or each half of them
    fsdp2        the models with RoPE in PyTorch (pytorch_fsdp2.py); PYTHON chooses its interpreter
    trained      trainings that begin with the weights of --run, on rows of --row tokens (65,536) of --data that 1, 2, 4, ...
                 GPUs share: losses, speed and exposed communication; and how many hops of keys a layer needs

A measurement that is done is a file OUT/NAME.json with a line for each round, and what is done is not measured again;
one that has failed is measured again by the next call. OUT/NAME.log has what the program said. --limit ends the script
before a measurement that would not fit into so many seconds, with exit code 85; one that takes longer than four times
its estimate and a minute is ended and counts as failed. The exit code is 1 if one has failed.

A measurement on all GPUs runs alone. With --side-by-side those on fewer GPUs run several at a time, on different ones:
the first of them is measured alone as well, and where the two differ by more than 1% it is kept as it was alone, and all
others run one after the other from then on.

Stick-breaking runs with skip_epsilon 0 unless a row says otherwise. A GPU of less than 100 GiB gets smaller micro-batches.
What follows -- goes to every `sbtrain`, in place of options that the script gives. --device cpu does all of it with ranks
on the CPU, which mpirun starts, for models that such options make small. SBTRAIN names the program, PYTORCH_OPTIONS holds
options of pytorch_fsdp2.py.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
sys.dont_write_bytecode = True
from gpus import smallest_memory, visible_gpus  # noqa: E402

MODELS = ("1b_rope", "1b_sb", "3b_rope", "3b_sb")
PARTS = ("collectives", "steps", "muon", "fp8", "context", "fsdp2", "trained")
ON_REQUEST = ("fsdp2", "trained")
STOPPED = 85
TOLERANCE = 0.01  # by which a figure may differ where other measurements run beside it
LONG_ROWS = (65536, 262144)
TRAINED_STEPS = 6
WARMUP = 2
# Tokens/s of one H200, for the estimates.
RATES = {"1b": 55000, "3b": 22000, "350m_sb": 18000, "350m_rope": 20000, "350m_sb, skipping": 200000}


class Wrong(Exception):
    """Something that the user can correct."""


@dataclass
class Measurement:
    part: str
    name: str
    gpus: int
    seconds: float  # an estimate
    command: list  # of one rank, or what starts them; without the program
    labels: dict = field(default_factory=dict)
    kind: str = "sbtrain"  # or pytorch


# ---- What there is to measure ---------------------------------------------------------------------------------------


def micro_batch(config, memory):
    large = memory >= 100
    return {"3b": 4 if large else 1, "35": 16 if large else 8}.get(config[:2], 8 if large else 4)


def bench(config, steps, warmup, micro, rows, *options):
    return ["bench", "train", "--json", "--steps", steps, "--warmup", warmup, "--config",
            ROOT / f"configs/{config}.yaml", f"--train.micro_batch={micro}", f"--train.batch={rows}", *options]


def no_skipping(config):
    return ["--model.attention.skip_epsilon=0"] if config.endswith("_sb") else []


ENGINES = {name: [f"--train.gather_engine={engine}", f"--train.reduce_engine={engine}"]
           for name, engine in (("kernels", "multiprocessors"), ("copy engines", "copy_engines"))}


def step_seconds(arguments, config, tokens):
    """Of a whole measurement: start, timed steps, and as many again, up to 8, for their parts."""
    count = WARMUP + arguments.steps + min(arguments.steps, 8)
    return 9 + count * tokens / RATES[config[:2]]


def step(arguments, part, config, gpus, labels, options):
    micro = micro_batch(config, arguments.memory)
    words = [config, *(str(value) for value in labels.values()), str(gpus)]
    return Measurement(part, "-".join([part, *words]).replace(" ", "_"), gpus,
                       step_seconds(arguments, config, micro * 4096),
                       bench(config, arguments.steps, WARMUP, micro, micro * gpus, *no_skipping(config), *options),
                       {"config": config, **labels})


def collectives(arguments):
    for gpus in arguments.gpus:
        if gpus > 1:
            yield Measurement("collectives", f"collectives-{gpus}", gpus, 25,
                              ["bench", "collectives", "--json", "--repeats", 10,
                               *(["--sizes", "56,112", "--copy-engines"] if arguments.device == "cuda" else
                                 ["--sizes", "1"])])


def steps(arguments):
    for config in MODELS:
        for gpus in arguments.gpus:
            for engine, options in ENGINES.items():
                if gpus > 1 or engine == "kernels":
                    yield step(arguments, "steps", config, gpus, {"engine": engine}, options)


def by_engines_of_all(arguments, part, config, option):
    """On every number of GPUs by NCCL's kernels, on the largest by the copy engines as well."""
    for gpus in arguments.gpus:
        yield step(arguments, part, config, gpus, {}, [option, *ENGINES["kernels"]])
    if max(arguments.gpus) > 1:
        yield step(arguments, part, config, max(arguments.gpus), {"engine": "copy engines"},
                   [option, *ENGINES["copy engines"]])


def muon(arguments):
    yield from by_engines_of_all(arguments, "muon", "1b_sb", "--train.optimizer=muon")


def fp8(arguments):
    for config in MODELS:
        yield from by_engines_of_all(arguments, "fp8", config, "--train.precision=fp8")


def context(arguments):
    """A row of a model, or as many as there are groups of ranks that share one."""
    most = max(arguments.gpus)
    for length in LONG_ROWS:
        for config, skips in (("350m_rope", False), ("350m_sb", False), ("350m_sb", True)):
            shares = [(gpus, gpus) for gpus in arguments.gpus] + ([(most, most // 2)] if most >= 4 else [])
            if length > LONG_ROWS[0] and not skips:
                # Quadratic attention takes half a minute a step there.
                shares = [(most, most)] if config.endswith("rope") else []
            for gpus, ranks in shares:
                model = f"{config}, skipping" if skips else config
                count = 2 if length == LONG_ROWS[0] else 1  # timed, and again for the parts, after one for warmth
                quadratic = 1 if skips else length / LONG_ROWS[0]
                seconds = length / RATES[model] * quadratic / ranks * (2 * count + 1)
                command = bench(config, count, 1, 1, gpus // ranks, f"--train.sequence_length={length}",
                                f"--train.context_parallel={ranks}", *([] if skips else no_skipping(config)),
                                *(["--train.recompute=full"] if length > LONG_ROWS[0] else []))
                yield Measurement("context", f"context-{model.replace(', ', '_')}-{length}-{gpus}-{ranks}", gpus,
                                  12 + seconds, command, {"config": model, "row": length, "shared_by": ranks})


def fsdp2(arguments):
    for config in MODELS:
        for gpus in arguments.gpus:
            if gpus > 1 and not config.endswith("_sb"):
                yield Measurement("fsdp2", f"fsdp2-{config}-{gpus}", gpus, 90,
                                  ["--config", ROOT / f"configs/{config}.yaml", "--batch",
                                   micro_batch(config, arguments.memory), "--steps", max(8, arguments.steps),
                                   "--device", arguments.device],
                                  {"config": config}, "pytorch")


def trained(arguments):
    row, labels = arguments.row, {"run": arguments.run.name, "row": arguments.row}
    yield Measurement("trained", "trained-reach", 1, 60,
                      ["eval", "--checkpoint", arguments.run, "--data", arguments.data, "--reach", "--lengths", row,
                       "--tokens-per-length", 4 * row, "--json", arguments.out / "reach", "--device", arguments.device],
                      labels, "reach")
    stage = f"[{{length: {TRAINED_STEPS} steps, schedule: {{type: cosine, warmup: 1 steps}}}}]"
    for gpus in arguments.gpus:
        yield Measurement("trained", f"trained-{gpus}", gpus, 30 + TRAINED_STEPS * row / RATES["350m_sb"] / gpus,
                          ["train", "--config", arguments.run / "config.yaml", "--init-from", arguments.run,
                           "--out", arguments.out / "runs" / f"trained-{gpus}", f"--train.sequence_length={row}",
                           "--train.batch=1", "--train.micro_batch=1", f"--train.context_parallel={gpus}",
                           f"--stages={stage}", f"--data.sources=[{{path: {arguments.data}}}]", "--validation.every=0",
                           "--checkpoint.every=0", "--metrics.every=1", "--metrics.tensorboard=false",
                           "--train.lr=1e-4"], labels)


MEASUREMENTS = {"collectives": collectives, "steps": steps, "muon": muon, "fp8": fp8, "context": context,
                "fsdp2": fsdp2, "trained": trained}


def wanted(arguments):
    return [one for part in arguments.only for one in MEASUREMENTS[part](arguments)]


# ---- Measuring ------------------------------------------------------------------------------------------------------


def done(out, one):
    """The lines of the rounds that have succeeded."""
    file = out / f"{one.name}.json"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["exit_code"] == 0]


def without_replaced(command, options):
    """The command without those of its options of the form --key=value that `options` has too."""
    given = {option.split("=")[0] for option in options if option.startswith("--") and "=" in option}
    return [word for word in map(str, command) if "=" not in word or word.split("=")[0] not in given]


class Measuring:
    def __init__(self, arguments):
        self.arguments = arguments
        self.out = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.sbtrain = find("find_sbtrain.sh")
        self.end = time.monotonic() + arguments.limit if arguments.limit else None
        self.failed = []
        self.running = []

    def command(self, one):
        if one.kind == "pytorch":
            # PyTorch reads the configuration as the program has resolved it.
            flat = self.out / f"{one.labels['config']}.flat"
            config = one.command[one.command.index("--config") + 1]
            text = subprocess.run([self.sbtrain, "config", "show", "--flat", "--config", config,
                                   *self.arguments.options], stdout=subprocess.PIPE, check=True).stdout
            flat.write_bytes(text)
            python = os.environ.get("PYTHON") or find("python.sh")
            return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", one.gpus,
                    ROOT / "tests/bench/pytorch_fsdp2.py", *[flat if word == config else word for word in one.command],
                    *os.environ.get("PYTORCH_OPTIONS", "").split()]
        if one.kind == "reach":
            return [self.sbtrain, *one.command]
        command = without_replaced(one.command, self.arguments.options)
        if one.part == "collectives":
            command += ["--device", self.arguments.device]
        else:
            command += [f"--device={self.arguments.device}", *self.arguments.options]
        if self.arguments.device == "cuda":
            key = f"--train.gpus={one.gpus}" if one.part == "trained" else f"--gpus={one.gpus}"
            return [self.sbtrain, *command, key]
        ranks = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n", one.gpus] if one.gpus > 1 else []
        return [*ranks, self.sbtrain, *command]

    def start(self, one, gpus):
        if one.part == "trained":
            shutil.rmtree(self.out / "runs" / one.name, ignore_errors=True)
        environment = {**os.environ}
        if self.arguments.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        else:
            environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
                            "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
        with open(self.out / f"{one.name}.log", "ab") as log:
            process = subprocess.Popen(list(map(str, self.command(one))), stdout=subprocess.PIPE, stderr=log,
                                       env=environment, cwd=ROOT, start_new_session=True)
        self.running.append(process)
        return process, time.monotonic()

    def finish(self, one, gpus, process, began):
        """The line of a measurement that ends, or is ended when it takes too long."""
        try:
            output, _ = process.communicate(timeout=max(1.0, 4 * one.seconds + 60 - (time.monotonic() - began)))
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, code = process.communicate()[0], 124
        self.running.remove(process)
        line = {"name": one.name, "part": one.part, "gpus": one.gpus, "devices": ",".join(gpus), **one.labels,
                "exit_code": code, "wall_seconds": round(time.monotonic() - began, 1)}
        rows = [json.loads(row) for row in output.decode(errors="replace").splitlines() if row.startswith("{")]
        if one.part == "collectives":
            line["rows"] = rows
        elif one.kind == "reach" and code == 0:
            line["layers"] = json.loads((self.out / "reach").read_text())["reach"][0]["layers"]
        elif one.part == "trained" and code == 0:
            line |= training_of(self.out / "runs" / one.name)
            shutil.rmtree(self.out / "runs" / one.name)
        elif rows:
            line |= {key: value for key, value in rows[-1].items() if key not in line}
        elif code == 0:
            line["exit_code"] = 125  # without a result
        return line

    def keep(self, one, line):
        with open(self.out / f"{one.name}.json", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        rate = f", {line['tokens_per_second'] / line['gpus']:,.0f} tokens/s a GPU" if "tokens_per_second" in line else ""
        ended = "" if line["exit_code"] == 0 else f", exit code {line['exit_code']}: see {self.out / one.name}.log"
        print(f"{one.name}: {line['wall_seconds']} s{rate}{ended}", flush=True)
        if line["exit_code"] != 0:
            self.failed.append(one.name)

    def check_time(self, ones):
        if self.end is not None and time.monotonic() + max(one.seconds for one in ones) > self.end:
            raise TimeoutError

    def measure(self, ones):
        """Measures some at the same time, on GPUs that they do not share, and returns their lines."""
        self.check_time(ones)
        places, first = [], 0
        for one in ones:
            places.append(self.arguments.devices[first:first + one.gpus])
            first += one.gpus
        started = [(one, gpus, *self.start(one, gpus)) for one, gpus in zip(ones, places)]
        return [self.finish(*each) for each in started]

    def missing(self, ones):
        return [one for one in ones if len(done(self.out, one)) < self.arguments.rounds]

    def run(self, ones):
        while True:
            rest = [one for one in self.missing(ones) if one.name not in self.failed]
            if not rest:
                return
            batch = next_batch(rest, self.arguments)
            if len(batch) > 1:
                self.side_by_side(batch)
            else:
                self.keep(batch[0], self.measure(batch)[0])

    def side_by_side(self, ones):
        """The check whether the figures are those of measurements that run alone is made once for each size."""
        lines = self.measure(ones)
        file = self.out / f"beside-{ones[0].gpus}.json"
        if not file.exists() and lines[0]["exit_code"] == 0:
            alone = self.measure(ones[:1])[0]
            ratio = lines[0]["tokens_per_second"] / alone.get("tokens_per_second", 1)
            file.write_text(json.dumps({"gpus": ones[0].gpus, "name": ones[0].name, "at_once": len(ones),
                                        "beside_against_alone": ratio}) + "\n")
            print(f"{ones[0].name}: beside {len(ones) - 1} others {ratio:.4f} times the speed of alone", flush=True)
            if abs(ratio - 1) > TOLERANCE:
                self.arguments.side_by_side = False
                ones, lines = ones[:1], [alone]
        for one, line in zip(ones, lines):
            self.keep(one, line)


def next_batch(rest, arguments):
    """The next measurement, and those that may run beside it: of the same part, and on as many GPUs."""
    first = rest[0]
    if not arguments.side_by_side or first.part in ("collectives", "trained"):
        return rest[:1]
    at_once = max(1, len(arguments.devices) // first.gpus)
    return [one for one in rest if (one.part, one.gpus) == (first.part, first.gpus)][:at_once]


def training_of(folder):
    """The first step is left out of the speed."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "train/loss" in record]
    rates = [record["train/tokens_per_second"] for record in records[1:]]
    exposed = [record["train/exposed_communication"] for record in records[1:] if "train/exposed_communication" in record]
    result = {"losses": [record["train/loss"] for record in records], "tokens_per_second": statistics.median(rates)}
    if exposed:
        result["exposed_communication"] = statistics.mean(exposed)
    return result


def find(script):
    return subprocess.run([ROOT / "scripts" / script], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


# ---- Tables ---------------------------------------------------------------------------------------------------------


def best_lines(out):
    """{name: the fastest round}, of all that have succeeded."""
    best = {}
    for file in sorted(out.glob("*.json")):
        for line in map(json.loads, file.read_text().splitlines()):
            if line.get("exit_code") == 0 and "name" in line:
                other = best.get(line["name"])
                if other is None or line.get("tokens_per_second", 0) > other.get("tokens_per_second", 0):
                    best[line["name"]] = line
    return list(best.values())


def each(line):
    return line["tokens_per_second"] / line["gpus"]


def ms(seconds):
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def part_ms(line, name):
    return ms(line["parts"].get(name, 0))


def of_ranks(line, name):
    ranks = line.get("parts_of_ranks", {}).get(name)
    return f"{ms(min(ranks))} to {ms(max(ranks))}" if ranks else part_ms(line, name)


def gib(line):
    return f"{line.get('memory_used_bytes', line['memory_bytes']) / 2**30:.1f}"


def table(header, rows):
    if not rows:
        return
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


def against(line, lines, **others):
    """How fast a GPU is against one of the line that differs by `others` alone; none if there is no such line."""
    keys = ("part", "config", "engine", "gpus", "row", "shared_by")
    want = {**{key: line.get(key) for key in keys}, **others}
    for other in lines:
        if all(other.get(key) == value for key, value in want.items()):
            return f"{100 * each(line) / each(other):.1f}%"
    return "-"


def sort_key(line):
    return (line.get("config", ""), line.get("row", 0), line["gpus"], line.get("shared_by", 0), line.get("engine", ""))


def print_tables(out):
    lines = sorted(best_lines(out), key=sort_key)
    of = {part: [line for line in lines if line["part"] == part] for part in PARTS}
    table(("collective", "of", "GPUs", "by", "MiB", "ms alone", "bus GB/s", "ms beside", "products lose"),
          [(row["collective"], row["dtype"], line["gpus"], row["setting"], round(row["bytes"] / 2**20), f"{1e3 * row['seconds']:.3f}",
            f"{row['bus_bytes_per_second'] / 1e9:.0f}",
            f"{1e3 * row['beside_products_seconds']:.3f}" if "beside_products_seconds" in row else "-",
            f"{100 * (row['products_slowdown'] - 1):.0f}%" if "products_slowdown" in row else "-")
           for line in of["collectives"] for row in line["rows"]])
    table(("steps", "GPUs", "engine", "tokens/s of each", "against one", "against two", "FSDP2", "products, ms",
           "attention, ms", "waits, ms", "GiB"),
          [(line["config"], line["gpus"], line["engine"], f"{each(line):,.0f}",
            against(line, lines, gpus=1, engine="kernels"), against(line, lines, gpus=2),
            against(line, lines, part="fsdp2", engine=None), part_ms(line, "matrix products"),
            part_ms(line, "attention"), of_ranks(line, "communication"), gib(line)) for line in of["steps"]])
    table(("Muon", "GPUs", "engine", "tokens/s of each", "optimizer, ms of the ranks", "AdamW's", "a step more"),
          [(line["config"], line["gpus"], engine(line), f"{each(line):,.0f}", of_ranks(line, "optimizer"),
            *beside_adamw(line, of)) for line in of["muon"]])
    table(("fp8", "GPUs", "engine", "tokens/s of each", "against bf16", "against one", "GiB"),
          [(line["config"], line["gpus"], engine(line), f"{each(line):,.0f}",
            against(line, lines, part="steps", engine=engine(line)), against(line, lines, gpus=1, engine=None), gib(line))
           for line in of["fp8"]])
    table(("rows of", "tokens", "GPUs", "share a row", "tokens/s of all", "times one GPU", "attention, ms of the ranks",
           "waits for keys, ms", "other waits, ms", "GiB"),
          [(line["config"], f"{line['row']:,}", line["gpus"], line["shared_by"], f"{line['tokens_per_second']:,.0f}",
            times_one(line, of["context"]), of_ranks(line, "attention"), of_ranks(line, "waits for keys"),
            of_ranks(line, "communication"), gib(line)) for line in of["context"]])
    trainings = [line for line in of["trained"] if "losses" in line]
    one = next((line for line in trainings if line["gpus"] == 1), None)
    table(("trained weights", "GPUs", "tokens/s of all", "times one GPU", "exposed communication", "loss of the last step",
           "largest difference from one GPU"),
          [(line["run"], line["gpus"], f"{line['tokens_per_second']:,.0f}", times_one(line, trainings),
            f"{100 * line['exposed_communication']:.1f}%" if "exposed_communication" in line else "-",
            f"{line['losses'][-1]:.5f}",
            f"{max(abs(a - b) for a, b in zip(line['losses'], one['losses'])):.1e}" if one else "-")
           for line in trainings])
    for line in of["trained"]:
        if "layers" in line:
            table((f"hops in rows of {line['row']:,}", "keys read", "2 ranks", "4 ranks", "8 ranks"),
                  [(f"layer {layer['layer']}", f"{100 * layer['keys_read']:.0f}%", *layer["hops"].values())
                   for layer in line["layers"] if "hops" in layer])
    for file in sorted(out.glob("beside-*.json")):
        check = json.loads(file.read_text())
        print(f"{check['name']} beside {check['at_once'] - 1} others: {check['beside_against_alone']:.4f} times the speed "
              "of alone")


def engine(line):
    return line.get("engine", "kernels")


def beside_adamw(line, of):
    adamw = next((other for other in of["steps"] if other["config"] == line["config"] and other["gpus"] == line["gpus"]
                  and other["engine"] == engine(line)), None)
    if adamw is None:
        return "-", "-"
    return of_ranks(adamw, "optimizer"), f"{ms(line['step_seconds'] - adamw['step_seconds'])} ms"


def times_one(line, lines):
    one = next((other for other in lines if other["gpus"] == 1 and other.get("config") == line.get("config")
                and other["row"] == line["row"]), None)
    return f"{line['tokens_per_second'] / one['tokens_per_second']:.2f}" if one else "-"


# ---- The command line -----------------------------------------------------------------------------------------------


def parse_arguments(words):
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", help="numbers of GPUs, such as 1,4; default: 1, 2, 4, ... and all")
    parser.add_argument("--only", default=",".join(part for part in PARTS if part not in ON_REQUEST))
    parser.add_argument("--out", type=Path, default=Path("runs/several_gpus"), help="default: runs/several_gpus")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=1, help="of each measurement; the fastest counts (1)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a measurement (6)")
    parser.add_argument("--side-by-side", action="store_true")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--run", type=Path, help="of `trained`: a run folder")
    parser.add_argument("--data", type=Path, help="of `trained`: a store of long documents")
    parser.add_argument("--row", type=int, default=65536, help="of `trained`: tokens of a row (65536)")
    parser.add_argument("--list", action="store_true", help="print what is missing, and its estimated seconds")
    parser.add_argument("--tables", action="store_true", help="print what there is")
    arguments = parser.parse_args(words[:split])
    arguments.options = words[split + 1:]
    arguments.out = arguments.out.absolute()
    arguments.only = [part for part in PARTS if part in arguments.only.split(",")] \
        if set(arguments.only.split(",")) <= set(PARTS) else parser.error(f"--only takes {', '.join(PARTS)}")
    if "trained" in arguments.only:
        if not arguments.run or not arguments.data:
            parser.error("trained needs --run and --data")
        arguments.run, arguments.data = arguments.run.absolute(), arguments.data.absolute()
    return arguments


def choose_gpus(arguments):
    arguments.devices, arguments.memory = visible_gpus(), smallest_memory()
    if arguments.device == "cpu":
        arguments.devices, arguments.memory = ["0", "1", "2", "3"], 1000
    count = len(arguments.devices)
    sizes = [2**n for n in range(10) if 2**n <= count]
    if count and count not in sizes:
        sizes.append(count)
    arguments.gpus = [int(word) for word in arguments.gpus.split(",")] if arguments.gpus else sizes or [1, 2, 4]
    if not count and arguments.list:
        arguments.devices, arguments.memory = [str(n) for n in range(max(arguments.gpus))], 139
    elif max(arguments.gpus) > count:
        raise Wrong(f"{max(arguments.gpus)} GPUs are asked for, and this machine has {count}")


def print_list(arguments):
    rest = [one for one in wanted(arguments) if len(done(arguments.out, one)) < arguments.rounds]
    for part in arguments.only:
        of_part = [one for one in rest if one.part == part]
        print(f"{part}: {len(of_part)} measurements, {sum(one.seconds for one in of_part):.0f} s")
        for one in of_part:
            print(f"  {one.name}: {one.seconds:.0f} s")
    seconds = 0.0
    while rest:
        batch = next_batch(rest, arguments)
        seconds += max(one.seconds for one in batch)
        rest = [one for one in rest if one not in batch]
    print(f"together {seconds:.0f} s")


def measure(arguments):
    measuring = Measuring(arguments)

    def end(*_):
        for process in list(measuring.running):
            os.killpg(process.pid, signal.SIGKILL)
        sys.exit(STOPPED)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        measuring.run(wanted(arguments))
    except TimeoutError:
        print("several_gpus: the next measurement does not fit into --limit; the same command goes on", file=sys.stderr)
        sys.exit(STOPPED)
    if measuring.failed:
        sys.exit(f"several_gpus: failed: {', '.join(measuring.failed)}")


def main():
    arguments = parse_arguments(sys.argv[1:])
    try:
        if arguments.tables:
            print_tables(arguments.out)
            return
        choose_gpus(arguments)
        print_list(arguments) if arguments.list else measure(arguments)
    except Wrong as error:
        sys.exit(f"several_gpus: {error}")


if __name__ == "__main__":
    main()
