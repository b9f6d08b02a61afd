"""Several whole examples in one row of fixed length: the packing of 00 and 02."""

import bisect

import numpy as np

from helpers.data import COLUMNS


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
