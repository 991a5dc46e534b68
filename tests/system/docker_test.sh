#!/usr/bin/env bash
# Runs scripts/docker.sh with programs in place of Docker and Podman, which write down their arguments.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/bin"
ln -s "$(command -v bash)" "$(command -v dirname)" "$folder/bin/"

# shellcheck source=tests/system/checks.sh
. "$(dirname "$0")/checks.sh"

# An engine that fails at its first argument $2; none if $2 is empty.
engine() {
  cat > "$folder/bin/$1" << EOF
#!$folder/bin/bash
echo "$1 \$* in \$PWD" >> "$folder/calls"
[[ \$1 != "$2" ]]
EOF
  chmod +x "$folder/bin/$1"
}

# Expects that exit status and those calls of engines, one a line.
expect() {
  local status=0 wanted=$1 calls=$2
  shift 2
  : > "$folder/calls"
  (cd / && PATH=$folder/bin bash "$root/scripts/docker.sh" "$@" > "$folder/log" 2>&1) || status=$?
  [[ $status == "$wanted" ]] || fail "docker.sh $*: exit status $status, not $wanted: $(cat "$folder/log")"
  [[ $(cat "$folder/calls") == "$calls" ]] || fail "docker.sh $*: $(cat "$folder/calls")"
}
# What a whole build calls: ENGINE TARGET TAG.
whole() {
  printf '%s\n' "$1 info in $root" "$1 build --target $2 --build-arg REVISION=unknown -t $3 . in $root" "$1 run --rm $3 --version in $root"
}

expect 77 ""
expect 2 "" arm
engine docker ""
expect 0 "$(whole docker cpu sbtrain)"
expect 0 "$(whole docker cuda sbtrain:cuda)" cuda
engine podman ""
expect 0 "$(whole docker cpu sbtrain)" cpu
# A client whose server does not answer.
engine docker info
expect 0 "docker info in $root
$(whole podman cpu sbtrain)"
engine podman info
expect 77 "docker info in $root
podman info in $root"
# An image that cannot be built is not run, and one that does not run is no success.
engine docker build
expect 1 "$(whole docker cpu sbtrain | head -n 2)"
engine docker run
expect 1 "$(whole docker cpu sbtrain)"

for target in cpu cuda; do
  grep -q "^FROM .* AS $target$" "$root/Dockerfile" || fail "the Dockerfile has no target $target"
done
# All that is copied is there, and gets past .dockerignore, which lets nothing else pass: corpora, models and secrets may
# lie in a checkout.
[[ $(grep -v '^#' "$root/.dockerignore" | head -n 1) == '*' ]] || fail ".dockerignore does not begin by leaving all out"
while read -r _ sources; do
  for source in ${sources% *}; do
    [[ -e $root/$source ]] || fail "the Dockerfile copies $source, which does not exist"
    [[ $source == . ]] || grep -qxF "!${source%%/*}" "$root/.dockerignore" || fail ".dockerignore leaves $source out"
  done
done < <(grep '^COPY' "$root/Dockerfile" | grep -v -- --from=)
# Podman needs full names of images.
while read -r name; do
  [[ $name == docker.io/* ]] || fail "the Dockerfile names the image $name, without its registry"
done < <(sed -n 's/^ARG [A-Z_]*BASE=//p' "$root/Dockerfile")
for line in "USER 1000:1000" "EXPOSE 8000" "WORKDIR /work"; do
  [[ $(grep -cxF "$line" "$root/Dockerfile") == 2 ]] || fail "not both images have: $line"
done
