#!/usr/bin/env bash
# Runs a script with the Python interpreter that scripts/python.sh finds.
#   with_python.sh SCRIPT ARGUMENT...
set -euo pipefail
python=$("$(dirname "${BASH_SOURCE[0]}")/../../scripts/python.sh")
exec "$python" "$@"
