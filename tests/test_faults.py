"""Faults, one row each: what is said, how it ends, what stays whole, and that nothing is left.

    .venv/bin/python -m pytest tests/test_faults.py -m "not slow"

A row is a generator: it makes the state before the fault, yields, does the harm and what follows,
and yields the outcome. What the line should say is given by meaning: the words that a reader needs.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from conftest import ROOT

from helpers import chat, data, run
from serving import bench, server
from verilog import judge

FINISHED = Path(os.environ.get("RUN_DIR") or ROOT / "runs" / "tiny").resolve()
HEADER = ("# ---\n# jupyter:\n#   jupytext:\n#     text_representation:\n#       extension: .py\n"
          "#       format_name: percent\n# ---\n\n")
WRITER = ("import sys, time\nfrom helpers.run import writing\nwriting()\n"
          "print('writes', flush=True)\n")
FAULTS = []


@dataclass
class Fault:
    act: object
    says: tuple      # patterns, all of which the output has
    code: int        # exit code
    intact: tuple    # paths under RUN_DIR that are the same afterwards
    gone: tuple      # paths under RUN_DIR that are not there afterwards
    slow: bool


def fault(*says, code=1, intact=(), gone=(), slow=False):
    """One row of the table."""
    def add(act):
        FAULTS.append(Fault(act, says, code, intact, gone, slow))
        return act
    return add


@pytest.fixture(scope="module", autouse=True)
def hears_hangups():
    """What these tests start is ended by SIGHUP, even if they were started under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class World:
    """A run directory, and a project of small notebooks around the real helpers and scripts."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.run, self.project = folder, folder / "run", folder / "project"
        self.monkeypatch, self.children = monkeypatch, []
        monkeypatch.setenv("RUN_DIR", str(self.run))
        monkeypatch.setenv("SIZE", "tiny")
        self.run.mkdir()

    def notebooks(self, *numbers, **cells):
        """Make the project, with all seven or these; `n02="..."` is the code of its notebook 02."""
        self.project.mkdir()
        for name in ("helpers", "tools"):
            shutil.copytree(ROOT / name, self.project / name)
        for name in ("run_all.sh", "update_notebooks.sh"):
            shutil.copy(ROOT / name, self.project)
        (self.project / ".venv").symlink_to(ROOT / ".venv")
        (self.project / "setup.sh").write_text("#!/bin/sh\nsleep ${SETUP_SECONDS:-0}\n")
        (self.project / "setup.sh").chmod(0o755)
        numbers = [f"n{number}" for number in numbers or ("01", "02", "03", "04", "05", "06", "07")]
        cells = {**dict.fromkeys(numbers, "print(1)"), **cells}
        for name, code in cells.items():
            text = HEADER + "# %% [markdown]\n# # A notebook\n\n# %%\n" + textwrap.dedent(code)
            (self.project / f"{name[1:]}_step.py").write_text(text + "\n")

    def file(self, path, text="{}"):
        path = self.run / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def data(self):
        """Packed rows as 02 writes them, two of eight ids."""
        with run.atomic_dir(self.run / "data") as folder:
            for part in ("train", "val"):
                (folder / part).mkdir()
                for name, kind in data.COLUMNS.items():
                    np.save(folder / part / f"{name}.npy", np.ones((2, 8), kind))
            run.write_json(folder / "samples.json", [])
            facts = {"train_rows": 2, "val_rows": 2, "sequence_length": 8, "system": "Write."}
            run.write_json(folder / "meta.json", data.seal(folder, facts))
        return self.run / "data"

    def call(self, function, *arguments):
        """The outcome of a helper: the text of its UserError, or what it returned."""
        try:
            return SimpleNamespace(returncode=0, text=str(function(*arguments)))
        except run.UserError as error:
            return SimpleNamespace(returncode=1, text=str(error))

    def said(self, function, *arguments):
        """The outcome of a helper that prints what it found, and goes on."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            found = function(*arguments)
        return SimpleNamespace(returncode=0, text=f"{printed.getvalue()}found {found}")

    def python(self, code, **env):
        """The outcome of some code in a Python of its own."""
        return self.ended(self.start(sys.executable, "-c", textwrap.dedent(code), cwd=ROOT, **env))

    def run_all(self, *words, **env):
        return self.ended(self.start("./run_all.sh", *words, cwd=self.project, **env))

    def start(self, *command, cwd=ROOT, **env):
        child = subprocess.Popen(command, cwd=cwd, text=True, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, start_new_session=True,
                                 env={**os.environ, **env})
        self.children.append(child)
        return child

    def ended(self, child, seconds=240):
        text, _ = child.communicate(timeout=seconds)
        return SimpleNamespace(returncode=child.returncode, text=text)

    def until(self, child, word):
        """Read what a child prints until a line has the word."""
        for line in child.stdout:
            if word in line:
                return line
        raise AssertionError(f"ended without {word!r}")

    def left(self):
        """Processes of this run directory that are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = process.environ().get("RUN_DIR") == str(self.run)
                if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def small_disk(self, command, size="256k", mode=""):
        """The outcome of a shell command in which RUN_DIR is a small disk of its own."""
        if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
            pytest.skip("this machine lets nobody mount a small disk (unshare -rm)")
        mount = f"mount -t tmpfs -o size={size} none {self.run} && {command}"
        return self.ended(self.start("unshare", "-rm", "bash", "-c", mount, cwd=ROOT), 600)


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path, monkeypatch)
    yield made
    for process in made.left():
        process.kill()
    for child in made.children:
        child.kill()
        child.wait()
        child.stdout.close()


def content(path):
    """What a path holds, to be compared."""
    if path.is_dir():
        return {str(p): content(p) for p in sorted(path.rglob("*")) if p.is_file()}
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


# -- Rows that cross a file: data ---------------------------------------------------------------

def read_data(world):
    folder = world.run / "data"
    return world.call(lambda: data.check_data(folder, run.read_json(folder / "meta.json")))


@fault(r"train/tokens\.npy has changed", "02_data", intact=("data",))
def training_tokens_zeroed(world):
    path = world.data() / "train" / "tokens.npy"
    np.save(path, np.zeros((2, 8), np.int32))
    yield
    yield read_data(world)


@fault(r"val/positions\.npy has changed", "02_data", intact=("data",))
def an_array_cut_short(world):
    path = world.data() / "val" / "positions.npy"
    path.write_bytes(path.read_bytes()[:-4])
    yield
    yield read_data(world)


@fault(r"loss_mask\.npy is missing", "02_data")
def an_array_missing(world):
    (world.data() / "train" / "loss_mask.npy").unlink()
    yield
    yield read_data(world)


@fault(r"train/more\.npy is not of it", "02_data")
def an_array_too_many(world):
    np.save(world.data() / "train" / "more.npy", np.ones(3))
    yield
    yield read_data(world)


@fault(r"samples\.json has changed", "02_data")
def samples_changed(world):
    (world.data() / "samples.json").write_text("[1]")
    yield
    yield read_data(world)


@fault(r"meta\.json.*changed", "02_data", intact=("data/train",))
def the_system_sentence_edited(world):
    path = world.data() / "meta.json"
    path.write_text(path.read_text().replace("Write.", "Sing."))
    yield
    yield read_data(world)


@fault(r"meta\.json.*older version", "02_data")
def data_of_an_older_version(world):
    path = world.data() / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({key: meta[key] for key in meta if key != "sha256"}))
    yield
    yield read_data(world)


@fault(r"meta\.json is not valid JSON", "Delete it")
def meta_half_written(world):
    path = world.data() / "meta.json"
    path.write_text(path.read_text()[:50])
    yield
    yield read_data(world)


@fault(r"recipe\.json says nothing about 'alpha'", "Run the notebook")
def a_key_taken_out(world):
    """Any artifact of another version, or one that was edited."""
    path = world.file("train/recipe.json", '{"rank": 16}')
    yield
    yield world.call(lambda: run.read_json(path)["alpha"])


@fault(r"tokens\.npy is int32 \(2, 8\), not .*\(2, 16\)", "02_data")
def rows_of_another_length(world):
    folder = world.data()
    facts = {"train_rows": 2, "val_rows": 2, "sequence_length": 16}
    (folder / "meta.json").unlink()
    run.write_json(folder / "meta.json", data.seal(folder, facts))
    yield
    yield read_data(world)


@fault("02_data", "meta.json is missing")
def no_data_at_all(world):
    yield
    yield world.call(data.check_data, world.run / "data", {})


# -- Rows that cross a file: stamps -------------------------------------------------------------

def served(world, size=1 << 21):
    """A folder like merged/, with a file large enough for its hash to be remembered."""
    folder = world.run / "merged"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(size))
    (folder / "config.json").write_text("{}")
    return folder, run.folder_hashes(folder)


@fault(r"model\.safetensors has changed", "Run 04", intact=("merged/config.json",))
def one_bit_flipped_and_the_time_put_back(world):
    folder, hashes = served(world)
    path = folder / "model.safetensors"
    times = path.stat()
    with open(path, "r+b") as file:
        file.seek(1 << 20)
        file.write(b"\x01")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    yield
    yield world.call(run.check_files, folder, hashes, "Run 04 again.")


@fault(r"config\.json is missing", "Run 04")
def a_file_of_a_model_missing(world):
    folder, hashes = served(world)
    (folder / "config.json").unlink()
    yield
    yield world.call(run.check_files, folder, hashes, "Run 04 again.")


@fault("None", code=0, intact=("merged",))
def the_notes_of_hashes_are_damaged(world):
    folder, hashes = served(world)
    world.file("cache/hashes.json", '{"half')
    yield
    yield world.call(run.check_files, folder, hashes, "Run 04 again.")


SERVED = server.Options(engine="cpu", model="merged", name="m", model_hash="of one merge")
LOAD = SimpleNamespace(seconds=2.5, min_requests=30, warmups=1, rates=(4,))


def point(world, options=SERVED, cfg=LOAD, stamp=True):
    """A point that 06 has measured, looked for by a 06 of these options and settings."""
    made = {"made_by": bench.made_by(SERVED, LOAD, 4)} if stamp else {}
    world.file(f"bench/{bench.point_name((256, 64), 4, 0)[0]}", json.dumps(
        {**dict.fromkeys(bench.NEEDED, 1), "completed": 1, "series": made}))
    yield
    yield world.said(bench.finished, options, cfg, (256, 64), 4, 0, world.run / "bench")


@fault("^found {", code=0)
def a_result_of_the_same_settings(world):
    yield from point(world)


@fault(r"something else \(seconds was 2.5 and is 40\): measuring it anew", "found None", code=0,
       intact=("bench",))
def results_of_other_settings(world):
    yield from point(world, cfg=SimpleNamespace(**{**vars(LOAD), "seconds": 40}))


@fault("model_hash was of one merge and is of another", "found None", code=0)
def results_of_another_model(world):
    yield from point(world, replace(SERVED, model_hash="of another"))


@fault("nothing says what it was made from", "found None", code=0)
def a_result_without_a_stamp(world):
    yield from point(world, stamp=False)


@fault(r"'merged': 'step was 60 and is 76'", "found", code=0, intact=("merged",))
def a_merge_of_another_step(world):
    from helpers import merge
    _, hashes = served(world)
    record = {"inputs": run.stamp(step=60, scale=2.0), "files": hashes}
    yield
    yield world.said(merge.to_make, record, run.stamp(step=76, scale=2.0), {"merged": "files"})


# -- Disks --------------------------------------------------------------------------------------

FILLING = "_ = open('{run}/fill', 'wb').write(bytes(200_000))\nprint('x' * 100_000)"
FILL = "head -c 1M /dev/zero >{run}/fill 2>/dev/null; "


@fault("disk of .* is full", "set RUN_DIR", r"old\nno leftover")
def a_full_disk_while_writing_a_file(world):
    code = ("from helpers.run import *; p = run_dir('a.json'); write_text(p, 'x' * 500000)")
    after = ("cat {run}/a.json; ls -A {run} | grep -v -e fill -e '^a.json$' || echo no leftover; "
             "exit $code")
    yield
    yield world.small_disk(f"echo old >{world.run}/a.json; " + FILL.format(run=world.run)
                           + f"{sys.executable} -c \"{code}\"; code=$?; "
                           + after.format(run=world.run))


@fault("disk of .* is full", r"a\nb\nfill")
def a_full_disk_while_writing_a_folder(world):
    """NumPy's own message has no number of the error; what was written so far makes room again."""
    code = ("import numpy as np; from helpers.run import *\n"
            "with atomic_dir(run_dir('data')) as beside:\n"
            "    np.save(beside / 'x.npy', np.ones(100000))")
    yield
    yield world.small_disk(f"cd {world.run}; mkdir data; touch data/a b fill; cd {ROOT}; "
                           f"{sys.executable} -c \"{code}\"; code=$?; "
                           f"ls -A {world.run}/data; ls -A {world.run} | grep -v data; exit $code")


@fault("cannot be (made|written)", "RUN_DIR")
def a_read_only_folder(world):
    code = "from helpers.run import *; write_text(run_dir('deep', 'a.json'), '1')"
    yield
    yield world.small_disk(f"mount -o remount,ro {world.run}; {sys.executable} -c \"{code}\"")


@fault("RUN_DIR=.*cannot be made", "folder of yours")
def run_dir_is_a_file(world):
    path = world.file("taken")
    yield
    yield world.python("from helpers.run import run_dir; run_dir()", RUN_DIR=str(path))


@fault("TMPDIR=/no/such/folder", "mkdir -p")
def tmpdir_is_missing(world):
    world.notebooks()
    yield
    yield world.run_all("01", TMPDIR="/no/such/folder")


@fault("TMPDIR=/no/such/folder", "mkdir -p")
def tmpdir_is_missing_in_a_script(world):
    yield
    yield world.python("import helpers; helpers.opening.start()", TMPDIR="/no/such/folder")


@fault("disk of .* is full", "02_step ran to its end")
def a_full_disk_for_the_executed_notebook(world):
    world.notebooks(n02=FILLING.format(run=world.run))
    yield
    yield world.small_disk(f"cd {world.project} && ./run_all.sh 02")


@fault("Error: mine", "disk of .* is full", "could not be saved")
def a_full_disk_does_not_hide_the_cells_error(world):
    world.notebooks(n02=FILLING.format(run=world.run)
                    + "\nimport helpers; raise helpers.UserError('mine')")
    yield
    yield world.small_disk(f"cd {world.project} && ./run_all.sh 02")


@fault("Error: the disk of .* is full", "02_step failed")
def a_full_disk_in_a_cell_that_knows_nothing_of_it(world):
    world.notebooks(n02=f"from helpers.run import writing; writing()\n\n# %%\n"
                        f"with open('{world.run}/log', 'w') as f: f.write('x' * 400_000)")
    yield
    yield world.small_disk(f"cd {world.project} && ./run_all.sh 02")


@fault("run_all: .*(cannot be|read-only)")
def a_read_only_run_directory(world):
    world.notebooks()
    yield
    yield world.small_disk(f"mount -o remount,ro {world.run}; cd {world.project}; ./run_all.sh 02")


@fault(r"run/a is larger than", "ulimit -f", gone=("a",))
def a_file_larger_than_allowed(world):
    code = "from helpers.run import *; write_text(run_dir('a'), 'x' * 500000)"
    yield
    yield world.ended(world.start("bash", "-c", f'ulimit -f 100; {sys.executable} -c "{code}"'))


@fault("disk of .* is full", r"gone: \[\]")
def a_full_disk_that_a_library_reports(world):
    """safetensors raises an error of its own; what it wrote does not stay."""
    code = ("import numpy as np; from safetensors.numpy import save_file; from helpers.run import *\n"
            "try:\n with atomic_dir(run_dir('m')) as beside:\n"
            "  save_file({'a': np.ones(200000)}, beside / 'a.safetensors')\n"
            "finally: print('gone:', [p.name for p in run_dir().iterdir()])")
    yield
    yield world.small_disk(f'{sys.executable} -c "{code}"')


SAVES = """
import numpy as np
from helpers import train, run
from helpers.opening import quiet
quiet()
run.writing()
manager = train.open_checkpoints(run.run_dir("train").resolve(), 1, last=9)
for step, size in ((1, 1000), (2, 1_000_000), (3, 1000)):
    train.save(manager, train.State(step, {"a": np.random.rand(size)}, (np.ones(3),), {}), {})
    if step == 1:
        manager.wait_until_finished()
"""


def test_a_full_disk_while_orbax_saves(world):
    """One line, without what its threads log; the checkpoint before it is whole."""
    path = world.folder / "saves.py"
    path.write_text(SAVES)
    done = world.small_disk(f"PYTHONPATH={ROOT} {sys.executable} {path}; code=$?; "
                            f"ls {world.run}/train; exit $code", size="2m")
    assert done.returncode == 1, done.text
    first, *files = done.text.splitlines()
    assert re.match("Error: the disk of .* is full", first), done.text
    assert "1" in files and "2" not in files


ANSWERS = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import test_eval as t
from helpers.run import run_dir, writing
writing()
server = t.FakeServer()
jobs = t.plan_jobs([t.Plan("a", n=60)], t.TASK, t.PROMPTS, "model")
t.sample(jobs, run_dir("eval", "samples.jsonl"), server.url, "m", t.Config(in_flight=2), 100)
"""


@pytest.mark.slow
def test_a_full_disk_while_answers_are_saved(world):
    """Of 07: what was saved before stays, and is read again."""
    path = world.folder / "answers.py"
    path.write_text(ANSWERS.format(root=str(ROOT), tests=str(ROOT / "tests")))
    keep = f"cp -r {world.run}/eval {world.folder}/kept; exit $code"
    done = world.small_disk(f"{sys.executable} {path}; code=$?; {keep}", size="32k")
    assert done.returncode == 1 and re.search("disk of .* is full", done.text), done.text
    assert "Traceback" not in done.text
    saved = (world.folder / "kept/samples.jsonl").read_text().splitlines()
    assert saved and all(json.loads(line)["text"] for line in saved[:-1])


FIGURE = """
from helpers import style
fig, ax = style.figure(9, 9)
ax.imshow([[i * j % 97 for i in range(400)] for j in range(400)])
style.finish(fig, "00_x")
"""


@fault("disk of .* is full", r"old\n00_x.png\n")
def a_full_disk_while_a_figure_is_saved(world):
    """The figure of the last run stays, and no half of this one."""
    path = world.folder / "figure.py"
    path.write_text(FIGURE)
    yield
    yield world.small_disk(
        f"mkdir {world.run}/figures; cd {world.run}/figures; echo old > 00_x.png; "
        f"PYTHONPATH={ROOT} MPLBACKEND=agg {sys.executable} {path}; code=$?; "
        "cat 00_x.png; ls -A; exit $code", size="16k")


@fault("notebooks is a file and in the way")
def a_file_where_a_folder_belongs(world):
    world.notebooks()
    world.file("notebooks")
    yield
    yield world.run_all("01")


@fault("times.json is a folder and in the way", r"== 01_step: \d")
def a_folder_where_a_file_belongs(world):
    world.notebooks()
    (world.run / "times.json").mkdir()
    yield
    yield world.run_all("01")


@pytest.mark.parametrize("name, act", [
    ("a.json", lambda path: run.write_text(path, "1")), ("data", lambda path: fill(path)),
    (".lock", lambda path: run.RunLock().take("me"))])
def test_what_is_in_the_way_is_named(world, name, act):
    if name == "data":
        world.file(name)
    else:
        (world.run / name).mkdir()
    with pytest.raises(ValueError, match=f"run/{name} is a (file|folder) and in the way"):
        act(world.run / name)
    assert [path.name for path in world.run.iterdir() if path.name != ".lock"] == \
        [name] * (name != ".lock")


def fill(path):
    with run.atomic_dir(path) as beside:
        (beside / "a").write_text("1")


@pytest.mark.parametrize("text, says", [
    ('{"seconds": {"01_', "is unreadable"), ("\xff", "is unreadable"),
    ('{"seconds": 3}', "has another form"), ('{"seconds": {}, "peak_gib": "much"}', "has another form")])
def test_a_broken_times_json_is_said_and_costs_nothing(world, text, says):
    world.notebooks()
    (world.run / "times.json").write_bytes(text.encode("latin-1"))
    done = world.run_all("01")
    assert done.returncode == 0, done.text
    assert f"times.json {says} and counts as absent" in done.text
    assert run.read_json(world.run / "times.json")["seconds"].keys() == {"01_step"}


@fault("old", code=0)
def killed_while_writing(world):
    """Half a file, or half a folder, has another name."""
    yield
    world.python("""
        import os, signal
        from helpers.run import *
        write_text(run_dir("a"), "old")
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        write_text(run_dir("a"), "n" * 100000)
        """)
    yield world.call((world.run / "a").read_text)


# -- One writer ---------------------------------------------------------------------------------

@fault("is being written by", r"process \d+", "set RUN_DIR")
def a_second_script(world):
    first = world.start(sys.executable, "-c", WRITER + "time.sleep(60)")
    world.until(first, "writes")
    yield
    start = time.monotonic()
    second = world.python(WRITER)
    assert str(first.pid) in second.text and "writes" not in second.text
    assert time.monotonic() - start < 20 and first.poll() is None
    first.kill()
    yield second


@fault("is being written by", r"process \d+", intact=("data",))
def run_all_beside_a_script(world):
    world.notebooks()
    world.data()
    first = world.start(sys.executable, "-c", WRITER + "time.sleep(60)")
    world.until(first, "writes")
    yield
    second = world.run_all("--fresh", "01", "03")
    first.kill()
    yield second


@fault("is being written by run_all.sh, 03_step")
def a_script_beside_run_all(world):
    world.notebooks(n03="import time; print('busy', flush=True); time.sleep(60)")
    first = world.start("./run_all.sh", "02", "03", cwd=world.project)
    world.until(first, "busy")
    yield
    second = world.python(WRITER)
    first.terminate()
    first.communicate()
    yield second


@fault("is being written by run_all.sh, 03_step")
def the_same_run_directory_by_another_name(world):
    world.notebooks(n03="import time; print('busy', flush=True); time.sleep(60)")
    first = world.start("./run_all.sh", "03", cwd=world.project)
    world.until(first, "busy")
    (world.folder / "link").symlink_to(world.run)
    yield
    second = world.python(WRITER, RUN_DIR=str(world.folder / "link"))
    first.terminate()
    first.communicate()
    yield second


@fault("is being written by", gone=("data",))
def the_lock_file_was_deleted(world):
    """By somebody who thought that it was left over."""
    first = world.start(sys.executable, "-c", WRITER + "time.sleep(60)")
    world.until(first, "writes")
    (world.run / ".lock").unlink()
    yield
    second = world.python(WRITER)
    first.kill()
    yield second


@fault("writes", code=0)
def the_holder_was_killed(world):
    first = world.start(sys.executable, "-c", WRITER + "time.sleep(60)")
    world.until(first, "writes")
    yield
    first.kill()
    first.wait()
    yield world.python(WRITER)


@fault("writes", code=0)
def another_run_directory_at_the_same_time(world):
    first = world.start(sys.executable, "-c", WRITER + "time.sleep(60)")
    world.until(first, "writes")
    yield
    second = world.python(WRITER, RUN_DIR=str(world.folder / "other"))
    first.kill()
    yield second


@fault(r"child: 0 writes", code=0)
def an_earlier_notebook_run_by_a_cell(world):
    """`catch_up` starts a child that writes while its parent holds the lock."""
    yield
    yield world.python(WRITER + textwrap.dedent(f"""
        import os, subprocess
        from helpers.run import _lock
        done = subprocess.run([sys.executable, "-c", {WRITER!r}], text=True, capture_output=True,
                              env={{**os.environ, **_lock.passed_on()}})
        print("child:", done.returncode, done.stdout, done.stderr)
        """))


def test_a_kernel_that_is_merely_open_holds_nothing(world):
    """And one whose run directory is being written does not run its cells."""
    import nbformat
    sys.path.insert(0, str(ROOT / "tools"))
    from notebooks import Client
    cells = [WRITER, "print('idle before this')", "print('must not run')", "print('runs again')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    others = []

    class Watched(Client):
        async def async_execute_cell(self, cell, index, **options):
            if index == 1:  # the kernel is open and idle: another may write
                others.append(world.python(WRITER))
            if index == 2:
                others.append(world.start(sys.executable, "-c", WRITER + "time.sleep(60)"))
                world.until(others[1], "writes")
            if index == 3:
                others[1].kill()
                others[1].wait()
            return await super().async_execute_cell(cell, index, **options)

    Watched(notebook, allow_errors=True, timeout=60, kernel_name="python3",
            resources={"metadata": {"path": str(ROOT)}}).execute()
    assert others[0].returncode == 0, others[0].text
    said = [cell.outputs[0].get("text") or cell.outputs[0].evalue for cell in notebook.cells]
    assert said[:2] + said[3:] == ["writes\n", "idle before this\n", "runs again\n"]
    assert "is being written by" in said[2] and str(others[1].pid) in said[2]


# -- --fresh ------------------------------------------------------------------------------------

def everything(world):
    """One file of everything that the series leaves, and two of somebody else."""
    for path in ("setup.json", "scripts/vm.sh", "data/meta.json", "data/samples.json",
                 "cache/rendered/ids.npy", "train/recipe.json",
                 "jax_cache/a", "merged/config.json", "adapter/a", "merged_text/a", "merge.json",
                 "model_card.md", "serve/options.json", "bench/1.json", "bench/results.csv",
                 "bench/partial/a", "bench/client.log", "eval/comparison.json", ".merged.partial/a",
                 ".merge.json.4711", "figures/03_loss.png", "figures/06_curve.png",
                 "notebooks/05_step.ipynb", "bench/other_machine.csv", "notes.txt"):
        world.file(path)
    (world.run / "serve/options.json").write_text("{}")


NO_FURTHER = "import helpers; raise helpers.UserError('no further')"
ALL = ("data", "cache", "train", "jax_cache", "merged", "adapter", "merged_text", "merge.json",
       "model_card.md", "serve", "bench", "eval", "figures", "notebooks", "setup.json", "scripts",
       "notes.txt")


@fault("07 comes after 03", intact=ALL)
def fresh_with_a_range_upside_down(world):
    world.notebooks()
    everything(world)
    yield
    yield world.run_all("--fresh", "07", "03")


@fault("no notebook 99", intact=ALL)
def fresh_with_a_number_that_is_none(world):
    world.notebooks()
    everything(world)
    yield
    yield world.run_all("--fresh", "05", "99")


@fault("--fresh", code=2, intact=ALL)
def fresh_with_a_word_that_is_none(world):
    world.notebooks()
    everything(world)
    yield
    yield world.run_all("--fresh", "5")


@fault("04 needs .*recipe.json", "03", "Nothing was deleted",
       intact=("merged", "merge.json", "data"))
def fresh_without_what_the_range_reads(world):
    world.notebooks()
    everything(world)
    (world.run / "train/recipe.json").unlink()
    yield
    yield world.run_all("--fresh", "04", "07")


@fault("07 needs .*serve/options.json", "05 writes", "run_all.sh 05 07", "Nothing was deleted",
       intact=("eval", "merged", "figures"))
def fresh_on_a_run_that_was_copied_by_half(world):
    world.notebooks()
    everything(world)
    (world.run / "serve/options.json").unlink()
    yield
    yield world.run_all("--fresh", "07")


@fault("05 needs .*merged", "04 writes", "Nothing was deleted", intact=("serve", "bench", "eval"))
def fresh_without_the_model(world):
    world.notebooks()
    everything(world)
    shutil.rmtree(world.run / "merged")
    yield
    yield world.run_all("--fresh", "05", "07")


@fault("deleted .*serve.*eval", "no further",
       intact=tuple(set(ALL) - {"serve", "bench", "eval", "figures", "notebooks"})
       + ("bench/other_machine.csv", "figures/03_loss.png"),
       gone=("serve", "bench/1.json", "bench/partial", "bench/client.log", "eval",
             "figures/06_curve.png", "bench/results.csv"))
def fresh_on_the_serving_machine(world):
    world.notebooks(n05=NO_FURTHER)
    everything(world)
    yield
    yield world.run_all("--fresh", "05", "07")


@fault("deleted data", "link.*stays", code=0, gone=("data",), intact=("elsewhere",))
def fresh_on_a_part_that_is_a_link(world):
    world.notebooks("02")
    world.file("elsewhere/meta.json")
    (world.run / "data").symlink_to(world.run / "elsewhere")
    yield
    yield world.run_all("--fresh", "02")


@fault("deleted .*data.*train", "no further", intact=("notes.txt", "bench/other_machine.csv"),
       gone=tuple(set(ALL) - {"bench", "figures", "notebooks", "notes.txt"})
       + (".merged.partial", ".merge.json.4711", "figures/03_loss.png", "notebooks/05_step.ipynb"))
def fresh_takes_everything(world):
    world.notebooks(n01=NO_FURTHER)
    everything(world)
    yield
    yield world.run_all("--fresh")


@pytest.mark.series
@pytest.mark.skipif(not (FINISHED / "notebooks").is_dir(), reason=f"no run in {FINISHED}")
def test_the_table_of_what_notebooks_write_is_complete(monkeypatch):
    monkeypatch.setenv("RUN_DIR", str(FINISHED))
    sys.path.insert(0, str(ROOT / "tools"))
    import series
    owned = [path.resolve() for path in series.leftovers([f"{n:02d}" for n in range(30)])]
    others = {"times.json", ".lock", "notebooks/kernel.log"}
    unknown = [path for path in FINISHED.rglob("*") if path.is_file()
               and not any(path == one or one in path.parents for one in owned)
               and str(path.relative_to(FINISHED)) not in others and "pytest" not in path.name]
    assert not unknown


# -- Signals ------------------------------------------------------------------------------------

BUSY = """
import subprocess, time
child = subprocess.Popen(["sleep", "61"])
print("busy", flush=True)
while True:
    time.sleep(0.1)
"""


def signalled(world, number, group):
    world.notebooks(n03=BUSY)
    world.file("notebooks/02_step.ipynb")  # of an earlier run
    child = world.start("./run_all.sh", "03", cwd=world.project)
    world.until(child, "busy")
    yield
    start = time.monotonic()
    (os.killpg if group else os.kill)(child.pid, number)
    outcome = world.ended(child)
    assert time.monotonic() - start < 5
    assert len(outcome.text.strip().splitlines()) == 1, outcome.text
    assert not world.left()
    yield outcome


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    for group in (False, True):
        @fault(f"ended by {number.name}", code=128 + number, intact=("notebooks/02_step.ipynb",))
        def act(world, number=number, group=group):
            yield from signalled(world, number, group)
        act.__name__ = f"{number.name}_to_{'the_group' if group else 'run_all'}"


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    @fault(rf"\Arun_all: ended by {number.name} while setting up[^\n]*\n\Z", code=128 + number)
    def act(world, number=number):
        world.notebooks()
        child = world.start("./run_all.sh", "02", cwd=world.project, SETUP_SECONDS="60")
        time.sleep(1)
        yield
        child.send_signal(number)
        yield world.ended(child, 5)
    act.__name__ = f"{number.name}_while_setting_up"


@fault(r"\A\Z", code=-signal.SIGKILL)
def run_all_killed_while_setting_up(world):
    """What it has started does not stay."""
    world.notebooks()
    child = world.start("./run_all.sh", "02", cwd=world.project, SETUP_SECONDS="60")
    time.sleep(1)
    yield
    child.kill()
    yield world.ended(child, 5)


@fault("ended by SIGTERM", code=143)
def sigterm_while_the_kernel_starts(world):
    world.notebooks(n03=BUSY)
    child = world.start("./run_all.sh", "03", cwd=world.project)
    world.until(child, "== 03")
    yield
    child.terminate()
    yield world.ended(child, 10)


@fault("ended by SIGPIPE", "codes 141 0", code=0)
def the_reader_of_the_output_leaves(world):
    """`| head`, or a `tee` that was killed."""
    world.notebooks(n03=BUSY.replace("time.sleep(0.1)", "print('more', flush=True); time.sleep(0.1)"))
    yield
    done = world.ended(world.start("bash", "-c", "./run_all.sh 03 2>said | head -3; "
                                   "echo codes ${PIPESTATUS[@]}; cat said", cwd=world.project))
    assert len((world.project / "said").read_text().strip().splitlines()) == 1, done.text
    yield done


@fault("finished", "ended by SIGTERM", code=143)
def a_kernel_that_is_finishing_a_copy_gets_its_time(world):
    world.notebooks(n03="""
        import os, signal, sys, time
        def last(number, frame):
            time.sleep(3)  # longer than a kernel without a handler would get
            os.write(2, b"finished")
            open(os.environ["RUN_DIR"] + "/copied", "w").close()
            os._exit(0)
        signal.signal(signal.SIGTERM, last)
        print("busy", flush=True)
        while True:
            time.sleep(0.1)
        """)
    child = world.start("./run_all.sh", "03", cwd=world.project)
    world.until(child, "busy")
    yield
    child.terminate()
    outcome = world.ended(child, 25)
    assert (world.run / "copied").exists()
    outcome.text += (world.run / "notebooks/kernel.log").read_text()
    yield outcome


@fault("busy", code=0, slow=True)
def a_hangup_under_nohup_is_ignored(world):
    world.notebooks(n03="import time; print('busy', flush=True); time.sleep(3)")
    child = world.start("nohup", "./run_all.sh", "03", cwd=world.project)
    world.until(child, "== 03")
    yield
    os.kill(child.pid, signal.SIGHUP)
    yield world.ended(child)


@fault(code=-signal.SIGKILL)
def the_runner_killed(world):
    """It cannot clean up; the kernel and what the kernel started end all the same."""
    world.notebooks(n03=BUSY)
    child = world.start("./run_all.sh", "03", cwd=world.project)
    world.until(child, "busy")
    yield
    child.kill()
    end = time.monotonic() + 10
    while world.left() and time.monotonic() < end:
        time.sleep(0.2)
    yield world.ended(child)


@fault("the kernel died")
def the_kernel_killed(world):
    world.notebooks(n03=BUSY.replace("busy", "busy in', os.getpid(), '").replace('"', "'")
                    .replace("import subprocess", "import os, subprocess"))
    child = world.start("./run_all.sh", "03", cwd=world.project)
    pid = int(world.until(child, "busy").split()[2])
    yield
    os.kill(pid, signal.SIGKILL)
    yield world.ended(child)


@fault("interrupted", "run this again", code=-signal.SIGINT)
def a_script_interrupted_that_holds_nothing(world):
    """As 00 and 11 do: they say what this machine is, and write nothing that another needs."""
    child = world.start(sys.executable, "-c", "import time, helpers; helpers.opening.start()\n"
                        "print('goes on', flush=True); time.sleep(60)")
    world.until(child, "goes on")
    yield
    child.send_signal(signal.SIGINT)
    yield world.ended(child)


@fault("interrupted", "run this again", code=-signal.SIGINT)
def a_script_interrupted(world):
    child = world.start(sys.executable, "-c", WRITER + "time.sleep(60)")
    world.until(child, "writes")
    yield
    child.send_signal(signal.SIGINT)
    yield world.ended(child)


@fault("the kernel died", "SIGSEGV")
def a_kernel_that_crashes(world):
    world.notebooks(n03="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    yield
    yield world.run_all("03")


@fault("a line", "1 notebooks", code=0)
def a_terminal_that_is_not_utf8(world):
    world.notebooks(n03="from helpers.run import writing; writing(); print('a line → 日本')")
    yield
    assert world.ended(world.start(sys.executable, "03_step.py", cwd=world.project,
                                   PYTHONIOENCODING="ascii")).returncode == 0
    yield world.run_all("03", PYTHONIOENCODING="latin-1")


@fault("the kernel died", "Unknown flag.*nonsense", "kernel.log")
def a_kernel_that_says_why_it_dies(world):
    world.notebooks(n03="import jax; jax.devices()")
    world.file("notebooks/kernel.log", "of an earlier run\n")
    yield
    yield world.run_all("03", XLA_FLAGS="--xla_nonsense=1")


# -- Environments -------------------------------------------------------------------------------

@pytest.mark.parametrize("text, value", [("7", 7), (" -1 ", -1), ("", 3), ("abc", None)])
def test_a_number_in_the_environment(monkeypatch, text, value):
    """TILE_SIZE, MAX_STEPS."""
    monkeypatch.setenv("TILE_SIZE", text)
    if value is not None:
        assert run.env("TILE_SIZE", 3) == value
    else:
        with pytest.raises(ValueError, match="TILE_SIZE=abc is not a number.* such as 3"):
            run.env("TILE_SIZE", 3)


@fault("cannot be written", "Set RUN_DIR")
def a_read_only_folder_for_a_notebook_that_holds_no_lock(world):
    """00 and 11: said before the work whose figures have no place."""
    yield
    yield world.small_disk(f"mount -o remount,ro {world.run}; "
                           f"{sys.executable} -c 'import helpers; helpers.opening.start()'")


@fault("JAX_PLATFORMS=cuda", "Unset it")
def a_platform_that_is_not_here(world):
    yield
    yield world.python("from helpers import machine; machine(devices=1)", JAX_PLATFORMS="cuda")


@fault("no_such_package", "rm -rf .venv")
def a_package_of_the_environment_is_missing(world):
    world.notebooks()
    (world.project / "helpers/__init__.py").write_text("import no_such_package\n")
    yield
    yield world.run_all("01")


@fault("no more than 24 files may be open", "shell")
def a_shell_that_allows_too_few_open_files(world):
    world.notebooks()
    yield
    yield world.ended(world.start("bash", "-c", "ulimit -n 24; ./run_all.sh 01", cwd=world.project))


@fault("no more than 10 files may be open", "shell")
def too_few_open_files_for_setup(world):
    shutil.copy(ROOT / "setup.sh", world.run)
    yield
    yield world.ended(world.start("bash", "-c", "ulimit -n 10; ./setup.sh train", cwd=world.run))


@fault("no more than 24 files may be open", "shell")
def too_few_open_files_for_a_script(world):
    yield
    command = f"ulimit -n 24; {sys.executable} -c 'import helpers; helpers.opening.start()'"
    yield world.ended(world.start("bash", "-c", command))


@fault("1 notebooks", code=0)
def a_limit_of_open_files_that_can_be_lifted(world):
    world.notebooks()
    yield
    yield world.ended(world.start("bash", "-c", "ulimit -Sn 24; ./run_all.sh 01",
                                  cwd=world.project))


@fault("Error: too many open files: `ulimit -n` is 300", "ulimit -n 4096")
def a_cell_that_runs_out_of_open_files(world):
    world.notebooks(n02='''
        from helpers.run import writing
        writing()

        # %%
        files = [open("/dev/null") for _ in range(400)]
        ''')
    yield
    yield world.ended(world.start("bash", "-c", "ulimit -n 300; ./run_all.sh 02",
                                  cwd=world.project))


@fault("Python 3.12.1", "3.11", "rm -rf .venv")
def an_environment_of_another_python(world):
    world.file(".venv/bin/python", "#!/bin/sh\ncase $* in --version) echo Python 3.12.1 ;; "
               "*version_info*) exit 1 ;; esac\n").chmod(0o755)
    shutil.copy(ROOT / "setup.sh", world.run)
    yield
    yield world.ended(world.start("./setup.sh", "train", cwd=world.run))


SLOW_PIP = """#!/bin/sh
case $* in
*"-m pip install"*) echo begins >>log; sleep 1; echo ends >>log ;;
*sys.prefix*) echo .venv ;;
*hardware.py) echo ACCELERATOR= ;;
esac
"""


def test_two_installations_at_once_wait_for_each_other(world):
    """The opening cells of two notebooks, for example."""
    world.file(".venv/bin/python", SLOW_PIP).chmod(0o755)
    shutil.copytree(ROOT / "requirements", world.run / "requirements")
    shutil.copy(ROOT / "setup.sh", world.run)
    both = [world.start("./setup.sh", "train", cwd=world.run) for _ in range(2)]
    done = [world.ended(child, 60) for child in both]
    assert [one.returncode for one in done] == [0, 0], done
    assert sum("waiting for it" in one.text for one in done) == 1
    lines = (world.run / "log").read_text().split()
    assert lines == ["begins", "ends"] * (len(lines) // 2)


# -- Servers ------------------------------------------------------------------------------------

@fault("1 notebooks", code=0)
def a_server_of_somebody_else_is_left_alone(world):
    """`run_all.sh 01` does not end what a notebook left running."""
    world.notebooks()
    sleeper = world.start("sleep", "62")
    world.file("serve/server.json", json.dumps({"pid": sleeper.pid}))
    yield
    done = world.run_all("01")
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    yield done


def test_a_server_is_known_after_the_clock_was_set(monkeypatch):
    """A machine that finds the right time late: the boot seems to have been an hour earlier."""
    me = {"pid": os.getpid(), "born": server._born(psutil.Process())}
    before = psutil.boot_time()
    for module in (psutil, sys.modules["psutil._pslinux"]):
        monkeypatch.setattr(module, "boot_time", lambda: before - 3600)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert server._lives(me) and not server._lives({**me, "born": me["born"] - 3600})


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_a_run_directory_copied_or_moved_while_its_server_runs(world, how):
    """A copy does not end the server of the original; a moved one knows its own."""
    first = world.folder / "first"
    sleeper = world.start("sleep", "63")
    record = {name: kind() for name, kind in server.RECORD.items()}
    record |= {"pid": sleeper.pid, "born": server._born(psutil.Process(sleeper.pid)),
               "mark": str(first / "serve/server.json"), "model": "m", "engine": "cpu"}
    run.write_json(first / "serve/server.json", record)
    world.run.rmdir()
    (shutil.copytree if how == "copied" else shutil.move)(first, world.run)
    stop = [sys.executable, "-m", "serving.server", "stop"]
    done = world.ended(world.start(*stop))
    assert done.returncode == 0 and (sleeper.poll() is None) == (how == "copied"), done.text
    assert ("is a copy of" in done.text) == (how == "copied")
    if how == "copied":
        assert "stopped" in world.ended(world.start(*stop, RUN_DIR=str(first))).text
    assert sleeper.wait(5) == -signal.SIGTERM


# -- The judge ----------------------------------------------------------------------------------

JUDGE = """
from verilog import judge
problem = judge.load_problems("data/tiny_eval")[0]
answer = problem.reference.replace("RefModule", "TopModule")
print(judge.judge(problem, answer).category)
"""


@fault("TMPDIR", "MiB")
def a_full_disk_for_the_judge(world):
    """The compiler would find half a file and say "syntax error": a wrong score."""
    yield
    yield world.small_disk(f"TMPDIR={world.run} {sys.executable} -c '{JUDGE}'", size="24k")


@pytest.mark.parametrize("command", ["kill -9 $$", "sh -c 'kill -9 $$'; exit $?"])
def test_a_simulator_that_was_killed_is_nobodys_mistake(tmp_path, command):
    """As the kernel does where memory runs out."""
    with pytest.raises(ValueError, match="killed from outside"):
        judge.run_limited(["sh", "-c", command], tmp_path, judge.Limits())


ENDLESS = """
from verilog import judge
problem = judge.load_problems("data/tiny_eval")[0]
endless = problem.reference.replace("RefModule", "TopModule").replace(
    "endmodule", "initial forever begin end endmodule")
print("judges", flush=True)
judge.judge(problem, endless)
"""


def test_a_judge_that_is_killed_leaves_no_simulator(world):
    if not judge.tether():
        pytest.skip("this machine has no setpriv")
    child = world.start(sys.executable, "-c", ENDLESS)

    def simulators():
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "vvp" and process.ppid() in (child.pid, 1):
                    found.append(process)
        return found
    end = time.monotonic() + 30
    while not (found := [one for one in simulators() if one.ppid() == child.pid]):
        assert time.monotonic() < end and child.poll() is None
        time.sleep(0.02)
    child.kill()
    psutil.wait_procs(found, timeout=5)
    assert not any(process.is_running() for process in found)


# -- Messages -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def read_rows():
    return data.read_rows


@pytest.mark.parametrize("harm", ["cut", "noise", "no gzip", "middle"])
def test_a_damaged_archive_is_one_line(tmp_path, read_rows, harm):
    whole = gzip.compress("\n".join(f'{{"prompt": "{i * 7919}"}}' for i in range(3000)).encode())
    damaged = {"cut": whole[:len(whole) // 2], "noise": whole[:12] + bytes(99), "no gzip": b"{}",
               "middle": whole[:400] + b"\xff" * 50 + whole[450:]}[harm]
    (tmp_path / "a.jsonl.gz").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read") as raised:
        read_rows(str(tmp_path / "a.jsonl.gz"))
    assert len(str(raised.value).splitlines()) == 1


def test_odd_lines_are_rows_or_counted(tmp_path, read_rows):
    """A byte-order mark costs no row; absurd nesting or numbers are lines that are no JSON."""
    deep = "[" * 200_000 + "]" * 200_000
    long = '{"prompt": ' + "9" * 5000 + "}"
    text = '\ufeff{"prompt": 1}\n' + deep + "\n" + long + '\n{"prompt": 2}\n'
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    rows = read_rows(str(tmp_path))
    assert rows == [{"prompt": 1}, deep, long, {"prompt": 2}]


@pytest.mark.parametrize("name, path", [
    ("/data/gone", True), ("./gone", True), ("~/gone", True), ("a/b/gone", True),
    ("assets/gone", True), ("google/gemma-4-31B-it", False), ("zhuyaoyu/CodeV-R1-dataset", False),
    ("gs://bucket/a/b", False)])
def test_what_is_clearly_a_path_is_never_asked_of_the_hub(name, path):
    assert run.local_path(name) == path


@pytest.mark.parametrize("name", ["/data/gone/base", "assets/gone", "./gone"])
def test_a_base_that_is_gone_is_one_line(name, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="no such directory") as raised:
        chat.load_tokenizer(name)
    assert name in str(raised.value) and len(str(raised.value).splitlines()) == 1


CONFIG = json.loads((ROOT / "assets/tiny_gemma4/config.json").read_text())


@pytest.mark.parametrize("config, says", [
    ([CONFIG], "is a JSON list and no object"), (None, "is a JSON NoneType and no object"),
    ({**CONFIG, "text_config": [1]}, "not a Gemma 4's"),
    ({key: value for key, value in CONFIG.items() if key != "hidden_size"}, "hidden_size"),
    ({**CONFIG, "layer_types": 6}, "layer_types"),
    ({**CONFIG, "rope_parameters": [1]}, "rope_parameters"),
    ({**CONFIG, "rope_parameters": {"full_attention": 3}}, "rope_parameters")])
def test_a_config_that_describes_no_model_is_one_line(tmp_path, config, says):
    from helpers import gemma
    base = shutil.copytree(ROOT / "assets/tiny_gemma4", tmp_path / "base")
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says) as raised:
        gemma.config_from_hf(base)
    assert len(str(raised.value).splitlines()) == 1
    if not isinstance(config, dict):
        with pytest.raises(ValueError, match=says):
            chat.load_tokenizer(base)


@fault("here/runs", code=0)
def a_relative_run_dir_is_relative_to_where_one_stands(world):
    world.notebooks(n01="import os; print(os.environ['RUN_DIR'])")
    here = world.folder / "here"
    here.mkdir()
    yield
    done = world.ended(world.start(world.project / "run_all.sh", "01", cwd=here, RUN_DIR="runs/x"))
    assert (here / "runs/x/notebooks/01_step.ipynb").exists()
    yield done


@pytest.mark.parametrize("script", ["run_tests.sh", "first_hour.sh", "update_notebooks.sh"])
@pytest.mark.parametrize("given, meant", [
    ("runs/x", "{here}/runs/x"), ("/a/b", "/a/b"), ("~/b", "~/b")])
def test_a_relative_run_dir_of_every_script(world, script, given, meant):
    """They change into the repository first; a Python that says what it is given."""
    shutil.copy(ROOT / script, world.run)
    world.file(".venv/bin/python", '#!/bin/sh\necho "RUN_DIR=$RUN_DIR" >&2\n').chmod(0o755)
    for name in ("setup.sh", "run_all.sh"):
        world.file(name, "#!/bin/sh\n").chmod(0o755)
    here = world.folder / "here"
    here.mkdir()
    done = world.ended(world.start(world.run / script, cwd=here, HOME=str(here), RUN_DIR=given))
    assert f"RUN_DIR={meant.format(here=here)}\n" in done.text


@fault("ein .HOME 'Lauf' ü 日本", code=0)
def folders_with_spaces_and_letters(world):
    world.project = world.folder / "mein Projekt"
    world.notebooks("01", n01="""
        from helpers.run import *
        writing(); write_json(run_dir("ein ü", "a b.json"), 1); print(run_dir())
        """)
    yield
    yield world.run_all("01", RUN_DIR=str(world.folder / "ein $HOME 'Lauf' ü 日本"))


@fault("1 notebooks", code=0)
def a_home_that_cannot_be_written(world):
    world.notebooks("01")
    yield
    yield world.run_all("01", HOME="/proc/nobody")


@fault("RUN_DIR=.*/link cannot be made", "folder of yours")
def run_dir_is_a_link_to_nothing(world):
    (world.folder / "link").symlink_to("/nowhere/at/all")
    yield
    yield world.python("from helpers.run import run_dir; run_dir()",
                       RUN_DIR=str(world.folder / "link"))


@pytest.mark.parametrize("name", [".", "..", "/", "~"])
def test_a_folder_that_holds_more_than_a_run_is_refused(world, name):
    """`--fresh` would take the repository's own data, or somebody's."""
    world.notebooks("02")
    for path in ("data/tiny/train.jsonl.gz", "notebooks/02_step.ipynb"):
        (world.project / path).parent.mkdir(parents=True)
        (world.project / path).write_text("ours")
    before = content(world.project)
    done = world.run_all("--fresh", "02", RUN_DIR=name, HOME=str(world.project))
    assert done.returncode == 1 and "folder of its own" in done.text
    after = content(world.project)
    assert {path: after.get(path) for path in before} == before


@fault("home/runs", code=0)
def a_run_dir_below_home(world):
    world.notebooks("01", n01="from helpers.run import *; writing(); print(run_dir())")
    yield
    done = world.run_all("01", RUN_DIR="~/runs", HOME=str(world.folder / "home"))
    assert (world.folder / "home/runs/notebooks").is_dir()
    yield done


@fault("^inside$", code=0)
def a_run_dir_in_the_repository_stays_relative(world):
    world.notebooks(n01="import os; print({'runs/x': 'inside'}.get(os.environ['RUN_DIR']))")
    yield
    yield world.ended(world.start("../run_all.sh", "01", cwd=world.project / "tools",
                                  RUN_DIR="../runs/x"))


# -- The notebooks' own tool --------------------------------------------------------------------

def tool(world, *words):
    return world.ended(world.start(sys.executable, "tools/notebooks.py", *words, cwd=world.project))


EXECUTED = {}  # {name of a notebook: its text}, made once


def stored(world):
    """The project with executed notebooks."""
    world.notebooks("02", "03")
    if not EXECUTED:
        assert tool(world, "--execute").returncode == 0
        EXECUTED.update((path.name, path.read_text())
                        for path in (world.project / "notebooks").iterdir())
        shutil.rmtree(world.project / "notebooks")
    for name, text in EXECUTED.items():
        world.file(f"stored/{name}", text)
    (world.project / "notebooks").symlink_to(world.run / "stored")


@fault(r"03_step\.py, line \d+, does not parse", "no notebook was changed", intact=("stored",),
       slow=True)
def a_source_that_does_not_parse(world):
    stored(world)
    (world.project / "03_step.py").write_text(HEADER + "# %%\ndef (:\n")
    (world.project / "02_step.py").write_text(HEADER + "# %%\nprint(2)\n")
    yield
    yield tool(world)


@fault(r"03_step\.py, line \d+, does not parse", "no notebook was changed", "the same: True")
def another_address_where_a_source_does_not_parse(world):
    world.notebooks("02", "03")
    (world.project / "02_step.py").write_text(HEADER + "# %%\n# github.com/OWNER/gemma4-on-tpu\n")
    (world.project / "03_step.py").write_text(HEADER + "# %%\ndef (:\n")
    parts = [world.project / name for name in ("02_step.py", "03_step.py", "tools/opening.txt")]
    before = [content(path) for path in parts]
    yield
    done = tool(world, "--repository", "https://github.com/ours/copy")
    done.text += f"the same: {[content(path) for path in parts] == before}"
    yield done


@fault(r"03_step\.ipynb is unreadable", "missing: .*03_step", intact=("stored",))
def a_stored_notebook_half_written(world):
    stored(world)
    path = world.run / "stored/03_step.ipynb"
    path.write_text(path.read_text()[:150])
    yield
    yield tool(world, "--check")


@fault(r"03_step\.ipynb is unreadable", "wrote .*03_step", code=0)
def a_stored_notebook_half_written_is_made_again(world):
    stored(world)
    path = world.run / "stored/03_step.ipynb"
    path.write_text(path.read_text()[:150])
    yield
    yield tool(world)


@fault(r"run/notebooks/03_step\.ipynb is unreadable", "== 03_step", code=0)
def an_executed_copy_half_written_is_run_again(world):
    world.notebooks("03")
    world.file("notebooks/03_step.ipynb", '{"cells": [')
    yield
    yield tool(world, "--execute")


# -- Results that are stored in the repository: 11 and 12 ----------------------------------------

def small_plan():
    from appendix import nca
    return nca, nca.Plan(text_steps=2, first_steps=2, rows_per_step=2, tokens_per_step=256, every=2,
                         documents=2_000, validation=1, model=(("num_layers", 1), ("hidden_dim", 32)))


def points(nca, plan, arm="scratch", seed=0, steps=None):
    """A stored run with invented losses, as text."""
    import pandas as pd
    steps = np.arange(1, (steps or plan.text_steps) + 1)
    return pd.DataFrame({"arm": arm, "seed": seed, "stage": "text", "step": steps,
                         "text_tokens": steps, "all_tokens": steps, "train_loss": 1.0,
                         "val_loss": 1 / steps, "seconds": 1.0, "recipe": nca.recipe(plan),
                         "jax": "1", "flax": "1", "tunix": "1", "made": "2026-01-01"},
                        columns=nca.COLUMNS).to_csv(index=False)


@pytest.mark.parametrize("harm", [
    lambda text: text[:len(text) // 2], lambda text: "", lambda text: text[:-1],
    lambda text: text.replace("val_loss", "loss"), lambda text: text + '"', lambda text: "\0\xff",
    lambda text: text.replace("scratch", "", 1)])
def test_a_damaged_result_of_12_is_named_and_never_taken_for_one(tmp_path, harm, capsys):
    nca, plan = small_plan()
    whole = points(nca, plan)
    (tmp_path / "scratch-0.csv").write_text(whole)
    assert len(nca.stored(tmp_path, plan)) == 2 and nca.is_made(tmp_path / "scratch-0.csv", plan)
    (tmp_path / "scratch-0.csv").write_bytes(harm(whole).encode("latin-1"))
    with pytest.raises(ValueError, match=r"scratch-0\.csv is damaged .*git checkout") as raised:
        nca.stored(tmp_path, plan)
    assert len(str(raised.value).splitlines()) == 1
    assert not nca.is_made(tmp_path / "scratch-0.csv", plan)
    assert "counts as absent" in capsys.readouterr().out


def test_a_result_of_12_that_ends_early_is_no_result(tmp_path, capsys):
    """Its last loss would count as the run's."""
    nca, plan = small_plan()
    (tmp_path / "nca-0.csv").write_text(points(nca, plan, "nca", steps=1))
    table = nca.stored(tmp_path, plan)
    assert table.empty and ("nca", 0) in nca.missing(table, plan)
    assert "nca-0.csv ends at step 1 and is left out" in capsys.readouterr().out
    assert not nca.is_made(tmp_path / "nca-0.csv", plan)


@pytest.mark.parametrize("harm", ["half", "empty", "text", "another"])
def test_a_damaged_state_counts_as_absent_and_is_said(tmp_path, harm, capsys):
    from appendix import pretrain
    tree, path = {"a": np.ones((40, 40)), "b": np.zeros(3)}, tmp_path / "state.npz"
    pretrain.save_state(path, tree, [{"step": 1}])
    assert pretrain.load_state(path, tree)[1] == [{"step": 1}]
    if harm == "another":
        tree["b"] = np.zeros(4)
    else:
        path.write_bytes({"half": path.read_bytes()[:3000], "empty": b"", "text": b"no"}[harm])
    assert pretrain.load_state(path, tree) is None
    assert "state.npz is unreadable and counts as absent" in capsys.readouterr().out


RUN_OF_12 = """
import sys, time
sys.path.insert(0, {tests!r})
from helpers import run
import test_faults
run.one_line_errors()
nca, plan = test_faults.small_plan()
store = nca._store
if sys.argv[1:] == ["slow"]:
    def _store(*arguments):
        print("about to store", flush=True)
        time.sleep(60)
    nca._store = _store
nca.compare(plan, {out!r}, [("scratch", 0)])
"""


@pytest.mark.slow
def test_a_run_of_12_is_made_by_one_process_and_goes_on_after_a_kill(world):
    """Killed at the last moment; the states that it saved are used."""
    path, out = world.folder / "run.py", world.run / "out"
    path.write_text(RUN_OF_12.format(tests=str(ROOT / "tests"), out=str(out)))
    first = world.start(sys.executable, path, "slow", PYTHONPATH=str(ROOT))
    world.until(first, "about to store")
    second = world.ended(world.start(sys.executable, path, PYTHONPATH=str(ROOT)))
    assert second.returncode == 0 and not list(out.glob("*.csv"))
    assert "scratch-0 is left out: scratch-0 in" in second.text, second.text
    first.kill()
    first.wait()
    third = world.ended(world.start(sys.executable, path, PYTHONPATH=str(ROOT)))
    assert "resuming after step 2" in third.text and "step 1" not in third.text, third.text
    assert [file.name for file in out.iterdir()] == ["scratch-0.csv"]


@fault("there is no run scratch-x", "scratch-0")
def a_run_of_12_that_there_is_not(world):
    yield
    yield world.ended(world.start(sys.executable, "-m", "appendix.nca", "--out", world.run / "out",
                                  "scratch-x"))


@pytest.mark.parametrize("out", ["/proc/no/where", __file__])
def test_a_folder_for_12_that_cannot_be_made_is_one_line(out):
    nca, plan = small_plan()
    with pytest.raises(ValueError, match=f"{out} cannot be made .*Name another folder"):
        nca.compare(plan, out)


@fault("first-nca-0 in .* is being made by another process", code=0,
       gone=("nca/first-nca-0.csv",), slow=True)
def two_runs_of_12_with_one_first_stage(world):
    """The second one leaves the run out, and makes neither half of it."""
    first = world.start(sys.executable, "-c", "from helpers import run\n"
                        "with run.alone(run.run_dir('nca', '.first-nca-0.lock')):\n"
                        "    print('trains', flush=True); import time; time.sleep(60)")
    world.until(first, "trains")
    yield
    second = world.start(sys.executable, "-m", "appendix.nca", "--out", str(world.run / "nca"),
                         "attention-0")
    done = world.ended(second)
    first.kill()
    yield done


@fault("no run is called int7 42", "nf4", "43")
def a_run_of_11_that_there_is_not(world):
    yield
    yield world.ended(world.start(sys.executable, "-m", "appendix.qlora_runs", "int7", "42"))


@fault("live in .*qlora is being made by another process", intact=("qlora",), slow=True)
def two_trainings_of_11_in_one_folder(world):
    code = "from helpers import run; run.one_line_errors()\nwith run.alone({!r}): " \
           "print('trains', flush=True); import time; time.sleep(60)"
    world.file("qlora/live/log.jsonl")
    first = world.start(sys.executable, "-c", code.format(str(world.run / "qlora/live")))
    world.until(first, "trains")
    yield
    second = world.python("from helpers import run, qlora_runs; run.one_line_errors()\n"
                          "qlora_runs.fit('nf4', 42, run.run_dir('qlora', 'live'), steps=1)")
    first.kill()
    yield second


def test_who_waited_for_a_lock_has_it_when_its_file_was_made_anew(tmp_path):
    code = ("import sys; from helpers import run\nprint('waits', flush=True)\n"
            "with run.alone(sys.argv[1], wait=True):\n    print('in', flush=True); input()")
    path = tmp_path / "a.lock"
    with run.alone(path):
        waiting = subprocess.Popen([sys.executable, "-c", code, path], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert waiting.stdout.readline() == "waits\n"
        time.sleep(0.5)
    assert "waiting for it" in waiting.stdout.readline()
    assert waiting.stdout.readline() == "in\n"
    with pytest.raises(run.Taken), run.alone(path):
        pass
    waiting.communicate("\n")
    assert waiting.returncode == 0 and not path.exists()


def test_rows_of_11_are_stored_once_however_often_they_are_added(tmp_path, monkeypatch):
    """A run that was killed between two of its three tables is made again."""
    import pandas as pd
    from appendix import qlora_runs as lab
    monkeypatch.setattr(lab, "STORED", tmp_path / "qlora")
    for variant, seed, loss in (("int8", 42, 1.0), ("int8", 43, 2.0), ("int8", 42, 3.0)):
        lab.add_rows("runs.csv", pd.DataFrame({"variant": [variant], "seed": seed, "val_loss": loss}))
    assert lab.stored("runs.csv").val_loss.tolist() == [2.0, 3.0]
    path = tmp_path / "qlora/runs.csv"
    path.write_text(path.read_text()[:-3])
    with pytest.raises(ValueError, match=r"runs\.csv is damaged .*git checkout"):
        lab.stored("runs.csv")
    path.unlink()
    assert lab.stored("runs.csv").empty and lab.scores(lab.stored("answers.csv"), "as trained").empty
    assert lab.merge_scores(lab.stored("answers.csv")).empty


# -- Whole notebooks on a finished run: slow ----------------------------------------------------

def finished(world, *parts):
    """A copy of a finished tiny run, or of parts of it."""
    if not (FINISHED / "merge.json").exists():
        pytest.skip(f"no finished run in {FINISHED}: ./run_all.sh makes one")
    for part in parts:
        here = FINISHED / part
        (shutil.copytree if here.is_dir() else shutil.copy2)(here, world.run / part)


def script(world, name, **env):
    return world.ended(world.start(sys.executable, name, cwd=ROOT, MPLBACKEND="agg", **env), 900)


@fault("Icarus Verilog .* is missing", "apt-get install", slow=True)
def the_quickstart_without_icarus(world):
    """Said before the minutes of training, not after them."""
    tools = world.folder / "tools"
    tools.mkdir()
    for folder in os.environ["PATH"].split(":"):
        for tool in Path(folder).glob("*"):
            if tool.name not in ("iverilog", "vvp") and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
    yield
    done = script(world, "00_quickstart.py", PATH=str(tools))
    assert "answers of the base" not in done.text
    yield done


@fault("Error: interrupted", code=-signal.SIGINT, slow=True)
def the_quickstart_interrupted(world):
    child = world.start(sys.executable, "-u", "00_quickstart.py", MPLBACKEND="agg")
    world.until(child, "answers of the base")
    yield
    time.sleep(5)
    child.send_signal(signal.SIGINT)
    yield world.ended(child)


@fault("tokens.npy has changed", "02_data", intact=("data",), slow=True)
def notebook_03_on_zeroed_tokens(world):
    finished(world, "data", "jax_cache")
    path = world.run / "data/train/tokens.npy"
    tokens = np.load(path)
    tokens.reshape(-1)[:10_000] = 0
    np.save(path, tokens)
    yield
    yield script(world, "03_train.py")


@pytest.mark.slow
@pytest.mark.parametrize("env, says", [
    ({"BASE_DTYPE": "int7"}, "base_dtype='int7' is unknown.*nf4"),
    ({"BASE_DTYPE": "nf4"}, "tile_size=0 is impossible for nf4.*32"),
    ({"BASE_DTYPE": "int8", "TILE_SIZE": "48"}, "tile_size=48 does not divide.*These divide: 32"),
    ({"BASE_DTYPE": "int8", "TILE_SIZE": "x"}, "TILE_SIZE=x is not a number"),
    ({"BASE_DTYPE": "int8"}, "trained on another base: base_dtype: bfloat16 there, int8 here")])
def test_a_storage_that_03_cannot_train_on_is_one_line(world, env, says):
    finished(world, "data", "train")
    before = content(world.run / "train")
    done = script(world, "03_train.py", **env)
    assert done.returncode == 1 and re.search(says, done.text), done.text
    assert "Traceback" not in done.text and content(world.run / "train") == before


def changed(world, name, old, new):
    """The outcome of a notebook, as a script, in a copy in which `old` is `new`."""
    text = (ROOT / name).read_text()
    assert text.count(old) == 1, old
    path = world.file(name, text.replace(old, new))
    return world.ended(world.start(sys.executable, path, cwd=ROOT, MPLBACKEND="agg",
                                   PYTHONPATH="."), 900)


def own_rows(world, *rows):
    """02 on 200 of the tiny rows, and these."""
    with gzip.open(ROOT / "data/tiny/train.jsonl.gz", "rt") as file:
        good = [line for line in file][:200]
    source = world.file("own.jsonl", "".join([*good, *(json.dumps(row) + "\n" for row in rows)]))
    return changed(world, "02_data.py", 'source="data/tiny"', f'source="{source}"')


@fault("rows", code=0, slow=True)
def lines_of_five_megabytes(world):
    """Rows that no `max_tokens` can hold are dropped before they are rendered."""
    long = {"prompt": "word " * 1_000_000, "response": "```verilog\nmodule m;\nendmodule\n```"}
    yield
    start = time.monotonic()
    done = own_rows(world, *[long] * 4)
    assert time.monotonic() - start < 60
    assert run.read_json(world.run / "data/meta.json")["dropped"]["too long"] >= 4
    yield done


@fault("rows are usable; 2 of them repeat an earlier one, 1 its prompt alone", code=0, slow=True)
def rows_that_are_there_twice(world):
    twice = {"prompt": "Twice.", "response": "```verilog\nmodule m;\nendmodule\n```"}
    other = {**twice, "response": twice["response"].replace("module m", "module other")}
    yield
    yield own_rows(world, twice, twice, other, twice)


@fault("is being written by", slow=True)
def two_merges_at_once(world):
    finished(world, "data", "train")
    first = world.start(sys.executable, "04_merge.py", cwd=ROOT, MPLBACKEND="agg")
    while not (world.run / ".lock").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    yield
    second = script(world, "04_merge.py")
    assert world.ended(first, 600).returncode == 0
    yield second


@fault("changed|damaged|merge.json", "04", intact=("merge.json",), slow=True)
def notebook_05_on_a_flipped_bit(world):
    finished(world, "data", "train", "merged", "adapter", "merge.json")
    flip(world.run / "merged/model.safetensors")
    yield
    yield script(world, "05_serve_vllm.py")


@fault("changed|damaged|merge.json", "04", intact=("merge.json", "eval"), slow=True)
def notebook_07_on_a_flipped_bit(world):
    finished(world, "data", "train", "merged", "merge.json", "eval", "serve")
    flip(world.run / "merged/model.safetensors")
    yield
    yield script(world, "07_eval.py")


@fault("meta.json", "02", intact=("eval",), slow=True)
def notebook_07_on_a_system_prompt_that_was_not_trained(world):
    finished(world, "data", "train", "merged", "merge.json", "eval", "serve")
    meta = run.read_json(world.run / "data/meta.json")
    run.write_json(world.run / "data/meta.json", {**meta, "system": "Sing."})
    yield
    yield script(world, "07_eval.py")


@fault("merging", code=0, slow=True)
def notebook_04_mends_a_truncated_model(world):
    finished(world, "data", "train", "merged", "adapter", "merged_text", "merge.json")
    path = world.run / "merged/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    yield
    done = script(world, "04_merge.py")
    assert path.stat().st_size == (FINISHED / "merged/model.safetensors").stat().st_size
    yield done


@fault("merging|adapter", code=0, slow=True)
def notebook_04_mends_a_missing_adapter_file(world):
    finished(world, "data", "train", "merged", "adapter", "merged_text", "merge.json")
    (world.run / "adapter/adapter_model.safetensors").unlink()
    yield
    done = script(world, "04_merge.py")
    assert (world.run / "adapter/adapter_model.safetensors").exists()
    yield done


def cut_newest(checkpoints, *lost):
    """Damage the newest checkpoint's arrays, and lose these files of it; returns its step."""
    newest = max(checkpoints.iterdir(), key=lambda path: int(path.name))
    for name in lost:
        (newest / name).unlink()
    for path in newest.rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000:
            path.write_bytes(path.read_bytes()[:100])
    return int(newest.name)


@fault(r"checkpoint 76 is damaged[^\n]*left aside\nresuming from step 60 of 76\n", code=0, slow=True)
def a_damaged_newest_checkpoint_in_03(world):
    """What is said of the step to go on from is what was restored."""
    finished(world, "data", "train", "jax_cache")
    assert cut_newest(world.run / "train/checkpoints") == 76
    yield
    done = script(world, "03_train.py")
    assert "nothing left to train" not in done.text
    yield done


# Too little memory in 03 has no row. Under `ulimit -v` it depends on the moment whether the compiler
# ends the process or JAX raises, and a limit that the system enforces (a cgroup) takes root. What
# such an end looks like from outside, a kernel that was killed, is `the_kernel_killed`.

@fault("step 8\\d|step \\d+", "whole", slow=True)
def a_damaged_newest_checkpoint_in_04(world):
    finished(world, "data", "train")
    cut_newest(world.run / "train/checkpoints", "_CHECKPOINT_METADATA")
    yield
    yield script(world, "04_merge.py")


@fault("stopped|no server", code=0, gone=("serve/server.json",), slow=True)
def half_a_record_beside_a_server(world):
    world.file("serve/adapter.json", '{"pid": ')
    world.file("serve/server.json", "{}")
    yield
    yield world.ended(world.start(sys.executable, "-m", "serving.server", "stop", cwd=ROOT))


@fault("theirs.csv is left out", code=0, intact=("bench/theirs.csv",), slow=True)
def a_broken_table_of_another_machine(world):
    finished(world, "data", "train", "merged", "merge.json", "bench", "serve")
    served_here(world)
    world.file("bench/theirs.csv", '"a\n\x00')
    yield
    yield world.ended(world.start("./run_all.sh", "06", cwd=ROOT), 900)


@fault("samples.jsonl|lines", code=0, slow=True)
def saved_answers_that_are_no_objects(world):
    finished(world, "data", "train", "merged", "merge.json", "eval", "serve")
    with open(world.run / "eval/tuned/samples.jsonl", "ab") as file:
        file.write(b'7\n"x"\n\xff\xfe\n[1]\n')
    yield
    yield script(world, "07_eval.py")


def goodput(world):
    """Of all points, requests/s."""
    import pandas as pd
    return pd.read_csv(world.run / "bench/results.csv").goodput_rps.sum()


@fault("24 measurements", code=0, slow=True)
def old_points_at_another_slo(world):
    """What was measured stays; what is computed from it is computed again."""
    finished(world, "data", "train", "merged", "adapter", "merge.json", "bench", "serve")
    served_here(world)
    points = {path: content(path) for path in (world.run / "bench").glob("*_*_*.json")}
    before = goodput(world)
    yield
    done = changed(world, "06_bench.py", "slo=(500, 30)", "slo=(40, 10)")
    assert {path: content(path) for path in (world.run / "bench").glob("*_*_*.json")} == points
    assert goodput(world) < 0.9 * before
    yield done


@fault("ended by SIGTERM", code=143, intact=("merged",), slow=True)
def sigterm_while_a_server_is_up(world):
    finished(world, "data", "train", "merged", "adapter", "merge.json")
    child = world.start("./run_all.sh", "05", "06", cwd=ROOT)
    world.until(child, "healthy after")
    yield
    start = time.monotonic()
    child.terminate()
    outcome = world.ended(child)
    assert time.monotonic() - start < 5
    yield outcome


@fault("24 measurements", code=0, gone=("serve/server.json",), slow=True)
def notebook_06_alone(world):
    finished(world, "data", "train", "merged", "adapter", "merge.json", "bench", "serve")
    served_here(world)
    yield
    yield world.ended(world.start("./run_all.sh", "06", cwd=ROOT), 900)


def served_here(world):
    """As if 05 had run in the copy."""
    with world.monkeypatch.context() as patch:
        patch.chdir(ROOT)
        known = server.options()
        server.write_options(replace(known, model=str(world.run / "merged")))


@fault(r"GB free, for merged/.*Set RUN_DIR", slow=True)
def a_full_disk_in_04(world):
    """Said before anything is written."""
    finished(world, "data", "train")
    full, run_dir = world.folder / "full", world.run
    size = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
    run_dir.rename(full)
    run_dir.mkdir()
    yield
    command = f"cp -a {full}/. {run_dir} && MPLBACKEND=agg {sys.executable} 04_merge.py"
    done = world.small_disk(f"{command}; code=$?; ls -A {run_dir}; exit $code", size + 16_000_000)
    assert "merge.json" not in done.text.split() and ".merged.partial" not in done.text.split()
    yield done


@fault("recipe|rank|adapter", "03|train", intact=("train",), gone=("merge.json",), slow=True)
def a_recipe_edited_before_04(world):
    finished(world, "data", "train")
    path = world.run / "train/recipe.json"
    path.write_text(path.read_text().replace('"alpha": 32.0', '"alpha": 64.0'))
    assert "64.0" in path.read_text()
    yield
    yield script(world, "04_merge.py")


@fault("merged|merge.json", "04", slow=True)
def another_model_in_its_place(world):
    """`merged_text` under the name of `merged`."""
    finished(world, "data", "train", "merged_text", "adapter", "merge.json", "serve")
    (world.run / "merged_text").rename(world.run / "merged")
    yield
    yield script(world, "05_serve_vllm.py")


@fault("1 notebooks", code=0, intact=("eval/tuned/samples.jsonl",), gone=("serve/server.json",),
       slow=True)
def notebook_07_alone(world):
    """Without a server: what is saved is judged again, and what it started is stopped."""
    finished(world, "data", "train", "merged", "adapter", "merge.json", "eval", "serve")
    served_here(world)
    (world.run / "eval/comparison.json").unlink()
    yield
    yield world.ended(world.start("./run_all.sh", "07", cwd=ROOT), 900)


@fault("05|options.json", slow=True)
def notebook_06_where_05_never_ran(world):
    finished(world, "data", "train", "merged", "adapter", "merge.json")
    yield
    yield world.ended(world.start("./run_all.sh", "06", cwd=ROOT), 900)


@fault("port .* is in use", "another port", slow=True)
def a_port_in_use(world):
    finished(world, "merged", "merge.json", "serve")
    taken = socket.create_server(("127.0.0.1", 0))
    with world.monkeypatch.context() as patch:
        patch.chdir(ROOT)
        server.write_options(replace(server.options(), model=str(world.run / "merged"),
                                     port=taken.getsockname()[1]))
    yield
    done = world.ended(world.start(sys.executable, "-m", "serving.server", "start", cwd=ROOT))
    taken.close()
    yield done


@fault("the server has not answered for 30 s", "answers so far are saved", r"serve/server\.log",
       gone=("serve/server.json",), slow=True)
def the_server_killed_in_07(world):
    finished(world, "data", "train", "merged", "adapter", "merge.json", "serve")
    served_here(world)
    child = world.start("./run_all.sh", "07", cwd=ROOT)
    path = world.run / "serve/server.json"
    end = time.monotonic() + 600
    while not list((world.run / "eval").glob("*/samples.jsonl")) and time.monotonic() < end:
        time.sleep(0.2)
    yield
    for pid in server.members(run.read_json(path)):
        os.kill(pid, signal.SIGKILL)
    yield world.ended(child, 600)


@fault("the kernel died", gone=("serve/server.json",), slow=True)
def the_kernel_killed_in_07(world):
    """What it started is stopped, by whom it was started."""
    finished(world, "data", "train", "merged", "adapter", "merge.json", "serve")
    served_here(world)
    child = world.start("./run_all.sh", "07", cwd=ROOT)
    world.until(child, "healthy after")
    yield
    for process in psutil.Process(child.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ipykernel" in " ".join(process.cmdline()):
                process.kill()
    yield world.ended(child, 600)


@fault("adapter", "04", intact=("merged",), gone=("serve/server.json",), slow=True)
def notebook_05_on_a_damaged_adapter(world):
    finished(world, "data", "train", "merged", "adapter", "merge.json")
    flip(world.run / "adapter/adapter_model.safetensors")
    yield
    yield script(world, "05_serve_vllm.py")


@fault("is not what 04_merge wrote", "adapter_model.safetensors.*changed", "run 04_merge",
       intact=("merged",), gone=("serve/adapter.json",), slow=True)
def the_adapter_damaged_while_it_is_served(world):
    """The server has it in memory and answers as before; 05 does not serve it again."""
    finished(world, "data", "train", "merged", "adapter", "merge.json")
    base = run.read_json(world.run / "train/recipe.json")["base_path"]
    record = server.start("cpu", base, "base", slot="adapter", adapter=world.run / "adapter",
                          timeout=600)
    asked = {"model": "base-adapter", "prompt": "module", "max_tokens": 32, "temperature": 0}
    before = answer(record, asked)
    flip(world.run / "adapter/adapter_model.safetensors")
    yield
    assert answer(record, asked) == before
    done = script(world, "05_serve_vllm.py")
    assert server.stop("adapter")
    yield done


def answer(record, asked):
    """What a server says to a request, as text."""
    from openai import OpenAI
    client = OpenAI(base_url=record["base_url"] + "/v1", api_key="unused", max_retries=0)
    return client.completions.create(**asked).choices[0].text


@fault("2 notebooks", "unreadable|damaged|again", code=0, gone=("serve/server.json",), slow=True)
def results_cut_in_half(world):
    """06 and 07 make again what is not whole, and only that."""
    finished(world, "data", "train", "merged", "adapter", "merge.json", "serve", "bench", "eval")
    served_here(world)
    points = sorted((world.run / "bench").glob("*_*_*.json"))
    answers = world.run / "eval/tuned/samples.jsonl"
    rows = answers.read_text().splitlines()
    for path in (points[0], answers, world.run / "eval/comparison.json"):
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    whole = {path: content(path) for path in points[1:]}
    yield
    done = world.ended(world.start("./run_all.sh", "06", "07", cwd=ROOT), 1800)
    kept = [path for path, held in whole.items() if content(path) == held]
    assert len(kept) > len(whole) / 2  # 06 repeats what disagrees with itself, on a busy machine
    assert run.read_json(points[0]) and run.read_json(world.run / "eval/comparison.json")
    assert answers.read_text().splitlines()[:len(rows) // 3] == rows[:len(rows) // 3]
    assert len(answers.read_text().splitlines()) >= len(rows)
    yield done


@fault("rows", code=0, slow=True)
def a_script_started_from_another_folder(world):
    yield
    yield world.ended(world.start(sys.executable, ROOT / "02_data.py", cwd=world.folder,
                                  MPLBACKEND="agg"), 300)


def flip(path):
    """Change one bit in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def marked(row):
    marks = [pytest.mark.slow] * row.slow
    return pytest.param(row, id=row.act.__name__, marks=marks)


@pytest.mark.parametrize("row", [marked(row) for row in FAULTS])
def test_fault(world, row):
    steps = row.act(world)
    next(steps)
    before = {path: content(world.run / path) for path in row.intact}
    outcome = next(steps)
    assert outcome.returncode == row.code, outcome.text
    for pattern in row.says:
        assert re.search(pattern, outcome.text, re.MULTILINE), (pattern, outcome.text)
    assert "Traceback (most recent call last)" not in outcome.text
    for path, held in before.items():
        assert held is not None or (world.run / path).is_dir(), f"{path} was never there"
        assert content(world.run / path) == held, path
    for path in row.gone:
        assert not (world.run / path).exists(), path
    end = time.monotonic() + 3
    while world.left() and time.monotonic() < end:
        time.sleep(0.1)
    assert not world.left()
