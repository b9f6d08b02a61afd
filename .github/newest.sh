#!/usr/bin/env bash
# Replace the pinned versions by the newest that fit together: what the notebooks and the tests import
# (the first part of train.txt and test.txt) is upgraded, and takes along what it needs.
#   .github/newest.sh [PYTHON]   upgrade .venv, or that Python, and say what changed
#   .github/newest.sh --names    only print the names
set -euo pipefail
cd "$(dirname "$0")/.."
names() { # the requirements above "# and what those pull in", without their versions
  for file in requirements/train.txt requirements/test.txt; do
    sed -n '/^# and what those pull in/q; s/^\([A-Za-z0-9_.-]*\)==.*/\1/p' "$file"
  done
}
if [ "${1:-}" = --names ]; then
  names
  exit
fi
python="${1:-.venv/bin/python}"
before="$(mktemp)"
trap 'rm -f "$before"' EXIT
"$python" -m pip freeze >"$before"
mapfile -t wanted < <(names)
"$python" -m pip install -q --disable-pip-version-check --upgrade --upgrade-strategy eager "${wanted[@]}"
echo "changed versions (< pinned, > newest):"
"$python" -m pip freeze | diff "$before" - || true
