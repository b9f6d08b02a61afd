"""The first cell of every page: install what is missing, describe this machine, start JAX."""

import importlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

from helpers import run, track
from helpers.run import UserError, run_dir, size
from tables import hardware, kaggle

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "flax", "optax", "google-tunix", "qwix", "grain", "orbax-checkpoint",
            "safetensors", "transformers", "datasets", "pandas", "matplotlib")
# Modules that Colab's kernel may have loaded before the first cell, and their packages.
LOADED_EARLY = {"numpy": "numpy", "PIL": "pillow", "pandas": "pandas", "scipy": "scipy",
                "pyarrow": "pyarrow", "matplotlib": "matplotlib", "jax": "jax", "jaxlib": "jaxlib"}


def machine(devices: int = 0, always: str = "") -> None:
    """Go to the repository, install what is missing, print what this machine is, and start JAX.

    Args:
      devices: 0 leaves JAX alone. Otherwise the number of devices the page wants: on a machine
        without an accelerator that many CPU devices are simulated, so that the same sharded
        program runs; on a TPU all its chips are used and `devices` is not looked at.
      always: the size of a page that has only one, whatever `SIZE` and the hardware say.

    Raises:
      UserError: this is somebody else's Python; or there are TPU chips, and JAX cannot use them; or
        no size is meant for them.
    """
    if os.environ.get("RUN_DIR"):  # relative to where the reader stands, not to the repository
        os.environ["RUN_DIR"] = os.path.abspath(os.path.expanduser(os.environ["RUN_DIR"]))
    os.chdir(ROOT)
    run.one_line_errors()
    if kaggle.on_kaggle():
        for line in kaggle.mend():
            print(line)
    install()
    start(devices, always)


def start(devices: int = 0, always: str = "") -> None:
    """The part of `machine` that installs nothing; arguments and errors as there."""
    quiet()
    if always:
        os.environ["SIZE"] = always
    if kaggle.on_kaggle() and size() != "tiny":
        _on_a_v5e_8()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free / 2**30
    print(f"python {platform.python_version()} | {os.cpu_count()} cores | "
          f"{memory:.0f} GiB memory | {free:.0f} GiB free in {folder} | "
          f"commit {run.commit_of(ROOT) or 'no git'}")
    versions = [f"{package} {metadata.version(package)}" for package in PACKAGES]
    for place in range(0, len(versions), 4):
        print(" | ".join(versions[place:place + 4]))
    print(f"{hardware.here()} | size {size()} | results in {run_dir()}")
    host = _start_jax(devices) if devices else 0
    if host == 0:  # of several hosts the first one writes
        run.writing()


def _on_a_v5e_8() -> None:
    """Refuse a Kaggle session without its TPU, and put the run where there's room for it.

    Raises:
      UserError: there's no TPU, or less than a v5e-8.
    """
    why = kaggle.refusal(hardware.here())
    if why:
        raise UserError(f"{why}.")
    # What persists there has 20 GB; a merged 31B has 62, and the other disk has a terabyte.
    os.environ.setdefault("RUN_DIR", f"{tempfile.gettempdir()}/gemma4-{size()}")


def install() -> None:
    """Bring the packages of this Python to the series' pinned versions, where that is ours to do.

    That is Colab, Kaggle, the .venv of setup.sh, and any Python that setup.sh was told to install
    into.

    Raises:
      UserError: this is somebody else's Python, and nothing was changed; or all is installed, but
        this process still holds older versions.
    """
    environment = ROOT / ".venv"
    ours = environment.exists() and os.path.samefile(sys.prefix, environment)
    told = any(Path(sys.prefix).glob(".gemma4-on-tpu-t[pr]*"))  # setup.sh's stamps: train, tpu
    lent = "COLAB_RELEASE_TAG" in os.environ or kaggle.on_kaggle()
    if not (ours or told or lent):
        first = "" if environment.exists() else f"make it (cd {ROOT} && ./setup.sh train), then "
        raise UserError(f"this is the Python of {sys.prefix}, into which nothing is installed. "
                        f"The series has its own: {first}choose {environment}/bin/python as the "
                        "kernel.")
    subprocess.run(["bash", str(ROOT / "setup.sh"), "train", "--into", sys.executable], check=True)
    importlib.invalidate_caches()
    old = []
    for module, package in LOADED_EARLY.items():
        if module not in sys.modules:
            continue
        if sys.modules[module].__version__ != metadata.version(package):
            old.append(package)
    if old:
        raise UserError(f"all is installed, but this kernel began with older versions of "
                        f"{', '.join(old)}. Restart it, once: in Colab choose Runtime, Restart "
                        "session and run all; on Kaggle Run, Restart & clear cell outputs, then "
                        "Run All.")


def quiet() -> None:
    """Silence the libraries' chatter (XLA, absl, transformers); errors still show."""
    for name, value in (("TF_CPP_MIN_LOG_LEVEL", "2"), ("GRPC_VERBOSITY", "ERROR"),
                        ("TOKENIZERS_PARALLELISM", "true"), ("TRANSFORMERS_VERBOSITY", "error"),
                        ("HF_HUB_DISABLE_PROGRESS_BARS", "1")):
        os.environ.setdefault(name, value)
    if track.choice() != "wandb":  # Tunix would ask W&B by itself
        os.environ.setdefault("WANDB_MODE", "disabled")
    warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm: plain bars are fine
    warnings.filterwarnings("ignore", message="`with mesh:`")  # where Tunix looks for its mesh
    for name in ("absl", "jax"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # What fails in a thread of Orbax is raised again where it is waited for: not logged, too.
    logging.getLogger("absl").addFilter(
        lambda record: not (record.exc_info and "orbax" in record.pathname))


def join_hosts(count: int = 1) -> None:
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


def _start_jax(devices: int) -> int:
    """Start JAX on the chips, or on so many simulated devices; gives the number of this host."""
    here = hardware.here()
    # On a TPU the CPU has to be asked for twice: by SIZE=tiny, and by JAX's own variable.
    asked_cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu") and size() == "tiny"
    tpu = here.accelerator == "tpu" and not asked_cpu
    if tpu and here.trouble:
        raise UserError(f"{here}: {here.trouble}.")
    if not tpu:
        _simulate(devices)
    import jax
    if not tpu:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    join_hosts(here.hosts if tpu else 1)
    try:
        backend = jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        asked = os.environ.get("JAX_PLATFORMS")
        if asked:
            why = f"JAX_PLATFORMS={asked} asks for something else. Unset it."
        raise UserError(f"{here}, but JAX cannot start: {why}") from error
    if tpu and backend != "tpu":
        raise UserError(f"{here}, but JAX runs on the {backend.upper()}. Run ./setup.sh train for "
                        "its TPU build, unset JAX_PLATFORMS, and start this kernel again.")
    kinds = sorted({device.device_kind for device in jax.devices()})
    simulated = " (simulated)" if backend == "cpu" and devices > 1 else ""
    hosts = f", {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    print(f"JAX backend {backend}: {jax.device_count()} x {', '.join(kinds)}{simulated}{hosts}")
    return jax.process_index()


def _simulate(devices: int) -> None:
    """Have JAX, which isn't imported yet, show so many devices of a CPU."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()
    # Several simulated devices share a thread pool as small as the machine; collectives that
    # wait for each other need one thread each, and asynchronous dispatch can exhaust it.
    os.environ.setdefault("NPROC", "16")
