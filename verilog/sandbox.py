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
from dataclasses import dataclass

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


@functools.cache
def icarus_version():
    """Icarus Verilog's version as a tuple, for example (11, 0).

    Raises:
      UserError: it is not installed.
    """
    if not (shutil.which("iverilog") and shutil.which("vvp")):
        raise UserError("Icarus Verilog (iverilog, vvp) is missing. "
                         "Run: sudo apt-get install -y iverilog")
    answer = subprocess.run(["iverilog", "-V"], capture_output=True, text=True)
    found = re.search(r"Icarus Verilog version (\d+)\.(\d+)", answer.stdout)
    return tuple(map(int, found.groups())) if found else (0, 0)


@functools.cache
def network_guard():
    """Words before a command that cut it off the network; empty where that is not allowed."""
    return next((words for words in (("unshare", "-n", "--"), ("unshare", "-rn", "--"))
                 if _works(words)), ())


@functools.cache
def tether():
    """Words before a command that is to end with the process that waits for it, even by kill -9."""
    words = ("setpriv", "--pdeathsig", "KILL", "--")
    return words if _works(words) else ()


def _works(words):
    return bool(shutil.which(words[0])) and subprocess.run(
        [*words, "true"], capture_output=True).returncode == 0


_LIMITED = """ulimit -c 0; ulimit -t $1; ulimit -v $2 2>/dev/null; ulimit -f $3
shift 3; exec "$@" """


def run_limited(command, folder, limits):
    """Run a command under `limits` in a session of its own, without network where that is possible.

    Args:
      folder: working directory, and the only place for temporary files.

    Returns:
      (output, exit status, None or "time" or "output": the limit that ended it).

    Raises:
      UserError: somebody else killed it.
    """
    words = [*tether(), *network_guard(), "/bin/sh", "-c", _LIMITED, "sh",
             str(math.ceil(limits.seconds)), str(limits.memory // 1024),
             str(-(-limits.file // 512)), *command]
    # "." and not the folder's path: iverilog puts TMPDIR into a shell's command, where a `$` counts.
    environment = {"PATH": os.environ.get("PATH", ""), "TMPDIR": ".", "LC_ALL": "C"}
    process = subprocess.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    start, output, ended = time.monotonic(), b"", None
    deadline = start + 10 * limits.seconds
    try:
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while ended is None:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    ended = "time"
                    break
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                output += chunk
                if len(output) > limits.output:
                    ended = "output"
        if ended is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() != 0 and time.monotonic() - start > 0.95 * limits.seconds:
                ended = "time"  # still there, or it or a child of it ran out of CPU time
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    if ended is None and process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise UserError(f"{command[0]} was killed from outside (often: not enough memory). What is "
                        "judged so far is kept where it was saved; run this again.")
    return output[:limits.output].decode("utf-8", "replace"), process.returncode, ended
