"""What notebook 08 has compiled and stored in data/dryrun/: does a step fit, and how?"""

import csv
from pathlib import Path

from tables import architecture, hardware

ROOT = Path(__file__).resolve().parent.parent


def compiled_rows(slice_name, size):
    """Rows of notebook 03's step at full depth, without int8 products, as dicts of text."""
    path = ROOT / "data" / "dryrun" / f"{slice_name}_{size}.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file)
                if (row["trainer"], row["layers"], row["int8_products"]) == ("03", "0", "False")]


def compiled_fit(slice_name, size, base_dtype="bfloat16", row_length=4_096):
    """How notebook 03's step fits a slice: of the rows of data/dryrun/ the nearest in length.

    Long enough comes first; among equals the one that recomputes least, with most rows at once.

    Returns:
      The row as a dict of strings (`mesh`, `remat`, `sequence_length`, `micro_batch`, `hbm_gib`,
      `limit_gib` ...), or None if no row of full depth is stored or none fits.
    """
    rows = [row for row in compiled_rows(slice_name, size) if row["fits"] == "True"
            and row["base_dtype"] == base_dtype]
    order = ("NONE", "BLOCK", "DECODER")

    def rank(row):
        spare = int(row["sequence_length"]) - row_length
        return spare < 0, abs(spare), order.index(row["remat"]), -int(row["micro_batch"])

    return min(rows, key=rank, default=None)


def settings_here(size, row_length):
    """Settings of 03 with which its step is compiled for this machine: mesh, remat, rows_per_device.

    Empty if no such row is stored, or none that fits.
    """
    row = compiled_fit(hardware.here().slice, size, row_length=row_length)
    if row is None:
        return {}
    config = architecture.read_config(ROOT / "data" / "configs" / f"gemma4_{size}.json")
    fsdp, tp = (map(int, row["mesh"].split("x")) if row["mesh"]
                else architecture.choose_mesh(config, int(row["chips"])))
    return {"mesh": (fsdp, tp), "remat": row["remat"],
            "rows_per_device": int(row["micro_batch"]) // fsdp}
