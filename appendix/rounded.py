"""What do four bits cost in answers? The run behind the sentence in 04.

    RUN_DIR=<a finished tiny run> python -m appendix.rounded

It unpacks the run's `merged-w4a16/` into a folder of ordinary weights, rounding included, and asks
it and `merged/` the 38 held-out problems: once greedily, and five times with 07's temperature. The
judge is 07's. data/rounded/ keeps how many answers to each problem pass.
"""

from pathlib import Path

import jax
import numpy as np
import pandas as pd

import verilog
from appendix import tuning
from helpers import four_bits, gemma
from helpers.run import phase, require, run_dir, write_text
from verilog.stats import Comparison

STORED = Path("data/rounded/answers.csv")
SAMPLED = 5  # answers to a problem at 07's temperature


def judged(folder: Path) -> np.ndarray:
    """Which answers of the model in a folder pass: [38, 1 + SAMPLED] of 0 and 1, greedy first."""
    config = gemma.config_from_hf(folder, dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    model = gemma.load_base(folder, config, mesh)
    return tuning.passes(model, mesh, drawn=SAMPLED)


def compared(table: pd.DataFrame) -> Comparison:
    """`verilog.compare` of the sampled answers: bfloat16 first, four bits second."""
    shares = table.pivot(index="problem", columns="weights", values="sampled") / SAMPLED
    return verilog.compare(shares["bfloat16"], shares["four bits"])


def main() -> None:
    """Ask both models, and store what passes."""
    packed = require(run_dir("merged-w4a16"), "04_merge.py")
    unpacked = run_dir("unpacked-w4a16")
    four_bits.dequantize(packed, unpacked)

    rows = []
    for weights, folder in (("bfloat16", run_dir("merged")), ("four bits", unpacked)):
        with phase(f"asking the model in {folder.name}"):
            passed = judged(folder)
        for problem, answers in enumerate(passed):
            rows.append({"weights": weights, "problem": problem, "greedy": int(answers[0]),
                         "sampled": int(answers[1:].sum())})
    table = pd.DataFrame(rows)
    write_text(STORED, table.to_csv(index=False))
    print(table.groupby("weights")[["greedy", "sampled"]].sum())
    print(compared(table))


if __name__ == "__main__":
    main()
