#!/usr/bin/env bash
# Compares two builds of sbtrain on this machine: whether they compute the same bits, and which is
# faster. For changes that should alter neither.
#
#   tests/bench/compare_builds.sh [options] OLD NEW CONFIG...
#
# OLD, NEW       the two programs, such as build/release/sbtrain of two worktrees
# CONFIG         configurations of models; data, batch and length are replaced by small ones
# --device NAME  cpu or cuda (default: auto)
# --steps N      optimizer steps of each run whose bits are compared (default 20)
# --layers N     blocks of the models that are compared (default: as configured), to save time
# --bench        also measures the time of a step, each build twice, alternating
# --batch N      sequences of a micro-batch, in both (default: as configured)
#
# Compares the bits of every number in metrics.jsonl except times, and of the weights and moments of
# the last checkpoint. The exit code is 1 if they differ.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
device=auto
steps=20
layers=
batch=
bench=0
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:?--device needs a name}; shift ;;
    --steps) steps=${2:?--steps needs a number}; shift ;;
    --layers) layers=${2:?--layers needs a number}; shift ;;
    --batch) batch=${2:?--batch needs a number}; shift ;;
    --bench) bench=1 ;;
    -h | --help) sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "compare_builds: unknown option $1" >&2; exit 2 ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
[ ${#arguments[@]} -ge 3 ] || { echo "compare_builds: OLD NEW CONFIG... (see --help)" >&2; exit 2; }
old=$(realpath "${arguments[0]}")
new=$(realpath "${arguments[1]}")
configs=("${arguments[@]:2}")

work=$(mktemp -d -t sbtrain-compare.XXXXXX)
trap 'rm -rf "$work"' EXIT

text=$root/tests/data/english.jsonl
"$old" tokenizer train --input "$text" --vocab 400 --output "$work/tokenizer.model" >"$work/log" 2>&1
"$old" prepare --tokenizer "$work/tokenizer.model" --input "$text" --output "$work/text.h5" \
  >"$work/log" 2>&1

# A configuration of the model of CONFIG that trains on the text above, or on its own task.
small_config() { # CONFIG
  echo "include: $(realpath "$1")"
  echo "stages: [{name: compare, length: $steps steps, schedule: {type: constant, warmup: 4 steps}}]"
  echo "validation: {every: 0 steps, tokens: 4096}"
  echo "checkpoint: {every: 0 steps}"
  echo "metrics: {every: 1, progress: false, tensorboard: false}"
  if ! "$old" config show --flat --config "$1" | grep -Eq '^data.task.type *[:=] *"?mqr?ar'; then
    echo "data: {sources: [{path: $work/text.h5}], validation: [], tokenizer: ''}"
  fi
  [ -z "$layers" ] || echo "model: {layers: $layers}"
}

sizes() { [ -z "$batch" ] || echo "--train.batch=$batch --train.micro_batch=$batch"; }

# Everything that a run computed, a line each.
results_of() { # PROGRAM NAME
  local out=$work/run
  rm -rf "$out"
  # shellcheck disable=SC2046
  if ! "$1" --config "$work/$2.yaml" --out "$out" --device "$device" $(sizes) >"$work/log" 2>&1; then
    tail -n 5 "$work/log" >&2
    echo "failed"
    return
  fi
  python3 - "$out" <<'PYTHON'
import glob, hashlib, json, sys
for line in open(sys.argv[1] + "/metrics.jsonl"):
    record = json.loads(line)
    print({k: v for k, v in record.items() if "time" not in k and "second" not in k
           and "mfu" not in k and "memory" not in k})
for path in sorted(glob.glob(sys.argv[1] + "/checkpoints/*/*.safetensors")
                   or glob.glob(sys.argv[1] + "/**/*.safetensors", recursive=True)):
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
        file.seek(8 + header)
        print(hashlib.file_digest(file, "sha256").hexdigest())
PYTHON
}

failed=0
for config in "${configs[@]}"; do
  name=$(basename "$config" .yaml)
  small_config "$config" >"$work/$name.yaml"
  results_of "$old" "$name" >"$work/old.txt"
  results_of "$new" "$name" >"$work/new.txt"
  if grep -qx failed "$work/old.txt" "$work/new.txt"; then
    printf '%-22s failed\n' "$name"
    failed=1
  elif cmp -s "$work/old.txt" "$work/new.txt"; then
    printf '%-22s same bits: %d records and files\n' "$name" "$(wc -l <"$work/old.txt")"
  else
    printf '%-22s different\n' "$name"
    diff "$work/old.txt" "$work/new.txt" | head -n 4 || true
    failed=1
  fi
done

if [ $bench = 1 ]; then
  printf "\ntokens/s, in turn:\n"
  for config in "${configs[@]}"; do
    line=
    for _ in 1 2; do
      for program in "$old" "$new"; do
        # shellcheck disable=SC2046
        line+=$("$program" bench train --json --config "$config" --device "$device" $(sizes) |
          python3 -c 'import json, sys; print(round(json.load(sys.stdin)["tokens_per_second"]))')
        line+=' '
      done
    done
    # shellcheck disable=SC2086
    printf '%-22s %8d %8d %8d %8d   (old new old new)\n' "$(basename "$config" .yaml)" $line
  done
fi
exit $failed
