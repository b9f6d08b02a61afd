"""Rows of data/dryrun/, drawn at random, planned again: does a chip need the memory that is stored?

    .venv/bin/python tests/remake_dryrun.py [SEED]

Needs the TPU's compiler (`./setup.sh dryrun`), for each of five rows one to three CPU minutes. XLA's
plan is a little less than the sum that is stored (1 % for two layers), so 2 % may be between them.
Times need no compiler: `tests/test_dryrun.py` predicts each again from its kept program.
"""

import functools
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from appendix import steps  # noqa: E402
from tpu_time import compiler  # noqa: E402

if not compiler.start():
    sys.exit("the TPU's compiler is missing. Run: ./setup.sh dryrun")
stored = {recipe: row for recipe in steps.RECIPES
          for row in steps.stored_rows(steps.FOLDER / f"{steps.table_name(recipe)}.csv")
          if row["recipe"] == recipe.recipe and row["args_gib"]}
wrong = 0
for recipe in random.Random(*map(int, sys.argv[1:])).sample(list(stored), 5):
    before = float(stored[recipe]["hbm_gib"])
    after = compiler.planned(functools.partial(steps.lower, recipe))
    wrong += abs(after / before - 1) > 0.02
    print(f"{recipe.topology} {recipe.size}, {recipe.recipe}: stored {before:.3f}, now {after:.3f} GiB",
          flush=True)
sys.exit(bool(wrong))
