#!/usr/bin/env bash
# Prints the packages of this Debian or Ubuntu that a built program needs to run, one a line: those of the libraries that
# it is linked with, and of OpenBLAS, which it loads. A machine with these alone runs a copy of the program.
#
#   scripts/runtime_packages.sh PROGRAM
set -euo pipefail
program=${1:?give the path of the program}

libraries=$(ldd "$program" | sed -n 's/.* => \(\/[^ ]*\) (.*/\1/p')
openblas=$("$program" doctor | sed -n 's/.*OpenBLAS .*(\(\/.*\))$/\1/p')
[ -n "$openblas" ] || { echo "runtime_packages: $program doctor names no OpenBLAS" >&2; exit 1; }
for file in $libraries $openblas; do
  # Packages name files in /lib or in /usr/lib, which may be the same folder.
  file=$(realpath "$file")
  owner=$(dpkg -S "$file" 2>/dev/null || dpkg -S "${file#/usr}" 2>/dev/null) ||
    { echo "runtime_packages: no package has $file" >&2; exit 1; }
  echo "${owner%%:*}"
done | LC_ALL=C sort -u
