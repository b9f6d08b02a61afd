"""Is this machine ready? The checks of notebook 01: each returns (fine, what to do if not)."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from helpers.run import UserError, write_json
from tables import hardware, stored

Check = tuple[bool, str]


def slices_for(size: str, base_dtype: str, needs_tpu: bool) -> list[str]:
    """The slices that are good enough for a size: those meant for it, or where 03's step fits.

    Args:
      size: 31b, e2b or tiny.
      base_dtype: of the frozen base.
      needs_tpu: False: none is needed, so the list is empty.
    """
    names: list[str] = []
    if not needs_tpu:
        return names
    for name, piece in hardware.SLICES.items():
        if piece.size == size:
            names.append(name)
        elif stored.compiled_fit(name, size, base_dtype) is not None:
            names.append(name)
    return names


def check_space(folder: str | Path, free_gb: float, need_gb: float) -> Check:
    """Is there room in TMPDIR? The checkpoint is staged there before it's loaded.

    Args:
      folder: TMPDIR.
      free_gb, need_gb: gigabytes that are free there, and that the checkpoint takes.
    """
    if free_gb >= need_gb:
        return True, f"{free_gb:.0f} GB free for {need_gb:g} GB"
    problem = f"{folder} has {free_gb:.0f} GB free and the checkpoint needs {need_gb:g} GB."
    fix = "Start again with TMPDIR=/dev/shm, or make the VM with a larger boot disk"
    return False, f"{problem} {fix}"


def check_slice(machine: hardware.Hardware, slices: Sequence[str]) -> Check:
    """Is this machine one of the slices that the size is for, and are its chips free?"""
    if not slices:
        return True, f"{machine}; none is needed"
    if machine.trouble:
        return False, f"{machine}: {machine.trouble}"
    if machine.slice in slices:
        return True, str(machine)
    wanted = " or ".join(slices)
    return False, f"{machine}: a {wanted} is needed"


def check_devices(count: int, kind: str, chips: int, last_words: str = "") -> Check:
    """Does JAX see every TPU chip? Without any, a CPU will do.

    Args:
      count, kind: the devices that JAX sees.
      chips: TPU chips that this machine has.
      last_words: of a JAX that doesn't start.
    """
    seen = f"{count} x {kind}"
    fine = count > 0
    if chips:
        fine = count == chips and kind.startswith("TPU")
    if fine:
        return True, seen
    if last_words:
        return False, f"JAX does not start here. It last said: {last_words}"
    return False, (f"JAX sees {seen}, not the {chips} chips of this machine. Run ./setup.sh train, "
                   "which installs JAX for TPU where there are chips")


def check_icarus(first_line: str) -> Check:
    """Is this Icarus 11 or 12? They judge the answers; verilog-eval's benches don't support 13.

    Args:
      first_line: what `iverilog -V` prints first; "" without Icarus.
    """
    version = re.search(r"version (\d+)", first_line)
    if version and version[1] in ("11", "12"):
        name, _, _ = first_line.partition(" (")
        return True, name
    there = first_line or "none"
    return False, (f"Icarus Verilog 11 or 12 is needed, found: {there}. "
                   "Run: sudo apt-get install -y iverilog")


class Devices(NamedTuple):
    """What JAX sees of this machine."""

    number: int   # 0 where JAX doesn't start
    kind: str
    version: str  # JAX's
    trouble: str  # its last words where it doesn't start, else ""


ASK_JAX = """\
import json, jax
devices = jax.local_devices()
print(json.dumps([len(devices), devices[0].device_kind, jax.__version__, ""]))
"""


def count_devices(timeout: float = 600.0) -> Devices:
    """The `Devices`, asked in a child process that then lets go of them.

    Args:
      timeout: seconds. One host of a larger slice waits for the others as long as they take.
    """
    command = [sys.executable, "-c", ASK_JAX]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        trouble = f"nothing in {timeout:.0f} s. Does every host of this slice run the script?"
        return Devices(0, "none", "none", trouble)
    if child.returncode == 0:
        last_line = child.stdout.splitlines()[-1]
        answer = json.loads(last_line)
        return Devices(*answer)
    last_words = "nothing"
    lines = child.stderr.strip().splitlines()
    if lines:
        last_words = lines[-1][:400]
    return Devices(0, "none", "none", last_words)


def _icarus_version() -> str:
    """The first line that Icarus Verilog prints about itself; "" without one."""
    program = shutil.which("iverilog")
    if not program:
        return ""
    done = subprocess.run([program, "-V"], capture_output=True, text=True)
    first_line, _, _ = done.stdout.partition("\n")
    return first_line


def look(checkpoint_gb: float, slices: Sequence[str]) -> tuple[dict[str, Check], dict[str, Any]]:
    """(checks, facts) of this machine: {name: (fine, text)}, and what `setup.json` keeps of it.

    Args:
      checkpoint_gb: room that the base model needs in `TMPDIR`.
      slices: what this machine may be; () needs no TPU.
    """
    folder = tempfile.gettempdir()
    machine = hardware.here()
    free_gb = shutil.disk_usage(folder).free / 1e9
    chips = 0
    if machine.accelerator == "tpu":
        chips = machine.chips
    devices = count_devices()
    icarus = _icarus_version()
    checks = {
        "room in TMPDIR": check_space(folder, free_gb, checkpoint_gb),
        "accelerator": check_slice(machine, slices),
        "JAX": check_devices(devices.number, devices.kind, chips, devices.trouble),
        "Icarus Verilog": check_icarus(icarus),
    }
    facts = {
        "machine": asdict(machine) | {"slice": machine.slice},
        "jax": devices.version,
        "devices": devices.number,
        "device_kind": devices.kind,
        "icarus": icarus,
        "cores": os.cpu_count(),
        "tmpdir_free_gb": round(free_gb, 1),
    }
    return checks, facts


def save(path: Path, checks: dict[str, Check], facts: dict[str, Any]) -> None:
    """Write `setup.json`, and only then stop if a check failed.

    Args:
      path: of the file.
      checks: from `look`.
      facts: what else the file keeps.

    Raises:
      UserError: lists what to fix.
    """
    kept = {}
    wrong = []
    for name, (fine, text) in checks.items():
        kept[name] = {"fine": fine, "text": text}
        if not fine:
            wrong.append(f"\n- {text}")
    python = platform.python_version()
    write_json(path, {**facts, "python": python, "checks": kept})
    if wrong:
        listed = "".join(wrong)
        raise UserError(f"this machine is not ready.{listed}")
    print(f"ready; wrote {path}")


def show_rental(name: str) -> None:
    """Print how each step's first command begins: check, create, run, delete. Nothing is run.

    Args:
      name: the slice to train the 31B on.
    """
    show_first_command("check")
    piece = hardware.slice_of(name)
    if not (piece.zones and piece.runtime):
        print(f"tables/hardware.py doesn't say where and how a {piece.name} is rented")
        return
    zone, *_ = piece.zones.split()
    show_first_command("create", "gemma4-train", piece.name, zone, "3")
    show_first_command("run", "gemma4-train", zone, "scripts/train.sh", "my-bucket", "31b")
    show_first_command("delete", "gemma4-train", zone)


def show_first_command(*words: str) -> None:
    """Print how the first command begins that scripts/vm.sh would run; nothing is run or rented.

    Args:
      words: for scripts/vm.sh, such as "create", "my-machine", "v5p-8".

    Raises:
      subprocess.CalledProcessError: scripts/vm.sh refuses the words.
    """
    done = subprocess.run(
        ["scripts/vm.sh", *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "DRY_RUN": "1"},
    )
    typed = " ".join(words)
    print(f"$ scripts/vm.sh {typed}")
    lines = done.stdout.splitlines()
    if lines:
        print(textwrap.shorten(lines[0], 140, placeholder=" …"))
    print()
