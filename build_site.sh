#!/usr/bin/env bash
# Build the series as a site with search: site/html/index.html. The notebooks' stored outputs are shown, nothing is
# executed; the pages need no network. Anything else is handed to Sphinx (-W makes its warnings errors).
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh site
SITE="${SITE:-site}"
.venv-site/bin/python -m sphinx -q -b html -c tools/site -d "$SITE/doctrees" "$@" . "$SITE/html"
printf 'build_site: open %s/html/index.html\n' "$SITE"
