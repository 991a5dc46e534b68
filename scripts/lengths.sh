#!/usr/bin/env bash
# Trains the models of configs/lengths_*.yaml and measures their loss on longer texts than those that
# they were trained on.
#
#   scripts/lengths.sh [--out DIR] [--seeds N,N,...] [--rates MODEL=LR,...] [--jobs N] [--corpus FOLDER]
#                      [--lengths N,N,...] [--tokens N] [MODEL...] [-- TRAINING OPTIONS]
#   scripts/lengths.sh sb rope -- --device=cuda
#
# MODEL is the part of the file's name after lengths_; the default is all models. DIR (default: runs/lengths) gets a run
# folder, MODEL.json, MODEL_same.json and MODEL_benefit.json for each model, three plots, tables.md, and all results in
# one file, results.jsonl. With --seeds each model is trained with each of these seeds, in DIR/seed-N; the plots show
# the mean and the range over the seeds, the tables the mean and the standard deviation, and intervals over the
# documents. --rates sb*=4e-3,rope=2e-3 gives models learning rates of their own (default: coca*=2e-3,none=2e-3,
# sb_4096=2e-3; that of the others is 4e-3). Each GPU trains and measures one model at a time; --jobs N sets their
# number, and they share the GPUs evenly: of more than there are GPUs, several run on each. With several at a time
# each writes to MODEL.log beside its run. If one fails, the others go on, and the script ends with its exit code.
# Results that exist already are skipped and an interrupted run continues, so the same command continues after a stop
# (exit code 85). --lengths and --tokens (per length; default: 2097152) change what is evaluated. --corpus names the
# text: a folder that data/package_corpus.py or scripts/optimizers.py pack has made; the default is corpus/packages
# where that exists, otherwise corpus/lengths, whose text the first run fetches with data/fetch_corpus.py. The
# variable SBTRAIN names a program to use instead of the release build's, PYTHON another python3.
# shellcheck disable=SC2317 # jobs call its functions
set -euo pipefail

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=lengths
models=(sb sb_remainder sb_bias rope alibi fire none window coca rebased rebased_conv)
declare -A values=([out]=runs/lengths [seeds]="" [lengths]="512,1024,2048,4096,8192,16384"
  [tokens]=2097152 [rates]="coca*=2e-3,none=2e-3,sb_4096=2e-3" [jobs]="" [corpus]="")
targets=256
# shellcheck source=scripts/experiment.sh
. scripts/experiment.sh
parse_command_line "$called_from" "$@"
out=${values[out]}
IFS=, read -ra seeds <<<"${values[seeds]}"
for seed in "${seeds[@]}"; do
  [[ $seed =~ ^[0-9]+$ ]] || usage_error "--seeds: '$seed' is no seed"
done
check_rates

# ---- Data -------------------------------------------------------------------------------------

find_corpus
data=corpus/lengths
if [ "$corpus" = $data ]; then
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
fi

# ---- Training and evaluation ------------------------------------------------------------------

# The results of a model, by name: with rotary positions, which scaling can stretch, those as well. The paper of CoCA
# scales its own.
results_of() { # results_of MODEL
  echo "$1"
  case $1 in rope* | coca*) echo "$1_dynamic_ntk" ;; esac
}

is_measured() { # is_measured FOLDER MODEL
  local name result
  for name in $(results_of "$2"); do
    for result in "$1/$name"{,_same,_benefit}.json; do [ -f "$result" ] || return 1; done
  done
}

# measure FOLDER NAME RUN OPTIONS... writes FOLDER/NAME.json, with the same targets for all lengths
# FOLDER/NAME_same.json, and what the longest context is worth FOLDER/NAME_benefit.json.
measure() {
  local result=$1/$2 run=$1/$3
  shift 3
  local common=(--tokens-per-length "${values[tokens]}" --recall "$@")
  local lengths=(--lengths "${values[lengths]}")
  evaluate "$result.json" "$run" "${common[@]}" "${lengths[@]}"
  evaluate "${result}_same.json" "$run" "${common[@]}" "${lengths[@]}" --same-targets "$targets"
  evaluate "${result}_benefit.json" "$run" "${common[@]}" --benefit "${values[lengths]##*,}" --benefit-targets "$targets"
}

# train_and_measure FOLDER MODEL TRAINING OPTIONS...
train_and_measure() {
  local folder=$1 model=$2 name
  shift 2
  [ -f "$folder/$model.json" ] || complete_run "$folder/$model" "configs/lengths_$model.yaml" "$@"
  for name in $(results_of "$model"); do
    if [ "$name" = "$model" ]; then
      measure "$folder" "$name" "$model"
    else
      measure "$folder" "$name" "$model" --rope-scaling dynamic_ntk
    fi
  done
}

folders=("${seeds[@]/#/$out/seed-}")
[ ${#seeds[@]} -gt 0 ] || folders=("$out")
for model in "${models[@]}"; do
  for folder in "${folders[@]}"; do
    if is_measured "$folder" "$model"; then continue; fi
    seed=() name=$model
    if [ "$folder" != "$out" ]; then
      seed=(--seed="${folder##*/seed-}") name=${folder##*/}/$model
    fi
    mkdir -p "$folder"
    find_rate "$model"
    start_job "$name" train_and_measure "$folder" "$model" "${corpus_options[@]}" "${rate_options[@]}" "${options[@]}" \
      "${seed[@]}"
  done
done
finish_jobs

# ---- Plots and tables -------------------------------------------------------------------------

# They show every result that exists, in this order.
results=("sb=stick-breaking" "sb_bias=stick-breaking, remainder to a learned vector"
  "sb_remainder=stick-breaking, remainder to the own value" "sb_norm=stick-breaking, head norm"
  "sb_norm_bias=stick-breaking, head norm, remainder to a learned vector" "sb_gate=stick-breaking, forget gate"
  "sb_gate_penalty=stick-breaking, forget gate and a loss that lowers it" "sb_heads3=stick-breaking, three heads of 128" "sb_current=stick-breaking, attending the token itself"
  "sb_4096=stick-breaking, rows of 4096" "window_128=RoPE in a window of 128" "window=RoPE in a window of 256"
  "window_512=RoPE in a window of 512" "alibi=ALiBi" "rope=RoPE" "rope_dynamic_ntk=RoPE, dynamic NTK at evaluation"
  "rope_4096=RoPE, rows of 4096" "rope_4096_dynamic_ntk=RoPE, rows of 4096, dynamic NTK at evaluation" "fire=FIRE"
  "fire_128=FIRE, L0 of 128" "none=no position" "coca=CoCA" "coca_dynamic_ntk=CoCA, dynamic NTK at evaluation"
  "coca_strict=CoCA, strict" "coca_strict_dynamic_ntk=CoCA, strict, dynamic NTK at evaluation" "rebased=ReBased"
  "rebased_conv=ReBased and short convolutions in turns")
files=()
same=()
benefits=()
labels=
against=()
for result in "${results[@]}"; do
  for folder in "${folders[@]}"; do
    name=$folder/${result%%=*}
    for file in "$name"{,_same,_benefit}.json; do [ -f "$file" ] || continue 2; done
    files+=("$name.json")
    same+=("${name}_same.json")
    benefits+=("${name}_benefit.json")
    labels=$labels,${result#*=}
    [ "${result%%=*}" != sb ] || against=(--against stick-breaking)
  done
done
if [ ${#files[@]} -gt 0 ]; then
  all=(--labels "${labels#,}$labels$labels" "${files[@]}" "${same[@]}" "${benefits[@]}")
  "$python" scripts/tables.py --bootstrap 1000 "${against[@]}" "${all[@]}" >"$out/tables.md"
  "$python" scripts/collect_results.py "${all[@]}" -o "$out/results.jsonl"
  echo "lengths: $out/tables.md"
fi
if [ ${#files[@]} -gt 0 ] && can_draw scripts/plot_lengths.py; then
  # The loss without positions rises so far that the other curves would merge into one line.
  plot=("$python" scripts/plot_lengths.py --max-loss 5 --labels "${labels#,}")
  "${plot[@]}" "${files[@]}" -o "$out/lengths.png"
  "${plot[@]}" "${files[@]}" --positions -o "$out/positions.png"
  "${plot[@]}" "${same[@]}" -o "$out/lengths_same.png" \
    --title "The same $targets targets with more and more context"
fi
end_with_jobs
