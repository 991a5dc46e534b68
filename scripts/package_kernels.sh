#!/usr/bin/env bash
# Makes the wheel sbtrain-kernels: the attention kernels with their Python (python/sbtrain-kernels), for every Python from
# 3.9 on, every torch from 2.4 on, and every Linux with glibc 2.24 or later.
#
#   scripts/package_kernels.sh [OUTPUT]      into OUTPUT, dist/ unless given
#
# It needs nvcc and ziglang, whose linker takes the symbols of an older glibc: `pip install ziglang`, or SBTRAIN_ZIG names
# the program. SBTRAIN_BUILD is the build folder, build/kernels unless given; its settings are made those of the wheel. With
# build/package-cuda, which scripts/package.sh --cuda leaves, nothing is compiled again.
# The runtime of CUDA is inside the library. The same checkout gives the same bytes, in whatever build folder; in another
# place it does not, since nvcc puts a hash of a file's path into the names of the kernels in it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=${1:-dist}
build=${SBTRAIN_BUILD:-build/kernels}

die() {
  printf 'package_kernels: %s\n' "$@" >&2
  exit 1
}

python=$(scripts/python.sh)
if [ -n "${SBTRAIN_ZIG:-}" ]; then
  zig=("$SBTRAIN_ZIG")
elif "$python" -c 'import ziglang' 2>/dev/null; then
  zig=("$python" -m ziglang)
else
  die "there is no zig, which links for older systems: pip install ziglang, or set SBTRAIN_ZIG"
fi

# Configured every time, so that a folder that was made for other GPUs or with other flags is made right. __FILE__ does
# not name this checkout. ccache would give compilers relative paths, so that the bytes told whether it was there.
map=-ffile-prefix-map=$PWD=.
cmake -S . -B "$build" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DSBTRAIN_CUDA=ON -DSBTRAIN_TESTS=OFF \
  -DSBTRAIN_CCACHE= \
  "-DCMAKE_CUDA_ARCHITECTURES=80-virtual;90a-real" -DCMAKE_CXX_FLAGS="$map" -DCMAKE_CUDA_FLAGS="-Xcompiler=$map" >&2
cmake --build "$build" --target sbtrain_c_api >&2
cudart=$(sed -n 's/^CUDA_cudart_static_LIBRARY:FILEPATH=//p' "$build/CMakeCache.txt")
[ -e "$cudart" ] || die "$build/CMakeCache.txt names no libcudart_static.a"

# The systems' own C++ runtime, of which nothing newer than GLIBCXX_3.4.22 is taken (package_kernels.py looks). -s drops
# the names of nvcc's temporary files, in which alone objects differ from build to build.
linked=$build/wheel/libsbtrain_attention.so
mkdir -p "$build/wheel"
rm -f "$linked"
"${zig[@]}" cc -target x86_64-linux-gnu.2.24 -shared -s -o "$linked" \
  "$build"/kernels/c_api/CMakeFiles/sbtrain_c_api.dir/*.o "$build/kernels/libsbtrain_kernels.a" "$cudart" \
  "$(g++ -print-file-name=libstdc++.so)" "$(g++ -print-file-name=libgcc_s.so.1)" -lpthread -ldl -lrt -lm \
  -Wl,--version-script=kernels/c_api/exports.map -Wl,-z,defs
"$python" scripts/package_kernels.py --library "$linked" --output "$output"
