#!/usr/bin/env bash
# Builds the image of the Dockerfile for any machine without Docker and without a registry, and tries it: with Debian's
# buildah, over a base that debootstrap makes. Needs root, the packages buildah, debootstrap and runc, and a network.
#
#   scripts/try_image.sh
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in buildah debootstrap; do
  command -v "$tool" > /dev/null || { echo "$tool is missing: apt-get install buildah debootstrap runc" >&2; exit 77; }
done
most_megabytes=250
base=localhost/debian:12
image=localhost/sbtrain:try
export BUILDAH_ISOLATION=chroot

folder=$(mktemp -d)
container=
clean_up() {
  [ -z "$container" ] || buildah rm "$container" > /dev/null
  rm -rf "$folder"
}
trap clean_up EXIT

if ! buildah inspect --type image "$base" > /dev/null 2>&1; then
  debootstrap --variant=minbase bookworm "$folder/base"
  # What the images of Debian called slim leave out as well.
  rm -rf "$folder"/base/var/{lib/apt/lists,cache/apt}/* "$folder"/base/usr/share/{doc,man,locale,info}/*
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$folder/base" /
  buildah commit --quiet --rm "$container" "$base"
  container=
fi
revision=$(git describe --always --dirty --abbrev=12)
buildah build --network host --target cpu --build-arg "CPU_BASE=$base" --build-arg "CPU_RUN_BASE=$base" \
  --build-arg "REVISION=$revision" -t "$image" .

container=$(buildah from "$image")
mounted=$(buildah mount "$container")
megabytes=$(du -sm --apparent-size "$mounted" | cut -f1)
echo "the image has $megabytes MB"
[ "$megabytes" -le $most_megabytes ] || { echo "more than $most_megabytes MB" >&2; exit 1; }
in_container() { buildah run "$container" -- "$@"; }
in_container sbtrain --version | grep -F "($revision)"
[ "$(in_container id -u)" = 1000 ]
in_container touch /work/written
in_container sbtrain quickstart --small-text --steps 101 --folder /work
