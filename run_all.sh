#!/usr/bin/env bash
# Set up what is missing and execute the notebooks in order, in a Jupyter kernel.
#   ./run_all.sh              01 to 07 at the size at hand (SIZE=tiny|e2b|31b; unset: what the hardware allows)
#   ./run_all.sh 01 04        a range: training and serving of the 31B are two machines
#   ./run_all.sh 02           one notebook
#   ./run_all.sh --fresh ...  forget earlier results of this size first
# Results go to RUN_DIR (default runs/<size>), executed notebooks to RUN_DIR/notebooks.
# Finished artifacts of an earlier run are reused; no server is left running, however this ends.
set -euo pipefail
cd "$(dirname "$0")"
fresh=no
range=()
for word in "$@"; do
  case "$word" in
  --fresh) fresh=yes ;;
  [0-9][0-9]) range+=("$word") ;;
  *) sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2 ;;
  esac
done
first="${range[0]:-01}"
last="${range[1]:-${range[0]:-07}}"

./setup.sh train
python="$PWD/.venv/bin/python"
SIZE="$("$python" -c 'import helpers; print(helpers.size())')"
export SIZE RUN_DIR="${RUN_DIR:-runs/$SIZE}" PYTHONUNBUFFERED=1
stop_server() { "$python" -m helpers.server stop >/dev/null 2>&1 || true; }
trap stop_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [ "$fresh" = yes ]; then
  stop_server
  for part in setup.json data train merged adapter merge.json serve bench eval figures notebooks times.json; do
    rm -rf "${RUN_DIR:?}/$part"
  done
fi
"$python" tools/notebooks.py --series "$first" "$last"
