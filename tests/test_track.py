"""helpers/track.py: what TensorBoard and W&B get is what log.jsonl holds, also after a resume."""

import json
import os
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, never_shown, program

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


def records(folder):
    """What W&B's newest run below a folder holds, by W&B's own message class."""
    from wandb.proto.wandb_internal_pb2 import Record
    newest = max(folder.glob("wandb/*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [Record.FromString(message) for message in leveldb(newest.read_bytes())]


def test_the_event_file_is_the_log(tmp_path):
    values, _ = run(tmp_path, TRACK="tensorboard")
    assert values["loss", 3] == 2.0 - 3 / 8 and values["val_loss", 4] == 1.25
    assert events(tmp_path / track.FOLDER) == pytest.approx(values, rel=1e-6)  # float32 there


def test_nothing_is_written_unless_asked(tmp_path):
    run(tmp_path, TRACK=None)
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_wandb_has_the_same_numbers(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    values, said = run(tmp_path, TRACK="wandb", WANDB_MODE="offline", WANDB_DIR=None,
                       WANDB_SILENT="true")
    found = {}
    for record in records(tmp_path):
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


# What wandb 0.31 raises and when, for a Python without it. Its words show the key, which W&B's own
# don't, so that it would be seen if we passed it on.
STAND_IN = """
import os, sys, traceback

class Error(Exception):
    pass

def login(verify):
    needs_a_key = os.environ.get("WANDB_MODE") not in ("offline", "disabled")
    if needs_a_key and "WANDB_API_KEY" not in os.environ:
        raise Error("No API key configured.\\nUse `wandb login` to log in.")
    if needs_a_key and verify:
        raise Error("refused: " + os.environ["WANDB_API_KEY"])

def init(**words):
    show = sys.excepthook
    def show_twice(*error):
        traceback.print_exception(*error)
        show(*error)
    sys.excepthook = show_twice
    login(verify=True)

def finish(exit_code=0):
    print("ended with", exit_code)

run = None
"""
KEY = never_shown()["WANDB_API_KEY"]
BEGIN = "from pathlib import Path; from helpers import track; track.begin(Path('log.jsonl'))"


class Refuses(BaseHTTPRequestHandler):
    """A W&B server that knows nobody."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = b'{"errors": [{"message": "user is not logged in"}]}'
        self.send_response(401)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    """The address of a server that refuses every key."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


@pytest.fixture(params=["wandb", "a stand-in"])
def asks(request, tmp_path, server):
    """Runs code after a page's first lines, with TRACK=wandb, for somebody who never logged in."""
    path = _path()
    if request.param == "wandb":
        pytest.importorskip("wandb", reason="wandb is not installed")
    else:
        (tmp_path / "stand_in").mkdir()
        (tmp_path / "stand_in/wandb.py").write_text(STAND_IN)
        path = f"{tmp_path / 'stand_in'}{os.pathsep}{path}"

    def run_code(code, **env):
        told = {"TRACK": "wandb", "HOME": str(tmp_path), "RUN_DIR": str(tmp_path / "run"),
                "NETRC": None, "WANDB_MODE": None, "WANDB_API_KEY": None, "WANDB_BASE_URL": server,
                "WANDB_CONFIG_DIR": None, "PYTHONPATH": path, **env}
        lines = f"from helpers import opening, run; run.one_line_errors(); {code}"
        return program(sys.executable, "-c", lines, cwd=tmp_path, **told)
    return run_code


def refusal(done):
    """The one line with which a program ended; it says what helps, and shows no key."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert KEY not in done.stdout + done.stderr
    said, = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert said.startswith("Error: TRACK=wandb gets no run of W&B: ")
    for way in (".venv/bin/wandb login", "WANDB_API_KEY=...", "WANDB_MODE=offline", "unset TRACK"):
        assert way in said
    return said


def test_a_missing_key_is_noticed_in_a_page_s_first_cell(asks):
    assert "No API key configured" in refusal(asks("opening.start()"))


@pytest.mark.parametrize("env", [
    {"WANDB_MODE": "offline"}, {"WANDB_MODE": "disabled"}, {"WANDB_API_KEY": KEY}], ids=str)
def test_the_first_cell_asks_no_server(asks, env):
    done = asks("opening.start()", WANDB_BASE_URL="http://127.0.0.1:9", **env)
    assert done.returncode == 0, done.stderr


def test_a_key_in_netrc_or_in_wandb_s_settings_is_enough(asks, request, tmp_path, server):
    if "stand-in" in request.node.callspec.id:
        pytest.skip("only W&B's own function looks there")
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine {server.removeprefix('http://')} login user password {KEY}\n")
    done = asks("opening.start()", NETRC=str(netrc))
    assert done.returncode == 0, done.stderr
    (tmp_path / "settings").write_text(f"[default]\napi_key = {KEY}\n")
    done = asks("opening.start()", WANDB_CONFIG_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_wrong_key_is_noticed_before_the_base_is_fetched(asks):
    """There is no data either, which would be said next."""
    refusal(asks("from helpers import train; train.what_02_left()", WANDB_API_KEY=KEY))


@pytest.mark.parametrize("env", [{}, {"WANDB_API_KEY": KEY}], ids=["no key", "a wrong key"])
def test_what_metrax_raises_is_one_line(asks, env):
    refusal(asks(BEGIN, **env))


def test_an_error_after_that_is_one_line_too_and_the_run_is_listed_as_failed(asks, request,
                                                                             tmp_path):
    done = asks(f"{BEGIN}; raise run.UserError('no steps')", WANDB_MODE="offline", WANDB_DIR=None)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "Error: no steps" in done.stderr.splitlines()
    if "stand-in" in request.node.callspec.id:
        assert done.stdout == "ended with 1\n"
    else:
        codes = [record.exit.exit_code for record in records(tmp_path) if record.HasField("exit")]
        assert codes == [1]


def stub(folder, name, text):
    """A command of the shell that stands in for another one."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


SET_HERE = {"WANDB_PROJECT": "chips", "WANDB_NAME": "it's a run", "WANDB_MODE": None}


@pytest.mark.parametrize("asked", ["wandb", "tensorboard", None])
def test_a_rented_machine_gets_what_is_set_here(tmp_path, asked):
    """`gcloud` runs the command here, with bash as there; the script writes down what it got."""
    stub(tmp_path, "gcloud", f'cd {tmp_path}; echo "$*" >> words; for last in "$@"; do :; done\n'
                             '[ "$2" = scp ] || env -i PATH="$PATH" bash -c "${last#--command=}"')
    stub(tmp_path, "tail", "for _ in $(seq 100); do [ ! -f got ] || exit 0; sleep 0.1; done")
    stub(tmp_path, "train.sh", 'echo "$1" >> new; env | grep -E "^(TRACK|WANDB_|HF_)" >> new\n'
                               "mv new got")
    secrets = never_shown()
    done = program("scripts/vm.sh", "run", "m", "z-a", "scripts/train.sh", "my-bucket", stdin="",
                   PATH=f"{tmp_path}:{os.environ['PATH']}", DRY_RUN=None, CLASSIC=None,
                   TRACK=asked, **SET_HERE, **secrets)
    assert done.returncode == 0, done.stderr
    wanted = {f"HF_TOKEN={secrets['HF_TOKEN']}", "WANDB_PROJECT=chips", "WANDB_NAME=it's a run"}
    if asked:
        wanted.add(f"TRACK={asked}")
    if asked == "wandb":
        wanted.add(f"WANDB_API_KEY={KEY}")
    bucket, *got = (tmp_path / "got").read_text().splitlines()
    assert bucket == "my-bucket" and set(got) == wanted
    shown = (tmp_path / "words").read_text() + done.stdout + done.stderr
    assert not [name for name, value in secrets.items() if value in shown]


def on_a_machine(folder, script, asked):
    """What a script of scripts/ called of the series; other commands stand in, and do nothing."""
    for name in ("sudo", "curl", "gcloud", "docker", "mkdir", "apt-get"):
        stub(folder, f"bin/{name}", "exit 0")
    stub(folder, "bin/sleep", "exec /bin/sleep 2")  # between two copies into the bucket
    stub(folder, "bin/python3", "echo HOSTS=1")
    for name in ("setup.sh", "run_all.sh", ".venv/bin/python"):
        stub(folder / "gemma4-on-tpu", name,
             f'echo "{name} $*${{TRACK:+ TRACK=$TRACK}}" >> {folder}/calls')
    done = program("bash", ROOT / "scripts" / script, "my-bucket", cwd=folder, TRACK=asked,
                   PATH=f"{folder / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    return (folder / "calls").read_text().splitlines()


def test_the_machine_that_trains_gets_wandb_if_it_is_asked_for(tmp_path):
    series = [f"{call} TRACK=wandb" for call in (
        "setup.sh train", ".venv/bin/python -m pip install -q wandb",
        ".venv/bin/python 01_setup.py", "run_all.sh 02 04")]
    assert on_a_machine(tmp_path, "train.sh", "wandb") == series


def test_without_it_nothing_more_is_installed(tmp_path):
    assert on_a_machine(tmp_path, "train.sh", None) == [
        "setup.sh train", ".venv/bin/python 01_setup.py", "run_all.sh 02 04"]


def test_the_machine_that_serves_needs_no_wandb(tmp_path):
    """Each page's first cell would refuse it there; TRACK is exported in a reader's shell."""
    calls = on_a_machine(tmp_path, "serve.sh", "wandb")
    assert calls[0] == "setup.sh train" and calls[-1] == "run_all.sh 05 07"


def test_once_a_week_the_tests_have_the_real_wandb():
    workflow = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["newest"]["steps"]]
    said = "\n".join(commands)
    assert ".venv/bin/python -m pip install -q wandb" in said.partition("./run_tests.sh")[0]
