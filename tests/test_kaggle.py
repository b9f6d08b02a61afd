"""The free machine: what Kaggle's environment gets wrong, the launcher's way there and back.

Kaggle itself isn't here. A folder tree like its own stands in for it: an image's Python with an old
JAX that nobody may import, a /sys with eight chips, small disks, a `kaggle` that only records.
"""

import json
import shutil
from dataclasses import replace

import pytest
from conftest import ROOT, SERVE, needs_serve, program
from test_hardware import alone, on, tree  # noqa: F401
from test_serve import PARSE, vllm_part

import helpers
from serving import commands, limits, v5e
from tables import hardware, kaggle
from tables.errors import UserError

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


def test_xlas_cache_lies_where_the_shell_says(monkeypatch):
    monkeypatch.delenv("VLLM_XLA_CACHE_PATH", raising=False)
    options = replace(v5e.PLANNED, model="/m", name="m")
    assert "VLLM_XLA_CACHE_PATH" not in " ".join(commands.command(options))
    monkeypatch.setenv("VLLM_XLA_CACHE_PATH", "/tmp/run/xla_cache")
    assert "VLLM_XLA_CACHE_PATH=/tmp/run/xla_cache" in commands.command(options)
    own = replace(options, environment=("VLLM_XLA_CACHE_PATH=/mine",))
    assert "VLLM_XLA_CACHE_PATH=/mine" in commands.command(own)
    assert "VLLM_XLA_CACHE_PATH=/tmp/run/xla_cache" not in commands.command(own)
