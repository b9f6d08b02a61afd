"""Tables: chips, model families, what others published and what 08 compiled; standard library only."""

import csv
from dataclasses import field, fields
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


def setting(default, what):
    """A field of a settings class with what it is; `described` shows it."""
    return field(default=default, metadata={"what": what})


def described(settings):
    """(name, value, what it is) of every `setting`."""
    return [(one.name, getattr(settings, one.name), one.metadata["what"]) for one in fields(settings)]
