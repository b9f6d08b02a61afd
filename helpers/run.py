"""One size dial, one run directory with one writer, whole files that say where they come from."""

import ast
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tables import hardware

@dataclass(frozen=True)
class Size:
    """One named size: what it is, and the slices on which it is taken when `SIZE` is unset."""

    text: str
    slices: tuple = ()


# A new size is one entry here; `tests/test_setup.py` says which notebooks do not know it.
SIZES = {
    "tiny": Size("the tiny Gemma 4 in assets/: any laptop, Colab CPU or CI machine"),
    "e2b": Size("google/gemma-4-E2B-it on one TPU chip (v5e-1, v6e-1)", ("v5e-1", "v6e-1")),
    "31b": Size("google/gemma-4-31B-it on a v5p-8 (training) and a v6e-8 (serving)",
                ("v5p-8", "v5p-32", "v6e-8")),
}
OPEN_FILES = 256  # the fewest that a kernel, a server and their sockets get by with
_always = ""
_ROOT = Path(__file__).resolve().parent.parent


class UserError(ValueError):
    """A mistake the reader can fix: shown as its one or two lines, without a traceback."""

    def __init__(self, message):
        super().__init__(message)
        if sys.excepthook is sys.__excepthook__:  # as a script: one line instead of a traceback
            sys.excepthook = _hide_traceback

    def _render_traceback_(self):
        """IPython calls this instead of printing a traceback."""
        return [f"Error: {self}"]


def _hide_traceback(kind, error, trace):
    said = str(error) if issubclass(kind, UserError) else disk_problem(error) or _of_a_room(error)
    if issubclass(kind, KeyboardInterrupt):
        said = "interrupted. What was finished is kept: run this again to go on."
    if said:
        print(f"Error: {said}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _of_a_room(error):
    """The line of a ValueError or RuntimeError that one of this repository's rooms raised, or ""."""
    if type(error) not in (ValueError, RuntimeError) or error.__traceback__ is None:
        return ""
    place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return str(error) if place.parent.parent == _ROOT and place.parent.name != "tests" else ""


def disk_problem(error, path=None):
    """What to do where a file cannot be written; "" for any other error.

    The disk is full, the folder is read-only, the file is larger than allowed, something else has
    its name, or too many files are open. `path` is what was being written. Without it the error has
    to name its file.
    """
    code, text = getattr(error, "errno", None), str(error)
    file = path or getattr(error, "filename", None) or "a file"
    path = Path(path or getattr(error, "filename", None) or run_dir_path())
    above = (path, *path.absolute().parents)
    there = next((folder for folder in above if folder.is_dir()), Path("/"))
    full = code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in text
    if not full and code is None and isinstance(error, OSError):
        full = " requested and " in text  # NumPy: "4096 requested and 12 written"
    if full:
        return (f"the disk of {there} is full. Free some space, or set RUN_DIR elsewhere, "
                "then run this again.")
    if code == errno.EROFS or code in (errno.EACCES, errno.EPERM) and not os.access(there, os.W_OK):
        return f"{path} cannot be written ({os.strerror(code)}). Set RUN_DIR to a folder of yours."
    if code == errno.EFBIG:
        return (f"{file} is larger than the file system of {there} or `ulimit -f` allows. Set "
                "RUN_DIR elsewhere, or lift the limit.")
    if code in (errno.EMFILE, errno.ENFILE):
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (f"too many open files: `ulimit -n` is {allowed}. Run this again from a shell that "
                "allows more (`ulimit -n 4096`).")
    if code in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        return _in_the_way(*(name for name in (getattr(error, "filename2", None), path) if name))
    return ""


def _in_the_way(*names):
    """What to do about a folder of a file's name or a file of a folder's, in the run directory."""
    base = Path(os.environ.get("RUN_DIR") or run_dir_path()).absolute()
    for name in map(Path, names):
        for place in (name.absolute(), *name.absolute().parents):
            if place.is_relative_to(base) and os.path.lexists(place):
                kind = "folder" if place.is_dir() else "file"
                return f"{place} is a {kind} and in the way. Move it, then run this again."
    return ""


@contextlib.contextmanager
def _one_line(path):
    """Raise a full or read-only disk as a UserError."""
    try:
        yield
    except OSError as error:
        if said := disk_problem(error, path):
            raise UserError(said) from error
        raise


def allow_open_files():
    """Let this process and its children open as many files as they may need.

    Raises:
      UserError: the system allows fewer than `OPEN_FILES`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < OPEN_FILES:
        raise UserError(f"no more than {most} files may be open at once here (`ulimit -Hn`), and "
                        f"the series needs {OPEN_FILES}. Start it from a shell that allows more.")


def always(name):
    """From here on this process has the size `name`, whatever `SIZE` and the hardware say.

    For notebooks that are about one size: the quickstart and the tiny base.
    """
    global _always
    _always = name


def _known_sizes(names=SIZES):
    return "\n".join(f"  {name}: {SIZES[name].text}" for name in names)


def size():
    """The size at hand: `SIZE` if set, else what the hardware is for.

    A v5p-8, v5p-32 or v6e-8 is for 31b, a single v5e or v6e chip for e2b, a machine without a TPU
    for tiny.

    Raises:
      UserError: `SIZE` is not one of the known sizes, or it is unset on a TPU slice that none of
        them is for; the sizes are listed.
    """
    chosen = _always or os.environ.get("SIZE", "").strip().lower()
    if chosen:
        if chosen not in SIZES:
            raise UserError(f"SIZE={chosen} is unknown. The sizes are\n{_known_sizes()}")
        return chosen
    here = hardware.here()
    if here.accelerator != "tpu":
        return "tiny"
    for name, entry in SIZES.items():
        if here.slice in entry.slices:
            return name
    raise UserError(f"no size is meant for this machine, {here}. Set SIZE to the one you want:\n"
                    + _known_sizes())


def same_size(there, source):
    """Refuse to go on from what another notebook made at another size; None is any size.

    Raises:
      UserError: with the two ways out.
    """
    if there not in (None, size()):
        raise UserError(f"{source} ran at size {there}, and this is size {size()}. Set "
                        f"os.environ[\"SIZE\"] = \"{there}\" in a cell before the first, or run "
                        f"{source} at size {size()}.")


def choose(settings):
    """Return the settings of the size at hand, and print which size and why.

    Args:
      settings: {size: settings}, such as {"31b": FULL, "e2b": E2B, "tiny": TINY}.

    Raises:
      UserError: this notebook has no settings for that size.
    """
    writing()
    name = size()
    if name not in settings:
        raise UserError(f"this notebook has no settings for size {name}. Set SIZE to one that it "
                        f"has, or add yours to its settings cell:\n{_known_sizes(settings)}")
    why = ("always, in this notebook" if _always else "SIZE is set" if os.environ.get("SIZE")
           else f"{hardware.here()}, SIZE unset")
    print(f"size {name} ({why}): {SIZES[name].text}")
    return settings[name]


def run_dir(*parts):
    """A path under the run directory: `RUN_DIR`, else `runs/<size>` in the repository.

    The directory is created; the path below it is not.
    """
    base = run_dir_path()
    place, home = base.resolve(), Path(os.path.expanduser("~"))
    if _ROOT.is_relative_to(place) or place == home:  # a `data` in there is not this run's
        raise UserError(f"RUN_DIR={base} holds more than a run. Name a folder of its own, such as "
                        f"{base / 'runs' / 'mine'}.")
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # read-only, full, or a file of that name
        raise UserError(f"RUN_DIR={base} cannot be made ({error.strerror}). "
                        "Set RUN_DIR to a folder of yours.") from error
    return base.joinpath(*parts)


def run_dir_path():
    """Where the run directory is or will be, as a short path if it is below this one."""
    chosen = Path(os.environ.get("RUN_DIR") or Path("runs") / size()).expanduser()
    return chosen.relative_to(Path.cwd()) if chosen.is_relative_to(Path.cwd()) else chosen


def room(folder, size, what, instead="Set RUN_DIR elsewhere."):
    """Say before the first byte that a disk is too small.

    Args:
      folder: where `size` bytes are to be written.
      what: needs them, for the message.
      instead: what to do about it.

    Raises:
      UserError: that much is not free.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(f"{folder} has {free / 1e9:.2f} GB free, for {what} it takes "
                        f"{size / 1e9:.2f}. {instead}")


def writable(folder):
    """Return `folder` if files can be made in it: said before work whose results it is to hold.

    Raises:
      UserError: they cannot.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written. Set RUN_DIR to a folder of yours.")
    return folder


def env(name, default):
    """An environment variable as a value of `default`'s type; `default` where it is unset or empty.

    Raises:
      UserError: it is not such a value.
    """
    text = os.environ.get(name, "").strip()
    try:
        return type(default)(text) if text else default
    except ValueError as error:
        raise UserError(f"{name}={text} is not a number. Set it to one such as {default}, or unset "
                        "it.") from error


def temporary_dir():
    """Where temporary files go: `TMPDIR`, else what Python chooses.

    Raises:
      UserError: `TMPDIR` is set and is not a folder that can be written.
    """
    chosen = os.environ.get("TMPDIR")
    if chosen and not (os.path.isdir(chosen) and os.access(chosen, os.W_OK)):
        raise UserError(f"TMPDIR={chosen} is not a folder that can be written. "
                        f"Make it (mkdir -p {chosen}), or unset TMPDIR.")
    return Path(chosen or tempfile.gettempdir())


def local_path(name):
    """Is this name, of a model or a dataset, clearly meant as a path on this machine?"""
    text = str(name)
    return "://" not in text and (text.startswith(("/", ".", "~")) or text.count("/") > 1
                                  or "/" in text and Path(text.split("/")[0]).is_dir())


def require(path, notebook):
    """Return `path` if it exists; else say which notebook writes it.

    Raises:
      UserError: the file or directory is missing.
    """
    path = Path(path)
    if not path.exists():
        number, name = notebook[:2], size()
        cell = f' Or let a cell run 02 to {number} here: helpers.catch_up("{number}")'
        # Not at 31b: hours of a machine that costs money are not to be started by one cell.
        raise UserError(f"{path} is missing. Run {notebook} first (SIZE={name}), or `./run_all.sh "
                        f"{number}`." + cell * (name in ("tiny", "e2b")))
    return path


def catch_up(last):
    """Run notebooks 02 to `last` ("03", say) with this Python, for who starts in the middle.

    01 is left out: it looks at the machine, and makes nothing that another needs.

    Raises:
      UserError: one of them failed; its own last words are in the text.
    """
    for source in sorted(_ROOT.glob("[0-9][0-9]_*.py")):
        if not "02" <= source.name[:2] <= last[:2]:
            continue
        with phase(source.stem, every=30):
            done = subprocess.run([sys.executable, source.name], cwd=_ROOT, capture_output=True,
                                  text=True, env={**os.environ, **_lock.passed_on(),
                                                  "MPLBACKEND": "agg"})
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise UserError(f"{source.stem} failed: {said[-1].removeprefix('Error: ')}")


# -- One writer ---------------------------------------------------------------------------------

class RunLock:
    """The right to write to the run directory: the operating system's exclusive lock on it.

    It ends with the process, however that ends, so there is no such thing as a stale lock. The file
    `.lock` says who holds it; deleting that file unlocks nothing. (Where a folder cannot be locked,
    the file is.)
    """

    def __init__(self):
        self.descriptor = None

    def take(self, who):
        """Become the only writer.

        Raises:
          UserError: another process is; says which.
        """
        path = run_dir(".lock")
        if self.descriptor is not None or self.covered():
            return
        with _one_line(path):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))  # may we write here?
        for place, how in ((path.parent, os.O_RDONLY), (path, os.O_RDWR)):
            descriptor = os.open(place, how)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                holder = ""
                with contextlib.suppress(OSError):
                    holder = path.read_text(errors="replace").strip()[:200]
                raise UserError(
                    f"{path.parent} is being written by {holder or 'another process'}. Wait until "
                    "it is done, or set RUN_DIR to another folder.") from None
            except OSError:  # some network and FUSE mounts know no locks, or none on folders
                os.close(descriptor)
                continue
            self.descriptor = descriptor
            self.name(who)
            return

    def name(self, who):
        """Write down who holds it."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
                run_dir(".lock").write_text(f"{who} (process {os.getpid()})\n")

    def release(self):
        """Let others write."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def covered(self):
        """Does the process that started this one hold the lock for both?"""
        return os.environ.get("RUN_DIR_LOCKED") == str(run_dir_path().resolve())

    def passed_on(self):
        """Environment variables for a child that may write while this process waits for it."""
        held = self.descriptor is not None or self.covered()
        return {"RUN_DIR_LOCKED": str(run_dir_path().resolve())} if held else {}


_lock = RunLock()


def writing():
    """Be the only notebook that writes to the run directory; `choose` calls this.

    A script holds the lock until it ends, a Jupyter kernel while one of its cells runs: a notebook
    that is merely open is in nobody's way. What `run_all.sh` executes is covered by its lock. Where
    several hosts train together, the first one is the notebook.

    Raises:
      UserError: another notebook is writing; the next cells of a kernel ask again.
    """
    jax = sys.modules.get("jax")
    if jax and jax.distributed.is_initialized() and jax.process_index():
        return  # of several hosts the first one writes
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    name = os.environ.get("JPY_SESSION_NAME", "a notebook") if shell else sys.argv[0]
    who = Path(name or "Python").stem
    one_line_errors()
    if shell and not any(isinstance(other, _OneWriter) for other in shell.ast_transformers):
        shell.ast_transformers.append(_OneWriter(who))
        shell.events.register("post_execute", _lock.release)
    _lock.take(who)


def one_line_errors():
    """Show what the reader can mend (a full disk, Ctrl-C) as one line, in a script or a kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell:
        shell.set_custom_exc((Exception,), _show_error)
    elif sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hide_traceback
    for stream in () if shell else (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # somebody else's stream
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8


class Taken(UserError):
    """Another process is at work there."""


@contextlib.contextmanager
def alone(path, wait=False):
    """Be the only process in this block, as told by a file or folder that all of them name.

    For what is not the run directory's: results that several commands add to. A file is made, and
    gone afterwards; the lock ends with the process, however that ends.

    Raises:
      Taken: another process is in it, unless we are to `wait`.
    """
    path = Path(path)
    with _one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    how, ours = fcntl.LOCK_EX | fcntl.LOCK_NB, False
    while not ours:  # the file that we waited for is gone when its owner is done: lock the new one
        with _one_line(path):
            descriptor = os.open(path, flags, 0o644)
        try:
            fcntl.flock(descriptor, how)
            ours = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        except BlockingIOError:
            busy = (f"{path.name.removeprefix('.').removesuffix('.lock')} in {path.parent} is "
                    "being made by another process")
            if not wait:
                os.close(descriptor)
                raise Taken(f"{busy}. Wait until it is done, then run this again.") from None
            print(f"{busy}; waiting for it", flush=True)
            how = fcntl.LOCK_EX
        except OSError:  # some network and FUSE mounts know no locks
            ours = True
        if not ours:
            os.close(descriptor)
    try:
        yield
    finally:
        if not path.is_dir():
            path.unlink(missing_ok=True)
        os.close(descriptor)


class _OneWriter(ast.NodeTransformer):
    """IPython shows it every cell before the cell runs; it changes none."""

    def __init__(self, who):
        self.who = who

    def visit(self, node):
        from IPython.core.error import InputRejected

        class Busy(InputRejected, UserError):
            """The cell was not run."""

        try:
            _lock.take(self.who)
        except UserError as error:
            raise Busy(str(error)) from error
        return node


def _show_error(shell, kind, error, trace, tb_offset=None):
    """What a reader can mend is one line in any cell; every other error is shown as always."""
    if said := "" if isinstance(error, UserError) else disk_problem(error) or _of_a_room(error):
        kind, error = UserError, UserError(said)
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


# -- Whole files --------------------------------------------------------------------------------

def write_text(path, text):
    """Write text beside `path`, then rename: a reader never sees half a file.

    Raises:
      UserError: the disk is full, or the folder may not be written.
    """
    with atomic_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def atomic_file(path):
    """Yield a binary file beside `path`; it becomes `path` only when the block succeeds.

    Raises:
      UserError: the disk is full, or the folder may not be written.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with _one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(beside, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def write_json(path, value):
    """Write JSON atomically, keys in the order given, with a final newline."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class _Lacks(UserError, KeyError):
    __str__ = Exception.__str__


class _Object(dict):
    """A JSON file's object, which says from where it is when a key is asked that it lacks."""

    def __init__(self, content, path):
        super().__init__(content)
        self.path = path

    def __missing__(self, key):
        raise _Lacks(f"{self.path} says nothing about {key!r}: another version wrote it, or it was "
                     "edited. Run the notebook that writes it again.")


def read_json(path):
    """Read a JSON file.

    Raises:
      UserError: it is not JSON, for example because a disk was full; or, later, when an object is
        asked for a key that it lacks.
    """
    try:
        if Path(path).is_dir():
            raise ValueError("it is a folder")
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return _Object(found, path) if isinstance(found, dict) else found
    except (ValueError, RecursionError) as error:  # ValueError: JSON and UTF-8
        raise UserError(f"{path} is not valid JSON ({error}). Delete it and run the notebook "
                        "that writes it again.") from error


def read_leftover(path, otherwise):
    """The JSON object of an earlier run; `otherwise` if none is there, or, said, none readable."""
    if not Path(path).exists():
        return otherwise
    with contextlib.suppress(UserError):
        if isinstance(found := read_json(path), dict):
            return found
    print(f"{path} is unreadable and counts as absent", flush=True)
    return otherwise


def read_table(path, columns, **options):
    """A CSV file that a run stored, as a pandas table in which `columns` are complete.

    Raises:
      UserError: it is empty, cut off, or lacks one of them.
    """
    import pandas as pd
    try:
        table = pd.read_csv(path, **options)
        whole = Path(path).read_bytes().endswith(b"\n")
        if not (whole and len(table) and table[list(columns)].notna().all(axis=None)):
            raise ValueError("it is cut off")
    except (KeyError, ValueError, pd.errors.ParserError) as error:  # ValueError: UTF-8, too
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}). Take it from the "
                        "repository again (git checkout), or delete it: what it held then counts "
                        "as missing.") from error
    return table


@contextlib.contextmanager
def atomic_dir(path):
    """Yield a fresh directory beside `path`; rename it to `path` only when the block succeeds.

    Raises:
      UserError: the disk is full (what was written so far is removed) or may not be written.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UserError(_in_the_way(path) or f"{path} is a file and in the way.")
    beside = path.with_name(f".{path.name}.partial")
    old, whole = path.with_name(f".{path.name}.old"), False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        yield beside
        for entry in (*beside.rglob("*"), beside):
            _sync(entry)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        os.replace(beside, path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
        whole = True
    finally:  # safetensors and Orbax raise errors of their own where a disk is full
        error = None if whole else sys.exc_info()[1]
        if error and not isinstance(error, UserError) and (said := disk_problem(error, path)):
            shutil.rmtree(beside, ignore_errors=True)
            raise UserError(said) from error


def _sync(path):
    """Wait until a file, or the names in a directory, are on the disk.

    Network and FUSE mounts (Google Drive in Colab) may not know this for directories.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not Path(path).is_dir():
            raise
    finally:
        os.close(descriptor)


def sha256_file(path, block=1 << 22):
    """SHA-256 of a file's bytes, as hexadecimal, read in blocks of 4 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(block):
            digest.update(chunk)
    return digest.hexdigest()


# -- What was it made from? ---------------------------------------------------------------------

REMEMBERED = 1 << 20  # bytes: the hash of a file this large is kept, not computed again


def content_hash(path):
    """SHA-256 of a file, or of the names and hashes of all files in a folder.

    Large files are read once: their hashes are kept in `cache/hashes.json` beside size, times and
    inode, and a file that was touched since is read again. One that changed within the last two
    seconds is not kept: its next change could bear the same time.
    """
    path = Path(path)
    if path.is_dir():
        return digest(folder_hashes(path))
    if path.stat().st_size < REMEMBERED:
        return sha256_file(path)
    begun, state = time.time_ns(), _state(path)
    notes, key = run_dir("cache", "hashes.json"), str(path.resolve())
    known = read_leftover(notes, {})
    known = known if isinstance(known, dict) else {}
    note = known.get(key)
    if isinstance(note, list) and note[:-1] == state:
        return note[-1]
    found = sha256_file(path)
    if state == _state(path) and state[1] < begun - 2e9:
        with contextlib.suppress(UserError):  # no room for a note: hashed again next time
            there = {name: note for name, note in known.items() if os.path.exists(name)}
            write_json(notes, {**there, key: [*state, found]})
    return found


def _state(path):
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def folder_hashes(folder, names=None):
    """{relative name: SHA-256} of all files in a folder, or of those named."""
    folder = Path(folder)
    names = _names(folder) if names is None else names
    sizes = {name: (folder / name).stat().st_size for name in sorted(names)}
    progress, hashes = Progress(sum(sizes.values()) >> 20, f"MiB of {folder} read:"), {}
    for name, size_ in sizes.items():
        hashes[name] = content_hash(folder / name)
        progress.update(size_ >> 20)
    return hashes


def _names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def digest(value):
    """SHA-256 of anything that JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def stamp(**facts):
    """What an artifact is made from, to be stored in it: hashes of its inputs, and settings.

    It has been JSON once, so that it equals itself after being read back.
    """
    return json.loads(json.dumps(facts))


def differences(made, wanted):
    """How two stamps differ, a text for each fact; empty if the same made both."""
    def short(fact):
        text = fact if isinstance(fact, str) else json.dumps(fact)
        return f"{text[:12]}..." if len(text) > 40 else text or "empty"
    if not made or not isinstance(made, dict):
        return ["nothing says what it was made from"]
    both = {name: (made.get(name, "unset"), wanted.get(name, "unset"))
            for name in {**wanted, **made}}
    return [f"{name} was {short(old)} and is {short(new)}"
            for name, (old, new) in both.items() if old != new]


def wrong_files(folder, hashes, there):
    """{name: "missing", "unexpected" or "changed"} of the files `there`, by {name: SHA-256}.

    Large files are read once per state (`content_hash`).
    """
    bad = {name: "missing" for name in sorted(set(hashes) - set(there))}
    bad |= {name: "unexpected" for name in sorted(set(there) - set(hashes))}
    found = folder_hashes(folder, set(hashes) & set(there))
    return bad | {name: "changed" for name, value in found.items() if value != hashes[name]}


def check_files(folder, hashes, remedy, besides=()):
    """Refuse a folder whose files, except `besides`, are not those of `hashes` {name: SHA-256}.

    Raises:
      UserError: a file is missing, changed or new; names it, and says `remedy`.
    """
    said = {"missing": "is missing", "unexpected": "is not of it", "changed": "has changed"}
    bad = wrong_files(folder, hashes, _names(Path(folder)) - set(besides))
    if wrong := [f"{name} {said[what]}" for name, what in bad.items()]:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{folder} is not what was written: {', '.join(wrong[:3])}{more}. {remedy}")


# -- Progress -----------------------------------------------------------------------------------

def _clock(seconds):
    seconds = int(round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes}m{seconds:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


@contextlib.contextmanager
def phase(text, every=10.0, total=0, count=None):
    """Announce a silent step, say that it still runs every few seconds, and how long it took.

    With `count`, a function that says how much of `total` is there, lines have the time left.
    """
    print(f"{text} ...", flush=True)
    start, done, first = time.perf_counter(), threading.Event(), count() if count else 0

    def tick():
        while not done.wait(every):
            seconds, share = time.perf_counter() - start, ""
            if count and (now := count()) > first:
                left = max(total - now, 0) / (now - first) * seconds
                share = f" | {now / total:.0%} | left {_clock(left)}"
            print(f"{text} ... {_clock(seconds)}{share}", flush=True)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
    print(f"{text}: done in {time.perf_counter() - start:.1f} s", flush=True)


class Progress:
    """One plain line at most every `every` seconds: `rendering 1200/4000 | 300/s | left 9s`.

    The clock of the rate starts after the first update, which may have compiled a program.
    """

    def __init__(self, total, text, every=5.0):
        self.total, self.text, self.every, self.count = total, text, every, 0
        self.start = self.last = time.perf_counter()
        self.first = None  # (when, count) of the first update

    def update(self, count=1, note=""):
        """Count `count` more items; `note` is appended to the line."""
        self.count += count
        now = time.perf_counter()
        self.first = self.first or (now, self.count)
        if now - self.last < self.every and self.count < self.total:
            return
        if self.count >= self.total and self.last == self.start and now - self.start < self.every:
            return  # it was quick: no line at all
        self.last = now
        since, before = self.first
        if self.count > before:
            rate = (self.count - before) / max(now - since, 1e-9)
            pace = f"{rate:.3g}/s | left {_clock((self.total - self.count) / rate)}"
        else:
            pace = f"the first after {_clock(now - self.start)}"
        note = f" | {note}" if note else ""
        print(f"{self.text} {self.count}/{self.total} | {pace}{note}", flush=True)
