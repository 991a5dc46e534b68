#!/usr/bin/env bash
# Builds the images of the Dockerfile with Docker or Podman, and runs the program in them once.
#   scripts/docker.sh              the image for any machine
#   scripts/docker.sh cuda         the image with the CUDA backend
# Exit status 77: neither Docker nor Podman runs on this machine, so nothing was tried.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-cpu}
case $target in
cpu) tag=sbtrain ;;
cuda) tag=sbtrain:cuda ;;
*)
  echo "usage: scripts/docker.sh [cpu|cuda]" >&2
  exit 2
  ;;
esac

builder=
for candidate in docker podman; do
  # An installed client says nothing about a server that answers.
  if command -v "$candidate" > /dev/null && "$candidate" info > /dev/null 2>&1; then
    builder=$candidate
    break
  fi
done
if [[ -z $builder ]]; then
  echo "neither Docker nor Podman runs on this machine: the Dockerfile was not built" >&2
  exit 77
fi
revision=$(git describe --always --dirty --abbrev=12 2> /dev/null || echo unknown)
"$builder" build --target "$target" --build-arg "REVISION=$revision" -t "$tag" .
"$builder" run --rm "$tag" --version
