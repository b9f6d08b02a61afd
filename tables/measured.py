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
SERIES = "gemma4-on-tpu"
FORM = 1
# What 08 predicts of a compiled row, by the name of what is measured.
PREDICTED = {
    "micro_batch_seconds": "seconds_predicted",
    "real_tokens_per_second": "tokens_per_second_predicted",
}


@dataclass(frozen=True)
class Report:
    """One report: what was measured, on which machine, with which settings."""

    source: str                  # the file's name
    about: dict[str, Any]        # the machine and the settings
    values: dict[str, float]     # by the names of fields.csv
    made_up: bool                # for a test; the folder takes no such report

    @property
    def slice(self) -> str:
        """Google's name of the machine, such as v5e-8."""
        return str(self.about["slice"])

    @property
    def origin(self) -> str:
        """Where a number is from, for a table or a figure; says so where it's made up."""
        commit = self.about["commit"]
        text = f"{self.source}, commit {commit[:7]}"
        if self.made_up:
            text += " (made up)"
        return text

    @property
    def size(self) -> str:
        """The size of the series, such as 31b."""
        return str(self.about["size"])


@functools.lru_cache(maxsize=1)
def fields() -> dict[str, str]:
    """{name: unit} of the form, in its order."""
    with open(FOLDER / "fields.csv", newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return {row["name"]: row["unit"] for row in rows}


def reports(folder: Path = FOLDER) -> list[Report]:
    """All reports of a folder, by name; an empty list where nobody has sent one yet.

    Raises:
      UserError: a file isn't a report, or it's a made-up one in data/measured; it's named.
    """
    fields()  # reads the folder even if it's empty, so we notice who depends on it
    listed = []
    for path in sorted(folder.glob("*.json")):
        report = _read(path)
        if report.made_up and folder == FOLDER:
            raise UserError(
                f"data/measured/{report.source} says that it's made up. Only what was "
                "measured belongs there: remove it."
            )
        listed.append(report)
    return listed


def _read(path: Path) -> Report:
    """The report in a file.

    Raises:
      UserError: the file doesn't follow the form.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        _check(value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error)
        if isinstance(error, KeyError):  # whose text is the key alone
            why = f"it has no {error}"
        raise UserError(
            f"{path} is no report of a run: {why}. Put the report.json there as it "
            "was written, or remove it."
        ) from error
    return Report(
        source=path.name,
        about=value["about"],
        values={name: float(number) for name, number in value["measured"].items()},
        made_up=value.get("made_up") is True,
    )


def _check(value: Any) -> None:
    """Raise an error that says what in a report's JSON isn't as the form says."""
    about = value["about"]
    values = value["measured"]
    if value["series"] != SERIES or value["form"] != FORM:
        raise ValueError("it's another series' or another form's")
    for name in ("slice", "size", "commit"):
        if not isinstance(about[name], str):
            raise ValueError(f"about has no {name!r}")
    unknown = sorted(set(values) - set(fields()))
    if unknown:
        raise ValueError(f"the form has no field {unknown[0]!r}")
    for name, number in values.items():
        if not is_number(number):
            raise ValueError(f"{name!r} is no number")


def is_number(value: object) -> bool:
    """Is it a finite number, and not true or false, which Python counts as 1 and 0?"""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)


def compiled_row(report: Report) -> dict[str, str] | None:
    """The row of 08 that a report's step was compiled like; None if there's none."""
    about = report.about
    if about.get("int8_products"):  # no row of 03's step multiplies in int8
        return None
    sizes = about.get("mesh") or ()
    mesh = "x".join(map(str, sizes))
    wanted = {
        "base_dtype": about.get("base_dtype") or "bfloat16",
        "remat": about.get("remat"),
        "sequence_length": str(about.get("sequence_length")),
        "micro_batch": str(about.get("micro_rows")),
    }
    for row in stored.compiled_rows(report.slice, report.size):
        if row["mesh"] not in ("", mesh):  # a row names only an unusual mesh
            continue
        if wanted.items() <= row.items():
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
            number = values[name]
            rows.append({
                "slice": report.slice,
                "what": name.replace("_", " "),
                "measured": number,
                "predicted": predicted,
                "miss": predicted / number - 1,
                "source": report.origin,
            })
    return rows
