"""One table of chips, one of slices, and which of them this machine is.

Python and the shell read the same table. Only the standard library is imported, nothing of this
repository, so any Python from 3.7 on runs it before anything is installed:

    python3 -m tables.hardware                 what is here, as KEY=VALUE lines for setup.sh
    python3 -m tables.hardware --slice v5p-8   what that slice is, for scripts/vm.sh

Detection looks at what the kernel shows (PCI ids under /sys, device files under /dev, open files
under /proc; where a container hides the PCI bus, TPU_ACCELERATOR_TYPE). On a machine with TPU chips
it also asks how many hosts the slice has. JAX isn't started.
"""

from __future__ import annotations  # any Python from 3.7 on reads this file

import argparse
import contextlib
import errno
import functools
import glob
import os
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tables.errors import UserError

GIB = 2.0**30
GOOGLE, NVIDIA = "0x1ae0", "0x10de"  # PCI vendors


@dataclass(frozen=True)
class Chip:
    """One accelerator chip, as its vendor specifies it."""

    name: str                # as slices are called: v5p
    pci: str                 # its PCI device id (TPU: as in jax/_src/hardware_utils.py)
    jax: tuple[str, ...]     # what a JAX device's `device_kind` may say (JAX's tpu_info.py)
    google: str              # the kind in Google's accelerator types, such as v5litepod
    cores: int               # TensorCores, which Google's names count: a v5p-8 is four chips
    flops: float             # peak bfloat16 FLOP/s, dense
    int8: float | None       # peak int8 operations/s, dense; None where the sheet has no such line
    hbm: float               # bytes of memory that XLA can use, as its allocator reports
    bandwidth: float         # HBM bytes/s
    link_bandwidth: float    # bytes/s of one link in one direction
    dollars_per_hour: float | None  # of one chip, on demand; None where we know of no list
    torus: int = 0           # dimensions of its torus of links, 2 or 3; 0 where it's no torus
    clock: float | None = None  # cycles per second of a TensorCore; None where nobody says
    files: str = "vfio/"     # its device files in /dev: v4 has accelN, later chips vfio/N


# Peaks, HBM and bandwidth: the vendors' sheets (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e,
# tpu7x; NVIDIA's H100 SXM sheet), as in data/published/. HBM of v5e, v5p, v6e and h100: what the
# allocator gives (data/published/, data/dryrun/); v4 and v7x: nominal. Bytes/s of a link:
# "TPU Specs" in chapter 2 of the scaling book (jax-ml.github.io/scaling-book/tpus), which has v5p's
# clock as well; v7x: the sheet's 1,200 GB/s a chip over six links, both directions; h100: NVLink 4.
# Dimensions of the torus: the same chapter; v7x: its sheet.
# Prices: the published recipe's slices (May 2026, data/published/README.md) divided by their chips;
# v4 and v5e have none there and get the list price (cloud.google.com/tpu/pricing: us-central2 and
# us-central1).
_CHIPS = [
    Chip(
        name="v4",
        pci="0x005e",
        jax=("TPU v4",),
        google="v4",
        cores=2,
        flops=275e12,
        int8=275e12,
        hbm=32 * GIB,
        bandwidth=1228e9,
        link_bandwidth=45e9,
        dollars_per_hour=3.22,
        torus=3,
        files="accel",
    ),
    Chip(
        name="v5e",
        pci="0x0063",
        jax=("TPU v5 lite", "TPU v5e"),
        google="v5litepod",
        cores=1,
        flops=197e12,
        int8=394e12,
        hbm=15.75 * GIB,
        bandwidth=819e9,
        link_bandwidth=45e9,
        dollars_per_hour=1.20,
        torus=2,
    ),
    Chip(
        name="v5p",
        pci="0x0062",
        jax=("TPU v5", "TPU v5p"),
        google="v5p",
        cores=2,
        flops=459e12,
        int8=918e12,
        hbm=95.74 * GIB,
        bandwidth=2765e9,
        link_bandwidth=90e9,
        dollars_per_hour=16.80 / 4,
        torus=3,
        clock=1.75e9,
    ),
    Chip(
        name="v6e",
        pci="0x006f",
        jax=("TPU v6 lite", "TPU v6e"),
        google="v6e",
        cores=1,
        flops=918e12,
        int8=1836e12,
        hbm=31.25 * GIB,
        bandwidth=1638e9,
        link_bandwidth=90e9,
        dollars_per_hour=21.52 / 8,
        torus=2,
    ),
    Chip(
        name="v7x",
        pci="0x0076",
        jax=("TPU7x",),
        google="tpu7x",
        cores=2,
        flops=2307e12,
        int8=None,
        hbm=192 * GIB,
        bandwidth=7380e9,
        link_bandwidth=100e9,
        dollars_per_hour=None,
        torus=3,
    ),
    Chip(
        name="h100",
        pci="0x2330",
        jax=("NVIDIA H100 80GB HBM3",),
        google="",
        cores=1,
        flops=989e12,
        int8=1979e12,
        hbm=80e9,
        bandwidth=3350e9,
        link_bandwidth=25e9,
        dollars_per_hour=22.12 / 2,
        files="nvidia",
    ),
]
CHIPS = {chip.name: chip for chip in _CHIPS}


@dataclass(frozen=True)
class Slice:
    """A TPU slice by Google's name; "" where there's nothing to say, or nothing that we know."""

    name: str           # such as v5p-8; it counts TensorCores
    size: str = ""      # the size of the series that we take there if SIZE is unset
    topology: str = ""  # chips along x, y (and z), such as 2x2x1
    hosts: int = 1      # machines it consists of
    machine: str = ""   # Compute Engine's machine type; none where several hosts are needed
    runtime: str = ""   # version of the Cloud TPU API's image
    disk: str = ""      # type of boot disk that this machine takes
    zones: str = ""     # where it was offered in 2026

    @property
    def kind(self) -> str:
        """Name of its chips, a key of `CHIPS`."""
        return self.name.split("-")[0]

    @property
    def _cores(self) -> str:
        """The number in its name, which counts TensorCores."""
        return self.name.split("-")[1]

    @property
    def chip(self) -> Chip:
        """Its kind of `Chip`."""
        return chip(self.kind)

    @property
    def chips(self) -> int:
        """How many chips it has."""
        return int(self._cores) // self.chip.cores

    @property
    def accelerator_type(self) -> str:
        """Its name in the Cloud TPU API: v5litepod-4 for a v5e-4."""
        return f"{self.chip.google}-{self._cores}"

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of the whole slice, on demand; None where we know of no list."""
        price = self.chip.dollars_per_hour
        return None if price is None else self.chips * price


# docs.cloud.google.com/tpu/docs, read in 2026: regions-zones, runtimes, v5e, v5p, v6e; which boot
# disk a TPU takes: cloud.google.com/tpu/docs/setup-persistent-disk. Compute Engine publishes ct5lp
# for v5e and refuses to make one (github.com/xbill9/gemma4-dev, HARDWARE.md, August 2026).
_V5P = {"runtime": "v2-alpha-tpuv5", "disk": "pd-balanced",
        "zones": "us-east5-a us-central1-a europe-west4-b"}
_V5E = {"runtime": "v2-alpha-tpuv5-lite", "zones": "us-central1-a us-west4-a us-west1-c"}
_V6E = {"runtime": "v2-alpha-tpuv6e", "disk": "hyperdisk-balanced",
        "zones": "us-east5-a us-central1-b us-east1-d"}
SLICES = {piece.name: piece for piece in (
    Slice("v5p-8", "31b", "2x2x1", 1, "ct5p-hightpu-4t", **_V5P),
    Slice("v5p-32", "31b", "2x2x4", 4, **_V5P),
    Slice("v6e-8", "31b", "2x4", 1, "ct6e-standard-8t", **_V6E),
    Slice("v6e-4", "", "2x2", 1, "ct6e-standard-4t", **_V6E),
    Slice("v6e-1", "e2b", "1x1", 1, "ct6e-standard-1t", **_V6E),
    Slice("v5e-8", "31b", "2x4", 1, **_V5E),
    Slice("v5e-4", "", "2x2", 1, **_V5E),
    Slice("v5e-1", "e2b", "1x1", 1, **_V5E),
)}


def chip(name: str) -> Chip:
    """The `Chip` of that name, a key of `CHIPS`.

    Raises:
      UserError: the table has no chip of that name.
    """
    if name not in CHIPS:
        names = ", ".join(CHIPS)
        raise UserError(f"no chip is called {name!r}; the list has {names}")
    return CHIPS[name]


def slice_of(name: str) -> Slice:
    """The `Slice` of Google's name. If the table hasn't got it, we only know its chips.

    Raises:
      UserError: it isn't such a name, its kind of chip isn't in the table, or it isn't a whole
        number of chips.
    """
    kind, _, cores = name.partition("-")
    if kind not in CHIPS or not re.fullmatch("[1-9][0-9]*", cores):
        names = ", ".join(SLICES)
        raise UserError(f"{name!r} is no slice such as {names}")
    cores_of_a_chip = CHIPS[kind].cores
    if int(cores) % cores_of_a_chip:
        raise UserError(
            f"{name!r} is no slice: the number counts TensorCores, and a {kind} chip "
            f"has {cores_of_a_chip}. One chip is a {slice_name(kind, 1)}."
        )
    if name in SLICES:
        return SLICES[name]
    return Slice(name)


def slice_name(kind: str, chips: int) -> str:
    """Google's name of so many chips of a kind: four of v5p are a v5p-8."""
    cores = chips * chip(kind).cores
    return f"{kind}-{cores}"


def chip_of(device_kind: str) -> str | None:
    """Name of the chip behind a JAX device's `device_kind`; None for a CPU or an unknown chip."""
    for chip in CHIPS.values():
        if device_kind in chip.jax:
            return chip.name
    return None


@dataclass(frozen=True)
class Hardware:
    """What one machine has."""

    accelerator: str = ""  # "tpu", "gpu" or ""
    kind: str = ""         # a key of `CHIPS`, or "" if we don't know the ids
    chips: int = 0         # chips (or GPUs) of this machine
    hosts: int = 1         # machines of the slice, this one included
    trouble: str = ""      # why the chips can't be used now, in one line; "" if we saw nothing

    @property
    def slice(self) -> str:
        """Google's name of the whole slice, such as v5p-8; "" without a TPU or without a kind."""
        if self.accelerator != "tpu" or not self.kind:
            return ""
        return slice_name(self.kind, self.chips * self.hosts)

    def __str__(self) -> str:
        if not self.accelerator:
            return "no TPU, no GPU"
        if self.accelerator == "gpu":
            return f"{self.chips} x {self.kind or 'NVIDIA GPU'}"
        name = self.slice or "of unknown kind"
        chips = "1 chip"
        if self.chips != 1:
            chips = f"{self.chips} chips"
        hosts = ""
        if self.hosts > 1:
            hosts = f", on each of {self.hosts} hosts"
        return f"TPU {name} ({chips}{hosts})"


def detect() -> Hardware:
    """What this machine has, as a `Hardware`: from the kernel's files, in milliseconds."""
    root = _root()
    tpus, gpus = _pci(root)
    if not tpus and not gpus:
        tpus = _by_their_files(root)
    if not tpus and not gpus:
        return Hardware()
    if not tpus:
        return Hardware("gpu", gpus[0], len(gpus))
    kind = tpus[0]
    files = _device_files(root, chip(kind))
    chips = len(tpus)
    if files:  # a container may show all chips of its host on the PCI bus and own some of them
        chips = min(chips, len(files))
    return Hardware(
        accelerator="tpu",
        kind=kind,
        chips=chips,
        hosts=_hosts(kind, chips),
        trouble=_trouble(root, kind, files),
    )


@functools.lru_cache(maxsize=1)
def here() -> Hardware:
    """`detect()` of this machine, looked up once in a process."""
    return detect()


def _root() -> Path:
    """Where /sys, /dev and /proc are; tests name a folder of their own."""
    return Path(os.environ.get("HARDWARE_ROOT") or "/")


def host_memory() -> int:
    """Bytes of the host's memory that this process may use: all of it, or its container's limit.

    0 if nobody says.
    """
    root = _root()
    limits = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            _, kibibytes, *_ = line.split()
            limits.append(1024 * int(kibibytes))
    # Of a container: the newer kind of control group, and the older one. Without a limit the first
    # says "max", and the second a number that's larger than any machine.
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(root / "sys/fs/cgroup" / name)
        if text.isdecimal():
            limits.append(int(text))
    return min(limits, default=0)


def _device_files(root: Path, kind: Chip) -> list[Path]:
    """The files in /dev of all chips of a kind, by name."""
    return sorted((root / "dev").glob(f"{kind.files}[0-9]*"))


def _read(path: Path) -> str:
    """A small file's text without the blanks around it; "" if it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _pci(root: Path) -> tuple[list[str], list[str]]:
    """(TPU chips, GPUs) on the PCI bus: the kind of each, or "" for a GPU that we don't know."""
    tpus = []
    gpus = []
    names = {chip.pci: chip.name for chip in CHIPS.values()}
    devices = (root / "sys/bus/pci/devices").glob("*")
    for device in sorted(devices):
        vendor = _read(device / "vendor")
        kind = names.get(_read(device / "device"), "")
        if vendor == GOOGLE and kind:  # Google's network cards have the vendor, too
            tpus.append(kind)
        if vendor == NVIDIA:
            is_display = _read(device / "class").startswith("0x03")  # and not its sound
            if is_display:
                gpus.append(kind)
    return tpus, gpus


def _by_their_files(root: Path) -> list[str]:
    """Kinds of all TPU chips of a container that shows their files, but no PCI bus.

    In that case TPU_ACCELERATOR_TYPE has to name them, such as v5litepod-8, because a vfio file
    alone may be anything that was handed to a virtual machine.
    """
    named, _, _ = os.environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")
    if not named:
        return []
    for kind in CHIPS.values():
        if named in (kind.google, kind.name):
            return [kind.name for _ in _device_files(root, kind)]
    return []


def _hosts(kind: str, chips: int) -> int:
    """How many machines the slice has. (One host of a v5p-32 looks like a v5p-8.)

    We ask as JAX does, but quickly: under Kubernetes the environment says it, and on a TPU VM the
    metadata server does. If neither does (a machine made by the Compute Engine API), it's one.
    """
    names = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    if names and " " not in names:  # images have put a warning there, a sentence with a comma
        return names.count(",") + 1
    if os.environ.get("TPU_SKIP_MDS_QUERY"):
        return 1
    names = metadata("worker-network-endpoints")
    if names:
        return names.count(",") + 1
    cores = re.fullmatch(r"\w+-(\d+)", metadata("accelerator-type"))  # such as v5p-32
    if cores is None:
        return 1
    chips_of_the_slice = int(cores[1]) // chip(kind).cores
    return max(1, chips_of_the_slice // chips)


def metadata(key: str) -> str:
    """An attribute of this instance from Google's metadata server; "" without one."""
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{key}",
        headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=1.0) as answer:
            return answer.read().decode().strip()
    except OSError:  # no server, no such attribute, too slow
        return ""


def _trouble(root: Path, kind: str, files: list[Path]) -> str:
    """Why these chips can't be used now, in one line; "" if we see nothing."""
    where = f"/dev/{chip(kind).files}*"
    if not files:
        return (
            f"the chips are on the PCI bus, but {where} is missing: the image or runtime "
            "version does not fit them, the driver lost them (sudo reboot), or this container "
            "was started without its devices (docker run --privileged)"
        )
    closed = [file for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if closed:
        file = closed[0].relative_to(root)
        return f"/{file} may not be opened by this user. Run: sudo chmod a+rw {where}"
    held = _holders(root, files)
    if held:
        pid, name = min(held.items())
        return (
            f"process {pid} ({name}) holds the chips, and only one process at a time can. "
            f"Shut it down, for example with: kill {pid}"
        )
    return ""


def _holders(root: Path, files: list[Path]) -> dict[int, str]:
    """The other processes that have one of these files open: {pid: name}."""
    names = {str(file) for file in files}
    holders = {}
    ourselves = os.getpid()
    for link in glob.glob(f"{root}/proc/[0-9]*/fd/*"):
        process = Path(link).parent.parent
        pid = int(process.name)
        if pid == ourselves:
            continue
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if os.readlink(link) in names:
                holders[pid] = _read(process / "comm") or "unknown"
    return holders


def busy() -> str:
    """A chip's file that somebody still has open, such as /dev/vfio/0; "" if there's none.

    Such a file can be opened once. On Kaggle it stays taken for 10 to 30 s after its process died.
    """
    root = _root()
    tpus, _ = _pci(root)
    if not tpus:
        tpus = _by_their_files(root)
    if not tpus:
        return ""
    kind = chip(tpus[0])
    for file in _device_files(root, kind):
        try:
            opened = os.open(file, os.O_RDWR)
            os.close(opened)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return "/" + str(file.relative_to(root))
    return ""


def slice_facts(piece: Slice) -> dict[str, object]:
    """What the shell asks of a slice."""
    price = piece.dollars_per_hour
    return {
        "CHIPS": piece.chips,
        "HOSTS": piece.hosts,
        "MACHINE": piece.machine,
        "DISK": piece.disk,
        "TYPE": piece.accelerator_type,
        "RUNTIME": piece.runtime,
        "ZONES": piece.zones,
        "DOLLARS": "" if price is None else f"{price:.2f}",
    }


def machine_facts(machine: Hardware) -> dict[str, object]:
    """What the shell asks of this machine."""
    return {
        "ACCELERATOR": machine.accelerator,
        "KIND": machine.kind,
        "CHIPS": machine.chips,
        "HOSTS": machine.hosts,
        "SLICE": machine.slice,
        "TROUBLE": machine.trouble,
        "FOUND": machine,
    }


def main() -> None:
    """Print what is here, or what a slice is, as KEY=VALUE lines that a shell can read."""
    parser = argparse.ArgumentParser(description="Say which accelerator this machine has.")
    parser.add_argument("--slice", help="say what this slice is instead, such as v5p-8")
    words = parser.parse_args()
    if not words.slice:
        facts = machine_facts(detect())
    else:
        try:
            facts = slice_facts(slice_of(words.slice))
        except UserError as error:
            parser.error(str(error))
    for key, value in facts.items():
        print(f"{key}={value}")


if __name__ == "__main__":
    main()
