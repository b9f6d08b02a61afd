"""One vLLM server per folder: its start, its record, its end.

`<folder>/server.json` records it (`records.ServerRecord`); `<folder>/server.log` is what it says;
`<folder>/ready.json` keeps how long the last start took. A second server beside it has a folder of
its own. A server outlives the Python that started it.
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from serving import commands, environment, processes
from serving.asking import healthy
from serving.options import IMAGES, FileStates, Options, check, file_states
from serving.records import ServerRecord, write_json
from tables import files, hardware
from tables.errors import UserError

# The weights fit, and too little is left for the cache. In any other case of no memory, the cache
# has filled a chip up to vLLM's share, and what's left is too little for the programs.
NO_CACHE = re.compile(r"(?i)No available memory|KV cache is needed")
NO_MEMORY = re.compile(r"(?i)out ?of ?memory|RESOURCE_EXHAUSTED|cannot allocate|MemoryError|"
                       r"\bOOM\b|less than (requested|desired GPU) memory")
NOISE = re.compile(r"\s*$|nanobind:|see https://nanobind| - (leaked|\.\.\. skipped)", re.I)
AN_ERROR = re.compile(r"\w(Error|Exception): |error: ")
# What a TPU server's log says when it starts in a slower way, and what that cost others. (Both
# numbers of tokens are of Gemma 4 31B on four v6e chips, 256 requests in flight.)
TRITON = re.compile(r"forcing TRITON_ATTN", re.I)
CACHE_DTYPE = re.compile(r"regular_attn_dtype=(\w+)")
SPEAKS_OF_FP8 = re.compile(r"fp8\w* (data type to store kv cache|for FP8 KV cache)", re.I)
COLORS = re.compile(r"\x1b\[[\d;]*m")
# A server begins once it reads a word. We say it when the record is on the disk; if we die or fail
# before, the pipe closes, `read` fails, and nothing was started that nobody knows of.
GATE = 'read -r word && exec "$@" </dev/null'
BEHIND = 10  # how far behind its clients a server on the CPU stands, as `nice` counts


class Identity(NamedTuple):
    """What makes a server the one that it is: started from anything else, it's another one."""

    command: list[str]  # with the port of the options, which may be 0: any
    settings: list[str]
    files: FileStates


# -- What runs -------------------------------------------------------------------------------------

def current(folder: str | Path) -> ServerRecord:
    """The record of the server that runs now.

    Raises:
      UserError: no server was started, or it has ended, or it doesn't answer; says what to run.
    """
    record = ServerRecord.load(folder)
    if record is None:
        raise UserError(f"no server is recorded in {folder}. Run 05_serve_vllm first.")
    if processes.leads(record) and healthy(record):
        return record
    trouble = "has died"
    if processes.leads(record):
        trouble = "doesn't answer"
    last = last_lines(record.log)
    raise UserError(f"the server of {record.name} (process {record.pid}) {trouble}. "
                    f"Run 05_serve_vllm again. It last said ({record.log}):\n{last}")


def is_alive(folder: str | Path) -> bool:
    """Whether the server of a folder lives; it may still be starting.

    Cheap, and without a question to the server: ask it while you wait for an answer, and a server
    that died is noticed at once.

    Raises:
      UserError: its record is damaged.
    """
    record = ServerRecord.load(folder)
    return record is not None and processes.leads(record)


def _text_of(log: str | Path) -> str:
    """What a log says, without colors; "" if there is none."""
    path = Path(log)
    if not path.exists():
        return ""
    text = path.read_text(errors="replace")
    return COLORS.sub("", text)


def last_lines(log: str | Path) -> str:
    """The first error of a server's log, if it names one, and its last 15 lines; no secrets."""
    text = environment.without_secrets(_text_of(log))
    lines = [line for line in text.splitlines() if not NOISE.match(line)]
    shown = lines[-15:] or ["nothing"]
    for line in lines[:-15]:
        if AN_ERROR.search(line) and "root cause" not in line:
            shown.insert(0, line)
            break

    short = [line[:300] for line in shown]
    if NO_CACHE.search(text):
        short.append("out of memory for the cache: lower max_model_len if it can't hold one "
                     "request; otherwise take more chips, or quantize the weights")
    elif NO_MEMORY.search(text):
        short.append("out of memory: end what else holds it, or leave more to compute in: "
                     'flags=("--gpu-memory-utilization", "0.85")')
    return "\n".join(short)


def slow_paths(log: str | Path) -> list[str]:
    """What a TPU server's log gives away about its speed: a sentence each, [] for nothing.

    A server that falls back to a slower kernel is as healthy as any, and says so only in its log.
    """
    text = _text_of(log)
    sentences = []
    if TRITON.search(text):
        sentences.append(
            "slow attention: the server fell back to TRITON_ATTN. For others that cost more than "
            "half of the speed (2,031 tokens/s where 4,752 were reached): use the pinned version, "
            "not a nightly one")
    stored = CACHE_DTYPE.findall(text)
    if "bfloat16" in stored and SPEAKS_OF_FP8.search(text):
        sentences.append(
            "the KV cache is stored in bfloat16, though the log speaks of fp8: reckon with two "
            "bytes a number")
    return sentences


# -- Start -----------------------------------------------------------------------------------------

def prepare(*words: str) -> None:
    """Install an environment or fetch an image; if it's there already, this takes a second.

    It has the whole environment of the shell: packages and images may have to come through a proxy.

    Raises:
      UserError: it failed.
    """
    done = subprocess.run(words, cwd=commands.ROOT)
    if done.returncode:
        plain = environment.without_secrets(shlex.join(words))
        raise UserError(f"`{plain}` failed, see above.")


def _prepare_engine(options: Options) -> None:
    """Bring the image or the environment that the engine needs.

    Raises:
      UserError: it can't be brought.
    """
    if options.docker:
        image = shlex.quote(options.image or IMAGES[options.engine])
        is_here = f"docker image inspect {image} >/dev/null 2>&1"
        prepare("sh", "-c", f"{is_here} || docker pull {image}")
    elif options.engine == "tpu":
        version = [word for word in options.environment if word.startswith("VLLM_TPU=")]
        prepare("env", *version, "bash", "setup.sh", "serve-tpu")
    else:
        prepare("bash", "setup.sh", "serve")


def start(options: Options, folder: str | Path, wait: bool = True) -> ServerRecord:
    """Serve `options`, wait until the server is healthy, and return its record.

    A healthy server of the same options and files is reused, and one that is still starting is
    waited for, also if another process is starting it at this moment. Any other server of this
    folder is stopped first, because two don't fit into an accelerator's memory. If this fails or is
    interrupted, no server is left.

    Args:
      folder: where the record and the log go.
      wait: False returns at once; the same call again, without it, waits.

    Raises:
      UserError: what `check` raises; the port is in use; the record can't be written; or the
        server died or wasn't healthy in time: its last lines.
    """
    folder = Path(folder)
    check(options)
    container = commands.container_of(folder)
    settings, words = commands.parts(options, container)
    served = commands.folders_of(options).all()
    states = file_states(*served)
    wanted = Identity(words, settings, states)
    with _terminable(), contextlib.ExitStack() as failed:
        failed.callback(stop, folder)
        with _locked(folder):
            record = _reusable(folder, wanted)
        if record is not None and healthy(record):
            print(f"{record.name} runs already, at {record.base_url}")
        else:
            launched = False
            if record is None:
                record, launched = _launched(options, folder, wanted)
            if wait:
                _wait(record, options.timeout)
            if wait and launched:  # if two processes wait, the one that launched it writes
                ready = {"seconds": round(record.age(), 1)}
                write_json(folder / "ready.json", ready)
        failed.pop_all()

    if options.engine.startswith("tpu") and healthy(record):
        for sentence in slow_paths(record.log):
            print(sentence)
    return record


def _launched(options: Options, folder: Path, wanted: Identity) -> tuple[ServerRecord, bool]:
    """A server that has just been started; False beside it if another process was faster."""
    _prepare_engine(options)
    with _locked(folder):
        record = _reusable(folder, wanted)  # another process may have started it
        if record is not None:
            return record, False
        record = _launch(options, folder, wanted)
        return record, True


def _reusable(folder: Path, wanted: Identity) -> ServerRecord | None:
    """The living server of this folder, if it is the one that is wanted."""
    try:
        record = ServerRecord.load(folder)
    except UserError:  # damaged: `_launch` ends what still runs, and writes another
        return None
    if record is None or not processes.leads(record):
        return None
    identity = Identity(record.command, record.environment, record.files)
    if identity != wanted:
        return None
    return record


def _launch(options: Options, folder: Path, wanted: Identity) -> ServerRecord:
    """Start the process; its record is on the disk before it begins its work."""
    container = commands.container_of(folder)
    _stop(folder)
    if options.docker:  # one that lost its record has the same name
        processes.remove_container(container)
    if options.engine.startswith("tpu"):
        _wait_for_chips()

    port = _free_port(options.host, options.port)
    with_port = dataclasses.replace(options, port=port)
    settings, words = commands.parts(with_port, container)
    commands.link_plain_names(options)
    with _opened(folder / "server.log") as log:
        process = subprocess.Popen(
            ["sh", "-c", GATE, "server", *words],
            cwd=commands.ROOT,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment.for_child(settings, commands.own_places(options.engine)))
    if options.engine == "cpu":
        _let_clients_go_first(process.pid)
    assert process.stdin
    with process.stdin as gate:
        record = _record_of(process.pid, port, options, folder, wanted)
        record.save(folder)
        gate.write(b"begin\n")
    return record


def _let_clients_go_first(pid: int) -> None:
    """Give a server on the CPU less of a right to its cores than who asks it has.

    vLLM's processes wait for each other in loops that never sleep. On two cores a client that came
    third was kept waiting for up to a second, read its tokens late, and sent its requests late. In
    half of the measurements the wait for a first token was then 20 to 100 times as long.

    The process waits at `GATE` meanwhile, and what it will start inherits its priority. Linux
    weighs whole sessions before it weighs their processes, so the session gets a number, too.
    """
    now = os.getpriority(os.PRIO_PROCESS, pid)
    os.setpriority(os.PRIO_PROCESS, pid, max(now, BEHIND))
    session = Path(f"/proc/{pid}/autogroup")
    with contextlib.suppress(OSError):  # there is no such file, or it can't be written
        session.write_text(str(BEHIND))


def _wait_for_chips(patience: float = 120.0) -> None:
    """Wait until nobody has a chip's file open: a server that has just ended still holds them.

    Raises:
      UserError: another process keeps them.
    """
    deadline = time.monotonic() + patience
    while True:
        file = hardware.busy()
        if not file:
            return
        if time.monotonic() >= deadline:
            raise UserError(
                f"{file} is still held by another process, and only one at a time can have the "
                f"chips. See which: sudo lsof {file}. Shut it down, for example another notebook's "
                "kernel, then run this again.")
        time.sleep(1.0)


def _record_of(
        pid: int,
        port: int,
        options: Options,
        folder: Path,
        wanted: Identity) -> ServerRecord:
    """The record of a server that was started this moment."""
    reach = options.host
    if options.host in ("0.0.0.0", ""):  # both are every address
        reach = "127.0.0.1"
    container = ""
    if options.docker:
        container = commands.container_of(folder)
    return ServerRecord(
        pid=pid,
        born=processes.born(pid),
        started=time.monotonic(),
        base_url=f"http://{reach}:{port}",
        name=options.name,
        model=options.model,
        engine=options.engine,
        max_model_len=options.max_model_len,
        container=container,
        log=str(folder / "server.log"),
        command=wanted.command,
        environment=wanted.settings,
        files=wanted.files)


def _opened(path: Path) -> BinaryIO:
    """A file to write, in a folder that is made for it.

    Raises:
      UserError: it can't be written.
    """
    with files.refusals(path, "RUN_DIR"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "wb")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time decides what runs in this folder; another one waits here."""
    with _opened(folder / ".server.lock") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wait(record: ServerRecord, timeout: float) -> None:
    """Wait until a server is healthy.

    Raises:
      UserError: it died, or `timeout` seconds passed; with its last lines.
    """
    last_told = 0.0  # seconds after its start
    while not healthy(record):
        waited = record.age()
        trouble = ""
        if not processes.leads(record):
            trouble = f"ended after {waited:.0f} s"
        elif waited > timeout:
            trouble = f"wasn't healthy within {timeout:.0f} s and was stopped"
        if trouble:
            last = last_lines(record.log)
            raise UserError(f"the server {trouble}. It last said ({record.log}):\n{last}")
        if waited - last_told >= max(10.0, waited / 6):
            last_told = waited
            print(f"starting ... {waited:3.0f} s")
        time.sleep(0.25)
    print(f"healthy after {record.age():.0f} s at {record.base_url}")


def _free_port(host: str, port: int) -> int:
    """A free port, or the one that is wanted if it is free.

    Raises:
      UserError: it is in use, or this machine has no such address, or no right to this port.
    """
    try:
        with socket.create_server((host, port)) as probe:
            return probe.getsockname()[1]
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UserError(
                f"nobody can listen at host {host!r}, port {port} here ({error.strerror}). Take "
                "127.0.0.1 (this machine only), 0.0.0.0 or another IPv4 address of it, and a port "
                "from 1024 on (0: any).") from error
        raise UserError(
            f"port {port} on {host} is in use ({error.strerror}). See who: ss -ltnp "
            f"'sport = :{port}'. Stop it, or choose another port (0: any).") from error


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that everything is cleaned up; only the main thread can do
    that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- Stop ------------------------------------------------------------------------------------------

@contextlib.contextmanager
def running(options: Options, folder: str | Path) -> Iterator[str]:
    """A server for the length of a `with` block; gives its URL. However the block ends, it is
    stopped."""
    with _terminable():
        try:
            yield start(options, folder).base_url
        finally:
            stop(folder)


def stop(folder: str | Path, patience: float = 20.0) -> bool:
    """End the server of a folder with all its processes; True if one ran.

    Without a record, or with a damaged one, its processes are those that write into its log.

    Args:
      patience: seconds between SIGTERM and SIGKILL.

    Raises:
      UserError: a process doesn't end.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return False
    with _locked(folder):
        return _stop(folder, patience)


def _stop(folder: Path, patience: float = 20.0) -> bool:
    """`stop`, for who holds the lock."""
    log = folder / "server.log"
    path = ServerRecord.path(folder)
    record = None
    with contextlib.suppress(UserError):
        record = ServerRecord.load(folder)

    def living() -> list[int]:
        pids = set(processes.speakers(log))
        if record:
            pids.update(processes.members(record))
        return sorted(pids)

    ran = bool(living())
    container = ""
    if record:
        container = record.container
    elif path.exists() and shutil.which("docker"):  # a damaged record: by its name
        container = commands.container_of(folder)
    if container:
        processes.remove_container(container)
    processes.end(living, patience)
    path.unlink(missing_ok=True)
    return ran
