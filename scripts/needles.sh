#!/usr/bin/env bash
# Trains the models of configs/lengths_*.yaml to find needles in texts of at most 512 tokens, and asks for needles in
# texts of up to 16 times that length.
#
#   scripts/needles.sh [--out DIR] [--seeds N,N,...] [--rates MODEL=LR,...] [--jobs N] [--corpus FOLDER]
#                      [--lengths N,N,...] [--text STEPS] [--needles STEPS] [--tasks NAME,NAME,...] [--row TOKENS]
#                      [MODEL...] [-- TRAINING OPTIONS]
#   scripts/needles.sh sb rope alibi -- --device=cuda
#   scripts/needles.sh --out runs/needles_vt --row 1024 --tasks passkey,vt sb rope -- --device=cuda
#
# MODEL is the part of the file's name after lengths_. A model is trained on plain text, with a constant rate, and then
# on text and on samples of passkey, niah_single_1 and niah_multikey_2 in turns (sbtrain data tasks, with another seed
# than the evaluation's), at a rate of 2e-3 unless --rates gives others. --tasks names others of passkey, niah_single_1,
# niah_multikey_2 and vt; vt, whose prompt begins with a solved example of 500 tokens, needs rows of 1024 (--row;
# default: 512, a step has 65536 tokens in any case). Models with rotary positions are asked with dynamic NTK too. DIR
# (default: runs/needles) gets a run folder and MODEL-SEED.json for each model and seed (default: 1), tasks.md and
# tasks.png, and all results in one file, results.jsonl. Jobs, results that exist, interruptions and --corpus are as in
# scripts/lengths.sh, which has to have fetched the texts of corpus/lengths. --samples (1500) are the samples of each
# task and length to train on, --asked (100) the prompts. The variable SBTRAIN names a program to use instead of the
# release build's, PYTHON another python3.
# shellcheck disable=SC2317 # jobs call its functions
set -euo pipefail

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=lengths
models=(sb rope alibi window none)
declare -A values=([out]=runs/needles [seeds]=1 [lengths]="320,512,1024,2048,4096,8192" [text]=500 [needles]=700
  [samples]=1500 [tasks]="passkey,niah_single_1,niah_multikey_2" [row]=512
  [asked]=100 [rates]="*=2e-3" [jobs]="" [corpus]="")
# shellcheck source=scripts/experiment.sh
. scripts/experiment.sh
parse_command_line "$called_from" "$@"
out=${values[out]}
text=${values[text]}
tasks=${values[tasks]}
row=${values[row]}
case $row in 512 | 1024 | 2048 | 4096) ;; *) usage_error "--row: '$row' is not 512, 1024, 2048 or 4096" ;; esac
for task in ${tasks//,/ }; do
  case $task in
    passkey | niah_single_1 | niah_multikey_2) ;;
    vt) [ "$row" -ge 1024 ] || usage_error "--tasks: vt needs rows of at least 1024 tokens; give --row 1024" ;;
    *) usage_error "--tasks: '$task' is not passkey, niah_single_1, niah_multikey_2 or vt" ;;
  esac
done
check_rates
find_corpus
tokenizer=$corpus/tokenizer.model
[ -f "$corpus/train.h5" ] || usage_error "corpus/lengths/train.h5 is missing: scripts/lengths.sh fetches the text"

# ---- Data -------------------------------------------------------------------------------------

# What may be generated counts as length: 64 tokens of passkey, 30 of vt, 128 of the others. With the answer and eos the
# longest documents have just below 512 tokens, those of vt as many as a row.
lengths_of() {
  case $1 in
    passkey) echo 160,208,256,304,352,400,448,496,544 ;;
    vt) seq -s , 736 64 "$row" ;;
    *) echo 288,336,384,432,480,528,576,624 ;;
  esac
}
if [ ! -f "$out/needles.h5" ]; then
  inputs=()
  declare -A of_lengths=() # tasks of the same lengths share a file
  for task in ${tasks//,/ }; do
    lengths=$(lengths_of "$task")
    of_lengths[$lengths]=${of_lengths[$lengths]:+${of_lengths[$lengths]},}$task
  done
  for task in ${tasks//,/ }; do
    lengths=$(lengths_of "$task")
    group=${of_lengths[$lengths]}
    [ "${group%%,*}" = "$task" ] || continue
    inputs+=("$out/${task%%_*}.jsonl")
    "$sbtrain" data tasks --samples "${values[samples]}" --seed 7 --tokenizer "$tokenizer" --tasks "$group" \
      --lengths "$lengths" --output "$out/${task%%_*}.jsonl"
  done
  "$sbtrain" prepare --input "${inputs[@]}" --tokenizer "$tokenizer" --output "$out/needles.h5"
  rm "${inputs[@]}"
fi

# ---- Training and evaluation ------------------------------------------------------------------

ask() { # ask RESULT RUN OPTIONS...
  evaluate "$@" --tasks "$tasks" --lengths "${values[lengths]}" --samples "${values[asked]}"
}

train_and_ask() { # train_and_ask MODEL SEED
  local model=$1 run=$out/$1-$2
  cat >"$run.yaml" <<YAML
include: $PWD/configs/lengths_$model.yaml
name: $model
train: {sequence_length: $row, batch: $((65536 / row)), micro_batch: $((32768 / row))}
stages:
  - name: text
    length: ${values[text]} steps
    schedule: {type: constant, warmup: $((text / 5)) steps}
  - name: needles
    length: ${values[needles]} steps
    schedule: {type: cosine, final_ratio: 0.1}
    sources: [{path: $corpus/train.h5, weight: 2}, {path: $out/needles.h5, weight: 3}]
YAML
  [ -f "$run.json" ] ||
    complete_run "$run" "$run.yaml" --seed="$2" "${corpus_options[@]}" "${rate_options[@]}" "${options[@]}"
  ask "$run.json" "$run"
  case $model in
    rope* | coca*) ask "$out/${model}_dynamic_ntk-$2.json" "$run" --rope-scaling dynamic_ntk ;;
  esac
}

files=()
labels=
for model in "${models[@]}"; do
  for seed in ${values[seeds]//,/ }; do
    names=("$model")
    case $model in rope* | coca*) names+=("${model}_dynamic_ntk") ;; esac
    missing=
    for name in "${names[@]}"; do
      files+=("$out/$name-$seed.json")
      labels=$labels,$name
      [ -f "$out/$name-$seed.json" ] || missing=yes
    done
    find_rate "$model"
    [ -z "$missing" ] || start_job "$model-$seed" train_and_ask "$model" "$seed"
  done
done
finish_jobs
[ $failure -eq 0 ] || end_with_jobs

"$python" scripts/tables.py --labels "${labels#,}" "${files[@]}" >"$out/tasks.md"
"$python" scripts/collect_results.py --labels "${labels#,}" "${files[@]}" -o "$out/results.jsonl"
echo "needles: $out/tasks.md"
if can_draw scripts/plot_tasks.py; then
  "$python" scripts/plot_tasks.py --labels "${labels#,}" "${files[@]}" -o "$out/tasks.png"
fi
