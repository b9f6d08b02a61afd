"""The free machine: what Kaggle's environment gets wrong, the launcher's way there and back.

Kaggle itself isn't here. A folder tree like its own stands in for it: an image's Python with an old
JAX that nobody may import, a /sys with eight chips, small disks, a `kaggle` that only records.
"""

import pytest
from test_hardware import alone, on, tree  # noqa: F401

import helpers
from tables import hardware, kaggle

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
