#!/usr/bin/env bash
# Times one training step of sbtrain and of the same model in plain PyTorch, alternately on this CPU.
#
#   tests/bench/compare.sh [--rounds N] [--compile] [--install] [CONFIG...]
#
# CONFIG    default: configs/tiny_sb.yaml configs/tiny_rope.yaml
# --rounds  runs of each, alternating, so that other work on the machine affects both (default 3; the
#           best median of each is compared)
# --compile also times PyTorch under torch.compile
# --install puts PyPI's PyTorch in .venv/torch without asking (a download of some 5 GB)
#
# PYTHON chooses the interpreter; otherwise the first of .venv/torch, that of scripts/python.sh,
# /usr/bin/python3 and python3 that can import torch. OMP_NUM_THREADS sets the threads of both.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

rounds=3
compile=0
install=ask
configs=()
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=${2:?--rounds needs a number}; shift ;;
    --compile) compile=1 ;;
    --install) install=yes ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "compare: unknown option $1" >&2; exit 2 ;;
    *) configs+=("$1") ;;
  esac
  shift
done
[ ${#configs[@]} -gt 0 ] || configs=(configs/tiny_sb.yaml configs/tiny_rope.yaml)

sbtrain=$(scripts/find_sbtrain.sh)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}

has_torch() { command -v "$1" >/dev/null && "$1" -c 'import torch, yaml' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} .venv/torch/bin/python "$(scripts/python.sh)" /usr/bin/python3 python3; do
    if has_torch "$candidate"; then
      echo "$candidate"
      return
    fi
  done
}

install_torch() {
  python3 -m venv .venv/torch
  .venv/torch/bin/pip install --quiet torch numpy pyyaml
}

python=
[ $install = yes ] || python=$(find_python)
if [ -z "$python" ]; then
  if [ $install = ask ]; then
    echo "PyTorch is not installed. scripts/setup.sh test installs Debian's, which is small; PyPI's is"
    echo "newer and takes some 5 GB."
    if [ ! -t 0 ]; then
      echo "skipped: install one of them, PyPI's by running this script with --install" >&2
      exit 77
    fi
    read -r -p "Install PyPI's in .venv/torch now? [y/N] " answer
    [[ $answer == [yY]* ]] || exit 77
  fi
  install_torch
  python=.venv/torch/bin/python
fi

results=$(mktemp -d -t sbtrain-bench.XXXXXX)
trap 'rm -rf "$results"' EXIT
for config in "${configs[@]}"; do
  name=$(basename "$config" .yaml)
  for ((round = 1; round <= rounds; ++round)); do
    echo "$name, round $round of $rounds" >&2
    "$sbtrain" bench --config "$config" --json >>"$results/$name.sbtrain"
    "$python" tests/bench/pytorch_step.py --config "$config" --threads "$OMP_NUM_THREADS" \
      >>"$results/$name.pytorch"
    if [ $compile = 1 ]; then
      "$python" tests/bench/pytorch_step.py --config "$config" --threads "$OMP_NUM_THREADS" \
        --compile >>"$results/$name.pytorch-compiled"
    fi
  done
done
"$python" tests/bench/table.py "$results" "${configs[@]}"
