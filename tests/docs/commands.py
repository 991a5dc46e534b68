"""What the commands of each page need, and which of them are not run, with the reason (docs_test.py).

A rule is for the statements of its page that begin with its text. Commands without a rule are run as they stand.
"""

import pathlib
from dataclasses import dataclass, field

from stand_ins import SMALL, SMALL_TASK, SMALL_VOCAB


@dataclass
class Listed:
    text: str
    reason: str
    plan: bool = False  # what it gives to sbtrain is checked by a dry run


@dataclass
class Run:
    text: str
    before: str = ""  # commands that make what the page expects
    env: dict = field(default_factory=dict)
    smaller: str = ""  # options of sbtrain that are added, or take the place of those of the same name
    serves: bool = False  # a server: the commands after it wait until it answers
    prints: bool = False  # what it prints is the block that stands below it
    needs: tuple = ()  # it is passed over where one of these is missing
    after: str = ""  # a check of what it has done


@dataclass
class Variant:
    """Another way in which the page says that its commands work."""

    name: str
    before: str
    old: str
    new: str


GPU = "needs a GPU"
GPUS = "needs several GPUs"
NETWORK = "fetches from the network"
INSTALLS = "installs packages"
PYTORCH = "compares with PyTorch, on an idle machine"
SLURM = "needs Slurm"
LONG = "takes long on a CPU"
BUILDS = "builds the program, and runs its tests"
MQRAR = SMALL_TASK | {"SBTRAIN_TRAIN__SEQUENCE_LENGTH": "400"}  # 192 pairs and a query
# On a CPU, where the kernels' Python needs no library.
KERNELS = {
    "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[2] / "python/sbtrain-kernels"), "CUDA_VISIBLE_DEVICES": ""
}
FEW_STEPS = '--train.batch=2 --train.micro_batch=2 "--stages.0.length=1 steps"'

PAGES = {
    "README.md": [
        Listed("git clone", NETWORK),
        Listed("scripts/quickstart.sh", INSTALLS + ", builds and fetches; takes minutes"),
        Listed("scripts/test.sh", BUILDS),
        Listed("cmake --install", "system_install runs it"),
        Listed("scripts/package.sh", "system_package runs it"),
        Listed("pip install dist/", "system_package runs it"),
        Listed("sbtrain quickstart", "system_quickstart runs it"),
        Run("sbtrain --config my.yaml", before="rm -r runs/my_run", env=SMALL, after="test -s runs/my_run/metrics.jsonl"),
        Run("sbtrain import --input SmolLM2-135M", before="rm -rf runs/mine; mv pretrained SmolLM2-135M"),
        Run("sbtrain train --config mine.yaml", before="""cat > mine.yaml <<'END'
include: runs/smollm2/config.yaml
name: mine
out: runs/mine
train: {sequence_length: 64, micro_batch: 2, batch: 4}
data: {sources: [{path: mine.h5}], tokenizer: runs/smollm2/tokenizer.model}
stages: [{name: mine, length: 3 steps}]
END
build/release/sbtrain prepare --input text.jsonl --tokenizer runs/smollm2/tokenizer.model --output mine.h5"""),
        Run("sbtrain export --checkpoint runs/mine", needs=("module:torch", "module:transformers"),
            after="grep -q LlamaForCausalLM mine-hf/config.json"),
        Run("sbtrain serve", serves=True,
            after="""curl -fs localhost:8000/v1/completions -d '{"prompt": "The", "max_tokens": 2}' | grep -q text"""),
        Listed("sbtrain bench train --config configs/350m_sb.yaml", GPU),
        Listed("sbtrain --config configs/350m_sb.yaml # with", GPU, plan=True),
    ],
    "CONTRIBUTING.md": [
        Listed("scripts/setup.sh build test lint", INSTALLS),
        Listed("cmake --preset", BUILDS),
        Listed("ctest --preset release -L gpu", GPU),
        Listed("ctest --preset release", BUILDS),
        Listed("scripts/lint.sh", "reads every file that has changed"),
        Listed("scripts/test.sh", BUILDS),
        Listed("for tool in memcheck racecheck", GPU),
        Listed("mkdir -p /tmp/found", "needs clang and the preset fuzz, and runs for ten minutes"),
    ],
    "docs/attention.md": [],
    "docs/checkpoints.md": [
        Run("from safetensors.numpy", before="cd runs/tiny_sb/checkpoints; mv step-00000006 step-00002000; cd - > /dev/null",
            needs=("module:safetensors", "module:numpy")),
    ],
    "docs/corpus.md": [
        Listed("scripts/setup.sh corpus", INSTALLS),
        Listed("data/package_corpus.py", NETWORK + " for minutes; system_corpus runs it on small packages"),
    ],
    "docs/data.md": [
        Listed("data/fetch_corpus.py --small", NETWORK),
        Listed("hf download", NETWORK),
        Listed("data/fineweb_edu.sh", "reads a copy of the data set; system_recipes runs it on a small one"),
        Listed("data/slimpajama.sh", "reads a copy of the data set; system_recipes runs it on a small one"),
    ],
    "docs/developers/tests.md": [
        Listed("python3 tests/faults/request_fuzz.py", "takes ten minutes; faults_requests runs it with fewer requests"),
        Listed("python3 tests/faults/lost_ranks.py", "takes three minutes; faults_lost_ranks runs it with fewer faults"),
    ],
    "docs/distributed.md": [
        Listed("sbtrain --config configs/1b_sb.yaml", GPU, plan=True),
        Listed("CUDA_VISIBLE_DEVICES=4,5", GPU),
        Listed("sbatch", SLURM + "; system_slurm runs it without, system_slurm_cluster with"),
        Listed("srun", SLURM, plan=True),
        Listed("mpirun", GPUS, plan=True),
        Listed("torchrun", GPUS, plan=True),
        Run("sbtrain train --config configs/3b_sb.yaml --dry-run", prints=True),
        Listed("docker run", "needs Docker and GPUs"),
    ],
    "docs/long_context.md": [
        Run("mpirun -n 2", env=SMALL | SMALL_VOCAB, needs=("mpirun",)),
        Run("sbtrain train --config configs/350m_sb.yaml"),
        Listed("scripts/lengths.sh", GPU + " and the corpus; system_experiments runs it with tiny models"),
        Listed("scripts/long_contexts.sh", GPU + " and the corpus; system_experiments runs it with tiny models"),
        Run("sbtrain train --config configs/tiny_sb.yaml --name=tiny_gated", env=SMALL | SMALL_VOCAB),
        Run("sbtrain serve", serves=True),
        Run("sbtrain eval --checkpoint runs/tiny_gated --lengths", smaller="--tokens-per-length 1024"),
        Run("sbtrain eval --checkpoint runs/tiny_gated --tasks", smaller="--samples 1"),
    ],
    "docs/evaluation.md": [
        Run("sbtrain eval --checkpoint runs/tiny_sb --data other.h5", before="cp corpus/val.h5 other.h5"),
        Run("sbtrain eval --checkpoint runs/my_run --lengths 512,1024,2048,4096,8192,16384",
            smaller="--tokens-per-length 1024", after="cp lengths.json other.json"),
        Run("sbtrain eval --checkpoint runs/my_run --lengths 512,2048,8192", smaller="--tokens-per-length 1024"),
        Run("scripts/plot_lengths.py", needs=("matplotlib",)),
        Run("scripts/tables.py runs/lengths", before="""mkdir -p runs/lengths/seed-{1,2}
for name in runs/lengths/seed-{1,2}/{sb,rope} a1 a2 b; do cp lengths.json $name.json; done"""),
        Run("scripts/tables.py --bootstrap 1000 --against", before=r"""sed -i 's/"name": .*/"name": "rope",/' \
  runs/lengths/seed-*/rope.json"""),
        Run("sbtrain eval --checkpoint runs/my_run --benefit", smaller="--tokens-per-length 1024"),
        Run("sbtrain eval --checkpoint runs/my_run --reach", smaller="--tokens-per-length 1024"),
        Run("scripts/plot_reach.py", needs=("matplotlib",)),
        Run("sbtrain eval --checkpoint runs/my_run --tasks", smaller="--samples 1"),
        Run("scripts/plot_tasks.py", before="[ -e other.json ] && cp tasks.json other.json", needs=("matplotlib",)),
        Run("sbtrain data tasks", smaller="--samples 100",
            before="mkdir -p corpus/lengths; DOCS_SMALLER= build/release/sbtrain tokenizer train"
            " --input corpus/text/train --vocab 2048 --output corpus/lengths/tokenizer.model"),
        Listed("scripts/lengths.sh", GPU + "; system_lengths runs it with a program in place of sbtrain"),
        Run("for run in runs/lengths/seed-*", smaller="--samples 1",
            before="for name in sb rope alibi; do cp -r runs/tiny_sb runs/lengths/seed-1/$name; done"),
        Run("sbtrain serve", serves=True),
        Listed("lm_eval", "downloads the data of tasks; system_serve_lm_eval runs the harness"),
        Run("sbtrain eval --checkpoint runs/my_run --true-positions", before="""cat > truth.json <<'END'
{"examples": [{"tokens": [17, 90, 4, 91, 17], "positions": [[4, 1]]}]}
END"""),
        Run("scripts/plot_attention.py", needs=("matplotlib",)),
    ],
    "docs/experiments.md": [
        Listed("scripts/attention_maps.sh", LONG),
        Listed("scripts/lengths.sh --out runs/try", "needs the text of scripts/lengths.sh; system_experiments runs it so"),
        Listed("scripts/from_rope.sh", GPU + "; system_experiments runs it with a tiny model"),
        Listed("scripts/pair_350m.sh", GPU + " and the corpus; system_experiments runs it with tiny models"),
        Run("scripts/reproduce.py --list"),
        Listed("scripts/reproduce.py", GPU + " and the corpus; system_experiments runs it with tiny models"),
        Run("scripts/tables.py --bootstrap 1000 --against", before="""mkdir -p runs/lengths
build/release/sbtrain eval --checkpoint runs/350m_sb --lengths 2048 --tokens-per-length 2048 --json a.json
build/release/sbtrain eval --checkpoint runs/350m_sb --lengths 2048 --tokens-per-length 2048 --same-targets 256 --json b.json
scripts/collect_results.py --labels stick-breaking,stick-breaking a.json b.json -o runs/lengths/results.jsonl"""),
        Listed("sbtrain --config configs/350m_sb.yaml", GPU, plan=True),
        Run("sbtrain eval --checkpoint runs/350m_sb", smaller="--tokens-per-length 2048",
            after="cp sb.json rope.json; cp sb.json alibi.json"),
        Run("scripts/plot_lengths.py", needs=("matplotlib",)),
    ],
    "docs/interop.md": [
        Run("sbtrain export --checkpoint runs/continued --output exported/checked",
            needs=("module:torch", "module:transformers")),
        Run("from transformers", needs=("module:torch", "module:transformers")),
    ],
    "docs/metrics.md": [
        Run("import pandas", needs=("module:pandas",)),
        Run("scripts/log_", env={"PYTHONPATH": "modules"}),  # in place of wandb and mlflow
        Run("scripts/plot_loss.py", needs=("matplotlib",)),
        Listed("python3 -m venv", INSTALLS),
        Listed("pip install", INSTALLS),
        Listed("tensorboard", "needs TensorBoard, and ends with Ctrl-C"),
        # Long enough for the script that follows it to begin.
        Run("sbtrain --config configs/tiny_sb.yaml", before="rm -r runs/tiny_sb",
            env=SMALL | SMALL_VOCAB | {"SBTRAIN_STAGES__0__LENGTH": "100 steps"}),
        Run("kill $follower", after="grep -q train/loss calls"),
    ],
    "docs/c_interface.md": [
        Listed("cmake --build", BUILDS),
        Listed("gcc", "the program is the reader's; unit_c_api compiles one"),
    ],
    "docs/python.md": [
        Listed("pip install", INSTALLS + "; torch_wheel does it with a wheel that it makes"),
        Run("import sbtrain.torch.transformers", env=KERNELS, needs=("torch 2.4", "module:transformers")),
        Run("import sbtrain.torch.fla", env=KERNELS, needs=("torch 2.4", "module:fla")),
        Run("import torch", env=KERNELS, needs=("torch 2.4",)),
    ],
    "docs/optimizers.md": [
        Listed("scripts/optimizers.py", GPU + " and the corpus; system_optimizers runs it with a tiny model"),
        Listed("scripts/plot_optimizers.py", "draws what these have measured; system_optimizers runs it"),
    ],
    "docs/performance.md": [
        Listed("sbtrain bench train --config configs/1b_sb.yaml --train.optimizer=muon", GPU),
        Listed("build/release/sbtrain bench attention --modules stickbreaking --head-dims 64", GPU),
        Listed("build/release/sbtrain bench attention --modules softmax --implementation portable", GPU),
        Listed("build/release/sbtrain bench attention --json", "comes before a command that needs PyTorch and a GPU"),
        Run("build/release/sbtrain bench attention", smaller="--repeats 1 --head-dims 32 --lengths 256 --tokens 256"),
        Run("build/release/sbtrain bench skip --checkpoint runs/lengths/sb --lengths",
            smaller="--repeats 1 --batches 1 --epsilons 1e-3 --lengths 512,2048 --tokens 2048"),
        Run("build/release/sbtrain bench skip", smaller="--repeats 1 --batches 1"),
        Run("scripts/tables.py skip.jsonl", needs=("matplotlib",)),
        Run("build/release/sbtrain bench decode", smaller="--steps 1"),
        Run("build/release/sbtrain bench ops", smaller="--repeats 1 --tokens 64 --width 64 --inner 64 --vocab 512"),
        Run("build/release/sbtrain bench train --config configs/tiny_sb.yaml --init-from",
            smaller="--steps 2 --warmup 1", env=SMALL | SMALL_VOCAB),
        Run("build/release/sbtrain bench train", smaller="--steps 2 --warmup 1"),
        Listed("build/release/sbtrain bench collectives", GPUS),
        Run("mpirun -n 2", smaller="--sizes 1 --repeats 1", needs=("mpirun",)),
        Listed("tests/bench/compare.sh", PYTORCH),
        Listed("tests/bench/several_gpus.py", GPUS + "; system_several_gpus runs it with programs in place of all"),
        Listed("tests/bench/compare_gpu", GPU + "; system_compare_gpus runs it with programs in place of both"),
        Listed("$(scripts/python.sh)", PYTORCH),
        Listed("SBTRAIN_ATTENTION_LIBRARY", PYTORCH),
        Listed("build/release/sbtrain --config configs/350m_sb.yaml", GPU, plan=True),
        Listed("scripts/quickstart.sh", INSTALLS + ", builds and fetches; takes minutes"),
        Listed("tests/bench/compare_builds.sh --layers 4", LONG),
        Run("tests/bench/compare_builds.sh OLD/sbtrain",
            before="mkdir OLD NEW; cp build/release/sbtrain OLD; cp build/release/sbtrain NEW",
            env=SMALL | SMALL_VOCAB),
        Run("for input in text.jsonl", before="""cp corpus/tokenizer.model my.model; gzip -k text.jsonl; zstd -q text.jsonl
$(scripts/python.sh) -c "import json, pyarrow, pyarrow.parquet
rows = pyarrow.Table.from_pylist([json.loads(line) for line in open('text.jsonl')])
pyarrow.parquet.write_table(rows, 'text.parquet')\"""",
            needs=("gzip", "zstd", "/usr/bin/time", "module:pyarrow")),
        Listed("OMP_NUM_THREADS=1 $(scripts/python.sh)", PYTORCH),
        Run("dd if=hf/model.safetensors", before="mv pretrained hf"),
        Run("/usr/bin/time", needs=("/usr/bin/time",)),
    ],
    "docs/results.md": [
        Listed("scripts/optimizers.py", GPU + " and the corpus; system_optimizers runs it with a tiny model"),
        Listed("scripts/plot_optimizers.py", "draws what these have measured; system_optimizers runs it"),
        Listed("data/package_corpus.py", NETWORK + " for minutes; system_corpus runs it on small packages"),
        Listed("scripts/reproduce.py", GPU + " and the corpus; system_experiments runs it with tiny models"),
        Run("sbtrain eval --checkpoint runs/large/runs/", smaller="--tokens-per-length 1024 --lengths 512,1024",
            before="mkdir -p runs/large/runs; cp -r runs/350m_sb runs/large/runs/long_350m_sb_muon_0.004_0.1_1070_1"),
        Run("sbtrain bench skip", smaller="--repeats 1 --batches 1 --lengths 512,2048 --tokens 2048"),
        Run("scripts/plot_skip.py", needs=("matplotlib",)),
        Run("scripts/plot_loss.py --labels", needs=("matplotlib",),
            before="mkdir runs/reproduced; "
                   "for run in warmup_1b_sb warmup_1b_sb_no_mup; do cp -r runs/350m_sb runs/reproduced/$run; done"),
        Run("sbtrain sweep configs/sweeps/mqrar_head.yaml", env=MQRAR, smaller=FEW_STEPS, needs=("matplotlib",)),
        Run("sbtrain sweep configs/sweeps/mqar_short.yaml", env=SMALL_TASK, smaller=FEW_STEPS, needs=("matplotlib",)),
    ],
    "docs/serving.md": [
        Run("sbtrain serve", serves=True),
        Run("sbtrain bench decode", smaller="--steps 1"),
    ],
    "docs/tasks.md": [
        Run("sbtrain --config configs/maps_sb.yaml", before="rm -r runs/maps_sb", env=SMALL_TASK),
        Run("sbtrain --config configs/mqrar_sb.yaml", env=MQRAR),
        Run("sbtrain sweep", env=MQRAR, smaller=FEW_STEPS),
        Run("scripts/plot_sweep.py", needs=("matplotlib",)),
    ],
}

VARIANTS = {
    "docs/interop.md": [Variant("a model with a tokenizer.json", "rm -r pretrained; mv pretrained_bpe pretrained",
                                "tokenizer.model", "tokenizer.json")],
}
