"""Runs the commands of README.md, CONTRIBUTING.md and docs/, as they are printed.

    docs_test.py check                        the table of commands.py against the pages
    docs_test.py stand-ins SBTRAIN FOLDER     makes what the commands expect, small
    docs_test.py run FOLDER PAGE...           runs the commands of pages, each page in a copy of FOLDER
    docs_test.py names                        prints the pages that have commands

A command is a statement of a fenced block in the language sh, or a whole block in Python. It is run unless commands.py lists it with a reason, and
the commands of a block follow each other in one shell. A folder in which they run is laid out like a checkout that has
been built. What a page speaks of, such as runs/tiny_sb, stands there as a model of a few steps; what is large is made
small without a change to the text of a command, by variables SBTRAIN_* or by options that are added to the program's
or take their place.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

import commands  # noqa: E402
import stand_ins  # noqa: E402

LONGEST = 500  # seconds that a block may take; it is more with sanitizers
FENCE = re.compile(r"^ {0,3}```(\S*)\s*$")
# How a block begins that should say that it is one of commands.
COMMAND = re.compile(r"\s*(sbtrain|scripts/\w+\.|build/release/|mpirun|srun|sbatch|pip|python3|apt-get|git clone)\b")


def pages():
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


class Block:
    def __init__(self, language, text, line):
        self.language, self.text, self.line = language, text, line
        self.follows = ""  # the text of an unnamed block that stands right below it, as what it prints does

    def has_commands(self):
        return self.language in ("sh", "python")

    def commands(self):
        return statements(self.text) if self.language == "sh" else [self.text]


def blocks(text):
    found, inside, end = [], None, -9
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if inside is not None and line.strip() == "```":
            block = Block(inside[0], "".join(inside[2]), inside[1])
            if found and not block.language and block.line - end <= 2:
                found[-1].follows = block.text
            found.append(block)
            inside, end = None, number
        elif inside is not None:
            inside[2].append(line + "\n")
        elif fence:
            inside = (fence[1], number, [])
    return found


def is_whole(text):
    """Whether a shell would run the text as it stands, and not wait for more."""
    if text.rstrip("\n").endswith("\\"):
        return False
    result = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    return result.returncode == 0 and not result.stderr


def statements(text):
    """The statements of a shell script, without comments between them."""
    found, part = [], ""
    for line in text.splitlines():
        if not part and (not line.strip() or line.lstrip().startswith("#")):
            continue
        part += line + "\n"
        if is_whole(part):
            found.append(part)
            part = ""
    if part:
        raise SyntaxError(f"this is no whole command:\n{part}")
    return found


def normal(text):
    return " ".join(text.split())


def rule_of(page, statement):
    """The first rule of a page that a statement begins with; a rule without options where there is none."""
    for rule in commands.PAGES.get(page, []):
        if normal(statement).startswith(normal(rule.text)):
            return rule
    return commands.Run("")


# ---- The table against the pages --------------------------------------------------------------


def check():
    problems = []
    used = set()
    for page, text in pages().items():
        for block in blocks(text):
            where = f"{page}:{block.line}"
            if not block.has_commands():
                if block.language in ("", "bash", "shell", "console") and COMMAND.match(block.text):
                    problems.append(f"{where}: commands, but the block is not called sh")
                continue
            if page not in commands.PAGES:
                problems.append(f"{where}: commands.py has no entry for this page, and no test runs it")
            try:
                used.update(id(rule_of(page, statement)) for statement in block.commands())
            except SyntaxError as error:
                problems.append(f"{where}: {error}")
    for page, rules in commands.PAGES.items():
        for rule in rules:
            if id(rule) not in used:
                problems.append(f"commands.py: {page} has no command '{rule.text}'")
            if isinstance(rule, commands.Listed) and not rule.reason:
                problems.append(f"commands.py: {page}: no reason for '{rule.text}'")
    print("\n".join(problems) or "every command is run, or listed with a reason")
    return 1 if problems else 0


# ---- Running ----------------------------------------------------------------------------------

PROLOGUE = r"""
shopt -s expand_aliases
_end() {
  printf '%s %s %s\n' "$1" "$2" "$EPOCHREALTIME" >> "$DOCS_STATUS"
  [ "$2" = 0 ] || exit 90
}
_wait_for_server() {
  for _ in {1..600}; do
    if curl -fs "http://127.0.0.1:8000/health" > /dev/null; then return; fi
    sleep 0.1
  done
  echo "nothing answers on port 8000" >&2
  return 1
}
"""


def shell_of(rule, statement, number):
    """What runs a statement; its text is not changed."""
    text = statement.rstrip("\n")
    parts = [f"export {name}={shlex.quote(value)}" for name, value in rule.env.items()]
    if rule.smaller:
        parts.append(f"export DOCS_SMALLER={shlex.quote(rule.smaller)}")
    if rule.before:
        parts.append(rule.before)
    if rule.serves:
        parts.append((text if text.endswith("&") else f"{text} &") + "\n_wait_for_server")
    elif rule.prints:
        parts.append(f"{{ {text}\n}} > printed")
    else:
        parts.append(text)
    parts.append(f"_end {number} $?")
    parts += [f"unset {name}" for name in (*rule.env, "DOCS_SMALLER")]
    if rule.after:
        parts.append(f"{rule.after}\n_end {number} $?")
    return "\n".join(parts) + "\n"


def missing(needs):
    return [need for need in needs if not stand_ins.has(need)]


class Page:
    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.failed = False
        self.environment = stand_ins.environment(folder) | {"DOCS_STATUS": str(folder / ".status")}

    def run(self, block):
        plan, script = [], PROLOGUE
        for number, statement in enumerate(block.commands()):
            rule = rule_of(self.name, statement)
            absent = missing(rule.needs) if isinstance(rule, commands.Run) else []
            first = normal(statement.splitlines()[0])
            if isinstance(rule, commands.Listed):
                print(f"  not run   {first[:88]}   ({rule.reason})")
                if rule.plan:
                    self.plan_only(statement)
            elif absent:
                print(f"  skipped   {first[:88]}   (needs {', '.join(absent)})")
            else:
                plan.append((number, first, rule))
                if block.language == "python":
                    statement = f'"$SBTRAIN_PYTHON" - << "_END"\n{statement}_END'
                script += shell_of(rule, statement, number)
        if plan:
            self.execute(block, plan, script)

    def plan_only(self, statement):
        """Checks the options of a command that is too large to run: sbtrain's own part of it, as a dry run."""
        part = re.search(r"\bsbtrain (.*)", normal(statement.replace("\\\n", " ")))
        words = part[1].split(" #")[0]
        result = subprocess.run(["bash", "-c", f"sbtrain {words} --dry-run"], cwd=self.folder, env=self.environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            self.fail(f"sbtrain {words} --dry-run: exit code {result.returncode}", result.stdout)

    def execute(self, block, plan, script):
        status = Path(self.environment["DOCS_STATUS"])
        status.write_text("")
        started = time.time()
        with open(self.folder / ".log", "w+", encoding="utf-8", errors="replace") as log:
            process = subprocess.Popen([*stand_ins.ISOLATION, "bash", "-c", script], cwd=self.folder,
                                       env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(timeout=LONGEST)
            except subprocess.TimeoutExpired:
                code = "none: it takes too long"
            self.end(process)
            log.seek(0)
            output = log.read()
        done = {}
        for line in status.read_text().splitlines():
            number, result, at = line.split()
            done.setdefault(int(number), []).append((int(result), float(at)))
        for number, first, rule in plan:
            results = done.get(number, [])
            ends_shell = first.startswith("exit ")
            if code == 0 and (results or ends_shell):
                seconds = results[-1][1] - started if results else 0
                started = results[-1][1] if results else started
                print(f"  {seconds:6.1f} s  {first[:110]}")
                if rule.prints and normal(block.follows) not in normal((self.folder / "printed").read_text()):
                    self.fail(f"{self.name}:{block.line}: '{first}' prints", (self.folder / "printed").read_text()
                              + "and the page says\n" + block.follows)
            elif not results or results[-1][0] != 0:
                self.fail(f"{self.name}:{block.line}: '{first}': exit code {results[-1][0] if results else code}",
                          output)
                return

    @staticmethod
    def end(process):
        """Ends what the block has left running."""
        for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 1.0)):
            try:
                os.killpg(process.pid, number)
                deadline = time.monotonic() + patience
                while time.monotonic() < deadline:
                    process.poll()
                    os.killpg(process.pid, 0)
                    time.sleep(0.02)
            except (ProcessLookupError, PermissionError):
                break
        process.wait()

    def fail(self, what, output):
        self.failed = True
        print(f"  FAILED    {what}\n{output[-4000:]}")


def run_page(name, text, source, before):
    """Whether all commands of the page have worked."""
    with tempfile.TemporaryDirectory(prefix="sbtrain-docs-") as folder:
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
        page = Page(name, Path(folder))
        subprocess.run(["bash", "-ec", before], cwd=folder, env=page.environment, check=True)
        for block in blocks(text):
            if block.has_commands():
                page.run(block)
    return not page.failed


def run(source, names):
    works = True
    for name in names:
        text = pages()[name]
        print(name, flush=True)
        works &= run_page(name, text, source, "")
        for variant in commands.VARIANTS.get(name, []):
            print(f"{name}, {variant.name}", flush=True)
            assert variant.old in text
            works &= run_page(name, text.replace(variant.old, variant.new), source, variant.before)
    return 0 if works else 1


def main():
    what, *arguments = sys.argv[1:]
    if what == "check":
        return check()
    if what == "names":
        print("\n".join(commands.PAGES))
        return 0
    if what == "stand-ins":
        stand_ins.make(Path(arguments[0]).resolve(), Path(arguments[1]))
        return 0
    return run(arguments[0], arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
