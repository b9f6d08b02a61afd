"""The writing of artifacts, a run's peak memory, and README's figure.

    .venv/bin/python -m pytest tests/test_tools.py
"""

import ast
import inspect
import os
import subprocess
import sys
import time

import helpers
import nbformat
import pytest
from conftest import ROOT
from helpers import packing, run

sys.path.insert(0, str(ROOT / "tools"))
import readme_figure
import notebooks
from notebooks import PeakMemory


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


def test_the_tools_load_no_grammar_of_addresses():
    """jsonschema would build one wherever Jupyter Lab is installed, a second at every start."""
    code = "import sys; sys.path.insert(0, 'tools'); import notebooks; print('lark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout.strip() == "False", done.stderr


def test_peak_memory_is_that_of_this_run_only(tmp_path, monkeypatch):
    """Another process in the repository, compiling for an hour with 10 GiB, say, does not count."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    script = ("import sys, time; held = bytearray(int(sys.argv[1]) << 20); print(flush=True); "
              "time.sleep(60)")
    children = [subprocess.Popen([sys.executable, "-c", script, mib], cwd=ROOT,
                                 start_new_session=True, stdout=subprocess.PIPE,
                                 env=os.environ | {"RUN_DIR": str(folder)})
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


def test_reading_minutes_are_words_and_lines(tmp_path):
    source = tmp_path / "01_x.py"
    source.write_text("# %% [markdown]\n# " + "word " * 400 + "\n\n# %%\nhelpers.machine()\n\n"
                      "# %%\n" + "x = 1\n" * 60)
    assert readme_figure.reading(source)["minutes"] == pytest.approx(400 / 200 + 60 / 20)


def test_source_that_a_cell_prints_counts_as_code():
    code = ast.parse("from helpers.packing import fill_rows as best\n"
                     "helpers.show_source(best, packing.fill_rows)")
    once = sum(bool(line.strip()) for line in inspect.getsource(packing.fill_rows).splitlines())
    assert readme_figure.shown_lines(code) == 2 * once > 20


def test_stored_outputs_have_no_terminal_colours():
    """What rich shows in a notebook, as `jax.debug.visualize_array_sharding` does."""
    shown = nbformat.v4.new_output("display_data", {"text/plain": "CPU \x1b[1;36m0\x1b[0m"})
    cell = nbformat.v4.new_code_cell("1", outputs=[shown])
    tidied = notebooks.tidy(nbformat.v4.new_notebook(cells=[cell]))
    assert tidied.cells[0].outputs[0].data["text/plain"] == "CPU 0"
