"""What this machine is, and what the accelerators of the series can do on paper."""

import csv
import inspect
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from helpers.run import run_dir, size, temporary_dir, tpu_chips

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "flax", "optax", "google-tunix", "qwix", "grain", "orbax-checkpoint",
            "safetensors", "transformers", "datasets", "pandas", "matplotlib")


@dataclass(frozen=True)
class Chip:
    """One accelerator chip, as its vendor specifies it.

    Attributes:
      name: v5p, v6e, v5e or h100.
      flops: peak bfloat16 FLOP/s.
      hbm: bytes of memory that XLA can use (v5p: 95.74 GiB, as its allocator reports).
      bandwidth: HBM bytes/s.
      dollars_per_hour: price of one chip for an hour, from the published recipe's slices.
    """

    name: str
    flops: float
    hbm: float
    bandwidth: float
    dollars_per_hour: float


def published(name, key, value="value"):
    """One column of `data/published/<name>.csv` as a dict, numbers as float where they are numbers."""
    def number(text):
        try:
            return float(text)
        except ValueError:
            return text
    with open(ROOT / "data" / "published" / f"{name}.csv", newline="", encoding="utf-8") as file:
        return {row[key]: number(row[value]) for row in csv.DictReader(file)}


def chip(name):
    """The `Chip` called v5p, v6e, v5e or h100, from the spec sheets in `data/published/`.

    Prices are those of the published recipe (dated in `data/published/README.md`); v5e has none
    there and gets the list price of 1.20 USD per chip-hour (cloud.google.com/tpu/pricing, us-central1).
    """
    spec = published("spec_sheet_reference", "item")
    train = published("hardware_training", "spec", "tpu")
    serve = published("hardware_inference", "spec", "tpu")
    gpu = published("hardware_training", "spec", "gpu")
    gib = 2.0**30
    chips = {
        "v5p": Chip("v5p", spec["v5p_peak_bf16"] * 1e12, 95.74 * gib, spec["v5p_hbm_bw"] * 1e9,
                    train["hourly_rate_on_demand"] / train["accelerator_count"]),
        "v6e": Chip("v6e", spec["v6e_peak_bf16"] * 1e12, serve["hbm_per_chip"] * gib,
                    spec["v6e_hbm_bw"] * 1e9,
                    serve["hourly_rate_on_demand"] / serve["accelerator_count"]),
        "v5e": Chip("v5e", 197e12, 15.75 * gib, 819e9, 1.20),
        "h100": Chip("h100", spec["h100_sxm_peak_bf16"] * 1e12, gpu["hbm_per_chip"] * 1e9,
                     spec["h100_sxm_hbm_bw"] * 1e9,
                     gpu["hourly_rate_on_demand"] / gpu["accelerator_count"]),
    }
    return chips[name]


def _memory_gib():
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemTotal"):
            return int(line.split()[1]) / 2**20
    return float("nan")


def _commit():
    answer = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True)
    return answer.stdout.strip() or "no git"


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


def machine(devices=0):
    """Print versions, memory, size and commit; with `devices`, also start JAX on that many.

    Args:
      devices: 0 leaves JAX alone. Otherwise the number of devices the notebook wants: on a machine
        without an accelerator that many CPU devices are simulated, so that the same sharded
        program runs; on a TPU all its chips are used and `devices` is not looked at.
    """
    quiet()
    cores, folder = os.cpu_count(), temporary_dir()
    print(f"python {platform.python_version()} | {cores} cores | {_memory_gib():.0f} GiB memory | "
          f"{shutil.disk_usage(folder).free / 2**30:.0f} GiB free in {folder} | commit {_commit()}")
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} (absent)")
    print("\n".join(" | ".join(found[place:place + 4]) for place in range(0, len(found), 4)))
    print(f"size {size()} | results in {run_dir()}")
    if devices:
        _start_jax(devices)


def _start_jax(devices):
    if tpu_chips() == 0:
        flag = f"--xla_force_host_platform_device_count={devices}"
        if flag not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        # Several simulated devices share a thread pool as small as the machine; collectives that
        # wait for each other need one thread each, and asynchronous dispatch can exhaust it.
        os.environ.setdefault("NPROC", "16")
    import jax
    if tpu_chips() == 0:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    kinds = sorted({device.device_kind for device in jax.devices()})
    simulated = " (simulated)" if jax.default_backend() == "cpu" and devices > 1 else ""
    print(f"JAX backend {jax.default_backend()}: {jax.device_count()} x {', '.join(kinds)}{simulated}")


class _Source(str):
    """Text that a notebook shows as highlighted code."""
    __repr__ = str.__str__

    def _repr_markdown_(self):
        return f"```python\n{self}```"


def show_source(*functions):
    """Show the source of helper functions, for what a reader should still see."""
    from IPython.display import display
    display(_Source("\n\n".join(map(inspect.getsource, functions))))
