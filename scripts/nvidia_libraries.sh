#!/usr/bin/env bash
# Puts the libraries of NVIDIA that the program loads into a folder: cuBLAS, cuDNN and NCCL, from the packages of the
# section [wheel-cuda] of scripts/dependencies.txt, which pip fetches (1.3 GB), and their licences. The driver is not
# among them.
#
#   scripts/nvidia_libraries.sh FOLDER
set -euo pipefail
output=$(realpath -m "${1:?give the folder}")
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sed -n '/^\[wheel-cuda\]/,/^$/s/^wheel://p' scripts/dependencies.txt > "$folder/requirements"
"$(scripts/python.sh)" -m pip install --quiet --no-deps --target "$folder/pip" --requirement "$folder/requirements"
mkdir -p "$output"
mv "$folder"/pip/nvidia/*/lib/*.so.* "$output"
for package in "$folder"/pip/*.dist-info; do
  licences=$output/licenses/$(basename "$package" .dist-info)
  mkdir -p "$licences"
  find "$package" -type f -iname 'license*' -exec cp -t "$licences" {} +
done
