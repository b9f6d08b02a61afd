"""Chips, model families, what others published and what 08 compiled; standard library only.

What several rooms share is here, too, because they share no other room: errors, whole files,
records, settings, and how text is read.
"""

from __future__ import annotations  # any Python from 3.7 on reads this file

import csv
from pathlib import Path

PUBLISHED = Path(__file__).resolve().parent.parent / "data" / "published"


def published(name: str, key: str, value: str = "value") -> dict[str, float | str]:
    """One column of `data/published/<name>.csv` as a dict; what is a number becomes a float.

    Args:
      name: the file, without its folder and ending.
      key, value: the columns that hold the dict's keys and values.
    """
    column = {}
    with open(PUBLISHED / f"{name}.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            column[row[key]] = _number_or_text(row[value])
    return column


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
