#!/usr/bin/env bash
# `sbtrain quickstart` with the text that comes along and few steps; what is done is not done again.
#   quickstart_test.sh PROGRAM
set -euo pipefail
program=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# shellcheck source=tests/system/checks.sh
. "$(dirname "$0")/checks.sh"
quickstart() {
  "$program" quickstart --small-text --steps 101 --folder "$folder/here" > "$folder/log" 2>&1 ||
    fail "exit status $?: $(cat "$folder/log")"
}
logged() { contains "$(cat "$folder/log")" "$@"; }

quickstart
logged "[1/5]" "[5/5]" "training a tokenizer of 4096 pieces" "101/101" "The model is in runs/tiny_sb"
for file in corpus/tokenizer.model corpus/train.h5 corpus/val.h5 runs/tiny_sb/metrics.jsonl; do
  [[ -s $folder/here/$file ]] || fail "$file is missing"
done
before=$(stat -c %Y "$folder/here/corpus/train.h5")
quickstart
logged "[5/5]" "The kernel"
grep -q "training a tokenizer" "$folder/log" && fail "the tokenizer was trained again"
[[ $(stat -c %Y "$folder/here/corpus/train.h5") == "$before" ]] || fail "the text was prepared again"
! "$program" quickstart --folder /proc/none > "$folder/log" 2>&1 || fail "a folder that cannot be made is no error"
logged "--folder /proc/none"
