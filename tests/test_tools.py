"""What the tests themselves lean on, and the writing of artifacts."""

import ast
import gc
import inspect
import os
import subprocess
import sys
import time

import helpers
import pytest
from conftest import ROOT, collector_paused, load
from helpers import run

sys.path.insert(0, str(ROOT / "tools"))
from notebooks import PeakMemory


def test_a_collection_that_parses_does_not_break_the_loading_of_a_notebook():
    """CPython 3.11, gh-106905: seen once, when a finaliser printed a traceback during `load`."""
    def parse_something(phase, info):
        gc.callbacks.remove(parse_something)
        ast.parse("a = 1")
        gc.callbacks.append(parse_something)

    threshold = gc.get_threshold()
    gc.callbacks.append(parse_something)
    gc.set_threshold(5)
    try:
        with collector_paused():
            tree = ast.parse((ROOT / "04_merge.py").read_text())
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(parse_something)
    assert len(tree.body) > 20 and "collector_paused()" in inspect.getsource(load)


def test_the_collector_is_switched_on_again():
    with pytest.raises(ValueError, match="inside"), collector_paused():
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_directory_is_synced_before_and_after_it_gets_its_name(tmp_path, monkeypatch):
    """Files, the directory that holds them, then its parent: in this order, around the rename."""
    events = []
    replace, sync = os.replace, run._sync
    monkeypatch.setattr(run, "_sync", lambda path: (events.append(path.name), sync(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), replace(a, b)))
    with helpers.atomic_dir(tmp_path / "made") as fresh:
        (fresh / "deep").mkdir()
        (fresh / "deep" / "file").write_text("x")
    assert events == ["deep", "file", ".made.partial", "rename", tmp_path.name]
    assert (tmp_path / "made" / "deep" / "file").read_text() == "x"


def test_peak_memory_is_that_of_this_run_only(tmp_path, monkeypatch):
    """Another process in the repository, compiling for an hour with 10 GiB, say, does not count."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    script = "import sys, time; held = bytearray(int(sys.argv[1]) << 20); print(flush=True); time.sleep(60)"
    children = [subprocess.Popen([sys.executable, "-c", script, mib], cwd=ROOT, start_new_session=True,
                                 stdout=subprocess.PIPE, env=os.environ | {"RUN_DIR": str(folder)})
                for mib, folder in (("300", tmp_path), ("900", tmp_path / "other"))]
    memory = PeakMemory()
    try:
        for child in children:
            child.stdout.readline()
        memory.start()
        deadline = time.monotonic() + 20
        while memory.gib < 300 / 1024 and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        memory.done.set()
        for child in children:
            child.kill()
            child.wait()
    memory.join()
    assert 300 / 1024 < memory.gib < 600 / 1024
