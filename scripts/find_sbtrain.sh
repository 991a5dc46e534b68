#!/usr/bin/env bash
# Prints the path of the sbtrain program: $SBTRAIN where it is set, otherwise that of a preset that has been built, or
# of the installation that this script belongs to.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=${SBTRAIN:-}
for preset in release hopper cpu; do
  if [ -z "$program" ] && [ -x "$root/build/$preset/sbtrain" ]; then program=$root/build/$preset/sbtrain; fi
done
if [ -z "$program" ] && [ -x "$root/../../bin/sbtrain" ]; then program=$(cd "$root/../.." && pwd)/bin/sbtrain; fi
program=${program:-$root/build/release/sbtrain}
if [ ! -x "$program" ]; then
  echo "$program does not exist: build it with  cmake --preset release && cmake --build --preset release" >&2
  exit 1
fi
echo "$program"
