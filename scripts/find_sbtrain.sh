#!/usr/bin/env bash
# Prints the path of the sbtrain that was built: $SBTRAIN, or the release build's.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=${SBTRAIN:-$root/build/release/sbtrain}
if [ ! -x "$program" ]; then
  echo "no $program: build it with  cmake --preset release && cmake --build --preset release" >&2
  exit 1
fi
echo "$program"
