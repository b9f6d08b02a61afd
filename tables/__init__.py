"""Tables: chips, model families, what others published and what 08 compiled; standard library only."""

import csv
from pathlib import Path

PUBLISHED = Path(__file__).resolve().parent.parent / "data" / "published"


def published(name, key, value="value"):
    """One column of `data/published/<name>.csv` as a dict; what is a number becomes a float."""
    def number(text):
        try:
            return float(text)
        except ValueError:
            return text
    with open(PUBLISHED / f"{name}.csv", newline="", encoding="utf-8") as file:
        return {row[key]: number(row[value]) for row in csv.DictReader(file)}
