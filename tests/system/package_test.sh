#!/usr/bin/env bash
# Packs what has been built, twice, installs it into an empty environment, and trains with it where nothing of the build
# or of the checkout can be seen.
#   package_test.sh SOURCE BUILD_FOLDER
# Exit status 77: what packs (scripts/setup.sh package) is not installed.
set -euo pipefail
source=$1
build=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# shellcheck source=tests/system/checks.sh
. "$(dirname "$0")/checks.sh"

status=0
"$source/scripts/package.sh" --build "$build" --output "$folder/one" > "$folder/log" 2>&1 || status=$?
[[ $status != 77 ]] || { cat "$folder/log"; exit 77; }
[[ $status == 0 ]] || fail "package.sh: $(cat "$folder/log")"
wheel=$(echo "$folder"/one/*.whl)
contains "$(basename "$wheel")" -py3-none- manylinux x86_64
"$source/scripts/package.sh" --build "$build" --output "$folder/two" > "$folder/log" 2>&1
cmp "$wheel" "$folder/two/$(basename "$wheel")" || fail "the same build gives other bytes"

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-index --disable-pip-version-check "$wheel"
sbtrain=$folder/venv/bin/sbtrain
program=$(echo "$folder"/venv/lib/python3*/site-packages/sbtrain/program/bin/sbtrain)
run() { (cd "$folder" && env -i PATH=/usr/bin:/bin HOME="$folder" "$@"); }

# What it loads lies beside it, but for the C and C++ libraries of the system.
outside=$(ldd "$program" | sed -n 's/.* => \(.*\) (.*/\1/p' | grep -vE "^$folder|/(libc|libm|libgcc_s|libstdc\+\+|libz)\.so" || true)
[[ -z $outside ]] || fail "libraries from elsewhere: $outside"
contains "$(readelf -d "$program" | grep -E 'R(UN)?PATH')" 'nvidia/nccl/lib' 'nvidia/cudnn/lib' 'nvidia/cu13/lib'
doctor=$(run "$sbtrain" doctor)
contains "$doctor" "the CPU           yes" "sbtrain/program/lib/sbtrain/libopenblas.so.0"
for list in "$folder"/venv/lib/python3*/site-packages/sbtrain-*.dist-info; do
  [[ -s $list/licenses/LICENSES.md && -s $list/licenses/libhdf5-dev.txt ]] || fail "licences are missing in $list"
done

# The steps of the quickstart, with two steps of training.
text=$source/tests/data/english.jsonl
mkdir "$folder/corpus"
run "$sbtrain" tokenizer train --input "$text" --vocab 1024 --output corpus/tokenizer.model > "$folder/log" 2>&1 ||
  fail "$(cat "$folder/log")"
run "$sbtrain" prepare --input "$text" --tokenizer corpus/tokenizer.model --output corpus/train.h5 > "$folder/log" 2>&1
cp "$folder/corpus/train.h5" "$folder/corpus/val.h5"
run "$sbtrain" --config configs/tiny_sb.yaml --model.vocab=1024 --stages.0.length="2 steps" \
  --stages.0.schedule.warmup="1 steps" > "$folder/log" 2>&1 || fail "$(cat "$folder/log")"
contains "$(run "$sbtrain" generate --checkpoint runs/tiny_sb --prompt The --max-tokens 4)" The
