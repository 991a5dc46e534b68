#!/usr/bin/env bash
# Times one training step of sbtrain and of the same model in PyTorch, alternately on this GPU.
#
#   tests/bench/compare_gpu.sh [--rounds N] [--steps N] [--stickbreaking fla|FOLDER]... [CONFIG...]
#
# CONFIG          default: configs/350m_rope.yaml configs/1b_rope.yaml configs/1b_sb.yaml;
#                 a step is one micro-batch: 16 sequences for 350M, 8 for others (BATCH overrides it)
# --rounds        runs of each, alternating (default 1); the best median of each counts
# --steps         timed steps of a run (default 20, at least 8)
# --stickbreaking folder of the package stickbreaking_attention, the published Triton kernels, for
#                 machines where it is not installed; or fla, flash-linear-attention's op (packages
#                 fla-core and einops). Given twice, each has a row, with runs of sbtrain of its own
#
# PYTHON chooses the interpreter (default: that of scripts/python.sh), SBTRAIN the program. Stick-breaking
# runs with skip_epsilon 0, since the Triton kernels skip nothing. PYTORCH_OPTIONS holds further options of
# the PyTorch side (tests/bench/pytorch_gpu.py --help). The exit code is 1 if a program failed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

rounds=1
steps=20
kernels=()
configs=()
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=${2:?--rounds needs a number}; shift ;;
    --steps) steps=${2:?--steps needs a number}; shift ;;
    --stickbreaking) kernels+=("${2:?--stickbreaking needs fla or a folder}"); shift ;;
    -h | --help) sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "compare_gpu: unknown option $1" >&2; exit 2 ;;
    *) configs+=("$1") ;;
  esac
  shift
done
[ ${#configs[@]} -gt 0 ] ||
  configs=(configs/350m_rope.yaml configs/1b_rope.yaml configs/1b_sb.yaml)
[ ${#kernels[@]} -gt 0 ] || kernels=("${STICKBREAKING_ATTENTION:-}")
((steps >= 8)) || { echo "compare_gpu: --steps must be at least 8" >&2; exit 2; }

sbtrain=$(scripts/find_sbtrain.sh)
python=${PYTHON:-$(scripts/python.sh)}
results=$(mktemp -d -t sbtrain-bench.XXXXXX)
trap 'rm -rf "$results"' EXIT

has_stickbreaking() { grep -q 'type: *stickbreaking' "$1"; }

run_sbtrain() {  # CONFIG BATCH
  local options=(--config "$1" --steps "$steps" "--train.batch=$2" "--train.micro_batch=$2")
  # Only stick-breaking has this key; a softmax model refuses it.
  if has_stickbreaking "$1"; then
    options+=(--model.attention.skip_epsilon=0)
  fi
  "$sbtrain" bench train --json "${options[@]}"
}

run_pytorch() {  # CONFIG BATCH KERNELS
  local flat
  flat=$results/$(basename "$1" .yaml).flat
  "$sbtrain" config show --flat --config "$1" >"$flat"
  # shellcheck disable=SC2086
  "$python" tests/bench/pytorch_gpu.py --config "$flat" --batch "$2" --steps "$steps" \
    --stickbreaking "$3" ${PYTORCH_OPTIONS:-}
}

# Prints the best tokens/s of the JSON lines in a file, or nothing if the file has none.
best() {
  [ ! -s "$1" ] || "$python" -c '
import json, sys
print(round(max(json.loads(line)["tokens_per_second"] for line in open(sys.argv[1]) if line.strip())))
' "$1"
}

failed=0
failure() {
  echo "$*" >&2
  failed=1
}
compare() {  # CONFIG BATCH KERNELS; a row
  local name round own other ratio=-
  name=$(basename "$1" .yaml)
  [ "$3" != fla ] || name=$name,fla
  for ((round = 1; round <= rounds; ++round)); do
    echo "$name, round $round of $rounds" >&2
    run_sbtrain "$1" "$2" >>"$results/$name.sbtrain" || failure "$name: sbtrain failed"
    run_pytorch "$1" "$2" "$3" >>"$results/$name.pytorch" || failure "$name: PyTorch failed"
  done
  own=$(best "$results/$name.sbtrain")
  other=$(best "$results/$name.pytorch")
  [ -z "$own" ] || [ -z "$other" ] || ratio=$(awk "BEGIN { printf \"%.2fx\", $own / $other }")
  printf '%-14s %8s %14s %16s %10s\n' "$name" "$2" "${own:-failed}" "${other:-not available}" "$ratio"
}

printf '%-14s %8s %14s %16s %10s\n' config batch 'sbtrain tok/s' 'PyTorch tok/s' ratio
for config in "${configs[@]}"; do
  case $(basename "$config") in
    350m*) batch=${BATCH:-16} ;;
    *) batch=${BATCH:-8} ;;
  esac
  if has_stickbreaking "$config"; then
    for kernel in "${kernels[@]}"; do compare "$config" "$batch" "$kernel"; done
  else
    compare "$config" "$batch" ""
  fi
done
exit $failed
