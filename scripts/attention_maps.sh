#!/usr/bin/env bash
# Trains the two small models of configs/maps_*.yaml on repeated associative recall (MQRAR), draws
# what their heads attend to, and measures to what extent the heads attend to the answers.
#
#   scripts/attention_maps.sh [--out DIR] [--example N] [--examples N] [MODEL...] [-- TRAINING OPTIONS]
#   scripts/attention_maps.sh sb -- --device=cuda
#
# MODEL is the part of the file's name after maps_; the default is sb rope. For each model, DIR
# (default: runs/maps) gets a run folder, a plot MODEL.png and its data in MODEL_maps/, both of
# held-out example N (--example, default 0), and MODEL.json, the overlap with the true positions
# over --examples examples (default 100). An interrupted training continues and a complete one is
# not repeated, so the same command continues after a stop. The variable SBTRAIN names a program to
# use instead of the release build's, PYTHON another python3.
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
  # Exit code 85 means that a signal stopped the run after it had saved: the same command continues.
  "$sbtrain" train --config "configs/maps_$model.yaml" --out "$out/$model" "${options[@]}" || exit
  evaluate=("$sbtrain" eval --checkpoint "$out/$model" --device "$device")
  "${evaluate[@]}" # accuracy
  "${evaluate[@]}" --task-positions "${values[examples]}" --json "$out/$model.json"
  "${evaluate[@]}" --task-positions "${values[examples]}"
  "${evaluate[@]}" --attention-maps "$out/${model}_maps" --task-example "${values[example]}"
  ! $draws || "$python" scripts/plot_attention.py "$out/${model}_maps" -o "$out/$model.png"
done
