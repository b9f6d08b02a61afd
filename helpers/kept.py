"""Keeps what's worth keeping of a run on a small disk, in order of worth, and brings it back."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

LIMIT = 19e9         # bytes; Kaggle keeps 20 GB of a session
RESERVE = 2_000_000  # bytes held for the report and the end of the log, whatever else fills up
# Below the run directory, the most precious first. `merged/` isn't here: it's 62 GB, and 04 makes
# it again from the adapter.
FIRST = (
    "adapter",
    "train/recipe.json",
    "train/machine.json",
    "train/log.jsonl",
    "train/answers.json",
    "merge.json",
    "model_card.md",
    "setup.json",
    "times.json",
    "first_hour/report.json",
    "first_hour/report.md",
    "first_hour/serve.log",
    "first_hour/train.log",
    "first_hour/data.log",
)
THEN = (
    "eval",
    "bench",
    "serve",
    "data",
    "notebooks",
    "figures",
    "jax_cache",
    "xla_cache",
    "first_hour/run/serve",
)
CHECKPOINTS = "train/checkpoints"


def earlier_output(place: Path) -> Path | None:
    """The newest output of an earlier session below a folder of attached inputs; None without one.

    Kaggle mounts a notebook's output two or four folders deep, so it's found by its report.
    """
    reports = []
    for depth in ("*", "*/*", "*/*/*", "*/*/*/*"):
        for path in place.glob(f"{depth}/report.json"):
            if _is_ours(path):
                reports.append(path)
    if not reports:
        return None
    newest = max(reports, key=lambda path: path.stat().st_mtime)
    return newest.parent


def _is_ours(report: Path) -> bool:
    """Did this series write that report.json? Other notebooks may leave files of that name."""
    try:
        content = json.loads(report.read_text())
        return bool(content["series"] == "gemma4-on-tpu")
    except (OSError, ValueError, LookupError, TypeError):
        return False


class Keeper:
    """Copies what counts from a run to a small disk that persists, and back from an earlier one.

    Args:
      run: the run directory.
      working: the folder that persists.
      log: the file that everything printed goes to.
    """

    def __init__(self, run: Path, working: Path, log: Path) -> None:
        self.run = run
        self.working = working
        self.log = log
        self._reserve = working / ".reserve"

    def reserve(self) -> None:
        """Hold a little room, so that the report can be written when all else has filled up."""
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(bytes(RESERVE))

    def give_back_reserve(self) -> None:
        """Free that room, and use it for the end of the log."""
        self._reserve.unlink(missing_ok=True)
        fresh = self.working / ".session.log"
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()
            end = text[-RESERVE // 2:]
            fresh.write_bytes(end)
            fresh.replace(self.working / "session.log")

    def keep(self) -> list[str]:
        """Copy what is new. Nothing is left half-written, and what has no room is named.

        Returns:
          A line for each thing that was left out, and why.
        """
        left_out: list[str] = []
        for name in FIRST:
            left_out += self._copy(name)
        left_out += self._copy_newest_checkpoint()
        for name in THEN:
            left_out += self._copy(name)
        return left_out

    def bring_back(self, earlier: Path) -> str:
        """Copy an earlier session's output into the run directory; says what came back."""
        names = []
        for name in (*FIRST, CHECKPOINTS, *THEN):
            source = earlier / name
            target = self.run / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            elif source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
            else:
                continue
            names.append(name)
        return ", ".join(names) or "nothing"

    # -- One thing at a time --

    def _room(self) -> float:
        """Bytes that may still be written."""
        written = _total(_finished_files(self.working))
        free = shutil.disk_usage(self.working).free
        return min(LIMIT - written, free)

    def _copy(self, name: str) -> list[str]:
        """Copy a file or folder as far as it has changed; a line if it has no room."""
        source = self.run / name
        if not source.exists():
            return []
        paths = [source]
        if source.is_dir():
            paths = _finished_files(source)
        changed = []
        for path in paths:
            if not _same(path, self._copy_of(path)):
                changed.append(path)

        size = _total(changed)
        if size > self._room():
            return [self._no_room(name, size)]
        try:
            for path in changed:
                _copy_whole(path, self._copy_of(path))
        except OSError as error:
            return [f"left out part of {name}: {error.strerror or error}"]
        return []

    def _copy_of(self, path: Path) -> Path:
        """Where the copy of a file of the run belongs."""
        return self.working / path.relative_to(self.run)

    def _no_room(self, what: str, size: int) -> str:
        megabytes = size / 1e6
        return f"left out {what}: {megabytes:.1f} MB don't fit into {self.working}"

    def _copy_newest_checkpoint(self) -> list[str]:
        """Copy the newest finished checkpoint, then remove older copies; a line if it can't be."""
        steps = []
        for path in (self.run / CHECKPOINTS).glob("[0-9]*"):
            if path.name.isdecimal():  # one that's being written has a longer name
                steps.append(path)
        if not steps:
            return []
        newest = max(steps, key=lambda path: int(path.name))
        target = self.working / CHECKPOINTS
        if not (target / newest.name).exists():
            problem = self._copy_checkpoint(newest, target)
            if problem:
                return [problem]
        for path in target.glob("[0-9]*"):
            if path.name != newest.name:
                shutil.rmtree(path, ignore_errors=True)
        return []

    def _copy_checkpoint(self, step: Path, target: Path) -> str:
        """Copy one checkpoint into the folder `target`, whole or not at all; why not, or ""."""
        size = _total(_finished_files(step))
        if size > self._room():
            return self._no_room(f"checkpoint {step.name}", size)
        fresh = target / f".{step.name}.partial"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            shutil.copytree(step, fresh)
            os.replace(fresh, target / step.name)
        except OSError as error:  # the disk is full, or the trainer removed it meanwhile
            shutil.rmtree(fresh, ignore_errors=True)
            return f"left out checkpoint {step.name}: {str(error)[:200]}"
        return ""


def _finished_files(folder: Path) -> list[Path]:
    """All files below a folder, but for links and for those that are being written."""
    paths = []
    for place, _, names in os.walk(folder):  # leaves out a folder that's removed meanwhile
        for name in names:
            path = Path(place, name)
            is_being_written = name.endswith(".partial")
            if is_being_written or path.is_symlink():
                continue
            if path.is_file():
                paths.append(path)
    return sorted(paths)


def _total(paths: Iterable[Path]) -> int:
    """Bytes of several files."""
    return sum(_size(path) for path in paths)


def _size(path: Path) -> int:
    """Bytes of a file, 0 where it's gone."""
    try:
        return path.stat().st_size
    except OSError:  # removed since it was listed
        return 0


def _same(source: Path, copy: Path) -> bool:
    """Whether a copy was made of this state of a file."""
    try:
        now = source.stat()
        copied = copy.stat()
    except OSError:
        return False
    same_size = now.st_size == copied.st_size
    same_second = int(now.st_mtime) == int(copied.st_mtime)
    return same_size and same_second


def _copy_whole(source: Path, target: Path) -> None:
    """Copy a file, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.partial")
    try:
        shutil.copy2(source, fresh)
        fresh.replace(target)
    except FileNotFoundError:  # the run has removed it since it was listed
        pass
    finally:
        fresh.unlink(missing_ok=True)
