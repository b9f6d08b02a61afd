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
from tables import hardware, measured

ROOT = Path(__file__).resolve().parent.parent
WARM = 3  # the first steps warm caches up, and are not counted
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "google-tunix", "qwix", "orbax-checkpoint")
SEND = ("Please send this file: https://github.com/OWNER/gemma4-on-tpu/issues/new, or as a pull "
        "request that adds it to data/measured/.")


def training(folder: Path) -> dict[str, Any]:
    """What 03 left in a run directory: its machine.json, and its steps from log.jsonl."""
    records = [json.loads(line) for line in (folder / "train/log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    steady = steps[WARM:] or steps
    seconds = [record["seconds"] for record in steady]
    return {**run.read_json(folder / "train/machine.json"), "steps_measured": len(steady),
            "step_seconds": statistics.median(seconds), "first_step_seconds": steps[0]["seconds"],
            "real_tokens_per_second": sum(r["real_tokens"] for r in steady) / sum(seconds),
            "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"]}


def collect(folder: Path, outcome: str = "") -> dict[str, Any]:
    """The report of a run directory, as `tables.measured` reads it.

    Args:
      folder: the run directory; whatever is missing there is missing in the report.
      outcome: how the run ended, in one line.
    """
    values, pages = _training(folder), _json(folder / "times.json").get("seconds", {})
    values |= _serving(folder) | _scores(folder)
    names = measured.fields()
    return {
        "series": measured.SERIES, "form": measured.FORM, "send": SEND, "outcome": outcome,
        "about": _about(folder), "versions": _versions(), "pages_seconds": pages,
        "measured": {name: values[name] for name in names if values.get(name) is not None}}


def _json(path: Path) -> dict[str, Any]:
    """A JSON file's object; {} where it's missing or damaged, as after a full disk."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _about(folder: Path) -> dict[str, Any]:
    """Machine, size and settings to which the numbers belong."""
    machine, facts = hardware.here(), _json(_trained(folder) / "train/machine.json")
    data, recipe = (_json(_trained(folder) / name) for name in (
        "data/meta.json", "train/recipe.json"))
    kept = {name: facts.get(name) for name in (
        "device_kind", "devices", "mesh", "remat", "sequence_length", "micro_rows",
        "micro_batches", "base_dtype")}
    return {
        **asdict(machine), "slice": machine.slice, "size": run.size(),
        "commit": run.commit_of(ROOT, "rev-parse", "HEAD") or "no git",
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "system": platform.platform(), "cores": os.cpu_count(),
        "base": data.get("base_model", ""), "rank": recipe.get("rank"), **kept}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _trained(folder: Path) -> Path:
    """Where 03 wrote: the run itself, or that of a first hour in it."""
    inner = folder / "first_hour/run"
    if not (folder / "train/log.jsonl").exists() and inner.exists():
        return inner
    return folder


def _training(folder: Path) -> dict[str, Any]:
    place = _trained(folder)
    if not (place / "train/log.jsonl").exists() or not (place / "train/machine.json").exists():
        return {}
    try:
        found = training(place)
    except (ValueError, LookupError):  # no step was finished, or half a line was
        return {}
    if found.get("peak_bytes_in_use"):
        found["peak_gib_per_device"] = found["peak_bytes_in_use"] / hardware.GIB
    recipe = _json(place / "train/recipe.json")
    return found | {name: recipe.get(name) for name in ("val_loss_before", "val_loss_after")}


def _serving(folder: Path) -> dict[str, Any]:
    """The start of the server, and the latencies at the smallest rate that 06 measured."""
    hour = _json(folder / "first_hour/report.json").get("stages", {}).get("serve", {})
    short = hour.get("result", {})
    found = {"server_ready_seconds": _json(folder / "serve/ready.json").get(
        "seconds", short.get("ready_seconds")), "ttft_p50_ms": short.get("p50_ttft_ms"),
        "tpot_p50_ms": short.get("p50_tpot_ms"),
        "output_tokens_per_second": short.get("output_throughput")}
    path = folder / "bench/results.csv"
    if not path.exists():
        return found
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["ttft_p50_ms"]]
    if not rows:
        return found
    alone = min(rows, key=lambda row: (float(row["rate"]), float(row["input_len"])))
    return found | {
        "ttft_p50_ms": float(alone["ttft_p50_ms"]), "tpot_p50_ms": float(alone["tpot_p50_ms"]),
        "tpot_floor_ms": float(alone["tpot_floor_ms"]),
        "output_tokens_per_second": max(float(row["output_tok_s"]) for row in rows)}


def _scores(folder: Path) -> dict[str, Any]:
    compared = _json(folder / "eval/comparison.json")
    found = {}
    for model in ("base", "tuned"):
        scores = compared.get(model, {})
        found[f"pass_at_1_{model}"] = scores.get("pass@1")
        found["problems"] = scores.get("n_problems")
    return found


def main(words: list[str]) -> None:
    """Write the report of a run directory, and say where to send it."""
    if len(words) not in (2, 3):
        sys.exit(__doc__)
    report = collect(Path(words[0]), *words[2:])
    run.write_json(words[1], report)
    print(f"{words[1]}: {len(report['measured'])} numbers of {len(measured.fields())}. {SEND}")


if __name__ == "__main__":
    run.one_line_errors()
    main(sys.argv[1:])
