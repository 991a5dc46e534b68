#!/usr/bin/env bash
# Builds an image of the Dockerfile for machines without Docker and without a registry of images, and tries it: with
# Debian's buildah, over a base that debootstrap makes. Needs root, the packages buildah, debootstrap and runc, and a
# network.
#
#   scripts/try_image.sh [--build FOLDER] [cpu|cuda]
#
# cuda: in place of NVIDIA's image stands what is below it, an Ubuntu 24.04, with this machine's CUDA toolkit, in
# /usr/local/cuda.
# --build FOLDER takes the program of a build folder of this machine, a Debian 12, instead of compiling it once more.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

target=cpu
build=
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=$(cd "$here" && cd "${2:?--build needs a folder}" && pwd); shift ;;
    cpu | cuda) target=$1 ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
  esac
  shift
done
for tool in buildah debootstrap; do
  command -v "$tool" > /dev/null || { echo "$tool is missing: apt-get install buildah debootstrap runc" >&2; exit 77; }
done
most_megabytes=250
[ "$target" = cpu ] || most_megabytes=2100
base=localhost/debian:12
if [ "$target" = cuda ] && [ -z "$build" ]; then base=localhost/ubuntu:24.04; fi
image=localhost/sbtrain:try-$target
export BUILDAH_ISOLATION=chroot

folder=$(mktemp -d)
container=
clean_up() {
  [ -z "$container" ] || buildah rm "$container" > /dev/null
  rm -rf "$folder"
}
trap clean_up EXIT

# Makes an image of the container.
commit() {
  buildah commit --quiet --rm "$container" "$1"
  container=
}

if ! buildah inspect --type image $base > /dev/null 2>&1; then
  if [ $base = localhost/debian:12 ]; then
    debootstrap --variant=minbase bookworm "$folder/base"
  else
    # Debian 12 has neither Ubuntu's keys nor a script of that name; all of Ubuntu's are one file. The image is for this
    # trial only.
    debootstrap --no-check-gpg --variant=minbase --components=main,universe noble "$folder/base" \
      http://archive.ubuntu.com/ubuntu /usr/share/debootstrap/scripts/gutsy
  fi
  # What this machine trusts, such as a proxy's certificate, which pip needs.
  mkdir -p "$folder/base/usr/local/share/ca-certificates"
  cp /etc/ssl/certs/ca-certificates.crt "$folder/base/usr/local/share/ca-certificates/this_machine.crt"
  # What the images of Debian called slim leave out as well.
  rm -rf "$folder"/base/var/{lib/apt/lists,cache/apt}/* "$folder"/base/usr/share/{doc,man,locale,info}/*
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$folder/base" /
  commit $base
fi
options=(--build-arg "CPU_BASE=$base" --build-arg "CPU_RUN_BASE=$base")
if [ "$target" = cuda ]; then
  options=(--build-arg "CUDA_BASE=localhost/cuda" --build-arg "CUDA_RUN_BASE=$base")
  if [ -z "$build" ]; then
    container=$(buildah from $base)
    # shellcheck disable=SC2016 # the container's PATH
    buildah config --env 'PATH=/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' "$container"
    commit localhost/cuda
    options+=(--volume "$(realpath /usr/local/cuda):/usr/local/cuda:ro")
  fi
fi
revision=$(git describe --always --dirty --abbrev=12)
if [ -n "$build" ]; then
  # A context with the name of a stage stands in its place.
  cmake --install "$build" --prefix "$folder/stage/installed" --strip > /dev/null
  scripts/runtime_packages.sh "$build/sbtrain" > "$folder/stage/packages"
  [ "$target" = cpu ] || scripts/nvidia_libraries.sh "$folder/stage/nvidia"
  options+=(--build-context "$target-build=$folder/stage")
  revision=$("$build/sbtrain" --version | sed -n '1s/.*(\(.*\))$/\1/p')
fi
buildah build --network host --target "$target" "${options[@]}" --build-arg "REVISION=$revision" -t "$image" .

container=$(buildah from "$image")
mounted=$(buildah mount "$container")
megabytes=$(du -sm --apparent-size "$mounted" | cut -f1)
echo "the image has $megabytes MB"
[ "$megabytes" -le $most_megabytes ] || { echo "more than $most_megabytes MB" >&2; exit 1; }
in_container() { buildah run "$container" -- "$@"; }
in_container sbtrain --version | tee "$folder/version"
grep -qF "($revision)" "$folder/version"
if [ "$target" = cuda ] && grep -E 'cuDNN|NCCL' "$folder/version" | grep -q 'cannot load'; then
  echo "the program does not find NVIDIA's libraries" >&2
  exit 1
fi
[ "$(in_container id -u)" = 1000 ]
in_container touch /work/written
in_container sbtrain quickstart --small-text --steps 101 --folder /work
