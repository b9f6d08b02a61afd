"""Several whole examples in one row of fixed length (00, 02), and the folder that 03 reads."""

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from helpers.records import DataMeta
from helpers.run import UserError, atomic_dir, changed, digest, hashes, write_json

COLUMNS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "segment_ids": np.int32,
    "positions": np.int32,
}
Packed = dict[str, np.ndarray]


def fill_rows(lengths: Sequence[int] | np.ndarray, length: int, seed: int) -> list[list[int]]:
    """Share examples out to rows of `length`, in random order, by best fit: a list for each row."""
    rows: list[list[int]] = []
    gaps: list[tuple[int, int]] = []  # (free places, row), sorted
    order = np.random.default_rng(seed).permutation(len(lengths))
    for example in order.tolist():
        needed = int(lengths[example])
        fullest = bisect.bisect_left(gaps, (needed, -1))
        if fullest == len(gaps):  # none has room
            gaps.append((length, len(rows)))
            rows.append([])
        free, row = gaps.pop(fullest)
        rows[row].append(example)
        bisect.insort(gaps, (free - needed, row))
    return rows


def pack_arrays(
    ids: Sequence[Any], masks: Sequence[Any], length: int, seed: int
) -> Packed:
    """All packed rows as four arrays of shape [rows, length]; padding is 0 in each of them."""
    lengths = [len(example) for example in ids]
    rows = fill_rows(lengths, length, seed)
    packed: Packed = {}
    for name, kind in COLUMNS.items():
        packed[name] = np.zeros((len(rows), length), kind)
    for row, examples in enumerate(rows):
        begin = 0
        for segment, example in enumerate(examples, start=1):
            end = begin + lengths[example]
            packed["tokens"][row, begin:end] = ids[example]
            packed["loss_mask"][row, begin:end] = masks[example]
            packed["segment_ids"][row, begin:end] = segment
            packed["positions"][row, begin:end] = np.arange(lengths[example])
            begin = end
    return packed


def length_study(
    lengths: np.ndarray, limits: Sequence[int], length: int, seed: int
) -> pd.DataFrame:
    """A table: for each limit, examples kept, padding without packing, real tokens with packing.

    Args:
      lengths: array of the examples' tokens.
      limits: longer examples are dropped.
      length, seed: of the packed rows, as for `pack_arrays`; a row is at least as long as a limit.
    """
    studied = []
    for limit in limits:
        kept = lengths[lengths <= limit]
        row_length = max(limit, length)
        rows = fill_rows(kept, row_length, seed)
        studied.append({
            "longest kept": limit,
            "examples kept": len(kept) / len(lengths),
            "padding, one per row": 1 - kept.mean() / limit,
            "real tokens, packed": kept.sum() / row_length / len(rows),
        })
    return pd.DataFrame(studied).set_index("longest kept")


# ── What 02 leaves for 03 ──


def save_data(
    folder: str | Path, parts: dict[str, Packed], samples: list[Any], facts: dict[str, Any]
) -> None:
    """Write `data/` as 03 reads it; the folder appears under its name when it is complete.

    Args:
      folder: `data/` of the run directory.
      parts: {"train" | "val": the four arrays of `pack_arrays`}.
      samples: held-out examples, for `samples.json`.
      facts: for `meta.json`, which also gets the SHA-256 of every file.
    """
    with atomic_dir(folder, ours="meta.json") as beside:
        for part, columns in parts.items():
            (beside / part).mkdir()
            for name, column in columns.items():
                np.save(beside / part / f"{name}.npy", column)
        write_json(beside / "samples.json", samples)
        files = hashes(beside)
        meta = {**facts, "files": files, "data_sha256": digest(files)}
        write_json(beside / "meta.json", meta)
        DataMeta.load(beside / "meta.json")  # what 02 writes, the pages after it can read


def check_data(folder: str | Path) -> DataMeta:
    """The `DataMeta` of packed rows, which are byte for byte those that 02 wrote.

    Raises:
      UserError: something is missing or has changed since; names it.
    """
    meta = DataMeta.load(Path(folder) / "meta.json")
    if wrong := changed(folder, meta.files):
        raise UserError(f"{folder} is not what 02 wrote: {wrong}. Run 02_data.py again.")
    return meta
