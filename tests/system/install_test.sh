#!/usr/bin/env bash
# Installs into an empty folder, and uses what lies there: the program, its man page, the completions.
#   install_test.sh CMAKE BUILD_FOLDER
set -euo pipefail
cmake=$1
build=$2
source=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# shellcheck source=tests/system/checks.sh
. "$(dirname "$0")/checks.sh"

"$cmake" --install "$build" --prefix "$folder" > "$folder.log" 2>&1 || fail "$(cat "$folder.log")"
rm -f "$folder.log"
for file in bin/sbtrain share/man/man1/sbtrain.1 share/bash-completion/completions/sbtrain \
  share/zsh/site-functions/_sbtrain share/doc/sbtrain/README.md share/doc/sbtrain/docs/config.md \
  share/sbtrain/configs/tiny_sb.yaml share/sbtrain/python/modeling_sbtrain.py share/sbtrain/data/fetch_corpus.py \
  share/sbtrain/data/english.jsonl share/sbtrain/scripts/plot_loss.py share/sbtrain/scripts/log_wandb.py \
  share/doc/sbtrain/LICENSES.md; do
  [[ -s $folder/$file ]] || fail "$file is not installed"
done

contains "$("$folder/bin/sbtrain" --version)" "sbtrain "
contains "$("$folder/bin/sbtrain" train --dry-run --config "$folder/share/sbtrain/configs/tiny_sb.yaml")" \
  parameters
# Its configurations have the same names in any folder, also in `include:` of one's own file.
mkdir "$folder/elsewhere"
printf 'include: configs/tiny_sb.yaml\nname: mine\n' > "$folder/elsewhere/mine.yaml"
for config in configs/tiny_sb.yaml mine.yaml; do
  contains "$(cd "$folder/elsewhere" && "$folder/bin/sbtrain" train --dry-run --config $config)" parameters
done
[[ $(SBTRAIN='' "$folder/share/sbtrain/scripts/find_sbtrain.sh") == "$folder/bin/sbtrain" ]] ||
  fail "its scripts do not find it"
# shellcheck disable=SC2016 # the scripts' variables
while read -r called; do # whatever a script calls comes with it
  [[ -s $folder/share/sbtrain/$called ]] || fail "an installed script calls $called, which is not installed"
done < <(grep -hoE '("\$python"|python3|^\.|\$\() ?scripts/[a-z_0-9]+\.(sh|py)' "$folder"/share/sbtrain/scripts/*.sh |
  grep -oE 'scripts/.*' | sort -u)
# No link of the installed pages leads nowhere.
python3 "$source/tests/docs/docs_links.py" "$folder/share/doc/sbtrain" || fail "links (above)"
# A tree that is moved is whole, and needs nothing of the build: the program has no path into it.
if readelf -d "$folder/bin/sbtrain" | grep -E 'R(UN)?PATH' | grep -qF "$build"; then fail "a path into the build"; fi
# All its texts name files that an installation has.
for text in "" "--help" "train --help"; do
  read -r -a words <<< "$text"
  if "$folder/bin/sbtrain" "${words[@]}" 2>&1 | grep -E 'scripts/|\.cpp'; then fail "'sbtrain $text' names a file of a checkout"; fi
done
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
