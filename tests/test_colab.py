"""A notebook opened alone, as Colab opens it: an empty folder, a fresh Python, clone, installation.

The clone comes from a local mirror of this working tree, and pip's index is whatever this machine
has. Not simulated: the packages that Colab has installed beforehand, and Google Drive itself; a
folder on another file system, with a space in its path, stands in for it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from conftest import ROOT, program
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import helpers
import notebooks

SHM = Path("/dev/shm")
REPOSITORY = "gemma4-on-tpu"
OPENING = notebooks.code_cells(jupytext.read(ROOT / "01_setup.py"))[0].source


def find_python(version):
    """An interpreter of this version, or None."""
    places = (shutil.which(f"python{version}"),
              *Path.home().glob(f".pyenv/versions/{version}*/bin/python{version}"))
    for place in places:
        if place and program(place, "-c", "import ensurepip").returncode == 0:
            return place
    return None


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """A bare repository that holds the files git would commit now; gives its address."""
    folder = tmp_path_factory.mktemp("mirror")
    tree, bare = folder / "tree", folder / "bare.git"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    for words in (["init", "-q", "-b", "main"], ["add", "-A"],
                  ["-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-q", "-m",
                   "state"],
                  ["clone", "-q", "--bare", ".", str(bare)]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    return bare.as_uri()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A new environment of Colab's Python with nothing but a kernel in it; gives its folder."""
    python = find_python("3.13")
    if python is None:
        pytest.skip("no Python 3.13 on this machine")
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([folder / "venv/bin/python", "-m", "pip", "install", "-q", "ipykernel"],
                   check=True,
                   capture_output=True)
    return folder / "venv"


class Colab:
    """One machine of Colab's: a notebook in an empty folder, and a kernel that starts there."""

    def __init__(self, folder, venv, mirror, **env):
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if name not in (
            "SIZE", "RUN_DIR", "PYTHONPATH", "VIRTUAL_ENV", "MPLBACKEND", "XLA_FLAGS",
            "JAX_PLATFORMS")}
        self.env = {**kept, "COLAB_RELEASE_TAG": "release-colab", "JUPYTER_PREFER_ENV_PATH": "1",
                    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{mirror}.insteadOf",
                    "GIT_CONFIG_VALUE_0": re.search(r"https://github\S+?(?=\")", OPENING)[0],
                    "JUPYTER_PATH": str(venv / "share" / "jupyter"), **env}

    def open(self, source):
        """The notebook alone, without outputs, and a client that is about to run it."""
        notebook = jupytext.read(ROOT / source)
        nbformat.write(notebook, self.folder / f"{Path(source).stem}.ipynb")
        client = NotebookClient(notebook, timeout=1_800, kernel_name="fresh",
                                resources={"metadata": {"path": str(self.folder)}})
        return notebook, client


@pytest.fixture
def colab(fresh, mirror, tmp_path, monkeypatch):
    """Give a function that makes such a machine."""
    spec = fresh / "share" / "jupyter" / "kernels" / "fresh"
    shutil.copytree(fresh / "share" / "jupyter" / "kernels" / "python3", spec, dirs_exist_ok=True)
    text = (spec / "kernel.json").read_text()
    (spec / "kernel.json").write_text(re.sub(r'"python[0-9.]*"', f'"{fresh}/bin/python"', text,
                                             count=1))
    monkeypatch.setenv("JUPYTER_PATH", str(fresh / "share" / "jupyter"))

    def make(**env):
        folder = tmp_path / "content"
        folder.mkdir()
        return Colab(folder, fresh, mirror, **env)
    return make


def printed(notebook):
    """What the cells printed, and that no cell failed or complained."""
    text = ""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "error", (cell.source[:80], output.evalue)
            assert output.get("name") != "stderr", (cell.source[:80], output.text)
            text += output.get("text", "")
    return text


@pytest.mark.slow
@pytest.mark.parametrize("source, left", [
    ("00_quickstart.py", "figures/00_loss.png"), ("01_setup.py", "setup.json")])
def test_a_notebook_alone_clones_installs_and_runs(colab, source, left):
    machine = colab()
    notebook, client = machine.open(source)
    client.execute(env=machine.env)
    text = printed(notebook)
    assert "python 3.13." in text and "size tiny" in text
    assert sorted(path.name for path in machine.folder.iterdir()) == sorted(
        [REPOSITORY, f"{Path(source).stem}.ipynb"])
    assert (machine.folder / REPOSITORY / "runs/tiny" / left).exists()


def run_with_what_it_lacks(client, env):
    """Run a notebook as a reader does, with the cell that an error offers; gives the offers."""
    offered = []
    with client.setup_kernel(env=env):
        for place, cell in enumerate(client.nb.cells):
            if cell.cell_type != "code":
                continue
            try:
                client.execute_cell(cell, place)
            except CellExecutionError as error:
                assert not offered, error
                said = "\n".join(cell.outputs[-1].traceback)
                assert said.startswith("Error: ") and "\n" not in said
                offered = re.findall(r"helpers\.\w+\(.*?\)$", said)
                assert offered, said
                client.execute_cell(nbformat.v4.new_code_cell(offered[0]), place)
                client.execute_cell(cell, place)
    printed(client.nb)
    return offered


@pytest.mark.slow
@pytest.mark.skipif(not SHM.is_dir(), reason="no second file system to write to")
def test_a_later_notebook_offers_a_cell_that_runs_what_is_missing(colab, tmp_path):
    """RUN_DIR is a folder of another file system with a space in its path, like a mounted Drive."""
    drive = SHM / f"gemma4-test-{os.getpid()}" / "My Drive"
    assert os.stat(SHM).st_dev != os.stat(tmp_path).st_dev
    run = drive / "gemma run"
    machine = colab(RUN_DIR=str(run))
    made = {"03_train.py": ("data/meta.json", "train/recipe.json"),
            "05_serve_vllm.py": ("merge.json", "merged", "adapter/adapter_model.safetensors",
                                 "serve/options.json"),
            "07_eval.py": ("eval/comparison.json",)}
    missing = {"03_train.py": "02", "05_serve_vllm.py": "04", "07_eval.py": None}
    try:
        for source, files in made.items():
            _, client = machine.open(source)
            offered = run_with_what_it_lacks(client, machine.env)
            last = missing[source]
            assert offered == ([f'helpers.catch_up("{last}")'] if last else []), source
            assert all((run / name).exists() for name in files), source
        assert not (machine.folder / REPOSITORY / "runs").exists(), "all results went to RUN_DIR"
    finally:
        shutil.rmtree(drive.parent, ignore_errors=True)


# ── Colab's kernel has loaded NumPy before the first cell ──

EARLY = """import os, sys
sys.path.insert(0, {root!r})
import subprocess
import numpy
import helpers
subprocess.run = lambda *_, **__: None  # what pip would do has been done
{change}
helpers.run.one_line_errors()
helpers.opening.install()
print("went on")
"""


@pytest.mark.parametrize(("change", "stops"), [("", False), ("numpy.__version__ = '2.1.3'", True)])
def test_a_kernel_that_holds_older_packages_is_told_to_restart(tmp_path, change, stops):
    """With NumPy 2.1.3 in memory and 2.4.6 on the disk `import pandas` failed with a riddle."""
    done = program(sys.executable, "-c", EARLY.format(root=str(ROOT), change=change), cwd=tmp_path)
    assert ("went on" in done.stdout) != stops
    if stops:
        assert "older versions of numpy. Restart it, once" in done.stderr
        assert "Restart session and run all" in done.stderr and "Traceback" not in done.stderr


# ── The offer itself, without a new machine ──

def test_missing_input_offers_a_cell_up_to_e2b(tmp_path, monkeypatch):
    for size in ("tiny", "e2b"):
        monkeypatch.setenv("SIZE", size)
        with pytest.raises(ValueError, match=r'helpers\.catch_up\("03"\)$'):
            helpers.require(tmp_path / "recipe.json", "03_train.py")
    monkeypatch.setenv("SIZE", "31b")  # days of a machine that costs money are not a cell
    with pytest.raises(ValueError) as error:
        helpers.require(tmp_path / "recipe.json", "03_train.py")
    assert "catch_up" not in str(error.value)


@pytest.fixture
def small_series(tmp_path, monkeypatch):
    """Four notebooks of one line each, which write down that they ran."""
    monkeypatch.setattr(helpers.run, "_ROOT", tmp_path)
    for number in ("00", "01", "02", "03", "10"):
        (tmp_path / f"{number}_x.py").write_text(
            f"import os\nopen('ran', 'a').write('{number} ' + os.environ['MPLBACKEND'] + ' ')\n")
    return tmp_path


def test_catching_up_runs_the_earlier_notebooks_in_order(small_series, capsys):
    helpers.catch_up("02")
    helpers.catch_up("03")
    assert (small_series / "ran").read_text() == "02 agg 02 agg 03 agg ", "01 makes nothing"
    assert re.search(r"02_x: done in .*\n(.*\n)*03_x: done in", capsys.readouterr().out)


def test_catching_up_stops_at_the_first_failure(small_series):
    (small_series / "02_x.py").write_text(
        "import sys\nprint('noise', file=sys.stderr)\nsys.exit('Error: the disk is full')\n")
    with pytest.raises(ValueError, match="^02_x failed: the disk is full$"):
        helpers.catch_up("03")
    assert not (small_series / "ran").exists()
