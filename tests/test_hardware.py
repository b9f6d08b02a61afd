"""The detector of chips, on fake /sys and /dev trees, and what follows: size, packages, words."""

import http.server
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, program

import helpers
from tables import hardware, published
from tables.errors import UserError
from tables.hardware import chip

GVNIC = ("0x1ae0", "0x0042", "0x020000")  # Google's network card: its vendor, and no TPU


def tree(root, pci=(), devices=()):
    """A fake root: PCI devices as (vendor, device, class), and files under dev."""
    for number, (vendor, device, kind) in enumerate((*pci, GVNIC)):
        folder = root / "sys/bus/pci/devices" / f"0000:00:{number:02x}.0"
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
            (folder / name).write_text(text + "\n")
    for name in ("null", *devices):
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()
    (root / "proc").mkdir()
    return root


def tpu(device, count, files="vfio"):
    """The parts of a TPU machine: chips on the bus, their files, vfio's control file."""
    names = [f"vfio/{n}" for n in range(count)] + ["vfio/vfio"] if files == "vfio" else [
        f"accel{n}" for n in range(count)]
    return {"pci": [("0x1ae0", device, "0x120000")] * count, "devices": names}


MACHINES = {  # name: (tree, slice, the size it is for)
    "v4-8": (tpu("0x005e", 4, "accel"), "v4-8", None),
    "v5e-1": (tpu("0x0063", 1), "v5e-1", "e2b"),
    "v5e-8": (tpu("0x0063", 8), "v5e-8", "31b"),
    "v5p-8": (tpu("0x0062", 4), "v5p-8", "31b"),
    "v6e-1": (tpu("0x006f", 1), "v6e-1", "e2b"),
    "v6e-8": (tpu("0x006f", 8), "v6e-8", "31b"),
    "v7x": (tpu("0x0076", 4), "v7x-8", None),
    "h100": ({"pci": [("0x10de", "0x2330", "0x030200"), ("0x10de", "0x22a3", "0x068000")],
              "devices": ["nvidia0", "nvidiactl"]}, "", "tiny"),  # the second is its NVSwitch
    "laptop": ({"pci": [("0x8086", "0x9a49", "0x030000")], "devices": ["vfio/vfio"]}, "", "tiny"),
    # A graphics card handed to a virtual machine: a vfio group, and no TPU.
    "laptop with a vfio group": ({"pci": [("0x10de", "0x1eb8", "0x030000"),
                                          ("0x10de", "0x10f8", "0x040300")],
                                  "devices": ["vfio/7", "vfio/vfio"]}, "", "tiny"),
}


@pytest.fixture
def alone(monkeypatch):
    """No size said, no TPU named by the environment, no metadata server that answers."""
    for name in ("SIZE", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_SKIP_MDS_QUERY",
                 "JAX_PLATFORMS", "HARDWARE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")  # port 9 refuses
    hardware.here.cache_clear()
    yield monkeypatch
    hardware.here.cache_clear()


@pytest.fixture
def on(alone, tmp_path):
    """Give a function that makes this machine one of MACHINES."""
    def become(name):
        alone.setenv("HARDWARE_ROOT", str(tree(tmp_path / "root", **MACHINES[name][0])))
        hardware.here.cache_clear()
        return tmp_path / "root"
    return become


@pytest.fixture
def metadata(alone):
    """A metadata server with these attributes, as on a TPU VM."""
    attributes, asked = {}, []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Metadata-Flavor")))
            text = attributes.get(self.path.rsplit("/", 1)[-1])
            self.send_response(200 if text else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *words):
            pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    alone.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    attributes["asked"] = asked
    yield attributes
    server.shutdown()
    server.server_close()


# ── What is here ──

@pytest.mark.parametrize("name", MACHINES)
def test_machines_are_told_apart(on, name):
    on(name)
    found = hardware.detect()
    assert found.slice == MACHINES[name][1] and found.trouble == "", found
    assert found.chips == sum(v != "0x8086" and c[:4] in ("0x12", "0x03")
                              for v, _, c in MACHINES[name][0]["pci"])
    assert found.accelerator == ("tpu" if found.slice else "gpu" if found.chips else "")
    if MACHINES[name][2]:
        assert helpers.size() == MACHINES[name][2]
    else:
        with pytest.raises(ValueError, match=f"(?s){found.slice}.*  tiny: .*  e2b: .*  31b: "):
            helpers.size()


def test_ids_are_jaxs_own():
    from jax._src import hardware_utils
    assert hardware.GOOGLE == hardware_utils._GOOGLE_PCI_VENDOR_ID
    theirs = {number: version.name.replace("tpu7x", "v7x")
              for number, version in hardware_utils._TPU_PCI_DEVICE_IDS.items()}
    assert theirs.pop("0x0056") == "plc", "a chip without a public name"
    assert {one.pci: one.name for one in hardware.CHIPS.values() if one.google} == {
        number: name for number, name in theirs.items() if name != "v3"}, "v3 is retired"


def test_jax_counts_the_same_chips(on, monkeypatch):
    from jax._src import hardware_utils
    root = on("v5p-8")
    glob = hardware_utils.glob.glob
    monkeypatch.setattr(hardware_utils.glob, "glob", lambda pattern: glob(f"{root}{pattern}"))
    chips, version = hardware_utils.num_available_tpu_chips_and_device_id()
    assert (chips, version.name) == (4, "v5p") == (hardware.here().chips, hardware.here().kind)


# ── Hosts ──

def test_a_host_of_a_v5p_32_is_not_a_v5p_8(on, metadata):
    on("v5p-8")
    metadata["worker-network-endpoints"] = ",".join(f"unknown:unknown:10.0.0.{n}" for n in range(4))
    found = hardware.detect()
    assert (found.chips, found.hosts, found.slice) == (4, 4, "v5p-32")
    assert metadata["asked"][-1][1] == "Google", "without this header the server refuses"
    del metadata["worker-network-endpoints"]
    metadata["accelerator-type"] = "v5p-32"
    assert hardware.detect().hosts == 4
    metadata["accelerator-type"] = "v5p-8"
    assert hardware.detect().hosts == 1
    metadata["accelerator-type"] = "v5p-32"
    hardware.here.cache_clear()
    assert helpers.size() == "31b"  # trained by four hosts together
    with pytest.raises(ValueError, match="(?s)v5p-64.*8 hosts.*SIZE.*tiny.*e2b.*31b"):
        metadata["accelerator-type"] = "v5p-64"
        hardware.here.cache_clear()
        helpers.size()


def test_hosts_by_the_environment(on, metadata, monkeypatch):
    on("v5p-8")
    metadata["accelerator-type"] = "v5p-32"
    for names, found in (("a,b,c,d", "v5p-32"), ("localhost", "v5p-8")):
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", names)
        assert hardware.detect().slice == found
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert hardware.detect().hosts == 1
    assert metadata["asked"] == [], "who has the answer, or was told not to, does not ask"


# ── Trouble ──

def test_chips_held_by_another_process_name_it(on, monkeypatch, tmp_path):
    root = on("v5p-8")
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    (root / "proc").rmdir()
    (root / "proc").symlink_to("/proc")  # the real one: a real process opens the file
    holder = subprocess.Popen([sys.executable, "-c",
                               "import sys; f = open(sys.argv[1]); print(flush=True); input()",
                               str(root / "dev/vfio/2")], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        with open(root / "dev/vfio/0"):  # our own file does not count
            found = hardware.detect()
        assert found.slice == "v5p-8" and f"process {holder.pid} (" in found.trouble
        assert "\n" not in found.trouble
        with pytest.raises(ValueError, match=f"v5p-8.*process {holder.pid}"):
            helpers.opening.start(devices=4)
    finally:
        holder.communicate(b"\n")
    assert hardware.detect().trouble == ""


# ── The shell ──

def pythons():
    """Every Python 3.7 or later that is at hand."""
    found = {sys.executable, shutil.which("python3") or sys.executable}
    found |= {str(path) for path in Path.home().glob(".pyenv/versions/3.*/bin/python3")
              if not path.parts[-3].startswith("3.6.")}
    return sorted(found)


@pytest.mark.parametrize("python", pythons())
def test_any_python_runs_the_table(on, python):
    on("v6e-8")
    answer = program(python, "-S", "-m", "tables.hardware")
    said = dict(line.split("=", 1) for line in answer.stdout.splitlines())
    assert said == {"ACCELERATOR": "tpu", "KIND": "v6e", "CHIPS": "8", "HOSTS": "1",
                    "SLICE": "v6e-8",
                    "TROUBLE": "", "FOUND": "TPU v6e-8 (8 chips)"}


@pytest.mark.parametrize(("name", "file"), [
    ("v5p-8", "tpu.txt"), ("h100", "train.txt"), ("laptop", "train.txt")])
def test_setup_installs_what_the_detector_says(on, tmp_path, name, file):
    """A Python that only writes down what pip was asked to install; the rest is the real one."""
    on(name)
    python = tmp_path / "python"
    python.write_text(f"""#!/usr/bin/env bash
if [ "$1 $2" = "-m uv" ]; then exit 1
elif [ "$1 $2" = "-m pip" ]; then echo "${{@: -1}}" >>{tmp_path}/asked
elif [ "$1" = -c ] && [[ "$2" = *sys.prefix* ]]; then echo {tmp_path}
else exec {sys.executable} "$@"; fi
""")
    python.chmod(0o755)
    answer = program("bash", "setup.sh", "train", "--into", python)
    assert answer.returncode == 0, answer.stderr
    asked = (tmp_path / "asked").read_text().split()
    assert asked[1:] == [f"requirements/{file}"], "uv, then by pip"
    assert str(hardware.here()) in answer.stdout


# ── The size ──

def test_a_notebook_of_one_size_is_tiny_everywhere(on, monkeypatch, tmp_path, capsys):
    on("v7x")
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    with pytest.raises(ValueError):
        helpers.opening.start()
    helpers.opening.start(always="tiny")
    assert helpers.choose({"tiny": 1}) == 1
    assert "size tiny (SIZE is set)" in capsys.readouterr().out


# ── The list of chips ──

@pytest.mark.parametrize("name",
                         ["v5p-1", "v5p-3", "v4-1", "v5e-0", "v6e-²", "v6e-", "v6e-08", "v5p"])
def test_a_slice_has_whole_chips(name, capsys, monkeypatch):
    """`--slice v5p-1` once had 0 chips, for 0.00 dollars an hour."""
    with pytest.raises(UserError, match="is no slice"):
        hardware.slice_of(name)
    monkeypatch.setattr(sys, "argv", ["hardware", "--slice", name])
    with pytest.raises(SystemExit):
        hardware.main()
    said = capsys.readouterr()
    assert said.out == "" and "is no slice" in said.err
    assert all(hardware.slice_of(one.name).chips >= 1 for one in hardware.SLICES.values())


def test_chips_are_those_of_the_spec_sheets():
    sheet = published("spec_sheet_reference", "item")
    train, gpu = (published("hardware_training", "spec", column) for column in ("tpu", "gpu"))
    serve = published("hardware_inference", "spec", "tpu")
    v5p, v6e, h100 = (chip(name) for name in ("v5p", "v6e", "h100"))
    assert v5p.flops == sheet["v5p_peak_bf16"] * 1e12 and v5p.bandwidth == sheet["v5p_hbm_bw"] * 1e9
    assert v6e.flops == sheet["v6e_peak_bf16"] * 1e12 and v6e.bandwidth == sheet["v6e_hbm_bw"] * 1e9
    assert v6e.hbm == serve["hbm_per_chip"] * 2**30 and h100.hbm == gpu["hbm_per_chip"] * 1e9
    assert h100.flops == sheet["h100_sxm_peak_bf16"] * 1e12
    assert h100.bandwidth == sheet["h100_sxm_hbm_bw"] * 1e9
    for one, column in ((v5p, train), (v6e, serve), (h100, gpu)):
        assert one.dollars_per_hour * column["accelerator_count"] == pytest.approx(
            column["hourly_rate_on_demand"])
    # v5p: 2 TensorCores of 4 arrays of 128 x 128 multipliers
    assert v5p.clock * 2 * 4 * 128 * 128 * 2 == pytest.approx(v5p.flops, rel=0.01)


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "v7x"])
def test_chips_agree_with_jaxs_own_table(name):
    """JAX's Pallas has these numbers for its kernels, rounded, and bandwidth of v5p 12% lower."""
    from jax._src.pallas.mosaic import tpu_info
    ours = chip(name)
    versions = {tpu_info.chip_version_from_device_kind(kind) for kind in ours.jax}
    assert len(versions) == 1 and None not in versions, ours.jax
    cores = 1 if name == "v7x" else ours.cores  # a v7x's two cores are two devices
    theirs = tpu_info._get_tpu_info_impl(versions.pop(), cores)
    factor = ours.flops / theirs.bf16_ops_per_second
    assert round(factor) in (1, ours.cores) and factor == pytest.approx(round(factor), rel=0.01)
    assert ours.bandwidth == pytest.approx(round(factor) * theirs.mem_bw_bytes_per_second, rel=0.13)
    if theirs.int8_ops_per_second and ours.int8:
        assert ours.int8 == pytest.approx(round(factor) * theirs.int8_ops_per_second, rel=0.01)


INVENTED = hardware.Chip("v9z", "0x0099", ("TPU v9z",), "v9z", 2, 1e15, 2e15, 100e9, 5e12, 100e9,
                         5.0)


def test_a_new_chip_is_one_row(alone, tmp_path):
    """Detection, slices, the floors of a server and the question of what fits accept it."""
    from tables import physics
    from tpu_time import fit
    alone.setitem(hardware.CHIPS, "v9z", INVENTED)
    alone.setenv("HARDWARE_ROOT", str(tree(tmp_path / "root", **tpu("0x0099", 4))))
    assert hardware.here().slice == "v9z-8" and hardware.chip_of("TPU v9z") == "v9z"
    found = hardware.slice_of("v9z-8")
    assert (found.chips, found.dollars_per_hour) == (4, 20.0)
    assert hardware.slice_name("v9z", 4) == "v9z-8"
    assert fit.will_it_fit("v9z", 4).limit == pytest.approx(100e9 / 2**30)
    config = json.loads((ROOT / "data/configs/gemma4_31b.json").read_text())
    moved = physics.decode_bytes(config, 1, 512)
    floor = physics.tpot_floor(moved, found.chips * found.chip.bandwidth)
    assert floor == pytest.approx(3.1e-3, rel=0.1)
