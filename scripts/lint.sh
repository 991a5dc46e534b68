#!/usr/bin/env bash
# Checks the style: clang-format and names on every source file, clang-tidy on the files that changed.
#
#   scripts/lint.sh         clang-tidy on files that differ from the main branch, at most 30; where none
#                           does, on the 12 that changed last
#   scripts/lint.sh --all   clang-tidy on every file (takes minutes)
#   scripts/lint.sh --fix   let clang-format rewrite the files, and check nothing
#
# clang-tidy reads the compile commands of build/release, so build first.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# The most files that clang-tidy checks without --all: of those that differ from the main branch, and where none does.
# A file takes 4 to 8 seconds of processor time.
limit=30
limit_unchanged=12

all_sources() { git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh'; }
existing() { while IFS= read -r file; do if [ -f "$file" ]; then echo "$file"; fi; done; }

mode=${1:-changed}
case $mode in
  changed | --all | --fix) ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac

if [ "$mode" = --fix ]; then
  all_sources | existing | xargs --no-run-if-empty clang-format-14 -i
  exit 0
fi

echo "clang-format: $(all_sources | existing | wc -l) files"
all_sources | existing | xargs --no-run-if-empty -P "$(nproc)" -n 64 clang-format-14 --dry-run --Werror || {
  echo "lint: clang-format would change the lines above; run scripts/lint.sh --fix" >&2
  exit 1
}

python3 scripts/one_definition.py src kernels

# Tests of one fixture run at the same time, each in a process of its own.
if git grep -n 'testing::TempDir' -- tests; then
  echo "lint: the names above are the same for every process; take a test::TemporaryFolder" >&2
  exit 1
fi

if command -v shellcheck >/dev/null; then
  git ls-files --cached --others --exclude-standard -- '*.sh' .ci/run | existing |
    xargs --no-run-if-empty shellcheck
fi

# clang-tidy 14 cannot read all of the standard headers that come with GCC 13 and later.
if [ "$(g++ -dumpversion | cut -d. -f1)" -gt 12 ]; then
  echo "clang-tidy: skipped, version 14 does not read the headers of GCC $(g++ -dumpversion)"
  exit 0
fi

# The files that differ from the main branch, uncommitted changes included. On an unchanged main branch
# no file differs; then every file counts, and a lower limit keeps those that changed last.
changed_sources() {
  local base
  base=$(git merge-base HEAD origin/main 2>/dev/null || git rev-parse HEAD)
  {
    git diff --name-only --diff-filter=d "$base" -- '*.cpp'
    git ls-files --others --exclude-standard -- '*.cpp'
  } | sort -u
}

# The build's commands, with two changes: clang can read neither the precompiled headers of GCC, which no file needs, nor
# an option that emulated kernels have; and files that are compiled together, by a file that includes them, get a
# command each.
database=$(mktemp -d -t sbtrain-lint.XXXXXX)
trap 'rm -rf "$database"' EXIT
python3 - build/release/compile_commands.json >"$database/compile_commands.json" <<'PYTHON'
import json, re, sys
commands = []
for entry in json.load(open(sys.argv[1])):
    entry["command"] = re.sub(r" -fno-ipa-ra| -Winvalid-pch| -include \S*cmake_pch\.hxx", "", entry["command"])
    files = [entry["file"]]
    if "/Unity/unity_" in entry["file"]:
        files = re.findall(r'#include "(.*)"', open(entry["file"]).read())
    commands += [{**entry, "file": file, "command": entry["command"].replace(entry["file"], file)} for file in files]
json.dump(commands, sys.stdout, indent=0)
PYTHON
compiled=$(grep -o '"file": "[^"]*"' "$database/compile_commands.json" | cut -d'"' -f4 |
  sed "s|^$root/||" | grep -v "^build/" | grep '\.cpp$' | sort -u) # version 14 cannot read CUDA 13
if [ "$mode" = --all ]; then
  files=$compiled
else
  changed=$(changed_sources)
  [ -n "$changed" ] || limit=$limit_unchanged
  files=$(comm -12 <(echo "${changed:-$compiled}") <(echo "$compiled"))
  count=$(grep -c . <<<"$files" || true)
  if [ "$count" -gt "$limit" ]; then
    echo "clang-tidy: $limit of $count files, those that changed last (--all checks every file)"
    # Those that are not committed have changed after all others.
    files=$({
      git diff --name-only HEAD -- '*.cpp'
      git ls-files --others --exclude-standard -- '*.cpp'
      git log --format= --name-only -- '*.cpp'
    } | awk -v limit="$limit" 'FNR == NR { wanted[$0]; next } $0 in wanted && n < limit { print; ++n; delete wanted[$0] }' \
      <(echo "$files") -)
  fi
fi
[ "${count:-0}" -gt "$limit" ] || echo "clang-tidy: $(grep -c . <<<"$files" || true) files"
xargs --no-run-if-empty -P "$(nproc)" -n 1 clang-tidy-14 -p "$database" --quiet \
  <<<"$files" 2> >(grep -v 'warnings generated\|^Suppressed\|^Use -header-filter' >&2 || true)
