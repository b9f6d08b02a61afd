"""The first cell of every page: install what is missing, describe this machine, start JAX."""

import importlib
import logging
import os
import platform
import resource
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
LOADED_EARLY = {
    "numpy": "numpy",
    "PIL": "pillow",
    "pandas": "pandas",
    "scipy": "scipy",
    "pyarrow": "pyarrow",
    "matplotlib": "matplotlib",
    "jax": "jax",
    "jaxlib": "jaxlib",
}
# What makes the libraries quiet, where the reader hasn't chosen otherwise.
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "GRPC_VERBOSITY": "ERROR",
    "TOKENIZERS_PARALLELISM": "true",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def machine(devices: int = 0, always: str = "") -> None:
    """Go to the repository, install what is missing, print what this machine is, and start JAX.

    Args:
      devices: 0 leaves JAX alone. Otherwise the number of devices the page wants: on a machine
        without an accelerator that many CPU devices are simulated, so that the same sharded
        program runs; on a TPU all its chips are used, whatever `devices` says.
      always: the size of a page that has only one, whatever `SIZE` and the hardware say.

    Raises:
      UserError: this is somebody else's Python; or there are TPU chips, and JAX can't use them, or
        no size is meant for them; or too few files may be open; or TRACK asks for what isn't there.
    """
    chosen = os.environ.get("RUN_DIR")
    if chosen:  # it's relative to where the reader stands, not to the repository
        expanded = os.path.expanduser(chosen)
        os.environ["RUN_DIR"] = os.path.abspath(expanded)
    os.chdir(ROOT)
    run.one_line_errors()
    _let_open_files()
    if kaggle.on_kaggle():
        for line in kaggle.mend():
            print(line)
    install()
    start(devices, always)


def start(devices: int = 0, always: str = "") -> None:
    """The part of `machine` that installs nothing; arguments and errors as there."""
    track.check_login()
    quiet()
    if always:
        os.environ["SIZE"] = always
    if kaggle.on_kaggle() and size() != "tiny":
        _on_a_v5e_8()
    _describe()
    host = 0
    if devices:
        host = _start_jax(devices)
    if host == 0:  # of several hosts the first one writes
        run.writing()


def _let_open_files() -> None:
    """Let this process open 1,024 files, as most machines do: Orbax writes many at once.

    Raises:
      UserError: fewer than 256 are allowed. Orbax then fails now and then, in the middle of a run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1_024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < 256:
        raise UserError(f"only {wanted} files may be open at once here, too few for a checkpoint. "
                        "Start from a shell that allows more: ulimit -n 1024")


def _describe() -> None:
    """Print this machine, the versions of its packages, the size, and where results go."""
    python = platform.python_version()
    cores = os.cpu_count()
    pages = os.sysconf("SC_PHYS_PAGES")
    page_size = os.sysconf("SC_PAGE_SIZE")
    memory = pages * page_size / 2**30
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free / 2**30
    commit = run.commit_of(ROOT) or "no git"
    print(f"python {python} | {cores} cores | {memory:.0f} GiB memory | "
          f"{free:.0f} GiB free in {folder} | commit {commit}")

    versions = []
    for package in PACKAGES:
        version = metadata.version(package)
        versions.append(f"{package} {version}")
    for first in range(0, len(versions), 4):
        four = versions[first:first + 4]
        print(" | ".join(four))

    here = hardware.here()
    chosen = size()
    results = run_dir()
    print(f"{here} | size {chosen} | results in {results}")


def _on_a_v5e_8() -> None:
    """Refuse a Kaggle session without its TPU, and put the run where there's room for it.

    Raises:
      UserError: there's no TPU, or less than a v5e-8.
    """
    why = kaggle.refusal(hardware.here())
    if why:
        raise UserError(f"{why}.")
    # What persists there has 20 GB; a merged 31B has 62, and the other disk has a terabyte.
    temporary = tempfile.gettempdir()
    os.environ.setdefault("RUN_DIR", f"{temporary}/gemma4-{size()}")


def install() -> None:
    """Bring the packages of this Python to the series' pinned versions, where that is ours to do.

    That is Colab, Kaggle, the .venv of setup.sh, and any Python that setup.sh was told to install
    into.

    Raises:
      UserError: this is somebody else's Python, and nothing was changed; or all is installed, but
        this process still holds older versions.
    """
    if not _may_install():
        environment = ROOT / ".venv"
        first = f"make it (cd {ROOT} && ./setup.sh train), then "
        if environment.exists():
            first = ""
        raise UserError(f"this is the Python of {sys.prefix}, into which nothing is installed. "
                        f"The series has its own: {first}choose {environment}/bin/python as the "
                        "kernel.")
    script = str(ROOT / "setup.sh")
    subprocess.run(["bash", script, "train", "--into", sys.executable], check=True)
    importlib.invalidate_caches()
    old = _loaded_too_early()
    if old:
        listed = ", ".join(old)
        raise UserError(f"all is installed, but this kernel began with older versions of "
                        f"{listed}. Restart it, once: in Colab choose Runtime, Restart "
                        "session and run all; on Kaggle Run, Restart & clear cell outputs, then "
                        "Run All.")


def _may_install() -> bool:
    """Is it ours to change the packages of this Python?"""
    if "COLAB_RELEASE_TAG" in os.environ or kaggle.on_kaggle():
        return True
    environment = ROOT / ".venv"
    if environment.exists() and os.path.samefile(sys.prefix, environment):
        return True
    stamps = Path(sys.prefix).glob(".gemma4-on-tpu-t[pr]*")  # setup.sh leaves them: train, tpu
    return any(stamps)


def _loaded_too_early() -> list[str]:
    """The packages of which this process holds another version than the one that's installed."""
    old = []
    for module, package in LOADED_EARLY.items():
        if module not in sys.modules:
            continue
        loaded = sys.modules[module].__version__
        if loaded != metadata.version(package):
            old.append(package)
    return old


def quiet() -> None:
    """Silence the libraries' chatter (XLA, absl, transformers); errors still show."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if track.choice() != "wandb":  # Tunix would ask W&B by itself
        os.environ.setdefault("WANDB_MODE", "disabled")
    warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm: plain bars are fine
    warnings.filterwarnings("ignore", message="`with mesh:`")  # where Tunix looks for its mesh
    of_absl = logging.getLogger("absl")
    of_absl.setLevel(logging.ERROR)
    of_absl.addFilter(_is_not_raised_again)
    of_jax = logging.getLogger("jax")
    of_jax.setLevel(logging.ERROR)


def _is_not_raised_again(record: logging.LogRecord) -> bool:
    """False for what fails in a thread of Orbax: it's raised again where somebody waits for it."""
    if not record.exc_info:
        return True
    return "orbax" not in record.pathname


def join_hosts(count: int = 1) -> None:
    """Connect this host's JAX with those of a slice's other hosts; before any device is used.

    On a TPU slice `jax.distributed.initialize` finds out everything itself. Elsewhere (tests run
    two processes on one machine) JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID
    say it.

    Args:
      count: hosts of this slice, as `tables.hardware` sees them. Each has to run the same program.
    """
    import jax
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address:
        processes = int(os.environ["JAX_NUM_PROCESSES"])
        number = int(os.environ["JAX_PROCESS_ID"])
        jax.distributed.initialize(address, processes, number)
    elif count > 1:
        jax.distributed.initialize()


def _start_jax(devices: int) -> int:
    """Start JAX on the chips, or on so many simulated devices; gives the number of this host.

    Raises:
      UserError: there are chips, and JAX can't use them; or it can't start at all.
    """
    here = hardware.here()
    # On a TPU the CPU has to be asked for twice: by SIZE=tiny, and by JAX's own variable.
    platforms = os.environ.get("JAX_PLATFORMS", "")
    asked_cpu = platforms.startswith("cpu") and size() == "tiny"
    on_tpu = here.accelerator == "tpu" and not asked_cpu
    if on_tpu and here.trouble:
        raise UserError(f"{here}: {here.trouble}.")
    if not on_tpu:
        _simulate(devices)
    import jax
    hosts = here.hosts
    if not on_tpu:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        hosts = 1
    join_hosts(hosts)

    backend = _backend(here)
    if on_tpu and backend != "tpu":
        raise UserError(f"{here}, but JAX runs on the {backend.upper()}. Run ./setup.sh train for "
                        "its TPU build, unset JAX_PLATFORMS, and start this kernel again.")
    _say_devices(backend, devices)
    return jax.process_index()


def _backend(here: hardware.Hardware) -> str:
    """What JAX runs on: "tpu", "cpu" or "gpu". This starts it.

    Raises:
      UserError: it can't start.
    """
    import jax
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        asked = os.environ.get("JAX_PLATFORMS")
        if asked:
            why = f"JAX_PLATFORMS={asked} asks for something else. Unset it."
        raise UserError(f"{here}, but JAX cannot start: {why}") from error


def _say_devices(backend: str, wanted: int) -> None:
    """Print which devices JAX has, and on how many hosts."""
    import jax
    count = jax.device_count()
    hosts = jax.process_count()
    kinds = {device.device_kind for device in jax.devices()}
    kinds_listed = ", ".join(sorted(kinds))
    line = f"JAX backend {backend}: {count} x {kinds_listed}"
    if backend == "cpu" and wanted > 1:
        line += " (simulated)"
    if hosts > 1:
        line += f", {hosts} hosts"
    print(line)


def _simulate(devices: int) -> None:
    """Have JAX, which isn't imported yet, show so many devices of a CPU."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        with_ours = f"{flags} {flag}"
        os.environ["XLA_FLAGS"] = with_ours.strip()
    # Several simulated devices share a thread pool as small as the machine; collectives that
    # wait for each other need one thread each, and asynchronous dispatch can exhaust it.
    os.environ.setdefault("NPROC", "16")
