"""The records that a server's folder keeps: typed, checked when they are read, written in one
piece."""

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from tables.errors import UserError


def problem_of(cls: type, values: object) -> str:
    """What is wrong with JSON that should hold the fields of a dataclass; "" if nothing is.

    An int is welcome where a float is, and a list where a tuple is; nothing else is converted.
    """
    if not isinstance(values, dict):
        return f"it holds {json.dumps(values)[:40]}"
    names = [field.name for field in fields(cls)]
    missing = sorted(set(names) - set(values))
    unknown = sorted(set(values) - set(names))
    if missing:
        return f"it has no {missing[0]!r}"
    if unknown:
        return f"nothing is called {unknown[0]!r}"
    json_types: dict[Any, tuple[type, ...]] = {float: (int, float), tuple: (list, tuple)}
    for field in fields(cls):
        plain: Any = getattr(field.type, "__origin__", field.type)
        value = values[field.name]
        allowed = json_types.get(plain, (plain,))
        is_flag = isinstance(value, bool)
        if not isinstance(value, allowed) or is_flag != (plain is bool):
            return f"{field.name!r} is {json.dumps(value)[:40]}"
    return ""


def read_json(path: Path, fix: str) -> Any:
    """The JSON of a file.

    Raises:
      UserError: it cannot be read, or is no JSON; names the file and `fix`.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON. {fix}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {fix}") from error


def write_json(path: Path, value: object, indent: int | None = 2) -> None:
    """Write JSON so that a reader finds the old file or the new one, never a part.

    Args:
      indent: columns; None writes everything into one line, which is a hundred times faster.

    Raises:
      UserError: it cannot be written, for example because the disk is full.
    """
    beside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=indent) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be written ({error.strerror}). Free some space there, or set RUN_DIR "
            "to another disk.") from error


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
        values = read_json(path, fix)
        if problem := problem_of(cls, values):
            raise UserError(f"{path} is not the record of a server: {problem}. {fix}")
        return cls(**values)

    def save(self, folder: str | Path) -> None:
        """Write the record into a folder, whole or not at all.

        Raises:
          UserError: it cannot be written.
        """
        write_json(self.path(folder), asdict(self))

    def age(self) -> float:
        """Seconds since it was started; no change of the wall clock moves it."""
        return time.monotonic() - self.started
