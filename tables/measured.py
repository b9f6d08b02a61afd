"""Reports of runs on real chips, sent by readers: data/measured/*.json, beside what was predicted.

`helpers.report` writes a report; `data/measured/fields.csv` is the form that both follow. Nothing
has to be edited when one arrives: the file is put into the folder.
"""

from __future__ import annotations

import csv
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import stored
from tables.errors import UserError

FOLDER = Path(__file__).resolve().parent.parent / "data" / "measured"
SERIES, FORM = "gemma4-on-tpu", 1
# What 08 predicts of a compiled row, by the name of what is measured.
PREDICTED = {"micro_batch_seconds": "seconds_predicted",
             "real_tokens_per_second": "tokens_per_second_predicted"}


@dataclass(frozen=True)
class Report:
    """One report: of which machine and settings, and its numbers by the names of fields.csv."""

    source: str                  # the file's name
    about: dict[str, Any]
    values: dict[str, float]
    made_up: bool                # for a test; the folder takes none

    @property
    def slice(self) -> str:
        """Google's name of the machine, such as v5e-8."""
        return str(self.about["slice"])

    @property
    def said(self) -> str:
        """Where a number is from, for a table or a figure; says so where it's made up."""
        text = f"{self.source}, commit {self.about['commit'][:7]}"
        return f"{text} (made up)" if self.made_up else text

    @property
    def size(self) -> str:
        """The size of the series, such as 31b."""
        return str(self.about["size"])


@functools.lru_cache(maxsize=1)
def fields() -> dict[str, str]:
    """{name: unit} of the form, in its order."""
    with open(FOLDER / "fields.csv", newline="", encoding="utf-8") as file:
        return {row["name"]: row["unit"] for row in csv.DictReader(file)}


def reports(folder: Path = FOLDER) -> list[Report]:
    """All reports of a folder, by name; an empty list where nobody has sent one yet.

    Raises:
      UserError: a file isn't a report, or it's a made-up one in data/measured; it's named.
    """
    fields()  # reads the folder even where it's empty: whoever depends on it is seen to
    found = [_read(path) for path in sorted(folder.glob("*.json"))]
    for report in found:
        if report.made_up and folder == FOLDER:
            raise UserError(f"data/measured/{report.source} says that it's made up. Only what was "
                            "measured belongs there: remove it.")
    return found


def _read(path: Path) -> Report:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        about, values = value["about"], value["measured"]
        if value["series"] != SERIES or value["form"] != FORM:
            raise ValueError("it's another series' or another form's")
        for name in ("slice", "size", "commit"):
            if not isinstance(about[name], str):
                raise ValueError(f"about has no {name!r}")
        unknown = sorted(set(values) - set(fields()))
        if unknown:
            raise ValueError(f"the form has no field {unknown[0]!r}")
        for name, number in values.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)) \
                    or not math.isfinite(number):
                raise ValueError(f"{name!r} is no number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path} is no report of a run: {why}. Put the report.json there as it "
                        "was written, or remove it.") from error
    return Report(path.name, about, {name: float(number) for name, number in values.items()},
                  value.get("made_up") is True)


def compiled_row(report: Report) -> dict[str, str] | None:
    """The row of 08 that a report's step was compiled like; None if there's none."""
    about = report.about
    mesh = about.get("mesh") or ()
    for row in stored.compiled_rows(report.slice, report.size):
        same = row["base_dtype"] == (about.get("base_dtype") or "bfloat16")
        same = same and row["remat"] == about.get("remat")
        same = same and row["sequence_length"] == str(about.get("sequence_length"))
        same = same and row["mesh"] in ("", "x".join(map(str, mesh)))
        if same and row["micro_batch"] == str(about.get("micro_rows")):
            return row
    return None


def beside_predictions(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """A row for each number that 08 predicts and a reader measured: the point, and the miss.

    Returns:
      Rows with slice, what, measured, predicted, miss (predicted / measured - 1) and source; empty
      where no report has come back, or none of a step that 08 compiled.
    """
    rows = []
    for report in reports(folder):
        row = compiled_row(report)
        if row is None:
            continue
        values = dict(report.values)
        batches = report.about.get("micro_batches") or 1
        if "step_seconds" in values:
            values["micro_batch_seconds"] = values["step_seconds"] / batches
        for name, column in PREDICTED.items():
            if name not in values or not row[column]:
                continue
            predicted = float(row[column])
            if name == "micro_batch_seconds":  # a row may be a step of several
                predicted /= int(row.get("micro_batches") or 1)
            rows.append({"slice": report.slice, "what": name.replace("_", " "),
                         "measured": values[name], "predicted": predicted,
                         "miss": predicted / values[name] - 1, "source": report.said})
    return rows
