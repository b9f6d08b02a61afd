"""Where things lie: odd characters in a path, and nothing written outside of what is ours."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SERVE, program

from helpers import run

ODD = {"space": "a b", "comma": "a,b", "colon": "a:b", "equals": "a=b", "bracket": "a[b]",
       "percent": "a%20b", "dollar": "a$HOME", "quotes": "a'b\"c", "umlaut": "ä中"}
# What comes before a program, so that it has less than usual.
NARROW = {
    "umask": ["sh", "-c", 'umask 077; exec "$@"', "sh"],
    "files": ["sh", "-c", 'ulimit -S -n 40; exec "$@"', "sh"],
    "network": ["unshare", "-rn"],
    "read-only": ["unshare", "-rm", "sh", "-c",
                  'mount --bind "$PWD" "$PWD" && mount -o remount,bind,ro "$PWD" && cd "$PWD" '
                  '&& ! touch written 2>/dev/null && exec "$@"', "sh"]}
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
        if "[" in name:  # refused, see below
            self.run = folder / "run"
        self.temporary = folder / f"tmp {name}" / name
        self.temporary.mkdir(parents=True)
        edit(self.repository / "02_data.py", "rows=4_000", "rows=300")

    def python(self, *words, begin=()):
        """A program of the copy, at the tiny size, which trains two steps, after `begin`."""
        done = program(*begin, sys.executable, *words, cwd=self.repository, SIZE="tiny",
                       MAX_STEPS="2", RUN_DIR=str(self.run), TMPDIR=str(self.temporary),
                       MPLBACKEND="agg", XLA_FLAGS=None, JAX_COMPILATION_CACHE_DIR=None)
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        return done


@pytest.mark.parametrize("name", ODD)
def test_the_judge_works_wherever_it_lies(tmp_path, name):
    """A `$` in TMPDIR failed every answer as "compile"."""
    done = Place(tmp_path, ODD[name]).python("-c", JUDGE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right True") and " wrong False" in done.stdout, done.stdout


def test_a_run_whose_weights_orbax_would_lose_is_refused(tmp_path, monkeypatch):
    """Orbax saved a checkpoint below `a[b]`, and what it saved had no weights."""
    folder = tmp_path / "a[b]"
    monkeypatch.setenv("RUN_DIR", str(folder))
    with pytest.raises(run.UserError, match="without one"):
        run.run_dir()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_a_model_is_made_wherever_things_lie(tmp_path, name):
    place = Place(tmp_path, ODD[name])
    for page in ("02_data.py", "03_train.py", "04_merge.py"):
        done = place.python(page)
        assert done.returncode == 0, (page, done.stdout[-2000:], done.stderr[-2000:])
    assert (place.run / "merge.json").exists()
    assert (place.run / "merged" / "config.json").exists()


def test_too_few_files_are_one_line_before_anything_is_computed():
    """With 40, Orbax lost a checkpoint now and then, with a traceback of its threads."""
    few = ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh"]
    call = "import helpers; helpers.machine(always='tiny')"
    done = program(*few, sys.executable, "-c", call, cwd=ROOT)
    assert done.returncode == 1 and "ulimit -n 1024" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("less", NARROW)
def test_a_model_is_made_with_less(tmp_path, less):
    """A umask of 077, a soft limit of 40 files, no network, a repository that can't be written."""
    begin = NARROW[less]
    if "unshare" in begin and program(*begin[:2], "true").returncode:
        pytest.skip("unshare isn't allowed here")
    place = Place(tmp_path, "a")
    for page in ("02_data.py", "03_train.py", "04_merge.py"):
        done = place.python(page, begin=begin)
        assert done.returncode == 0, (page, done.stdout[-2000:], done.stderr[-2000:])
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
    """01 to 05 in a copy whose parent, siblings and home are watched; TMPDIR/base is ours, too.

    A mistyped folder of problems once changed the repository around it, and each start of a server
    wrote into ~/.cache/vllm. 05 only runs where .venv-serve is.
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

    def python(*words):
        return program(sys.executable, *words, cwd=repository, SIZE="tiny", MAX_STEPS="2",
                       XLA_FLAGS=None, RUN_DIR=str(run), TMPDIR=str(outside / "tmp"),
                       HOME=str(outside / "home"), XDG_CACHE_HOME=None, XDG_CONFIG_HOME=None,
                       MPLBACKEND="agg", MPLCONFIGDIR=str(tmp_path / "matplotlib"),
                       JAX_COMPILATION_CACHE_DIR=None, PYTHONDONTWRITEBYTECODE="1")

    def changed(*ours):
        after = stand(outside)
        return [str(path.relative_to(outside)) for path in before.keys() | after.keys()
                if before.get(path) != after.get(path)
                and not any(path.is_relative_to(place) for place in ours)]

    for page in ("01_setup.py", "02_data.py", "03_train.py", "04_merge.py"):
        done = python(page)
        assert done.returncode == 0, (page, done.stderr[-2000:])
    ours = (run, outside / "tmp" / "base", repository / "runs", repository / ".setup.lock")
    assert changed(*ours) == []
    if SERVE.exists():
        try:
            done = python("05_serve_vllm.py")
            assert done.returncode == 0, ("05_serve_vllm.py", done.stderr[-2000:])
        finally:
            python("-m", "serving", "stop", str(run))
        # PyTorch and vLLM leave files in TMPDIR.
        assert changed(*ours, outside / "tmp") == []
        assert (outside / "tmp" / "mine.txt").read_text() == "mine"
    edit(repository / "02_data.py", 'evaluation="data/tiny_eval"', 'evaluation="data/tiny_evla"')
    before[repository / "02_data.py"] = stand(repository)[repository / "02_data.py"]
    done = python("02_data.py")
    assert done.returncode == 1 and "no folder data/tiny_evla" in done.stderr
    assert changed(*ours, outside / "tmp") == []
