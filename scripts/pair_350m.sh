#!/usr/bin/env bash
# Trains 350m_sb and 350m_rope on the same text for a small part of the paper's tokens, and measures both while their
# weights are there: loss by length, what the context is worth, needles, and for stick-breaking the keys it skips.
#
#   scripts/pair_350m.sh [--out DIR] [--corpus FOLDER] [--jobs N] [--steps N] [--rates LR,LR,...] [--needles STEPS]
#                        [--lengths N,N,...] [--tokens N] [--samples N] [--asked N] [--skip N,N,...] [MODEL...]
#                        [-- TRAINING OPTIONS]
#   scripts/pair_350m.sh --corpus corpus/packages
#
# A step has 64 rows of 2048 tokens, the warmup 100 steps; 350m_sb.yaml assumes 256 rows, the paper has 15e9 tokens. Each
# model trains for --steps (1070, which read 140M tokens) at each of --rates, --jobs of these runs at a time, one for each
# GPU (the default). A tenth of the steps does not tell which rate is the best: there the loss is at 5.7 nats on its way
# from 10.5 to 2.1, and RoPE's was the lower the lower the rate, down to 1.25e-4. The run with the lowest loss is
# measured, both models at the same time, each on half of the GPUs where there are several: at --lengths (2048 to 32768;
# --tokens for each), on windows of their own text, on the same targets, and by eval --benefit; RoPE with dynamic NTK as
# well. Its weights are trained on for --needles steps (300) on text and on samples of passkey, niah_single_1 and
# niah_multikey_2 of at most 2048 tokens (--samples of each task and length), and asked for needles at --lengths (--asked
# prompts). Of stick-breaking, `eval --reach` and `bench skip` measure what is read, at 2048 tokens and at --skip
# (16384,65536).
#
# DIR (default: runs/pair_350m) gets results.jsonl, tables.md and plots, and while there are rates to try 4.4 GB for each
# run; --corpus is as in scripts/lengths.sh, and has to have 140M tokens for one pass. Everything that is done is skipped
# and an interrupted training continues, so the same command continues after a stop (exit code 85). The variable SBTRAIN
# names a program to use instead of the release build's, PYTHON another python3.
# shellcheck disable=SC2317 # jobs call its functions
set -euo pipefail

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=350m
models=(sb rope)
declare -A values=([out]=runs/pair_350m [corpus]="" [jobs]="" [steps]=1070 [rates]="5e-4,1e-3,2e-3" [needles]=300
  [lengths]="2048,4096,8192,16384,32768" [tokens]=2097152 [samples]=300 [asked]=100 [skip]="16384,65536")
tasks=passkey,niah_single_1,niah_multikey_2
# shellcheck source=scripts/experiment.sh
. scripts/experiment.sh
parse_command_line "$called_from" "$@"
out=${values[out]}
longest=${values[lengths]##*,}
find_corpus
[ -f "$corpus/train.h5" ] || usage_error "--corpus: $corpus has no train.h5 (docs/corpus.md)"
tokenizer=$corpus/tokenizer.model
text=("--data.sources=[{path: $corpus/train.h5}]" "--data.validation=[$held_out]"
  "--data.tokenizer=$tokenizer" --train.batch=64 --validation.tokens=1e6)

# interval STEPS TIMES: of what happens so many times in so many steps; 0 for no time.
interval() { echo $(($2 > 0 ? ($1 + $2 - 1) / $2 : 0)); }

# schedule STEPS WARMUP SAVES VALIDATIONS: so many saves, and so many validations on the way, beside that at the end.
schedule() {
  echo "--stages.0.length=$1 steps"
  echo "--stages.0.schedule.warmup=$2 steps"
  echo "--validation.every=$(interval "$1" "$4") steps"
  echo "--checkpoint.every=$(interval "$1" "$3")"
  echo "--checkpoint.keep=1"
}

# ---- Samples of needles -----------------------------------------------------------------------

if [ ! -f "$out/needles.h5" ]; then
  "$sbtrain" data tasks --tasks "$tasks" --lengths 512,768,1024,1280,1536,1792,2048 --samples "${values[samples]}" --seed 7 \
    --tokenizer "$tokenizer" --output "$out/needles.jsonl"
  "$sbtrain" prepare --input "$out/needles.jsonl" --tokenizer "$tokenizer" --output "$out/needles.h5"
  rm "$out/needles.jsonl"
fi

# ---- The rates --------------------------------------------------------------------------------

mapfile -t whole < <(schedule "${values[steps]}" $((values[steps] < 1000 ? values[steps] / 10 + 1 : 100)) 2 20)

train_at() { # train_at MODEL RATE
  continue_run "$out/rates/$1-$2" "configs/350m_$1.yaml" "${text[@]}" "${whole[@]}" "${options[@]}" --train.lr="$2"
}

# A run that diverges has a result too, which is the worst.
try_rate() { # try_rate MODEL RATE
  local run=$out/rates/$1-$2 code=0
  train_at "$1" "$2" || code=$?
  [ "$code" -eq 0 ] || [ "$code" -eq 6 ] || exit "$code"
  "$python" scripts/collect_results.py --labels "$1, rate $2" "$run" -o "$run.part.jsonl"
  mv "$run.part.jsonl" "$run.jsonl"
}

best_rate() { # best_rate MODEL
  "$python" - "$out/rates/$1-" "${values[rates]}" <<'PYTHON'
import json, sys
def loss(rate):
    record = json.loads(open(sys.argv[1] + rate + ".jsonl").read())
    losses = record["validation"]["loss"]
    return losses[-1] if record["exit_code"] == 0 and losses[-1] is not None else float("inf")
print(min(sys.argv[2].split(","), key=loss))
PYTHON
}

for rate in ${values[rates]//,/ }; do
  for model in "${models[@]}"; do
    [ -f "$out/rates/$model-$rate.jsonl" ] || start_job "rates/$model-$rate" try_rate "$model" "$rate"
  done
done
finish_jobs
[ $failure -eq 0 ] || end_with_jobs

# The best run is that of the pair, by a link; of the others the weights, 4.4 GB each, are not needed any more.
declare -A best=()
for model in "${models[@]}"; do
  best[$model]=$(best_rate "$model")
  run=rates/$model-${best[$model]}
  [ -L "$out/$model" ] || ln -s "$run" "$out/$model"
  [ "$(readlink "$out/$model")" = "$run" ] ||
    usage_error "$out has results of $(readlink "$out/$model"), and $run is better: remove $out/$model*, and call again"
  for rate in ${values[rates]//,/ }; do
    [ "$rate" = "${best[$model]}" ] || rm -rf "$out/rates/$model-$rate"
  done
done

# ---- The pair ---------------------------------------------------------------------------------

# measure NAME MODEL OPTIONS...: what can be asked with and without scaled positions.
measure() {
  local name=$1 run=$out/$2 common
  shift 2
  common=(--tokens-per-length "${values[tokens]}" "$@")
  evaluate "$out/$name.json" "$run" --lengths "${values[lengths]}" --recall "${common[@]}"
  evaluate "$out/${name}_same.json" "$run" --lengths "${values[lengths]}" --same-targets 256 "${common[@]}"
  evaluate "$out/${name}_benefit.json" "$run" --benefit "$longest" "${common[@]}"
}

ask() { # ask NAME RUN OPTIONS...
  evaluate "$out/$1_tasks.json" "$2" --tasks "$tasks" --lengths "${values[lengths]}" --samples "${values[asked]}" "${@:3}"
}

measure_and_ask() { # measure_and_ask MODEL RATE
  local model=$1 run=$out/$1
  train_at "$model" "$2" || exit # where only the results of the rates are there
  measure "$model" "$model"
  [ "$model" != rope ] || measure rope_dynamic_ntk rope --rope-scaling dynamic_ntk
  if [ "$model" = sb ]; then
    evaluate "$out/sb_reach.json" "$run" --reach --lengths "2048,${values[skip]}" --tokens-per-length 262144
  fi
  mapfile -t more < <(schedule "${values[needles]}" $((values[needles] / 20 + 1)) 1 0)
  complete_run "${run}_needles" "configs/350m_$model.yaml" --init-from "$run" "${text[@]}" \
    "--data.sources=[{path: $corpus/train.h5, weight: 2}, {path: $out/needles.h5, weight: 3}]" "${more[@]}" \
    "${options[@]}" --train.lr="$2"
  ask "$model" "${run}_needles"
  [ "$model" != rope ] || ask rope_dynamic_ntk "${run}_needles" --rope-scaling dynamic_ntk
  if [ "$model" = sb ] && [ ! -f "$out/skip.jsonl" ]; then
    # One GPU measures; a batch is one window of the longest length.
    "$sbtrain" bench skip --checkpoint "$run" --device "$device" --lengths "2048,${values[skip]}" \
      --tokens "${values[skip]##*,}" --epsilons 5.9604644775390625e-08,1e-2 --batches 4 --repeats 3 --json \
      >"$out/skip.part"
    mv "$out/skip.part" "$out/skip.jsonl"
  fi
}

at_once=2
[ ${#slots[@]} -gt 1 ] || at_once=1
values[jobs]=$at_once
make_slots
for model in "${models[@]}"; do
  results=("$out/$model.json" "$out/${model}_same.json" "$out/${model}_benefit.json" "$out/${model}_tasks.json")
  case $model in
    sb) results+=("$out/sb_reach.json" "$out/skip.jsonl") ;;
    rope) results+=("$out"/rope_dynamic_ntk{,_same,_benefit,_tasks}.json) ;;
  esac
  for result in "${results[@]}"; do
    if [ ! -f "$result" ]; then
      start_job "$model" measure_and_ask "$model" "${best[$model]}"
      break
    fi
  done
done
finish_jobs

# ---- What there is ----------------------------------------------------------------------------

files=() labels=
for name in sb rope rope_dynamic_ntk; do
  label=${name/rope/RoPE}
  label=${label/sb/stick-breaking}
  for part in "" _same _benefit _tasks; do
    if [ -f "$out/$name$part.json" ]; then
      files+=("$out/$name$part.json") labels=$labels,${label/_dynamic_ntk/, dynamic NTK at evaluation}
    fi
  done
done
tabulated=("${files[@]}")
if [ -f "$out/skip.jsonl" ]; then tabulated+=("$out/skip.jsonl"); fi
if [ ${#tabulated[@]} -gt 0 ]; then
  of_files=$labels
  [ ! -f "$out/skip.jsonl" ] || of_files=$of_files,stick-breaking
  against=()
  if [ -f "$out/sb.json" ] || [ -f "$out/sb_same.json" ]; then against=(--against stick-breaking); fi
  "$python" scripts/tables.py --labels "${of_files#,}" --bootstrap 1000 "${against[@]}" "${tabulated[@]}" >"$out/tables.md"
  for model in sb rope; do
    for run in "$out/$model" "$out/${model}_needles"; do
      if [ -f "$run/metrics.jsonl" ]; then tabulated+=("$run") of_files=$of_files,${run##*/}; fi
    done
  done
  for file in "$out/sb_reach.json" "$out"/rates/*.jsonl; do
    if [ -f "$file" ]; then tabulated+=("$file") of_files=$of_files,$(basename "${file%.json*}"); fi
  done
  "$python" scripts/collect_results.py --labels "${of_files#,}" "${tabulated[@]}" -o "$out/results.jsonl"
  echo "pair_350m: $out/tables.md"
fi
if can_draw scripts/plot_lengths.py; then
  if [ -f "$out/sb_reach.json" ]; then "$python" scripts/plot_reach.py "$out/sb_reach.json" -o "$out/reach.png"; fi
  if [ -f "$out/results.jsonl" ] && [ -f "$out/sb.json" ] && [ -f "$out/rope.json" ]; then
    "$python" scripts/plot_lengths.py --max-loss 6 --labels "stick-breaking,RoPE" "$out/sb.json" "$out/rope.json" \
      -o "$out/lengths.png"
    "$python" scripts/plot_loss.py "$out/sb" "$out/rope" -o "$out/loss.png"
  fi
fi
end_with_jobs
