"""How strongly should the adapters count? The runs behind 04's figure.

    python -m appendix.scales     makes the runs that data/scales/ lacks

A run is a short fine-tune of the tiny base, as in `masks.py`. Then the adapters count 0 to 1.5
times as much as they did in training, and each time the model answers the 38 held-out problems
greedily.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from appendix import masks, runs, tuning
from helpers import gemma, train
from helpers.run import run_dir

STORED = Path("data/scales")
SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # times alpha / rank, as trained with


def run(seed: int) -> str:
    """Train once, then ask with every scale; what is stored of it, a row of CSV for each scale."""
    rows = train.PackedRows(run_dir("data", "train"))
    tuned = tuning.tune(rows, masks.SETTINGS, masks.STEPS, seed)
    pairs = gemma.adapted_modules(tuned.model).values()
    trained = [np.asarray(pair["b"].get_value()) for pair in pairs]

    table = []
    for scale in SCALES:
        for pair, b in zip(pairs, trained, strict=True):
            pair["b"].set_value(scale * b)  # A times a scaled B is the scaled correction
        passed = tuning.passes(tuned.model, tuned.mesh)
        row = {"seed": seed,
               "scale": scale,
               "steps": masks.STEPS,
               "problems": len(passed),
               "greedy": int(passed[:, 0].sum())}
        table.append(row)
        print(*row.values(), flush=True)
    return pd.DataFrame(table).to_csv(index=False)


def main() -> None:
    """Make the runs that are missing."""
    train.keep_compilations()
    wanted = {}
    for seed in masks.SEEDS:
        wanted[STORED / f"{seed}.csv"] = (seed,)
    runs.fill(wanted, run)


if __name__ == "__main__":
    main()
