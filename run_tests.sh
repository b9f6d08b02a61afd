#!/usr/bin/env bash
# Set up, run the series once at the tiny size, and test it.
#   ./run_tests.sh           the series (03 with 180 steps; some twenty minutes on two cores) and the fast tests
#   ./run_tests.sh --lesson          what a lesson page's change can break: the series and the fast tests of the lesson
#   ./run_tests.sh --lesson PAGE     sooner: PAGE alone, such as 03, in what an earlier run left, and the tests of
#                            what that page uses (minutes)
#   ./run_tests.sh --laboratory      the other fast tests: appendices, tpu_time, recipe.py; no series
#   ./run_tests.sh --slow    the series and the slow tests alone
#   ./run_tests.sh --all     all of them, which takes an hour or more
# It goes on where it was stopped. Anything else is handed to pytest.
# Every suite's output is RUN_DIR/pytest-SUITE.log (default runs/test), its last line the result.
set -euo pipefail
case "${RUN_DIR:-/}" in /* | \~*) ;; *) export RUN_DIR="$PWD/$RUN_DIR" ;; esac # relative to where one stands
cd "$(dirname "$0")"
suite=fast
pages=(00 07)
case "${1:-}" in
--lesson | --laboratory | --slow | --all)
  suite="${1#--}"
  shift
  ;;
esac
if [ "$suite" = lesson ] && [[ "${1:-}" =~ ^[0-9][0-9]$ ]]; then
  pages=("$1")
  shift
fi
export SIZE=tiny RUN_DIR="${RUN_DIR:-runs/test}"
mkdir -p "$RUN_DIR"
log="$RUN_DIR/pytest-$suite.log"
./setup.sh train
./setup.sh serve
case "$suite" in slow | all) ./setup.sh harness ;; esac # tests/test_harness.py skips without it
# The series runs with secrets in its environment; tests/test_series.py looks for them in all that it wrote.
if [ "$suite" != laboratory ]; then
  (
    set -a
    # shellcheck source=/dev/null
    . tests/never_shown.env
    MAX_STEPS="${MAX_STEPS-180}" # of 03: tests need a trained model, not the best one; with MAX_STEPS= it trains all
    # What it says goes into a file of the run, too; -i: Ctrl-C ends the series, and its last words are kept.
    ./run_all.sh "${pages[@]}" 2>&1 | tee -i "$RUN_DIR/run_all.log"
    if [ "${#pages[@]}" = 2 ]; then ./run_all.sh own 2>&1 | tee -ia "$RUN_DIR/run_all.log"; fi
  )
fi
# Fast tests in two processes; slow ones start servers and kernels, and want every core themselves.
failed=0
run() { # status 5: nothing was selected, as when the file named holds only slow tests
  local status=0
  .venv/bin/python -m pytest "$@" | tee -a "$log" || status=$?
  [ "$status" = 0 ] || { [ "$status" = 5 ] && [ "$named" != 0 ]; } || failed=1
}
# What a change in one page can break first. The whole lesson is checked without a page's name.
tests_of() {
  printf 'tests/test_%s.py ' lint colab records series change
  case "$1" in
  00) printf 'tests/test_%s.py ' quickstart drawings stats ;;
  01) printf 'tests/test_%s.py ' setup setup_notebook hardware fit ;;
  02) printf 'tests/test_%s.py ' data tool_rows files ;;
  03) printf 'tests/test_%s.py ' train programs track ;;
  04) printf 'tests/test_%s.py ' merge adapters four_bits weights ;;
  05) printf 'tests/test_%s.py ' serve laptop ;;
  06) printf 'tests/test_%s.py ' bench slow_server physics ;;
  07) printf 'tests/test_%s.py ' eval judge stats ;;
  esac
}
if [ "${#pages[@]}" = 1 ] && [ "$#" = 0 ]; then
  # shellcheck disable=SC2046 # the names are words
  set -- $(tests_of "${pages[0]}")
fi
named=$# # tests or options of the caller's own
rm -f "$log"
case "$suite" in
fast | all) run -m "not slow" -n 2 --dist loadfile "$@" ;;
lesson) run -m "not slow and (not laboratory or series)" -n 2 --dist loadfile "$@" ;;
laboratory) run -m "not slow and laboratory and not series" -n 2 --dist loadfile "$@" ;;
esac
case "$suite" in
slow | all) run -m slow "$@" ;;
esac
outcome="$([ "$failed" = 0 ] && echo passed || echo FAILED)"
printf 'run_tests: %s %s, results in %s; %s ends with\n' "$suite" "$outcome" "$RUN_DIR" "$log"
grep -E '^=+ .* in [0-9.]+s.* =+$' "$log" || tail -n 1 "$log"
exit "$failed"
