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
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

out=runs/lengths
python=${PYTHON:-/usr/bin/python3} # the one that Debian's matplotlib belongs to
models=()
options=()
lengths=512,1024,2048,4096,8192,16384
tokens=524288
targets=256

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --out | --lengths | --tokens)
      [ $# -gt 1 ] || { echo "lengths: $1 needs a value" >&2; exit 2; }
      case $1 in
        --lengths) lengths=$2 ;;
        --tokens) tokens=$2 ;;
        *) case $2 in /*) out=$2 ;; *) out=$called_from/$2 ;; esac ;;
      esac
      shift 2
      ;;
    --) shift; options=("$@"); break ;;
    -*) echo "lengths: unknown option '$1'; options of the training go behind --" >&2; exit 2 ;;
    *) models+=("$1"); shift ;;
  esac
done
if [ ${#models[@]} -eq 0 ]; then
  models=(sb sb_remainder sb_bias rope alibi fire none window coca rebased)
fi
for model in "${models[@]}"; do
  [ -f "configs/lengths_$model.yaml" ] || { echo "lengths: no configs/lengths_$model.yaml" >&2; exit 2; }
done
sbtrain=$(scripts/find_sbtrain.sh)
mkdir -p "$out"

# The device of the training, for the evaluation.
device=auto
for option in "${options[@]}"; do
  case $option in --device=*) device=${option#--device=} ;; esac
done

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
  local common=(--checkpoint "$out/$run" --device "$device" --lengths "$lengths"
    --tokens-per-length "$tokens" --recall "$@")
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

# Of everything that is there, in the order of the list.
files=()
same=()
for name in sb sb_remainder sb_bias rope rope_dynamic_ntk alibi fire none window coca rebased; do
  [ ! -f "$out/$name.json" ] || files+=("$out/$name.json")
  [ ! -f "${out}/${name}_same.json" ] || same+=("${out}/${name}_same.json")
done
if "$python" -c 'import matplotlib' 2>/dev/null; then
  "$python" scripts/plot_lengths.py "${files[@]}" -o "$out/lengths.png"
  "$python" scripts/plot_lengths.py "${files[@]}" --positions -o "$out/positions.png"
  "$python" scripts/plot_lengths.py "${same[@]}" -o "$out/lengths_same.png" \
    --title "The same $targets targets with more and more context"
else
  echo "lengths: $python has no matplotlib, so nothing is drawn; scripts/plot_lengths.py does it" >&2
fi
