# shellcheck shell=bash disable=SC2034,SC2154 # the scripts that source it set and use these
# What the scripts of experiments share: their command line, the program, the device, the corpus, and jobs. A script
# sources this file with the checkout as the working folder, after it has set
#   prefix   the prefix of its configurations: configs/PREFIX_MODEL.yaml
#   values   (declare -A) its options that take a value, by name without dashes; one is `out`
#   models   (an array) the models to train where the command line names none
# parse_command_line CALLED_FROM ARGUMENTS... then sets `values`, `models`, `options` (the arguments
# after --), `sbtrain`, `python` and `device`, and makes the folder values[out]. find_corpus, continue_run, complete_run,
# evaluate and start_job stand below.

driver=$(basename "$0" .sh)

usage_error() {
  echo "$driver: $1" >&2
  exit 2
}

parse_command_line() {
  local called_from=$1 named=() name
  shift
  options=()
  while [ $# -gt 0 ]; do
    name=${1#--}
    case $1 in
      -h | --help) sed -n '/^# shellcheck/d;2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
      --) shift; options=("$@"); break ;;
      -*)
        [[ $1 == --* && -v values[$name] ]] ||
          usage_error "unknown option '$1'; put options of the training after --"
        [ $# -gt 1 ] || usage_error "$1 needs a value"
        values["$name"]=$2
        if [ "$name" = out ]; then
          case $2 in /*) ;; *) values["out"]=$called_from/$2 ;; esac
        fi
        shift 2
        ;;
      *) named+=("$1"); shift ;;
    esac
  done
  [ ${#named[@]} -eq 0 ] || models=("${named[@]}")
  for name in "${models[@]}"; do
    [ -f "configs/${prefix}_$name.yaml" ] || usage_error "no configs/${prefix}_$name.yaml"
  done
  sbtrain=$(scripts/find_sbtrain.sh)
  python=${PYTHON:-/usr/bin/python3} # the python that Debian's matplotlib is installed for
  device=auto                        # the evaluation uses the device of the training
  for name in "${options[@]}"; do
    case $name in --device=*) device=${name#--device=} ;; esac
  done
  mkdir -p "${values["out"]}"
  if [[ -v values[jobs] ]]; then make_slots; fi
}

# ---- Rates ------------------------------------------------------------------------------------

# Sets `rate_options` to the learning rate of a model, if values[rates] has one: "sb*=4e-3,rope=2e-3", of which the
# first that fits counts.
find_rate() { # find_rate MODEL
  local part parts
  rate_options=()
  IFS=, read -ra parts <<<"${values[rates]}"
  for part in "${parts[@]}"; do
    # shellcheck disable=SC2053 # a pattern
    if [[ $1 == ${part%%=*} ]]; then
      rate_options=("--train.lr=${part#*=}")
      return 0
    fi
  done
}

check_rates() {
  local part parts
  IFS=, read -ra parts <<<"${values[rates]}"
  for part in "${parts[@]}"; do
    [[ $part == ?*=[0-9]* ]] || usage_error "--rates: '$part' is not MODEL=RATE, such as sb=4e-3 or 'sb*=4e-3'"
  done
}

# ---- Corpus -----------------------------------------------------------------------------------

# Sets `corpus`, the folder of the text: values[corpus], or corpus/packages where data/package_corpus.py has made it
# (docs/corpus.md), or else corpus/lengths, which scripts/lengths.sh fetches. With corpus/lengths, which configurations
# name, `corpus_options` is empty; otherwise it gives a training the stores and the tokenizer of the corpus. `held_out`
# is the store of held-out documents. Models that stand beside each other have the same text: values[out]/corpus says
# which.
find_corpus() {
  corpus=${values[corpus]} corpus_options=()
  if [ -z "$corpus" ]; then
    corpus=corpus/lengths
    if [ -f corpus/packages/train.h5 ] && [ -f corpus/packages/held_out.h5 ]; then corpus=corpus/packages; fi
  fi
  corpus=${corpus%/}
  local note=${values[out]}/corpus
  if [ -f "$note" ] && [ "$(cat "$note")" != "$corpus" ]; then
    usage_error "${values[out]} has models of $(cat "$note"), not of $corpus: give another --out or --corpus"
  fi
  echo "$corpus" >"$note"
  held_out=$corpus/val.h5
  [ "$corpus" != corpus/lengths ] || return 0
  held_out=$corpus/held_out.h5
  [ -f "$corpus/tokenizer.model" ] || usage_error "--corpus: $corpus has no tokenizer.model (docs/corpus.md)"
  local kind text
  for kind in train held_out; do
    [ ! -f "$corpus/$kind.h5" ] || continue
    text=$corpus/$kind.jsonl.zst # what scripts/optimizers.py pack has made
    [ -f "$text" ] || usage_error "--corpus: $corpus has neither $kind.h5 nor $kind.jsonl.zst"
    "$sbtrain" prepare --tokenizer "$corpus/tokenizer.model" --input "$text" --output "$corpus/$kind.h5"
  done
  corpus_options=("--data.sources=[{path: $corpus/train.h5}]" "--data.validation=[$held_out]"
    "--data.tokenizer=$corpus/tokenizer.model")
}

# ---- Training ---------------------------------------------------------------------------------

is_complete() { # is_complete RUN
  [ -f "$1/status.json" ] && grep -q '"state": *"complete"' "$1/status.json"
}

has_weights() { # has_weights RUN: that it is complete, and not without them as from an archive
  is_complete "$1" && [ -f "$1/checkpoints/latest" ]
}

# Trains what is missing of RUN, whose weights are read next. The status is that of the program: 85 means that a signal
# stopped the run after it had saved, and the same command continues.
continue_run() { # continue_run RUN CONFIG OPTIONS...
  has_weights "$1" || "$sbtrain" train --config "$2" --out "$1" "${@:3}"
}

# The same. An error ends the job with the program's code.
complete_run() { # complete_run RUN CONFIG OPTIONS...
  continue_run "$@" || exit
}

# ---- Evaluation -------------------------------------------------------------------------------

# Writes RESULT, unless it is there. An evaluation writes its file after each length, so that a file by this name is whole.
evaluate() { # evaluate RESULT RUN OPTIONS...
  local result=$1 run=$2
  shift 2
  [ -f "$result" ] ||
    { "$sbtrain" eval --checkpoint "$run" --device "$device" --json "$result.part" "$@" && mv "$result.part" "$result"; }
}

# ---- Jobs -------------------------------------------------------------------------------------

# A job is a function of the script that runs in a process of its own, several at a time: values[jobs] of them, which
# share the visible GPUs evenly, several on each where there are more jobs than GPUs, or without the option one for each
# GPU. A job that fails does not keep the others from running. Of SIGTERM and Ctrl-C the trainings hear, which save; the
# script then ends with exit code 85, as they do.
slots=()                                       # the GPUs of each slot, as CUDA_VISIBLE_DEVICES; "" means as they are
declare -A name_of=() log_of=() slot_of=() began=() # of the jobs that run, by process
failure=0 failed="" stopped=""

make_slots() {
  local gpus=() names="" count share first n
  [ "$device" = cpu ] || names=$(python3 scripts/gpus.py)
  [ -z "$names" ] || mapfile -t gpus <<<"$names"
  count=${values[jobs]:-${#gpus[@]}}
  [[ $count =~ ^[0-9]{1,4}$ && ${values[jobs]:-1} != 0 ]] || usage_error "--jobs: '$count' is no number of jobs"
  [ "$count" -gt 0 ] || count=1
  share=$((${#gpus[@]} > count ? ${#gpus[@]} / count : 1))
  slots=("")
  [ "$count" -gt 1 ] || return 0
  for ((n = 0; n < count; ++n)); do
    first=$((${#gpus[@]} > 0 ? n * share % ${#gpus[@]} : 0))
    slots[n]=$(IFS=,; echo "${gpus[*]:first:share}")
  done
  # Without this every process would have as many threads as the machine has processors.
  n=$(($(nproc) / (count * share)))
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((n > 1 ? n : 1))}"
}

# Passes a stop on to the jobs, each of which is a process group of its own.
stop_jobs() {
  local job
  stopped=yes
  for job in "${!name_of[@]}"; do kill -TERM -- "-$job" 2>/dev/null || true; done
}

# start_job NAME FUNCTION ARGUMENTS... runs the function as soon as a slot is free, with its output in NAME.log in
# values[out], or on the screen if jobs run one at a time.
start_job() {
  local name=$1 log=${values[out]}/$1.log slot=0 taken told=""
  shift
  trap stop_jobs INT TERM
  while [ ${#name_of[@]} -ge ${#slots[@]} ]; do end_of_a_job; done
  [ -z "$stopped" ] || return 0
  for taken in $(printf '%s\n' "${slot_of[@]}" | sort -n); do
    if [ "$taken" = $slot ]; then slot=$((slot + 1)); fi
  done
  [ ${#slots[@]} -eq 1 ] || told=" (its output: $log)"
  echo "$driver: $name begins${slots[slot]:+ on GPU ${slots[slot]}}$told"
  mkdir -p "$(dirname "$log")"
  set -m # a process group for the job
  (
    set +m
    trap 'exit 85' INT TERM # when the program that it waits for has ended
    [ -z "${slots[slot]}" ] || export CUDA_VISIBLE_DEVICES=${slots[slot]}
    [ -z "$told" ] || exec >>"$log" 2>&1
    "$@"
  ) </dev/null &
  set +m
  name_of[$!]=$name log_of[$!]=$told slot_of[$!]=$slot began[$!]=$SECONDS
  [ -z "$stopped" ] || stop_jobs # a signal came as it began
}

# Waits until a job ends, or a signal comes.
end_of_a_job() {
  local job code=0 name
  unset job
  wait -n -p job "${!name_of[@]}" || code=$?
  [ -n "${job:-}" ] || return 0 # a signal came
  name=${name_of[$job]}
  if [ $code -eq 0 ]; then
    echo "$driver: $name is done after $((SECONDS - ${began[$job]})) s"
  elif [ -n "$stopped" ] || [ $code -eq 85 ]; then
    stopped=yes
    echo "$driver: $name was stopped"
  else
    echo "$driver: $name failed with exit code $code${log_of[$job]}" >&2
    [ $failure -ne 0 ] || failure=$code failed=$name${log_of[$job]}
  fi
  unset "name_of[$job]" "log_of[$job]" "slot_of[$job]" "began[$job]"
}

# Waits for all jobs. If they were stopped, the script ends.
finish_jobs() {
  while [ ${#name_of[@]} -gt 0 ]; do end_of_a_job; done
  trap - INT TERM
  if [ -n "$stopped" ]; then
    echo "$driver: stopped; the same command continues" >&2
    exit 85
  fi
}

# The end of the script: with the exit code of the first job that failed, if one has.
end_with_jobs() {
  [ $failure -ne 0 ] || exit 0
  echo "$driver: $failed failed first, with exit code $failure; the same command tries again what is missing" >&2
  exit "$failure"
}

# ---- Figures ----------------------------------------------------------------------------------

# Succeeds if figures can be drawn; otherwise says which script can draw them later.
can_draw() { # can_draw SCRIPT
  if ! "$python" -c 'import matplotlib' 2>/dev/null; then
    echo "$driver: $python has no matplotlib, so nothing is drawn; $1 can draw the results later" >&2
    return 1
  fi
}
