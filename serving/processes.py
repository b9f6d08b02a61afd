"""The processes of a server: which ones they are, whether its leader lives, and their end."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from serving.records import ServerRecord
from tables.errors import UserError


def born(pid: int) -> float:
    """Seconds from the machine's boot to a process's start; no change of the clock moves it.

    Raises:
      psutil.Error: there is no such process.
    """
    created = psutil.Process(pid).create_time()
    return round(created - psutil.boot_time(), 1)


def _has_ended(process: psutil.Process) -> bool:
    """Whether a process is over, and only its entry waits for its parent."""
    return process.status() == psutil.STATUS_ZOMBIE


def _is_another(record: ServerRecord) -> bool:
    """Whether the recorded number was given to another process since."""
    with contextlib.suppress(psutil.Error):
        moved = abs(born(record.pid) - record.born)
        return moved > 0.2
    return False


def leads(record: ServerRecord) -> bool:
    """Whether the leader of a recorded server lives, the process that answers its requests.

    What it leaves behind when it dies, such as Python's resource tracker, doesn't count as it.
    """
    if _is_another(record):
        return False
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(record.pid)
        return not _has_ended(leader)
    return False


def _where(belongs: Callable[[int], bool]) -> list[int]:
    """Numbers of the live processes for which `belongs` is true."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if belongs(process.pid) and not _has_ended(process):
                pids.append(process.pid)
    return pids


def members(record: ServerRecord) -> list[int]:
    """Live processes of a recorded server: it leads a process group, which its workers stay in."""
    if _is_another(record):
        return []

    def in_its_group(pid: int) -> bool:
        return os.getpgid(pid) == record.pid

    return _where(in_its_group)


def speakers(log: Path) -> list[int]:
    """Live processes whose output is this log: the server of a folder that lost its record."""
    place = str(log.resolve())

    def prints_there(pid: int) -> bool:
        return os.readlink(f"/proc/{pid}/fd/1") == place

    return _where(prints_there)


def _reap(pids: list[int]) -> None:
    """Let children of ours that have ended disappear."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def end(living: Callable[[], list[int]], patience: float) -> None:
    """End processes: SIGTERM, and after `patience` seconds SIGKILL.

    Args:
      living: gives the numbers of those that still run.

    Raises:
      UserError: some don't end.
    """
    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        pids = living()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        deadline = time.monotonic() + seconds
        while living() and time.monotonic() < deadline:
            _reap(pids)
            time.sleep(0.1)
    left = living()
    if left:
        numbers = " ".join(map(str, left))
        raise UserError(f"the server didn't end. Run: kill -9 {numbers}")


def remove_container(container: str) -> None:
    """End and remove a container, if there is one of this name."""
    subprocess.run(["docker", "rm", "-f", container], capture_output=True)
