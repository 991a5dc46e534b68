#!/usr/bin/env bash
# Prints the Python interpreter that sbtrain's scripts and tests use: $SBTRAIN_PYTHON where it is set, that of
# .venv/ where `scripts/setup.sh python` has made one, otherwise Debian's, otherwise the first in PATH.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
for python in "${SBTRAIN_PYTHON:-$root/.venv/bin/python3}" /usr/bin/python3 python3; do
  if command -v "$python"; then exit 0; fi
  if [ -n "${SBTRAIN_PYTHON:-}" ]; then
    echo "SBTRAIN_PYTHON=$SBTRAIN_PYTHON is not a program" >&2
    exit 1
  fi
done
echo "there is no python3: apt-get install python3" >&2
exit 1
