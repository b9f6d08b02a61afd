"""kill -9 at random moments of 02 to 07, then the same notebook again: nothing lost, nothing twice.

    ./run_tests.sh --kills      30 kills, about an hour on two idle cores (estimated)

It goes on where it was stopped: what passed is in RUN_DIR/kills/passed.jsonl, with the seed, which
is drawn once and printed (KILLS_SEED sets it). After a rerun 02 to 04 have left what an undisturbed
run leaves, bit for bit except for times; in 05 to 07 what was finished before the kill is still
there and was not made again. The long notebooks are killed several times on their way: each rerun
starts from what the kill before it has left.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from helpers.run import folder_hashes

HOME = Path(os.environ.get("RUN_DIR") or ROOT / "runs" / "tiny").resolve() / "kills"
WHOLE, TRIED, PASSED = HOME / "undisturbed", HOME / "tried", HOME / "passed.jsonl"
NOTEBOOKS = {"02": "02_data.py", "03": "03_train.py", "04": "04_merge.py", "05": "05_serve_vllm.py",
             "06": "06_bench.py", "07": "07_eval.py"}
BEFORE = {"02": (), "03": ("data",), "04": ("data", "train")}  # what a trial starts with
BEFORE["05"] = ("data", "train", "merged", "adapter", "merge.json")
BEFORE["06"] = BEFORE["07"] = (*BEFORE["05"], "serve/options.json")
# (notebook, how often it is killed on its way), in an order that has each of them early.
TRIALS = [("02", 1), ("04", 1), ("06", 2), ("07", 2), ("05", 1), ("03", 3), ("02", 1), ("04", 1),
          ("05", 1), ("06", 3), ("07", 3), ("02", 1), ("04", 1), ("05", 1), ("03", 3), ("02", 1),
          ("04", 1), ("05", 1), ("02", 1), ("04", 1)]
pytestmark = pytest.mark.kills


def seed():
    """The seed of all kills: given, stored, or drawn now."""
    HOME.mkdir(parents=True, exist_ok=True)
    path = HOME / "seed.txt"
    if "KILLS_SEED" in os.environ or not path.exists():
        path.write_text(os.environ.get("KILLS_SEED") or str(random.SystemRandom().randrange(10**6)))
    return int(path.read_text())


def start(number, folder):
    """Start a notebook as a script in a process group of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{number}.out", "wb") as out:
        return subprocess.Popen([sys.executable, NOTEBOOKS[number]], cwd=ROOT, stdout=out,
                                stderr=subprocess.STDOUT, start_new_session=True,
                                env={**os.environ, "SIZE": "tiny", "RUN_DIR": str(folder),
                                     "MPLBACKEND": "agg"})


def finish(number, folder):
    """Run a notebook to its end; returns seconds."""
    begin = time.monotonic()
    process = start(number, folder)
    code = process.wait(timeout=1800)
    assert code == 0, f"{number}: {(folder / f'{number}.out').read_text()[-2000:]}"
    return time.monotonic() - begin


def python(code, folder):
    """Run some code for a run directory."""
    env = {**os.environ, "SIZE": "tiny", "RUN_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def server(what, folder):
    """`python -m serving.server start`, `status` or `stop` for a run directory."""
    python("import runpy, sys; sys.argv[1:] = [%r];"
           "runpy.run_module('serving.server', run_name='__main__')" % what, folder)


@pytest.fixture(scope="session")
def undisturbed():
    """Seconds per notebook of a run that nobody disturbs, made once."""
    path = HOME / "seconds.json"
    seconds = json.loads(path.read_text()) if path.exists() else {}
    try:
        for number in NOTEBOOKS:
            if number not in seconds:
                if number == "06":
                    server("start", WHOLE)
                seconds[number] = finish(number, WHOLE)
                path.write_text(json.dumps(seconds))
    finally:
        if WHOLE.exists():
            server("stop", WHOLE)
    return seconds


def left(folder, number):
    """What a notebook leaves, in a form in which two runs can be compared."""
    if number == "02":
        return folder_hashes(folder / "data")
    if number == "03":
        lines = (folder / "train/log.jsonl").read_text().splitlines()
        log = [{**json.loads(line), "seconds": 0} for line in lines]
        return log, json.loads((folder / "train/recipe.json").read_text())
    return ({name: folder_hashes(folder / name) for name in ("merged", "adapter", "merged_text")},
            json.loads((folder / "merge.json").read_text()))


def done(folder, number):
    """{name: content} of everything that 06 or 07 has finished."""
    if number == "06":
        return {path.name: path.read_text() for path in (folder / "bench").glob("*_[012].json")}
    found = {}
    for path in (folder / "eval").glob("*/samples.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            if line.endswith("}"):  # the last one may be half
                row = json.loads(line)
                place = (path.parent.name, row["plan"], row["problem"], row["index"])
                assert place not in found, f"{place} twice"
                found[place] = row
    return found


def alive(folder):
    """Command lines of the processes that have this run directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mine = process.environ().get("RUN_DIR") == str(folder)
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
    return found


def prepare(number):
    """A fresh TRIED with what the notebook reads."""
    shutil.rmtree(TRIED, ignore_errors=True)
    for part in BEFORE.get(number, ()):
        (TRIED / part).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (WHOLE / part).is_dir() else shutil.copy2)(WHOLE / part, TRIED / part)
    if number in ("06", "07"):  # as if 05 had run here
        python("import dataclasses; from helpers.run import run_dir; from serving.server import *;"
               "write_options(dataclasses.replace(options(), model=str(run_dir('merged'))))", TRIED)
        server("start", TRIED)


def kill(number, moment):
    """Start the notebook and kill it with all its children after `moment` seconds.

    Returns seconds until it had ended by itself; None if it was killed.
    """
    begin, process = time.monotonic(), start(number, TRIED)
    try:
        code = process.wait(timeout=moment)
        assert code == 0, f"{number}: {(TRIED / f'{number}.out').read_text()[-2000:]}"
        return time.monotonic() - begin
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def kill_all(number, times, longest, draw):
    """Kill a notebook so often on its way; returns the moments.

    If it was done before one of them, this machine is faster than thought: once more from the
    start, within the time that it really takes.
    """
    while True:
        prepare(number)
        moments, finished, whole = [], {}, 0.0
        for _ in range(times):
            moments.append(round(draw.uniform(0.5, longest * 2 / (times + 1)), 2))
            took = kill(number, moments[-1])
            whole += took or moments[-1]
            if took:
                break
            if number in ("06", "07"):
                now = done(TRIED, number)
                assert {name: now.get(name) for name in finished} == finished
                finished = now
        if not took:
            return moments, finished
        longest = min(longest * 0.8, whole)
        server("stop", TRIED)


@pytest.mark.parametrize("trial", range(len(TRIALS)))
def test_kill(trial, undisturbed):
    number, times = TRIALS[trial]
    mark = {"seed": seed(), "trial": trial, "notebook": number, "kills": times}
    before = map(json.loads, PASSED.read_text().splitlines()) if PASSED.exists() else ()
    if any(mark.items() <= row.items() for row in before):
        return
    try:
        draw = random.Random(seed() * 1000 + trial)
        moments, finished = kill_all(number, times, undisturbed[number], draw)
        print({**mark, "seconds": moments})
        finish(number, TRIED)
        if number in ("02", "03", "04"):
            assert left(TRIED, number) == left(WHOLE, number)
        if number == "03":  # and the adapters, by what 04 makes of them
            finish("04", TRIED)
            assert left(TRIED, "04") == left(WHOLE, "04")
        if number == "05":
            server("status", TRIED)
        if number in ("06", "07"):
            after = done(TRIED, number)
            assert {name: after.get(name) for name in finished} == finished
            assert after.keys() == done(WHOLE, number).keys()
    finally:
        server("stop", TRIED)
    assert not alive(TRIED)
    with open(PASSED, "a") as file:
        file.write(json.dumps({**mark, "seconds": moments}) + "\n")
