"""Run a program that may do anything: limits, no network, nothing left behind."""

import contextlib
import functools
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tables.errors import UserError


@dataclass(frozen=True)
class Limits:
    """What one compilation, and one simulation, may use.

    Ten times `seconds` pass on the wall clock at the most. (verilog-eval: 30 in all; a simulator
    never sleeps, and a busy machine must not turn a pass into a timeout.)
    """

    seconds: float = 30.0  # of CPU time
    memory: int = 1 << 30  # bytes of address space
    output: int = 1 << 20  # bytes printed; more ends the process
    file: int = 64 << 20   # bytes of any file that is written


class Ran(NamedTuple):
    """What became of a command."""

    output: str
    status: int         # its exit status
    ended: str | None   # "time" or "output", the limit that ended it; None where none did


@functools.cache
def icarus_version() -> tuple[int, ...]:
    """Icarus Verilog's version as a tuple, for example (11, 0); (0, 0) where it doesn't say.

    Raises:
      UserError: it isn't installed.
    """
    for program in ("iverilog", "vvp"):
        if shutil.which(program) is None:
            raise UserError("Icarus Verilog (iverilog, vvp) is missing. "
                            "Run: sudo apt-get install -y iverilog")
    answer = subprocess.run(["iverilog", "-V"], capture_output=True, text=True)
    version = re.search(r"Icarus Verilog version (\d+)\.(\d+)", answer.stdout)
    if version is None:
        return (0, 0)
    return (int(version[1]), int(version[2]))


@functools.cache
def network_guard() -> tuple[str, ...]:
    """Words before a command that cut it off the network; empty where that isn't allowed."""
    for words in (("unshare", "-n", "--"), ("unshare", "-rn", "--")):
        if _works(words):
            return words
    return ()


@functools.cache
def tether() -> tuple[str, ...]:
    """Words before a command that is to end with the process that waits for it, even by kill -9."""
    words = ("setpriv", "--pdeathsig", "KILL", "--")
    if _works(words):
        return words
    return ()


def _works(words: tuple[str, ...]) -> bool:
    """Can a command be run behind these words?"""
    if shutil.which(words[0]) is None:
        return False
    done = subprocess.run([*words, "true"], capture_output=True)
    return done.returncode == 0


_LIMITED = """ulimit -c 0; ulimit -t $1; ulimit -v $2 2>/dev/null; ulimit -f $3
shift 3; exec "$@" """
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


def run_limited(command: Sequence[str], folder: str | os.PathLike, limits: Limits) -> Ran:
    """Run a command under `limits` in a session of its own, without network where that is possible.

    Args:
      folder: working directory, and the only place for temporary files.

    Raises:
      UserError: somebody else killed it.
    """
    start = time.monotonic()
    deadline = start + 10 * limits.seconds
    process = _start(command, folder, limits)
    try:
        output, ended = _collect(process, deadline, limits.output)
        if ended is None:
            ended = _wait(process, start, deadline, limits)
    finally:
        _end_session(process)
    if ended is None and process.returncode in _KILLED:
        raise UserError(f"{command[0]} was killed from outside (often: not enough memory). What is "
                        "judged so far is kept where it was saved; run this again.")
    kept = output[:limits.output]
    text = kept.decode("utf-8", "replace")
    return Ran(text, process.returncode, ended)


def _start(command: Sequence[str], folder: str | os.PathLike, limits: Limits) -> subprocess.Popen:
    """Start the command behind its limits, with what it prints on one pipe."""
    seconds = math.ceil(limits.seconds)
    kibibytes = limits.memory // 1024
    blocks = math.ceil(limits.file / 512)
    limited = ["/bin/sh", "-c", _LIMITED, "sh", str(seconds), str(kibibytes), str(blocks)]
    words = [*tether(), *network_guard(), *limited, *command]
    environment = {
        "PATH": os.environ.get("PATH", ""),
        # "." and not the folder's path: iverilog puts TMPDIR into a shell's command, and a `$`
        # there would be a variable.
        "TMPDIR": ".",
        "LC_ALL": "C"}
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True)


def _collect(process: subprocess.Popen, deadline: float, most: int) -> tuple[bytes, str | None]:
    """Read what a process prints until it closes its output: (that, the limit that it broke)."""
    output = b""
    pipe = process.stdout
    assert pipe is not None  # `_start` asked for it
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while True:
            patience = max(0.0, deadline - time.monotonic())
            if not ready.select(patience):
                return output, "time"
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                return output, None
            output += chunk
            if len(output) > most:
                return output, "output"


def _wait(process: subprocess.Popen, start: float, deadline: float, limits: Limits) -> str | None:
    """Wait for a process that has closed its output: "time" where it ran out of it, else None."""
    patience = max(0.1, deadline - time.monotonic())
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    took = time.monotonic() - start
    # It's still there, or it or a child of it ran out of CPU time.
    if process.poll() != 0 and took > 0.95 * limits.seconds:
        return "time"
    return None


def _end_session(process: subprocess.Popen) -> None:
    """Kill a process and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
