#!/usr/bin/env bash
# Trains the two small models of configs/maps_*.yaml on repeated associative recall (MQRAR), draws
# what their heads attend to, and measures how far that is where the answers are.
#
#   scripts/attention_maps.sh [--out DIR] [--example N] [--examples N] [MODEL...] [-- TRAINING OPTIONS]
#   scripts/attention_maps.sh sb -- --device=cuda
#
# MODEL is the part of the file's name behind maps_; default: sb rope. DIR (default: runs/maps) gets
# for each a run folder, MODEL.png and the maps behind it in MODEL_maps/, of held-out example N
# (--example, default 0), and MODEL.json, the overlap with the true positions over --examples
# (default 100). An interrupted training continues and a complete one is not repeated, so the same
# command goes on after a stop. SBTRAIN names another program than the release build's, PYTHON
# another python3.
set -euo pipefail

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=maps
models=(sb rope)
declare -A values=([out]=runs/maps [example]=0 [examples]=100)
# shellcheck source=scripts/experiment.sh
. scripts/experiment.sh
parse_command_line "$called_from" "$@"
out=${values[out]}
draws=true
can_draw scripts/plot_attention.py || draws=false

for model in "${models[@]}"; do
  echo "attention_maps: training $model"
  # 85: stopped by a signal and saved; the same command continues
  "$sbtrain" train --config "configs/maps_$model.yaml" --out "$out/$model" "${options[@]}" || exit
  evaluate=("$sbtrain" eval --checkpoint "$out/$model" --device "$device")
  "${evaluate[@]}" # accuracy
  "${evaluate[@]}" --task-positions "${values[examples]}" --json "$out/$model.json"
  "${evaluate[@]}" --task-positions "${values[examples]}"
  "${evaluate[@]}" --attention-maps "$out/${model}_maps" --task-example "${values[example]}"
  ! $draws || "$python" scripts/plot_attention.py "$out/${model}_maps" -o "$out/$model.png"
done
