"""Rows of data/dryrun/ compiled again and compared with what is stored.

    .venv/bin/python tests/remake_dryrun.py --out FOLDER               five rows, drawn with seed 0
    .venv/bin/python tests/remake_dryrun.py --out FOLDER --without     those without a predicted time

Needs the TPU's compiler (`./setup.sh dryrun`). A row with all sixty layers takes about nine CPU
minutes and up to 13 GB. What FOLDER holds already is not compiled again. A row that comes out equal
and lacked a predicted time is stored with it.
"""

import argparse
import dataclasses
import math
import os
import random
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

LATER = {"compile_cpu_seconds", "date"}  # what another run may change


def equal(one, other):
    """Are two fields the same, numbers to their sixth digit?"""
    try:
        return math.isclose(float(one), float(other), rel_tol=1e-5)
    except ValueError:
        return one == other


def differences(old, new):
    """{column: (stored, made again)} of two rows as text, where both say something."""
    return {name: (value, new[name]) for name, value in old.items()
            if name not in LATER and value != "" and str(new.get(name, "")) != ""
            and not equal(value, str(new[name]))}


def main():
    """The commands in this file's first lines; the exit code is 1 if a row differs."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows made again")
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", action="store_true",
                        help="instead of drawing: those without a predicted time")
    given = parser.parse_args()
    os.chdir(ROOT)
    from appendix import steps
    from tpu_time import compiler
    from helpers.run import UserError

    if not compiler.start():
        raise UserError("the TPU's compiler is missing. Run: ./setup.sh dryrun")
    compiler.register()

    def stored(recipe, folder):
        wanted = steps.key_of(dataclasses.asdict(recipe) | steps.versions())
        rows = steps.stored_rows(Path(folder) / f"{steps.table_name(recipe)}.csv")
        return next((row for row in rows if steps.key_of(row) == wanted), None)

    there = [recipe for recipe in steps.RECIPES if stored(recipe, steps.FOLDER)]
    drawn = ([recipe for recipe in there if not stored(recipe, steps.FOLDER).get("unknown_share")
              and not stored(recipe, steps.FOLDER).get("note")] if given.without
             else random.Random(given.seed).sample(there, given.rows))
    failed = 0
    for recipe in drawn:
        steps.run_table([recipe], folder=given.out)
        old, new = stored(recipe, steps.FOLDER), stored(recipe, given.out)
        wrong = differences(old, new)
        failed += bool(wrong)
        print(f"{steps.name_of(recipe)}: {wrong or 'equal'}", flush=True)
        if not wrong and not old.get("unknown_share"):
            steps.store(recipe, new)
            profile = Path("profiles", f"{steps.name_of(recipe)}.json")
            if (given.out / profile).exists():
                shutil.copy(given.out / profile, steps.FOLDER / profile)
    print(f"{len(drawn) - failed} of {len(drawn)} rows came out equal")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
