"""How far a predicted time may be off, from programs that others measured. Standard library only.

data/anchors/anchors.csv holds such programs beside what is predicted of them (tpu_time/anchors.py
makes it). Their misses are the only knowledge of the model's error there is, so the rule is simple
and stated here once:

    The typical miss m is the root mean square of log(predicted / measured) over all anchors that
    have a prediction. A predicted time t becomes the range t / e^m to t e^m. A ratio of two
    predictions has two such errors, so its range has sqrt(2) m. (Errors that two programs share
    would cancel; we do not count on it.)
"""

import csv
import math
from pathlib import Path

from tables.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
ANCHORS = ROOT / "data" / "anchors" / "anchors.csv"


def anchors():
    """The stored rows as dicts of text, [] if there is no table."""
    if not ANCHORS.exists():
        return []
    with open(ANCHORS, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def typical_miss():
    """The root mean square of log(predicted / measured), as the rule above says.

    Raises:
      UserError: no stored row has a prediction, so nobody can say how far one may be off.
    """
    logs = [math.log(float(row["predicted_ms"]) / float(row["measured_ms"]))
            for row in anchors() if row["predicted_ms"]]
    if not logs:
        raise UserError(f"{ANCHORS} holds no prediction beside a measurement, and a predicted time has "
                        "no range without. Get the file back (git checkout data/anchors).")
    return math.sqrt(sum(one * one for one in logs) / len(logs))


def band(value, predictions=1):
    """(low, high) of a predicted time, speed or cost; of a ratio with `predictions=2`."""
    factor = math.exp(math.sqrt(predictions) * typical_miss())
    return value / factor, value * factor


def between(value, predictions=1, form="{:.1f}"):
    """`band` as text: "7.1 to 8.9"."""
    return " to ".join(map(form.format, band(value, predictions)))
