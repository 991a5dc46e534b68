#!/usr/bin/env bash
# The program starts without MPI, NCCL, cuBLASLt, cuDNN and libcurl, and says what it lacks when it is asked for ranks.
#   libraries_test.sh PROGRAM HIDER
# HIDER is a library that, loaded in front of the program, hides MPI and NVIDIA's libraries (tests/support).
set -euo pipefail
program=$1
hider=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# shellcheck source=tests/system/checks.sh
. "$(dirname "$0")/checks.sh"
without() { env LD_PRELOAD="$hider" "$@"; }

needed=$(readelf -d "$program" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
contains "$needed" libc.so
for library in libmpi libnccl libcublas libcudnn libcuda libopenblas; do
  [[ $needed != *$library* ]] || fail "the program is linked with $library: ${needed//$'\n'/ }"
done

version=$(without "$program" --version)
contains "$version" "sbtrain " "compiled for" "CUDA backend" MPI
doctor=$(without "$program" doctor)
contains "$doctor" "What it can train on" "the CPU           yes" "ranks on the CPU  no: " "one GPU           no: " \
  "several GPUs      no: "

# Two ranks as torchrun starts them. Both load MPI before they wait for each other.
if [[ $version != *"MPI was not found when"* ]]; then
  contains "$version" "cannot load MPI (hidden" "apt-get install openmpi-bin"
  for rank in 0 1; do
    (
      status=0
      RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 20000)) \
        without timeout 100 "$program" bench collectives --device=cpu > "$folder/$rank" 2>&1 || status=$?
      echo "$status" > "$folder/status$rank"
    ) &
  done
  wait
  for rank in 0 1; do
    [[ $(cat "$folder/status$rank") == 3 ]] || fail "rank $rank: $(cat "$folder/status$rank"), not 3: $(cat "$folder/$rank")"
  done
  contains "$(cat "$folder/0" "$folder/1")" "cannot load MPI" "or train with one rank"
fi
