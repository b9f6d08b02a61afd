"""The record that a server's folder keeps: typed, checked when it's read, written in one piece."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tables import files, records
from tables.errors import UserError


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """`tables.files.write_json` for the files that a server's folder keeps.

    Raises:
      UserError: the file can't be written, for example because the disk is full.
    """
    with files.refusals(path, "RUN_DIR"):
        files.write_json(path, value, indent)


@dataclass(frozen=True)
class ServerRecord:
    """One started server, as `<folder>/server.json` keeps it."""

    pid: int             # of its leader, which is also the number of its process group
    born: float          # seconds from the machine's boot to the leader's start
    started: float       # when, by the machine's monotonic clock
    base_url: str        # http://HOST:PORT
    name: str            # what clients ask for
    model: str           # the served folder
    engine: str
    max_model_len: int   # tokens
    container: str       # Docker's name for it; "" without Docker
    log: str             # the file that holds what it says
    command: list        # the words that were run, before a free port was chosen
    environment: list    # the settings that went with them
    files: list          # names, sizes and times of the served files (`options.file_states`)

    @staticmethod
    def path(folder: str | Path) -> Path:
        """Where the record of a folder is."""
        return Path(folder) / "server.json"

    @classmethod
    def load(cls, folder: str | Path) -> Self | None:
        """The record of a folder; None if no server was started there, or it was stopped.

        Raises:
          UserError: the file is there, and isn't what `start` writes.
        """
        path = cls.path(folder)
        if not path.exists():
            return None
        fix = "Run 05_serve_vllm again: it ends what still runs there, and writes it anew."
        value = files.read_json(path, fix)
        try:
            return records.from_json(cls, value, strict=True)
        except records.Misfit as error:
            raise UserError(f"{path} {error}. {fix}") from error

    def save(self, folder: str | Path) -> None:
        """Write the record into a folder, whole or not at all.

        Raises:
          UserError: it can't be written, for example because the disk is full.
        """
        write_json(self.path(folder), records.to_json(self))

    def age(self) -> float:
        """Seconds since it was started; no change of the wall clock moves it."""
        return time.monotonic() - self.started
