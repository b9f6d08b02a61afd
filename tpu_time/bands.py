"""How far a predicted time may be off, from programs that others measured. Standard library only.

data/anchors/anchors.csv holds such programs beside what is predicted of them (tpu_time/anchors.py
makes it). Their misses are the only knowledge of the model's error there is, so the rule is simple
and stated here once:

    The typical miss m is the root mean square of log(predicted / measured) over all anchors that
    have a prediction and that time a program. A predicted time t becomes the range t / e^m to t
    e^m. A ratio of two predictions has two such errors, so its range has sqrt(2) m. (Errors that
    two programs share would cancel; we do not count on it.)

That is one sigma: if misses fell like a bell, two predictions of three would lie inside. Two sigmas
(`sigmas=2`) hold nineteen of twenty.

Two kinds of rows are shown and do not count (`counts`). Some time one call of a program of a few
milliseconds from the host, and what the host does for it takes as long: 1.2 of 2.67 ms for the 233
arrays of an AdamW update, half a millisecond for three small products. A training step takes a
second. And a measurement that set a constant of the model (`sets`) can't test it.
"""

import csv
import math
from pathlib import Path

from tables.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
ANCHORS = ROOT / "data" / "anchors" / "anchors.csv"


def anchors() -> list[dict[str, str]]:
    """The stored rows as dicts of text, [] if there is no table."""
    if not ANCHORS.exists():
        return []
    with open(ANCHORS, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


SHORT = 20.0  # milliseconds: a single call of less says as much about the host as about the chip


def counts(row: dict[str, str]) -> bool:
    """Whether a row belongs to the typical miss: see the rule above."""
    is_short_call = row["clock"] == "one call" and float(row["measured_ms"]) < SHORT
    return bool(row["predicted_ms"]) and not is_short_call and not row.get("sets")


def typical_miss() -> float:
    """The root mean square of log(predicted / measured), as the rule above says.

    Raises:
      UserError: there are no anchors, so nothing is known about the error of a prediction.
    """
    squares = []
    for row in anchors():
        if counts(row):
            squares.append(math.log(float(row["predicted_ms"]) / float(row["measured_ms"])) ** 2)
    if not squares:
        raise UserError(f"{ANCHORS} has no row with a prediction, so no range can be given. "
                        "Restore it (git checkout data/anchors), or make it: "
                        "python -m tpu_time.anchors")
    return math.sqrt(sum(squares) / len(squares))


def band(value: float, predictions: int = 1, sigmas: float = 1.0) -> tuple[float, float]:
    """(low, high) of a predicted time, speed or cost; of a ratio with `predictions=2`."""
    factor = math.exp(sigmas * math.sqrt(predictions) * typical_miss())
    return value / factor, value * factor


def between(value: float, predictions: int = 1, form: str = "{:.1f}", sigmas: float = 1.0) -> str:
    """`band` as text: "7.1 to 8.9"."""
    low, high = band(value, predictions, sigmas)
    return f"{form.format(low)} to {form.format(high)}"
