"""`tables.files` and `tables.records`: files in one piece, and dataclasses as JSON."""

import dataclasses
import errno
import json
import os
from dataclasses import dataclass

import pytest

from helpers import run
from tables import files, records
from tables.errors import UserError


@pytest.mark.parametrize("value", [{"b": 1, "a": [None, 0.1]}, "ä中", "\ud800", "\u2028", [], 3])
@pytest.mark.parametrize("indent", [2, None])
def test_json_that_is_written_is_read_again(tmp_path, value, indent):
    path = tmp_path / "new" / "x.json"
    files.write_json(path, value, indent)
    assert json.loads(path.read_bytes()) == value == files.read_json(path, "")
    assert path.read_bytes().endswith(b"\n") and os.listdir(path.parent) == ["x.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, {"old": True})
    with pytest.raises(TypeError):
        files.write_json(path, {"new": object()})
    with pytest.raises(ZeroDivisionError):
        with files.atomic_file(path) as file:
            file.write(b"half of it")
            file.write(bytes(1 // 0))
    assert files.read_json(path, "") == {"old": True} and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"\x00", b"[" * 100_000])
def test_a_damaged_file_is_one_line_with_the_fix(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match="x.json is not valid JSON .*Run 05 again") as error:
        files.read_json(tmp_path / "x.json", "Run 05 again.")
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_one_line_with_the_fix(tmp_path):
    with pytest.raises(UserError, match="cannot be read .Is a directory.. Run 05 again"):
        files.read_json(tmp_path, "Run 05 again.")


def test_a_full_disk_is_a_line_and_a_bug_stays_one(tmp_path):
    with pytest.raises(UserError, match="x cannot be written .No space left.*RUN_DIR to a larger"):
        with files.refusals("x", "RUN_DIR"):
            raise OSError(errno.ENOSPC, "full")
    with pytest.raises(FileNotFoundError):
        with files.refusals("x", "RUN_DIR"):
            open(tmp_path / "none")


@dataclass(frozen=True)
class Inner:
    rank: int
    scale: float = 1.0


@dataclass(frozen=True)
class Outer:
    name: str | None
    words: tuple[str, ...]
    sums: dict[str, int]
    inner: Inner
    flag: bool = False


OUTER = Outer(None, ("a", "b"), {"x": 1}, Inner(3, 2), flag=True)


def test_the_room_on_a_disk_is_asked_before_the_folder_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "new" / "deep", "new/deep"):
        run.room(folder, 1.0, "a byte")
        with pytest.raises(UserError, match="GB free, for everything it takes"):
            run.room(folder, 1e18, "everything")
    assert os.listdir(tmp_path) == []


def test_a_record_becomes_json_and_comes_back():
    text = json.dumps(records.to_json(OUTER))
    assert records.from_json(Outer, json.loads(text)) == OUTER
    plain = dataclasses.replace(OUTER, flag=False, inner=Inner(3))
    assert records.to_json(plain) == {
        "name": None, "words": ("a", "b"), "sums": {"x": 1}, "inner": {"rank": 3}}


@pytest.mark.parametrize("change, says", [
    ({"words": "ab"}, 'has "ab" as .words., which should be a list of which each value is a text'),
    ({"words": [1]}, "has .1. as .words."),
    ({"sums": {"x": 1.5}}, "should be an object of which each value is a whole number"),
    ({"name": 3}, "should be a text or null"),
    ({"flag": 1}, "has 1 as .flag., which should be true or false"),
    ({"inner": {"rank": True}}, "has a .inner. that has true as .rank., which should be a whole"),
    ({"inner": {}}, "has a .inner. that has no .rank."),
    ({"inner": []}, "has a .inner. that holds .. instead of an object"),
    ({"later": 1}, "has .later., which nothing is called"),
    ({"flag": ...}, "has no .flag."),
])
def test_what_does_not_fit_is_named(change, says):
    good = json.loads(json.dumps(records.to_json(OUTER)))
    changed = {name: value for name, value in (good | change).items() if value is not ...}
    with pytest.raises(records.Misfit, match=says):
        records.from_json(Outer, changed, strict=True)
    if "later" in change:  # unless it's strict
        assert records.from_json(Outer, changed) == OUTER
    if "flag" in change and change["flag"] is ...:
        assert records.from_json(Outer, changed) == dataclasses.replace(OUTER, flag=False)


def test_a_wrong_value_is_not_written():
    with pytest.raises(TypeError, match="Inner.rank is .3., which should be a whole number"):
        records.to_json(dataclasses.replace(OUTER, inner=Inner("3")))
