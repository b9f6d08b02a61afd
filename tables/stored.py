"""What notebook 08 has compiled and stored in data/dryrun/: does a step fit, and how?"""

import csv
from pathlib import Path

from tables import architecture, hardware

ROOT = Path(__file__).resolve().parent.parent


def compiled_rows(slice_name, size):
    """Rows of notebook 03's step, on the mesh that it lays out by itself, as dicts of text.

    Args:
      slice_name: such as v6e-8.
      size: such as 31b.
    """
    path = ROOT / "data" / "dryrun" / f"{slice_name}_{size}.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file)
                if (row["trainer"], row["layers"], row["mesh"]) == ("03", "0", "")]


def compiled_fit(slice_name, size, base_dtype="bfloat16"):
    """How notebook 03's step fits a slice: the row of data/dryrun/ that recomputes least.

    Among equals it is the one with the most rows at once.

    Args:
      slice_name: such as v6e-8.
      size: such as 31b.
      base_dtype: how the frozen base is stored.

    Returns:
      The row as a dict of strings (`remat`, `sequence_length`, `micro_batch`, `hbm_gib`,
      `limit_gib` ...), or None if no row of full depth is stored or none fits.
    """
    rows = [row for row in compiled_rows(slice_name, size) if row["fits"] == "True"
            and row["base_dtype"] == base_dtype]
    order = ("NONE", "BLOCK", "DECODER")
    return min(rows, key=lambda row: (order.index(row["remat"]), -int(row["micro_batch"])),
               default=None)


def settings_here(size, base_dtype="bfloat16"):
    """Settings of 03 with which its step is compiled for this machine: remat and rows_per_device.

    Empty if no such row is stored, or none that fits.
    """
    row = compiled_fit(hardware.here().slice, size, base_dtype)
    if row is None:
        return {}
    config = architecture.read_config(ROOT / "data" / "configs" / f"gemma4_{size}.json")
    fsdp, _ = architecture.choose_mesh(config, int(row["chips"]))
    return {"remat": row["remat"], "rows_per_device": int(row["micro_batch"]) // fsdp}
