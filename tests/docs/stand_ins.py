"""What the commands of the pages expect, small: a corpus, runs of a few steps, a pretrained model.

They are made once, in a folder that is laid out like a checkout with a program in build/release; each page gets a copy.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/system"))

import follow_test  # noqa: E402  (the modules in place of wandb and mlflow)

# A namespace without a network but its own, so that ports are free; where it cannot be had, without.
ISOLATION = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
if not shutil.which("unshare") or subprocess.run([*ISOLATION, "true"], capture_output=True).returncode != 0:
    ISOLATION = []

# Models of the shape of tiny_sb and of the tasks, in a few steps.
SMALL = {"SBTRAIN_MODEL__LAYERS": "2", "SBTRAIN_MODEL__WIDTH": "32", "SBTRAIN_MODEL__INNER": "88",
         "SBTRAIN_STAGES__0__LENGTH": "6 steps", "SBTRAIN_STAGES__0__SCHEDULE__WARMUP": "2 steps",
         "SBTRAIN_VALIDATION__TOKENS": "2048", "SBTRAIN_METRICS__EVERY": "1"}  # fmt: skip
SMALL_VOCAB = {"SBTRAIN_MODEL__VOCAB": "512"}  # fits the tokenizer that is made here
SMALL_TASK = {"SBTRAIN_MODEL__WIDTH": "24", "SBTRAIN_MODEL__INNER": "32", "SBTRAIN_MODEL__VOCAB": "512",
              "SBTRAIN_TRAIN__BATCH": "4",
              "SBTRAIN_TRAIN__MICRO_BATCH": "4", "SBTRAIN_DATA__TASK__EXAMPLES": "8",
              "SBTRAIN_DATA__TASK__EVAL_EXAMPLES": "8", "SBTRAIN_STAGES__0__LENGTH": "2 steps",
              "SBTRAIN_STAGES__0__SCHEDULE__WARMUP": "1 steps"}  # fmt: skip


def python():
    return subprocess.run([ROOT / "scripts/python.sh"], capture_output=True, text=True, check=True).stdout.strip()


def has(need):
    """Whether there is a program, `module:NAME` of the Python of scripts/python.sh, `torch 2.4` there, or `matplotlib`,
    which the plots take from the system's."""
    if need == "torch 2.4":
        code = "import torch; torch.library.custom_op"
        return subprocess.run([python(), "-c", code], capture_output=True).returncode == 0
    if need == "matplotlib":
        return subprocess.run(["/usr/bin/python3", "-c", "import matplotlib"], capture_output=True).returncode == 0
    if need.startswith("module:"):
        return subprocess.run([python(), "-c", f"import {need[7:]}"], capture_output=True).returncode == 0
    return shutil.which(need) is not None


def environment(folder):
    """That of a shell in the folder, on a machine without a GPU. Leaks are not looked for by a sanitizer, since Open MPI's
    plugins leave memory behind and are unloaded before (tests/support/process.cpp)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SBTRAIN")}
    return kept | {"HOME": str(folder / "home"), "SBTRAIN_PYTHON": python(), "OMP_WAIT_POLICY": "passive",
                   "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
                   "MPLCONFIGDIR": str(folder / "home"), "FAKE_LOG": str(folder / "calls"),
                   "PYTHONDONTWRITEBYTECODE": "1",
                   "ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:detect_leaks=0",
                   "PATH": f"{folder}/build/release:{os.environ['PATH']}"}  # fmt: skip


def texts():
    """The documents of the corpus: the pages themselves."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page.read_text(encoding="utf-8") for page in pages]


def write_lines(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


# The program, with the options that make the work of a command small, also in place of the command's own.
PROGRAM = """#!/usr/bin/env bash
eval "smaller=(${DOCS_SMALLER:-})"
words=()
while [ $# -gt 0 ]; do
  if [[ $1 = --* && " ${smaller[*]} " = *" $1 "* ]]; then shift; else words+=("$1"); fi
  shift
done
exec %s "${words[@]}" "${smaller[@]}"
"""


def make_checkout(program, folder):
    for name in ("scripts", "configs", "data", "tests/bench", "tests/data"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "build/release").mkdir(parents=True)
    program_here = folder / "build/release/sbtrain"
    program_here.write_text(PROGRAM % shlex.quote(str(program)))
    program_here.chmod(0o755)
    (folder / "home").mkdir()
    for name, source in (("wandb", follow_test.WANDB), ("mlflow", follow_test.MLFLOW)):
        (folder / "modules").mkdir(exist_ok=True)
        (folder / f"modules/{name}.py").write_text(source)


def make_texts(folder):
    documents = texts()
    paragraphs = [part for text in documents for part in text.split("\n\n") if len(part) > 80]
    write_lines(folder / "corpus/text/train/pages.jsonl", documents + paragraphs)
    # The longest document has to reach the lengths that the pages ask for.
    write_lines(folder / "corpus/text/validation/pages.jsonl", ["\n\n".join(documents)[:45_000], documents[-1][:4000]])
    write_lines(folder / "my_text/paragraphs.jsonl", paragraphs)
    (folder / "my_text/readme.txt").write_text(documents[0], encoding="utf-8")
    (folder / "essays.txt").write_text("\n\n".join(documents), encoding="utf-8")
    write_lines(folder / "text.jsonl", paragraphs[:300])


FIRST = """
name: first
device: cpu
model: {layers: 2, width: 32, inner: 44, heads: 4, kv_heads: 2, vocab: 400, attention: {type: softmax, position: rope}}
train: {sequence_length: 64, micro_batch: 2, batch: 4, lr: 3e-3}
data: {sources: [{path: first.h5}], tokenizer: %s}
stages: [{name: first, length: 3 steps}]
"""


def make_pretrained(sbtrain, folder, name, tokenizer, *kind):
    """A Hugging Face folder of a Llama of three steps."""
    write_lines(folder / "few.jsonl", texts()[:3])
    (folder / "first.yaml").write_text(FIRST % tokenizer)
    sbtrain("tokenizer", "train", "--input", "few.jsonl", "--vocab", "400", "--output", tokenizer, *kind)
    sbtrain("prepare", "--input", "few.jsonl", "--tokenizer", tokenizer, "--output", "first.h5")
    sbtrain("train", "--config", "first.yaml")
    sbtrain("export", "--checkpoint", "runs/first", "--output", name)
    shutil.rmtree(folder / "runs/first")
    for file in ("few.jsonl", "first.yaml", "first.h5", tokenizer):
        (folder / file).unlink()


def make(program, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder = folder.resolve()
    make_checkout(program, folder)
    make_texts(folder)

    def sbtrain(*arguments, more=()):
        result = subprocess.run([program, *arguments], cwd=folder, env=environment(folder) | dict(more),
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            sys.exit(f"sbtrain {' '.join(arguments)}: exit code {result.returncode}\n{result.stdout}")

    make_pretrained(sbtrain, folder, "pretrained", "first.model")
    make_pretrained(sbtrain, folder, "pretrained_bpe", "tokenizer.json", "--type", "bpe")
    sbtrain("tokenizer", "train", "--input", "corpus/text/train", "--vocab", "400", "--output", "corpus/tokenizer.model")
    for name, output in (("train", "train"), ("validation", "val")):
        sbtrain("prepare", "--input", f"corpus/text/{name}", "--tokenizer", "corpus/tokenizer.model", "--output",
                f"corpus/{output}.h5")
    for name in ("tiny_sb", "tiny_rope"):
        sbtrain("train", "--config", f"configs/{name}.yaml", more=SMALL | SMALL_VOCAB)
    # Of all lengths and tolerances that the pages try.
    sbtrain("train", "--config", "configs/tiny_sb.yaml", "--out=runs/lengths/sb", more=SMALL | SMALL_VOCAB | {
        "SBTRAIN_MODEL__LAYERS": "1", "SBTRAIN_MODEL__HEADS": "1", "SBTRAIN_MODEL__WIDTH": "16"})
    sbtrain("train", "--config", "configs/maps_sb.yaml", more=SMALL_TASK | {"SBTRAIN_DATA__TASK__EVAL_EXAMPLES": "100"})
    for name in ("my_run", "350m_sb", "rope_4096"):
        shutil.copytree(folder / "runs/tiny_sb", folder / "runs" / name)
    shutil.copytree(folder / "runs/lengths/sb", folder / "runs/reproduced/lengths/seed-2/sb")
