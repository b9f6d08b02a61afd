"""What a run measured, as one file to send: report.json, from the files that its pages left.

    python -m helpers.report RUN_DIR TARGET [OUTCOME]

Pages that didn't run leave nothing, and their numbers are missing. Standard library only.
"""

import csv
import datetime
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from helpers import run
from helpers.records import Comparison, DataMeta, Recipe
from helpers.run import UserError
from tables import hardware, measured
from tables.texts import json_lines

ROOT = Path(__file__).resolve().parent.parent
WARM = 3  # the first steps warm caches up, and are not counted
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "google-tunix", "qwix", "orbax-checkpoint")
# What machine.json says of the training, and the report repeats.
TRAINED_WITH = (
    "device_kind",
    "devices",
    "mesh",
    "remat",
    "sequence_length",
    "micro_rows",
    "micro_batches",
)
SEND = ("Please send this file: https://github.com/OWNER/gemma4-on-tpu/issues/new, or as a pull "
        "request that adds it to data/measured/.")


def training(folder: Path) -> dict[str, Any]:
    """What 03 left in a run directory: machine.json, its base's dtype, and steps from log.jsonl.

    Raises:
      LookupError, ValueError: no step was finished, or the log ends in half a line.
    """
    path = folder / "train/machine.json"
    machine = _json(path)
    if not machine:
        raise UserError(f"{path} isn't what 03_train.py writes. Run it again.")
    steps = _steps(folder / "train/log.jsonl")
    steady = steps[WARM:]
    if not steady:
        steady = steps
    seconds = [step["seconds"] for step in steady]
    tokens = [step["real_tokens"] for step in steady]
    return {
        **machine,
        "base_dtype": _base_dtype(folder),
        "steps_measured": len(steady),
        "step_seconds": statistics.median(seconds),
        "first_step_seconds": steps[0]["seconds"],
        "real_tokens_per_second": sum(tokens) / sum(seconds),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
    }


def _base_dtype(folder: Path) -> str | None:
    """How 03 stored the frozen base in a run directory; None if it didn't get far enough to say."""
    recipe = _recipe(folder)
    if recipe is None:
        return None
    return recipe.base_dtype or recipe.dtype


def _recipe(folder: Path) -> Recipe | None:
    """03's recipe in a run directory; None if 03 didn't get to its end."""
    return Recipe.load_if_whole(folder.joinpath(*Recipe.PLACE))


def _steps(log: Path) -> list[dict[str, Any]]:
    """The lines of 03's log that tell of a step; others tell of a held-out loss.

    Raises:
      ValueError: a line is neither.
    """
    steps = []
    text = log.read_bytes()
    for line in json_lines(text):
        record = line.value
        if not isinstance(record, dict):
            raise UserError(f"{log}: line {line.number} isn't one of 03's.")
        if "loss" not in record:
            continue
        for name in ("loss", "seconds", "real_tokens"):
            if not measured.is_number(record.get(name)):
                raise UserError(f"{log}: line {line.number} has no number {name!r}.")
        steps.append(record)
    return steps


def collect(folder: Path, outcome: str = "") -> dict[str, Any]:
    """The report of a run directory, as `tables.measured` reads it.

    Args:
      folder: the run directory; whatever is missing there is missing in the report.
      outcome: how the run ended, in one line.
    """
    values = _training(folder) | _serving(folder) | _scores(folder)
    numbers = {}
    for name in measured.fields():
        value = values.get(name)
        if measured.is_number(value):
            numbers[name] = value
    times = _json(folder / "times.json")
    return {
        "series": measured.SERIES,
        "form": measured.FORM,
        "send": SEND,
        "outcome": outcome,
        "about": _about(folder),
        "versions": _versions(),
        "pages_seconds": _part(times, "seconds"),
        "measured": numbers,
    }


def _json(path: Path) -> dict[str, Any]:
    """The object of a JSON file that has no record; {} where it's missing or damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return _object(value)


def _part(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The object that an object holds under a name; {} where there's none."""
    return _object(values.get(name))


def _object(value: Any) -> dict[str, Any]:
    """A JSON object as it is; {} for any other value."""
    if isinstance(value, dict):
        return value
    return {}


def _about(folder: Path) -> dict[str, Any]:
    """Machine, size and settings to which the numbers belong."""
    trained = _trained(folder)
    facts = _json(trained / "train/machine.json")
    data = DataMeta.load_if_whole(trained.joinpath(*DataMeta.PLACE))
    recipe = _recipe(trained)
    machine = hardware.here()
    now = datetime.datetime.now(datetime.UTC)
    base = ""
    if data:
        base = data.base_model
    rank = None
    if recipe:
        rank = recipe.rank
    about = {
        **asdict(machine),
        "slice": machine.slice,
        "size": run.size(),
        "commit": run.commit_of(ROOT, "rev-parse", "HEAD") or "no git",
        "when": now.isoformat(timespec="seconds"),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "base": base,
        "rank": rank,
        "base_dtype": _base_dtype(trained),
    }
    for name in TRAINED_WITH:
        about[name] = facts.get(name)
    about["int8_products"] = recipe is not None and recipe.int8_products
    return about


def _versions() -> dict[str, str]:
    """Python's version, and those of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _trained(folder: Path) -> Path:
    """Where 03 wrote: the run itself, or that of a first hour in it."""
    inner = folder / "first_hour/run"
    if not (folder / "train/log.jsonl").exists() and inner.exists():
        return inner
    return folder


def _training(folder: Path) -> dict[str, Any]:
    """As `training`, with peak memory in GiB and the held-out losses; {} if 03 didn't get far."""
    place = _trained(folder)
    log_exists = (place / "train/log.jsonl").exists()
    if not log_exists or not (place / "train/machine.json").exists():
        return {}
    try:
        values = training(place)
    except (ValueError, LookupError):  # no step was finished, or half a line was
        return {}

    peak = values.get("peak_bytes_in_use")
    if peak is not None and measured.is_number(peak):
        values["peak_gib_per_device"] = peak / hardware.GIB
    recipe = _recipe(place)
    if recipe is not None:
        values["val_loss_before"] = recipe.val_loss_before
        values["val_loss_after"] = recipe.val_loss_after
    return values


def _serving(folder: Path) -> dict[str, Any]:
    """How fast the server of 05 was ready, and what 06 measured of it.

    A first hour measures the server, too. Its numbers stand where 05 or 06 left none.
    """
    stages = _part(_json(folder / "first_hour/report.json"), "stages")
    serve_stage = _part(stages, "serve")
    hour = _part(serve_stage, "result")
    ready = _json(folder / "serve/ready.json")
    ready_in_hour = hour.get("ready_seconds")
    values = {
        "server_ready_seconds": ready.get("seconds", ready_in_hour),
        "ttft_p50_ms": hour.get("p50_ttft_ms"),
        "tpot_p50_ms": hour.get("p50_tpot_ms"),
        "output_tokens_per_second": hour.get("output_throughput"),
    }
    return values | _benchmark(folder / "bench/results.csv")


def _benchmark(results: Path) -> dict[str, float]:
    """What 06 measured: latencies at its lowest rate, and the most tokens a second at any rate.

    {} if it measured nothing.
    """
    if not results.exists():
        return {}
    rows = []
    with open(results, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["ttft_p50_ms"]:
                rows.append(row)
    if not rows:
        return {}
    calmest = min(rows, key=_load)
    throughputs = [float(row["output_tok_s"]) for row in rows]
    return {
        "ttft_p50_ms": float(calmest["ttft_p50_ms"]),
        "tpot_p50_ms": float(calmest["tpot_p50_ms"]),
        "tpot_floor_ms": float(calmest["tpot_floor_ms"]),
        "output_tokens_per_second": max(throughputs),
    }


def _load(row: dict[str, str]) -> tuple[float, float]:
    """How much work a row of results.csv gave the server: requests a second, tokens of each."""
    requests_a_second = float(row["rate"])
    tokens_of_each = float(row["input_len"])
    return requests_a_second, tokens_of_each


def _scores(folder: Path) -> dict[str, Any]:
    """pass@1 of both models, and the number of problems, as 07 left them; {} without those."""
    compared = Comparison.load_if_whole(folder.joinpath(*Comparison.PLACE))
    if compared is None:
        return {}
    return {
        "pass_at_1_base": compared.base["pass@1"],
        "pass_at_1_tuned": compared.tuned["pass@1"],
        "problems": compared.tuned["n_problems"],
    }


def main(words: list[str]) -> None:
    """Write the report of a run directory, and say where to send it.

    Args:
      words: the run directory, the file to write, and how the run ended, which may be left out.
    """
    if len(words) not in (2, 3):
        sys.exit(__doc__)
    folder, target, *outcome = words
    report = collect(Path(folder), *outcome)
    run.write_json(target, report)
    numbers = report["measured"]
    measured_here = len(numbers)
    all_numbers = len(measured.fields())
    print(f"{target}: {measured_here} numbers of {all_numbers}. {SEND}")


if __name__ == "__main__":
    run.one_line_errors()
    main(sys.argv[1:])
