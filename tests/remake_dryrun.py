"""Rows of data/dryrun/, drawn at random, compiled again and compared with what is stored.

    .venv/bin/python tests/remake_dryrun.py --out FOLDER [--rows 5] [--seed 0]

Needs the TPU's compiler (`./setup.sh dryrun`). A row with all sixty layers takes about nine CPU
minutes and up to 13 GB. What FOLDER holds already is not compiled again.
"""

import argparse
import dataclasses
import math
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from appendix import steps  # noqa: E402
from tpu_time import compiler  # noqa: E402

LATER = {"compile_cpu_seconds", "date"}  # what another run may change


def stored(recipe, folder):
    """The row of a recipe in a folder, made with these versions; None without one."""
    wanted = steps.key_of(dataclasses.asdict(recipe) | steps.versions())
    rows = steps.stored_rows(Path(folder) / f"{steps.table_name(recipe)}.csv")
    return next((row for row in rows if steps.key_of(row) == wanted), None)


def equal(one, other):
    """Are two fields the same, numbers to their sixth digit?"""
    try:
        return math.isclose(float(one), float(other), rel_tol=1e-5)
    except ValueError:
        return one == other


def main():
    """The command in this file's first lines; the exit code is 1 if a row differs."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows made again")
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.chdir(ROOT)
    if not compiler.start():
        sys.exit("the TPU's compiler is missing. Run: ./setup.sh dryrun")
    compiler.register()
    there = [recipe for recipe in steps.RECIPES if stored(recipe, steps.FOLDER)]
    failed = 0
    for recipe in random.Random(given.seed).sample(there, given.rows):
        steps.run_table([recipe], folder=given.out)
        new = stored(recipe, given.out)
        wrong = {name: (value, new[name]) for name, value in stored(recipe, steps.FOLDER).items()
                 if name not in LATER and value != "" and str(new.get(name, "")) != ""
                 and not equal(value, str(new[name]))}
        failed += bool(wrong)
        print(f"{steps.table_name(recipe)}, {recipe.recipe}: {wrong or 'equal'}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
