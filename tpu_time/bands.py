"""How far a predicted time may be off, from programs that others measured. Standard library only.

data/anchors/anchors.csv holds such programs beside what we predict for them (tpu_time/anchors.py
makes it). Their misses are all we know about the model's error, so the rule is simple, and it's
stated only here:

    The typical miss m is the root mean square of log(predicted / measured) over all anchors that
    have a prediction and that time a program. A predicted time t becomes the range t / e^m to t
    e^m. A ratio of two predictions has two such errors, so its range has sqrt(2) m. (Errors that
    two programs share would cancel, but we don't count on it.)

That's one sigma: if the misses were spread like a bell curve, two predictions out of three would
lie inside. Two sigmas (`sigmas=2`) hold nineteen out of twenty.

Three kinds of rows are shown but don't count (`counts`). Some rows time one call of a program of a
few milliseconds from the host, and the host's own work takes about as long: 1.2 of 2.67 ms for the
233 arrays of an AdamW update, half a millisecond for three small products. A training step takes a
second. Other rows set a constant of the model (`sets`), so they can't test it. And some programs
compute something that has no known cost (`lacks`), such as a sort, so what we predict isn't the
whole of them, however close it comes.
"""

import csv
import math
from pathlib import Path

from tables.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
ANCHORS = ROOT / "data" / "anchors" / "anchors.csv"


def anchors() -> list[dict[str, str]]:
    """The stored rows as dicts of text; [] if there's no table."""
    if not ANCHORS.exists():
        return []
    with open(ANCHORS, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


SHORT = 20.0  # milliseconds: a single call of less says as much about the host as about the chip


def counts(row: dict[str, str]) -> bool:
    """Does a row count for the typical miss? The rule above says why it might not."""
    if not row["predicted_ms"]:
        return False
    if row.get("sets") or row.get("lacks"):
        return False
    is_one_call = row["clock"] == "one call"
    is_short = float(row["measured_ms"]) < SHORT
    return not (is_one_call and is_short)


def typical_miss() -> float:
    """The root mean square of log(predicted / measured), as the rule above says.

    Raises:
      UserError: there are no anchors, so we know nothing about the error of a prediction.
    """
    squares = []
    for row in anchors():
        if counts(row):
            predicted = float(row["predicted_ms"])
            measured = float(row["measured_ms"])
            miss = math.log(predicted / measured)
            squares.append(miss**2)
    if not squares:
        raise UserError(
            f"{ANCHORS} has no row with a prediction, so no range can be given. "
            "Restore it (git checkout data/anchors), or make it: python -m tpu_time.anchors"
        )
    mean = sum(squares) / len(squares)
    return math.sqrt(mean)


def band(value: float, predictions: int = 1, sigmas: float = 1.0) -> tuple[float, float]:
    """(low, high) of a predicted time, speed or cost; of a ratio with `predictions=2`."""
    miss = sigmas * math.sqrt(predictions) * typical_miss()
    factor = math.exp(miss)
    return value / factor, value * factor


def between(
    value: float,
    predictions: int = 1,
    form: str = "{:.1f}",
    sigmas: float = 1.0,
) -> str:
    """`band` as text: "7.1 to 8.9"."""
    low, high = band(value, predictions, sigmas)
    return f"{form.format(low)} to {form.format(high)}"
