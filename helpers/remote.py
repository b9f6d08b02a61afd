"""What is not on this machine: a base on the hub or in a bucket, checkpoints there, verilog-eval.

Buckets are fsspec's: gs:// here, any other that its packages know. A run is copied into one and
back by `gcloud storage rsync` (scripts/vm.sh), checkpoints go there by Orbax itself.
"""

import contextlib
import fnmatch
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from helpers.run import UserError, atomic_dir, local_path, phase, room

VERILOG_EVAL = "https://github.com/NVlabs/verilog-eval"
COMMIT = "c498220d0a52248f8e3fdffe279075215bde2da6"
Fetch = Callable[[list[str]], None]
OUR_COPY = Path("runs/verilog-eval")
SMALL = ("*.json", "*.jinja", "tokenizer*")  # a model's files that aren't weights


def stage(source: Path | str, weights: bool = True, fetch: bool = True) -> Path:
    """A local directory for a local path, a Hugging Face id or an address in a bucket.

    Remote models go to TMPDIR (on a TPU VM: /dev/shm, because its boot disk is too small), once.
    Without `weights` only config, tokenizer and chat template are fetched; without `fetch` nothing
    is but the index of the weights, and what would be refused is refused now. Of several processes
    one fetches, and the others wait for it.

    Raises:
      UserError: nothing is there, or there is no room.
    """
    text = str(source)
    if Path(text).is_dir():
        return Path(text)
    from filelock import FileLock
    if "://" not in text and (text.count("/") != 1 or local_path(text)):
        raise UserError(f"{text} is neither a directory, nor a hub id, nor a gs:// address.")
    inner = text.rpartition("://")[2].strip("/")
    if ".." in Path(inner).parts:  # it would lead out of the folder that is ours
        raise UserError(f"{text} has .. in it. Write the address without.")
    target = Path(tempfile.gettempdir()) / "base" / inner
    whole, small = target / ".complete", target / ".small"  # it was fetched with, without weights
    target.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if whole.exists() or (small.exists() and not weights):  # fetched earlier, or as we waited
            return target
        sizes, download = _in_bucket(text, target) if "://" in text else _on_hub(text, target)
        if "config.json" not in sizes:
            raise UserError(f"{text} is empty, or has no config.json: it holds no model.")
        names = [name for name in sizes if _is_small(name)]
        if weights:
            names += _weights_of(text, sizes, target, download)
        size = sum(sizes[name] for name in names)
        room(target, size - _bytes_below(target), f"the weights of {text}",
             "Point TMPDIR to a larger place (on a TPU VM: /dev/shm).")
        if fetch:
            with phase(f"staging {size / 1e9:.1f} GB of {text} in {target}"):
                download(names)
            (whole if weights else small).touch()
    return target


def _is_small(name: str) -> bool:
    """Whether a file of a model is one that we need beside the weights; folders in it aren't."""
    return "/" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in SMALL)


def _weights_of(source: str, sizes: Mapping[str, int], target: Path, download: Fetch) -> list[str]:
    """The names of a remote model's weights, by the rule of `weights.files_of`.

    Its index is fetched into `target` first, because it says which files they are.

    Raises:
      UserError: the index can't be used, or a file that it names isn't there.
    """
    from helpers import weights
    if weights.INDEX in sizes:
        download([weights.INDEX])
    names = weights.names_of(target)
    for name in names:
        if name not in sizes:
            by = "its index names" if weights.INDEX in sizes else "a model without an index has"
            raise UserError(f"{source} lacks {name}, which {by}. Take another copy of this model.")
    return names


def _bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _on_hub(source: str, target: Path) -> tuple[dict[str, int], Fetch]:
    """({file: bytes} of a model, a function that fetches some of them to `target`)."""
    import httpx
    import huggingface_hub

    def ask(call: Callable[..., Any], **more: Any) -> Any:
        try:
            return call(source, **more)
        except (httpx.HTTPError, ConnectionError) as error:
            raise UserError(f"the Hugging Face hub does not give {source}: "
                            f"{' '.join(str(error).split())[:200]}\n"
                            "Log in with HF_TOKEN if it asks for a licence, or download it "
                            "yourself and pass the directory.") from error

    def fetch(names: list[str]) -> None:
        ask(huggingface_hub.snapshot_download, revision=info.sha, local_dir=target,
            allow_patterns=names)

    info = ask(huggingface_hub.HfApi().model_info, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in info.siblings}, fetch


def _in_bucket(source: str, target: Path) -> tuple[dict[str, int], Fetch]:
    """As `_on_hub`."""
    storage, inner = bucket(source)
    with _refusals(source):
        details = storage.find(inner, detail=True)

    def fetch(names: list[str]) -> None:
        with _refusals(source):
            storage.get([f"{inner}/{name}" for name in names],
                        [str(target / name) for name in names])

    sizes = {path.removeprefix(f"{inner}/"): entry["size"] for path, entry in details.items()}
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
    path = Path(folder.replace("{checkout}", named or str(OUR_COPY)))
    if "{checkout}" in folder and not named and not OUR_COPY.exists():
        _fetch_verilog_eval(OUR_COPY)
    if not path.is_dir():
        cause = f" (VERILOG_EVAL_DIR is {named})" if named and "{checkout}" in folder else ""
        raise UserError(f"there is no folder {path}{cause}. Name one with problems in "
                        "verilog-eval's layout (*_prompt.txt, *_ref.sv, *_test.sv).")
    if not any(path.glob("*_prompt.txt")):
        raise UserError(f"{path} holds no problem in verilog-eval's layout: no *_prompt.txt is "
                        "there.")
    return path


def _fetch_verilog_eval(target: Path) -> None:
    """Fetch one commit of verilog-eval; `target` is there when all of it is."""
    with atomic_dir(target, ours=".git") as folder:
        for words in (["init", "-q"], ["fetch", "-q", "--depth=1", VERILOG_EVAL, COMMIT],
                      ["checkout", "-q", "FETCH_HEAD"]):
            try:
                done = subprocess.run(["git", "-C", str(folder), *words])
            except FileNotFoundError:
                raise UserError("git is missing, and it fetches verilog-eval. Install it (sudo "
                                "apt-get install -y git), or set VERILOG_EVAL_DIR to a copy."
                                ) from None
            if done.returncode:
                raise UserError(f"{VERILOG_EVAL} could not be fetched (see above). Set "
                                "VERILOG_EVAL_DIR to a copy of it.")


def bucket(address: Path | str) -> tuple[Any, str]:
    """(fsspec's file system, the path in it) of an address such as gs://bucket/path."""
    import fsspec
    # Ordinary buckets only: gcsfs's other class asks for each bucket's kind by another protocol, up
    # to a minute a file where nobody answers. It chooses when it is imported, which comes next.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    # STORAGE_EMULATOR_HOST names another server than Google's, which asks for no login.
    login = {}
    if str(address).startswith("gs://") and os.environ.get("STORAGE_EMULATOR_HOST"):
        login = {"token": "anon"}
    return fsspec.core.url_to_fs(str(address).rstrip("/"), use_listings_cache=False, **login)


def check_writable(address: Path | str) -> None:
    """Write and remove a small object: better before the weights are loaded than after.

    Raises:
      UserError: the bucket does not exist, or we may not write there.
    """
    storage, inner = bucket(address)
    with _refusals(address):
        storage.pipe_file(f"{inner}/.writable", b"")
        storage.rm_file(f"{inner}/.writable")


@contextlib.contextmanager
def _refusals(address: Path | str) -> Iterator[None]:
    """What a bucket that is missing or refuses us says, in two lines."""
    try:
        yield
    except Exception as error:  # each kind of storage has errors of its own
        raise UserError(f"{address} refuses us: {(str(error) or repr(error))[:200]}\nDoes the "
                        "bucket exist, and may this machine's service account write to it "
                        "(roles/storage.objectUser)? docs/MACHINES.md has both commands."
                        ) from error
