"""What notebook 08 has compiled and stored in data/dryrun/: does a step fit, and how?"""

import csv
from pathlib import Path
from typing import Any

from tables import architecture, hardware

ROOT = Path(__file__).resolve().parent.parent
ROWS_PER_STEP = {"31b": 2, "e2b": 4, "e4b": 4}  # packed rows of an optimizer step, as in 03


def is_what_03_runs(row: dict[str, str], size: str) -> bool:
    """Whether a stored row is a whole optimizer step of 03, with as many micro-batches.

    A step of one micro-batch is another program than one of several: those stand in a loop, beside
    the sum of their gradients, and what the compiler moves out of a loop it keeps.
    """
    rows_at_once = int(row["micro_batch"])
    return int(row["micro_batches"]) == max(1, ROWS_PER_STEP[size] // rows_at_once)


def compiled_rows(slice_name: str, size: str) -> list[dict[str, str]]:
    """Rows of notebook 03's step as it runs: all layers, no int8 products. Dicts of text."""
    path = ROOT / "data" / "dryrun" / f"{slice_name}_{size}.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    wanted = ("03", "0", "False")
    return [row for row in rows
            if (row["trainer"], row["layers"], row["int8_products"]) == wanted
            and is_what_03_runs(row, size)]


def compiled_fit(slice_name: str, size: str, base_dtype: str = "bfloat16",
                 row_length: int = 4_096) -> dict[str, str] | None:
    """How notebook 03's step fits a slice: of the rows of data/dryrun/ the nearest in length.

    Long enough comes first; among equals the one that recomputes least, with most rows at once.

    Returns:
      The row as a dict of strings (`mesh`, `remat`, `sequence_length`, `micro_batch`, `hbm_gib`,
      `limit_gib` ...), or None if no row of full depth is stored or none fits.
    """
    order = ("NONE", "BLOCK", "DECODER")

    def rank(row: dict[str, str]) -> tuple[bool, int, int, int]:
        spare = int(row["sequence_length"]) - row_length
        return spare < 0, abs(spare), order.index(row["remat"]), -int(row["micro_batch"])

    fitting = [row for row in compiled_rows(slice_name, size)
               if row["fits"] == "True" and row["base_dtype"] == base_dtype]
    return min(fitting, key=rank, default=None)


def settings_here(size: str, row_length: int) -> dict[str, Any]:
    """Settings of 03 for which its step is compiled here: mesh, remat, rows_per_device.

    Empty if no such row is stored for this machine, or none that fits.
    """
    row = compiled_fit(hardware.here().slice, size, row_length=row_length)
    if row is None:
        return {}
    if row["mesh"]:
        fsdp, tp = map(int, row["mesh"].split("x"))
    else:
        config = architecture.read_config(ROOT / "data" / "configs" / f"gemma4_{size}.json")
        fsdp, tp = architecture.choose_mesh(config, int(row["chips"]))
    return {"mesh": (fsdp, tp), "remat": row["remat"],
            "rows_per_device": int(row["micro_batch"]) // fsdp}
