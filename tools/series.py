"""Execute a range of notebooks and leave no process behind: what `run_all.sh` becomes.

    tools/series.py FROM [--fresh] [FIRST [LAST]]     FROM: the folder that run_all.sh was called in
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


class Stopped(BaseException):
    """A signal asked this process to end."""


def listen():
    """Turn SIGTERM, SIGINT and SIGHUP into `Stopped`, unless they are ignored, as nohup does."""
    def stop(number, frame):
        for other in heard:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number)
    heard = [number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
             if signal.getsignal(number) != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, stop)


def leave(number):
    """End with the shell's exit code for a signal; threads that still wait do not matter."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(128 + number)


if __name__ == "__main__":
    listen()  # before the imports below, which take seconds

try:
    import notebooks
    import psutil

    from helpers.run import (
        UserError,
        _lock,
        allow_open_files,
        disk_problem,
        read_json,
        read_leftover,
        run_dir,
        run_dir_path,
        size,
        temporary_dir,
        write_json,
    )
except Stopped as stopped:
    leave(stopped.args[0])
except ImportError as error:
    raise SystemExit(f"run_all: {error}. The environment is damaged: rm -rf .venv, then run this "
                     "again.") from None

ROOT = notebooks.ROOT
SERVER = [sys.executable, "-m", "serving.server"]

# What each notebook writes under RUN_DIR, besides its figures and its executed copy.
WRITES = {
    "00": (),
    "01": ("setup.json", "scripts"),
    "02": ("data", "cache"),
    "03": ("train", "jax_cache"),
    "04": ("merged", "merged_half", "dequantized", "adapter", "merged_text", "merge.json",
           "model_card.md"),
    "05": ("serve",),
    "06": ("bench/*.json", "bench/results.csv", "bench/partial", "bench/client.*"),
    "07": ("eval",),
    "08": ("dryrun",),
    "09": ("tiny_base",),
    "10": ("published.json",),
    "11": ("qlora",),
    "12": ("nca",),
}
# What it reads there, and which notebook writes that.
READS = {
    "03": {"data/meta.json": "02"},
    "04": {"train/recipe.json": "03", "data/meta.json": "02"},
    "05": {"merged": "04", "merge.json": "04", "data/samples.json": "02"},
    "06": {"merged": "04", "merge.json": "04", "serve/options.json": "05"},
    "07": {"merged": "04", "merge.json": "04", "serve/options.json": "05",
           "train/recipe.json": "03", "data/meta.json": "02"},
}


def chosen(first, last):
    """The sources whose numbers lie between `first` and `last`.

    Raises:
      UserError: there is none, or the range is upside down.
    """
    found = [source for source in notebooks.sources() if first <= source.name[:2] <= last]
    numbers = [source.name[:2] for source in notebooks.sources()]
    for number in (first, last):
        if number not in numbers:
            raise UserError(f"there is no notebook {number}; there are {', '.join(numbers)}.")
    if first > last:
        raise UserError(f"{first} comes after {last}: say `./run_all.sh {last} {first}`.")
    return found


def settle(start):
    """Make relative paths in the environment mean what they mean where run_all.sh was called."""
    for name in ("RUN_DIR", "TMPDIR", "VERILOG_EVAL_DIR"):
        if os.environ.get(name):
            path = Path(os.path.normpath(Path(start) / Path(os.environ[name]).expanduser()))
            inside = name == "RUN_DIR" and path.is_relative_to(ROOT)
            os.environ[name] = str(path.relative_to(ROOT) if inside else path)
    os.environ["SIZE"] = size()
    os.environ["RUN_DIR"] = str(run_dir_path())
    os.environ["SERVER_OWNER"] = str(os.getpid())  # a server ends when its owner has ended
    allow_open_files()
    temporary_dir()
    run_dir()


# -- Servers --------------------------------------------------------------------------------------

def recorded():
    """{(slot, process id)} of the servers that this run directory records and that are alive."""
    found = set()
    for path in (run_dir_path() / "serve").glob("*.json"):
        try:
            process = psutil.Process(read_json(path)["pid"])
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add((path.stem, process.pid))
        except (UserError, KeyError, TypeError, ValueError, psutil.Error):
            continue  # no record of a server, or of a dead one
    return found


def end_servers(before, sources, seconds=120.0):
    """End the servers that these notebooks started since `before`; after `seconds`, without asking.

    A server that was there before this run is left as it was found.
    """
    starts = {"05", "06", "07"} & {source.name[:2] for source in sources}
    if not starts or not (run_dir_path() / "serve").is_dir() or before and recorded() <= before:
        return
    stopping = subprocess.Popen([*SERVER, "stop"], cwd=ROOT, start_new_session=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True)
    try:
        _, said = stopping.communicate(timeout=seconds)
        if stopping.returncode:
            print(said.strip(), file=sys.stderr)
    except subprocess.TimeoutExpired:
        for _, pid in recorded() - before:  # it leads a session of its own
            for process in psutil.process_iter():
                try:
                    if os.getsid(process.pid) == pid:
                        process.kill()
                except (psutil.Error, OSError):
                    continue


# -- --fresh --------------------------------------------------------------------------------------

def leftovers(numbers):
    """What the notebooks of these numbers have written under RUN_DIR, hidden halves included."""
    run, found = run_dir_path(), []
    for number in numbers:
        for pattern in WRITES.get(number, ()):
            folder, _, name = pattern.rpartition("/")
            for each in (name, f".{name}.partial", f".{name}.old", f".{name}.[0-9]*"):
                found += sorted((run / folder).glob(each))
        found += sorted(run.glob(f"figures/{number}_*")) + sorted(run.glob(f"notebooks/{number}_*"))
    return found


def check_inputs(sources):
    """Raise unless everything that the range reads is there or is written by it."""
    numbers = {source.name[:2] for source in sources}
    for number in sorted(numbers):
        for path, writer in READS.get(number, {}).items():
            if writer not in numbers and not (run_dir_path() / path).exists():
                raise UserError(f"{number} needs {run_dir_path() / path}, which {writer} writes: "
                                f"say `./run_all.sh {writer} {max(numbers)}`. Nothing was deleted.")


def forget(sources):
    """Delete what the notebooks of the range have written, and say what."""
    numbers = [source.name[:2] for source in sources]
    if {"04", "05"} & set(numbers) and recorded():
        print("--fresh: stopping the server", flush=True)
        subprocess.run([*SERVER, "stop"], cwd=ROOT, check=True)
    gone = leftovers(numbers)
    links = [f"{path} -> {path.readlink()}" for path in gone if path.is_symlink()]
    for path in gone:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    names = dict.fromkeys(path.relative_to(run_dir_path()).parts[0] for path in gone)
    print(f"--fresh: deleted {', '.join(names)} of {numbers[0]} to {numbers[-1]} in "
          f"{run_dir_path()}" if gone else "--fresh: there was nothing to delete", flush=True)
    if links:
        print(f"--fresh: only a link, its target stays: {', '.join(links)}", flush=True)


# -- The run --------------------------------------------------------------------------------------

class Times:
    """`times.json`: seconds per notebook, and the largest memory of any one process."""

    def __init__(self):
        self.path, self.new, self.memory = run_dir("times.json"), {}, notebooks.PeakMemory()
        found = read_leftover(self.path, {})
        self.seconds, self.peak = found.get("seconds"), found.get("peak_gib")
        if not isinstance(self.seconds, dict) or not isinstance(self.peak, (int, float)):
            if found:
                print(f"{self.path} has another form and counts as absent", flush=True)
            self.seconds, self.peak = {}, 0.0
        self.memory.start()

    def add(self, name, seconds):
        """One more notebook is done."""
        self.new[name] = round(seconds, 1)
        self.seconds = {**self.seconds, **self.new}
        self.peak = max(self.peak, self.memory.gib)
        write_json(self.path, {"seconds": self.seconds, "peak_gib": round(self.peak, 2)})


def run(sources):
    """Execute the notebooks in order, with times; the server for a lone 06 is started first."""
    numbers, times = [source.name[:2] for source in sources], Times()
    locked = {**os.environ, **_lock.passed_on()}
    held = [] if _lock.descriptor is None else [_lock.descriptor]
    for source in sources:
        _lock.name(f"run_all.sh, {source.stem}")
        if source.name[:2] == "06" and "05" not in numbers:
            if subprocess.run([*SERVER, "start"], cwd=ROOT, env=locked).returncode:
                raise SystemExit("run_all: 06 needs the server as 05 left it, and it does not "
                                 "start (see above). `./run_all.sh 05 06` runs both.")
        start = time.perf_counter()
        notebooks.execute(source, run_dir("notebooks"), env=locked, pass_fds=held)
        times.add(source.stem, time.perf_counter() - start)
    print("   ".join(f"{name} {value:.0f} s" for name, value in times.new.items()))
    print(f"run_all: {len(times.new)} notebooks in {sum(times.new.values()) / 60:.1f} min, at most "
          f"{times.memory.gib:.1f} GiB in one process; results in "
          f"{notebooks.shown(run_dir().resolve())}, executed notebooks in "
          f"{notebooks.shown(run_dir('notebooks').resolve())}")


def main(start, *words):
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    sys.stderr.reconfigure(errors="replace")
    fresh, words = "--fresh" in words, [word for word in words if word != "--fresh"]
    os.chdir(ROOT)
    settle(start)
    if len(words) > 2:
        raise UserError(f"{' '.join(words)} is no range: say its first and last, or one notebook.")
    sources = chosen(*(words * 2 if len(words) == 1 else words or ("01", "07")))
    if fresh:
        check_inputs(sources)
    _lock.take(f"run_all.sh, {sources[0].stem}")
    before, number = recorded(), None
    try:
        if fresh:
            forget(sources)
            before = recorded()
        run(sources)
    except Stopped as stopped:
        number = stopped.args[0]
    except BrokenPipeError:  # `| head`, or a `tee` that was killed: nobody reads on
        number = signal.SIGPIPE
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        end_servers(before, sources, seconds=3.0 if number else 120.0)
    if number:
        with contextlib.suppress(BrokenPipeError):
            print(f"\nrun_all: ended by {signal.Signals(number).name}; the kernel and its servers "
                  "are stopped, what was finished is kept", file=sys.stderr, flush=True)
        leave(number)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Stopped as stopped:
        leave(stopped.args[0])
    except (UserError, OSError) as error:
        said = str(error) if isinstance(error, UserError) else disk_problem(error)
        if not said:
            raise
        raise SystemExit(f"run_all: {said}") from None
