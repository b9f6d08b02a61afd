#!/usr/bin/env bash
# Make, or reuse, an environment of this series.
#   ./setup.sh train                 .venv        JAX, Tunix, the notebooks and their tests (Python 3.11)
#   ./setup.sh serve                 .venv-serve  vLLM on the CPU (Linux x86-64, Python 3.11)
#   ./setup.sh dryrun                .libtpu      the TPU's compiler for notebook 08 (Linux x86-64, 0.7 GB, no TPU)
#   ./setup.sh site                  .venv-site   Sphinx, for build_site.sh
#   ./setup.sh browser               adds JupyterLab and a headless Chromium, for tests/test_browser.py
#   ./setup.sh train --into PYTHON   install what the notebooks import into that Python (3.11 to 3.13)
# On a machine with TPU chips (tables/hardware.py looks) `train` installs JAX for TPU, elsewhere for the CPU.
# A second run changes nothing and takes a second. Environment variables:
#   PYTHON       the Python 3.11 to make environments with (default: python3.11)
#   TORCH_INDEX  where pip finds the CPU build of PyTorch when its own index has none
set -euo pipefail
cd "$(dirname "$0")"
LIBTPU=0.0.42.1 # the version of data/dryrun/
TORCH_INDEX="${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

say() { printf '%s\n' "setup: $*"; }
stop() { printf '%s\n' "setup: $*" >&2; exit 1; }

root_shell() { # run a command as root where that needs no password
  if [ "$(id -u)" = 0 ]; then "$@"; elif sudo -n true 2>/dev/null; then sudo "$@"; else return 1; fi
}

apt_install() {
  command -v apt-get >/dev/null || return 1
  { root_shell env DEBIAN_FRONTEND=noninteractive apt-get install -y -q "$@" ||
    { root_shell apt-get update -q && root_shell env DEBIAN_FRONTEND=noninteractive apt-get install -y -q "$@"; }
  } >/dev/null 2>&1
}

find_python() { # Colab's own is newer, but its apt knows 3.11
  local candidate try
  for try in 1 2; do
    for candidate in "${PYTHON:-}" python3.11 python3; do
      if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        "$candidate" -c 'import sys; print(sys.executable)'
        return
      fi
    done
    if [ "$try" = 2 ]; then break; fi
    say "installing Python 3.11" >&2
    apt_install python3.11 python3.11-venv || break
  done
  stop "Python 3.11 is missing. On Ubuntu 22.04: sudo add-apt-repository ppa:deadsnakes/ppa && sudo apt-get install -y python3.11 python3.11-venv (or name one: PYTHON=/path/to/python3.11)"
}

make_venv() { # make_venv FOLDER
  if "$1/bin/python" -m pip --version >/dev/null 2>&1; then
    "$1/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
      stop "$1 is $("$1/bin/python" --version), the series needs Python 3.11. Remove it (rm -rf $1) and run this again"
    return
  fi
  local python
  python="$(find_python)"
  say "making $1 with $python"
  rm -rf "$1"
  "$python" -m venv "$1" 2>/dev/null || { apt_install python3.11-venv && rm -rf "$1" && "$python" -m venv "$1"; } ||
    stop "python -m venv failed. Install it: sudo apt-get install -y python3.11-venv"
}

stamp_of() { # one file in the environment per requirements file; it holds the file's checksum
  printf '%s/.gemma4-on-tpu-%s' "$("$1" -c 'import sys; print(sys.prefix)')" "$(basename "$2" .txt)"
}

checksum() { # tpu.txt includes train.txt, so both count there
  if [ "$1" = requirements/tpu.txt ]; then cat "$1" requirements/train.txt; else cat "$1"; fi | cksum
}

current() { # current PYTHON FILE: was exactly this file installed there?
  [ "$(cat "$(stamp_of "$1" "$2")" 2>/dev/null)" = "$(checksum "$2")" ]
}

pip_run() { # pip_run PYTHON FILE [pip options]: install, and stamp what was installed
  local python="$1" file="$2"
  shift 2
  "$python" -m pip install -q --disable-pip-version-check "$@" -r "$file" 2>&1 | { grep -v '^WARNING: ' || true; }
  [ "${PIPESTATUS[0]}" = 0 ] || return 1
  checksum "$file" >"$(stamp_of "$python" "$file")"
}

pip_install() { # pip_install PYTHON FILE [pip options]: unless exactly that is there
  if current "$1" "$2"; then return; fi
  say "installing $2 (a few minutes)"
  pip_run "$@"
}

serve_install() { # serve_install PYTHON FILE: from pip's own index, else with TORCH_INDEX; if both fail, both errors
  local errors status=0
  if current "$1" "$2"; then return; fi
  say "installing $2 (a few minutes)"
  errors="$(mktemp)"
  pip_run "$1" "$2" --no-deps >"$errors" 2>&1 ||
    pip_run "$1" "$2" --no-deps --extra-index-url "$TORCH_INDEX" || {
    status=1
    say "that was with TORCH_INDEX; without it pip had said:"
    cat "$errors"
  }
  rm -f "$errors"
  return "$status"
}

need_icarus() {
  command -v iverilog >/dev/null && return
  say "installing Icarus Verilog"
  apt_install iverilog && command -v iverilog >/dev/null && return
  say "Icarus Verilog is missing, and notebooks 00, 07 and 09 need it. Run: sudo apt-get install -y iverilog" >&2
}

need_chromium() {
  local name
  for name in chromium google-chrome chrome; do
    if command -v "$name" >/dev/null; then return; fi
  done
  say "installing Chromium"
  apt_install chromium && command -v chromium >/dev/null && return
  "$1" -m playwright install --with-deps chromium >/dev/null 2>&1 && return
  say "Chromium is missing, and tests/test_browser.py needs it. Run: sudo apt-get install -y chromium" >&2
}

files_open() { [ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -ge 256 ]; }
files_open || ulimit -Sn "$(ulimit -Hn)"
files_open || stop "no more than $(ulimit -n) files may be open in this shell. Run: ulimit -n 4096"

# Two notebooks that are opened together would install into one environment at the same time.
if [ -z "${SETUP_LOCKED:-}" ] && [ -w . ] && command -v flock >/dev/null; then
  exec 9>.setup.lock
  flock -n 9 || { say "another setup.sh is at work here; waiting for it" && flock 9; }
  export SETUP_LOCKED=1 # for the setup.sh that this one calls
fi

case "${1:-}" in
train)
  if [ "${2:-}" = --into ]; then
    python="${3:?setup.sh train --into needs the path of a Python}"
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' ||
      stop "$python is $("$python" --version 2>&1); the series needs Python 3.11 (or Colab's 3.12 or 3.13)"
  else
    make_venv .venv
    python=.venv/bin/python
    pip_install "$python" requirements/test.txt || stop "installing requirements/test.txt failed (see above)"
  fi
  found="$("$python" tables/hardware.py)" || stop "tables/hardware.py could not look for TPU chips (see above)"
  case "$found" in ACCELERATOR=tpu*) file=requirements/tpu.txt ;; *) file=requirements/train.txt ;; esac
  pip_install "$python" "$file" || stop "installing $file failed (see above)"
  need_icarus
  say "training environment ready: $("$python" -c 'import sys; print(sys.prefix.rsplit("/", 1)[-1])'), $("$python" --version), ${found##*FOUND=}"
  ;;
browser)
  ./setup.sh train
  python=.venv/bin/python
  pip_install "$python" requirements/browser.txt || stop "installing requirements/browser.txt failed (see above)"
  need_chromium "$python"
  say "browser ready: $("$python" -m jupyter lab --version 2>/dev/null | sed 's/^/JupyterLab /')"
  ;;
serve)
  [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    stop "vLLM's CPU build is for Linux on x86-64, this is $(uname -s) $(uname -m). Use Docker, or a Linux machine, for notebooks 05 to 07"
  make_venv .venv-serve
  python=.venv-serve/bin/python
  serve_install "$python" requirements/serve-cpu.txt ||
    stop "installing requirements/serve-cpu.txt failed (see above). It needs torch's +cpu build, looked for in TORCH_INDEX=$TORCH_INDEX"
  say "serving environment ready: .venv-serve, $("$python" --version)"
  ;;
site)
  make_venv .venv-site
  pip_install .venv-site/bin/python requirements/site.txt || stop "installing requirements/site.txt failed (see above)"
  say "site environment ready: .venv-site, $(.venv-site/bin/python --version)"
  ;;
dryrun)
  if [ -f ".libtpu/libtpu-$LIBTPU.dist-info/METADATA" ]; then
    say "libtpu $LIBTPU is in .libtpu"
  elif [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    say "libtpu has no wheel for $(uname -s) $(uname -m); notebook 08 shows its stored results"
  else
    make_venv .venv
    say "installing libtpu $LIBTPU into .libtpu (0.7 GB)"
    rm -rf .libtpu
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target .libtpu "libtpu==$LIBTPU" ||
      say "libtpu $LIBTPU could not be installed (see above); notebook 08 shows its stored results"
  fi
  ;;
*)
  sed -n '2,12p' "$(basename "$0")" | sed 's/^# \{0,1\}//'
  exit 2
  ;;
esac
