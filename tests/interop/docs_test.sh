#!/usr/bin/env bash
# Checks the links of all pages, and runs the commands of docs/interop.md, as they are printed, on a small model.
#   docs_test.sh SBTRAIN
# Without transformers, --verify is left out of the commands. Where PyTorch is missing as well, so that there
# is nothing to compare with, the commands still run.
set -euo pipefail
sbtrain=$(realpath "$1")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export OMP_WAIT_POLICY=passive
SBTRAIN_PYTHON=$("$root/scripts/python.sh")
export SBTRAIN_PYTHON
"$SBTRAIN_PYTHON" "$root/tests/interop/docs_links.py" "$root"
mkdir bin
ln -s "$sbtrain" bin/sbtrain
PATH=$folder/bin:$PATH

# The pretrained model: a Llama of three steps.
cp "$root/tests/data/english.jsonl" text.jsonl
cat > first.yaml <<'END'
name: first
device: cpu
model: {layers: 2, width: 32, inner: 44, heads: 4, kv_heads: 2, vocab: 400, attention: {type: softmax, position: rope}}
train: {sequence_length: 64, micro_batch: 2, batch: 4, lr: 3e-3}
data: {sources: [{path: first.h5}], tokenizer: first.model}
stages: [{name: first, length: 3 steps}]
END
{
  sbtrain tokenizer train --input text.jsonl --vocab 400 --output first.model
  sbtrain prepare --input text.jsonl --tokenizer first.model --output first.h5
  sbtrain train --config first.yaml
  sbtrain export --checkpoint runs/first --output pretrained
} > log 2>&1 || { cat log; exit 1; }
rm -rf first.* runs

awk '/^```/ { inside = $0 == "```sh"; next } inside' "$root/docs/interop.md" > commands.sh
[[ $(grep -c '^sbtrain ' commands.sh) -ge 9 ]] || { echo "docs/interop.md has lost its commands"; exit 1; }
if ! "$SBTRAIN_PYTHON" -c 'import torch, transformers' 2> /dev/null; then
  sed -i 's/ --verify$//' commands.sh
fi
bash -euo pipefail commands.sh > log 2>&1 || { cat log; exit 1; }
for file in runs/continued/init_from.json runs/swapped/init_from.json exported/continued/tokenizer.model \
  exported/swapped/modeling_sbtrain.py exported/checked/model.safetensors; do
  [[ -s $file ]] || { cat log; echo "$file is missing"; exit 1; }
done
grep -q LlamaForCausalLM exported/continued/config.json
! grep -q verify commands.sh || grep -q '^verified: ' log || { cat log; exit 1; }
