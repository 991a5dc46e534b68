# shellcheck shell=bash disable=SC2034,SC2154 # the scripts that source it set and use these
# What the scripts of experiments share: their command line, the program, the device. A script sources
# this file with the checkout as the working folder, after it has set
#   prefix   the prefix of its configurations: configs/PREFIX_MODEL.yaml
#   values   (declare -A) its options that take a value, by name without dashes; one is `out`
#   models   (an array) the models to train where the command line names none
# parse_command_line CALLED_FROM ARGUMENTS... then sets `values`, `models`, `options` (the arguments
# after --), `sbtrain`, `python` and `device`, and makes the folder values[out].

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
      -h | --help) sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
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
}

# Succeeds if figures can be drawn; otherwise says which script can draw them later.
can_draw() { # can_draw SCRIPT
  if ! "$python" -c 'import matplotlib' 2>/dev/null; then
    echo "$driver: $python has no matplotlib, so nothing is drawn; $1 can draw the results later" >&2
    return 1
  fi
}
