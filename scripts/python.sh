#!/usr/bin/env bash
# Prints the Python interpreter that sbtrain, its scripts and its tests use: $SBTRAIN_PYTHON where it is set, that of
# the virtual environment that is active, that of .venv/ where `scripts/setup.sh python` has made one, otherwise the
# first in PATH.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -n "${SBTRAIN_PYTHON:-}" ]; then
  command -v "$SBTRAIN_PYTHON" && exit
  echo "SBTRAIN_PYTHON=$SBTRAIN_PYTHON is not a program" >&2
  exit 1
fi
for python in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python3"} "$root/.venv/bin/python3" python3; do
  if command -v "$python"; then exit 0; fi
done
echo "there is no python3: apt-get install python3" >&2
exit 1
