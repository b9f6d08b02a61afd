"""Execute a range of notebooks and leave no process behind: what `run_all.sh` becomes.

    tools/series.py [FIRST [LAST]]
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import notebooks
from budget import number_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from helpers import run
from helpers.run import UserError, read_json, run_dir, size, write_json
from tables import records


class Stopped(BaseException):
    """A signal asked this process to end."""


def listen() -> None:
    """Turn SIGTERM, SIGINT and SIGHUP into `Stopped`, unless they are ignored, as nohup does."""
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            heard.append(number)

    def stop(number: int, frame: object) -> None:
        for other in heard:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number)

    for number in heard:
        signal.signal(number, stop)


def chosen(words: Sequence[str]) -> list[Path]:
    """The sources of a range: none (01 to 07), one number, or its first and last.

    Raises:
      UserError: there is none, or the range is upside down.
    """
    if len(words) > 2:
        raise UserError(f"{' '.join(words)}: name one notebook, or the first and the last of a "
                        "range.")
    first, last = (words[0], words[-1]) if words else ("01", "07")
    numbers = [number_of(source) for source in notebooks.sources()]
    if not {first, last} <= set(numbers):
        raise UserError(f"{first} to {last}: the notebooks are {', '.join(numbers)}.")
    if first > last:
        raise UserError(f"{first} comes after {last}: say `./run_all.sh {last} {first}`.")
    return [page for page in notebooks.sources() if first <= number_of(page) <= last]


def server(word: str) -> bool:
    """`python -m serving start|status|stop` for the run's server; returns whether it succeeded."""
    output = None if word == "start" else subprocess.DEVNULL
    command = [sys.executable, "-m", "serving", word, str(run_dir("serve"))]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                          start_new_session=True)
    return done.returncode == 0


def in_time(page: str) -> None:
    """Refuse to begin a page after RUN_UNTIL, seconds since 1970; unset is forever.

    Raises:
      UserError: that moment has passed, or RUN_UNTIL is no number.
    """
    word = os.environ.get("RUN_UNTIL", "").strip() or "inf"
    try:
        late = time.time() >= float(word)
    except ValueError:
        raise UserError(f"RUN_UNTIL={word} is no number. Set it to seconds since 1970, such as "
                        "$(date -d '+8 hours' +%s), or unset it.") from None
    if late:
        raise UserError(f"the time until RUN_UNTIL is up: {page} doesn't begin. What was finished "
                        "is kept; run this again to go on.")


def execute(sources: Sequence[Path]) -> None:
    """Execute the pages in order, with times; the server for a lone 06 is started first."""
    numbers = [number_of(source) for source in sources]
    seconds: dict[str, float] = {}
    for source in sources:
        in_time(source.stem)
        if number_of(source) == "06" and "05" not in numbers and not server("start"):
            raise UserError("06 needs the server as 05 left it, and it does not start (see above). "
                            "`./run_all.sh 05 06` runs both.")
        start = time.perf_counter()
        notebooks.execute(source, run_dir("notebooks"))
        seconds[source.stem] = round(time.perf_counter() - start, 1)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # KiB, one process
        note_times(seconds, peak)
    print("   ".join(f"{name} {value:.0f} s" for name, value in seconds.items()))
    print(f"run_all: {len(seconds)} notebooks in {sum(seconds.values()) / 60:.1f} min, at most "
          f"{peak:.1f} GiB in one kernel; results in {notebooks.shown(run_dir())}, executed "
          f"notebooks in {notebooks.shown(run_dir('notebooks'))}")


@dataclass(frozen=True)
class Times:
    """What times.json holds."""

    seconds: dict[str, float]  # of each page, when it ran last
    peak_gib: float            # the largest memory of a kernel so far


def note_times(seconds: dict[str, float], peak: float) -> None:
    """Add the seconds of pages and the largest memory of a kernel, in GiB, to times.json."""
    path = run_dir("times.json")
    before = Times({}, 0.0)
    if path.exists():
        with contextlib.suppress(UserError, records.Misfit):  # a damaged one: begin anew
            before = records.from_json(Times, read_json(path))
    largest = round(max(before.peak_gib, peak), 2)
    write_json(path, records.to_json(Times(before.seconds | seconds, largest)))


def main(*words: str) -> None:
    """The range, with a lock on the run directory; servers that it started end with it."""
    os.chdir(ROOT)
    os.environ |= {"SIZE": size(), "RUN_DIR": str(run_dir().resolve())}  # for servers and kernels
    sources = chosen(words)
    run.writing()
    serves = {"05", "06", "07"} & set(map(number_of, sources))
    was_there = serves and server("status")
    try:
        execute(sources)
    finally:
        if serves and not was_there:
            server("stop")


if __name__ == "__main__":
    listen()
    run.one_line_errors()
    try:
        main(*sys.argv[1:])
    except Stopped as stopped:
        with contextlib.suppress(BrokenPipeError):
            print(f"\nrun_all: ended by {signal.Signals(stopped.args[0]).name}; the kernel and its "
                  "servers are stopped, what was finished is kept", file=sys.stderr, flush=True)
        os._exit(128 + stopped.args[0])  # threads that still wait do not matter
