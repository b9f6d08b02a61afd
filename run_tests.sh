#!/usr/bin/env bash
# Set up, run the series once at the tiny size, and test it.
#   ./run_tests.sh           the series (about 12 minutes on two cores) and the fast tests
#   ./run_tests.sh --all     the slow tests too
# Anything else is handed to pytest.
set -euo pipefail
cd "$(dirname "$0")"
marks=(-m "not slow")
if [ "${1:-}" = --all ]; then
  marks=()
  shift
fi
export SIZE=tiny RUN_DIR="${RUN_DIR:-runs/test}"
./setup.sh train
./setup.sh serve
if [ ${#marks[@]} = 0 ]; then ./setup.sh browser; fi
./run_all.sh
.venv/bin/python -m pytest ${marks[@]+"${marks[@]}"} "$@" | tee "$RUN_DIR/pytest.log"
printf 'run_tests: passed, results in %s, log in %s/pytest.log\n' "$RUN_DIR" "$RUN_DIR"
