"""Whole files: a reader finds the old one or the new one, never a part. Standard library only."""

from __future__ import annotations  # any Python from 3.7 on reads this file

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tables.errors import UserError

# What to do where the system lets us not write, by its reason. `setting` names that place.
CURES = {
    errno.ENOSPC: "Free some space there, or set {setting} to a larger disk",
    errno.EDQUOT: "Your quota is used up: delete something there, or set {setting} to another disk",
    errno.EFBIG: "Files may only be so large here: raise that limit (ulimit -f), or set {setting} "
                 "to another disk",
    errno.EROFS: "Set {setting} to a disk that can be written",
    errno.EACCES: "Make it yours (sudo chown -R $USER), or set {setting} to a folder of yours",
    errno.EPERM: "It is protected from changes. Set {setting} to a folder of yours",
}


def refusal(number: int | None, place: object, setting: str) -> str:
    """The line of an error that a reader can mend; "" for any other.

    Args:
      number: the system's reason, as in `OSError.errno`.
      place: the file or folder that it didn't let us write.
      setting: the setting by which a reader chooses that place.
    """
    if number is None or number not in CURES:
        return ""
    reason = os.strerror(number)
    cure = CURES[number].format(setting=setting)
    return f"{place} cannot be written ({reason}). {cure}, then run this again."


@contextlib.contextmanager
def refusals(path: Path | str, setting: str) -> Iterator[None]:
    """Say in one line that a file can't be written; other errors of the system pass through.

    Raises:
      UserError: see `refusal`.
    """
    try:
        yield
    except OSError as error:
        line = refusal(error.errno, path, setting)
        if not line:
            raise
        raise UserError(line) from error


@contextlib.contextmanager
def atomic_file(path: Path | str) -> Iterator[BinaryIO]:
    """Yield a binary file beside `path`; it becomes `path` only when the block succeeds."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Write text beside `path`, then rename."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path | str, value: Any, indent: int | None = 2) -> None:
    """Write JSON in one piece, keys in the order given, with a final newline.

    Args:
      indent: columns; None writes everything into one line, which is a hundred times faster.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 can't hold
        text = json.dumps(value, indent=indent)
    write_text(path, text + "\n")


def read_json(path: Path | str, fix: str) -> Any:
    """What a JSON file holds.

    Args:
      fix: a sentence that says what to do about a damaged one.

    Raises:
      UserError: it isn't JSON, for example because a disk was full; or it can't be read.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise UserError(f"{path} is not valid JSON ({error}). {fix}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {fix}") from error
