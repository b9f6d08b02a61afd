#!/usr/bin/env bash
# The free TPU from your own machine: Kaggle's v5e-8, twenty hours a week (docs/MACHINES.md).
#   scripts/kaggle.sh smoke  [NAME=VALUE...]             about twenty minutes: thirty steps of the E2B, one server start (SERVE_TRY; unset: 2)
#   scripts/kaggle.sh push   [--resume] [NAME=VALUE...]  01 to 07 of the 31B, at most 8.5 hours; --resume goes on from the last output
#   scripts/kaggle.sh status                             queued, running or ended, and how much quota is left
#   scripts/kaggle.sh output [FOLDER]                    bring what it left into FOLDER (kaggle-output)
# Settings: SIZE, MAX_STEPS, KAGGLE_HOURS, BASE_FROM (hub, mount), SERVE_TRY (0 to 4: serving/v5e.py).
# REPOSITORY: the address that Kaggle clones (unset: your origin). DRY_RUN=1 prints the commands, and sends nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
NAME=gemma4-on-tpu
folder=runs/kaggle # what was pushed, the name of the last, and of the last that was no smoke test

say() { printf 'kaggle: %s\n' "$*" >&2; }
stop() { say "$@"; exit 1; }
usage() {
  sed -n '2,8p' scripts/kaggle.sh | sed 's/^# \{0,1\}//' >&2
  exit 2
}
run() {
  if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}
user() { # the account's name
  local name="${KAGGLE_USERNAME:-}"
  [ -n "$name" ] || name="$(kaggle config view 2>/dev/null | sed -n 's/^- username: //p')"
  case "$name" in "" | None) stop "who are you at Kaggle? Log in (kaggle auth login), or export KAGGLE_USERNAME=yours" ;; esac
  printf '%s' "$name"
}
need_kaggle() {
  command -v kaggle >/dev/null || stop "the kaggle command is missing. Run: pip install kaggle six"
  kaggle --version >/dev/null 2>&1 || stop "the kaggle command doesn't start ($(kaggle --version 2>&1 | tail -n 1)). Run: pip install --upgrade kaggle six"
}
last() { # USER/NAME of the notebook that was pushed last
  [ -f "$folder/last" ] || stop "nothing was pushed from here: $folder/last is missing. Run scripts/kaggle.sh push, or write USER/NAME into it"
  cat "$folder/last"
}
remember() { # remember USER/NAME as the notebook that was pushed last
  printf '%s\n' "$1" >"$folder/last"
  case "$1" in *-smoke) ;; *) printf '%s\n' "$1" >"$folder/last_run" ;; esac
}
without_login() { # without_login ADDRESS, which Kaggle stores with the code: a token may be in yours
  sed -E 's#^(ssh://)?git@([^:/]+)[:/]#https://\2/#; s#^(https?://)[^/]*@#\1#' <<<"$1"
}
repository() { # the clone address
  local address
  address="$(without_login "${REPOSITORY:-$(git remote get-url origin 2>/dev/null || true)}")"
  [ -n "$address" ] || stop "no repository to clone there. Push yours to a public address (git push), or export REPOSITORY=https://github.com/YOU/gemma4-on-tpu"
  printf '%s' "$address"
}
check_pushed() { # check_pushed ADDRESS COMMIT: is what Kaggle shall clone there, for everybody?
  local found remote
  found="$(GIT_ASKPASS=true GIT_TERMINAL_PROMPT=0 git -c credential.helper= ls-remote "$1" 2>/dev/null)" ||
    stop "$1 can't be read without a login, and Kaggle has none. Is the address right, and the repository public?"
  found="$(cut -f1 <<<"$found" | grep -x "$2" || true)"
  for remote in $(git remote); do # of an older commit, our last git fetch knows if it's there
    if [ "$(without_login "$(git remote get-url "$remote")")" = "$1" ]; then
      found+="$(git branch -r --contains "$2" --list "$remote/*" 2>/dev/null)"
    fi
  done
  [ -n "$found" ] ||
    stop "commit ${2:0:12} isn't at $1, from where Kaggle clones. Run: git push"
  [ -z "$(git status --porcelain 2>/dev/null)" ] || say "note: what isn't committed doesn't travel"
}
push() { # push USER/NAME SECONDS [word of kaggle_files.py...]
  local name="$1" seconds="$2" said
  REPOSITORY="$(repository)" COMMIT="$(git rev-parse HEAD)"
  export REPOSITORY COMMIT
  check_pushed "$REPOSITORY" "$COMMIT"
  python3 tools/kaggle_files.py "$folder/$(basename "$name")" "$name" "${@:3}"
  if [ -n "${DRY_RUN:-}" ]; then
    run kaggle kernels push -p "$folder/$(basename "$name")" --accelerator TpuV5E8 -t "$seconds"
    return
  fi
  said="$(kaggle kernels push -p "$folder/$(basename "$name")" --accelerator TpuV5E8 -t "$seconds" 2>&1)" ||
    stop "$said"
  case "$said" in # kaggle says so and ends with status 0
  *"not valid"*"successfully pushed"*)
    remember "$name"
    stop "$said. It was pushed all the same, without that. Stop it on that page, or it uses up your quota"
    ;;
  *"push error"* | *"not valid"*) stop "$said" ;;
  esac
  printf '%s\n' "$said"
  remember "$name"
  say "$name is pushed. It may wait in line for minutes or hours: scripts/kaggle.sh status"
}

case "${1:-}" in
smoke)
  need_kaggle
  name="$(user)/$NAME-smoke" seconds=5400
  case " ${*:2} " in *" SIZE=31b "*) seconds=9000 ;; esac # tools/kaggle_session.py ends a little earlier
  push "$name" "$seconds" --smoke "${@:2}"
  ;;
push)
  need_kaggle
  name="$(user)/$NAME" after=()
  shift
  if [ "${1:-}" = --resume ]; then # another name each time: a notebook can't wait for its own output
    shift
    before="$(last)" number=1
    case "$before" in
    *-smoke)
      [ -f "$folder/last_run" ] ||
        stop "the last push was a smoke test, with nothing to go on from. Leave --resume out"
      before="$(cat "$folder/last_run")"
      ;;
    esac
    if [[ "$before" =~ ^"$name"-([1-9][0-9]*)$ ]]; then number="${BASH_REMATCH[1]}"; fi
    name="$name-$((number + 1))" after=(--after "$before")
  fi
  push "$name" 32400 ${after[@]+"${after[@]}"} "$@" # a Mac's bash 3.2 takes an empty list for an unset one
  ;;
status)
  need_kaggle
  name="$(last)"
  run kaggle kernels status "$name"
  run kaggle quota || true
  ;;
output)
  need_kaggle
  name="$(last)"
  target="${2:-kaggle-output}"
  if [ -z "${DRY_RUN:-}" ] && [ -f "$target/report.json" ]; then # it may be about another session
    mv "$target/report.json" "$target/report.earlier.json"
  fi
  run kaggle kernels output "$name" -p "$target" --force
  [ -n "${DRY_RUN:-}" ] || python3 - "$target/report.json" <<'PY'
import json, sys
from pathlib import Path
path = Path(sys.argv[1])
if not path.exists():
    sys.exit(f"kaggle: there's no {path}: it hasn't ended, or never began. Run scripts/kaggle.sh status")
report = json.loads(path.read_text())
print(f"kaggle: {report['outcome']}\nkaggle: {path}. {report.get('send', '')}")
PY
  ;;
*) usage ;;
esac
