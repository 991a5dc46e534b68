#!/usr/bin/env bash
# From a bare Debian 12 or Ubuntu 24.04 to a small trained language model and a text it wrote.
#
#   scripts/quickstart.sh
#
# Installs what is missing, builds what this machine can run, fetches English text, and trains a
# tokenizer and the model of configs/tiny_sb.yaml, for fewer steps than that file says. Steps
# that are done already are skipped, and an interrupted run continues.
# All files that it writes are in build/, corpus/, runs/ and third_party/ of this checkout.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
called_from=$PWD
cd "$root"

config=configs/tiny_sb.yaml
shorter=(--stages.0.length="1200 steps") # loses most of what the full length does, in little more than half the time
run=runs/tiny_sb
text=corpus/text
tokenizer=corpus/tokenizer.model # this and the next two have the names in the configuration
train_data=corpus/train.h5
validation_data=corpus/val.h5
python=/usr/bin/python3 # the python that Debian's matplotlib is installed for
logs=build/quickstart
sbtrain=build/release/sbtrain
steps=7

case ${1:-} in
  '') ;;
  -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "quickstart: takes no arguments" >&2; exit 2 ;;
esac
mkdir -p "$logs"

# ---- Announcing steps ------------------------------------------------------------------------

number=0
current=
started=0
announce() { # announce WHAT [NOTE]
  current=$1
  number=$((number + 1))
  started=$SECONDS
  printf '[%d/%d] %s%s\n' "$number" "$steps" "$current" "${2:+ ($2)}"
}
finished() { printf '      %s (%d s)\n' "${1:-done}" $((SECONDS - started)); }

# On a terminal, shows the latest line that a command has printed.
last_line() {
  if [ ! -t 1 ]; then
    cat >/dev/null
    return
  fi
  local line width
  width=$(($(tput cols 2>/dev/null || echo 80) - 8))
  while IFS= read -r line; do printf '\r\033[K      %s' "${line:0:width}"; done
  printf '\r\033[K'
}

# quietly NAME COMMAND... writes the output to a log, whose end is shown when the command fails.
quietly() {
  local log=$logs/$1.log
  shift
  if ! "$@" 2>&1 | tee "$log" | last_line; then
    tail -n 30 "$log" >&2
    printf '\nquickstart: step %d (%s) failed. The log is %s\n' \
      "$number" "$current" "$root/$log" >&2
    exit 1
  fi
}

# ---- The steps --------------------------------------------------------------------------------

has_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }
has_nvcc() { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; }

# A build folder that exists keeps what it has; a new one gets no tests, and CUDA where there is a GPU.
build() {
  if [ -f build/release/CMakeCache.txt ]; then
    cmake build/release --log-level=WARNING
  else
    cmake --preset release --log-level=WARNING -DSBTRAIN_TESTS=OFF -DSBTRAIN_CUDA="$cuda"
  fi && cmake --build build/release --target sbtrain --parallel "$(nproc)"
}

# make_file FILE SOURCE COMMAND... runs the command unless FILE exists and is no older than SOURCE. The
# commands give a file its name only when it is complete, so a file that exists is complete.
make_file() {
  local file=$1 source=$2
  shift 2
  if [ ! -f "$file" ] || [ "$source" -nt "$file" ]; then
    rm -f "$file"
    quietly "$(basename "$file")" "$@"
  fi
}

train() {
  local status=0
  "$sbtrain" train --config "$config" "${shorter[@]}" || status=$?
  case $status in
    0) ;;
    85)
      printf '\nStopped and saved. Run scripts/quickstart.sh again to continue.\n'
      exit 85
      ;;
    *)
      printf '\nquickstart: step %d (%s) failed with exit status %d\n' \
        "$number" "$current" "$status" >&2
      exit "$status"
      ;;
  esac
}

cuda=AUTO
packages=(build quickstart)
without=
if ! has_gpu; then
  cuda=OFF
  packages+=(--without-cuda)
  if has_nvcc; then
    without="without the GPU backend, since no NVIDIA GPU is here; cmake --preset release && cmake --build build/release adds it"
  fi
elif ! has_nvcc; then
  without="without the GPU backend, since nvcc is missing: install the CUDA toolkit 13.0, remove build/ and run this again"
fi

announce "Installing packages" "only those that are missing; asks for sudo where it is needed"
quietly packages scripts/setup.sh "${packages[@]}"
finished

announce "Building sbtrain" "$(nproc) cores; a few minutes the first time"
[ -z "$without" ] || printf '      %s\n' "$without"
quietly build build
finished
built=$SECONDS

announce "Fetching English text" "documentation packages of the distribution"
if [ ! -f "$logs/text" ] || [ ! -d "$text/train" ]; then
  quietly text "$python" data/fetch_corpus.py --small --output "$text"
  touch "$logs/text"
fi
finished "$(du -sh "$text/train" | cut -f1)B in $text"

announce "Training a tokenizer of 4096 pieces"
make_file "$tokenizer" "$logs/text" "$sbtrain" tokenizer train --input "$text/train" --vocab 4096 \
  --output "$tokenizer"
finished "$tokenizer"

announce "Turning the text into tokens"
make_file "$train_data" "$tokenizer" "$sbtrain" prepare --tokenizer "$tokenizer" --input "$text/train" \
  --output "$train_data"
make_file "$validation_data" "$tokenizer" "$sbtrain" prepare --tokenizer "$tokenizer" \
  --input "$text/validation" --output "$validation_data"
finished "$train_data, $validation_data"
prepared=$SECONDS

announce "Training $config for 1200 steps" "a minute or two on 2 cores; Ctrl-C saves and stops"
train
finished
trained=$SECONDS

announce "Drawing the loss and writing a text"
quietly plot "$python" scripts/plot_loss.py "$run"
printf '\n'
"$sbtrain" generate --checkpoint "$run" --prompt "The kernel" --max-tokens 120 \
  --temperature 0.8 --top-p 0.95 --seed 1
printf '\n'
finished

# ---- Summary ----------------------------------------------------------------------------------

"$python" - "$run/metrics.jsonl" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    records = [json.loads(line) for line in file]
loss = [(r["step"], r["validation/loss"]) for r in records if "validation/loss" in r]
bits = [r["validation/bits_per_byte"] for r in records if "validation/bits_per_byte" in r]
(first_step, first), (last_step, last) = loss[0], loss[-1]
print(f"Validation loss  {first:.3f} -> {last:.3f} nats per token, {100 * (1 - last / first):.0f}% "
      f"less (step {first_step} -> {last_step})")
if bits:
    print(f"                 {bits[0]:.3f} -> {bits[-1]:.3f} bits per byte")
PYTHON
place=
[ "$called_from" = "$root" ] || place=", in $root"
cat <<EOF_SUMMARY
Time             $built s packages and build, $((prepared - built)) s data, $((trained - prepared)) s training, $SECONDS s in all

The model is in $run, its loss curve in $run/loss.png. You can try next$place:

  $sbtrain generate --checkpoint $run --prompt "The state" --seed 2
      another text
  $sbtrain --config configs/tiny_rope.yaml
      the same model with softmax attention and rotary positions
  $sbtrain --config $config --name other --train.lr=2e-3
      another learning rate; every key of the configuration is also an option
  $sbtrain train --config configs/1b_sb.yaml --dry-run
      what a model of a billion parameters would need
  $sbtrain --help

README.md says how to train on text of your own.
EOF_SUMMARY
