"""Ranks that are killed or stopped in the middle of training, on the GPUs of this machine or on the CPU.

    lost_ranks.py SBTRAIN TEXT.jsonl [--device cuda|cpu] [--ranks N] [--times N] [--faults kill,stop,exchange]
                  [--config FILE] [--folder FOLDER] [--limit SECONDS] [--seed N] [-- OPTION...]

A run of N ranks (default: all visible GPUs, on the CPU 4, which mpirun starts) is hit --times by each fault:

    kill      SIGKILL to one of the ranks, at a random moment of a step
    stop      SIGSTOP to one of them, which the others notice after train.timeout
    exchange  SIGKILL to one of them, with weights and gradients that move by the copy engines

What is expected each time:

- the other ranks end with exit code 7, and so does the supervisor of ranks on GPUs; the message names the lost rank;
- `ckpt verify` finds what was saved sound;
- the same command continues from the newest checkpoint, with the losses of a run that nothing has hit, bit for bit;
- copies of the run continue on half as many ranks, a quarter, ... one, with losses within --bound of these.

The default model has two small layers. Options after -- go to every training. One line is printed for each fault, and
at the end the figures of all; the exit code is 1 if something was not as expected. All runs lie in --folder, which a
file system in memory makes fast (/dev/shm); without the option they go when the script ends. After --limit no further
fault begins.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
sys.dont_write_bytecode = True
from gpus import visible_gpus  # noqa: E402

MODEL = """
name: lost
seed: 3
model: {layers: 2, width: 64, inner: 88, heads: 2, vocab: 400}
train: {sequence_length: 64, micro_batch: 1, batch: 8, lr: 3e-3}
"""
TIMEOUT = 8  # train.timeout: seconds after which a rank that is stopped counts as lost
PATIENCE = 180  # seconds in which a job has to reach a step, or to end
SAVE_EVERY = 5  # steps
COMPARED = 3  # steps after a checkpoint of which the losses are compared, at least
MOST_COMPARED = 20  # on fewer ranks, since differences grow
ENGINES = {"kill": "multiprocessors", "stop": "multiprocessors", "exchange": "copy_engines"}
PREEMPTED, LOST = 85, 7
# Nats. On the CPU the order of sums changes losses by less; in bf16 on GPUs 7e-4 was the most (docs/distributed.md).
BOUNDS = {"cpu": 4e-5, "cuda": 1e-3}


class Unexpected(Exception):
    """What must not happen."""


def expect(holds, what, log=None):
    if not holds:
        text = log.read_text(errors="replace")[-4000:] if log and log.exists() else ""
        raise Unexpected(f"{what}\n{text}")


# ---- Processes ------------------------------------------------------------------------------------------------------


def descendants(pid):
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat[stat.rindex(")") + 2:].split()[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def rank_of(pid):
    """The rank that a process is, by the variables that its launcher has given it; None if it is none."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    for word in words:
        name, _, value = word.partition(b"=")
        if name in (b"RANK", b"OMPI_COMM_WORLD_RANK"):
            return int(value)
    return None


class Job:
    """A training of several ranks, or of one, in the folder of a run."""

    def __init__(self, tests, folder, world, engine, gpus=None):
        self.tests, self.folder, self.world = tests, folder, world
        self.log = folder.parent / f"{folder.name}.log"
        self.began, self.wall = time.monotonic(), time.time()
        command = [tests.program, "train", "--config", tests.config, "--out", folder, f"--device={tests.device}",
                   f"--train.gather_engine={engine}", f"--train.reduce_engine={engine}", *tests.options]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tests.folder / "cache"), "OMP_WAIT_POLICY": "passive"}
        if tests.device == "cuda":
            command.append(f"--train.gpus={world}")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus or tests.gpus[:world])
        else:
            environment |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
            if world > 1:  # with --enable-recovery mpirun lets the others end by themselves
                command = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--enable-recovery", "-n", world,
                           *command]
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment,
                                            start_new_session=True)

    def ranks(self):
        """{rank: process id} of a job that has come to a step."""
        if self.world == 1:
            return {0: self.process.pid}
        while True:
            # Of a script and the program that it has started, the latter.
            found = {rank_of(pid): pid for pid in descendants(self.process.pid)}
            found.pop(None, None)
            if len(found) == self.world:
                return found
            self.must_run("its ranks have not started")
            time.sleep(0.01)

    def must_run(self, problem):
        code = self.process.poll()
        expect(code is None, f"{self.folder.name} on {self.world} ranks has ended with {code}: {problem}", self.log)
        expect(time.monotonic() < self.began + PATIENCE, f"{self.folder.name}: {problem} in {PATIENCE} s", self.log)

    def reach(self, step):
        while (last_record(self.folder, self.wall) or {"step": -1})["step"] < step:
            self.must_run(f"it has not come to step {step}")
            time.sleep(0.001)

    def end(self, seconds=PATIENCE):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Unexpected(f"{self.folder.name} has not ended within {seconds} s\n{self.log.read_text()[-4000:]}") \
                from None

    def ask_to_stop(self):
        os.kill(self.ranks()[0], signal.SIGTERM)

    def stop(self):
        self.ask_to_stop()
        self.end_of_stop()

    def end_of_stop(self):
        """Waits until the run has saved. mpirun with --enable-recovery has no code of the ranks."""
        code = self.end()
        expect(code == PREEMPTED or not self.own_code(), f"{self.folder.name}: exit code {code} after a stop", self.log)
        expect("saved; the same command continues" in self.log.read_text(),
               f"{self.folder.name} has not saved after a stop", self.log)

    def own_code(self):
        return self.tests.device == "cuda" or self.world == 1

    def kill(self):
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


# ---- Runs -----------------------------------------------------------------------------------------------------------


def records_of(folder):
    file = folder / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def last_record(folder, since=0.0):
    """The last whole line of metrics.jsonl, which alone is read since the script asks again and again; none where it is
    older, of the job before."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().rpartition(b"\n")[0].splitlines()
    except OSError:
        return None
    record = json.loads(lines[-1]) if lines else None
    return record if record and record["time"] >= since else None


def losses_of(folder):
    """{step: loss}; none of a loss that is not finite."""
    return {record["step"]: record["train/loss"] for record in records_of(folder) if "train/loss" in record}


def newest_checkpoint(folder):
    return int((folder / "checkpoints/latest").read_text().strip().removeprefix("step-"))


def copy_run(source, target):
    """Files of checkpoints are never changed, so they are linked."""
    shutil.rmtree(target, ignore_errors=True)

    def copy(one, other):
        (os.link if "/checkpoints/step-" in str(one) else shutil.copy2)(one, other)

    shutil.copytree(source, target, copy_function=copy, symlinks=True)


class Tests:
    def __init__(self, arguments):
        self.program, self.device = os.path.abspath(arguments.program), arguments.device
        self.folder = Path(arguments.folder or tempfile.mkdtemp(prefix="lost-ranks."))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.gpus = visible_gpus() if self.device == "cuda" else []
        self.ranks = arguments.ranks or (len(self.gpus) if self.device == "cuda" else 4)
        if self.device == "cuda" and not 1 < self.ranks <= len(self.gpus):
            sys.exit(f"lost_ranks: {self.ranks} ranks, but {len(self.gpus)} GPUs are visible")
        self.fewer = []
        world = self.ranks // 2
        while world >= 1:
            self.fewer.append(world)
            world //= 2
        self.bound = BOUNDS[self.device] if arguments.bound is None else arguments.bound
        self.random = random.Random(arguments.seed)
        self.end = time.monotonic() + arguments.limit
        self.lines = []
        self.stopping = []  # (runs on fewer ranks that were asked to stop, the step of their checkpoint)
        self.largest = {}  # world: the largest difference of a loss
        self.config = self.folder / "lost.yaml"
        if arguments.config:
            self.config = Path(arguments.config).absolute()
        else:
            self.config.write_text(MODEL)
        self.options = [
            f"--data.sources=[{{path: {self.folder}/text.h5}}]", "--data.validation=[]",
            f"--data.tokenizer={self.folder}/tokenizer.model", "--validation.every=0",
            "--stages=[{length: 1000000 steps, schedule: {type: cosine, warmup: 10 steps}}]",
            f"--checkpoint.every={SAVE_EVERY}", "--checkpoint.keep=2", "--metrics.every=1",
            "--metrics.tensorboard=false", f"--train.timeout={TIMEOUT}", *arguments.options]
        self.call("tokenizer", "train", "--input", arguments.text, "--vocab", "400", "--output",
                  self.folder / "tokenizer.model")
        self.call("prepare", "--input", arguments.text, "--tokenizer", self.folder / "tokenizer.model", "--output",
                  self.folder / "text.h5")

    def call(self, *words):
        result = subprocess.run([self.program, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, check=False)
        expect(result.returncode == 0, f"{words[0]} {words[1]} has ended with {result.returncode}\n{result.stdout}")

    def run(self, faults, times):
        engines = {ENGINES[fault]: [f for f in faults if ENGINES[f] == ENGINES[fault]] for fault in faults}
        for engine, kinds in engines.items():
            if time.monotonic() > self.end:
                print(f"{', '.join(kinds)}: not begun, since --limit has passed")
                continue
            self.run_with(engine, [kind for kind in kinds for _ in range(times)])

    def run_with(self, engine, faults):
        """A run begins; one copy of it is hit again and again, and another one never."""
        base, hit, whole = (self.folder / f"{name}-{engine}" for name in ("base", "hit", "whole"))
        for folder in (base, hit, whole):
            shutil.rmtree(folder, ignore_errors=True)
        job = Job(self, base, self.ranks, engine)
        try:
            job.reach(SAVE_EVERY)
            job.stop()
        finally:
            job.kill()
        copy_run(base, hit)
        copy_run(base, whole)
        parts = []  # (world, losses of some steps), to be compared with those of `whole`
        job = Job(self, hit, self.ranks, engine)
        try:
            for fault in faults:
                if time.monotonic() > self.end:
                    break
                job = self.fault(job, fault, engine, parts)
            self.end_fewer(parts)
            job.reach(newest_checkpoint(hit) + COMPARED)
            parts.append((self.ranks, losses_of(hit)))
            job.stop()
        finally:
            for each in (job, *(other for other, _ in self.stopping)):
                each.kill()
        self.compare(whole, engine, parts)

    def fault(self, job, fault, engine, parts):
        """Hits the job, and returns the one that continues it on as many ranks."""
        began = newest_checkpoint(job.folder)
        job.reach(began + COMPARED + self.random.randrange(SAVE_EVERY))
        ranks = job.ranks()
        rank = self.random.randrange(self.ranks)
        before, last = records_of(job.folder)[-2:]
        time.sleep(self.random.uniform(0, min(2.0, last["time"] - before["time"])))
        os.kill(ranks[rank], signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        hit = time.monotonic()
        seconds = self.ends(job, fault, rank, ranks, hit)
        self.end_fewer(parts)
        last_step, exposed = last_record(job.folder)["step"], exposed_share(job.folder)
        checkpoint = newest_checkpoint(job.folder)
        parts.append((self.ranks, losses_of(job.folder)))
        verify = subprocess.Popen([self.program, "ckpt", "verify", str(job.folder)], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        self.continue_on_fewer(job.folder, engine, checkpoint)
        again = Job(self, job.folder, self.ranks, engine)
        try:
            for other, _ in self.stopping:
                other.reach(checkpoint + COMPARED)
                other.ask_to_stop()
            expect(verify.wait(PATIENCE) == 0, f"ckpt verify finds damage after {fault} at step {last_step}")
            again.reach(checkpoint + 1)
            expect("resumed from" in again.log.read_text(), "the run has not been resumed", again.log)
        except BaseException:
            again.kill()
            raise
        line = {"fault": fault, "engine": engine, "ranks": self.ranks, "rank": rank, "step": last_step,
                "seconds_to_end": round(seconds, 2), "resumed_at": checkpoint, "also_on": self.fewer}
        if exposed is not None:
            line["exposed_communication"] = round(exposed, 3)
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        return again

    def continue_on_fewer(self, folder, engine, checkpoint):
        """Starts copies of the run. They end while the next fault is under way."""
        first = 0
        for world in self.fewer:
            copy = folder.parent / f"{folder.name}-on-{world}"
            copy_run(folder, copy)
            gpus = [self.gpus[(first + n) % len(self.gpus)] for n in range(world)] if self.gpus else None
            self.stopping.append((Job(self, copy, world, engine, gpus), checkpoint))
            first += world

    def end_fewer(self, parts):
        for other, checkpoint in self.stopping:
            other.end_of_stop()
            parts.append((other.world, {step: loss for step, loss in losses_of(other.folder).items()
                                        if checkpoint < step <= checkpoint + MOST_COMPARED}))
        self.stopping = []

    def ends(self, job, fault, rank, ranks, hit):
        """The seconds until the other ranks have ended, each with the right code and message."""
        others = [pid for other, pid in ranks.items() if other != rank]
        while any(alive(pid) for pid in others):
            expect(time.monotonic() < hit + TIMEOUT + 30, f"ranks go on {TIMEOUT + 30} s after {fault} of rank {rank}",
                   job.log)
            time.sleep(0.005)
        seconds = time.monotonic() - hit
        if fault == "stop" and not job.own_code():
            os.kill(ranks[rank], signal.SIGKILL)  # the supervisor lets it continue, so that it can end
        code = job.end()
        if job.own_code():
            expect(code == LOST, f"exit code {code} after {fault} of rank {rank}", job.log)
        errors = re.findall(r"^(?:rank \d+: )?error: (.*)", job.log.read_text(), re.MULTILINE)
        expect(len(errors) == 1 and re.search(rf"\brank {rank}\b", errors[0]),
               f"not one message that names rank {rank} after {fault}", job.log)
        for other in ranks:
            file = job.folder / f"logs/rank-{other:05}.log"
            last = file.read_text(errors="replace").rpartition("this rank ends with exit code ")[2]
            if other != rank:
                # One that waits for copy engines says that it was stuck, too.
                expect(re.match(rf"{LOST}( \([^)]*\))?: .*\brank {rank}\b", last), f"{file} does not end with {LOST}",
                       file)
        return seconds

    def compare(self, whole, engine, parts):
        last = max(max(losses, default=0) for _, losses in parts)
        job = Job(self, whole, self.ranks, engine)
        try:
            job.reach(last)
            job.stop()
        finally:
            job.kill()
        expected = losses_of(whole)
        for world, losses in parts:
            for step, loss in losses.items():
                difference = math.inf if loss is None else abs(loss - expected[step])
                self.largest[world] = max(self.largest.get(world, 0.0), difference)
                bound = 0 if world == self.ranks else self.bound
                expect(difference <= bound, f"the loss of step {step} on {world} ranks is {loss}, and {expected[step]} "
                       f"in a run of {self.ranks} that nothing has hit")

    def summary(self):
        for fault in dict.fromkeys(line["fault"] for line in self.lines):
            lines = [line for line in self.lines if line["fault"] == fault]
            slowest = max(line["seconds_to_end"] for line in lines)
            exposed = [line["exposed_communication"] for line in lines if "exposed_communication" in line]
            waits = f"; computation waited for collectives {100 * sum(exposed) / len(exposed):.0f}% of the time" \
                if exposed else ""
            print(f"{fault}: {len(lines)} times on {self.ranks} ranks, ended with {LOST} within {slowest} s{waits}")
        for world, difference in sorted(self.largest.items(), reverse=True):
            bits = "the same losses, bit for bit" if difference == 0 else f"losses within {difference:.1e} nats"
            print(f"continued on {world}: {bits}")


def alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def exposed_share(folder):
    shares = [record["train/exposed_communication"] for record in records_of(folder)[-10:]
              if record.get("train/exposed_communication") is not None]
    return sum(shares) / len(shares) if shares else None


def parse_arguments(words):
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("text", help="JSON lines to train on")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--times", type=int, default=10, help="of each fault (10)")
    parser.add_argument("--faults", default="kill,stop,exchange")
    parser.add_argument("--config", help="of the model; default: a small one")
    parser.add_argument("--bound", type=float, help="nats by which fewer ranks may differ (cpu 4e-5, cuda 1e-3)")
    parser.add_argument("--folder", help="of the runs; default: a temporary one")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further fault begins")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(words[:split])
    arguments.options = words[split + 1:]
    arguments.faults = arguments.faults.split(",")
    for fault in arguments.faults:
        if fault not in ENGINES:
            parser.error(f"--faults: {fault} is none of {', '.join(ENGINES)}")
    return arguments


def main():
    arguments = parse_arguments(sys.argv[1:])
    tests = Tests(arguments)
    try:
        tests.run(arguments.faults, arguments.times)
        tests.summary()
    except Unexpected as problem:
        tests.summary()
        sys.exit(f"lost_ranks: {problem}")
    finally:
        if not arguments.folder:
            shutil.rmtree(tests.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
