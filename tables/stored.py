"""What notebook 08 has compiled and stored in data/dryrun/: does a step fit, and how?"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tables import architecture, hardware

ROOT = Path(__file__).resolve().parent.parent
REMATS = ("NONE", "BLOCK", "DECODER")  # what's computed again, from nothing to nearly all
STORAGES = ("bfloat16", "int8", "nf4")  # of a frozen base: 2 bytes a weight, 1, or half of one
PLAIN = ("", "bfloat16")  # how settings and records name a base that isn't quantized
TRIED_IN_03 = ("bfloat16", "int8")  # storages, in this order
ROWS_PER_STEP = {"31b": 2, "12b": 4, "e2b": 4, "e4b": 4}  # packed rows of 03's optimizer step
SHORT = 4_096  # tokens; a step has a single row if that's longer


# {(slice, size): optimizer steps between two checkpoints}, where writing one may take minutes: on
# Kaggle's v5e-8 others needed 43 s for an eighth of our numbers (`fit.SLOW_DISKS`).
SELDOM_SAVED = {("v5e-8", "31b"): 300}


def rows_per_step(size: str, row_length: int) -> int:
    """Packed rows of an optimizer step of 03: a few, or one if it has more than `SHORT` tokens."""
    if row_length > SHORT:
        return 1
    return ROWS_PER_STEP[size]


def is_what_03_runs(row: dict[str, str], size: str) -> bool:
    """Is a stored row a whole optimizer step of 03, with as many micro-batches?

    A step of one micro-batch is another program than a step of several. Several stand in a loop,
    beside the sum of their gradients, and the compiler keeps what it moves out of the loop.
    """
    rows_at_once = int(row["micro_batch"])
    wanted = rows_per_step(size, int(row["sequence_length"]))
    micro_batches = max(1, wanted // rows_at_once)
    return int(row["micro_batches"]) == micro_batches


def compiled_rows(slice_name: str, size: str) -> list[dict[str, str]]:
    """Rows of notebook 03's step as it runs: all layers, no int8 products. Dicts of text."""
    path = ROOT / "data" / "dryrun" / f"{slice_name}_{size}.csv"
    if not path.exists():
        return []
    rows = []
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            has_all_layers = row["layers"] == "0"
            multiplies_in_int8 = row["int8_products"] != "False"
            if row["trainer"] != "03" or multiplies_in_int8 or not has_all_layers:
                continue
            if is_what_03_runs(row, size):
                rows.append(row)
    return rows


def compiled_fit(
    slice_name: str,
    size: str,
    base_dtype: str = "bfloat16",
    row_length: int = 4_096,
) -> dict[str, str] | None:
    """How notebook 03's step fits a slice: the fastest compiled row that's long enough.

    The rule, in this order:

    1. A row of data/dryrun/ has to fit, and its `sequence_length` has to be at least `row_length`.
       If none is that long, the longest ones count, and their fit says little about yours. Rows of
       more than `SHORT` tokens were compiled for chats as long, and only count for those.
    2. Of these, the one with the most predicted real tokens a second wins. A longer row costs no
       padding: 02 packs to `row_length`, whatever length was compiled, and `settings_here` takes
       more of your rows at once, so that a step has as many tokens as the compiled one.
    3. Where no speed is predicted, the nearest length wins, then the row that recomputes least, and
       then the one with most rows at once.

    Returns:
      The row as a dict of strings (`mesh`, `remat`, `sequence_length`, `micro_batch`, `hbm_gib`,
      `limit_gib` ...), or None if no row of full depth is stored or none fits.
    """
    def rank(row: dict[str, str]) -> tuple[int, float, int, int, int]:
        spare = int(row["sequence_length"]) - row_length
        missing = max(0, -spare)
        speed = float(row["tokens_per_second_predicted"] or 0)
        recomputes = REMATS.index(row["remat"])
        rows_at_once = int(row["micro_batch"])
        return missing, -speed, abs(spare), recomputes, -rows_at_once

    fitting = []
    for row in compiled_rows(slice_name, size):
        is_so_stored = row["base_dtype"] == base_dtype
        is_long = int(row["sequence_length"]) > SHORT
        if is_long and row_length <= SHORT:
            continue
        if is_so_stored and row["fits"] == "True":
            fitting.append(row)
    return min(fitting, key=rank, default=None)


def model_in(folder: str | Path) -> str:
    """Which Gemma 4 a model folder holds: "31b", "12b", "e4b" or "e2b"; "" for another model.

    What counts is the language model's tensors. So Google's QAT base is a "31b", too.

    Raises:
      UserError: the folder's config.json is of a model that we don't support.
    """
    own, _ = architecture.tensors(architecture.read_config(folder))
    for size in ROWS_PER_STEP:
        config = architecture.read_config(config_of(size))
        tensors, _ = architecture.tensors(config)
        if own == tensors:
            return size
    return ""


def config_of(size: str) -> Path:
    """The config.json that we keep of a real model."""
    return ROOT / "data" / "configs" / f"gemma4_{size}.json"


def settings_here(
    size: str,
    row_length: int,
    base: str | Path | None = None,
) -> dict[str, Any]:
    """Settings of 03 for which its step is compiled here: mesh, remat, rows_per_device, storage.

    A `base` is the folder of a base model. If that's another Gemma 4 than `size`, its step counts:
    the 12B's with SIZE=31b, or the E4B's with SIZE=e2b.

    Where saving may take long (`SELDOM_SAVED`), `checkpoint_every` as well, and for long rows
    `rows_per_step`.

    `compiled_fit` chooses the row: the fastest of those that are long enough. The base stays in
    bfloat16 if such a step fits, and is stored as int8 if only that fits, as on a v5e-8. If there's
    none of either, the nearest counts. Empty if no row that fits is stored for this machine.
    """
    if base is not None:
        size = model_in(base) or size
    slice_name = hardware.here().slice
    rows = []
    for base_dtype in TRIED_IN_03:
        row = compiled_fit(slice_name, size, base_dtype, row_length)
        if row is not None:
            rows.append(row)
    if not rows:
        return {}

    def is_too_short(row: dict[str, str]) -> bool:
        return int(row["sequence_length"]) < row_length

    best = min(rows, key=is_too_short)  # among equals, the first
    settings = _settings_of(best, size, row_length)
    if (slice_name, size) in SELDOM_SAVED:
        settings["checkpoint_every"] = SELDOM_SAVED[slice_name, size]
    if row_length > SHORT:
        settings["rows_per_step"] = rows_per_step(size, row_length)
    return settings


def _settings_of(row: dict[str, str], size: str, row_length: int) -> dict[str, Any]:
    """03's settings of a stored row, for rows of `row_length` tokens."""
    mesh = mesh_of(row, size)
    fsdp, _ = mesh
    rows_at_once = int(row["micro_batch"])
    rows_per_device = rows_at_once // fsdp
    if row["micro_batches"] == "1":  # then more rows at once don't change how a step is split
        compiled_length = int(row["sequence_length"])
        rows_per_device *= max(1, compiled_length // row_length)
    settings = {
        "mesh": mesh,
        "remat": row["remat"],
        "rows_per_device": rows_per_device,
    }
    if row["base_dtype"] != "bfloat16":
        settings["base_dtype"] = row["base_dtype"]
    return settings


def mesh_of(row: Mapping[str, str], size: str) -> tuple[int, int]:
    """(fsdp, tp) of a stored row, which names its mesh only where it isn't the usual one."""
    mesh = row["mesh"]
    if mesh:
        fsdp, tp = mesh.split("x")
        return int(fsdp), int(tp)
    config = architecture.read_config(config_of(size))
    chips = int(row["chips"])
    return architecture.choose_mesh(config, chips)
