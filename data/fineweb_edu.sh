#!/usr/bin/env bash
# From a local copy of FineWeb-Edu (Parquet, as on the Hugging Face hub) to training and validation data.
#
#   hf download HuggingFaceFW/fineweb-edu --repo-type dataset --include 'sample/10BT/*' --local-dir fineweb-edu
#   data/fineweb_edu.sh fineweb-edu fineweb.model corpus/fineweb
#
# Arguments: the copy, or any folder of it; the tokenizer, which is trained on the copy's first file where
# it does not exist (VOCAB pieces, 32768 unless set); the folder for train.h5 and train.validation.h5; then
# options of `sbtrain prepare`. SPLIT is the share of documents held out, 0.001 unless set. The source of a
# document is the crawl that it comes from. Parquet needs pyarrow: scripts/setup.sh python.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# -lt 3 ]; then
  sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
copy=$1 tokenizer=$2 output=$3
shift 3
sbtrain=$("$here/../scripts/find_sbtrain.sh")
mkdir -p "$output"

"$here/tokenizer_for.sh" "$tokenizer" "$copy" '*.parquet'
exec "$sbtrain" prepare --input "$copy" --format parquet --source-key dump --tokenizer "$tokenizer" \
  --split "${SPLIT:-0.001}" --output "$output/train.h5" "$@"
