#!/usr/bin/env bash
# Rebuild notebooks/*.ipynb from the numbered .py files, which are the source.
#   ./update_notebooks.sh                    regenerate; outputs stay where the code cells did not change
#   ./update_notebooks.sh --execute [--all]  also run those without outputs (or all), at the tiny size
#   ./update_notebooks.sh --take             take the outputs of all that run_all.sh has executed in RUN_DIR
#   ./update_notebooks.sh --check            change nothing, exit 1 if something is out of date
set -euo pipefail
case "${RUN_DIR:-/}" in /* | \~*) ;; *) export RUN_DIR="$PWD/$RUN_DIR" ;; esac # relative to where one stands
cd "$(dirname "$0")"
python=.venv/bin/python
if ! [ -x "$python" ]; then ./setup.sh train; fi
exec "$python" tools/notebooks.py "$@"
