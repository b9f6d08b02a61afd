"""The stored runs of an appendix: a file each below data/. Those that are missing are made.

A file appears when its run is complete; one that was cut off is made again from its beginning.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from helpers.run import write_text


def fill(runs: Mapping[Path, tuple], make: Callable[..., str]) -> None:
    """Make the runs that are not stored.

    Args:
      runs: {path of a file: the arguments of `make`}.
      make: returns the file's text.
    """
    missing = [path for path in runs if not path.exists()]
    names = [path.stem for path in missing]
    listed = ", ".join(names) or "nothing"
    print("missing:", listed, flush=True)
    for path in missing:
        print(f"── {path.stem}", flush=True)
        text = make(*runs[path])
        write_text(path, text)


def stored(folder: str | Path, **kinds: type) -> pd.DataFrame:
    """All rows of a folder's csv files as one table; `kinds` are dtypes of columns."""
    tables = []
    for path in sorted(Path(folder).glob("*.csv")):
        tables.append(pd.read_csv(path, dtype=kinds))
    return pd.concat(tables, ignore_index=True)
