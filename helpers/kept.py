"""What of a run is worth keeping where little room persists, in which order, and back again."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

LIMIT = 19e9         # bytes; Kaggle keeps 20 GB of a session
RESERVE = 2_000_000  # bytes held for the report and the end of the log, whatever else fills up
# Below the run directory, the most precious first. `merged/` isn't here: it's 62 GB, and 04 makes
# it again from the adapter.
FIRST = ("adapter", "train/recipe.json", "train/machine.json", "train/log.jsonl",
         "train/answers.json", "merge.json", "model_card.md", "setup.json", "times.json",
         "first_hour/report.json", "first_hour/report.md", "first_hour/serve.log",
         "first_hour/train.log", "first_hour/data.log")
THEN = ("eval", "bench", "serve", "data", "notebooks", "figures", "jax_cache", "xla_cache",
        "first_hour/run/serve")
CHECKPOINTS = "train/checkpoints"


def earlier_output(place: Path) -> Path | None:
    """The newest output of an earlier session below a folder of attached inputs; None without one.

    Kaggle mounts a notebook's output two or four folders deep, so it's found by its report.
    """
    found = []
    for depth in ("*", "*/*", "*/*/*", "*/*/*/*"):
        for path in place.glob(f"{depth}/report.json"):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # another's
                if json.loads(path.read_text())["series"] == "gemma4-on-tpu":
                    found.append(path)
    if not found:
        return None
    return max(found, key=lambda path: path.stat().st_mtime).parent


class Keeper:
    """Copies what counts from a run to a small disk that persists, and back from an earlier one."""

    def __init__(self, run: Path, working: Path, log: Path) -> None:
        self.run, self.working, self.log = run, working, log
        self._reserve = working / ".reserve"

    def reserve(self) -> None:
        """Hold a little room, so that the report can be written when all else has filled up."""
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(bytes(RESERVE))

    def give_back_reserve(self) -> None:
        """Free that room, and use it for the end of the log."""
        self._reserve.unlink(missing_ok=True)
        target = self.working / "session.log"
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()
            fresh = self.working / ".session.log"
            fresh.write_bytes(text[-RESERVE // 2:])
            fresh.replace(target)

    def keep(self) -> list[str]:
        """Copy what is new. Nothing is left half-written, and what has no room is named.

        Returns:
          A line for each thing that was left out, and why.
        """
        told: list[str] = []
        for name in FIRST:
            told += self._copy(name)
        told += self._copy_newest_checkpoint()
        for name in THEN:
            told += self._copy(name)
        return told

    def bring_back(self, earlier: Path) -> str:
        """Copy an earlier session's output into the run directory; says what came back."""
        names = []
        for name in (*FIRST, CHECKPOINTS, *THEN):
            source, target = earlier / name, self.run / name
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
        used = sum(size for _, size in _files(self.working))
        return min(LIMIT - used, shutil.disk_usage(self.working).free)

    def _copy(self, name: str) -> list[str]:
        """Copy a file or folder as far as it has changed; a line if it has no room."""
        source, target = self.run / name, self.working / name
        if not source.exists():
            return []
        pairs = [(source, target)]
        if source.is_dir():
            pairs = [(path, target / path.relative_to(source)) for path, _ in _files(source)]
        pairs = [pair for pair in pairs if not _same(*pair)]
        size = sum(_size(path) for path, _ in pairs)
        if size > self._room():
            return [f"left out {name}: {size / 1e6:.1f} MB don't fit into {self.working}"]
        try:
            for path, copy in pairs:
                _copy_whole(path, copy)
        except OSError as error:
            return [f"left out part of {name}: {error.strerror or error}"]
        return []

    def _copy_newest_checkpoint(self) -> list[str]:
        """Copy the newest finished checkpoint, then remove older copies; a line if it can't be."""
        folder, target = self.run / CHECKPOINTS, self.working / CHECKPOINTS
        steps = [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]
        if not steps:
            return []
        newest = max(steps, key=lambda path: int(path.name))
        if not (target / newest.name).exists():
            size = sum(size for _, size in _files(newest))
            if size > self._room():
                return [f"left out checkpoint {newest.name}: {size / 1e6:.1f} MB don't fit into "
                        f"{self.working}"]
            fresh = target / f".{newest.name}.partial"
            shutil.rmtree(fresh, ignore_errors=True)
            try:
                shutil.copytree(newest, fresh)
                os.replace(fresh, target / newest.name)
            except OSError as error:  # the disk is full, or the trainer removed it meanwhile
                shutil.rmtree(fresh, ignore_errors=True)
                return [f"left out checkpoint {newest.name}: {str(error)[:200]}"]
        for path in target.glob("[0-9]*"):
            if path.name != newest.name:
                shutil.rmtree(path, ignore_errors=True)
        return []


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """(file, bytes) of all files below a folder that are finished."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and not path.name.endswith(".partial"):
            yield path, _size(path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed since it was listed
        return 0


def _same(source: Path, copy: Path) -> bool:
    """Whether a copy was made of this state of a file."""
    try:
        one, other = source.stat(), copy.stat()
    except OSError:
        return False
    return one.st_size == other.st_size and int(one.st_mtime) == int(other.st_mtime)


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
