#!/usr/bin/env bash
# The first hour on a real slice: what is here, load, compile, thirty steps, and on the
# serving slice the server's start and one point of load. At most an hour; run it again to go on.
#   ./first_hour.sh                 at the size of this machine (SIZE=tiny|e2b|31b to choose)
#   ./first_hour.sh --minutes 30    a shorter limit
# Results: RUN_DIR/first_hour/report.json, and a block of Markdown to send as an issue.
set -euo pipefail
case "${RUN_DIR:-/}" in /* | \~*) ;; *) export RUN_DIR="$PWD/$RUN_DIR" ;; esac # relative to where one stands
cd "$(dirname "$0")"
python=.venv/bin/python
[ -x "$python" ] || python=python3 # before setup.sh has run; the script is standard library only
exec "$python" tools/first_hour.py "$@"
