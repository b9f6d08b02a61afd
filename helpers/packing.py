"""Several whole examples in one row of fixed length: the packing of 00 and 02."""

import bisect

import numpy as np
import pandas as pd

from helpers import style

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


def draw_rows(ax, packed, title, rows=10):
    """Draw the first rows as bars: a colour for each example, pale where it is only context."""
    for row in range(min(rows, len(packed["tokens"]))):
        segments, trained = packed["segment_ids"][row], packed["loss_mask"][row]
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            for mask, alpha in ((here, 0.35), (here & trained, 1)):
                runs = np.flatnonzero(np.diff(np.pad(mask.astype(int), 1))).reshape(-1, 2)
                ax.broken_barh([(first, end - first) for first, end in runs], (row - 0.4, 0.8),
                               color=style.CYCLE[segment % len(style.CYCLE)], alpha=alpha, lw=0)
    ax.set(xlim=(0, packed["tokens"].shape[1]), ylim=(rows - 0.3, -0.7), yticks=[], title=title)
    ax.grid(False)
