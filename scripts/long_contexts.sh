#!/usr/bin/env bash
# Lets models that were trained on rows of 512 tokens go on with rows of 32,768 and then of 131,072 tokens of long
# documents, and measures what long contexts then cost and give.
#
#   scripts/long_contexts.sh [--out DIR] [--from DIR] [--corpus FOLDER] [--jobs N] [--rates MODEL=LR,...]
#                            [--rows N,N,...] [--steps N,N,...] [--lengths N,N,...] [--tokens N] [--timed N,N,...]
#                            [--needles STEPS] [--tasks NAME,NAME,...] [--sizes N,N,...] [--samples N]
#                            [--ask-at N,N,...] [--asked N] [MODEL...] [-- TRAINING OPTIONS]
#   scripts/long_contexts.sh --corpus corpus/packages
#
# MODEL is the part of the file's name after configs/long_: sb, rope_ntk, rope_yarn, window (all unless given). Each goes
# on from the run sb, rope or window in --from, a folder of scripts/lengths.sh of the same corpus, which is trained here
# first where the option is left out. --rows (32768,131072) are trained one after the other, for --steps each
# (300,60; at least 65,536 tokens a step), on documents of the corpus that have so many tokens. Then each model is
# measured: its loss by length (--lengths, 16384 to 131072; --tokens for each) and by position on held-out documents,
# and, on held-out documents joined to a single long one, the time and the loss of `bench skip` at --timed
# (16384,65536,131072,1048576). Then it is trained on in rows of the first size for --needles steps (100), on text and on
# samples of --tasks (passkey,niah_single_1; --samples (100) of each task and each of --sizes, 1024 to 32768 tokens), and
# asked for --asked needles (20) of each task in texts of --ask-at (131072,1048576) tokens.
#
# DIR (default: runs/long_contexts) gets results.jsonl, tables.md, speed.png (tokens per second by length), lengths.png
# and positions.png (in the window of the largest size). Jobs, --rates and interruptions are as in scripts/lengths.sh,
# what is done is skipped, and the same command continues after a stop (exit code 85). The corpus has to have
# train*.jsonl.zst and held_out*.jsonl.zst, which data/package_corpus.py makes; zstd reads them. SBTRAIN names a program
# to use instead of the release build's, PYTHON another python3.
# shellcheck disable=SC2317 # jobs call its functions
set -euo pipefail

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=long
models=(sb rope_ntk rope_yarn window)
declare -A values=([out]=runs/long_contexts [from]="" [corpus]="" [jobs]="" [rates]="" [rows]="32768,131072"
  [steps]="300,60" [lengths]="16384,32768,65536,131072" [tokens]=2097152 [timed]="16384,65536,131072,1048576"
  [needles]=100 [sizes]="1024,2048,4096,8192,16384,32768" [samples]=100 [tasks]="passkey,niah_single_1" [asked]=20 [ask-at]="131072,1048576")
short_rows=512 # of configs/lengths_*.yaml
# shellcheck source=scripts/experiment.sh
. scripts/experiment.sh
parse_command_line "$called_from" "$@"
out=${values[out]}
IFS=, read -ra rows <<<"${values[rows]}"
IFS=, read -ra steps <<<"${values[steps]}"
IFS=, read -ra timed <<<"${values[timed]}"
[ ${#rows[@]} -eq ${#steps[@]} ] || usage_error "--rows has ${#rows[@]} numbers, --steps ${#steps[@]}"
check_rates
find_corpus
command -v zstd >/dev/null || usage_error "zstd is missing: apt-get install zstd"
tokenizer=$corpus/tokenizer.model
texts=("$corpus"/train*.jsonl.zst)
held_out_texts=("$corpus"/held_out*.jsonl.zst)
for file in "${texts[0]}" "${held_out_texts[0]}"; do
  [ -f "$file" ] || usage_error "--corpus: there is no $file; data/package_corpus.py makes such a folder (docs/corpus.md)"
done

# The models of configs/lengths_*.yaml that these begin with.
mapfile -t bases < <(printf '%s\n' "${models[@]%%_*}" | sort -u)
for base in "${bases[@]}"; do
  [ -z "${values[from]}" ] || [ -f "${values[from]}/$base/metrics.jsonl" ] ||
    usage_error "--from: ${values[from]} has no run $base; scripts/lengths.sh --seeds 1 $base makes one in seed-1"
done

# ---- Text -------------------------------------------------------------------------------------

for row in "${rows[@]}"; do
  [ -f "$out/train-$row.h5" ] || "$sbtrain" prepare --tokenizer "$tokenizer" --min-tokens "$row" \
    --input "${texts[@]}" --output "$out/train-$row.h5"
done
# One document of the longest ones, which are joined until there are three windows of the largest size and enough of the
# others.
longest=$(printf '%s\n' "${timed[@]}" | sort -n | tail -1)
if [ ! -f "$out/joined.h5" ]; then
  zstd -dcq "${held_out_texts[@]}" | "$python" -c '
import json, sys
texts = sorted((json.loads(line)["text"] for line in sys.stdin), key=len, reverse=True)
left = 16 * int(sys.argv[1])  # characters: more than three windows
for text in texts:
    if left <= 0:
        break
    print(text, end="\n\n")
    left -= len(text)
' "$longest" >"$out/joined.txt"
  "$sbtrain" prepare --tokenizer "$tokenizer" --input "$out/joined.txt" --output "$out/joined.h5"
  rm "$out/joined.txt"
fi
if [ ! -f "$out/needles.h5" ]; then
  "$sbtrain" data tasks --tasks "${values[tasks]}" --lengths "${values[sizes]}" --samples "${values[samples]}" --seed 7 \
    --tokenizer "$tokenizer" --output "$out/needles.jsonl"
  "$sbtrain" prepare --input "$out/needles.jsonl" --tokenizer "$tokenizer" --output "$out/needles.h5"
  rm "$out/needles.jsonl"
fi

# ---- Training ---------------------------------------------------------------------------------

is_measured() { # is_measured MODEL
  [ -f "$out/$1.json" ] && [ -f "$out/$1.skip.jsonl" ] && [ -f "$out/$1_joined.json" ] && [ -f "$out/$1_tasks.json" ]
}
unmeasured=()
for model in "${models[@]}"; do
  is_measured "$model" || unmeasured+=("$model")
done

if [ -z "${values[from]}" ]; then
  for base in "${bases[@]}"; do
    [[ " ${unmeasured[*]%%_*} " == *" $base "* ]] || continue
    find_rate "$base"
    has_weights "$out/base/$base" ||
      start_job "base/$base" complete_run "$out/base/$base" "configs/lengths_$base.yaml" "${corpus_options[@]}" \
        "${rate_options[@]}" "${options[@]}"
  done
  finish_jobs
  [ $failure -eq 0 ] || end_with_jobs
fi

# go_on MODEL NAME RUN ROW FOR STEPS OPTIONS...: trains NAME from the weights of RUN in rows of ROW tokens, with rotary
# positions that are scaled for rows of FOR.
go_on() {
  local model=$1 name=$2 run=$3 row=$4 reach=$5 length=$6 batch scaled=()
  shift 6
  batch=$((65536 / row))
  case $model in rope_*) scaled=("--model.attention.rope_factor=$((reach > short_rows ? reach / short_rows : 1))") ;; esac
  complete_run "$out/$name" "configs/long_$model.yaml" --init-from "$run" "${corpus_options[@]}" \
    "--train.sequence_length=$row" "--train.batch=$((batch > 0 ? batch : 1))" --train.micro_batch=1 \
    "--data.sources=[{path: $out/train-$row.h5}]" "--stages.0.length=$length steps" \
    "--stages.0.schedule.warmup=$((length / 10 + 1)) steps" "--validation.every=$((length / 4 + 1)) steps" \
    "--checkpoint.every=$((length / 2 + 1)) steps" "${scaled[@]}" "${rate_options[@]}" "${options[@]}" "$@"
}

# ---- Measuring --------------------------------------------------------------------------------

# time_lengths RESULT RUN: batches of a few windows, but for the longest ones a single one, once. A length whose
# activations do not fit into the memory (exit code 8) is left out.
time_lengths() {
  local length often code
  [ ! -f "$1" ] || return 0
  for length in "${timed[@]}"; do
    often=2 code=0
    [ "$length" -le 131072 ] || often=1
    "$sbtrain" bench skip --checkpoint "$2" --device "$device" --data "$out/joined.h5" --lengths "$length" --tokens 131072 \
      --epsilons 5.9604644775390625e-08 --batches "$often" --repeats "$often" --json || code=$?
    [ "$code" -eq 0 ] || [ "$code" -eq 8 ] || return "$code"
  done >"$1.part"
  mv "$1.part" "$1"
}

train_and_measure() { # train_and_measure MODEL
  local model=$1 n run=${values[from]:-$out/base}/${1%%_*}
  for n in "${!rows[@]}"; do
    go_on "$model" "$model-${rows[n]}" "$run" "${rows[n]}" "${rows[n]}" "${steps[n]}"
    run=$out/$model-${rows[n]}
  done
  evaluate "$out/$model.json" "$run" --lengths "${values[lengths]}" --tokens-per-length "${values[tokens]}" \
    --position-bin 1024
  time_lengths "$out/$model.skip.jsonl" "$run"
  evaluate "$out/${model}_joined.json" "$run" --data "$out/joined.h5" --lengths "$longest" --tokens-per-length "$longest" \
    --position-bin 16384
  go_on "$model" "$model-needles" "$run" "${rows[0]}" "${rows[-1]}" "${values[needles]}" --data.packing=best_fit \
    "--data.sources=[{path: $out/train-${rows[0]}.h5, weight: 2}, {path: $out/needles.h5, weight: 3}]"
  evaluate "$out/${model}_tasks.json" "$out/$model-needles" --tasks "${values[tasks]}" --lengths "${values[ask-at]}" \
    --samples "${values[asked]}"
}

for model in "${unmeasured[@]}"; do
  find_rate "$model"
  start_job "$model" train_and_measure "$model"
done
finish_jobs

# ---- What there is ----------------------------------------------------------------------------

results=() labels="" timings=() of_timings="" by_length=() of_lengths="" curves=() of_curves="" joined_results=()
of_joined=""
for model in "${models[@]}"; do
  case $model in
    sb) label=stick-breaking ;;
    rope_ntk) label="RoPE, NTK" ;;
    rope_yarn) label="RoPE, YaRN" ;;
    *) label=$model ;;
  esac
  for file in "$out/$model.json" "$out/${model}_joined.json" "$out/${model}_tasks.json"; do
    joined=
    case $file in *_joined.json) joined=", joined documents" ;; esac
    if [ -f "$file" ]; then results+=("$file") labels=$labels,$label$joined; fi
  done
  if [ -f "$out/$model.json" ]; then by_length+=("$out/$model.json") of_lengths=$of_lengths,$label; fi
  if [ -f "$out/${model}_joined.json" ]; then
    joined_results+=("$out/${model}_joined.json") of_joined=$of_joined,$label
  fi
  if [ -f "$out/$model.skip.jsonl" ]; then timings+=("$out/$model.skip.jsonl") of_timings=$of_timings,$label; fi
  for run in "$out/$model"-*; do
    if [ -f "$run/metrics.jsonl" ]; then curves+=("$run") of_curves=$of_curves,${run##*/}; fi
  done
done
if [ ${#results[@]} -gt 0 ]; then
  all=$labels$of_timings
  "$python" scripts/tables.py --labels "${all#,}" --bootstrap 1000 "${results[@]}" "${timings[@]}" >"$out/tables.md"
  all=$all$of_curves
  "$python" scripts/collect_results.py --labels "${all#,}" "${results[@]}" "${timings[@]}" "${curves[@]}" \
    -o "$out/results.jsonl"
  echo "long_contexts: $out/tables.md"
  if can_draw scripts/plot_skip.py; then
    [ ${#timings[@]} -eq 0 ] ||
      "$python" scripts/plot_skip.py --speed --labels "${of_timings#,}" "${timings[@]}" -o "$out/speed.png"
    [ ${#by_length[@]} -eq 0 ] ||
      "$python" scripts/plot_lengths.py --labels "${of_lengths#,}" "${by_length[@]}" -o "$out/lengths.png" \
        --title "Loss by length, after training on rows of ${rows[-1]} tokens"
    [ ${#joined_results[@]} -eq 0 ] ||
      "$python" scripts/plot_lengths.py --positions --labels "${of_joined#,}" "${joined_results[@]}" \
        -o "$out/positions.png" --title "Loss in a window of $longest tokens, after training on rows of ${rows[-1]}"
  fi
fi
end_with_jobs
