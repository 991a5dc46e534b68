#!/usr/bin/env bash
# From a local copy of SlimPajama (JSON lines under Zstandard, as on the Hugging Face hub, or Parquet) to training and
# validation data. The data set holds out documents itself, so both come from folders of their own.
#
#   hf download cerebras/SlimPajama-627B --repo-type dataset --include 'train/chunk1/*' 'validation/*' \
#     --local-dir SlimPajama-627B
#   data/slimpajama.sh SlimPajama-627B corpus/350m/tokenizer.model corpus/350m
#
# Arguments: the copy, with train/ and validation/ in it; the tokenizer, which is trained on the first file of
# train/ where it does not exist (VOCAB pieces, 32000 unless set, as configs/350m_*.yaml have); the folder for train.h5
# and validation.h5, here that of these configurations; then options of `sbtrain prepare`. The source of a document is
# its part of RedPajama, such as RedPajamaCommonCrawl.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# -lt 3 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
copy=$1 tokenizer=$2 output=$3
shift 3
sbtrain=$("$here/../scripts/find_sbtrain.sh")
mkdir -p "$output" "$(dirname "$tokenizer")"

VOCAB=${VOCAB:-32000} "$here/tokenizer_for.sh" "$tokenizer" "$copy/train" '*.jsonl.zst'
for part in validation train; do
  "$sbtrain" prepare --input "$copy/$part" --source-key meta.redpajama_set_name \
    --tokenizer "$tokenizer" --output "$output/$part.h5" "$@"
done
