"""One size dial, one run directory, files that are never half-written, and progress in plain lines."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from helpers import hardware

@dataclass(frozen=True)
class Size:
    """One named size: what it is, and the slices on which it is taken when `SIZE` is unset."""

    text: str
    slices: tuple = ()


# A new size is one entry here; `tests/test_sizes.py` says which notebooks do not know it.
SIZES = {
    "tiny": Size("the tiny Gemma 4 in assets/: any laptop, Colab CPU or CI machine"),
    "e2b": Size("google/gemma-4-E2B-it on one TPU chip (v5e-1, v6e-1)", ("v5e-1", "v6e-1")),
    "31b": Size("google/gemma-4-31B-it on a v5p-8 (training) and a v6e-8 (serving)",
                ("v5p-8", "v5p-32", "v6e-8")),
}
_always = ""


class UserError(Exception):
    """A mistake the reader can fix: shown as its one or two lines, without a traceback."""

    def __init__(self, message):
        super().__init__(message)
        if sys.excepthook is sys.__excepthook__:  # as a script: one line instead of a traceback
            sys.excepthook = _hide_traceback

    def _render_traceback_(self):
        """IPython calls this instead of printing a traceback."""
        return [f"Error: {self}"]


def _hide_traceback(kind, error, trace):
    if issubclass(kind, UserError):
        print(f"Error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


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

    A v5p-8 or v6e-8 is for 31b, a single v5e or v6e chip for e2b, a machine without a TPU for tiny.

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


def choose(settings):
    """Return the settings of the size at hand, and print which size and why.

    Args:
      settings: {size: settings}, such as {"31b": FULL, "e2b": E2B, "tiny": TINY}.

    Raises:
      UserError: this notebook has no settings for that size.
    """
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
    base = Path(os.environ.get("RUN_DIR") or Path("runs") / size())
    base.mkdir(parents=True, exist_ok=True)
    return base.joinpath(*parts)


def require(path, notebook):
    """Return `path` if it exists; else say which notebook writes it.

    Raises:
      UserError: the file or directory is missing.
    """
    path = Path(path)
    if not path.exists():
        number, name = notebook[:2], size()
        cell = f' Or let a cell run 01 to {number} here: helpers.catch_up("{number}")'
        # Not at 31b: hours of a machine that costs money are not to be started by one cell.
        raise UserError(f"{path} is missing. Run {notebook} first (SIZE={name}), or `./run_all.sh "
                        f"{number}`." + cell * (name in ("tiny", "e2b")))
    return path


def catch_up(last):
    """Run notebooks 01 to `last` ("03", say) with this Python, for who starts in the middle.

    Where this process holds TPU chips already (03's opening took them), 01, whose checks need them,
    is left out.

    Raises:
      UserError: one of them failed, and its own last words are in the text; or 03 would need the
        chips that this process holds.
    """
    root = Path(__file__).resolve().parent.parent
    held = hardware.held_here()
    if held and last[:2] > "02":
        raise UserError("this kernel holds the chips that 03 needs. Restart it, and run this cell "
                        "before anything starts JAX (of the opening cells, all but the last).")
    for source in sorted(root.glob("[0-9][0-9]_*.py")):
        if source.name[:2] > last[:2]:
            break
        if held and source.name[:2] == "01":
            print("01 is left out: its checks need the chips, and this kernel holds them")
            continue
        with phase(source.stem, every=30):
            done = subprocess.run([sys.executable, source.name], cwd=root, capture_output=True,
                                  text=True, env={**os.environ, "MPLBACKEND": "agg"})
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise UserError(f"{source.stem} failed: {said[-1].removeprefix('Error: ')}")


def write_text(path, text):
    """Write text beside `path`, then rename: a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def write_json(path, value):
    """Write JSON atomically, keys in the order given, with a final newline."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path):
    """Read a JSON file.

    Raises:
      UserError: it is not JSON, for example because a disk was full.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON ({error}). Delete it and run the notebook "
                        "that writes it again.") from error


@contextlib.contextmanager
def atomic_dir(path):
    """Yield a fresh directory beside `path`; rename it to `path` only when the block succeeds."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    yield beside
    for entry in (*beside.rglob("*"), beside):
        _sync(entry)
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    os.replace(beside, path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


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
    """One plain line at most every `every` seconds: `rendering 1200/4000 | 300/s | left 9s`."""

    def __init__(self, total, text, every=5.0):
        self.total, self.text, self.every, self.count = total, text, every, 0
        self.start = self.last = time.perf_counter()

    def update(self, count=1, note=""):
        """Count `count` more items; `note` is appended to the line."""
        self.count += count
        now = time.perf_counter()
        if now - self.last < self.every and self.count < self.total:
            return
        if self.count >= self.total and self.last == self.start and now - self.start < self.every:
            return  # it was quick: no line at all
        self.last = now
        rate = self.count / max(now - self.start, 1e-9)
        left = _clock((self.total - self.count) / rate)
        note = f" | {note}" if note else ""
        print(f"{self.text} {self.count}/{self.total} | {rate:.3g}/s | left {left}{note}", flush=True)
