# shellcheck shell=bash
# What shell tests share; source it. Words that are missing are shown with the text that lacks them.
fail() {
  echo "error: $*" >&2
  exit 1
}
contains() {  # TEXT WORD...
  local text=$1 word
  shift
  for word in "$@"; do
    [[ $text == *"$word"* ]] || fail "'$word' is missing in: ${text:0:3000}"
  done
}
