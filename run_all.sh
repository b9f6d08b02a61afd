#!/usr/bin/env bash
# Set up what is missing and execute the notebooks in order, in a Jupyter kernel.
#   ./run_all.sh              01 to 07 at the size at hand (SIZE=tiny|e2b|31b; unset: what the hardware allows)
#   ./run_all.sh 01 04        a range: training and serving of the 31B are two machines
#   ./run_all.sh 00           one notebook, here the quickstart; 06 alone gets the server as 05 left it
#   ./run_all.sh own          the page for your own data, with its example
# Results go to RUN_DIR (default runs/<size>), executed notebooks to RUN_DIR/notebooks.
# Finished artifacts of an earlier run are reused; delete what is to be made anew.
# No server that it started is left when it ends. RUN_UNTIL (seconds since 1970): no page begins after it.
set -euo pipefail
case "${RUN_DIR:-/}" in /* | \~*) ;; *) export RUN_DIR="$PWD/$RUN_DIR" ;; esac # relative to where one stands
cd "$(dirname "$0")"
for word in "$@"; do
  case "$word" in
  [0-9][0-9] | own) ;;
  *) sed -n '2,9p' "$(basename "$0")" | sed 's/^# \{0,1\}//' >&2; exit 2 ;;
  esac
done
./setup.sh train </dev/null
export PYTHONUNBUFFERED=1
exec .venv/bin/python tools/series.py "$@"
