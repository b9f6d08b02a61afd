"""setup.sh, run_all.sh and the opening say what is wrong in a line or two."""

import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest
from conftest import ROOT, program

import helpers
import notebooks


def test_wrong_python_is_named(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\ncase \"$1\" in --version) echo 'Python 3.9.1';; *) exit 1;; esac\n")
    fake.chmod(0o755)
    answer = program("bash", "setup.sh", "train", "--into", fake)
    assert answer.returncode == 1 and "3.9.1" in answer.stderr and "3.11" in answer.stderr
    assert len(answer.stderr.splitlines()) <= 2


def test_what_was_made_at_another_size_is_refused(monkeypatch):
    monkeypatch.setenv("SIZE", "e2b")
    helpers.same_size("e2b", "02_data.py")
    with pytest.raises(ValueError, match=r'02_data.py ran at size tiny.*"SIZE"\] = "tiny"'):
        helpers.same_size("tiny", "02_data.py")


def test_a_users_mistake_has_no_traceback_in_a_notebook():
    from IPython.core.interactiveshell import InteractiveShell
    shell, shown = InteractiveShell.instance(), []
    shell._showtraceback = lambda kind, error, lines: shown.extend(lines)
    shell.run_cell("import helpers\nraise helpers.UserError('no checkpoint')")
    InteractiveShell.clear_instance()
    assert shown == ["Error: no checkpoint"]


@pytest.mark.parametrize("path", [None, "/nowhere"], ids=["no repository", "no git"])
def test_a_folder_without_git_has_no_commit(tmp_path, monkeypatch, path):
    """Neither a traceback, nor the commit of a repository that lies around the folder."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-q", "--allow-empty", "-m",
                    "theirs"],
                   check=True)
    (tmp_path / "copy").mkdir()
    assert helpers.run.commit_of(tmp_path)
    if path:
        monkeypatch.setenv("PATH", path)
        assert helpers.run.commit_of(tmp_path) == ""
    assert helpers.run.commit_of(tmp_path / "copy") == ""


# ── The opening ──

def copy_rooms(target):
    for room in ("helpers", "tables", "serving", "tpu_time"):
        shutil.copytree(ROOT / room, target / room, ignore=shutil.ignore_patterns("__pycache__"))


def other_python(tmp_path):
    """A Python that setup.sh did not make: a virtual environment with nothing in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    return tmp_path / "other/bin/python"


def opening(python, folder, **env):
    """The opening cell without its last call, and the installation, by this Python in `folder`."""
    cell = notebooks.code_cells(jupytext.read(ROOT / "01_setup.py"))[0].source.replace(
        "helpers.machine()", "helpers.run.one_line_errors()\nhelpers.opening.install()")
    return program(python, "-c", cell, cwd=folder, **env)


def test_the_opening_works_in_our_environment():
    for folder in (ROOT, ROOT / "notebooks"):
        answer = opening(ROOT / ".venv/bin/python", folder)
        assert answer.returncode == 0 and "environment ready: .venv" in answer.stdout, answer.stderr


def finds(python, folder, **env):
    """The folder from which the opening cell, run like this, imports helpers."""
    cell = notebooks.code_cells(jupytext.read(ROOT / "01_setup.py"))[0].source.replace(
        "helpers.machine()", "print(helpers.__file__)")
    done = program(python, "-c", cell, cwd=folder, COLAB_RELEASE_TAG=None, **env)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).parent.parent


def test_a_kernel_in_another_folder_runs_the_checkout_that_it_belongs_to(tmp_path):
    """It cloned, so what the reader had changed in helpers was not what ran."""
    copy_rooms(tmp_path / "copy")
    (tmp_path / "copy/notebooks/own").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    other = other_python(tmp_path)
    assert finds(other, tmp_path / "copy/notebooks/own") == tmp_path / "copy"
    assert finds(ROOT / ".venv/bin/python", tmp_path / "elsewhere") == ROOT
    page = str(tmp_path / "copy/notebooks/01_setup.ipynb")  # where Jupyter says that it is
    assert finds(other, tmp_path / "elsewhere", JPY_SESSION_NAME=page) == tmp_path / "copy"


def test_a_kernel_that_belongs_to_no_checkout_is_told_and_nothing_is_cloned(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    answer = opening(other_python(tmp_path), tmp_path / "elsewhere", COLAB_RELEASE_TAG=None)
    assert answer.returncode == 1
    assert answer.stderr.startswith("Error: no repository is here or above.")
    assert len(answer.stderr.splitlines()) == 2 and "setup.sh train" in answer.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_without_an_environment_the_command_is_named(tmp_path):
    copy_rooms(tmp_path / "copy")
    answer = opening(other_python(tmp_path), tmp_path / "copy")
    assert answer.returncode == 1 and len(answer.stderr.splitlines()) == 1
    assert f"cd {tmp_path}/copy && ./setup.sh train" in answer.stderr


@pytest.mark.parametrize("why", ["Colab", "setup.sh was told to"])
def test_the_opening_installs_where_it_may(tmp_path, why):
    """A copy whose setup.sh only says what it was asked: this is about whether it is asked."""
    copy = tmp_path / "copy"
    copy_rooms(copy)
    (copy / "setup.sh").write_text('echo "asked: $*"\n')
    python = other_python(tmp_path)
    if why != "Colab":
        (tmp_path / "other/.gemma4-on-tpu-train").write_text("an earlier checksum\n")
    answer = opening(python, copy,
                     **({"COLAB_RELEASE_TAG": "release-colab"} if why == "Colab" else {}))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"asked: train --into {python}\n"


# ── uv, and pip where it cannot ──

@pytest.mark.parametrize("uv, pip, code", [(0, 1, 0), (1, 0, 0), (1, 1, 1)])
def test_pip_installs_where_uv_cannot(tmp_path, uv, pip, code):
    """A stand-in for Python says how each ends; a second run finds the stamp, installs nothing."""
    shutil.copy2(ROOT / "setup.sh", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/site.txt").write_text("sphinx==0\n")
    python = tmp_path / ".venv-site/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/usr/bin/env bash
echo "$*" >> {tmp_path}/log
case "$*" in
*"uv pip install"*) exit {uv} ;;
*"pip install"*"-r"*) exit {pip} ;;
*sys.prefix*) echo {tmp_path} ;;
esac
""")
    python.chmod(0o755)
    answer = program("bash", "setup.sh", "site", cwd=tmp_path)
    assert answer.returncode == code, answer.stderr
    assert ("failed (see above)" in answer.stderr) == bool(code)
    (tmp_path / "log").unlink()
    again = program("bash", "setup.sh", "site", cwd=tmp_path)
    assert ("install" in (tmp_path / "log").read_text()) == bool(code) and again.returncode == code
