"""Run a program that may do anything: limits, no network, nothing left behind."""

import contextlib
import functools
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one compilation, and one simulation, may use.

    Ten times `seconds` pass on the wall clock at the most. (verilog-eval: 30 in all; a simulator
    never sleeps, and a busy machine must not turn a pass into a timeout.)
    """

    seconds: float = 30.0  # of CPU time
    memory: int = 1 << 30  # bytes of address space
    output: int = 1 << 20  # bytes printed; more is a failure, and more than `file` ends the process
    file: int = 64 << 20   # bytes of any file that is written


@functools.cache
def icarus_version():
    """Icarus Verilog's version as a tuple, for example (11, 0).

    Raises:
      ValueError: it is not installed.
    """
    if not (shutil.which("iverilog") and shutil.which("vvp")):
        raise ValueError("Icarus Verilog (iverilog, vvp) is missing. "
                         "Run: sudo apt-get install -y iverilog")
    answer = subprocess.run(["iverilog", "-V"], capture_output=True, text=True)
    found = re.search(r"Icarus Verilog version (\d+)\.(\d+)", answer.stdout)
    return tuple(map(int, found.groups())) if found else (0, 0)


@functools.cache
def allowed(*beginnings):
    """The first of these beginnings of a command, tuples of words, that this machine allows; else ()."""
    return next((words for words in beginnings if shutil.which(words[0]) and not subprocess.run(
        [*words, "true"], capture_output=True).returncode), ())


TETHER = (("setpriv", "--pdeathsig", "KILL", "--"),)  # to end with who waits for it, even by kill -9
NO_NETWORK = ("unshare", "-n", "--"), ("unshare", "-rn", "--")

_LIMITED = """ulimit -c 0; ulimit -t $1; ulimit -v $2 2>/dev/null; ulimit -f $3
shift 3; exec "$@" """


def run_limited(command, folder, limits):
    """Run a command under `limits` in a session of its own, without network where that is possible.

    Args:
      folder: working directory, and the only place for temporary files.

    Returns:
      (output, exit status, None or "time" or "output": the limit that it broke).

    Raises:
      ValueError: somebody else killed it.
    """
    words = [*allowed(*TETHER), *allowed(*NO_NETWORK), "/bin/sh", "-c", _LIMITED, "sh",
             str(math.ceil(limits.seconds)), str(limits.memory // 1024),
             str(-(-limits.file // 512)), *command]
    environment = {"PATH": os.environ.get("PATH", ""), "TMPDIR": str(folder), "LC_ALL": "C"}
    start, ended = time.monotonic(), None
    with tempfile.TemporaryFile() as printed:  # unlike a pipe it can be waited for without reading it
        process = subprocess.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                   stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
        clock = threading.Timer(10 * limits.seconds, os.killpg, (process.pid, signal.SIGKILL))
        clock.start()
        try:
            process.wait()
        finally:
            clock.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read(limits.output + 1)
    if len(output) > limits.output:
        ended = "output"
    elif process.returncode and time.monotonic() - start > 0.95 * limits.seconds:
        ended = "time"  # it, or a child of it, ran out of CPU time or of ours
    if ended is None and process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise ValueError(f"{command[0]} was killed from outside (often: not enough memory). What is "
                        "judged so far is kept where it was saved; run this again.")
    return output[:limits.output].decode("utf-8", "replace"), process.returncode, ended
