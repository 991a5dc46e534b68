#!/usr/bin/env bash
# Turns a model with rotary positions into stick-breaking: how many tokens it takes to come near the loss that it had.
#
#   scripts/from_rope.sh [--out DIR] [--from RUN] [--corpus FOLDER] [--jobs N] [--rates LR,LR,...] [MODEL]
#                        [-- TRAINING OPTIONS]
#   scripts/from_rope.sh --from runs/lengths/seed-1/rope
#   scripts/from_rope.sh --from runs/pair_350m/rope --out runs/from_rope_350m --corpus corpus/packages 350m_sb
#
# RUN is a run of configs/lengths_rope.yaml (default: runs/lengths/seed-1/rope), such as scripts/lengths.sh makes;
# --corpus is that of RUN. configs/from_rope_MODEL.yaml (sb) is trained from its weights with each of --rates
# (1e-4,3e-4,1e-3,2e-3,4e-3), one for each GPU at a time (--jobs). DIR (default: runs/from_rope) gets from_rope.md,
# from_rope.png and results.jsonl. The same command continues after a stop (exit code 85). The variable SBTRAIN names a
# program to use instead of the release build's, PYTHON another python3.
# shellcheck disable=SC2317 # jobs call its functions
set -euo pipefail

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=from_rope
models=(sb)
declare -A values=([out]=runs/from_rope [from]=runs/lengths/seed-1/rope [corpus]="" [jobs]=""
  [rates]="1e-4,3e-4,1e-3,2e-3,4e-3")
# shellcheck source=scripts/experiment.sh
. scripts/experiment.sh
parse_command_line "$called_from" "$@"
out=${values[out]}
[ -f "${values[from]}/metrics.jsonl" ] || usage_error "--from: ${values[from]} is no run; scripts/lengths.sh rope makes one"
[ ${#models[@]} -eq 1 ] || usage_error "one model at a time: another needs another --from and --out"
find_corpus

for rate in ${values[rates]//,/ }; do
  is_complete "$out/lr=$rate" ||
    start_job "lr=$rate" complete_run "$out/lr=$rate" "configs/from_rope_${models[0]}.yaml" \
      --init-from "${values[from]}" "${corpus_options[@]}" "${options[@]}" --train.lr="$rate"
done
finish_jobs

runs=("${values[from]}")
labels=original
for rate in ${values[rates]//,/ }; do
  if is_complete "$out/lr=$rate"; then runs+=("$out/lr=$rate") labels=$labels,rate\ $rate; fi
done
"$python" scripts/collect_results.py --labels "$labels" "${runs[@]}" -o "$out/results.jsonl"
"$python" - "$out/results.jsonl" >"$out/from_rope.md" <<'PYTHON'
import json, sys
original, *turned = map(json.loads, open(sys.argv[1], encoding="utf-8"))
goal = original["validation"]["loss"][-1] + 0.05
print(f"Loss of the original: {goal - 0.05:.3f} nats. Tokens until a validation is within 0.05 nats of it:\n")
print("| | tokens | best loss |\n| --- | --- | --- |")
for run in turned:
    places = zip(run["validation"]["tokens"], run["validation"]["loss"])
    reached = next((f"{tokens / 1e6:.1f}M" for tokens, loss in places if loss is not None and loss <= goal), "not reached")
    best = min((loss for loss in run["validation"]["loss"] if loss is not None), default=float("nan"))
    print(f"| {run['label']} | {reached} | {best:.3f} |")
PYTHON
echo "from_rope: $out/from_rope.md"
if can_draw scripts/plot_loss.py; then
  # Of the original's first losses the plot has no room.
  top=$("$python" -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["validation"]["loss"][-1] + 1.5)' \
    "$out/results.jsonl")
  "$python" scripts/plot_loss.py --labels "$labels" --top "$top" --title "Rotary positions turned into stick-breaking" \
    "${runs[@]}" -o "$out/from_rope.png"
fi
end_with_jobs
