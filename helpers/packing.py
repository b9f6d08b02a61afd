"""Several whole examples in one row of fixed length (00, 02), and the folder in which 03 finds them."""

import bisect
from pathlib import Path

import numpy as np
import pandas as pd

from helpers.run import (
    UserError, atomic_dir, changed, digest, hashes, read_json, require, write_json)

COLUMNS = {"tokens": np.int32, "loss_mask": bool, "segment_ids": np.int32, "positions": np.int32}


def fill_rows(lengths, length, seed):
    """Share examples out to rows of `length`, in random order, by best fit: a list for each row."""
    rows, gaps = [], []  # gaps: (free places, row), sorted
    for example in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        fullest = bisect.bisect_left(gaps, (int(lengths[example]), -1))
        if fullest == len(gaps):  # none has room
            gaps.append((length, len(rows)))
            rows.append([])
        free, row = gaps.pop(fullest)
        rows[row].append(example)
        bisect.insort(gaps, (free - int(lengths[example]), row))
    return rows


def pack_arrays(ids, masks, length, seed):
    """All packed rows as four arrays of shape [rows, length]; padding is 0 in each of them."""
    rows = fill_rows([len(example) for example in ids], length, seed)
    packed = {name: np.zeros((len(rows), length), kind) for name, kind in COLUMNS.items()}
    for row, examples in enumerate(rows):
        begin = 0
        for segment, example in enumerate(examples, start=1):
            end = begin + len(ids[example])
            packed["tokens"][row, begin:end] = ids[example]
            packed["loss_mask"][row, begin:end] = masks[example]
            packed["segment_ids"][row, begin:end] = segment
            packed["positions"][row, begin:end] = np.arange(end - begin)
            begin = end
    return packed


def length_study(lengths, limits, length, seed):
    """A table: for each limit, examples kept, padding without packing, real tokens with packing.

    Args:
      lengths: array of the examples' tokens.
      limits: longer examples are dropped.
      length, seed: of the packed rows, as for `pack_arrays`; a row is at least as long as a limit.
    """
    table = []
    for limit in limits:
        kept, row = lengths[lengths <= limit], max(limit, length)
        packed = kept.sum() / row / len(fill_rows(kept, row, seed))
        table.append((limit, len(kept) / len(lengths), 1 - kept.mean() / limit, packed))
    return pd.DataFrame(table, columns=["longest kept", "examples kept", "padding, one per row",
                                        "real tokens, packed"]).set_index("longest kept")


# ── What 02 leaves for 03 ──


def save_data(folder, parts, samples, facts):
    """Write `data/` as 03 reads it; the folder appears under its name when it is complete.

    Args:
      folder: `data/` of the run directory.
      parts: {"train" | "val": the four arrays of `pack_arrays`}.
      samples: held-out examples, for `samples.json`.
      facts: for `meta.json`, which also gets the SHA-256 of every file.
    """
    with atomic_dir(folder) as beside:
        for part, columns in parts.items():
            (beside / part).mkdir()
            for name, column in columns.items():
                np.save(beside / part / f"{name}.npy", column)
        write_json(beside / "samples.json", samples)
        files = hashes(beside)
        write_json(beside / "meta.json", {**facts, "files": files, "data_sha256": digest(files)})


def check_data(folder):
    """`meta.json` of packed rows, which are byte for byte those that 02 wrote.

    Raises:
      UserError: something is missing or has changed since; names it.
    """
    meta = read_json(require(Path(folder) / "meta.json", "02_data.py"))
    if wrong := changed(folder, meta["files"]):
        raise UserError(f"{folder} is not what 02 wrote: {wrong}. Run 02_data.py again.")
    return meta
