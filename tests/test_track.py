"""helpers/track.py: what TensorBoard and W&B get is what log.jsonl holds, also after a resume."""

import json
import os
import struct
import sys
from pathlib import Path

import pytest
from conftest import ROOT, program

import helpers
from helpers import track

# A run of four steps that is killed after the third, resumed from the second, and finished.
RUN = """
import sys
from pathlib import Path
from helpers import train
log = train.StepLog(Path(sys.argv[1]) / "log.jsonl", 4, 1)
def step(number, loss):
    log.training({"step": number, "loss": loss, "learning_rate": 1e-4 * number, "grad_norm": 0.5,
                  "seconds": 0.25, "real_tokens": 100 * number})
log.rewind(0)
log.validation(0, 3.5)
for number in (1, 2, 3):
    step(number, 4.0 - number)
log = train.StepLog(log.path, 4, 1)
log.rewind(2)
for number in (3, 4):
    step(number, 2.0 - number / 8)
log.validation(4, 1.25)
"""


def run(folder, **env):
    """The lines of log.jsonl after `RUN`, as {(name, step): value}, and what was printed."""
    done = program(sys.executable, "-c", RUN, folder, PYTHONPATH=_path(), **env)
    assert done.returncode == 0, done.stderr[-3000:]
    values = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name != "step":
                values[name, record["step"]] = value
    return values, done.stdout + done.stderr


def _path():
    """Ours, and what the caller's own PYTHONPATH has (a wandb that lies elsewhere)."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def events(folder):
    """{(name, step): value} of TensorBoard's files, by tensorboardX's own message classes.

    A record is 8 bytes of length, 4 of a checksum, the message, 4 of another checksum.
    """
    from tensorboardX.proto.event_pb2 import Event
    found = {}
    for file in sorted(Path(folder).glob("events.out.tfevents.*")):
        content, place = file.read_bytes(), 0
        while place < len(content):
            length, = struct.unpack_from("<Q", content, place)
            event = Event.FromString(content[place + 12:place + 12 + length])
            place += length + 16
            for value in event.summary.value:
                assert (value.tag, event.step) not in found, "written twice"
                found[value.tag, event.step] = value.simple_value
    return found


def leveldb(content):
    """The messages of a .wandb file: LevelDB's log format, after 7 bytes of W&B's own.

    Blocks of 32 KiB hold pieces: 4 bytes of a checksum, 2 of a length, 1 of a kind (1 whole, 2 the
    first, 3 a middle, 4 the last piece).
    """
    place, message = 7, b""
    while place < len(content):
        room = 32_768 - place % 32_768
        if room < 7:
            place += room
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        message += content[place + 7:place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield message
            message = b""


def test_the_event_file_is_the_log(tmp_path):
    values, _ = run(tmp_path, TRACK="tensorboard")
    assert values["loss", 3] == 2.0 - 3 / 8 and values["val_loss", 4] == 1.25
    assert events(tmp_path / track.FOLDER) == pytest.approx(values, rel=1e-6)  # float32 there


def test_nothing_is_written_unless_asked(tmp_path):
    run(tmp_path, TRACK=None)
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_wandb_has_the_same_numbers(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record
    values, said = run(tmp_path, TRACK="wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path),
                       WANDB_SILENT="true")
    newest = max(tmp_path.glob("wandb/*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    found = {}
    for message in leveldb(newest.read_bytes()):
        record = Record.FromString(message)
        step = record.history.step.num
        for item in record.history.item:
            name = item.key or ".".join(item.nested_key)
            if not name.startswith("_"):
                found[name, step] = json.loads(item.value_json)
    assert found == pytest.approx(values), said


@pytest.mark.parametrize("asked, words", [
    ("tensorbord", "TRACK=tensorbord is unknown. There are tensorboard and wandb"),
    ("wandb", "TRACK=wandb needs the package wandb, which this Python lacks. Install it")])
def test_what_cannot_be_had_is_said_in_one_line_at_once(monkeypatch, asked, words):
    monkeypatch.setenv("TRACK", asked)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(helpers.UserError, match=words) as caught:
        helpers.opening.quiet()
    assert "\n" not in str(caught.value)


def test_the_opening_leaves_wandb_on_only_if_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for asked, mode in (("", "disabled"), ("tensorboard", "disabled"), ("wandb", None)):
        monkeypatch.setenv("TRACK", asked)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        helpers.opening.quiet()
        assert os.environ.get("WANDB_MODE") == mode, asked
