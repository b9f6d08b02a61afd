"""Is this machine ready? The checks of notebook 01: each returns (fine, what to do if not)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict

from tables import hardware


def check_space(folder, free_gb, need_gb):
    """The checkpoint is staged in TMPDIR before it is loaded."""
    fine = free_gb >= need_gb
    return fine, f"{free_gb:.0f} GB free for {need_gb:g} GB" if fine else (
        f"{folder} has {free_gb:.0f} GB free and the checkpoint needs {need_gb:g} GB. Start again "
        "with TMPDIR=/dev/shm, or make the VM with a larger boot disk")


def check_slice(found, slices):
    """The machine is one of the slices that this size is for, and its chips are free."""
    if not slices:
        return True, f"{found}; none is needed"
    fine = found.slice in slices and not found.trouble
    return fine, f"{found}" if fine else (
        f"{found}: {found.trouble or 'a ' + ' or '.join(slices) + ' is needed'}")


def check_devices(count, kind, chips, said=""):
    """JAX (`said`: its last words) must see every TPU chip; without one, a CPU will do."""
    fine = count == chips and kind.startswith("TPU") if chips else count > 0
    seen = f"{count} x {kind}"
    if fine:
        return True, seen
    if said:
        return False, f"JAX does not start here. It last said: {said}"
    return False, (f"JAX sees {seen}, not the {chips} chips of this machine. Run ./setup.sh train, "
                   "which installs JAX for TPU where there are chips")


def check_icarus(first_line):
    """Icarus 11 and 12 judge the answers; verilog-eval's benches do not support 13."""
    found = re.search(r"version (\d+)", first_line)
    fine = found is not None and int(found.group(1)) in (11, 12)
    return fine, first_line.split(" (")[0] if fine else (
        f"Icarus Verilog 11 or 12 is needed, found: {first_line or 'none'}. "
        "Run: sudo apt-get install -y iverilog")


def count_devices(timeout=600.0):
    """[devices, their kind, JAX's version, ""], asked in a child process that then lets go of them.

    Where JAX does not start there are 0 devices, and the last text is what it said.

    Args:
      timeout: seconds. One host of a larger slice waits for the others as long as they take.
    """
    code = ("import json, jax; d = jax.local_devices(); "
            "print(json.dumps([len(d), d[0].device_kind, jax.__version__, '']))")
    try:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                             timeout=timeout)
    except subprocess.TimeoutExpired:
        return [0, "none", "none", f"nothing in {timeout:.0f} s. Does every host of this slice run "
                                   "the script?"]
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1])
    return [0, "none", "none", (run.stderr.strip().splitlines() or ["nothing"])[-1][:400]]


def look(checkpoint_gb, slices):
    """(checks, facts) of this machine: {name: (fine, text)}, and what `setup.json` keeps of it.

    Args:
      checkpoint_gb: room that the base model needs in `TMPDIR`.
      slices: what this machine may be; () needs no TPU.
    """
    folder, machine = tempfile.gettempdir(), hardware.here()
    free_gb = shutil.disk_usage(folder).free / 1e9
    chips = machine.chips if machine.accelerator == "tpu" else 0
    devices, kind, version, trouble = count_devices()
    iverilog = shutil.which("iverilog")
    said = (subprocess.run([iverilog, "-V"], capture_output=True, text=True).stdout
            if iverilog else "")
    icarus = said.partition("\n")[0]
    checks = {"room in TMPDIR": check_space(folder, free_gb, checkpoint_gb),
              "accelerator": check_slice(machine, slices),
              "JAX": check_devices(devices, kind, chips, trouble),
              "Icarus Verilog": check_icarus(icarus)}
    return checks, {"machine": asdict(machine) | {"slice": machine.slice}, "jax": version,
                    "devices": devices, "device_kind": kind, "icarus": icarus,
                    "cores": os.cpu_count(), "tmpdir_free_gb": round(free_gb, 1)}
