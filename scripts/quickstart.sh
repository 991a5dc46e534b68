#!/usr/bin/env bash
# From a bare Debian 12 or Ubuntu 24.04 to a small trained language model and a text it wrote.
#
#   scripts/quickstart.sh
#
# Installs what is missing, builds what this machine can run, and leaves the rest to `sbtrain quickstart`: it fetches
# English text, and trains a tokenizer and the model of configs/tiny_sb.yaml, for fewer steps than that file says. Steps
# that are done already are skipped, and an interrupted run continues.
# All files that it writes are in build/, corpus/, runs/ and third_party/ of this checkout.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

logs=build/quickstart
steps=2

case ${1:-} in
  '') ;;
  -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "quickstart: takes no arguments" >&2; exit 2 ;;
esac
mkdir -p "$logs"

# ---- Announcing steps ------------------------------------------------------------------------

number=0
current=
started=0
announce() { # announce WHAT [NOTE]
  current=$1
  number=$((number + 1))
  started=$SECONDS
  printf '[%d/%d] %s%s\n' "$number" "$steps" "$current" "${2:+ ($2)}"
}
finished() { printf '      done (%d s)\n' $((SECONDS - started)); }

# On a terminal, shows the latest line that a command has printed.
last_line() {
  if [ ! -t 1 ]; then
    cat >/dev/null
    return
  fi
  local line width
  width=$(($(tput cols 2>/dev/null || echo 80) - 8))
  while IFS= read -r line; do printf '\r\033[K      %s' "${line:0:width}"; done
  printf '\r\033[K'
}

# quietly NAME COMMAND... writes the output to a log, whose end is shown when the command fails.
quietly() {
  local log=$logs/$1.log
  shift
  if ! "$@" 2>&1 | tee "$log" | last_line; then
    tail -n 30 "$log" >&2
    printf '\nquickstart: step %d (%s) failed. The log is %s\n' \
      "$number" "$current" "$root/$log" >&2
    exit 1
  fi
}

# ---- The steps --------------------------------------------------------------------------------

has_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }
has_nvcc() { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; }

# A build folder that exists keeps what it has; a new one gets no tests, and CUDA where there is a GPU.
build() {
  if [ -f build/release/CMakeCache.txt ]; then
    cmake build/release --log-level=WARNING
  else
    cmake --preset release --log-level=WARNING -DSBTRAIN_TESTS=OFF -DSBTRAIN_CUDA="$cuda"
  fi && cmake --build build/release --target sbtrain --parallel "$(nproc)"
}

cuda=AUTO
packages=(build quickstart)
without=
if ! has_gpu; then
  cuda=OFF
  packages+=(--without-cuda)
  if has_nvcc; then
    without="without the GPU backend, since no NVIDIA GPU is here; cmake --preset release && cmake --build build/release adds it"
  fi
elif ! has_nvcc; then
  without="without the GPU backend, since nvcc is missing: install the CUDA toolkit 13.0, remove build/ and run this again"
fi

announce "Installing packages" "only those that are missing; asks for sudo where it is needed"
quietly packages scripts/setup.sh "${packages[@]}"
finished

announce "Building sbtrain" "$(nproc) cores; a few minutes the first time"
[ -z "$without" ] || printf '      %s\n' "$without"
quietly build build
finished
printf 'Packages and build took %d s. The rest is done by build/release/sbtrain quickstart:\n' "$SECONDS"

# The python that Debian's matplotlib is installed for.
SBTRAIN_PYTHON=${SBTRAIN_PYTHON:-/usr/bin/python3} exec build/release/sbtrain quickstart
