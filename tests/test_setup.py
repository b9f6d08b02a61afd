"""setup.sh, run_all.sh and the helpers say what is wrong in a line or two, and pins are pins.

    .venv/bin/python -m pytest tests/test_setup.py
"""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

import helpers
from helpers import run


def bash(*words, **env):
    return subprocess.run(["bash", *words], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, **env})


@pytest.mark.parametrize("script", ["setup.sh", "run_all.sh", "run_tests.sh", "update_notebooks.sh", "build_site.sh",
                                    ".ci/run"])
def test_scripts_parse(script):
    assert bash("-n", script).returncode == 0


@pytest.mark.parametrize("name", ["train", "tpu", "serve-cpu", "test", "browser", "site"])
def test_requirements_are_pinned(name):
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        line = line.split("#")[0].split(";")[0].strip()
        if line and not line.startswith("-r "):
            assert re.fullmatch(r"[\w.\[\]-]+==[\w.+!]+", line), line


def test_a_second_setup_changes_nothing():
    answer = bash("setup.sh", "train", "--into", sys.executable)
    assert answer.returncode == 0 and "installing" not in answer.stdout, answer.stdout


def test_wrong_python_is_named(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\ncase \"$1\" in --version) echo 'Python 3.9.1';; *) exit 1;; esac\n")
    fake.chmod(0o755)
    answer = bash("setup.sh", "train", "--into", str(fake))
    assert answer.returncode == 1 and "3.9.1" in answer.stderr and "3.11" in answer.stderr
    assert len(answer.stderr.splitlines()) <= 2


def test_usage_instead_of_a_guess():
    assert bash("setup.sh").returncode == 2
    assert bash("run_all.sh", "--nonsense").returncode == 2


def test_unknown_size_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("SIZE", "13b")
    with pytest.raises(helpers.UserError, match="(?s)13b.*tiny.*e2b.*31b"):
        helpers.size()


def test_size_follows_the_hardware(monkeypatch):
    monkeypatch.delenv("SIZE", raising=False)
    for chips, expected in ((0, "tiny"), (1, "e2b"), (4, "31b"), (8, "31b")):
        monkeypatch.setattr(run, "tpu_chips", lambda chips=chips: chips)
        assert helpers.size() == expected


def test_missing_input_names_the_notebook(tmp_path):
    with pytest.raises(helpers.UserError, match="Run 03_train first"):
        helpers.require(tmp_path / "nothing", "03_train")


def test_a_users_mistake_has_no_traceback_as_a_script():
    text = "import helpers; raise helpers.UserError('the port is taken. Run X.')"
    answer = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr == "Error: the port is taken. Run X.\n"


def test_a_users_mistake_has_no_traceback_in_a_notebook():
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shown = []
    shell._showtraceback = lambda kind, error, lines: shown.extend(lines)
    shell.run_cell("import helpers\nraise helpers.UserError('no checkpoint')")
    InteractiveShell.clear_instance()
    assert shown == ["Error: no checkpoint"]


def test_files_appear_whole_or_not_at_all(tmp_path):
    target = tmp_path / "a.json"
    run.write_json(target, {"a": 1})
    with pytest.raises(TypeError):
        run.write_json(target, {"a": object()})
    assert run.read_json(target) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(RuntimeError):
        with run.atomic_dir(tmp_path / "d") as folder:
            (folder / "x").write_text("1")
            raise RuntimeError
    assert not (tmp_path / "d").exists()
    with run.atomic_dir(tmp_path / "d") as folder:
        (folder / "x").write_text("2")
    assert (tmp_path / "d" / "x").read_text() == "2"


def test_broken_json_is_one_clear_line(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(helpers.UserError, match="not valid JSON"):
        run.read_json(tmp_path / "a.json")


def test_choosing_a_size_does_not_start_jax():
    text = "import sys, helpers; helpers.choose(1, 2, 3); print('jax' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert answer.stdout.splitlines()[-1] == "False"


def test_chips_are_those_of_the_spec_sheets():
    v5p = helpers.chip("v5p")
    assert v5p.flops == 459e12 and v5p.bandwidth == 2765e9
    assert v5p.dollars_per_hour * 4 == pytest.approx(16.8)
    assert helpers.chip("v6e").dollars_per_hour * 8 == pytest.approx(21.52)
