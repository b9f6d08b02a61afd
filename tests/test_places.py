"""Where things lie: odd characters in a path, and nothing written outside of what is ours."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, program

ODD = {"space": "a b", "comma": "a,b", "colon": "a:b", "equals": "a=b", "bracket": "a[b",
       "percent": "a%20b",
       "dollar": "a$HOME", "quotes": "a'b\"c", "umlaut": "ä中"}
JUDGE = """
import verilog
problem = verilog.load_problems("data/tiny_eval")[0]
right = verilog.judge(problem, problem.reference.replace("RefModule", "TopModule"))
wrong = verilog.judge(problem, "module TopModule(); endmodule")
print("right", right.passed, "wrong", wrong.passed, right)
"""


def copy_repository(target):
    """The files that git knows or would commit, and links to the environments."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.splitlines()
    for name in listed:
        source = ROOT / name
        if source.is_file() and not name.startswith(("notebooks/", "data/dryrun/programs")):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    for name in (".venv", ".venv-serve", ".libtpu"):
        if (ROOT / name).exists():
            (target / name).symlink_to((ROOT / name).resolve())
    return target


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


class Place:
    """A copy of the repository, a run directory and a TMPDIR, each with a name in its path."""

    def __init__(self, folder, name):
        self.repository = copy_repository(folder / f"repository {name}" / name)
        self.run = folder / f"run {name}" / name
        self.temporary = folder / f"tmp {name}" / name
        self.temporary.mkdir(parents=True)
        edit(self.repository / "02_data.py", "rows=4_000", "rows=300")

    def python(self, *words):
        """A program of the copy, at the tiny size, which trains two steps."""
        done = program(sys.executable, *words, cwd=self.repository, SIZE="tiny", MAX_STEPS="2",
                       RUN_DIR=str(self.run), TMPDIR=str(self.temporary), MPLBACKEND="agg",
                       XLA_FLAGS=None, JAX_COMPILATION_CACHE_DIR=None)
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        return done


@pytest.mark.parametrize("name", ODD)
def test_the_judge_works_wherever_it_lies(tmp_path, name):
    """A `$` in TMPDIR failed every answer as "compile"."""
    done = Place(tmp_path, ODD[name]).python("-c", JUDGE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right True") and " wrong False" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_a_model_is_made_wherever_things_lie(tmp_path, name):
    place = Place(tmp_path, ODD[name])
    for page in ("02_data.py", "03_train.py", "04_merge.py"):
        done = place.python(page)
        assert done.returncode == 0, (page, done.stdout[-2000:], done.stderr[-2000:])
    assert (place.run / "merge.json").exists()
    assert (place.run / "merged" / "config.json").exists()


def stand(folder):
    """{path: (size, time of the last change)} of everything below a folder."""
    found = {}
    for path in Path(folder).rglob("*"):
        status = path.lstat()
        found[path] = (status.st_size, status.st_mtime_ns) if path.is_file() else ()
    return found


@pytest.mark.slow
def test_nothing_is_written_outside_of_what_is_ours(tmp_path):
    """01 to 04 in a copy whose parent, siblings and home are watched; TMPDIR/base is ours, too.

    A mistyped folder of problems once changed the repository around it.
    """
    outside = tmp_path / "outside"
    for name in ("sibling", "home", "tmp"):
        (outside / name).mkdir(parents=True)
        (outside / name / "mine.txt").write_text("mine")
    repository, run = copy_repository(outside / "repository"), outside / "run"
    edit(repository / "02_data.py", "rows=4_000", "rows=300")
    subprocess.run(["git", "init", "-q", repository], check=True)
    subprocess.run(["git", "init", "-q", outside], check=True)
    before = stand(outside)
    for page in ("01_setup.py", "02_data.py", "03_train.py", "04_merge.py"):
        done = program(sys.executable, page, cwd=repository, SIZE="tiny", MAX_STEPS="2",
                       XLA_FLAGS=None,
                       RUN_DIR=str(run), TMPDIR=str(outside / "tmp"), HOME=str(outside / "home"),
                       MPLBACKEND="agg", JAX_COMPILATION_CACHE_DIR=None,
                       PYTHONDONTWRITEBYTECODE="1",
                       MPLCONFIGDIR=str(tmp_path / "matplotlib"))
        assert done.returncode == 0, (page, done.stderr[-2000:])
    edit(repository / "02_data.py", 'evaluation="data/tiny_eval"', 'evaluation="data/tiny_evla"')
    before[repository / "02_data.py"] = stand(repository)[repository / "02_data.py"]
    done = program(sys.executable, "02_data.py", cwd=repository, SIZE="tiny", XLA_FLAGS=None,
                   RUN_DIR=str(run), HOME=str(outside / "home"), MPLBACKEND="agg",
                   PYTHONDONTWRITEBYTECODE="1", MPLCONFIGDIR=str(tmp_path / "matplotlib"))
    assert done.returncode == 1 and "no folder data/tiny_evla" in done.stderr
    after = stand(outside)
    ours = (run, outside / "tmp" / "base", repository / "runs", repository / ".setup.lock")
    changed = [str(path.relative_to(outside)) for path in before.keys() | after.keys()
               if before.get(path) != after.get(path)
               and not any(path.is_relative_to(place) for place in ours)]
    assert changed == [], changed
