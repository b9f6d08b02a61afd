"""The stored runs of an appendix: a file each below data/. Those that are missing are made.

A file appears when its run is complete; one that was cut off is made again from its beginning.
"""

from pathlib import Path

import pandas as pd

from tables.files import write_text


def fill(runs, make):
    """Make the runs that are not stored.

    Args:
      runs: {path of a file: the arguments of `make`}.
      make: returns the file's text.
    """
    missing = [path for path in runs if not path.exists()]
    print("missing:", ", ".join(path.stem for path in missing) or "nothing", flush=True)
    for path in missing:
        print(f"── {path.stem}", flush=True)
        write_text(path, make(*runs[path]))


def stored(folder, **kinds):
    """All rows of a folder's csv files as one table; `kinds` are dtypes of columns."""
    return pd.concat([pd.read_csv(path, dtype=kinds) for path in sorted(Path(folder).glob("*.csv"))],
                     ignore_index=True)
