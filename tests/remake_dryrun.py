"""Rows of data/dryrun/, drawn at random, compiled again: are memory and time what is stored?

    .venv/bin/python tests/remake_dryrun.py [SEED]

Needs the TPU's compiler (`./setup.sh dryrun`), and for each of five rows 4 to 19 CPU minutes and 8
to 22 GB of memory. What was compiled stays in a folder of its own; stopped, the same seed goes on.
"""

import os
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from appendix import steps  # noqa: E402
from tpu_time import compiler  # noqa: E402

EQUAL = "args_gib", "hbm_gib", "seconds_predicted", "unknown_share"


def row_of(recipe, folder):
    """A recipe's row in a folder, what should be equal of it."""
    rows = steps.stored_rows(folder / steps.table_path(recipe).name)
    row = next(row for row in rows if row["recipe"] == recipe.recipe)
    return [row[name] for name in EQUAL]


if not compiler.start():
    sys.exit("the TPU's compiler is missing. Run: ./setup.sh dryrun")
seed = int(sys.argv[1]) if sys.argv[1:] else random.randrange(1000)
stored, steps.FOLDER = steps.FOLDER, Path(tempfile.gettempdir()) / f"remake_dryrun_{seed}"
wrong = 0
for recipe in random.Random(seed).sample(steps.RECIPES, 5):
    steps.run_table([recipe])
    before, after = row_of(recipe, stored), row_of(recipe, steps.FOLDER)
    wrong += before != after
    print(f"{recipe.topology} {recipe.size}, {recipe.recipe}: {', '.join(EQUAL)} stored {before}, "
          f"now {after}", flush=True)
sys.exit(bool(wrong))
