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
logged "[1/5]" "[5/5]" "101/101" "The model is in runs/tiny_sb" "Validation loss  " " bits per byte" " s in all"
logged " $program generate --checkpoint runs/tiny_sb" "in $folder/here:"
contains "$(cat "$folder/here/corpus/logs/tokenizer.model.log")" "training a tokenizer of 4096 pieces"
for file in corpus/tokenizer.model corpus/train.h5 corpus/val.h5 runs/tiny_sb/metrics.jsonl; do
  [[ -s $folder/here/$file ]] || fail "$file is missing"
done
written() { (cd "$folder/here/corpus" && stat -c %y train.h5 val.h5 tokenizer.model logs/*.model.log); }
before=$(written)
quickstart
logged "[5/5]" "The kernel"
[[ $(written) == "$before" ]] || fail "the tokenizer was trained or the text prepared again"
# What a newer file is made of is made again.
touch "$folder/here/corpus/tokenizer.model"
quickstart
[[ $folder/here/corpus/train.h5 -nt $folder/here/corpus/tokenizer.model ]] || fail "old tokens were kept"
# The end of the log of a step that fails is shown.
rm "$folder/here/corpus/train.h5"
echo broken > "$folder/here/corpus/tokenizer.model"
! (quickstart) > "$folder/said" 2>&1 || fail "a broken tokenizer is no error"
contains "$(cat "$folder/said")" "step 3 of 5 has failed" "This is the end of corpus/logs/train.h5.log"
! "$program" quickstart --folder /proc/none > "$folder/log" 2>&1 || fail "a folder that cannot be made is no error"
logged "--folder /proc/none"
