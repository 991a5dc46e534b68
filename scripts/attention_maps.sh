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
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

out=runs/maps
python=${PYTHON:-/usr/bin/python3} # the one that Debian's matplotlib belongs to
models=()
options=()
example=0
examples=100

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --out | --example | --examples)
      [ $# -gt 1 ] || { echo "attention_maps: $1 needs a value" >&2; exit 2; }
      case $1 in
        --example) example=$2 ;;
        --examples) examples=$2 ;;
        *) case $2 in /*) out=$2 ;; *) out=$called_from/$2 ;; esac ;;
      esac
      shift 2
      ;;
    --) shift; options=("$@"); break ;;
    -*) echo "attention_maps: unknown option '$1'; options of the training go behind --" >&2; exit 2 ;;
    *) models+=("$1"); shift ;;
  esac
done
[ ${#models[@]} -gt 0 ] || models=(sb rope)
for model in "${models[@]}"; do
  [ -f "configs/maps_$model.yaml" ] || { echo "attention_maps: no configs/maps_$model.yaml" >&2; exit 2; }
done
sbtrain=$(scripts/find_sbtrain.sh)
mkdir -p "$out"

# The device of the training, for the evaluation.
device=auto
for option in "${options[@]}"; do
  case $option in --device=*) device=${option#--device=} ;; esac
done
draws=true
if ! "$python" -c 'import matplotlib' 2>/dev/null; then
  draws=false
  echo "attention_maps: $python has no matplotlib, so nothing is drawn; scripts/plot_attention.py does it" >&2
fi

for model in "${models[@]}"; do
  echo "attention_maps: training $model"
  # 85: stopped by a signal and saved; the same command continues
  "$sbtrain" train --config "configs/maps_$model.yaml" --out "$out/$model" "${options[@]}" || exit
  evaluate=("$sbtrain" eval --checkpoint "$out/$model" --device "$device")
  "${evaluate[@]}" # accuracy
  "${evaluate[@]}" --task-positions "$examples" --json "$out/$model.json"
  "${evaluate[@]}" --task-positions "$examples"
  "${evaluate[@]}" --attention-maps "$out/${model}_maps" --task-example "$example"
  ! $draws || "$python" scripts/plot_attention.py "$out/${model}_maps" -o "$out/$model.png"
done
