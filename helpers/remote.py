"""What is not on this machine: models on the hub, a run's copy in a bucket. From the shell:

    python -m helpers.remote push RUN_DIR gs://bucket/run [--every SECONDS]
    python -m helpers.remote pull gs://bucket/run RUN_DIR [--without train/checkpoints jax_cache]

An object in a bucket appears whole or not at all, but a checkpoint is many objects. So a step goes
up file by file and is marked by `<step>.complete` last, a list of its files and sizes; what has no
mark, or does not agree with it, does not come back.
"""

import argparse
import base64
import contextlib
import functools
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import huggingface_hub

from helpers.run import (
    Taken,
    UserError,
    alone,
    disk_problem,
    local_path,
    phase,
    room,
    temporary_dir,
)

STEPS = "train/checkpoints"  # below the run directory; each step is a folder named by its number
MARK = ".complete"
LARGER = "Point TMPDIR to a larger place (on a TPU VM: /dev/shm)."
LAST_PASS = 20  # seconds that a copy has after SIGTERM; a spot machine is given thirty
# What a writer has not finished yet: hidden files beside their targets, and Orbax's own folders.
PARTIAL = (".orbax-checkpoint-tmp", ".partial", ".incomplete")


# ── A bucket ──


@functools.cache
def _storage():
    """The file system of gs://; STORAGE_EMULATOR_HOST names another server than Google's.

    gcsfs takes a second to import, and most readers have no bucket, so it is done here.
    """
    # Ordinary buckets only. gcsfs's other class asks for each bucket's kind by another protocol,
    # up to a minute a file where nobody answers; who imported gcsfs before us has that one.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    from gcsfs.core import GCSFileSystem
    anonymous = bool(os.environ.get("STORAGE_EMULATOR_HOST"))
    return GCSFileSystem(token="anon" if anonymous else None, skip_instance_cache=True)


def _troubles():
    """What gcsfs raises when the storage refuses us or the network is gone."""
    import aiohttp
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError
    return HttpError, GoogleAuthError, OSError, aiohttp.ClientError, TimeoutError


def _inner(address):
    """`bucket/path` of `gs://bucket/path`."""
    if not str(address).startswith("gs://") or len(str(address)) < 6:
        raise UserError(f"{address} is not an address in a bucket: gs://bucket/path.")
    return str(address)[5:].rstrip("/")


def objects(address):
    """{path below the address: {"size": bytes, "md5Hash": base64}} of everything there.

    An empty or absent folder of a bucket that answers gives {}.

    Raises:
      UserError: the bucket does not exist or refuses us; the message has its reason.
    """
    inner, storage = _inner(address), _storage()
    storage.invalidate_cache()
    try:
        found = storage.find(inner, detail=True)
        if not found:
            storage.ls(inner.split("/")[0])  # raises if there is no such bucket
    except FileNotFoundError:
        if "/" in inner and _bucket_answers(inner.split("/")[0]):
            return {}
        raise UserError(f"there is no bucket {inner.split('/')[0]}. Make it (01, section 4), or "
                        "correct the name.") from None
    except (*_troubles(),) as error:
        raise UserError(f"{address} refuses us: {str(error)[:200]}\n"
                        "The machine's service account needs roles/storage.objectUser on the "
                        "bucket (01, what can go wrong).") from None
    return {path.removeprefix(f"{inner}/"): entry for path, entry in found.items()
            if entry["type"] == "file" and not path.endswith("/")}


def check_writable(address):
    """Write and remove a small object: better before the weights are loaded than after.

    Raises:
      UserError: the bucket does not exist, or we may not write there.
    """
    objects(address)
    probe = f"{_inner(address)}/.writable"
    try:
        _storage().pipe_file(probe, b"")
        _storage().rm_file(probe)
    except (*_troubles(),) as error:
        raise UserError(f"{address} can be read but not written: {str(error)[:200]}\n"
                        "The machine's service account needs roles/storage.objectUser on the "
                        "bucket (01).") from None


def _bucket_answers(bucket):
    try:
        _storage().ls(bucket)
        return True
    except FileNotFoundError:
        return False


def _unfinished(path):
    return any(part.startswith(".") or mark in part
               for part in Path(path).parts for mark in PARTIAL)


def _local_files(folder):
    """{path below the folder: size} of finished files; whole checkpoint steps only."""
    sizes = {}
    for file in sorted(Path(folder).rglob("*")):
        name = file.relative_to(folder).as_posix()
        if _unfinished(name):
            continue
        try:
            if file.is_file():
                sizes[name] = file.stat().st_size
        except FileNotFoundError:
            continue  # written beside and renamed, or a step that Orbax has just removed
    return sizes


def _step_of(name):
    """The number of the checkpoint step that a path belongs to, as text, or None."""
    head, _, rest = name.partition(f"{STEPS}/")
    number = rest.split("/")[0]
    return number if not head and rest and number.isdigit() else None


def _md5(path):
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return base64.b64encode(digest.digest()).decode()


class Copy:
    """Keeps `address` a copy of `folder`; one object, so that unchanged files are known."""

    def __init__(self, folder, address):
        self.folder, self.address, self.seen = Path(folder), str(address).rstrip("/"), {}
        self.there = objects(self.address)  # raises now if the bucket refuses us

    def _same(self, name):
        """Is the file up already? Its time and size are compared first, its content once."""
        path = self.folder / name
        state = path.stat()
        if self.seen.get(name) == (state.st_size, state.st_mtime_ns):
            return True
        entry = self.there.get(name)
        same = bool(entry) and entry["size"] == state.st_size and (
            entry.get("md5Hash") == _md5(path))
        if same:
            self.seen[name] = (state.st_size, state.st_mtime_ns)
        return same

    def _up(self, name):
        path = self.folder / name
        state = path.stat()
        _storage().put_file(str(path), f"{_inner(self.address)}/{name}")
        self.seen[name] = (state.st_size, state.st_mtime_ns)

    def once(self, stop=lambda: False):
        """One pass: the newest steps first, then everything else. Returns how many files went up.

        `merge.json`, which has the hashes of `merged/`, goes last: without it nobody serves a half.
        `stop` is asked between files; a pass that stops leaves only whole files and marked steps.
        A step goes there when newer ones have taken its place here; a folder without checkpoints
        (of a machine that serves) leaves what is there of the training.

        Raises:
          UserError: the training has come further there than here. Nothing is written then.
        """
        self.there = objects(self.address)  # another process may have copied meanwhile
        sizes, sent = _local_files(self.folder), 0
        steps = {}
        for name in sizes:
            if number := _step_of(name):
                steps.setdefault(number, []).append(name)
        marked = {name for name in self.there if name.startswith(STEPS) and name.endswith(MARK)}
        there = {int(_step_of(name.removesuffix(MARK))) for name in marked}
        here = set(map(int, steps))
        if here and there and max(here) < max(there):
            raise UserError(f"{self.address} has checkpoint {max(there)}, {self.folder} only "
                            f"{max(here)}: the copy has come further. Bring it back first "
                            f"(python -m helpers.remote pull), or name another address.")
        if there and not here:
            sizes = {name: size for name, size in sizes.items() if not name.startswith("train/")}
        for number in sorted(steps, key=int, reverse=True):
            mark = f"{STEPS}/{number}{MARK}"
            if mark in marked or stop():
                continue
            try:
                for name in steps[number]:
                    if not self._same(name):
                        self._up(name)
                        sent += 1
                if _files_of(self.folder, number) != {n: sizes[n] for n in steps[number]}:
                    continue  # Orbax has begun to remove it
            except FileNotFoundError:
                continue
            self._write(mark, json.dumps({name: sizes[name] for name in steps[number]}))
        for number in there - here:
            if here and number < min(here):
                self._remove(str(number))  # not kept here any more
        for name in sorted(sizes, key=lambda name: name == "merge.json"):
            if _step_of(name) or stop():
                continue
            try:
                if not self._same(name):
                    self._up(name)
                    sent += 1
            except FileNotFoundError:
                continue
        return sent

    def _write(self, name, text):
        _storage().pipe_file(f"{_inner(self.address)}/{name}", text.encode())

    def _remove(self, number):
        """A step that is gone here goes there, its mark first."""
        inner = _inner(self.address)
        _storage().rm_file(f"{inner}/{STEPS}/{number}{MARK}")
        for name in self.there:
            if _step_of(name) == number and not name.endswith(MARK):
                _storage().rm_file(f"{inner}/{name}")


def _files_of(folder, number):
    base = Path(folder) / STEPS / number
    return {file.relative_to(folder).as_posix(): file.stat().st_size
            for file in sorted(base.rglob("*")) if file.is_file()}


def push(folder, address, every=0):
    """Copy a run directory into a bucket, once or every so many seconds until SIGTERM or Ctrl-C.

    After a signal the newest checkpoint gets `LAST_PASS` seconds to arrive. A signal that we were
    started to ignore, as a shell starts what it puts in the background, stays ignored: Ctrl-C is
    for the command beside us then. Several processes that copy one folder take turns, and only one
    of them stays for more than a pass.

    Raises:
      UserError: the bucket does not exist or refuses us, or, with `every`, another process copies
        this folder already.
    """
    stopping, deadline = threading.Event(), [float("inf")]

    def end(number, frame):
        stopping.set()
        deadline[0] = time.monotonic() + LAST_PASS

    if every and threading.current_thread() is threading.main_thread():
        for name in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(name) != signal.SIG_IGN:
                signal.signal(name, end)
    copy = Copy(folder, address)
    with _only_copier(folder) if every else contextlib.nullcontext():
        while True:
            last = stopping.is_set() or not every
            try:
                with _turn(folder, ".copy.lock", wait=True):
                    sent = copy.once(stop=lambda: time.monotonic() > deadline[0])
            except (*_troubles(), UserError) as error:  # what went up stays; the next pass goes on
                why = (f"{address} did not take all: "
                       f"{(str(error) or repr(error)).splitlines()[0][:200]}")
                if last:
                    raise UserError(f"{why}\nRun this again.") from error
                print(f"{why}; again in {every:g} s", flush=True)
                sent = 0
            if sent:
                print(f"{sent} files to {address}", flush=True)
            if last:
                return
            stopping.wait(every)


@contextlib.contextmanager
def _only_copier(folder):
    """Be the only process that copies this folder again and again."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_turn(folder, ".copier.lock"))
        except Taken:
            raise UserError(f"{folder} is being copied by another process already.") from None
        yield


def _turn(folder, name, wait=False):
    """A lock in the folder, where we may write; it is hidden, so it is not copied."""
    writable = os.access(folder, os.W_OK)
    return alone(Path(folder) / name, wait) if writable else contextlib.nullcontext()


@contextlib.contextmanager
def finishing(copy, seconds=LAST_PASS):
    """In this block SIGTERM and SIGHUP end the process only when `copy()` has returned.

    For what other threads are writing, such as Orbax's `manager.wait_until_finished`. It gets
    `seconds`, and what else the process was doing is dropped. `run_all.sh` sees that a notebook has
    such a handler, and waits. Where several hosts train together JAX has a handler of its own,
    after which Orbax saves a step that all hosts agree on; that one stays.
    """
    def end(number, frame):
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        name = signal.Signals(number).name
        os.write(2, f"{name}: finishing what is being saved, at most {seconds} s\n".encode())
        # In a thread: the main one may hold the very lock that `copy` needs, and stands still here.
        last = threading.Thread(target=copy, daemon=True)
        last.start()
        last.join(seconds)
        os.write(2, b"not finished in time\n" if last.is_alive() else b"saved\n")
        os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: known for number, known in before.items()
              if known not in (None, signal.SIG_IGN)}  # None: a handler that is not Python's
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


def pull(address, folder, only=None):
    """Bring a copy back: what is missing here, of checkpoints only the steps that are whole there.

    Of several processes that fetch into one folder, one does at a time.

    Args:
      address: gs://bucket/path.
      folder: made if it is not there.
      only: a function of a path below the address, or None for all.

    Returns:
      number of files fetched; 0 where the copy is empty or all is here already.

    Raises:
      UserError: the bucket does not exist or refuses us, or the folder has no room.
    """
    there, folder = objects(address), Path(folder)
    wanted, left = {}, set()
    marks = {_step_of(name.removesuffix(MARK)): _mark(address, name)
             for name in there if _step_of(name.removesuffix(MARK)) and name.endswith(MARK)}
    for name, entry in there.items():
        number = _step_of(name.removesuffix(MARK))
        if number is None:
            wanted[name] = entry
        elif name.endswith(MARK):
            continue
        elif marks.get(number) and all(there.get(file, {}).get("size") == size
                                     for file, size in marks[number].items()):
            wanted[name] = entry
        else:
            left.add(number)
    for number in sorted(left, key=int):
        print(f"checkpoint {number} in {address} is not whole and stays there", flush=True)
    wanted = {name: entry for name, entry in wanted.items()
              if not _unfinished(name) and (only is None or only(name))}
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, wait=True):
        missing = {name: entry for name, entry in wanted.items() if not _here(folder, name)}
        size, fetched = sum(entry["size"] for entry in missing.values()), [0]
        room(folder, size, f"the files of {address}", LARGER)
        if missing:
            with phase(f"fetching {size / 1e9:.2f} GB from {address}", total=max(size, 1),
                       count=lambda: fetched[0]):
                _fetch(address, folder, missing, fetched)
    return len(missing)


def _mark(address, name):
    """{file: size} of a step that is whole there; {} for a mark that cannot be read."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(_storage().cat_file(f"{_inner(address)}/{name}"))
        return found if isinstance(found, dict) else {}
    return {}


def _here(folder, name):
    """What a machine has already is newer than its copy, and stays."""
    number = _step_of(name)
    return (folder / STEPS / number).is_dir() if number else (folder / name).exists()


def _fetch(address, folder, missing, fetched):
    """Download beside, then rename; a checkpoint step appears as a folder only when it is whole."""
    steps = {}
    for name, entry in missing.items():
        target = folder / name
        number = _step_of(name)
        if number:
            beside = folder / STEPS / f".{number}.partial"
            target = beside / Path(name).relative_to(f"{STEPS}/{number}")
            steps[number] = beside
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.incomplete")
        _storage().get_file(f"{_inner(address)}/{name}", str(part))
        if part.stat().st_size != entry["size"]:
            raise UserError(f"{address}/{name} changed while it was fetched. Run this again.")
        os.replace(part, target)
        fetched[0] += entry["size"]
    for number, beside in steps.items():
        os.replace(beside, folder / STEPS / number)


# ── Base models ──


def stage(source, weights=True):
    """A local directory for a local path, a Hugging Face id or a gs:// address.

    Remote models go to TMPDIR (on a TPU VM: /dev/shm, because its boot disk is too small), once.
    Without `weights` only config, tokenizer and chat template are fetched. Of several processes one
    fetches, and the others wait for it.

    Raises:
      UserError: nothing is there, or there is no room.
    """
    source = str(source)
    kind, target = _place(source)
    if kind == "here":
        return target
    with alone(target.with_name(f".{target.name}.lock"), wait=True):
        if _place(source)[0] != "here":  # nobody fetched it while we waited
            _stage(source, kind, target, weights)
    return target


def _stage(source, kind, target, weights):
    """Fetch a model from a bucket or the hub."""
    if kind == "bucket":
        if not pull(source, target, only=lambda name: weights or not name.endswith(".safetensors")):
            if not (target / "config.json").is_file():
                raise _no_model(source)
    else:
        _from_hub(source, target, weights)
    if weights:
        (target / ".complete").touch()


def check(source):
    """Raise where `stage(source)` would, hours before it is needed; fetches nothing.

    Raises:
      UserError: nothing is there, or there is no room.
    """
    source = str(source)
    kind, target = _place(source)
    if kind == "bucket":
        there = objects(source)
        if "config.json" not in there:
            raise _no_model(source)
        target.mkdir(parents=True, exist_ok=True)
        room(target, sum(int(entry["size"]) for entry in there.values()) - folder_size(target),
             f"the weights of {source}", LARGER)
    elif kind == "hub":
        _hub_files(source, target, weights=True)


def _place(source):
    """(where a model is: "here", in a "bucket" or on the "hub"; the directory that `stage` gives).

    Raises:
      UserError: it is nowhere.
    """
    if Path(source).is_dir():
        return "here", Path(source)
    target = temporary_dir() / "base" / source.removeprefix("gs://")
    if (target / ".complete").exists():
        return "here", target
    if source.startswith("gs://"):
        return "bucket", target
    if source.count("/") == 1 and not local_path(source):
        return "hub", target
    raise UserError(f"{source} is neither a directory, nor a hub id, nor a gs:// address.")


def _no_model(source):
    return UserError(f"{source} is empty, or has no config.json: it holds no model.")


def _hub_files(source, target, weights):
    """(The commit, bytes, patterns) of the files that we use of a model on the hub, with room."""
    patterns = ["*.json", "*.jinja", "tokenizer*"] + ["*.safetensors"] * weights
    try:
        info = huggingface_hub.HfApi().model_info(source, files_metadata=True)
    except (huggingface_hub.errors.HfHubHTTPError, OSError) as error:
        raise UserError(f"the Hugging Face hub does not give {source}: {str(error)[:200]}\n"
                        "Log in with HF_TOKEN if it asks for a licence, or download it yourself "
                        "and pass the directory.") from error
    size = sum(file.size or 0 for file in huggingface_hub.utils.filter_repo_objects(
        info.siblings, allow_patterns=patterns, key=lambda file: file.rfilename))
    target.mkdir(parents=True, exist_ok=True)
    room(target, size - folder_size(target), f"the weights of {source}", LARGER)
    return info.sha, size, patterns


def _from_hub(source, target, weights):
    """Fetch the files that we use of a model on the hub; an interrupted fetch goes on."""
    commit, size, patterns = _hub_files(source, target, weights)
    there = functools.partial(folder_size, target)
    with phase(f"staging {size / 1e9:.1f} GB of {source} in {target}", total=size, count=there):
        huggingface_hub.snapshot_download(source, revision=commit, local_dir=target,
                                          allow_patterns=patterns)


def folder_size(folder):
    """Bytes of all files under a folder; others may write and rename them meanwhile."""
    size = 0
    for file in Path(folder).rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += file.lstat().st_size if not file.is_dir() else 0
    return size


def main():
    """The commands in this file's first lines."""
    parser = argparse.ArgumentParser(prog="python -m helpers.remote", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("push", "pull"))
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--every", type=float, default=0, help="push again after so many seconds")
    parser.add_argument("--without", nargs="*", default=[], help="folders that stay where they are")
    options = parser.parse_args()
    try:
        if options.what == "push":
            push(options.source, options.target, options.every)
        else:
            left_out = tuple(f"{folder.rstrip('/')}/" for folder in options.without)
            count = pull(options.source, options.target,
                         only=lambda name: not name.startswith(left_out))
            print(f"{count} files fetched" if count else
                  f"nothing to fetch: {options.source} is empty, or all of it is here")
    except (UserError, *_troubles()) as error:
        said = error if isinstance(error, UserError) else disk_problem(error, options.target)
        sys.exit(f"Error: {said or (str(error) or repr(error)).splitlines()[0][:300]}")


if __name__ == "__main__":
    main()
