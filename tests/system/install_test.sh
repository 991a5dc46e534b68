#!/usr/bin/env bash
# Installs into an empty folder, and uses what lies there: the program, its man page, the completions.
#   install_test.sh CMAKE BUILD_FOLDER
set -euo pipefail
cmake=$1
build=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
  echo "error: $*" >&2
  exit 1
}
contains() {  # TEXT WORD...
  local text=$1 word
  shift
  for word in "$@"; do
    [[ $text == *"$word"* ]] || fail "'$word' is missing in: ${text:0:2000}"
  done
}

"$cmake" --install "$build" --prefix "$folder" > "$folder.log" 2>&1 || fail "$(cat "$folder.log")"
rm -f "$folder.log"
for file in bin/sbtrain share/man/man1/sbtrain.1 share/bash-completion/completions/sbtrain \
  share/zsh/site-functions/_sbtrain share/doc/sbtrain/README.md share/doc/sbtrain/docs/config.md \
  share/sbtrain/configs/tiny_sb.yaml share/sbtrain/python/modeling_sbtrain.py; do
  [[ -s $folder/$file ]] || fail "$file is not installed"
done

contains "$("$folder/bin/sbtrain" --version)" "sbtrain "
contains "$("$folder/bin/sbtrain" train --dry-run --config "$folder/share/sbtrain/configs/tiny_sb.yaml")" \
  parameters
[[ $("$folder/bin/sbtrain" --help) != *manual* ]] || fail "the command for the build is listed"

# Completes the last of the words given, as bash does.
completion=$folder/share/bash-completion/completions/sbtrain
bash -n "$completion"
complete_words() {
  bash -c 'set -eu; source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
           compopt() { :; }; _sbtrain; printf "%s\n" "${COMPREPLY[@]-}"' - "$completion" "$@"
}
contains "$(complete_words sbtrain tr)" train
contains "$(complete_words sbtrain "")" train eval generate sweep
contains "$(complete_words sbtrain train --train.l)" --train.lr=
contains "$(complete_words sbtrain --model.wi)" --model.width=
contains "$(complete_words sbtrain bench train --wa)" --warmup
contains "$(complete_words sbtrain eval --seq)" --sequence-length
[[ -z $(complete_words sbtrain eval --train.l) ]] || fail "eval takes no keys"
if command -v zsh > /dev/null; then zsh -n "$folder/share/zsh/site-functions/_sbtrain"; fi

page=$folder/share/man/man1/sbtrain.1
if command -v groff > /dev/null && command -v man > /dev/null; then
  warnings=$(LC_ALL=C.UTF-8 MANWIDTH=100 man --warnings -E UTF-8 -l -Tutf8 -Z "$page" 2>&1 > /dev/null)
  [[ -z $warnings ]] || fail "the man page: $warnings"
  contains "$(LC_ALL=C.UTF-8 MANWIDTH=100 man -l "$page" | col -b)" "EXIT STATUS" "train.lr" \
    "sbtrain bench train" "--max-tokens"
fi
