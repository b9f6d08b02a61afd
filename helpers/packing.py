"""Several whole examples in one row of fixed length (00, 02), and the folder in which 03 finds them."""

import bisect
from pathlib import Path

import numpy as np
import pandas as pd

from helpers import style
from helpers.records import DataMeta
from helpers.run import UserError, atomic_dir, changed, digest, hashes, write_json

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


def draw_rows(ax, packed, title):
    """Draw the first ten rows as bars: a colour for each example, pale where it is only context."""
    for row in range(min(10, len(packed["tokens"]))):
        segments, trained = packed["segment_ids"][row], packed["loss_mask"][row]
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            for mask, alpha in ((here, 0.35), (here & trained, 1)):
                runs = np.flatnonzero(np.diff(np.pad(mask.astype(int), 1))).reshape(-1, 2)
                ax.broken_barh([(first, end - first) for first, end in runs], (row - 0.4, 0.8),
                               color=style.CYCLE[segment % len(style.CYCLE)], alpha=alpha, lw=0)
    ax.set(xlim=(0, packed["tokens"].shape[1]), ylim=(9.7, -0.7), yticks=[], title=title)
    ax.grid(False)


# ── What 02 leaves for 03 ──


def save_data(folder, parts, samples, facts):
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
        write_json(beside / "meta.json", {**facts, "files": files, "data_sha256": digest(files)})
        DataMeta.load(beside / "meta.json")  # what 02 writes, the pages after it can read


def check_data(folder):
    """The `DataMeta` of packed rows, which are byte for byte those that 02 wrote.

    Raises:
      UserError: something is missing or has changed since; names it.
    """
    meta = DataMeta.load(Path(folder) / "meta.json")
    if wrong := changed(folder, meta.files):
        raise UserError(f"{folder} is not what 02 wrote: {wrong}. Run 02_data.py again.")
    return meta
