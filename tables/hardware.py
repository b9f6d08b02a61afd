"""Which accelerator is here, and what each chip of the series can do on paper.

One detector for Python and for the shell. Only the standard library is imported, nothing of this
package, so any Python from 3.7 on runs it before anything is installed:

    python3 tables/hardware.py         KEY=VALUE lines, which setup.sh reads

It looks at what the kernel shows (PCI ids under /sys, device files under /dev, open files under
/proc) and, on a machine with TPU chips, asks how many hosts the slice has. JAX is not started.
"""

import argparse
import csv
import functools
import os
import re
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOOGLE, NVIDIA = "0x1ae0", "0x10de"
# PCI device ids of TPU chips, as in jax/_src/hardware_utils.py (jax 0.10.2).
TPU_IDS = {"0x0027": "v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e",
           "0x0076": "v7x"}
GPU_IDS = {"0x2330": "h100"}  # H100 SXM, 80 GB
ACCEL = ("v3", "v4")  # their device files are /dev/accelN; later chips have /dev/vfio/N (tpu_info)
CORES = {"v3": 2, "v4": 2, "v5p": 2, "v7x": 2}  # TensorCores of a chip: a v5p-8 is four chips


@dataclass(frozen=True)
class Chip:
    """One accelerator chip, as its vendor specifies it.

    Attributes:
      name: v4, v5e, v5p, v6e or h100.
      flops: peak bfloat16 FLOP/s, dense.
      int8: peak int8 operations per second, dense.
      hbm: bytes of memory that XLA can use (v5p: 95.74 GiB, as its allocator reports).
      bandwidth: HBM bytes/s.
      links: links to other chips (ICI ports; NVLinks on a GPU).
      link_bandwidth: bytes/s of one link in one direction.
      dollars_per_hour: price of one chip for an hour, on demand.
      clock: cycles per second of a TensorCore; None where we know of no statement.
    """

    name: str
    flops: float
    int8: float
    hbm: float
    bandwidth: float
    links: int
    link_bandwidth: float
    dollars_per_hour: float
    clock: float = None


# Peaks, HBM and bandwidth: the vendors' sheets (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e;
# NVIDIA's H100 SXM sheet), as in data/published/. HBM of v5e, v5p, v6e and h100: what the allocator
# gives (data/published/, data/dryrun/); v4: nominal. Links: ports of the same sheets; bytes/s of a
# link: "TPU Specs" in chapter 2 of the scaling book (jax-ml.github.io/scaling-book/tpus), which has
# v5p's clock as well; NVLink 4: 18 links of 25 GB/s. Prices: the published recipe's slices (May
# 2026, data/published/README.md) divided by their chips; v4 and v5e have none there and get the
# list price (cloud.google.com/tpu/pricing: us-central2 and us-central1).
GIB = 2.0**30
CHIPS = {chip.name: chip for chip in (
    Chip("v4", 275e12, 275e12, 32 * GIB, 1228e9, 6, 45e9, 3.22),
    Chip("v5e", 197e12, 394e12, 15.75 * GIB, 819e9, 4, 45e9, 1.20),
    Chip("v5p", 459e12, 918e12, 95.74 * GIB, 2765e9, 6, 90e9, 16.80 / 4, 1.75e9),
    Chip("v6e", 918e12, 1836e12, 31.25 * GIB, 1638e9, 4, 90e9, 21.52 / 8),
    Chip("h100", 989e12, 1979e12, 80e9, 3350e9, 18, 25e9, 22.12 / 2),
)}

# What `jax.Device.device_kind` says (jax/_src/pallas/mosaic/tpu_info.py).
DEVICE_KINDS = {"TPU v4": "v4", "TPU v5e": "v5e", "TPU v5 lite": "v5e", "TPU v5": "v5p",
                "TPU v5p": "v5p", "TPU v6e": "v6e", "TPU v6 lite": "v6e",
                "NVIDIA H100 80GB HBM3": "h100"}


def chip(name):
    """The `Chip` called v4, v5e, v5p, v6e or h100.

    Raises:
      ValueError: there is none of that name in the list.
    """
    if name not in CHIPS:
        raise ValueError(f"no chip is called {name!r}; the list has {', '.join(CHIPS)}")
    return CHIPS[name]


def chips_of(slice_name):
    """(kind, chips) of a TPU slice by Google's name, which counts TensorCores: ("v5p", 4)."""
    kind, cores = slice_name.split("-")
    return kind, int(cores) // CORES.get(kind, 1)


def slice_name(kind, chips):
    """The inverse of `chips_of`: "v5p-8" is four chips."""
    return f"{kind}-{chips * CORES.get(kind, 1)}"


def chip_of(device_kind):
    """Name of the chip behind a JAX device's `device_kind`; None for a CPU or an unknown chip."""
    return DEVICE_KINDS.get(device_kind)


@dataclass(frozen=True)
class Hardware:
    """What one machine has.

    Attributes:
      accelerator: "tpu", "gpu" or "".
      kind: v3 to v7x, h100, or "" where the ids are not known to us.
      chips: chips (or GPUs) of this machine.
      hosts: machines of the slice, this one included.
      trouble: one line that says why the chips cannot be used now; "" if nothing was seen.
    """

    accelerator: str = ""
    kind: str = ""
    chips: int = 0
    hosts: int = 1
    trouble: str = ""

    @property
    def slice(self):
        """Google's name of the whole slice, such as v5p-8; "" without a TPU or without a kind."""
        if self.accelerator != "tpu" or not self.kind:
            return ""
        return slice_name(self.kind, self.chips * self.hosts)

    def __str__(self):
        if not self.accelerator:
            return "no TPU, no GPU"
        if self.accelerator == "gpu":
            return f"{self.chips} x {self.kind or 'NVIDIA GPU'}"
        chips = f"{self.chips} chip{'s' * (self.chips != 1)}"
        hosts = f", on each of {self.hosts} hosts" if self.hosts > 1 else ""
        return f"TPU {self.slice or 'of unknown kind'} ({chips}{hosts})"


def detect(root=None, environ=os.environ):
    """What this machine has, from the kernel's files; takes milliseconds.

    Args:
      root: folder that holds sys, dev and proc; another one than "/" is for tests. By default
        the environment's HARDWARE_ROOT, or "/".
      environ: environment variables (of a container; TPU_WORKER_HOSTNAMES and the like).

    Returns:
      A `Hardware`.
    """
    root = Path(root or environ.get("HARDWARE_ROOT") or "/")
    tpus, gpus = _pci(root)
    files = _device_files(root, tpus[0] if tpus else "", environ)
    if tpus or files:
        kind = Counter(tpus).most_common(1)[0][0] if tpus else _named_kind(environ)
        # A container may show all chips of its host on the PCI bus and own some of them.
        chips = min(len(tpus), len(files)) if tpus and files else len(tpus) or len(files)
        return Hardware("tpu", kind, chips, _hosts(kind, chips, environ),
                        _trouble(root, kind, chips, files))
    gpus = gpus or [""] * len(list((root / "dev").glob("nvidia[0-9]*")))
    return Hardware("gpu", gpus[0], len(gpus)) if gpus else Hardware()


@functools.lru_cache(maxsize=1)
def here():
    """`detect()` of this machine, looked up once in a process."""
    return detect()


def _read(path):
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _pci(root):
    """Kinds of all TPU chips and of all GPUs on the PCI bus."""
    tpus, gpus = [], []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, number = _read(device / "vendor"), _read(device / "device")
        if vendor == GOOGLE and number in TPU_IDS:  # Google's network cards have the vendor, too
            tpus.append(TPU_IDS[number])
        elif vendor == NVIDIA and _read(device / "class").startswith("0x03"):  # not its sound
            gpus.append(GPU_IDS.get(number, ""))
    return tpus, gpus


def _device_files(root, kind, environ):
    """The chips' files under /dev.

    Some containers hide the PCI bus. Then /dev/accelN is a TPU's all the same, while /dev/vfio/N
    may be anything that is handed to a virtual machine: it counts if the environment says TPU.
    """
    accel = sorted((root / "dev").glob("accel[0-9]*"))
    vfio = sorted((root / "dev/vfio").glob("[0-9]*"))
    if kind:
        return accel if kind in ACCEL else vfio
    hidden = not any((root / "sys/bus/pci/devices").glob("*"))
    return accel or (vfio if hidden and environ.get("TPU_ACCELERATOR_TYPE") else [])


def _named_kind(environ):
    """Kind of chip by the accelerator type that Google Kubernetes Engine and Colab set."""
    found = re.match(r"(v\d\w*?)(pod)?-\d", environ.get("TPU_ACCELERATOR_TYPE", ""))
    return {"v5lite": "v5e", "v5": "v5p"}.get(found[1], found[1]) if found else ""


def _hosts(kind, chips, environ):
    """Machines of the slice: a v5p-32's host looks like a v5p-8. As JAX asks, but quickly.

    The environment knows it under Kubernetes, the metadata server on a TPU VM. Where neither does
    (a machine made by the Compute Engine API) it is one.
    """
    names = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if not names and not environ.get("TPU_SKIP_MDS_QUERY"):
        names = _metadata("worker-network-endpoints", environ)
        if not names:
            accelerator_type = _metadata("accelerator-type", environ)  # v5p-32
            cores = re.fullmatch(r"v\d\w*-(\d+)", accelerator_type)
            if cores and chips:
                return max(1, int(cores[1]) // CORES.get(kind, 1) // chips)
    return len([name for name in (names or "").split(",") if name.strip()]) or 1


def _metadata(key, environ):
    """An attribute of this instance from Google's metadata server; "" without one."""
    host = environ.get("GCE_METADATA_HOST") or environ.get("GCE_METADATA_IP") or "169.254.169.254"
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{key}",
        headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=1.0) as answer:
            return answer.read().decode().strip()
    except OSError:  # no server, no such attribute, too slow
        return ""


def _trouble(root, kind, chips, files):
    """Why these chips cannot be used now, in one line; "" if nothing is seen."""
    where = "/dev/accel*" if kind in ACCEL else "/dev/vfio/*"
    if not files:
        return (f"the chips are on the PCI bus, but {where} is missing: the image or runtime "
                "version does not fit them, the driver lost them (sudo reboot), or this container "
                "was started without its devices (docker run --privileged)")
    closed = [file for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if closed:
        name = "/" + str(closed[0].relative_to(root))
        return f"{name} may not be opened by this user. Run: sudo chmod a+rw {where}"
    held = _holders(root, files)
    if held:
        pid, name = min(held.items())
        return (f"process {pid} ({name}) holds the chips, and only one process at a time can. "
                f"Shut it down, for example with: kill {pid}")
    return ""


def _holders(root, files, own=False):
    """Processes that have one of these files open: {pid: name}. This one counts only if `own`."""
    names = {str(file) for file in files} | {f"/{file.relative_to(root)}" for file in files}
    found = {}
    for process in (root / "proc").glob("[0-9]*"):
        if int(process.name) == os.getpid() and not own:
            continue
        opened = set()
        try:
            for link in (process / "fd").iterdir():
                opened.add(_target(link))
        except OSError:  # it has ended, or belongs to somebody else
            continue
        if opened & names:
            found[int(process.name)] = _read(process / "comm") or "unknown"
    return found


def _target(link):
    """Where a link points; "" if it is gone, as the one is through which this folder was listed."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def held_here(root=None, environ=os.environ):
    """Does this very process hold TPU chips of this machine? Then no process it starts can."""
    root = Path(root or environ.get("HARDWARE_ROOT") or "/")
    tpus, _ = _pci(root)
    files = _device_files(root, tpus[0] if tpus else "", environ)
    return bool(files) and os.getpid() in _holders(root, files, own=True)


def huge_pages(root=None, environ=os.environ):
    """What the kernel does with transparent huge pages: always, madvise, never, or "" (unknown).

    On v5e and newer chips start-up and shutdown are much slower unless it is "always"
    (jax/_src/cloud_tpu_init.py, which warns).
    """
    root = Path(root or environ.get("HARDWARE_ROOT") or "/")
    found = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else ""


def compiled_rows(slice_name, size):
    """Rows of notebook 03's step at full depth in data/dryrun/, as dicts of text.

    Args:
      slice_name: such as v6e-8.
      size: such as 31b.
    """
    path = ROOT / "data" / "dryrun" / f"{slice_name}_{size}.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file)
                if (row["trainer"], row["layers"]) == ("03", "0")]


def compiled_fit(slice_name, size, base_dtype="bfloat16"):
    """How notebook 03's step fits a slice: the row of data/dryrun/ that recomputes least.

    Among equals it is one that was compiled as 03 computes today (one sum for one input), then the
    one with the most rows at once.

    Args:
      slice_name: such as v6e-8.
      size: such as 31b.
      base_dtype: how the frozen base is stored.

    Returns:
      The row as a dict of strings (`remat`, `sequence_length`, `micro_batch`, `hbm_gib`,
      `limit_gib` ...), or None if no row of full depth is stored or none fits.
    """
    rows = [row for row in compiled_rows(slice_name, size) if row["fits"] == "True"
            and (row.get("base_dtype") or "bfloat16") == base_dtype]
    order = ("NONE", "BLOCK", "DECODER")
    return min(rows, key=lambda row: (order.index(row["remat"]), row.get("one_sum") != "True",
                                      -int(row["micro_batch"])), default=None)


def what_fits(slice_name, size):
    """One sentence on training this size on this slice, from the compiled table of notebook 08."""
    row = compiled_fit(slice_name, size)
    if row is None:
        return f"08 has compiled no training step of size {size} that fits a {slice_name}."
    return (f"On a {slice_name} the training step of size {size} fits with remat={row['remat']} "
            f"and rows of {int(row['sequence_length']):,} tokens: {float(row['hbm_gib']):.2f} of "
            f"{float(row['limit_gib']):.2f} GiB per chip (compiled in 08, not run).")


def main():
    """Print what is here as KEY=VALUE lines."""
    parser = argparse.ArgumentParser(description="Say which accelerator this machine has.")
    parser.add_argument("--root", help="a folder with sys, dev and proc (for tests)")
    found = detect(parser.parse_args().root)
    for key, value in (("ACCELERATOR", found.accelerator), ("KIND", found.kind),
                       ("CHIPS", found.chips), ("HOSTS", found.hosts), ("SLICE", found.slice),
                       ("TROUBLE", found.trouble), ("FOUND", found)):
        print(f"{key}={value}")


if __name__ == "__main__":
    main()
