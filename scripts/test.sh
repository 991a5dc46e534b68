#!/usr/bin/env bash
# Installs what is missing, builds, checks the style and runs the tests.
#
#   scripts/test.sh                all of this, with the release build
#   scripts/test.sh --sanitize     the tests under AddressSanitizer and UndefinedBehaviorSanitizer
#   scripts/test.sh --label unit   only tests of one label: unit, parity, system, interop, multi, gpu
#   scripts/test.sh --tests REGEX  only tests whose name matches
#   scripts/test.sh --no-lint      without clang-format and clang-tidy
#   scripts/test.sh --lint-all     clang-tidy on every file, not only on those that changed
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

preset=release
lint=changed
select=()
while [ $# -gt 0 ]; do
  case $1 in
    --sanitize) preset=sanitize; lint=none ;;
    --label) select+=(-L "${2:?--label needs a label}"); shift ;;
    --tests) select+=(-R "${2:?--tests needs a regular expression}"); shift ;;
    --no-lint) lint=none ;;
    --lint-all) lint=all ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "test: unknown argument $1 (see scripts/test.sh --help)" >&2; exit 2 ;;
  esac
  shift
done

jobs=$(nproc)
say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

say "packages"
sections=(build test)
[ $lint = none ] || sections+=(lint)
scripts/setup.sh "${sections[@]}"

# Sanitizers look at our memory, for which the texts that tests have in any case are enough.
if [ $preset = release ] && [ -z "${SBTRAIN_PYTHON:-}" ] && [ ! -x .venv/bin/python3 ]; then
  if scripts/setup.sh test-python; then
    export SBTRAIN_PYTHON=$root/.venv-test/bin/python3
  else
    echo "test: without these libraries the tests that compare with them are skipped" >&2
  fi
fi

say "build ($preset)"
cmake --preset "$preset" -DSBTRAIN_TESTS=ON --log-level=WARNING
quiet=()
[ -t 1 ] || quiet=(-- --quiet)
log=$(mktemp -t sbtrain-test.XXXXXX)
trap 'rm -f "$log"' EXIT
cmake --build "build/$preset" --parallel "$jobs" "${quiet[@]}" 2>&1 | tee "$log"
# Each compiler has warnings of its own; the code is kept free of those of GCC 12, as it is of clang-tidy's 14.
if [ $lint != none ] && [ "$(g++ -dumpversion | cut -d. -f1)" -le 12 ] && grep -q 'warning: ' "$log"; then
  echo "test: the compiler warns, see above" >&2
  exit 1
fi
rm "$log"

if [ $lint != none ]; then
  say "style"
  if [ $lint = all ]; then scripts/lint.sh --all; else scripts/lint.sh; fi
fi

say "tests"
# Several test programs run at the same time, each with its own OpenMP threads, so idle threads must
# not spin. Many wait for processes that they have started, and for deadlines: with one more than there are cores, two
# of these were idle for a seventh of the time.
export OMP_WAIT_POLICY=passive
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1:strict_string_checks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
exec ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --parallel $((jobs + 2)) \
  "${select[@]}"
