"""What log_wandb.py and log_mlflow.py share: following the metrics.jsonl of a run, and remembering what was sent.

A tracker receives every record once, however often the script is started again. What was sent is kept in
the run folder, in follow_TRACKER.jsonl: a line for each run of the tracker, then one for each record, and one for each
time that the tracker was left, with the state that the run had.

The run may go back to a checkpoint while it is followed, or between two starts: metrics.jsonl then loses the
records after it (docs/metrics.md). Records that come again with the same values, as those of a resumed run do,
are not sent again. The first that comes with others (another learning rate, other data) begins a new run of
the tracker, which receives all of metrics.jsonl, since trackers cannot take values back.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

# Measured by the clock, so not the same again in a run that is resumed.
BY_THE_CLOCK = {"tokens", "time", "train/tokens_per_second", "train/exposed_communication", "train/mfu"}


class FollowError(Exception):
    """An error that the user can correct."""


def key_of(record):
    """What tells records of one run apart: a step may have one of training and one of validation."""
    return f"{record['step']} {','.join(sorted(k for k in record if '/' in k and k not in BY_THE_CLOCK))}"


def digest_of(record):
    values = {k: v for k, v in record.items() if k not in BY_THE_CLOCK}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def metrics_of(record):
    """The values to send: those with a name like train/loss that are finite (null: they were not)."""
    return {k: v for k, v in record.items()
            if "/" in k and isinstance(v, (int, float)) and math.isfinite(v)}


class Sent:
    """What a tracker has received, on the disk."""

    def __init__(self, path):
        self.file = open(path, "a+", encoding="utf-8")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FollowError(f"{path}: another process is following this run") from None
        self.tracker_run = None  # its id
        self.attempt = 0
        self.state = None  # of the run, when the tracker was last left
        self.digests = {}
        self.file.seek(0)
        whole = 0
        while (line := self.file.readline()).endswith("\n"):
            whole = self.file.tell()
            self._read(json.loads(line))
        self.file.truncate(whole)  # a line that was being written when the script was killed

    def _read(self, entry):
        if "run" in entry:
            self.tracker_run, self.attempt, self.digests = entry["run"], entry["attempt"], {}
        elif "state" in entry:
            self.state = entry["state"]
        else:
            self.digests[entry["key"]] = entry["digest"]

    def _write(self, entry):
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        self._read(entry)

    def begin(self, tracker_run):
        self._write({"run": tracker_run, "attempt": self.attempt + 1})

    def leave(self, state):
        self._write({"state": state})

    def add(self, record):
        self._write({"key": key_of(record), "digest": digest_of(record)})


class MetricsFile:
    """Gives the records of a file that grows, and says when it has to be read from the start again."""

    def __init__(self, path):
        self.path = path
        self.rewind()

    def rewind(self):
        self.identity = None
        self.at = 0
        self.last = b""  # the line before `at`

    def read(self):
        """(True if the file is another one or was cut, the new whole lines as records)."""
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            return False, []
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            file.seek(self.at - len(self.last))
            changed = self.identity not in (None, identity) or file.read(len(self.last)) != self.last
            if changed:
                self.rewind()
                file.seek(0)
            self.identity = identity
            records = []
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.at += len(line)
                self.last = line
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    records.append(record)
            return changed, records


class Follower:
    """Sends the records of a run to a tracker. A tracker has

        start(name, config) -> id       begins a run
        resume(id, sent)                continues one that has received so many records
        send(record, metrics)           receives a record and its values
        finish(state, superseded)       takes leave of the run, which is `running`, `complete`, `stopped` or `failed`;
                                        superseded: the records were not of the final run
    """

    def __init__(self, folder, tracker, kind):
        self.folder = Path(folder)
        self.tracker = tracker
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")
        self.sent = Sent(self.folder / f"follow_{kind}.jsonl")
        self.open = False

    def _open(self):
        if self.open:
            return
        if self.sent.tracker_run is None:
            self._start()
        else:
            self.tracker.resume(self.sent.tracker_run, len(self.sent.digests))
        self.open = True

    def _start(self):
        name = self.folder.resolve().name
        if self.sent.attempt > 0:
            name += f" ({self.sent.attempt + 1})"
        self.sent.begin(self.tracker.start(name, read_config(self.folder)))
        self.open = True

    def poll(self):
        """Sends what is new; returns the number of records sent."""
        _, records = self.metrics.read()
        count = 0
        try:
            for record in records:
                known = self.sent.digests.get(key_of(record))
                if known == digest_of(record):
                    continue
                self._open()
                if known is not None:
                    self.tracker.finish("complete", superseded=True)
                    self.open = False
                    self._start()
                    self.metrics.rewind()
                    return count + self.poll()
                self.tracker.send(record, metrics_of(record))
                self.sent.add(record)
                count += 1
        except BaseException:
            self.metrics.rewind()  # so that the next poll finds the records that were not sent
            raise
        return count

    def finish(self):
        state = state_of(self.folder)
        if not self.open and self.sent.tracker_run is not None and self.sent.state != state:
            self._open()  # nothing was new but how the run has ended
        if self.open:
            self.tracker.finish(state, superseded=False)
            self.sent.leave(state)
            self.open = False


def state_of(folder):
    """`running`, `complete`, `stopped` or `failed`, as status.json has it; a run whose process is gone has failed."""
    try:
        state = json.loads((folder / "status.json").read_text(encoding="utf-8"))["state"]
    except FileNotFoundError:
        return "complete"  # of a version without this file
    except (OSError, ValueError, KeyError, TypeError):
        return "failed"
    return "failed" if state == "running" and not is_held(folder) else state


def is_held(folder):
    """Whether a process trains in the folder. Its name stands in the lock, which is not tried, since a run that starts
    meanwhile could not take it."""
    try:
        holder = re.match(r"pid (\d+) on host (.*)\n", (folder / "lock").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return False
    if holder is None:
        return False
    if holder[2] != socket.gethostname():
        return True  # nobody here can tell
    try:
        os.kill(int(holder[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there, and somebody else's
    return True


def read_config(folder):
    """The resolved configuration of a run as a dict with keys such as train.lr; empty without PyYAML."""
    try:
        import yaml
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError):
        return {}
    flat = {}

    def flatten(prefix, value):
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    flatten("", config or {})
    return flat


def parser(description):
    result = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("run", help="the run folder, with metrics.jsonl in it")
    result.add_argument("--follow", action="store_true",
                        help="wait for new records until SIGINT (Ctrl-C) or SIGTERM")
    result.add_argument("--every", type=float, default=5.0, metavar="SECONDS",
                        help="with --follow: time between two looks (default: %(default)s)")
    return result


# Set by SIGINT and SIGTERM, from the time on when this module is loaded: loading that of a tracker takes seconds.
STOP = threading.Event()
for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, lambda *_: STOP.set())


def wait_for_folder(arguments):
    """A run makes its folder when it starts, which may be after its follower."""
    while not Path(arguments.run).is_dir():
        if not arguments.follow or STOP.is_set():
            raise FollowError(f"{arguments.run}: no such run folder")
        STOP.wait(min(arguments.every, 0.5))


def run(arguments, tracker, kind):
    """Sends the records of the run, and with --follow those to come. Returns the exit code."""
    try:
        wait_for_folder(arguments)
        follower = Follower(arguments.run, tracker, kind)
        total = 0
        while True:
            stopped = STOP.is_set()  # what was written before the signal is still sent
            try:
                total += follower.poll()
            except (OSError, FollowError):
                raise
            except Exception as error:  # of the tracker, such as a server that does not answer
                if not arguments.follow or stopped:
                    raise FollowError(f"{kind}: {error}") from error
                print(f"{kind}: {error}; trying again", file=sys.stderr)
            if not arguments.follow or stopped:
                break
            STOP.wait(arguments.every)
        follower.finish()
        print(f"{kind}: {total} records sent")
        return 0
    except (FollowError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def load(name):
    try:
        return __import__(name)
    except ImportError as error:
        # Debian and Ubuntu refuse pip outside of such an environment.
        raise SystemExit(f"error: {name} is missing ({error}); install it with\n"
                         f"    python3 -m venv ~/tools && ~/tools/bin/pip install {name}\n"
                         f"and start this script with ~/tools/bin/python3 (this is {sys.executable})")


def milliseconds(record):
    return int(1000 * record.get("time", time.time()))
