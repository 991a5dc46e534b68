#!/usr/bin/env bash
# Trains the models of configs/lengths_*.yaml and measures their loss on longer texts than those that
# they were trained on.
#
#   scripts/lengths.sh [--out DIR] [--lengths N,N,...] [--tokens N] [MODEL...] [-- TRAINING OPTIONS]
#   scripts/lengths.sh sb rope -- --device=cuda
#
# MODEL is the part of the file's name after lengths_; the default is all models. DIR (default:
# runs/lengths) gets a run folder, MODEL.json and MODEL_same.json for each model, and three plots.
# Results that exist already are skipped and an interrupted run continues, so the same command
# continues after a stop. --lengths and --tokens (per length) change what is evaluated. The first run
# fetches the text with data/fetch_corpus.py. The variable SBTRAIN names a program to use instead of the
# release build's, PYTHON another python3.
set -euo pipefail

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=lengths
models=(sb sb_remainder sb_bias rope alibi fire none window coca rebased rebased_conv)
declare -A values=([out]=runs/lengths [lengths]="512,1024,2048,4096,8192,16384" [tokens]=524288)
targets=256
# shellcheck source=scripts/experiment.sh
. scripts/experiment.sh
parse_command_line "$called_from" "$@"
out=${values[out]}

# ---- Data -------------------------------------------------------------------------------------

data=corpus/lengths # the folder that the configurations name
if [ ! -f $data/tokenizer.model ] || [ ! -f $data/train.h5 ]; then
  "$python" data/fetch_corpus.py --output $data/text
fi
if [ ! -f $data/tokenizer.model ]; then
  "$sbtrain" tokenizer train --input $data/text/train --vocab 32000 --output $data/tokenizer.model
fi
for part in train:train validation:val; do
  file=$data/${part#*:}.h5
  [ -f "$file" ] || "$sbtrain" prepare --tokenizer $data/tokenizer.model \
    --input "$data/text/${part%:*}" --output "$file"
done

# ---- Training and evaluation ------------------------------------------------------------------

# measure NAME RUN OPTIONS... writes NAME.json and, with the same targets for all lengths,
# NAME_same.json.
measure() {
  local name=$1 run=$2
  shift 2
  local common=(--checkpoint "$out/$run" --device "$device" --lengths "${values[lengths]}"
    --tokens-per-length "${values[tokens]}" --recall "$@")
  [ -f "$out/$name.json" ] || "$sbtrain" eval "${common[@]}" --json "$out/$name.json"
  [ -f "${out}/${name}_same.json" ] ||
    "$sbtrain" eval "${common[@]}" --same-targets "$targets" --json "${out}/${name}_same.json"
}

for model in "${models[@]}"; do
  if [ ! -f "$out/$model.json" ]; then
    echo "lengths: training $model"
    # Exit code 85 means that a signal stopped the run after it had saved: the same command continues.
    "$sbtrain" train --config "configs/lengths_$model.yaml" --out "$out/$model" "${options[@]}" || exit
  fi
  echo "lengths: evaluating $model"
  measure "$model" "$model"
  if [ "$model" = rope ]; then
    measure rope_dynamic_ntk rope --rope-scaling dynamic_ntk
  fi
done

# ---- Plots ------------------------------------------------------------------------------------

# The plots show every result that exists, in this order.
results=("sb=stick-breaking" "sb_bias=stick-breaking with bias" "sb_remainder=stick-breaking with value"
  "rope=RoPE" "rope_dynamic_ntk=RoPE with dynamic NTK" "alibi=ALiBi" "fire=FIRE" "none=no position"
  "window=RoPE in a window" "coca=CoCA" "rebased=ReBased" "rebased_conv=ReBased with convolutions")
files=()
same=()
labels=
for result in "${results[@]}"; do
  name=$out/${result%%=*}
  if [ ! -f "$name.json" ] || [ ! -f "${name}_same.json" ]; then continue; fi
  files+=("$name.json")
  same+=("${name}_same.json")
  labels=$labels,${result#*=}
done
if can_draw scripts/plot_lengths.py; then
  # The loss without positions rises so far that the other curves would merge into one line.
  plot=("$python" scripts/plot_lengths.py --max-loss 5 --labels "${labels#,}")
  "${plot[@]}" "${files[@]}" -o "$out/lengths.png"
  "${plot[@]}" "${files[@]}" --positions -o "$out/positions.png"
  "${plot[@]}" "${same[@]}" -o "$out/lengths_same.png" \
    --title "The same $targets targets with more and more context"
fi
