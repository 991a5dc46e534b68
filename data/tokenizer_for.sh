#!/usr/bin/env bash
# Makes a tokenizer for a data set, unless it is there: trained on the set's first file.
#
#   data/tokenizer_for.sh TOKENIZER FOLDER PATTERN
#
# PATTERN is what the names of the data set's files match; without such a file the folder itself is read. VOCAB
# pieces, 32768 unless set.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tokenizer=$1 folder=$2 pattern=$3
if [ -e "$tokenizer" ]; then exit; fi
sbtrain=$("$here/../scripts/find_sbtrain.sh")
first=$(find -L "$folder" -name "$pattern" | LC_ALL=C sort | sed -n 1p)
exec "$sbtrain" tokenizer train --input "${first:-$folder}" --vocab "${VOCAB:-32768}" --output "$tokenizer"
