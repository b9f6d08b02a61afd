"""What a loss mask in the wrong place does: the runs behind 02's figure.

    python -m appendix.masks     makes the runs that data/masks/ lacks

Each run is a short fine-tune of the tiny base on 02's rows. The tokens, the steps and the seeds are
the same; what differs is which tokens are trained. Afterward the model answers the 38 held-out
problems, once greedily and five times by chance.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from appendix import runs, tuning
from helpers import train
from helpers.run import run_dir

STORED = Path("data/masks")
SEEDS = (42, 43, 44)
STEPS = 100
DRAWN = 5
SETTINGS = train.Settings(rank=16, alpha=32.0, learning_rate=5e-3, warmup_steps=10,
                          rows_per_step=4)
LATE = 6  # tokens
VARIANTS = ("answers", "prompts, too", "six tokens late")


def mask_of(row: train.Batch, variant: str) -> np.ndarray:
    """The loss mask [T] of a packed row in one of `VARIANTS`.

    "answers" is 02's mask. "prompts, too" trains every token of an example but the first, which
    nothing predicts. "six tokens late" is 02's mask moved back, as a miscounted prompt moves it.
    """
    segments = row.segment_ids
    if variant == "answers":
        return row.loss_mask
    if variant == "prompts, too":
        is_first = np.ones(len(segments), bool)
        is_first[1:] = segments[1:] != segments[:-1]
        is_trained = (segments > 0) & ~is_first
        return is_trained.astype(row.loss_mask.dtype)
    mask = np.zeros_like(row.loss_mask)
    same_example = segments[LATE:] == segments[:-LATE]
    mask[LATE:] = row.loss_mask[:-LATE] * same_example
    return mask


def rows_with(variant: str) -> list[train.Batch]:
    """02's training rows with their loss masks replaced."""
    rows = train.PackedRows(run_dir("data", "train"))
    changed = []
    for place in range(len(rows)):
        row = rows[place]
        changed.append(row.replace(loss_mask=mask_of(row, variant)))  # type: ignore[attr-defined]
    return changed


def run(variant: str, seed: int) -> str:
    """Train, ask and judge; what is stored of it, one row of CSV."""
    tuned = tuning.tune(rows_with(variant), SETTINGS, STEPS, seed)
    passed = tuning.passes(tuned.model, tuned.mesh, DRAWN)
    last_losses = tuned.losses[-10:]
    row = {"mask": variant,
           "seed": seed,
           "steps": STEPS,
           "loss": round(float(np.mean(last_losses)), 5),
           "problems": len(passed),
           "greedy": int(passed[:, 0].sum()),
           "drawn": int(passed[:, 1:].sum()),
           "answers_drawn": DRAWN * len(passed)}
    return pd.DataFrame([row]).to_csv(index=False)


def main() -> None:
    """Make the runs that are missing."""
    train.keep_compilations()
    wanted = {}
    for seed in SEEDS:
        for variant in VARIANTS:
            name = variant.replace(",", "").replace(" ", "_")
            wanted[STORED / f"{name}-{seed}.csv"] = (variant, seed)
    runs.fill(wanted, run)


if __name__ == "__main__":
    main()
