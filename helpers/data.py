"""What lies in `data/` between 02, which packs the rows, and 03, which trains on them."""

from pathlib import Path

import numpy as np

from helpers.run import (
    UserError,
    check_files,
    digest,
    folder_hashes,
    read_json,
    read_leftover,
    require,
    write_json,
)

COLUMNS = {"tokens": np.int32, "loss_mask": bool, "segment_ids": np.int32, "positions": np.int32}
AGAIN = "Run 02_data.py again."


def seal(folder, facts):
    """`meta.json` of a finished data folder: `facts`, the hash of every file, and two of all that.

    Returns a dict: `files` {name: SHA-256}, `data_sha256` of those, `sha256` of the dict itself.
    """
    files = folder_hashes(folder)
    meta = {**facts, "files": files, "data_sha256": digest(files)}
    return {**meta, "sha256": digest(meta)}


def read_meta(folder):
    """`meta.json` as 02 wrote it.

    Raises:
      UserError: it is missing, no JSON, or was changed since.
    """
    path = require(Path(folder) / "meta.json", "02_data.py")
    meta = read_json(path)
    whole = isinstance(meta, dict) and "sha256" in meta
    if not whole or digest({key: meta[key] for key in meta if key != "sha256"}) != meta["sha256"]:
        raise UserError(f"{path} is not what 02 wrote: it was changed, or made by an older "
                        f"version. {AGAIN}")
    return meta


def check_data(folder, meta):
    """Refuse packed rows that are not those that 02 made and `meta` describes.

    Args:
      folder: with `train` and `val`, each four arrays of shape [rows, length].

    Raises:
      UserError: a file is missing, changed or of the wrong shape; names it.
    """
    folder = Path(folder)
    if meta != read_meta(folder) or meta["data_sha256"] != digest(meta["files"]):
        raise UserError(f"{folder}/meta.json is not about these rows. {AGAIN}")
    check_files(folder, meta["files"], AGAIN, besides=("meta.json",))
    for part in ("train", "val"):
        shape = (meta[f"{part}_rows"], meta["sequence_length"])
        for name, kind in COLUMNS.items():
            column = np.load(require(folder / part / f"{name}.npy", "02_data.py"), mmap_mode="r")
            if column.shape != shape or column.dtype != kind:
                raise UserError(f"{folder}/{part}/{name}.npy is {column.dtype} {column.shape}, not "
                                f"{np.dtype(kind)} {shape}. {AGAIN}")


def keep(folder, key):
    """Note in a finished folder what it was made from and what it holds, for `kept`."""
    write_json(Path(folder) / "made.json", {"key": key, "files": folder_hashes(folder)})


def kept(folder, key):
    """True if a folder was made from `key` and is whole; a damaged one, said, counts as absent."""
    made = read_leftover(Path(folder) / "made.json", {})
    if made.get("key") != key:
        return False
    try:
        check_files(folder, made["files"], "Making it again.", besides=("made.json",))
    except UserError as error:
        print(error)
        return False
    return True
