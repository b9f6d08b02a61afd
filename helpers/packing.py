"""Packing puts several whole examples into one row of fixed length (00, 02).

`save_data` writes the folder of packed rows that 03 reads, and `check_data` checks it.
"""

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from helpers.records import DataMeta
from helpers.run import UserError, atomic_dir, changed, digest, hashes, write_json

COLUMNS = {  # a row's arrays and their dtypes
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "segment_ids": np.int32,
    "positions": np.int32,
}
Packed = dict[str, np.ndarray]  # by the names of COLUMNS, each [rows, length]


def fill_rows(lengths: Sequence[int] | np.ndarray, length: int, seed: int) -> list[list[int]]:
    """Share examples out to rows.

    The examples come in random order. Each goes to the fullest row that still has room for it, or
    to a new row.

    Args:
      lengths: tokens of each example, at most `length`.
      length: tokens of a row.
      seed: of the order.

    Returns:
      For each row, the numbers of its examples.
    """
    rows: list[list[int]] = []
    gaps: list[tuple[int, int]] = []  # (free places, row), sorted
    order = np.random.default_rng(seed).permutation(len(lengths))
    for example in order.tolist():
        needed = int(lengths[example])
        fullest = bisect.bisect_left(gaps, (needed, -1))
        if fullest == len(gaps):  # no row has room
            new_row = len(rows)
            gaps.append((length, new_row))
            rows.append([])
        free, row = gaps.pop(fullest)
        rows[row].append(example)
        bisect.insort(gaps, (free - needed, row))
    return rows


def pack_arrays(
    ids: Sequence[Any],
    masks: Sequence[Any],
    length: int,
    seed: int,
) -> Packed:
    """All packed rows as four arrays of shape [rows, length]; padding is 0 in each of them.

    Args:
      ids: the token ids of each example.
      masks: for each example, True where a token is trained.
      length: tokens of a row.
      seed: of the order in which examples are packed.
    """
    lengths = [len(example) for example in ids]
    rows = fill_rows(lengths, length, seed)
    packed: Packed = {}
    shape = (len(rows), length)
    for name, dtype in COLUMNS.items():
        packed[name] = np.zeros(shape, dtype)

    for row, examples in enumerate(rows):
        begin = 0
        for segment, example in enumerate(examples, start=1):
            count = lengths[example]
            end = begin + count
            place = (row, slice(begin, end))
            packed["tokens"][place] = ids[example]
            packed["loss_mask"][place] = masks[example]
            packed["segment_ids"][place] = segment
            packed["positions"][place] = np.arange(count)
            begin = end
    return packed


def pack_parts(
    parts: dict[str, list[int]],
    ids: Sequence[Any],
    masks: Sequence[Any],
    length: int,
    seed: int,
) -> dict[str, Packed]:
    """The packed rows of each part of a dataset.

    Args:
      parts: {"train" | "val": the places of its examples}, from `data.split`.
      ids, masks: of all examples, as for `pack_arrays`.
      length, seed: as for `pack_arrays`.
    """
    arrays = {}
    for name, places in parts.items():
        part_ids = [ids[place] for place in places]
        part_masks = [masks[place] for place in places]
        arrays[name] = pack_arrays(part_ids, part_masks, length, seed)
    return arrays


def length_study(
    lengths: np.ndarray, limits: Sequence[int], length: int, seed: int
) -> pd.DataFrame:
    """What a limit on the length of examples would cost and save, a row of a table for each limit.

    Its columns are the share of examples that are kept, the share of real tokens with one example
    in each row, which is as long as the limit, and with packing the length of a row and that share.

    Args:
      lengths: tokens of each example.
      limits: longer examples are dropped.
      length, seed: of the packed rows, as for `pack_arrays`; a row is at least as long as a limit.
    """
    studied = []
    for limit in limits:
        kept = lengths[lengths <= limit]
        row_length = max(limit, length)
        rows = fill_rows(kept, row_length, seed)
        rows_full = kept.sum() / row_length
        studied.append({
            "longest kept": limit,
            "examples kept": len(kept) / len(lengths),
            "one per row: real tokens": kept.mean() / limit,
            "packed: real tokens": rows_full / len(rows),
            "packed: row length": row_length,
        })
    table = pd.DataFrame(studied)
    return table.set_index("longest kept")


def check_limits(lengths: np.ndarray, max_tokens: int, length: int) -> None:
    """Refuse a limit that drops every example, or that doesn't fit into a row.

    Args:
      lengths: tokens of each example.
      max_tokens: longer examples are dropped.
      length: tokens of a packed row.

    Raises:
      UserError: names the limit, the shortest example and the row.
    """
    shortest = lengths.min()
    if not shortest <= max_tokens <= length:
        raise UserError(f"max_tokens={max_tokens} is shorter than every example (the shortest has "
                        f"{shortest} tokens), or doesn't fit into rows of {length} "
                        "(sequence_length).")


# ── What 02 leaves for 03 ──


def facts_of(arrays: dict[str, Packed], examples: dict[str, int]) -> dict[str, Any]:
    """What `meta.json` says of packed rows.

    Args:
      arrays: {"train" | "val": the four arrays of `pack_arrays`}.
      examples: {"train" | "val": how many are packed}.
    """
    train = arrays["train"]
    is_real = train["segment_ids"] > 0
    is_trained = train["loss_mask"]
    train_examples = examples["train"]
    train_rows = len(train["tokens"])
    val_rows = len(arrays["val"]["tokens"])
    return {
        "tokens": int(is_real.sum()),
        "fill": float(is_real.mean()),
        "trained_tokens": int(is_trained.sum()),
        "examples_per_row": train_examples / train_rows,
        "train_examples": train_examples,
        "val_examples": examples["val"],
        "train_rows": train_rows,
        "val_rows": val_rows,
    }


def save_data(
    folder: str | Path,
    parts: dict[str, Packed],
    samples: list[Any],
    facts: dict[str, Any],
) -> None:
    """Write `data/` as 03 reads it. The folder appears under its name when it's complete.

    Args:
      folder: `data/` of the run directory.
      parts: {"train" | "val": the four arrays of `pack_arrays`}.
      samples: held-out examples, for `samples.json`.
      facts: for `meta.json`, which also gets the SHA-256 of every file.

    Raises:
      UserError: `facts` lack something that `DataMeta` has.
    """
    with atomic_dir(folder, ours="meta.json") as unfinished:
        for part, columns in parts.items():
            place = unfinished / part
            place.mkdir()
            for name, column in columns.items():
                np.save(place / f"{name}.npy", column)
        write_json(unfinished / "samples.json", samples)
        files = hashes(unfinished)
        meta = {**facts, "files": files, "data_sha256": digest(files)}
        write_json(unfinished / "meta.json", meta)
        DataMeta.load(unfinished / "meta.json")  # so the pages after 02 can read it


def check_data(folder: str | Path) -> DataMeta:
    """The `DataMeta` of packed rows, once it's clear that they're byte for byte what 02 wrote.

    Raises:
      UserError: something is missing or has changed since; the message names it.
    """
    meta = DataMeta.load(Path(folder) / "meta.json")
    wrong = changed(folder, meta.files)
    if wrong:
        raise UserError(f"{folder} is not what 02 wrote: {wrong}. Run 02_data.py again.")
    return meta
