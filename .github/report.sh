#!/usr/bin/env bash
# Open an issue with the end of a log, or add it to the open one. Needs gh and GH_TOKEN.
#   .github/report.sh LOG
set -euo pipefail
log="$1"
[ -f "$log" ] || echo "there is no log: the run failed before its tests" >"$log"
title="The weekly run with the newest libraries fails"
body="$(mktemp)"
trap 'rm -f "$body"' EXIT
{
  printf 'Run: %s\n\nWhat changed, and the end of the log:\n\n```\n' "${RUN_URL:-unknown}"
  sed -n '/^changed versions/,/^setup: /p' "$log" | grep '^[<>]' | head -n 100 || true
  echo "[...]"
  tail -n 60 "$log" | cut -c1-500
  printf '```\n'
} >"$body"
number="$(gh issue list --state open --search "\"$title\" in:title" --json number --jq '.[0].number // empty')"
if [ -n "$number" ]; then
  gh issue comment "$number" --body-file "$body"
else
  gh issue create --title "$title" --body-file "$body"
fi
