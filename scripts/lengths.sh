#!/usr/bin/env bash
# Trains the models of configs/lengths_*.yaml and measures their loss on longer texts than they were
# trained with.
#
#   scripts/lengths.sh [--out DIR] [--lengths N,N,...] [--tokens N] [MODEL...] [-- TRAINING OPTIONS]
#   scripts/lengths.sh sb rope -- --device=cuda
#
# MODEL is the part of the file's name behind lengths_; default: all of them. DIR (default:
# runs/lengths) gets a run folder, MODEL.json and MODEL_same.json for each, and three plots. What is
# there already is skipped and an interrupted run continues, so the same command goes on after a
# stop. --lengths and --tokens (for each length) change what is evaluated. The text comes from
# data/fetch_corpus.py the first time. SBTRAIN names another program than the release build's,
# PYTHON another python3.
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

data=corpus/lengths # as the configurations name it
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

# measure NAME RUN OPTIONS...: NAME.json and, with the same targets for all lengths, NAME_same.json.
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
    # 85: stopped by a signal and saved; the same command continues
    "$sbtrain" train --config "configs/lengths_$model.yaml" --out "$out/$model" "${options[@]}" || exit
  fi
  echo "lengths: evaluating $model"
  measure "$model" "$model"
  if [ "$model" = rope ]; then
    measure rope_dynamic_ntk rope --rope-scaling dynamic_ntk
  fi
done

# ---- Plots ------------------------------------------------------------------------------------

# Of everything that is there, in this order.
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
  # None rises so far that the others would be one line.
  plot=("$python" scripts/plot_lengths.py --max-loss 5 --labels "${labels#,}")
  "${plot[@]}" "${files[@]}" -o "$out/lengths.png"
  "${plot[@]}" "${files[@]}" --positions -o "$out/positions.png"
  "${plot[@]}" "${same[@]}" -o "$out/lengths_same.png" \
    --title "The same $targets targets with more and more context"
fi
