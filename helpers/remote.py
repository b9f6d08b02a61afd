"""Brings what isn't on this machine: a base from the hub or from a bucket, and verilog-eval.

fsspec reads the buckets, so gs:// works here, and so does every other kind whose package is
installed. scripts/vm.sh copies a run into a bucket and back (`gcloud storage rsync`), and Orbax
writes its checkpoints there by itself.
"""

import contextlib
import fnmatch
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from helpers.run import UserError, atomic_dir, is_a_bug, local_path, phase, room

VERILOG_EVAL = "https://github.com/NVlabs/verilog-eval"
COMMIT = "c498220d0a52248f8e3fdffe279075215bde2da6"
Fetch = Callable[[list[str]], None]  # of the names of a model's files
OUR_COPY = Path("runs/verilog-eval")
SMALL = ("*.json", "*.jinja", "tokenizer*")  # a model's files that aren't weights


def stage(source: Path | str, weights: bool = True, fetch: bool = True) -> Path:
    """A local directory for a local path, a Hugging Face id or an address in a bucket.

    Remote models go to TMPDIR (on a TPU VM: /dev/shm, because its boot disk is too small), once.
    Of several processes one fetches, and the others wait for it.

    Args:
      source: the model. A directory here is given back as it is.
      weights: False fetches only config, tokenizer and chat template.
      fetch: False fetches nothing but the index of the weights, and refuses now whatever would be
        refused later.

    Raises:
      UserError: nothing is there, or there is no room.
    """
    text = str(source)
    if Path(text).is_dir():
        return Path(text)
    from filelock import FileLock
    target = _place_for(text)
    # These two say that a model was fetched: the first one with its weights, the second without.
    whole = target / ".complete"
    small = target / ".small"
    target.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if whole.exists():  # fetched earlier, or as we waited
            return target
        if small.exists() and not weights:
            return target
        sizes, download = _files_of(text, target)
        names = [name for name in sizes if _is_small(name)]
        if weights:
            names += _weights_of(text, sizes, target, download)
        size = sum(sizes[name] for name in names)
        missing = size - _bytes_below(target)
        larger_place = "Point TMPDIR to a larger place (on a TPU VM: /dev/shm)."
        room(target, missing, f"the weights of {text}", larger_place)
        if not fetch:
            return target
        gigabytes = size / 1e9
        with phase(f"staging {gigabytes:.1f} GB of {text} in {target}"):
            download(names)
        if weights:
            whole.touch()
        else:
            small.touch()
    return target


def _place_for(source: str) -> Path:
    """The folder in TMPDIR that a remote model is fetched to.

    Raises:
      UserError: that's no name of a remote model.
    """
    is_address = "://" in source
    has_one_slash = source.count("/") == 1
    is_hub_name = has_one_slash and not local_path(source)
    if not is_address and not is_hub_name:
        raise UserError(f"{source} is neither a directory, nor a hub id, nor a gs:// address.")
    _, _, behind_scheme = source.rpartition("://")
    inner = behind_scheme.strip("/")
    if ".." in Path(inner).parts:  # it would lead out of the folder that is ours
        raise UserError(f"{source} has .. in it. Write the address without.")
    temporary = Path(tempfile.gettempdir())
    return temporary / "base" / inner


def _files_of(source: str, target: Path) -> tuple[dict[str, int], Fetch]:
    """({file: bytes} of a remote model, a function that fetches some of them to `target`).

    Raises:
      UserError: it can't be reached, or it's no model.
    """
    if "://" in source:
        sizes, download = _in_bucket(source, target)
    else:
        sizes, download = _on_hub(source, target)
    if "config.json" not in sizes:
        raise UserError(f"{source} is empty, or has no config.json: it holds no model.")
    return sizes, download


def _is_small(name: str) -> bool:
    """Whether a file of a model is one that we need beside the weights; folders in it aren't."""
    if "/" in name:
        return False
    for pattern in SMALL:
        if fnmatch.fnmatch(name, pattern):
            return True
    return False


def _weights_of(source: str, sizes: Mapping[str, int], target: Path, download: Fetch) -> list[str]:
    """The names of a remote model's weights, by the rule of `weights.files_of`.

    Its index is fetched into `target` first, because it says which files they are.

    Raises:
      UserError: the index can't be used, or a file that it names isn't there.
    """
    from helpers import weights
    expected_by = "a model without an index has"
    if weights.INDEX in sizes:
        expected_by = "its index names"
        download([weights.INDEX])
    names = weights.names_of(target)
    for name in names:
        if name not in sizes:
            raise UserError(f"{source} lacks {name}, which {expected_by}. Take another copy of "
                            "this model.")
    return names


def _bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            total += path.stat().st_size
    return total


def _on_hub(source: str, target: Path) -> tuple[dict[str, int], Fetch]:
    """As `_files_of`, for a model on the Hugging Face hub."""
    import httpx
    import huggingface_hub

    def ask(call: Callable[..., Any], **more: Any) -> Any:
        try:
            return call(source, **more)
        except (httpx.HTTPError, ConnectionError) as error:
            why = " ".join(str(error).split())
            raise UserError(f"the Hugging Face hub does not give {source}: {why[:200]}\n"
                            "Log in with HF_TOKEN if it asks for a license, or download it "
                            "yourself and pass the directory.") from error

    def fetch(names: list[str]) -> None:
        ask(
            huggingface_hub.snapshot_download,
            revision=info.sha,
            local_dir=target,
            allow_patterns=names,
        )

    info = ask(huggingface_hub.HfApi().model_info, files_metadata=True)
    sizes = {}
    for file in info.siblings:
        sizes[file.rfilename] = file.size or 0
    return sizes, fetch


def _in_bucket(source: str, target: Path) -> tuple[dict[str, int], Fetch]:
    """As `_files_of`, for a model in a bucket."""
    storage, inner = bucket(source)
    with _refusals(source):
        details = storage.find(inner, detail=True)

    def fetch(names: list[str]) -> None:
        sources = [f"{inner}/{name}" for name in names]
        copies = [str(target / name) for name in names]
        with _refusals(source):
            storage.get(sources, copies)

    sizes = {}
    for path, entry in details.items():
        name = path.removeprefix(f"{inner}/")
        sizes[name] = entry["size"]
    return sizes, fetch


def checkout(folder: str) -> Path:
    """A folder of problems in verilog-eval's layout; only our own copy of verilog-eval is fetched.

    `{checkout}` in the name stands for `VERILOG_EVAL_DIR`. Where that isn't set, it stands for
    `runs/verilog-eval`, and that folder is the only one that is ever made: one commit of
    verilog-eval is fetched into it, whole or not at all. A folder that the reader names is read and
    never written.

    Raises:
      UserError: the folder is missing or holds no problem, or git can't fetch verilog-eval.
    """
    named = os.environ.get("VERILOG_EVAL_DIR")
    wants_checkout = "{checkout}" in folder
    if wants_checkout and not named and not OUR_COPY.exists():
        _fetch_verilog_eval(OUR_COPY)
    copy = named or str(OUR_COPY)
    path = Path(folder.replace("{checkout}", copy))
    if not path.is_dir():
        cause = ""
        if wants_checkout and named:
            cause = f" (VERILOG_EVAL_DIR is {named})"
        raise UserError(f"there is no folder {path}{cause}. Name one with problems in "
                        "verilog-eval's layout (*_prompt.txt, *_ref.sv, *_test.sv).")
    if not any(path.glob("*_prompt.txt")):
        raise UserError(f"{path} holds no problem in verilog-eval's layout: no *_prompt.txt is "
                        "there.")
    return path


def _fetch_verilog_eval(target: Path) -> None:
    """Fetch one commit of verilog-eval; `target` is there when all of it is."""
    steps = (
        ["init", "-q"],
        ["fetch", "-q", "--depth=1", VERILOG_EVAL, COMMIT],
        ["checkout", "-q", "FETCH_HEAD"],
    )
    with atomic_dir(target, ours=".git") as folder:
        for words in steps:
            _git(folder, words)


def _git(folder: Path, words: list[str]) -> None:
    """Run one command of git in a folder.

    Raises:
      UserError: there is no git here, or it failed.
    """
    try:
        done = subprocess.run(["git", "-C", str(folder), *words])
    except FileNotFoundError:
        raise UserError("git is missing, and it fetches verilog-eval. Install it (sudo apt-get "
                        "install -y git), or set VERILOG_EVAL_DIR to a copy.") from None
    if done.returncode:
        raise UserError(f"{VERILOG_EVAL} could not be fetched (see above). Set VERILOG_EVAL_DIR "
                        "to a copy of it.")


def bucket(address: Path | str) -> tuple[Any, str]:
    """(fsspec's file system, the path in it) of an address such as gs://bucket/path."""
    import fsspec
    # Ordinary buckets only: gcsfs's other class asks for each bucket's kind by another protocol, up
    # to a minute a file where nobody answers. It chooses when it is imported, which comes next.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    text = str(address)
    login = {}
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")  # not Google's server: it wants no login
    if emulator and text.startswith("gs://"):
        login = {"token": "anon"}
    without_slash = text.rstrip("/")
    return fsspec.core.url_to_fs(without_slash, use_listings_cache=False, **login)


def check_writable(address: Path | str) -> None:
    """Write a small object and remove it: better before the weights are loaded than after.

    Raises:
      UserError: the bucket does not exist, or we may not write there.
    """
    storage, inner = bucket(address)
    trial = f"{inner}/.writable"
    with _refusals(address):
        storage.pipe_file(trial, b"")
        storage.rm_file(trial)


@contextlib.contextmanager
def _refusals(address: Path | str) -> Iterator[None]:
    """Turn what a bucket says that's missing or refuses us into two lines.

    Raises:
      UserError: the block failed, in whatever way.
    """
    try:
        yield
    except Exception as error:  # each kind of storage has errors of its own
        if is_a_bug(error):
            raise
        why = str(error) or repr(error)
        raise UserError(f"{address} refuses us: {why[:200]}\nDoes the bucket exist, and may this "
                        "machine's service account write to it (roles/storage.objectUser)? "
                        "docs/MACHINES.md has both commands.") from error
