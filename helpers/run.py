"""One size dial, one run directory with one writer, whole folders, and what they were made from."""

import contextlib
import datetime
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tables import files, hardware
from tables.errors import UserError
from tables.files import atomic_file as atomic_file  # these three for all who write into a run
from tables.files import write_json as write_json
from tables.files import write_text as write_text

# A new size is one entry here, and in `tables.hardware.SLICES` where it is taken by itself.
SIZES = {
    "tiny": "the tiny Gemma 4 in assets/: any laptop, Colab CPU or CI machine",
    "e2b": "google/gemma-4-E2B-it on one TPU chip (v5e-1, v6e-1)",
    "31b": "google/gemma-4-31B-it on a v5p-8 (training) and a v6e-8 (serving)",
}
# Folders of a run that are replaced as a whole, with a file by which we know that one is ours.
REPLACED = {"data": "meta.json", "merged": "config.json", "adapter": "adapter_config.json"}
Chosen = TypeVar("Chosen")  # a page's settings class
_ROOT = Path(__file__).resolve().parent.parent


# -- One line for what the reader can mend ------------------------------------------------------

def one_line_errors() -> None:
    """Show what the reader can mend (a full disk, Ctrl-C) as one line, in a script or a kernel."""
    shell = _shell()
    if shell:
        shell.set_custom_exc((Exception,), _show_in_shell)
    else:
        sys.excepthook = _show_in_script


def what_to_do(error: BaseException) -> str:
    """The line of an error that a reader can mend; "" for any other.

    There are two kinds: a `UserError`, and a place of ours (`_setting_of`) that's full or that we
    may not write. Everything else is a bug and keeps its traceback.
    """
    if isinstance(error, UserError):
        return str(error)
    number = getattr(error, "errno", None)
    place = getattr(error, "filename", None)
    if "No space left on device" in str(error):  # Orbax and safetensors pass it on as text
        number = errno.ENOSPC
    if number == errno.ENOSPC and place is None:  # a file that was open already
        place = os.environ.get("RUN_DIR") or "runs"
        setting = "RUN_DIR"
    else:
        setting = _setting_of(place)
    if not setting:
        return ""
    return files.refusal(number, place, setting)


class DamagedError(Exception):
    """A file that can be read, and isn't what was saved."""


# What a wrong argument of ours ends in, however deep inside a library. No damaged file did, whether
# a bit, a half or all of it was changed (LOG, "What does Orbax raise").
BUGS = (TypeError, NameError)


def is_a_bug(error: BaseException) -> bool:
    """Whether an error is our own fault, so that it keeps its traceback.

    Ask this where a library's error means that a file is damaged or that a service refuses. It's
    ours by its class, wherever it was raised (`BUGS`), or because it was raised in our own code. A
    `UserError` or a `DamagedError` isn't a bug.
    """
    if isinstance(error, BUGS):
        return True
    trace = error.__traceback__
    if trace is None or isinstance(error, (UserError, DamagedError)):
        return False
    while trace.tb_next:
        trace = trace.tb_next
    raised_in = Path(trace.tb_frame.f_code.co_filename)
    return raised_in.parent in (_ROOT / "helpers", _ROOT / "tables")


@contextlib.contextmanager
def damaged() -> Iterator[None]:
    """Call a library inside this to read a file: its error says that the file is damaged.

    Only that one call may be inside. A bug of ours (`is_a_bug`) and a full memory pass as they are.

    Raises:
      DamagedError: the library's error in a line, with its class.
    """
    try:
        yield
    except (DamagedError, UserError):  # it has its line already
        raise
    except Exception as error:  # noqa: BLE001  Orbax's own for torn files is a plain Exception
        text = str(error)
        is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text
        if is_memory or is_a_bug(error):
            raise
        first_line = ""
        if text:
            first_line = text.splitlines()[0]
        raise DamagedError(f"{type(error).__name__}: {first_line[:150]}") from error


@contextlib.contextmanager
def damaged_notes(folder: object) -> Iterator[None]:
    """Open a folder of checkpoints inside this: Orbax reads the notes of all of them at once.

    Raises:
      UserError: the notes of one checkpoint are JSON, but not what Orbax wrote.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(f"a checkpoint in {folder} is damaged, in its _CHECKPOINT_METADATA "
                        f"({error}). Move that checkpoint away: the others are used.") from error


def _setting_of(name: object) -> str:
    """The setting that says where a file of ours is, RUN_DIR or TMPDIR; "" for a file elsewhere."""
    if not isinstance(name, (str, bytes, os.PathLike)):
        return ""
    path = Path(os.fsdecode(name)).absolute()
    with contextlib.suppress(UserError):
        if path.is_relative_to(_run_folder().absolute()):
            return "RUN_DIR"
    if path.is_relative_to(tempfile.gettempdir()):
        return "TMPDIR"
    return ""


def _shell() -> Any:
    """IPython's shell, if this process is a kernel."""
    if "IPython" not in sys.modules:
        return None
    return sys.modules["IPython"].get_ipython()


def _show_in_script(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """What a script prints of an error; it takes what `sys.excepthook` takes."""
    line = what_to_do(error)
    if issubclass(kind, KeyboardInterrupt):
        line = "interrupted. What was finished is kept: run this again to go on."
    if line:
        print(f"Error: {line}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _show_in_shell(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """What a notebook shows of an error; it takes what IPython's custom handler takes."""
    line = what_to_do(error)
    if line and not isinstance(error, UserError):
        kind = UserError
        error = UserError(line)
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


# -- The size -----------------------------------------------------------------------------------

def size() -> str:
    """The size at hand: `SIZE` if set, else what the hardware is for (`tables.hardware.SLICES`).

    Raises:
      UserError: `SIZE` is not one of the known sizes, or it is unset on a TPU slice that none of
        them is for; the sizes are listed.
    """
    chosen = os.environ.get("SIZE", "").strip().lower()
    if chosen:
        if chosen not in SIZES:
            raise UserError(f"SIZE={chosen} is unknown. The sizes are\n{_listed()}")
        return chosen
    machine = hardware.here()
    if machine.accelerator != "tpu":
        return "tiny"
    if machine.slice:
        meant = hardware.slice_of(machine.slice).size
        if meant:
            return meant
    raise UserError(f"no size is meant for this machine, {machine}. Set SIZE to the one you want:\n"
                    f"{_listed()}")


def _listed(names: Iterable[str] = SIZES) -> str:
    """Sizes and what they're for, a line each."""
    lines = [f"  {name}: {SIZES[name]}" for name in names]
    return "\n".join(lines)


def same_size(there: str, source: str) -> None:
    """Refuse to go on from what another page made at another size.

    Raises:
      UserError: with the two ways out.
    """
    if there != size():
        raise UserError(f"{source} ran at size {there}, and this is size {size()}. Set "
                        f"os.environ[\"SIZE\"] = \"{there}\" in a cell before the first, or run "
                        f"{source} at size {size()}.")


def choose(settings: Mapping[str, Chosen]) -> Chosen:
    """Return the settings of the size at hand, and print which size and why.

    Args:
      settings: {size: settings}, such as {"31b": FULL, "e2b": E2B, "tiny": TINY}.

    Raises:
      UserError: this page has no settings for that size.
    """
    name = size()
    if name not in settings:
        known = _listed(settings)
        raise UserError(f"this notebook has no settings for size {name}. Set SIZE to one that it "
                        f"has, or add yours to its settings cell:\n{known}")
    why = "SIZE is set"
    if not os.environ.get("SIZE"):
        why = f"{hardware.here()}, SIZE unset"
    print(f"size {name} ({why}): {SIZES[name]}")
    return settings[name]


# -- Places -------------------------------------------------------------------------------------

def run_dir(*parts: str) -> Path:
    """A path under the run directory: `RUN_DIR`, else `runs/<size>` in the repository.

    The run directory is made, but nothing below it. Where it lies below the working directory, the
    path is relative.

    Raises:
      UserError: it holds more than a run, such as the repository itself; Orbax couldn't save there;
        or it can't be made.
    """
    base = _run_folder()
    whole = base.resolve()
    if "[" in str(whole):  # Orbax 0.12.8 takes the path for a pattern when it joins its files
        raise UserError(f"the run's folder {whole} has a [ in its path, and Orbax would save "
                        "checkpoints there without their weights. Set RUN_DIR to a path without "
                        "one.")
    if _ROOT.is_relative_to(whole) or whole == Path.home():
        inside = base / "runs" / "mine"
        raise UserError(f"RUN_DIR={base} holds more than a run. Name a folder of its own, such as "
                        f"{inside}.")
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = _why_no_folder(base, error)
        raise UserError(f"no folder for the run can be made at {base} ({why}). Set RUN_DIR to "
                        "another place.") from None
    here = Path.cwd()
    if base.is_relative_to(here):
        base = base.relative_to(here)
    return base.joinpath(*parts)


def _why_no_folder(place: Path, error: OSError) -> str:
    """Why no folder could be made at a place."""
    if place.is_symlink() and not place.exists():
        return f"it is a link to {os.readlink(place)}, which does not exist"
    if place.exists():
        return "it is a file"
    return f"{error.strerror}: {error.filename}"


def _run_folder() -> Path:
    """Where the run directory is or would be."""
    named = os.environ.get("RUN_DIR")
    if named:
        chosen = Path(named)
    else:
        chosen = Path("runs") / size()
    try:
        return chosen.expanduser()
    except RuntimeError:  # the ~name of nobody here
        raise UserError(f"RUN_DIR={chosen} names a home folder, but nobody on this machine "
                        "has that name.") from None


def room(
    folder: Path | str, size: float, what: str, instead: str = "Set RUN_DIR elsewhere."
) -> None:
    """Say before the first byte that a disk is too small.

    Args:
      folder: on that disk; it needn't exist yet.
      size: bytes that will be written.
      what: they are, as the message calls it.
      instead: what to do if they don't fit.

    Raises:
      UserError: so many bytes are not free.
    """
    place = Path(folder)
    while not place.exists():  # ends at / or at .
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        free_gb = free / 1e9
        size_gb = size / 1e9
        raise UserError(f"{folder} has {free_gb:.2f} GB free, for {what} it takes {size_gb:.2f}. "
                        f"{instead}")


def local_path(name: Path | str) -> bool:
    """Is this name, of a model or a dataset, clearly meant as a path on this machine?"""
    text = str(name)
    if "://" in text:
        return False
    if text.startswith(("/", ".", "~")):
        return True
    if text.count("/") > 1:
        return True
    first, slash, _ = text.partition("/")
    if not slash:
        return False
    return Path(first).is_dir()


def require(path: Path | str, page: str) -> Path:
    """Return `path` if it exists; else say which page writes it.

    Raises:
      UserError: the file or directory is missing.
    """
    path = Path(path)
    if path.exists():
        return path
    number = page[:2]
    name = size()
    cell = ""
    if name in ("tiny", "e2b"):  # at 31b a cell must not start hours of a machine that costs money
        cell = f' Or let a cell run 02 to {number} here: helpers.catch_up("{number}")'
    raise UserError(f"{path} is missing. Run {page} first (SIZE={name}), or `./run_all.sh "
                    f"{number}`.{cell}")


def catch_up(last: str) -> None:
    """Run pages 02 to `last` ("03", say) with this Python, for a reader who starts in the middle.

    01 is left out, because it only looks at the machine and makes nothing that another page needs.

    Raises:
      UserError: one of them failed; its own last words are in the text.
    """
    for source in sorted(_ROOT.glob("[0-9][0-9]_*.py")):
        number = source.name[:2]
        if "02" <= number <= last[:2]:
            _run_page(source)


def _run_page(source: Path) -> None:
    """Run one page as a program, without showing its figures.

    Raises:
      UserError: it failed; its own last words are in the text.
    """
    command = [sys.executable, source.name]
    environment = {**os.environ, "MPLBACKEND": "agg"}
    with phase(source.stem, every=30):
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        why = f"exit status {done.returncode}"
        lines = done.stderr.strip().splitlines()
        if lines:
            why = lines[-1].removeprefix("Error: ")
        raise UserError(f"{source.stem} failed: {why}")


# -- One writer ---------------------------------------------------------------------------------

_lock: Any = None  # this process's FileLock, once it has one


def writing() -> None:
    """Be the only process that writes to the run directory; the opening of a page calls this.

    A script holds the lock until it ends, a kernel while a cell runs: a notebook that is merely
    open is in nobody's way. The operating system's lock ends with the process, however that ends.

    Raises:
      UserError: another process is writing, or a folder that we would replace isn't ours.
    """
    global _lock
    path = run_dir(".lock").resolve()
    for folder, ours in REPLACED.items():  # now, rather than after hours of work
        _only_ours(path.with_name(folder), ours)
    held_for_us = os.environ.get("RUN_DIR_LOCKED") == str(path)  # by who started us
    if held_for_us or _lock:
        return
    from filelock import FileLock, Timeout  # not before it is installed
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{path.parent} is being written by another process. Wait until it is "
                        "done, or set RUN_DIR to another folder.") from None
    except OSError:  # some network mounts know no locks
        if not os.access(path.parent, os.W_OK):
            raise
        return
    _lock = lock
    os.environ["RUN_DIR_LOCKED"] = str(path)  # so that our own children may write
    shell = _shell()
    if shell:
        shell.events.register("pre_run_cell", lambda info: lock.acquire())
        shell.events.register("post_run_cell", lambda result: lock.release())


# -- Whole folders ------------------------------------------------------------------------------

def read_json(path: Path | str) -> Any:
    """Read a JSON file that a page wrote.

    Raises:
      UserError: it is not JSON, for example because a disk was full.
    """
    return files.read_json(path, "Delete what is there, and run the notebook that writes it again.")


@contextlib.contextmanager
def atomic_dir(path: Path | str, ours: str) -> Iterator[Path]:
    """Yield a fresh directory beside `path`; it becomes `path` only when the block succeeds.

    Args:
      path: the folder to make. One that is there already is replaced if we made it.
      ours: the name of a file that every such folder of ours holds. A folder without it is somebody
        else's work, and stays.

    Raises:
      UserError: `path` holds files and isn't one of ours. Nothing was changed.
    """
    path = Path(path)
    _only_ours(path, ours)
    fresh = path.with_name(f".{path.name}.partial")
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        _flush(fresh)
    except BaseException:  # a full disk gets its room back
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    os.replace(fresh, path)
    shutil.rmtree(old, ignore_errors=True)


def _only_ours(path: Path, ours: str) -> None:
    """Refuse a folder that holds something, but not the file that all such folders of ours hold."""
    if not path.exists() or (path / ours).exists():
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    raise UserError(f"{path.resolve()} was not made by this series: it holds no {ours}. Rename it, "
                    "or set RUN_DIR to another folder, then run this again.")


def _flush(folder: Path) -> None:
    """Have the disk write all files of a folder now."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as written:
                os.fsync(written.fileno())


# -- What was it made from? ---------------------------------------------------------------------

def sha256_file(path: Path | str) -> str:
    """SHA-256 of a file's bytes, as hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(folder: Path | str) -> dict[str, str]:
    """{path below the folder: SHA-256} of all its files, which are read whole."""
    folder = Path(folder)
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            sums[name] = sha256_file(path)
    return sums


def changed(folder: Path | str, expected: Mapping[str, str]) -> dict[str, str]:
    """{path: "missing", "changed" or "unexpected"} where a folder differs from its `hashes`.

    New files count as unexpected if they are arrays or weights: a reader's note does no harm.
    """
    now = hashes(folder)
    differences = {}
    new_names = now.keys() - expected.keys()
    for name in new_names:
        if name.endswith((".safetensors", ".npy")):
            differences[name] = "unexpected"
    for name, known in expected.items():
        if name not in now:
            differences[name] = "missing"
        elif now[name] != known:
            differences[name] = "changed"
    return differences


def digest(value: Any) -> str:
    """SHA-256 of anything that JSON can hold, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def commit_of(folder: Path, *words: str) -> str:
    """The commit of a checkout as git names it, such as "1a2b3c4"; "" without git, or in none.

    Args:
      folder: the checkout. A repository around it is not looked at.
      words: what git is asked, such as "describe", "--always"; by default the short hash.
    """
    if not words:
        words = ("rev-parse", "--short", "HEAD")
    command = ["git", "-C", str(folder), *words]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    except OSError:  # there is no git on this machine
        return ""
    return done.stdout.strip()


# -- Progress -----------------------------------------------------------------------------------

def clock(seconds: float) -> str:
    """Seconds as 1:02:03."""
    duration = datetime.timedelta(seconds=round(seconds))
    return str(duration)


@contextlib.contextmanager
def phase(text: str, every: float = 10.0) -> Iterator[None]:
    """Announce a silent step, say that it still runs every few seconds, and how long it took."""
    print(f"{text} ...", flush=True)
    start = time.perf_counter()
    done = threading.Event()

    def tick() -> None:
        while not done.wait(every):
            seconds = time.perf_counter() - start
            print(f"{text} ... {clock(seconds)}", flush=True)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
    seconds = time.perf_counter() - start
    print(f"{text}: done in {seconds:.1f} s", flush=True)


class Progress:
    """One line at most every `every` seconds: `rendering 1200/4000 | 300/s | left 0:00:09`.

    Args:
      total: items.
      text: what is done with them.
      every: seconds.
    """

    def __init__(self, total: int, text: str, every: float = 5.0) -> None:
        self.total = total
        self.text = text
        self.every = every
        self.count = 0
        self.start = time.perf_counter()
        self.last = self.start  # when a line was printed
        self.first: tuple[float, int] | None = None  # when the first update came, with which count

    def update(self, count: int = 1, note: str = "") -> None:
        """Count `count` more items; `note` is appended to the line."""
        self.count += count
        now = time.perf_counter()
        if self.first is None:  # it may have compiled a program: the pace is that of what follows
            self.first = (now, self.count)
        if not self._is_due(now):
            return
        self.last = now

        parts = [f"{self.text} {self.count}/{self.total}"]
        first_time, first_count = self.first
        seconds = max(now - first_time, 1e-9)
        rate = (self.count - first_count) / seconds
        if rate:
            items_left = self.total - self.count
            left = clock(items_left / rate)
            parts.append(f"{rate:.3g}/s")
            parts.append(f"left {left}")
        if note:
            parts.append(note)
        line = " | ".join(parts)
        print(line, flush=True)

    def _is_due(self, now: float) -> bool:
        """Is it time for a line? After a first line, the end of the work gets one at once."""
        if now - self.last >= self.every:
            return True
        has_printed = self.last != self.start
        return has_printed and self.count >= self.total
