"""The TPU's own compiler on a machine without a TPU: find it, start JAX with it, describe slices.

`start` comes before JAX is imported, `register` after it. Only the standard library is imported at
the top, so that `start` can come first.
"""

import functools
import importlib.util
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tables import hardware
from tables.hardware import SLICES

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = "tpu_compiler"


def find() -> str:
    """The library's path, or an empty string: TPU_LIBRARY_PATH, .libtpu/, or an installed wheel."""
    places = [
        os.environ.get("TPU_LIBRARY_PATH", ""),
        str(ROOT / ".libtpu/libtpu/libtpu.so"),
    ]
    wheel = importlib.util.find_spec("libtpu")
    if wheel:
        for folder in wheel.submodule_search_locations or ():
            places.append(f"{folder}/libtpu.so")
    for place in places:
        if place and Path(place).is_file():
            return str(Path(place).resolve())
    return ""


def start() -> str:
    """Set what libtpu and JAX read when they start; returns the library's path, "" if none is here.

    We tell them where the library is, what machine to take this one for, and not to ask the cloud
    about it. Two processes may load the library at once: its lock guards a chip, and there's none.
    """
    library = find()
    if library:
        os.environ |= {
            "TPU_LIBRARY_PATH": library,
            "JAX_PLATFORMS": f"{PLATFORM},cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5p-8",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    return library


def start_here() -> str:
    """`start`, where that can't disturb real chips; it prints what's missing where it can't.

    Returns:
      The path of the library, as `start` does; "" without a compiler.
    """
    if hardware.here().accelerator == "tpu":  # the compiler would take the real chips' library
        print("This machine has real chips, so we leave them alone: compile on a machine without "
              "a TPU.")
        return ""
    library = start()
    if not library:
        print("There is no compiler here: ./setup.sh dryrun installs it (0.7 GB, Linux on x86-64, "
              "no TPU).")
    return library


@functools.cache
def register() -> None:
    """Make devices that nobody owns JAX's first backend; computing itself stays on the CPU.

    Tunix asks `jax.devices()` for its platform, and on a CPU it leaves its sharding constraints
    out. With this it traces the program that a TPU would get.
    """
    import jax
    from jax.extend.backend import register_backend_factory
    register_backend_factory(PLATFORM, lambda: devices_of("v5p-8")[0].client, priority=500)
    jax.config.update("jax_default_device", jax.devices("cpu")[0])


def devices_of(name: str) -> list:
    """The devices of a slice ("v5p-8") or a topology ("v5p:4x4x4"), for compiling only."""
    from jax.experimental import topologies
    options = {}
    if ":" not in name:
        piece = SLICES[name]
        name = f"{piece.kind}:{piece.topology}"
        if piece.chips == 1:
            options = {"chips_per_host_bounds": (1, 1, 1)}
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    return topology.devices


def planned(lower: Callable) -> float:
    """GiB of one chip that XLA plans for a program, in a tenth of a compilation's time.

    XLA writes its memory report once all buffers have their places. Generating the code comes
    after that, and it's nine tenths of the work. So a child process compiles, and ends as soon as
    the report is there. Call this before this process has started a device. A program that doesn't
    fit has a report as well. The sum of a whole compilation is up to 15% larger (compiled for
    v5e-8 and v6e-8).

    Args:
      lower: makes the lowered program; it's called in the child.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = os.fork()
        if child == 0:
            try:
                _compile_until_reported(lower, folder)
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        report, = folder.glob("*memory-usage-report.txt")
        text = report.read_text()
    total, = re.findall(r"default \(color=0\)\s+Total bytes: (\d+)", text)
    return int(total) / 2**30


def _compile_until_reported(lower: Callable, folder: Path) -> None:
    """Compile, let XLA write its reports into a folder, and end this process once they're there."""
    def leave() -> None:
        after_the_report = "*after_optimizations_after_buffer_assignment*"
        while not list(folder.glob(after_the_report)):
            time.sleep(0.2)
        os._exit(0)

    register()
    lowered = lower()
    threading.Thread(target=leave, daemon=True).start()
    lowered.compile(compiler_options={"xla_dump_to": str(folder)})


def version() -> str:
    """The library's version: of the wheel beside it, or "unknown"."""
    packages = Path(find()).parent.parent
    for wheel in packages.glob("libtpu-*.dist-info"):
        return wheel.name.removeprefix("libtpu-").removesuffix(".dist-info")
    return "unknown"
