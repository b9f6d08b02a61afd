"""01: its commands reach gcloud as meant, its script runs in order, its checks can fail.

    .venv/bin/python -m pytest tests/test_setup_notebook.py
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, load
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_hardware import tpu, tree

from helpers import checks
from serving.options import IMAGES
from tpu_time import fit
from helpers.gcloud import (
    HUGE_PAGES,
    SLICES,
    all_hosts_commands,
    bucket_commands,
    classic_command,
    connect_command,
    copy_command,
    create_command,
    delete_commands,
    hosts_script,
    last_lines_of_hosts,
    list_commands,
    serving_script,
    shell,
    vm_script,
    worst_case,
    zones_command,
)
from tables.hardware import Hardware

NOTEBOOK = "01_setup.py"
V5P, V5E = Hardware("tpu", "v5p", 4), Hardware("tpu", "v5e", 8)


def parses(text):
    return subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0


def every_command():
    for name in SLICES:
        for zone in SLICES[name]["zones, 2026"].split(", "):
            for model in ("SPOT", "FLEX_START", "STANDARD"):
                if SLICES[name]["machine type"]:
                    yield create_command("vm", name, zone, 6, model)
                yield classic_command("vm", name, zone, model)
                yield classic_command("vm", name, zone, model, queued=True)
                assert "--valid-until-duration=2h" in classic_command("vm", name, zone, model, True)
            yield from bucket_commands("a-bucket", zone)
            yield connect_command("vm", zone)
            yield copy_command("a folder/vm.sh", "vm", zone)
            yield connect_command("vm", zone, classic=True)
            yield from all_hosts_commands("vm", "v5p-32", zone, "SPOT", "a folder/vm_hosts.sh")
            yield from list_commands((zone, "us-east5-a"), "a-bucket")
            yield from delete_commands("vm", zone)
        if SLICES[name]["machine type"]:
            yield zones_command(name)


def test_every_command_parses_and_arrives_unchanged():
    for command in every_command():
        text = shell(command)
        assert parses(text), text
        assert shlex.split(text.replace("\\\n", "")) == command


@settings(deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1))
@example(["--0"])
def test_shell_quotes_anything(words):
    words = [re.sub(r"[\x00\r\ud800-\udfff]", "x", word) for word in words]
    assert shlex.split(re.sub(r" \\\n    (?=--|'--)", " ", shell(words))) == words


def test_gcloud_gets_the_words(tmp_path):
    stub = tmp_path / "gcloud"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    command = create_command("vm", "v5p-8", "us-central1-a", 6, "FLEX_START")
    run = subprocess.run(["bash", "-c", shell(command)], capture_output=True, text=True,
                         env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert run.stdout.splitlines() == command[1:]


def test_every_new_machine_ends_by_itself():
    for command in every_command():
        if command[1:4] == ["compute", "instances", "create"]:
            assert "--max-run-duration=6h" in command
            assert "--instance-termination-action=DELETE" in command
            waits = "--provisioning-model=FLEX_START" in command
            assert ("--request-valid-for-duration=2h" in command) == waits
            disk = "hyperdisk-balanced" if "ct6e" in str(command) else "pd-balanced"
            assert f"--boot-disk-type={disk}" in command  # a v6e takes no persistent disk
            assert "--maintenance-policy=TERMINATE" in command


def test_a_slice_of_several_hosts_is_started_on_all_of_them():
    create, copy, start = all_hosts_commands("vm", "v5p-32", "us-east5-a", "STANDARD", "runs/vm_hosts.sh")
    assert create == ["gcloud", "compute", "tpus", "tpu-vm", "create", "vm", "--version=v2-alpha-tpuv5",
                      "--zone=us-east5-a", "--accelerator-type=v5p-32"]
    for command in (copy, start):
        assert "--worker=all" in command and "--zone=us-east5-a" in command
    assert start[-1] == "--command=bash vm_hosts.sh" and copy[5:7] == ["runs/vm_hosts.sh", "vm:"]


@pytest.mark.parametrize(("worker", "merges"), [(0, True), (3, False)])
def test_on_several_hosts_all_train_and_the_first_one_merges_and_copies(tmp_path, worker, merges):
    """The script's own last lines, with stand-ins for the metadata server and the notebooks."""
    script = hosts_script("https://example.org/x.git", "a-bucket", "31b")
    assert parses(script) and script.endswith(last_lines_of_hosts())
    before = vm_script("https://example.org/x.git", "a-bucket", "31b", "01", "04").splitlines()[:-6]
    assert script.startswith("\n".join(before) + "\n")  # what 01 says about the two scripts
    log, python = tmp_path / "log", tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\necho "$*" >> {log}\n')
    (tmp_path / "curl").write_text(f'#!/usr/bin/env bash\necho "$*" > {tmp_path}/asked\necho {worker}\n')
    (tmp_path / "tail").write_text("#!/usr/bin/env bash\nsleep 0.2\n")
    for program in (python, tmp_path / "curl", tmp_path / "tail"):
        program.chmod(0o755)
    text = "set -euo pipefail\n" + last_lines_of_hosts() + "wait\n"
    run = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60, env={
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": "/there",
        "RUN": "gs://a-bucket/run"})
    assert run.returncode == 0, run.stderr
    assert "agent-worker-number" in (tmp_path / "asked").read_text()
    done, push = log.read_text().splitlines(), "-m helpers.remote push /there gs://a-bucket/run"
    assert sorted(done) == [push, f"{push} --every 300"] * merges + [
        "02_data.py", "03_train.py", *["04_merge.py"] * merges]
    assert ("all is in the bucket" in (tmp_path / "run.log").read_text()) == merges
    assert not merges or done.index(push) > done.index("04_merge.py")


def test_slices_are_consistent():
    for name, column in SLICES.items():
        kind, number = name.split("-")
        if kind == "v5e":  # Compute Engine refuses it; docs.cloud.google.com/tpu/docs/v5e, runtimes
            assert column["classic type"] == f"v5litepod-{number}" and not column["machine type"]
            assert column["classic runtime"] == "v2-alpha-tpuv5-lite"
            continue
        assert column["classic type"] == name
        chips = int(number) // 2 if kind == "v5p" else int(number)
        assert column["machine type"].endswith(f"-{chips}t")
        assert column["machine type"].startswith({"v5p": "ct5p", "v6e": "ct6e"}[kind])
        assert column["classic runtime"] == {"v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}[kind]
    classic = classic_command("vm", "v6e-8", "z", "SPOT")
    assert "--version=v2-alpha-tpuv6e" in classic and "--accelerator-type=v6e-8" in classic
    assert "--spot" in classic and "--spot" not in classic_command("vm", "v6e-8", "z", "STANDARD")
    assert "--accelerator-type=v5litepod-8" in classic_command("vm", "v5e-8", "z", "SPOT")
    with pytest.raises(ValueError, match="Compute Engine makes no v5e-4: take the classic command"):
        create_command("vm", "v5e-4", "z", 6, "SPOT")


def test_bucket_is_in_the_region_of_the_zone():
    assert "--location=us-central1" in bucket_commands("b", "us-central1-a")[0]


def run_script(tmp_path, text, no_image=False):
    """Run a VM's script with stand-ins for sudo, git, gcloud, docker and tail: (result, log's file).

    `loginctl` is not there, or refuses.
    """
    log = tmp_path / "log"
    stand_in = f'#!/usr/bin/env bash\necho "$(basename "$0") $*" >> {log}\n'
    for name in ("sudo", "gcloud", "tail", "docker"):
        (tmp_path / name).write_text(stand_in)
    (tmp_path / "sudo").write_text(stand_in + '[ "$1" != loginctl ]\n')
    if no_image:
        (tmp_path / "docker").write_text("#!/usr/bin/env bash\nexit 1\n")
    (tmp_path / "sg").write_text('#!/usr/bin/env bash\n[ "$1 $2" = "docker -c" ] && exec bash -c "$3"\n')
    (tmp_path / "git").write_text(stand_in + f"""mkdir -p "$3/.venv/bin"
for file in setup.sh run_all.sh .venv/bin/python; do
  cp {tmp_path}/sudo "$3/$file"
done
""")
    (tmp_path / "sleep").write_text(f"#!/usr/bin/env bash\nmkdir {tmp_path}/slept 2>/dev/null\n")
    for name in ("sudo", "gcloud", "tail", "git", "sleep", "docker", "sg"):  # sleep succeeds once, then ends the loop
        (tmp_path / name).chmod(0o755)
    assert parses(text)
    work = tmp_path / "work"
    work.mkdir()
    text = text.replace("/dev/shm/run", str(tmp_path / "run"))
    run = subprocess.run(["bash", "-c", text], cwd=work, capture_output=True, text=True,
                         env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    return run, log


HERE = "https://example.org/it's.git", "a-bucket", "31b"
IMAGE = IMAGES["tpu-docker"]


@pytest.mark.parametrize("serving", [False, True])
def test_vm_script_runs_in_order(tmp_path, serving):
    """It does its steps one after the other, and the log that one watches says when all is copied."""
    text = serving_script(*HERE) if serving else vm_script(*HERE, "01", "04")
    run, log = run_script(tmp_path, text)
    assert run.returncode == 0, run.stderr
    watched = tmp_path / "work/gemma4-on-tpu/run.log"
    for _ in range(50):
        lines = log.read_text().splitlines()
        if any("--every" in line for line in lines) and "all is in" in watched.read_text():
            break
        time.sleep(0.1)
    order = [next(i for i, line in enumerate(lines) if word in line) for word in (
        "add-apt-repository", "apt-get update", "python3.11-venv", "git clone",
        f"sh -c echo always > {HUGE_PAGES}", "setup.sh train", "python 01_setup.py",
        *(("usermod -aG docker", f"docker pull {IMAGE}",
           f"gcloud storage rsync --recursive --no-clobber --exclude=^(train/checkpoints|cache|"
           f"jax_cache)/ gs://a-bucket/run {tmp_path}/run") if serving else
          (f"helpers.remote pull gs://a-bucket/run {tmp_path}/run",)))]
    assert order == sorted(order), lines
    push = f"python -m helpers.remote push {tmp_path}/run gs://a-bucket/run"
    last = lines[order[-1] + 1:]  # the first in any place: both go on in the background
    assert last.count(f"{push} --every 300") == 1
    assert [line for line in last if "--every" not in line and "tail" not in line] == [
        f"run_all.sh {'05 07' if serving else '01 04'}", push]
    assert watched.read_text().splitlines()[-1] == "all is in the bucket: delete this machine"
    assert "TMPDIR=/dev/shm" in text and "export SIZE=31b" in text
    assert any("loginctl enable-linger" in line for line in lines)
    for line in text.replace("\\\n", "").splitlines():  # nobody answers questions there
        assert "apt-get install" not in line or all(word in line for word in (
            "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_MODE=a", "DPkg::Lock::Timeout"))


def test_an_image_that_is_not_there_stops_before_the_weights_come(tmp_path):
    run, log = run_script(tmp_path, serving_script(*HERE), no_image=True)
    assert run.returncode == 1 and "gcloud" not in log.read_text()
    full = load("05_serve_vllm.py", "Settings", "FULL")[1]
    assert (full.engine, full.image) == ("tpu-docker", ""), "05 takes the image that is pulled here"


def test_the_readme_counts_the_lines_of_vm_sh():
    first, last = map(int, re.search(r"lines (\d+) to (\d+) of 01's `vm.sh`",
                                     (ROOT / "README.md").read_text()).groups())
    lines = vm_script(*HERE, "01", "04").splitlines()
    assert lines[last - 1].startswith("export TMPDIR=") and lines[0].startswith("set -e")
    assert first == 2 and any("enable-linger" in line for line in lines[1:last])


def test_one_address_says_where_a_run_and_its_checkpoints_are(tmp_path):
    for text in (vm_script(*HERE, "01", "04"), serving_script(*HERE), hosts_script(*HERE)):
        assert text.count("gs://a-bucket/run") == 1
        line = re.search("^export CHECKPOINTS=.*$", text, re.M)[0]
        there = subprocess.run(["bash", "-c", f'RUN=gs://b/x\n{line}\necho "$CHECKPOINTS"'],
                               capture_output=True, text=True).stdout.strip()
        assert there == "gs://b/x-checkpoints", "not below the run, which is fetched as a whole"


@pytest.mark.parametrize(("chips", "dtype", "fine"), [(4, "int8", True), (4, "nf4", True),
                                                      (4, "", False), (1, "int8", False)])
def test_01_takes_the_slices_on_which_a_step_is_compiled(tmp_path, chips, dtype, fine):
    """11's command for a v5e-4 begins with 01."""
    root = tree(tmp_path / "root", **tpu("0x0063", chips))
    env = {**os.environ, "SIZE": "31b", "MPLBACKEND": "agg", "RUN_DIR": str(tmp_path / "run"),
           "HARDWARE_ROOT": str(root), "BASE_DTYPE": dtype, "TPU_SKIP_MDS_QUERY": "1"}
    run = subprocess.run([str(ROOT / ".venv/bin/python"), NOTEBOOK], cwd=ROOT, text=True,
                         capture_output=True, env=env)
    found = json.loads((tmp_path / "run/setup.json").read_text())["checks"]["accelerator"]
    assert found["fine"] == fine, (found, run.stderr[-500:])
    assert fine or "a v5p-8 or v5p-32 or v6e-8" in found["text"]


def test_every_size_keeps_the_slices_that_are_named_for_it():
    assert checks.slices_for("31b", "bfloat16", ("v6e-8",)) == ("v6e-8", "v5p-8", "v5p-32")
    assert set(checks.slices_for("e2b", "bfloat16", ())) == {"v6e-1", "v5e-1"}
    assert "v5e-4" in checks.slices_for("31b", "nf4", ()) and "v5e-4" in fit.SLICES


@pytest.mark.parametrize(("name", "good", "bad", "says"), [
    ("check_python", ((3, 11, 7),), ((3, 10, 12),), "deadsnakes"),
    ("check_python", ((3, 13, 15),), ((3, 14, 0),), "3.11 is needed"),
    ("check_space", ("x", 70, 62.5), ("x", 12, 62.5), "TMPDIR=/dev/shm"),
    ("check_slice", (V5P, ("v5p-8",)), (V5E, ("v5p-8", "v6e-8")), "a v5p-8 or v6e-8 is needed"),
    ("check_slice", (V5E, ()), (Hardware(), ("v6e-1",)), "no TPU, no GPU: a v6e-1 is needed"),
    ("check_slice", (V5P, ("v5p-8",)), (replace(V5P, trouble="process 7 holds the chips"), ("v5p-8",)),
     "process 7 holds"),
    ("check_slice", (V5P, ("v5p-8",)), (replace(V5P, hosts=4), ("v5p-8",)), "TPU v5p-32"),
    ("check_devices", (4, "TPU v5", 4), (1, "cpu", 4), "sees 1 x cpu, not the 4 chips"),
    ("check_devices", (1, "cpu", 0), (0, "none", 0), "sees 0 x none"),
    ("check_devices", (4, "TPU v5", 4), (0, "none", 4, "RuntimeError: the chips are busy"), "are busy"),
    ("check_huge_pages", ("always", 4), ("madvise", 4), f"echo always > {HUGE_PAGES}"),
    ("check_huge_pages", ("madvise", 0), ("", 1), "are unknown"),
    ("check_huge_pages", ("", 0), ("never", 8), "start slowly"),
    ("check_icarus", ("Icarus Verilog version 11.0 (stable) ()",), ("",), "apt-get install"),
    ("check_icarus", ("Icarus Verilog version 12.0 (stable)",),
     ("Icarus Verilog version 13.0 (devel)",), "11 or 12 is needed"),
])
def test_checks_can_pass_and_fail(name, good, bad, says):
    check = getattr(checks, name)
    assert check(*good)[0] is True
    fine, message = check(*bad)
    assert fine is False and says in message and "\n" not in message


def test_what_jax_says_is_passed_on(monkeypatch, tmp_path):
    """Not setup.sh is the cure where the TPU's library cannot start."""
    assert checks.count_devices()[3] == ""
    monkeypatch.setenv("JAX_PLATFORMS", "tpuu")
    count, _, _, said = checks.count_devices()
    assert count == 0 and "tpuu" in said
    assert "setup.sh" not in checks.check_devices(count, "none", 4, said)[1]
    slow = tmp_path / "python"
    slow.write_text("#!/usr/bin/env bash\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert "Does every host" in checks.count_devices(timeout=0.2)[3]


def test_huge_pages_without_a_tpu_are_said_to_be_fine():
    assert checks.check_huge_pages("madvise", 0) == (True, "madvise (no TPU here, so fine)")


def test_worst_case_is_chips_times_hours():
    assert worst_case("v5p-8", 1) == pytest.approx(16.80)
    assert worst_case("v6e-8", 2) == pytest.approx(2 * 21.52)
    assert worst_case("v6e-1", 8) == pytest.approx(21.52)


def test_a_machine_that_is_not_ready_gets_one_clear_error(tmp_path):
    """As the 31B, on a machine without a TPU: setup.json is written, then one error, no traceback."""
    env = {**os.environ, "SIZE": "31b", "MPLBACKEND": "agg", "RUN_DIR": str(tmp_path / "run")}
    env.pop("XLA_FLAGS", None)  # another test may have simulated four devices
    run = subprocess.run([str(ROOT / ".venv/bin/python"), NOTEBOOK], cwd=ROOT, text=True,
                         capture_output=True, env=env)
    assert run.returncode == 1
    assert "Error: this machine is not ready." in run.stderr and "Traceback" not in run.stderr
    assert not json.loads((tmp_path / "run" / "setup.json").read_text())["checks"]["accelerator"]["fine"]


@pytest.mark.series
def test_setup_json_of_the_run():
    folder = Path(os.environ.get("RUN_DIR", ROOT / "runs" / "tiny"))
    if not folder.is_dir():
        pytest.skip(f"no finished run in {folder}: ./run_all.sh makes one")
    written = json.loads((folder / "setup.json").read_text())
    assert all(check["fine"] for check in written["checks"].values())
    assert written["python"].startswith("3.1") and written["icarus"].startswith("Icarus Verilog")


@pytest.mark.parametrize("apt", [True, False])
def test_where_python_311_is_missing_apt_is_asked_once(tmp_path, apt):
    """Colab's Python is newer; the serving environment needs 3.11. The function as setup.sh has it."""
    function = re.search(r"^find_python\(\) .*?^}\n", (ROOT / "setup.sh").read_text(), re.M | re.S)[0]
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")  # another version
    made = tmp_path / "python3.11"
    script = f"""set -euo pipefail
say() {{ echo "$*"; }}
stop() {{ echo "stop: $*" >&2; exit 1; }}
apt_install() {{ echo "$*" >> {tmp_path}/asked
  {'true' if apt else 'return 1'}
  printf '#!/bin/sh\\ncase $2 in *executable*) echo {made} ;; esac\\n' > {made}; /bin/chmod +x {made}; }}
{function}
found="$(find_python)"
echo "found $found"
"""
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run([shutil.which("bash"), "-c", script], capture_output=True, text=True,
                          env={"PATH": str(tmp_path)})
    assert (tmp_path / "asked").read_text() == "python3.11 python3.11-venv\n"
    if apt:
        assert done.returncode == 0 and done.stdout == f"found {made}\n", done.stderr
    else:
        assert done.returncode == 1 and "stop: Python 3.11 is missing" in done.stderr
