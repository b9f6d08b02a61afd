"""The opening of a notebook: is this the right Python, what is this machine, start JAX on it."""

import csv
import importlib
import inspect
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from helpers import run
from tables import hardware
from helpers.run import UserError, run_dir, size, temporary_dir

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "flax", "optax", "google-tunix", "qwix", "grain", "orbax-checkpoint",
            "safetensors", "transformers", "datasets", "pandas", "matplotlib")


def published(name, key, value="value"):
    """One column of `data/published/<name>.csv` as a dict; what is a number becomes a float."""
    def number(text):
        try:
            return float(text)
        except ValueError:
            return text
    with open(ROOT / "data" / "published" / f"{name}.csv", newline="", encoding="utf-8") as file:
        return {row[key]: number(row[value]) for row in csv.DictReader(file)}


# Modules that Colab's kernel has loaded before the first cell, or may have, and their packages.
LOADED_EARLY = {"numpy": "numpy", "PIL": "pillow", "pandas": "pandas", "scipy": "scipy",
                "pyarrow": "pyarrow", "matplotlib": "matplotlib", "jax": "jax", "jaxlib": "jaxlib"}


def install():
    """Bring the packages of this Python to the series' pinned versions, where that is ours to do.

    That is Colab, the .venv of setup.sh, and any Python that setup.sh was told to install into.

    Raises:
      UserError: this is somebody else's Python, and nothing was changed; or all is installed, but
        this process still holds older versions.
    """
    environment = ROOT / ".venv"
    ours = environment.exists() and os.path.samefile(sys.prefix, environment)
    told = any(Path(sys.prefix).glob(".gemma4-on-tpu-t[pr]*"))  # setup.sh's stamps: train, tpu
    if not (ours or told or "COLAB_RELEASE_TAG" in os.environ):
        first = "" if environment.exists() else f"make it (cd {ROOT} && ./setup.sh train), then "
        raise UserError(f"this is the Python of {sys.prefix}, into which nothing is installed. "
                        f"The series has its own: {first}choose {environment}/bin/python as the "
                        "kernel.")
    subprocess.run(["bash", str(ROOT / "setup.sh"), "train", "--into", sys.executable], check=True)
    importlib.invalidate_caches()
    old = [package for module, package in LOADED_EARLY.items() if module in sys.modules
           and sys.modules[module].__version__ != metadata.version(package)]
    if old:
        raise UserError(f"all is installed, but this kernel began with older versions of "
                        f"{', '.join(old)}. Restart it, once: in Colab choose Runtime, Restart "
                        "session and run all.")


def _commit():
    answer = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True)
    return answer.stdout.strip() or "no git"


def _said_once(record):
    """What fails in a thread of Orbax is raised again where it is waited for: not logged, too."""
    return not (record.exc_info and "orbax" in record.pathname)


def quiet():
    """Silence the libraries' chatter (XLA, absl, transformers); errors still show."""
    for name, value in (("TF_CPP_MIN_LOG_LEVEL", "2"), ("GRPC_VERBOSITY", "ERROR"),
                        ("TOKENIZERS_PARALLELISM", "true"), ("TRANSFORMERS_VERBOSITY", "error"),
                        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("WANDB_MODE", "disabled")):
        os.environ.setdefault(name, value)
    import logging
    import warnings
    warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm: plain bars are fine
    for name in ("absl", "jax"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("absl").addFilter(_said_once)


def machine(devices=0, always=""):
    """Print versions, memory, size and commit; with `devices`, also start JAX on that many.

    Args:
      devices: 0 leaves JAX alone. Otherwise the number of devices the notebook wants: on a machine
        without an accelerator that many CPU devices are simulated, so that the same sharded
        program runs; on a TPU all its chips are used and `devices` is not looked at.
      always: the size of a notebook that has only one.

    Raises:
      UserError: there are TPU chips, and JAX cannot use them; or no size is meant for them.
    """
    import psutil  # not at the top: `helpers` is imported before anything is installed
    quiet()
    run.one_line_errors()
    run.allow_open_files()
    if always:
        run.always(always)
    cores, folder = os.cpu_count(), temporary_dir()
    print(f"python {platform.python_version()} | {cores} cores | "
          f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory | "
          f"{shutil.disk_usage(folder).free / 2**30:.0f} GiB free in {folder} | commit {_commit()}")
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} (absent)")
    print("\n".join(" | ".join(found[place:place + 4]) for place in range(0, len(found), 4)))
    print(f"{hardware.here()} | size {size()} | results in {run.writable(run_dir())}")
    if devices:
        _start_jax(devices)


def join_hosts(count=1):
    """Connect this host's JAX with those of a slice's other hosts; before any device is used.

    On a TPU slice `jax.distributed.initialize` finds out everything itself. Elsewhere (tests run
    two processes on one machine) JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID
    say it.

    Args:
      count: hosts of this slice, as `tables.hardware` sees them. Each has to run the same program.
    """
    import jax
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        jax.distributed.initialize(address, int(os.environ["JAX_NUM_PROCESSES"]),
                                   int(os.environ["JAX_PROCESS_ID"]))
    elif count > 1:
        jax.distributed.initialize()


def _start_jax(devices):
    here = hardware.here()
    # On a TPU the CPU has to be asked for twice: by SIZE=tiny, and by JAX's own variable.
    asked_cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu") and size() == "tiny"
    tpu = here.accelerator == "tpu" and not asked_cpu
    if tpu and here.trouble:
        raise UserError(f"{here}: {here.trouble}.")
    if not tpu:
        flag = f"--xla_force_host_platform_device_count={devices}"
        if flag not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        # Several simulated devices share a thread pool as small as the machine; collectives that
        # wait for each other need one thread each, and asynchronous dispatch can exhaust it.
        os.environ.setdefault("NPROC", "16")
    import jax
    if not tpu:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    join_hosts(here.hosts if tpu else 1)
    try:
        backend = jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS")
        why = f"JAX_PLATFORMS={asked} asks for something else. Unset it." if asked else \
            str(error).partition("\n")[0]
        raise UserError(f"{here}, but JAX cannot start: {why}") from error
    if tpu and backend != "tpu":
        raise UserError(f"{here}, but JAX runs on the {backend.upper()}. Run ./setup.sh train for "
                        "its TPU build, unset JAX_PLATFORMS, and start this kernel again.")
    kinds = sorted({device.device_kind for device in jax.devices()})
    simulated = " (simulated)" if backend == "cpu" and devices > 1 else ""
    hosts = f", {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    print(f"JAX backend {backend}: {jax.device_count()} x {', '.join(kinds)}{simulated}{hosts}")


class _Source(str):
    """Text that a notebook shows as highlighted code."""
    __repr__ = str.__str__

    def _repr_markdown_(self):
        return f"```python\n{self}```"


def show_source(*functions):
    """Show the source of helper functions, for what a reader should still see."""
    from IPython.display import display
    display(_Source("\n\n".join(map(inspect.getsource, functions))))
