#!/usr/bin/env bash
# Runs tests/bench/compare_gpus.sh and compare_gpu.sh with programs in place of sbtrain and PyTorch: which options
# arrive, and that a program that fails makes the comparison fail.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
  echo "error: $*" >&2
  cat "$folder/log" >&2
  exit 1
}

# Both refuse a variable of the environment that sbtrain would take for a key of its configuration.
cat > "$folder/sbtrain" << 'EOF'
#!/bin/sh
echo "$*" >> "$CALLS"
if env | grep -q '^SBTRAIN_OPTIONS='; then exit 3; fi
[ "$1" = bench ] && echo '{"tokens_per_second": 2000, "memory_bytes": 1073741824}'
exit "${OWN_CODE:-0}"
EOF
cat > "$folder/python" << 'EOF'
#!/bin/sh
case $1 in
  -c) exec python3 "$@" ;;
  *) echo "$*" >> "$CALLS.python"; echo '{"tokens_per_second": 1000, "memory_bytes": 1073741824}' ; exit "${PYTORCH_CODE:-0}" ;;
esac
EOF
chmod +x "$folder/sbtrain" "$folder/python"
export SBTRAIN=$folder/sbtrain PYTHON=$folder/python CALLS=$folder/calls OWN_OPTIONS=--train.gather_engine=copy_engines

# compare CODE SCRIPT: runs it with the variables of the call.
compare() {
  local expected=$1 script=$2 code=0
  : > "$CALLS"
  "$root/tests/bench/$script" --steps 8 "$root/configs/1b_sb.yaml" > "$folder/log" 2>&1 || code=$?
  [ $code = "$expected" ] || fail "$script: exit code $code, not $expected"
}

for script in compare_gpus.sh compare_gpu.sh; do
  compare 0 $script
  grep -q '2.00x' "$folder/log" || fail "$script: no ratio"
  OWN_CODE=3 compare 1 $script
  PYTORCH_CODE=1 compare 1 $script
done
# Each of the kernels has a row, and its name arrives.
"$root/tests/bench/compare_gpu.sh" --stickbreaking fla --stickbreaking /somewhere "$root/configs/1b_sb.yaml" \
  "$root/configs/1b_rope.yaml" > "$folder/log" 2>&1 || fail "compare_gpu.sh: two kernels"
grep -q '^1b_sb,fla .*2.00x' "$folder/log" || fail "compare_gpu.sh: no row of flash-linear-attention"
[ "$(grep -c '2.00x' "$folder/log")" = 3 ] || fail "compare_gpu.sh: not a row for each kernel"
grep -q -- '--stickbreaking fla' "$CALLS.python" || fail "compare_gpu.sh: the kernel's name did not arrive"
"$root/tests/bench/compare_gpu.sh" --help | tail -n 1 | grep -q 'failed' || fail "compare_gpu.sh: --help is cut off"
compare 0 compare_gpus.sh
grep -q -- "^bench train .*--train.gather_engine=copy_engines" "$CALLS" || fail "OWN_OPTIONS did not arrive"
"$root/tests/bench/compare_gpus.sh" --help | tail -n 1 | grep -q 'failed' || fail "--help is cut off"
