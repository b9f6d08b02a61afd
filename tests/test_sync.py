"""The tool that builds, executes and checks the notebooks (`test_lint.py` asks whether ours are
up to date).

    .venv/bin/python -m pytest tests/test_sync.py
"""

import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT

HEADER = """# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

"""


def tool(folder, *options):
    return subprocess.run([sys.executable, "tools/notebooks.py", *options], cwd=folder,
                          capture_output=True, text=True, env={**os.environ, "SIZE": "tiny"})


@pytest.fixture
def project(tmp_path):
    shutil.copytree(ROOT / "helpers", tmp_path / "helpers")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "01_one.py").write_text(HEADER + "# %% [markdown]\n# # One\n\n# %%\nprint(1 + 1)\n")
    return tmp_path


def test_second_update_writes_nothing(project):
    assert "wrote" in tool(project).stdout
    assert tool(project).stdout == ""


def test_check_sees_missing_outputs_then_accepts_executed(project):
    tool(project)
    answer = tool(project, "--check")
    assert answer.returncode == 1 and "without outputs" in answer.stdout
    done = tool(project, "--execute")
    assert done.returncode == 0, done.stdout + done.stderr
    assert tool(project, "--check").returncode == 0
    notebook = nbformat.read(project / "notebooks" / "01_one.ipynb", as_version=4)
    assert notebook.cells[1].outputs[0].text == "2\n"


def test_prose_edit_keeps_outputs_and_code_edit_drops_them(project):
    tool(project, "--execute")
    source = project / "01_one.py"
    source.write_text(source.read_text().replace("# # One", "# # Uno"))
    assert tool(project, "--check").returncode == 1
    tool(project)
    assert tool(project, "--check").returncode == 0
    source.write_text(source.read_text().replace("1 + 1", "1 + 2"))
    tool(project)
    assert "without outputs" in tool(project, "--check").stdout


def test_outputs_older_than_the_results_they_show_are_refused_and_made_again(project):
    """An executed copy from before is no way out; a prose edit keeps the mark, as it does outputs."""
    table, source = project / "data" / "dryrun" / "rows.csv", project / "01_one.py"
    table.parent.mkdir(parents=True)
    table.write_text("a\n1\n")
    show = "print(open('data/dryrun/rows.csv').read().split())"
    source.write_text(source.read_text().replace("print(1 + 1)", show))
    tool(project, "--execute")
    source.write_text(source.read_text().replace("# # One", "# # Uno"))
    tool(project)
    assert tool(project, "--check").returncode == 0
    table.write_text("a\n2\n")
    answer = tool(project, "--check")
    assert answer.returncode == 1 and "before data/dryrun changed" in answer.stdout
    tool(project, "--execute")
    assert tool(project, "--check").returncode == 0
    assert "'2'" in (project / "notebooks" / "01_one.ipynb").read_text()


def test_check_refuses_orphans_errors_and_absolute_paths(project):
    tool(project, "--execute")
    (project / "notebooks" / "02_gone.ipynb").write_text("{}")
    assert "orphan" in tool(project, "--check").stdout
    (project / "notebooks" / "02_gone.ipynb").unlink()
    source = project / "01_one.py"
    source.write_text(source.read_text().replace("print(1 + 1)", "print('/home/someone/x')"))
    tool(project, "--execute")
    assert "absolute path" in tool(project, "--check").stdout
    source.write_text(source.read_text().replace("print('/home/someone/x')", "raise ValueError(1)"))
    failed = tool(project, "--execute")
    assert failed.returncode == 1 and "ValueError" in failed.stderr


def test_cell_ids_survive_an_insertion(project):
    tool(project)
    before = nbformat.read(project / "notebooks" / "01_one.ipynb", as_version=4)
    source = project / "01_one.py"
    source.write_text(source.read_text().replace("# %%\nprint", "# %%\nx = 3\n\n# %%\nprint"))
    tool(project)
    after = nbformat.read(project / "notebooks" / "01_one.ipynb", as_version=4)
    assert {cell.id for cell in before.cells} < {cell.id for cell in after.cells}


@pytest.mark.parametrize("printed", [False, True])
def test_repository_is_one_constant_and_outputs_without_it_are_kept(project, printed):
    old = re.search(r"github\.com/([\w.-]+/[\w.-]+)", (ROOT / "tools/opening.txt").read_text())[1]
    source = project / "01_one.py"
    source.write_text(
        HEADER + f"# %% [markdown]\n# colab.research.google.com/github/{old}/blob/main/notebooks/01_one.ipynb\n"
        f'\n# %%\nURL = "git clone --depth=1 https://github.com/{old}"\n'
        f"print({'URL' if printed else 7})\n")
    assert tool(project, "--execute").returncode == 0
    answer = tool(project, "--repository", "https://github.com/someone/thing")
    assert answer.returncode == 0, answer.stderr
    assert old not in source.read_text() and "github/someone/thing/blob/main" in source.read_text()
    notebook = nbformat.read(project / "notebooks" / "01_one.ipynb", as_version=4)
    assert bool(notebook.cells[1].outputs) != printed, "an address that the outputs show is another output"
    assert tool(project, "--repository", "ftp://x").returncode == 1
