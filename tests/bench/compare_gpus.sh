#!/usr/bin/env bash
# Times one training step of sbtrain and of PyTorch with FSDP2 on the GPUs of this machine, alternately.
#
#   tests/bench/compare_gpus.sh [--gpus N,N,...] [--rounds N] [--steps N] [CONFIG...]
#
# CONFIG    default: configs/1b_rope.yaml configs/1b_sb.yaml configs/3b_rope.yaml configs/3b_sb.yaml; each GPU
#           has one micro-batch a step: 8 sequences, 4 for 3B, 16 for 350M (BATCH overrides it)
# --gpus    numbers of GPUs (default 2); with 1 the first row shows what several are compared with
# --rounds  runs of each, alternating (default 1); the best median of each counts
# --steps   timed steps of a run (default 20, at least 8)
#
# Prints tokens/s of each GPU. PYTHON chooses the interpreter (default: that of scripts/python.sh), which needs
# PyTorch and, for stick-breaking, fla-core and einops. SBTRAIN is the program, OWN_OPTIONS holds further
# options of it, such as --train.gather_engine=copy_engines, PYTORCH_OPTIONS those of pytorch_fsdp2.py.
# Stick-breaking runs with skip_epsilon 0, since the Triton kernels skip nothing. The exit code is 1 if a program
# failed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

gpus=2
rounds=1
steps=20
configs=()
while [ $# -gt 0 ]; do
  case $1 in
    --gpus) gpus=${2:?--gpus needs a list}; shift ;;
    --rounds) rounds=${2:?--rounds needs a number}; shift ;;
    --steps) steps=${2:?--steps needs a number}; shift ;;
    -h | --help) sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "compare_gpus: unknown option $1" >&2; exit 2 ;;
    *) configs+=("$1") ;;
  esac
  shift
done
[ ${#configs[@]} -gt 0 ] ||
  configs=(configs/1b_rope.yaml configs/1b_sb.yaml configs/3b_rope.yaml configs/3b_sb.yaml)
((steps >= 8)) || { echo "compare_gpus: --steps must be at least 8" >&2; exit 2; }

sbtrain=$(scripts/find_sbtrain.sh)
python=${PYTHON:-$(scripts/python.sh)}
results=$(mktemp -d -t sbtrain-bench.XXXXXX)
trap 'rm -rf "$results"' EXIT

run_sbtrain() {  # CONFIG BATCH GPUS
  local options=(--config "$1" --gpus "$3" --steps "$steps" "--train.batch=$(($2 * $3))"
    "--train.micro_batch=$2")
  # Only stick-breaking has this key; a softmax model refuses it.
  if grep -q 'type: *stickbreaking' "$1"; then
    options+=(--model.attention.skip_epsilon=0)
  fi
  # shellcheck disable=SC2086
  "$sbtrain" bench train --json "${options[@]}" ${OWN_OPTIONS:-}
}

run_pytorch() {  # CONFIG BATCH GPUS
  local flat
  flat=$results/$(basename "$1" .yaml).flat
  "$sbtrain" config show --flat --config "$1" >"$flat"
  # shellcheck disable=SC2086
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$3" \
    tests/bench/pytorch_fsdp2.py --config "$flat" --batch "$2" --steps "$steps" ${PYTORCH_OPTIONS:-}
}

# Prints the best tokens/s of a GPU in the JSON lines of a file, and the memory in GiB of that run; nothing if
# the file has no line.
best() {  # FILE GPUS
  [ ! -s "$1" ] || "$python" -c '
import json, sys
runs = [json.loads(line) for line in open(sys.argv[1]) if line.startswith("{")]
run = max(runs, key=lambda each: each["tokens_per_second"])
print(round(run["tokens_per_second"] / int(sys.argv[2])),
      round(run.get("memory_used_bytes", run["memory_bytes"]) / 2**30, 1))
' "$1" "$2"
}

failed=0
failure() {
  echo "$*" >&2
  failed=1
}
printf '%-10s %5s %6s %14s %9s %14s %9s %8s\n' config GPUs batch 'sbtrain tok/s' GiB 'FSDP2 tok/s' GiB ratio
for config in "${configs[@]}"; do
  name=$(basename "$config" .yaml)
  case $name in
    350m*) batch=${BATCH:-16} ;;
    3b*) batch=${BATCH:-4} ;;
    *) batch=${BATCH:-8} ;;
  esac
  for count in ${gpus//,/ }; do
    for ((round = 1; round <= rounds; ++round)); do
      echo "$name on $count, round $round of $rounds" >&2
      run_sbtrain "$config" "$batch" "$count" >>"$results/$name.$count.sbtrain" ||
        failure "$name: sbtrain failed"
      run_pytorch "$config" "$batch" "$count" >>"$results/$name.$count.pytorch" ||
        failure "$name: PyTorch failed"
    done
    read -r own own_memory <<<"$(best "$results/$name.$count.sbtrain" "$count")"
    read -r other other_memory <<<"$(best "$results/$name.$count.pytorch" "$count")"
    ratio=-
    [ -z "$own" ] || [ -z "$other" ] || ratio=$(awk "BEGIN { printf \"%.2fx\", $own / $other }")
    printf '%-10s %5s %6s %14s %9s %14s %9s %8s\n' "$name" "$count" "$batch" "${own:-failed}" \
      "${own_memory:--}" "${other:-failed}" "${other_memory:--}" "$ratio"
  done
done
exit $failed
