"""The free machine: what Kaggle's environment gets wrong, the launcher's way there and back.

Kaggle itself isn't here. A folder tree like its own stands in for it: an image's Python with an old
JAX that nobody may import, a /sys with eight chips, small disks, a `kaggle` that only records.
"""

import errno
import functools
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, SERVE, load, needs_serve, program
from test_hardware import alone, on, tpu, tree  # noqa: F401
from test_serve import PARSE, vllm_part

import first_hour
import helpers
import kaggle_files
import kaggle_session
import series
from helpers import kept
from serving import commands, limits, server, v5e
from tables import hardware, kaggle, stored
from tables.errors import UserError
from tpu_time import bands
from verilog import plans

POISON = ("WARNING: could not determine TPU worker hostnames or IP addresses, please set env var "
          "`TPU_WORKER_HOSTNAMES` manually")


# ── What the environment gets wrong ──

def test_an_environment_of_kaggles_is_mended_and_nothing_else_changes(alone):  # noqa: F811
    before = {"TPU_LIBRARY_PATH": "/usr/local/lib/libtpu.so", "TPU_WORKER_HOSTNAMES": POISON,
              "TPU_ACCELERATOR_TYPE": "v5litepod-8", "PATH": "/bin"}
    mended = dict(before)
    told = kaggle.mend(mended)
    assert mended == {
        "PATH": "/bin", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1", "TPU_HOST_BOUNDS": "1,1,1"}
    assert len(told) == 5 and all("\n" not in line for line in told)
    assert kaggle.mend(mended) == [], "a second time there's nothing to mend"


@pytest.mark.parametrize(("asked", "mended"), [
    ("tpu", "tpu,cpu"), ("tpu,cpu", "tpu,cpu"), ("cpu", "cpu"), ("cpu,tpu", "cpu,tpu")])
def test_jax_may_use_the_cpu_beside_the_tpu(alone, asked, mended):  # noqa: F811
    """An int8 base is quantized on the CPU, which JAX_PLATFORMS=tpu hides."""
    environment = {"JAX_PLATFORMS": asked, **kaggle.topology()}
    told = kaggle.mend(environment)
    assert environment["JAX_PLATFORMS"] == mended and len(told) == (asked != mended)


@pytest.mark.parametrize(("files", "gib"), [
    ({"proc/meminfo": "MemTotal:  419430400 kB\nMemFree: 1 kB\n"}, 400),
    ({"proc/meminfo": "MemTotal: 419430400 kB\n", "sys/fs/cgroup/memory.max": f"{330 * 2**30}\n"},
     330),
    ({"proc/meminfo": "MemTotal: 419430400 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 400),
    ({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{330 * 2**30}\n"}, 330),
    ({}, 0)])
def test_the_hosts_memory_is_its_containers_limit(on, files, gib):  # noqa: F811
    root = on("v5e-8")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert hardware.host_memory() == gib * 2**30


def test_a_host_without_the_memory_to_quantize_is_refused_in_one_line():
    small = int(47.9 * 2**30)
    why = kaggle.no_memory("31b", small)
    assert why.startswith("this session's host has 48 GiB of memory") and "SIZE=e2b" in why
    for size, memory in (("31b", 330 * 2**30), ("31b", 0), ("e2b", small), ("tiny", small)):
        assert kaggle.no_memory(size, memory) == ""


@pytest.mark.parametrize("names", ["localhost", "t1v-n-ab12-w-0,t1v-n-ab12-w-1", "10.0.0.2"])
def test_real_names_of_hosts_stay(alone, names):  # noqa: F811
    environment = {"TPU_WORKER_HOSTNAMES": names, **kaggle.topology()}
    assert kaggle.mend(environment) == [] and environment["TPU_WORKER_HOSTNAMES"] == names


def test_where_a_metadata_server_answers_the_driver_asks_it(alone):  # noqa: F811
    alone.setattr(hardware, "metadata", lambda key: "v5litepod-8")
    environment = {}
    assert kaggle.mend(environment) == [] and environment == {}


def test_the_driver_reads_these_names():
    """JAX's own code asks for the first; the others stand in the library that drives the chips."""
    import inspect

    from jax._src.clusters import cloud_tpu_cluster
    assert "TPU_SKIP_MDS_QUERY" in inspect.getsource(cloud_tpu_cluster)


def test_a_warning_with_a_comma_is_no_two_hosts(on, monkeypatch):  # noqa: F811
    """TPU_WORKER_HOSTNAMES held a sentence, and a v5e-8 was taken for half of a v5e-16."""
    on("v5e-8")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", POISON)
    assert hardware.detect().slice == "v5e-8"


@pytest.mark.parametrize(("named", "files", "found"), [
    ("v5litepod-8", 8, "v5e-8"), ("v5e-8", 8, "v5e-8"), ("v5litepod-8", 4, "v5e-4"),
    ("v5litepod-8", 0, ""), ("", 8, ""), ("abacus-8", 8, "")])
def test_a_container_without_a_pci_bus_is_known_by_its_files_and_a_name(
        alone, tmp_path, named, files, found):  # noqa: F811
    root = tree(tmp_path / "root", devices=tpu("0x0063", files)["devices"])
    alone.setenv("HARDWARE_ROOT", str(root))
    alone.setenv("TPU_ACCELERATOR_TYPE", named)
    alone.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert hardware.detect().slice == found


def test_a_v5e_8_of_kaggles_trains_the_31b_without_an_edit(on, monkeypatch, tmp_path):  # noqa: F811
    on("v5e-8")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert kaggle.refusal(hardware.here()) == "" and helpers.size() == "31b"


# ── Serving there ──

def tries():
    """The command of every way to start, in order."""
    found = []
    for attempt in v5e.TRIES:
        options = replace(v5e.PLANNED, model="/tmp/run/merged", name="m", **attempt.changes)
        found.append(commands.command(options))
    return found


@needs_serve
@pytest.mark.slow
def test_vllm_itself_understands_every_try():
    job = {"serve": [vllm_part(command) for command in tries()], "bench": [],
           "wrong": ["--limit-mm-please"]}
    done = program(SERVE, "-c", PARSE, stdin=json.dumps(job))
    assert done.returncode == 0, done.stderr[-2000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(read) == len(v5e.TRIES) and done.stdout.rstrip().endswith("refused")
    assert {(each["tp"], each["dp"]) for each in read} == {(8, 1)}
    assert [each["length"] for each in read] == [8192, 4096, 4096, 4096, 4096]
    assert all(each["limits"] == {"image": 0, "video": 0, "audio": 0} for each in read)


def test_each_try_differs_from_the_one_before_and_waits_long_enough_to_compile():
    made = tries()
    differ = [(" ".join(command), attempt.version) for command, attempt in zip(made, v5e.TRIES)]
    assert len(set(differ)) == len(differ)
    assert all("VLLM_ENGINE_READY_TIMEOUT_S=3600" in command for command in made)
    assert all("USE_BATCHED_RPA_KERNEL=1" not in command for command in made), "a v6e's, untried"


def test_serve_try_chooses_and_a_wrong_one_lists_them(monkeypatch):
    monkeypatch.delenv("SERVE_TRY", raising=False)
    monkeypatch.setenv("VLLM_TPU", "")
    assert v5e.options_here() == v5e.PLANNED
    monkeypatch.setenv("SERVE_TRY", "3")
    assert v5e.options_here().implementation == "vllm"
    for wrong in ("5", "two", "-1"):
        monkeypatch.setenv("SERVE_TRY", wrong)
        with pytest.raises(UserError, match="There are 0 .as planned., 1 .fewer shapes"):
            v5e.options_here()


def test_every_version_that_a_try_names_can_be_installed():
    for attempt in v5e.TRIES:
        if attempt.version:
            file = ROOT / f"requirements/serve-tpu-{attempt.version}.txt"
            assert f"vllm-tpu=={attempt.version}" in file.read_text().split()


def test_another_version_replaces_the_installed_one(tmp_path):
    """A stand-in for Python writes down what is installed; the stamps are setup.sh's own."""
    shutil.copy2(ROOT / "setup.sh", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    python = tmp_path / ".venv-serve-tpu/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/usr/bin/env bash
case "$*" in
*"uv pip install"*) echo "$* $UV_TORCH_BACKEND" >> {tmp_path}/log ;;
*sys.prefix*) echo {tmp_path}/.venv-serve-tpu ;;
esac
""")
    python.chmod(0o755)
    for version in ("", "0.28.0", "0.28.0", ""):
        done = program("bash", "setup.sh", "serve-tpu", cwd=tmp_path, VLLM_TPU=version)
        assert done.returncode == 0, done.stderr
    asked = [line.split("-r ")[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert asked == ["requirements/serve-tpu.txt cpu", "requirements/serve-tpu-0.28.0.txt cpu",
                     "requirements/serve-tpu.txt cpu"]
    done = program("bash", "setup.sh", "serve-tpu", cwd=tmp_path, VLLM_TPU="9")
    assert done.returncode == 1 and "VLLM_TPU=9 has no requirements/serve-tpu-9.txt" in done.stderr


def test_the_31b_fits_a_v5e_8_with_room_for_its_context():
    """By the formula that gives what three servers of others logged (test_bench)."""
    config = json.loads((ROOT / "data/configs/gemma4_31b.json").read_text())
    plan = limits.memory_plan(config, hardware.chip("v5e").hbm, 8, 1, 2, 62.5e9, v5e.SHARE)
    assert plan["weights, GiB/chip"] == pytest.approx(7.28, abs=0.01)
    assert plan["tokens"] == 54_779, "the number in serving/v5e.py"
    assert plan["tokens"] > 6 * v5e.PLANNED.max_model_len


@pytest.mark.parametrize(("size", "chips"), [("31b", 8), ("e2b", 1)])
def test_the_smoke_test_starts_a_server_of_few_shapes_there(on, monkeypatch, size,  # noqa: F811
                                                            chips):
    on("v5e-8")
    monkeypatch.setenv("SIZE", size)
    options = first_hour.served("/base")
    assert (options.engine, options.chip, options.tensor_parallel) == ("tpu", "v5e", chips)
    assert options.environment == ("SKIP_JAX_PRECOMPILE=1",)
    prompt, answer, *_ = first_hour.LOAD[size]
    assert prompt + answer <= options.max_model_len
    plan = first_hour.stages(hardware.here(), size, Path("run"))
    assert plan["serve"].skip == ""
    for number, attempt in enumerate(v5e.TRIES):  # and what a push would start, if it's asked to
        monkeypatch.setenv("SERVE_TRY", str(number))
        monkeypatch.setenv("VLLM_TPU", "")
        asked = replace(v5e.PLANNED, **attempt.changes, model="/base", name="base",
                        tensor_parallel=chips)
        assert first_hour.served("/base") == asked


def test_a_try_that_hangs_costs_no_more_than_machines_md_says():
    text = " ".join((ROOT / "docs/MACHINES.md").read_text().split())
    for attempt in v5e.TRIES:
        assert replace(v5e.PLANNED, **attempt.changes).timeout == 3600
    assert "up to 60 minutes before the next one begins" in text


def test_what_machines_md_says_follows_from_what_is_planned():
    text = " ".join((ROOT / "docs/MACHINES.md").read_text().split())
    one = sum(plan.n for plan in plans.SHORT if not plan.only)
    base = sum(plan.n for plan in plans.SHORT)
    assert f"{156 * (one + base):,} answers" in text
    assert f"{len(v5e.TRIES)} tries" in text.replace("five", "5")
    chip = hardware.chip("v5e")
    fastest = 61.4e9 / 8 / chip.bandwidth * 1e3
    assert f"Faster than {fastest:.1f} ms is impossible" in text
    assert f"its {61.4e9 / 8 / 2**30:.2f} GiB of weights" in text
    assert f"predicted {37.5 / 5.08 * 62.5 / 60:.0f} from its own rate" in text
    points = load("06_bench.py", "V5E")
    count = len(points.regimes) * (points.repeats * (points.rates + 1) + 2)
    seconds = count * 1.4 * points.seconds + len(points.regimes) * points.long
    assert f"{count} points" in text.replace("twenty", "20")
    assert f"| {seconds / 60:.0f} |" in text
    for attempt in v5e.TRIES:
        options = replace(v5e.PLANNED, **attempt.changes)
        assert all(sum(regime) <= options.max_model_len for regime in points.regimes)


def test_the_nine_hours_add_up_and_the_steps_follow_from_the_compiled_one():
    text = (ROOT / "docs/MACHINES.md").read_text()
    table = text.partition("| what | minutes |")[2].partition("\n\n")[0]
    lines = re.sub("<!--.*?-->", "", table).splitlines()[2:]
    lows, highs, steps = [], [], ""
    for line in lines:
        what, minutes = (cell.strip("* ") for cell in line.split("|")[1:3])
        low, _, high = minutes.partition(" to ")
        if what.startswith("sum"):
            break
        if not what.startswith("the queue"):
            lows.append(int(low))
            highs.append(int(high or low))
        if what.endswith(" steps"):
            steps = minutes
    assert (int(low), int(high)) == (round(sum(lows), -1), round(sum(highs), -1))
    hours = f"{int(low) / 60:.1f} to {int(high) / 60:.1f} hours"
    assert hours in text and hours in (ROOT / "README.md").read_text()

    row = stored.compiled_fit("v5e-8", "31b", "int8", 2_048)
    count = int(10_000 * 922 / float(row["real_tokens_per_step"]))
    waiting = float(row["seconds_exposed"])
    slow = float(row["seconds_compute"]) + 2.3 * waiting
    least, _ = bands.band(count * float(row["seconds_predicted"]) / 60)
    _, most = bands.band(count * slow / 60)
    assert steps == f"{least:.0f} to {most:.0f}"
    middle = float(row["seconds_predicted"])
    assert f"guess for a step is {middle:.2f} s, and {waiting:.2f} s of that is waiting" in text


def test_a_server_waits_for_the_chips_that_the_last_one_still_holds(on, monkeypatch):  # noqa: F811
    """A vfio file opens once, and stays taken for up to half a minute after a process died."""
    root, taken = on("v5e-8"), []
    open_file = os.open

    def open_once(path, *words, **more):
        if str(path) == f"{root}/dev/vfio/3" and len(taken) < 2:
            taken.append(path)
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return open_file(path, *words, **more)

    monkeypatch.setattr(os, "open", open_once)
    assert hardware.busy() == "/dev/vfio/3"
    server._wait_for_chips()
    assert len(taken) == 2 and hardware.busy() == ""
    taken.clear()
    with pytest.raises(UserError, match="/dev/vfio/3 is still held by another process"):
        server._wait_for_chips(patience=0)


def test_xlas_cache_lies_where_the_shell_says(monkeypatch):
    monkeypatch.delenv("VLLM_XLA_CACHE_PATH", raising=False)
    options = replace(v5e.PLANNED, model="/m", name="m")
    assert "VLLM_XLA_CACHE_PATH" not in " ".join(commands.command(options))
    monkeypatch.setenv("VLLM_XLA_CACHE_PATH", "/tmp/run/xla_cache")
    assert "VLLM_XLA_CACHE_PATH=/tmp/run/xla_cache" in commands.command(options)
    own = replace(options, environment=("VLLM_XLA_CACHE_PATH=/mine",))
    assert "VLLM_XLA_CACHE_PATH=/mine" in commands.command(own)
    assert "VLLM_XLA_CACHE_PATH=/tmp/run/xla_cache" not in commands.command(own)


# ── A machine like Kaggle's ──

OLD_JAX = "raise RuntimeError('the old JAX of the image was imported, and would hold the chips')\n"
UV = """import sys
open({log!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["python", "find"]:
    print({python!r})
"""
PAGES = """#!/usr/bin/env bash
set -e
env > "$RUN_DIR/env"
mkdir -p "$RUN_DIR/train/checkpoints/20" "$RUN_DIR/adapter" "$RUN_DIR/eval"
echo '{"seconds": {"01_setup": 1.0}, "peak_gib": 1.0}' > "$RUN_DIR/times.json"
head -c 300000 /dev/zero > "$RUN_DIR/adapter/adapter_model.safetensors"
echo "== 03_train =="
"""


REAL = "the series itself"
EIGHT = ("--xla_force_host_platform_device_count=4 "  # 03 asks for four where nobody has, so it
         "--xla_force_host_platform_device_count=8")  # adds nothing; of two the last one counts


class Machine:
    """A folder tree like Kaggle's, and what runs in it."""

    def __init__(self, folder, chips=8, pages=PAGES, **env):
        self.folder, self.log = folder, folder / "uv.log"
        for name in ("working", "scratch", "input", "bin"):
            (folder / name).mkdir(parents=True)
        self.python = self._python_of_the_image()
        for name in ("apt-get", "iverilog")[:1 if pages is REAL else 2]:
            (folder / "bin" / name).write_text("#!/bin/sh\n")
            (folder / "bin" / name).chmod(0o755)
        root = tree(folder / "root", **(tpu("0x0063", chips) if chips else {}))
        kept_env = {name: value for name, value in os.environ.items() if not name.startswith(
            ("SIZE", "RUN_DIR", "TPU_", "XLA_", "JAX_", "PYTHON", "KAGGLE_"))}
        self.env = {**kept_env, "KAGGLE_KERNEL_RUN_TYPE": "Batch", "HARDWARE_ROOT": str(root),
                    "KAGGLE_WORKING": str(folder / "working"), "GCE_METADATA_HOST": "127.0.0.1:9",
                    "KAGGLE_SCRATCH": str(folder / "scratch"), "SIZE": "tiny",
                    "KAGGLE_INPUT": str(folder / "input"), "JAX_PLATFORMS": "cpu",
                    "TPU_LIBRARY_PATH": "/image/libtpu.so", "TPU_WORKER_HOSTNAMES": POISON,
                    "PYTHONPATH": "/image/lib",
                    "PATH": f"{folder}/bin:{os.environ['PATH']}", **env}
        self.repository, self.commit = self._clone_of(pages)
        self.working, self.run = folder / "working", folder / "scratch" / "run"

    def _python_of_the_image(self):
        """A Python with an old JAX that nobody may import, and a uv that writes down its words."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder / "image"],
                       check=True)
        site = next((self.folder / "image/lib").glob("python3*/site-packages"))
        for name, text in (("jax", OLD_JAX), ("uv", "")):
            (site / name).mkdir()
            (site / name / "__init__.py").write_text(text)
        (site / "uv/__main__.py").write_text(UV.format(log=str(self.log), python=sys.executable))
        return self.folder / "image/bin/python"

    def _clone_of(self, pages):
        """A repository with our rooms; setup.sh and the pages are small scripts."""
        folder = self.folder / "repository"
        if pages is REAL:
            return self._whole_clone(folder)
        for name in ("helpers", "tables"):
            shutil.copytree(ROOT / name, folder / name,
                            ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "data/measured", folder / "data/measured")
        (folder / "tools").mkdir()
        shutil.copy2(ROOT / "tools/kaggle_session.py", folder / "tools")
        scripts = {"setup.sh": 'echo "setup: PYTHON=$PYTHON"', "run_all.sh": pages,
                   "first_hour.sh": 'mkdir -p "$RUN_DIR/first_hour"\n'
                   'echo "$*" > "$RUN_DIR/first_hour/report.md"'}
        for name, text in scripts.items():
            (folder / name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        return commit(folder)

    def _whole_clone(self, folder):
        """A repository with everything. What differs: packages are linked instead of installed,
        and the pages see this machine, whose CPU plays eight chips, instead of the fake /sys."""
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                                check=True, capture_output=True, text=True).stdout.splitlines()
        for name in listed:
            source = ROOT / name
            if source.is_file() and not name.startswith(("notebooks/", "data/dryrun/programs")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder / name)
        links = "".join(f"ln -sfn {(ROOT / name).resolve()} {name}\n"
                        for name in (".venv", ".venv-serve") if (ROOT / name).exists())
        (folder / "setup.sh").write_text(f'#!/bin/bash\ncd "$(dirname "$0")"\n{links}')
        (folder / "run_all.sh").rename(folder / "run_all_real.sh")
        (folder / "run_all.sh").write_text(
            "#!/bin/bash\nunset HARDWARE_ROOT\nexec ./run_all_real.sh \"$@\"\n")
        (folder / "run_all.sh").chmod(0o755)
        return commit(folder)

    def launcher(self, *words, **settings):
        """The file that would be pushed."""
        path = self.folder / "launch.py"
        path.write_text(kaggle_files.launcher(str(self.repository), self.commit, list(words),
                                              settings))
        return path

    def launch(self, *words, timeout=120, **settings):
        """Run it to its end."""
        return subprocess.run([self.python, self.launcher(*words, **settings)], env=self.env,
                              cwd=self.folder, capture_output=True, text=True, timeout=timeout)

    def report(self):
        """The report that it left."""
        return json.loads((self.working / "report.json").read_text())


def commit(folder):
    """(folder, hash) of a new repository with all that is in the folder."""
    for words in (["init", "-q", "-b", "main"], ["add", "-A"],
                  ["-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-q", "-m",
                   "state"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, text=True,
                           capture_output=True)
    return folder, found.stdout.strip()


# ── The launcher, with small scripts in place of the pages ──

def test_a_session_installs_runs_and_leaves_what_counts(tmp_path):
    machine = Machine(tmp_path, JAX_PLATFORMS="tpu")
    (tmp_path / "root/proc/meminfo").write_text("MemTotal: 346030080 kB\n")
    done = machine.launch(MAX_STEPS="4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TPU v5e-8 (8 chips)" in done.stdout and "old JAX" not in done.stdout
    assert "330 GiB memory" in done.stdout
    env = dict(line.split("=", 1) for line in (machine.run / "env").read_text().splitlines()
               if "=" in line)
    assert "TPU_LIBRARY_PATH" not in env and "TPU_WORKER_HOSTNAMES" not in env
    assert env["TPU_CHIPS_PER_HOST_BOUNDS"] == "2,4,1" and env["MAX_STEPS"] == "4"
    assert env["JAX_PLATFORMS"] == "tpu,cpu", "the base is quantized on the CPU"
    assert "PYTHONPATH" not in env and env["PYTHON"] == sys.executable
    assert "python install 3.11" in machine.log.read_text()
    assert Path(env["RUN_DIR"]) == machine.run and Path(env["TMPDIR"]).parent == machine.run.parent
    report = machine.report()
    assert report["outcome"] == "done" and report["pages_seconds"] == {"01_setup": 1.0}
    assert report["about"]["slice"] == "v5e-8" and report["about"]["commit"] == machine.commit
    assert (machine.working / "adapter/adapter_model.safetensors").stat().st_size == 300_000
    assert (machine.working / "train/checkpoints/20").is_dir()
    assert "== 03_train ==" in (machine.working / "session.log").read_text()
    assert not list(machine.working.rglob("*.partial")) + list(machine.working.glob(".reserve"))


@pytest.mark.parametrize(("chips", "line"), [
    (4, "this session shows 4 of the 8 chips of a TPU v5e-8"),
    (0, "Kaggle gave this session no TPU (no TPU, no GPU). Verify your phone number")])
def test_another_machine_is_refused_in_one_line_before_anything_is_installed(tmp_path, chips, line):
    machine = Machine(tmp_path, chips)
    done = machine.launch()
    assert done.returncode == 1 and not machine.log.exists() and not (machine.run / "env").exists()
    told = [text for text in done.stdout.splitlines() if line in text]
    assert len(told) == 1 and "Traceback" not in done.stdout + done.stderr
    assert machine.report()["outcome"].startswith(f"failed: {line}")


def test_a_host_that_is_too_small_for_the_base_is_refused_before_it_is_fetched(tmp_path):
    machine = Machine(tmp_path, SIZE="31b")
    (tmp_path / "root/proc/meminfo").write_text("MemTotal: 50331648 kB\n")
    done = machine.launch()
    assert done.returncode == 1 and not machine.log.exists() and not (machine.run / "env").exists()
    assert "this session's host has 48 GiB of memory" in machine.report()["outcome"]


def test_the_clock_ends_a_page_in_order(tmp_path):
    """The page hears SIGTERM and finishes its checkpoint; that one is kept."""
    pages = (PAGES + "trap 'mkdir $RUN_DIR/train/checkpoints/40; exit 143' TERM\n"
             "sleep 60 & wait\n")
    machine = Machine(tmp_path, pages=pages, KAGGLE_HOURS="0.002")
    done = machine.launch()
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.report()["outcome"] == "stopped by the clock in 03_train"
    assert [path.name for path in (machine.working / "train/checkpoints").iterdir()] == ["40"]


def test_sigterm_leaves_the_same(tmp_path):
    machine = Machine(tmp_path, pages=PAGES + "touch $RUN_DIR/up; exec sleep 60\n")
    process = subprocess.Popen([machine.python, machine.launcher()], env=machine.env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while not (machine.run / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert machine.report()["outcome"] == "stopped by SIGTERM in 03_train", said
    assert (machine.working / "train/checkpoints/20").is_dir()
    assert (machine.working / "adapter/adapter_model.safetensors").exists()


def test_a_full_disk_keeps_the_report_and_the_adapter_and_names_the_rest(tmp_path):
    """KAGGLE_WORKING is a disk of 4 MB: half of it is held for the report and the log."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk (unshare -rm)")
    pages = (PAGES + 'head -c 9000000 /dev/zero > "$RUN_DIR/train/checkpoints/20/state"\n'
             'mkdir "$RUN_DIR/jax_cache"; head -c 8000000 /dev/zero > "$RUN_DIR/jax_cache/one"\n')
    machine = Machine(tmp_path, pages=pages)
    (tmp_path / "after").mkdir()
    script = (f"mount -t tmpfs -o size=4m none {machine.working} && "
              f"{machine.python} {machine.launcher()}; echo status $?; "
              f"cp -r {machine.working}/. {tmp_path}/after")
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], env=machine.env, text=True,
                          capture_output=True, timeout=120)
    assert "status 0" in done.stdout, done.stdout + done.stderr
    for name in ("checkpoint 20: 9.0 MB", "jax_cache: 8.0 MB"):
        assert f"left out {name} don't fit into" in done.stdout
    after = tmp_path / "after"
    assert json.loads((after / "report.json").read_text())["outcome"] == "done"
    assert (after / "adapter/adapter_model.safetensors").stat().st_size == 300_000
    assert "left out checkpoint" in (after / "session.log").read_text()
    assert not list(after.rglob("*.partial"))


def test_a_session_goes_on_from_an_earlier_output(tmp_path):
    """Kaggle mounts it at notebooks/USER/NAME; another report beside it isn't ours."""
    first = Machine(tmp_path / "first")
    assert first.launch().returncode == 0
    again = 'ls "$RUN_DIR/train/checkpoints" > "$RUN_DIR/found"\n'
    second = Machine(tmp_path / "second", pages="#!/bin/bash\n" + again)
    mounted = second.folder / "input/notebooks/me/gemma4-on-tpu"
    shutil.copytree(first.working, mounted)
    (second.folder / "input/other").mkdir()
    (second.folder / "input/other/report.json").write_text("[]")
    done = second.launch()
    assert done.returncode == 0 and f"going on from {mounted}: adapter, " in done.stdout
    assert (second.run / "found").read_text() == "20\n"
    assert (second.working / "adapter/adapter_model.safetensors").exists()


def test_where_the_server_does_not_start_the_next_try_is_made_from_05_on(tmp_path):
    """The base comes from Kaggle's mount, in the place where helpers.remote looks for it."""
    pages = PAGES + """echo "$* try ${SERVE_TRY:-0}" >> "$RUN_DIR/eval/tries"
echo "== 05_serve_vllm =="
[ "${SERVE_TRY:-0}" = 2 ]
"""
    machine = Machine(tmp_path, pages=pages, SIZE="31b", BASE_FROM="mount")
    base = machine.folder / "input/models/google/gemma-4/transformers/gemma-4-31b-it/1"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    done = machine.launch()
    assert machine.report()["outcome"] == "done", done.stdout
    assert (machine.working / "eval/tries").read_text().splitlines() == [
        "01 07 try 0", "05 07 try 1", "05 07 try 2"]
    found = program(sys.executable, "-c", "import sys; from helpers import remote; "
                    "print(remote.stage('google/gemma-4-31B-it'))", cwd=ROOT,
                    TMPDIR=str(machine.folder / "scratch/tmp"), HF_ENDPOINT="http://127.0.0.1:9")
    assert found.stdout.strip() == f"{machine.folder}/scratch/tmp/base/google/gemma-4-31B-it"


def test_a_page_that_fails_ends_the_session_in_order(tmp_path):
    machine = Machine(tmp_path, pages=PAGES + "echo 'Error: no room'; exit 1\n")
    done = machine.launch()
    assert done.returncode == 0, "Kaggle keeps the output of a session that ends well"
    assert machine.report()["outcome"] == "failed: 03_train failed: no room"
    assert (machine.working / "adapter").is_dir()


def test_without_icarus_all_but_01_and_07_runs(tmp_path):
    """01 refuses a machine without it; hours of training needn't wait for a simulator."""
    machine = Machine(tmp_path, pages=PAGES + 'echo "$*" > "$RUN_DIR/eval/pages"\n')
    (machine.folder / "bin/iverilog").unlink()
    for name in ("git", "bash", "sh", "env", "mkdir", "head", "python3"):
        (machine.folder / "bin" / name).symlink_to(shutil.which(name))
    machine.env["PATH"] = str(machine.folder / "bin")
    done = machine.launch()
    assert "Icarus Verilog can't be installed" not in done.stdout, "apt-get says that it did"
    assert (machine.working / "eval/pages").read_text() == "02 07\n", done.stdout


def test_smoke_is_the_first_hour(tmp_path):
    machine = Machine(tmp_path)
    assert machine.launch("--smoke").returncode == 0
    words = (machine.working / "first_hour/report.md").read_text().split()
    assert words[0] == "--minutes" and 75 < int(words[1]) < 60 * 1.4
    assert not (machine.run / "env").exists()


def test_a_commit_that_is_nowhere_is_one_line_and_a_report(tmp_path):
    machine = Machine(tmp_path)
    machine.commit = "0" * 40
    done = machine.launch()
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "gives no commit 000000000000" in done.stderr and "Push that commit" in done.stderr
    assert machine.report()["outcome"].startswith("failed: ")


def test_no_page_begins_after_the_time_that_was_set(monkeypatch):
    monkeypatch.delenv("RUN_UNTIL", raising=False)
    series.in_time("05_serve_vllm")
    monkeypatch.setenv("RUN_UNTIL", str(time.time() + 60))
    series.in_time("05_serve_vllm")
    monkeypatch.setenv("RUN_UNTIL", str(time.time() - 1))
    with pytest.raises(UserError, match="05_serve_vllm doesn't begin. What was finished is kept"):
        series.in_time("05_serve_vllm")
    monkeypatch.setenv("RUN_UNTIL", "tonight")
    with pytest.raises(UserError, match="RUN_UNTIL=tonight is no number"):
        series.in_time("05_serve_vllm")


def test_a_clock_that_is_no_number_is_one_line(tmp_path):
    done = Machine(tmp_path, KAGGLE_HOURS="soon").launch()
    assert done.returncode == 1 and "KAGGLE_HOURS=soon is no number. Name hours" in done.stdout
    assert "Traceback" not in done.stdout


def test_what_has_no_room_does_not_push_out_what_was_kept(tmp_path, monkeypatch):
    run_folder, working = tmp_path / "run", tmp_path / "working"
    (run_folder / "train/checkpoints/20").mkdir(parents=True)
    (run_folder / "train/checkpoints/20/state").write_bytes(bytes(1000))
    working.mkdir()
    keeper = kept.Keeper(run_folder, working, tmp_path / "log")
    monkeypatch.setattr(kept, "LIMIT", 2500)
    assert keeper.keep() == []
    (run_folder / "train/checkpoints/40").mkdir()
    (run_folder / "train/checkpoints/40/state").write_bytes(bytes(2000))
    assert "left out checkpoint 40" in keeper.keep()[0]
    assert (working / "train/checkpoints/20/state").stat().st_size == 1000
    monkeypatch.setattr(kept, "LIMIT", 25_000)
    assert keeper.keep() == [] and not (working / "train/checkpoints/20").exists()
    assert (working / "train/checkpoints/40/state").stat().st_size == 2000
    assert re.fullmatch(r"train/checkpoints", keeper.bring_back(working))


def test_a_folder_that_a_page_removes_meanwhile_ends_no_session(tmp_path, monkeypatch):
    """Between two looks at the run: its parent was listed, and then it's gone."""
    run_folder, working = tmp_path / "run", tmp_path / "working"
    for name in ("eval/gone", "eval/stays"):
        (run_folder / name).mkdir(parents=True)
        (run_folder / name / "one").write_text("1")
    working.mkdir()
    scandir = os.scandir

    def too_late(path="."):
        if str(path).endswith("eval/gone"):
            shutil.rmtree(path, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", too_late)
    keeper = kept.Keeper(run_folder, working, tmp_path / "log")
    assert keeper.keep() == []
    assert (working / "eval/stays/one").exists() and not (working / "eval/gone").exists()


# ── scripts/kaggle.sh, with a stand-in that records ──

class Sender:
    """A checkout whose commit is at its origin, and a `kaggle` that writes down its words."""

    def __init__(self, folder):
        self.folder, self.log = folder / "checkout", folder / "kaggle.log"
        for name in ("scripts", "helpers", "tables"):
            shutil.copytree(ROOT / name, self.folder / name,
                            ignore=shutil.ignore_patterns("__pycache__"))
        (self.folder / "tools").mkdir()
        for name in ("kaggle_files.py", "kaggle_session.py"):
            shutil.copy2(ROOT / "tools" / name, self.folder / "tools")
        (self.folder / ".gitignore").write_text("runs/\n__pycache__/\nkaggle-output/\n")
        self.commit = commit(self.folder)[1]
        self.origin = folder / "origin.git"
        subprocess.run(["git", "clone", "-q", "--bare", self.folder, self.origin], check=True)
        self.git("remote", "add", "origin", str(self.origin))
        self.answers("Kernel version 1 successfully pushed.")

    def git(self, *words):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *words],
                       cwd=self.folder, check=True, capture_output=True)

    def answers(self, text):
        """What the stand-in says to a push; to `output` it brings a report."""
        stub = self.folder.parent / "bin" / "kaggle"
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"""#!/usr/bin/env bash
echo "$*" >> {self.log}
case "$1 $2" in
"kernels push") echo "{text}" ;;
"config view") echo "- username: me" ;;
"kernels output") mkdir -p "$5"; echo '{{"outcome": "done", "send": "there"}}' > "$5/report.json" ;;
esac
""")
        stub.chmod(0o755)

    def call(self, *words, **env):
        """Run the script; (its end, the calls of kaggle that do something)."""
        self.log.write_text("")
        done = program("bash", self.folder / "scripts/kaggle.sh", *words, **{
            "PATH": f"{self.folder.parent}/bin:{os.environ['PATH']}", "KAGGLE_USERNAME": None,
            "REPOSITORY": None, "DRY_RUN": None, **env})
        calls = [line for line in self.log.read_text().splitlines()
                 if not line.startswith(("--version", "config"))]
        return done, calls

    def sent(self, name="gemma4-on-tpu"):
        """(metadata, launcher) of the last push of this name."""
        folder = self.folder / "runs/kaggle" / name
        return json.loads((folder / "kernel-metadata.json").read_text()), folder / "launch.py"


@pytest.fixture
def sender(tmp_path):
    return Sender(tmp_path)


def test_push_sends_one_commit_and_asks_for_the_tpu(sender):
    done, calls = sender.call("push", "MAX_STEPS=40")
    assert done.returncode == 0, done.stderr
    assert calls == ["kernels push -p runs/kaggle/gemma4-on-tpu --accelerator TpuV5E8 -t 32400"]
    facts, launch = sender.sent()
    assert facts["id"] == "me/gemma4-on-tpu" and facts["machine_shape"] == "TpuV5E8"
    assert facts["enable_tpu"] is True and facts["enable_internet"] is True
    assert facts["model_sources"] == ["google/gemma-4/transformers/gemma-4-31b-it/1"]
    assert facts["kernel_sources"] == [] and facts["is_private"] is True
    names = {}
    exec(compile(launch.read_text().split("WORKING =")[0], launch, "exec"), names)
    assert (names["COMMIT"], names["REPOSITORY"]) == (sender.commit, str(sender.origin))
    assert names["SETTINGS"] == {"MAX_STEPS": "40"} and names["WORDS"] == []
    assert len(launch.read_text().splitlines()) < 90, "no code of the series travels in it"


def test_each_resume_is_a_new_notebook_with_the_last_output_attached(sender):
    sender.call("push")
    for number in (2, 3):
        done, calls = sender.call("push", "--resume", "SERVE_TRY=2")
        assert done.returncode == 0 and f"gemma4-on-tpu-{number} " in calls[0], done.stderr
    assert sender.sent("gemma4-on-tpu-2")[0]["kernel_sources"] == ["me/gemma4-on-tpu"]
    assert sender.sent("gemma4-on-tpu-3")[0]["kernel_sources"] == ["me/gemma4-on-tpu-2"]
    assert sender.call("status")[1][0] == "kernels status me/gemma4-on-tpu-3"
    done, calls = sender.call("output", "there")
    assert calls == ["kernels output me/gemma4-on-tpu-3 -p there --force"]
    assert "kaggle: done" in done.stdout


def test_smoke_is_short_and_small_and_nothing_goes_on_from_it(sender):
    done, calls = sender.call("smoke")
    folder = "runs/kaggle/gemma4-on-tpu-smoke"
    assert calls == [f"kernels push -p {folder} --accelerator TpuV5E8 -t 5400"]
    facts, launch = sender.sent("gemma4-on-tpu-smoke")
    assert facts["model_sources"] == ["google/gemma-4/transformers/gemma-4-e2b-it/1"]
    assert "WORDS = ['--smoke']" in launch.read_text()
    done, calls = sender.call("smoke", "SIZE=31b", "SERVE_TRY=0")
    assert done.returncode == 0, done.stderr
    assert calls == [f"kernels push -p {folder} --accelerator TpuV5E8 -t 9000"]
    done, calls = sender.call("push", "--resume")
    assert done.returncode == 1 and calls == []
    assert "smoke test, with nothing to go on" in done.stderr


@pytest.mark.parametrize(("answer", "words", "env", "says"), [
    ("Kernel push error: Maximum batch TPU session count of 1 reached.", ["push"], {},
     "session count of 1 reached"),
    ("The following are not valid model sources", ["push"], {}, "not valid model sources"),
    ("", ["push", "HF_TOKEN=hf_abcdef"], {}, "HF_TOKEN would be stored at Kaggle with the code"),
    ("", ["push", "30"], {}, "30 is no setting. Write NAME=VALUE"),
    ("", ["push", "SIZE=31B"], {}, "SIZE=31B is none of tiny, e2b, 31b"),
    ("", ["push", "SERVE_TRY=two"], {}, "SERVE_TRY=two isn't a number from 0 to 4"),
    ("", ["smoke", "SERVE_TRY=5"], {}, "SERVE_TRY=5 isn't a number from 0 to 4"),
    ("", ["push", "MAX_STEPS=1e3"], {}, "MAX_STEPS=1e3 isn't a number of steps"),
    ("", ["push", "BASE_FROM=kaggle"], {}, "BASE_FROM=kaggle is neither hub nor mount"),
    ("", ["push", "KAGGLE_HOURS=soon"], {}, "KAGGLE_HOURS=soon isn't"),
    ("", ["push", "KAGGLE_HOURS=nan"], {}, "KAGGLE_HOURS=nan isn't"),
    ("", ["push", "KAGGLE_HOURS=12"], {}, "above 0 and at most 8.5"),
    ("", ["smoke", "KAGGLE_HOURS=2"], {}, "above 0 and at most 1.4"),
    ("", ["status"], {}, "nothing was pushed from here"),
    ("", ["push", "--resume"], {}, "nothing was pushed from here"),
    ("", ["push"], {"PATH": "/usr/bin:/bin"}, "the kaggle command is missing. Run: pip install"),
])
def test_what_goes_wrong_is_said_in_one_line(sender, answer, words, env, says):
    """kaggle itself says "push error" and ends with status 0."""
    sender.answers(answer)
    done, _ = sender.call(*words, **env)
    assert done.returncode != 0 and says in done.stderr
    assert done.stderr.count("\n") <= 2 and "hf_abcdef" not in done.stderr + done.stdout
    assert not (sender.folder / "runs/kaggle/last").exists()


def test_a_commit_that_was_not_pushed_is_refused(sender):
    (sender.folder / "new").write_text("x")
    sender.git("add", "-A")
    sender.git("commit", "-q", "-m", "later")
    done, calls = sender.call("push")
    assert done.returncode == 1 and calls == [] and "Run: git push" in done.stderr
    sender.git("push", "-q", "origin", "HEAD:main")
    assert sender.call("push")[0].returncode == 0


def test_every_setting_that_is_right_travels(sender):
    right = ["SIZE=31b", "MAX_STEPS=200", "KAGGLE_HOURS=2.4", "BASE_FROM=mount", "SERVE_TRY=4"]
    for word in ("push", "smoke"):
        done, calls = sender.call(word, *right)
        assert done.returncode == 0 and len(calls) == 1, done.stderr
        assert "note:" not in done.stderr
    assert kaggle_session.TRIES == len(v5e.TRIES)
    done, calls = sender.call("push", "MAXSTEPS=200")
    assert "note: MAXSTEPS is none of our settings" in done.stderr and len(calls) == 1


@pytest.mark.parametrize(("origin", "cloned"), [
    ("https://me:ghp_secret@github.com/me/x.git", "https://github.com/me/x.git"),
    ("https://ghp_secret@github.com/me/x", "https://github.com/me/x"),
    ("git@github.com:me/x.git", "https://github.com/me/x.git"),
    ("ssh://git@github.com/me/x.git", "https://github.com/me/x.git"),
    ("https://github.com/me/x.git", "https://github.com/me/x.git")])
def test_the_address_that_travels_has_no_login(sender, origin, cloned):
    """A stand-in for git answers for the server; everything else is git's own."""
    sender.git("remote", "set-url", "origin", origin)
    git = sender.folder.parent / "bin/git"
    git.write_text('#!/usr/bin/env bash\ncase "$*" in\n'
                   f"*ls-remote*) echo \"$*\" >> {sender.log}; echo {sender.commit}$'\\tHEAD' ;;\n"
                   f'*) exec {shutil.which("git")} "$@" ;;\nesac\n')
    git.chmod(0o755)
    done, _ = sender.call("push")
    assert done.returncode == 0, done.stderr
    launch = sender.sent()[1].read_text()
    assert f"REPOSITORY = {cloned!r}\n" in launch
    assert "secret" not in launch + sender.log.read_text() + done.stdout + done.stderr


class Private(http.server.SimpleHTTPRequestHandler):
    """A git server that wants a login, as GitHub does for a private repository."""

    def do_GET(self):
        if self.headers.get("Authorization"):
            return super().do_GET()
        self.send_response(401)
        self.send_header("WWW-Authenticate", "Basic")
        self.end_headers()
        return None

    def log_message(self, *words):
        pass


def test_a_repository_that_only_its_owner_can_read_is_refused_before_the_queue(sender):
    """The owner's git logs in by itself. Kaggle's can't, and would say so hours later."""
    subprocess.run(["git", "update-server-info"], cwd=sender.origin, check=True)
    handler = functools.partial(Private, directory=str(sender.origin.parent))
    server_there = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server_there.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server_there.server_port}/origin.git"
    sender.git("remote", "set-url", "origin", address)
    sender.git("config", "credential.helper", "!echo username=me; echo password=x;:")
    try:
        read = subprocess.run(["git", "ls-remote", address], cwd=sender.folder, check=True,
                              capture_output=True, text=True)
        assert sender.commit in read.stdout, "its owner can"
        done, calls = sender.call("push")
    finally:
        server_there.shutdown()
        server_there.server_close()
    assert done.returncode == 1 and calls == []
    assert "can't be read without a login" in done.stderr and done.stderr.count("\n") == 1


def test_a_commit_of_another_repository_is_not_at_the_one_that_is_named(sender):
    """It's on a branch of origin; REPOSITORY names a fork, which is older."""
    fork = sender.folder.parent / "fork.git"
    subprocess.run(["git", "clone", "-q", "--bare", sender.origin, fork], check=True)
    (sender.folder / "new").write_text("x")
    sender.git("add", "-A")
    sender.git("commit", "-q", "-m", "later")
    sender.git("push", "-q", "origin", "HEAD:main")
    done, calls = sender.call("push", REPOSITORY=str(fork))
    assert done.returncode == 1 and calls == [] and f"isn't at {fork}" in done.stderr
    (sender.folder / "newer").write_text("x")  # an older commit of a branch is there, too
    sender.git("add", "-A")
    sender.git("commit", "-q", "-m", "newest")
    sender.git("push", "-q", "origin", "HEAD:main")
    sender.git("checkout", "-q", "HEAD~1")
    assert sender.call("push")[0].returncode == 0


def test_a_source_that_is_not_valid_does_not_hide_that_the_notebook_runs(sender):
    """In kaggle's own words (2.2.5): it says that the source is missing, and pushes without it."""
    sender.call("push")
    sender.answers("The following are not valid kernel sources and could not be added to the "
                   "kernel: ['me/gemma4-on-tpu']\nKernel version 1 successfully pushed.  Please "
                   "check progress at https://www.kaggle.com/code/me/gemma4-on-tpu-2")
    done, _ = sender.call("push", "--resume")
    assert done.returncode == 1 and "not valid kernel sources" in done.stderr
    assert "It was pushed all the same" in done.stderr
    assert sender.call("status")[1][0] == "kernels status me/gemma4-on-tpu-2"


def test_a_smoke_test_in_between_does_not_hide_the_run_to_go_on_from(sender):
    sender.call("push")
    sender.call("smoke", "SIZE=31b", "SERVE_TRY=3")
    assert sender.call("status")[1][0] == "kernels status me/gemma4-on-tpu-smoke"
    done, calls = sender.call("push", "--resume", "SERVE_TRY=3")
    assert done.returncode == 0 and "gemma4-on-tpu-2 " in calls[0], done.stderr
    assert sender.sent("gemma4-on-tpu-2")[0]["kernel_sources"] == ["me/gemma4-on-tpu"]


@pytest.mark.parametrize("before", ["me/my-run", "other/gemma4-on-tpu", "me/run-08"])
def test_a_resume_from_the_name_that_one_writes_into_last(sender, before):
    """The line that asks for USER/NAME takes any notebook."""
    (sender.folder / "runs/kaggle").mkdir(parents=True)
    (sender.folder / "runs/kaggle/last").write_text(before + "\n")
    done, calls = sender.call("push", "--resume")
    assert done.returncode == 0 and "gemma4-on-tpu-2 " in calls[0], done.stderr
    assert sender.sent("gemma4-on-tpu-2")[0]["kernel_sources"] == [before]


def test_an_earlier_report_is_not_taken_for_one_that_has_not_come(sender):
    """kaggle brings nothing as long as a session runs, and ends with status 0."""
    sender.call("smoke")
    assert "kaggle: done" in sender.call("output")[0].stdout
    sender.call("push")
    stub = sender.folder.parent / "bin/kaggle"
    stub.write_text(stub.read_text().replace('"kernels output")', '"kernels never")'))
    done, _ = sender.call("output")
    assert done.returncode == 1 and "kaggle: done" not in done.stdout
    assert "there's no kaggle-output/report.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_sends_nothing(sender):
    done, calls = sender.call("push", DRY_RUN="1")
    assert calls == [] and "kaggle kernels push -p runs/kaggle/gemma4-on-tpu" in done.stdout


PARSER = """
import json, os, sys
os.environ |= {"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "none"}
from kaggle import api, cli
from kaggle.api.kaggle_api_extended import KaggleApi
class Client:
    def __enter__(self):
        self.kernels = self.kernels_api_client = self
        return self
    def __exit__(self, *_):
        pass
    def save_kernel(self, request):
        print(json.dumps({name: getattr(request, name) for name in (
            "slug", "machine_shape", "enable_tpu", "enable_internet", "kernel_data_sources",
            "model_data_sources", "session_timeout_seconds", "kernel_type", "is_private")}))
        raise SystemExit
KaggleApi.build_kaggle_client = lambda self: Client()
if sys.argv[2] != "push":  # what the command would call, instead of asking Kaggle
    for name in ("kernels_status_cli", "kernels_output_cli", "quota_cli"):
        setattr(KaggleApi, name, lambda self, *words, **more: print(json.dumps(more)))
        setattr(api, name, lambda *words, **more: print(json.dumps(more)))
cli.main()
"""


def test_kaggle_itself_understands_the_commands_and_reads_the_metadata(sender):
    """KAGGLE_PYTHON names a Python with `pip install kaggle six`."""
    python = os.environ.get("KAGGLE_PYTHON")
    if not python:
        pytest.skip("set KAGGLE_PYTHON to a Python that has the kaggle package")
    asked = {}
    for name, words in (("push", ["push"]), ("resume", ["push", "--resume"]),
                        ("status", ["status"]), ("output", ["output"])):
        asked[name] = sender.call(*words)[1][0].split()
    read = {}
    for name, words in asked.items():
        done = program(python, "-c", PARSER, *words, cwd=sender.folder)
        assert done.returncode == 0, done.stderr[-2000:]
        read[name] = json.loads(done.stdout.splitlines()[-1])
    assert read["push"] == {
        "slug": "me/gemma4-on-tpu", "machine_shape": "TpuV5E8", "enable_tpu": True,
        "enable_internet": True, "kernel_data_sources": [], "kernel_type": "script",
        "model_data_sources": ["google/gemma-4/transformers/gemma-4-31b-it/1"],
        "session_timeout_seconds": 32400, "is_private": True}
    assert read["resume"]["kernel_data_sources"] == ["me/gemma4-on-tpu"]
    assert read["status"]["kernel"] == read["output"]["kernel"] == "me/gemma4-on-tpu-2"
    assert read["output"]["path"] == "kaggle-output" and read["output"]["force"] is True
    wrong = program(python, "-c", PARSER, *asked["push"], "--please", cwd=sender.folder)
    assert wrong.returncode == 2 and "unrecognized arguments" in wrong.stderr


# ── With the series' own pages, at the tiny size ──

@pytest.mark.slow
@needs_serve
def test_the_clock_runs_out_in_03_and_the_next_session_goes_through(tmp_path):
    """Two sessions: the first ends while 03 compiles or trains, the second gets its output."""
    first = Machine(tmp_path / "first", pages=REAL, XLA_FLAGS=EIGHT, KAGGLE_HOURS="0.03")
    done = first.launch(timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert first.report()["outcome"] == "stopped by the clock in 03_train", done.stdout[-3000:]
    assert (first.working / "data/meta.json").exists()
    assert not (first.working / "merge.json").exists()

    second = Machine(tmp_path / "second", pages=REAL, XLA_FLAGS=EIGHT)
    shutil.copytree(first.working, second.folder / "input/notebooks/me/gemma4-on-tpu")
    done = second.launch(timeout=5400)
    report = second.report()
    assert report["outcome"] == "done", done.stdout[-5000:]
    assert "going on from" in done.stdout and "old JAX" not in done.stdout
    assert "JAX backend cpu: 8 x cpu (simulated)" in (second.working / "session.log").read_text()
    assert [name[:2] for name in report["pages_seconds"]] == [f"0{n}" for n in range(1, 8)]
    assert report["about"]["devices"] == 8 and report["about"]["size"] == "tiny"
    wanted = {"step_seconds", "real_tokens_per_second", "server_ready_seconds", "ttft_p50_ms",
              "tpot_p50_ms", "pass_at_1_base", "pass_at_1_tuned", "val_loss_after"}
    assert wanted <= set(report["measured"])
    for name in ("adapter/adapter_model.safetensors", "merge.json", "eval/comparison.json",
                 "bench/results.csv", "notebooks/07_eval.ipynb", "serve/server.log"):
        assert (second.working / name).exists(), name
    assert not (second.working / "merged").exists(), "62 GB of the 31B, made again from the adapter"
    assert any((second.working / "train/checkpoints").iterdir())
    assert any((second.working / "jax_cache").iterdir())
