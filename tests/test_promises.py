"""What a person is promised when something is wrong: one clear line that names the fix, nothing
half-written, nothing finished lost. One row for each promise.

Promises that need what only one room has stand with that room's tests: unusable rows (test_data);
out of memory, a gradient that isn't finite, kill -9, a torn checkpoint (test_train); another recipe
(test_change); a port in use, a server that dies while starting, Ctrl-C and SIGTERM (test_serve);
stale results (test_bench, test_eval); hostile answers (test_judge); chips that are held
(test_hardware); a bucket that refuses us (test_remote).
"""

import errno
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import ROOT, RUN, a_data_meta, page, program
from test_hardware import tpu, tree

from helpers import packing, run
from tables.errors import UserError

HEADER = ("# ---\n# jupyter:\n#   jupytext:\n#     text_representation:\n#       extension: .py\n"
          "#       format_name: percent\n# ---\n\n")
# As a page does it.
PRELUDE = "from helpers import opening, run; opening.quiet(); run.one_line_errors()\n"

# ── One row, one promise ──

@dataclass
class Row:
    """What is done, and what has to be said; a page, or code in a Python of its own."""

    name: str
    says: str            # a pattern of the one error
    code: str = ""
    page: str = ""
    change: tuple = ("", "")  # (text of the page, what a reader writes there)
    env: tuple = ()      # (name, value) pairs; {folder} is the test's own folder
    prepare: object = None
    slow: bool = False
    lines: int = 1


def a_machine(folder, **parts):
    tree(folder / "machine", **parts)


def a_model(folder, cut=None):
    """The tiny model, one of its files cut short."""
    shutil.copytree(ROOT / "assets/tiny_gemma4", folder / "model")
    if cut:
        file = next((folder / "model").glob(cut))
        file.write_bytes(file.read_bytes()[:-1000])


def a_file(name, text):
    def prepare(folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return prepare


def finished(*parts):
    """Parts of a finished tiny run (RUN_DIR, or /runs/tiny), as this one's."""
    def prepare(folder):
        for part in parts:
            source = RUN / part
            if not source.exists():
                pytest.skip(f"no finished run in {RUN}: ./run_all.sh makes one")
            target = folder / "run" / part
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, target)
    return prepare


def a_changed_merge(folder):
    finished("data/meta.json", "data/samples.json", "train/recipe.json", "train/log.jsonl",
             "merged",
             "merge.json")(folder)
    path = next((folder / "run/merged").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def packed_rows(folder):
    """What 02 leaves, of two rows; its facts name another chat template than the tiny model's."""
    column = np.ones((1, 4), np.int32)
    parts = {part: dict.fromkeys(packing.COLUMNS, column) for part in ("train", "val")}
    packing.save_data(folder / "run/data", parts, [], a_data_meta(
        base_path="assets/tiny_gemma4", template_sha256="another").to_json())


def changed_rows(folder):
    packed_rows(folder)
    np.save(folder / "run/data/train/tokens.npy", np.zeros((1, 4), np.int32))


def icarus_left_out(folder):
    """Every program of this machine but Icarus."""
    (folder / "bin").mkdir()
    for place in os.environ["PATH"].split(":"):
        for file in Path(place).glob("*"):
            link = folder / "bin" / file.name
            if file.name not in ("iverilog", "vvp", "apt-get", "sudo") and not link.is_symlink():
                link.symlink_to(file)


NO_DISK = "import shutil; shutil.disk_usage = lambda _: type('', (), dict(free=1000))\n"
MESH = ("import jax\nfrom helpers import gemma\n"
        "config = gemma.config_from_hf('assets/tiny_gemma4')\n"
        "gemma.make_mesh(config, (1, 3), jax.devices()[:1] * 3)")

ROWS = [
    Row("an earlier page not run", "merged is missing. Run 04_merge.py first",
        page="05_serve_vllm.py"),
    Row("an unknown size", "SIZE=huge is unknown. The sizes are", page="02_data.py",
        env=(("SIZE", "huge"),), lines=4),
    Row("a size that a page has no settings for",
        "no settings for size e2b. Set SIZE to one that it has",
        "import helpers; helpers.choose({{'31b': 1}})", env=(("SIZE", "e2b"),), lines=2),
    Row("a slice that no size is for", "no size is meant for this machine, TPU v5e-4",
        "import helpers; helpers.size()", env=(("SIZE", ""), ("HARDWARE_ROOT", "{folder}/machine")),
        prepare=lambda folder: a_machine(folder, **tpu("0x0063", 4)), lines=4),
    Row("Kaggle without the TPU that was asked for",
        "Kaggle gave this session no TPU .no TPU, no GPU.. Verify your phone number",
        "from helpers import opening; opening.start()", env=(
            ("SIZE", "31b"), ("HARDWARE_ROOT", "{folder}"), ("KAGGLE_KERNEL_RUN_TYPE", "Batch"))),
    Row("Kaggle with four of the eight chips",
        "this session shows 4 of the 8 chips of a TPU v5e-8. Stop it and start another",
        "from helpers import opening; opening.start()", env=(
            ("SIZE", "31b"), ("HARDWARE_ROOT", "{folder}/machine"), ("TPU_SKIP_MDS_QUERY", "1"),
            ("KAGGLE_KERNEL_RUN_TYPE", "Interactive")),
        prepare=lambda folder: a_machine(folder, **tpu("0x0063", 4))),
    Row("somebody else's Python",
        "into which nothing is installed.*choose .*/.venv/bin/python as the kernel",
        "import sys; sys.prefix = '/usr'; import helpers; helpers.machine()"),
    Row("chips missing", "the chips are on the PCI bus, but /dev/vfio/. is missing",
        "from helpers import opening; opening.start(devices=4)",
        env=(("SIZE", "31b"), ("HARDWARE_ROOT", "{folder}/machine"), ("TPU_SKIP_MDS_QUERY", "1")),
        prepare=lambda folder: a_machine(folder, pci=tpu("0x0062", 4)["pci"])),
    Row("chips that JAX does not see", "but JAX runs on the CPU. Run ./setup.sh train",
        "from helpers import opening; opening.start(devices=4)",
        env=(("SIZE", "31b"), ("HARDWARE_ROOT", "{folder}/machine"), ("TPU_SKIP_MDS_QUERY", "1")),
        prepare=lambda folder: a_machine(folder, **tpu("0x0062", 4))),
    Row("Icarus missing", "Icarus.*sudo apt-get install -y iverilog", page="00_quickstart.py",
        env=(("PATH", "{folder}/bin"),), prepare=icarus_left_out, slow=True),
    Row("too little disk for the base, before the download",
        "GB free, for the weights of file:.* it takes",
        NO_DISK + "from helpers import remote; remote.stage('file://{folder}/model')",
        prepare=a_model, env=(("TMPDIR", "{folder}"),)),
    Row("no license or token",
        "the Hugging Face hub does not give google/tiny.*\nLog in with HF_TOKEN",
        "from helpers import remote; remote.stage('google/tiny')", env=(("HF_ENDPOINT", "{hub}"),),
        lines=2),
    Row("a base that is nowhere", "./none/there is neither a directory, nor a hub id",
        "from helpers import remote; remote.stage('./none/there')"),
    Row("a damaged base", "damaged or cut short",
        "from helpers import weights; weights.open_model('{folder}/model')",
        prepare=lambda folder: a_model(folder, "*.safetensors")),
    Row("a config that is no Gemma 4's", "config.json is not a Gemma 4's",
        "from tables import architecture as a; a.text_config(a.read_config('{folder}'))",
        prepare=a_file("config.json", '{"model_type": "llama"}')),
    Row("no rows at all", "holds no rows",
        "from helpers import data; data.read_rows('{folder}/rows.jsonl')",
        prepare=a_file("rows.jsonl", "")),
    Row("too few rows",
        "1 rows with validation=0.05 leave one side empty: use more rows or another share",
        page="02_data.py", change=("rows=4_000", "rows=1"), slow=True),
    Row("an impossible mesh", "mesh is impossible here: tp=3 does not divide the", MESH),
    Row("rows that were changed", "is not what 02 wrote: .'train/tokens.npy': 'changed'.. Run 02",
        "from helpers import packing; packing.check_data(run.run_dir('data'))",
        prepare=changed_rows),
    Row("data of another tokenizer",
        "these rows were made by another tokenizer. Run 02_data.py again",
        "from helpers import train; train.what_02_left()", prepare=packed_rows),
    Row("merged files that changed",
        "merged is not what 04_merge wrote: .*Copy it again, or run 04_merge",
        page="05_serve_vllm.py",
        prepare=a_changed_merge, slow=True),
    Row("a broken file of an earlier page",
        "meta.json is not valid JSON.*run the notebook that writes it",
        "run.read_json(run.run_dir('data/meta.json'))", prepare=a_file("run/data/meta.json", "{")),
    Row("a run directory that is not one", "holds more than a run. Name a folder of its own",
        "run.run_dir()", env=(("RUN_DIR", str(ROOT)),)),
    Row("a run directory that is a file", "can be made at .*/file .it is a file.. Set RUN_DIR",
        "run.run_dir()", env=(("RUN_DIR", "{folder}/file"),), prepare=a_file("file", "")),
    Row("a run directory that is a dead link", "it is a link to /no/where, which does not exist",
        "run.run_dir()", env=(("RUN_DIR", "{folder}/link"),),
        prepare=lambda folder: (folder / "link").symlink_to("/no/where")),
    Row("a run directory below a file", "Not a directory: .*/file/run.. Set RUN_DIR",
        "run.run_dir()", env=(("RUN_DIR", "{folder}/file/run"),), prepare=a_file("file", "")),
    Row("a run directory in nobody's home", "RUN_DIR=~nobody-here names a home folder, but nobody",
        "run.run_dir()", env=(("RUN_DIR", "~nobody-here"),)),
    Row("a predicted time without anchors",
        "no range can be given. Restore it .git checkout data/anchors",
        "from tpu_time import bands; bands.ANCHORS = bands.ROOT / 'no.csv'; bands.band(1.0)"),
    Row("an error of a room", "is no slice such as",
        "from tables import hardware; hardware.slice_of('nonsense')"),
]


class Gated(http.server.BaseHTTPRequestHandler):
    """A hub that wants its terms accepted, and says so where a file is asked for."""

    def do_GET(self):
        listed = self.path.startswith("/api/models/") and "/tree/" not in self.path
        self.send_response(200 if listed else 403)
        self.send_header("Content-Type" if listed else "X-Error-Code",
                         "application/json" if listed else "GatedRepo")
        self.end_headers()
        if listed:
            self.wfile.write(b'{"id": "google/tiny", "sha": "1234", '
                             b'"siblings": [{"rfilename": "config.json", "size": 9}, '
                             b'{"rfilename": "model.safetensors", "size": 9}]}')

    do_HEAD = do_GET

    log_message = lambda *words: None


@pytest.fixture(scope="module")
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gated)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.slow if row.slow else [],
                                              id=row.name.replace(" ", "-")) for row in ROWS])
def test_one_clear_line_and_nothing_half_written(row, tmp_path, hub):
    if row.prepare:
        row.prepare(tmp_path)
    env = {name: value.format(folder=tmp_path, hub=hub) for name, value in row.env}
    env = {"TPU_SKIP_MDS_QUERY": None, "HF_HUB_OFFLINE": None, **env}
    words = ["-c", PRELUDE + row.code.format(folder=tmp_path)]
    if row.page:
        words = [tmp_path / row.page]
        words[0].write_text((ROOT / row.page).read_text().replace(*row.change))
    before = sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())
    done = page(words[0], tmp_path / "run", *words[1:], **env)
    said = "\n".join(line for line in done.stderr.splitlines()
                     if not line.startswith(("setup: ", "WARNING")))
    assert done.returncode == 1 and said.startswith("Error: "), (done.stdout, done.stderr)
    assert re.search(row.says, said, re.S), said
    assert len(said.splitlines()) <= row.lines, said
    after = [path for path in (tmp_path / "run").rglob("*")
             if path.is_file() and path.name != ".lock"]
    assert set(before) <= set(after), "nothing finished is lost"
    assert not [path for path in after if path.name.endswith(".partial")], "nothing half-written"


# ── A disk that fills, two writers, an end from outside ──

def test_a_full_disk_leaves_the_old_file_and_no_half(tmp_path):
    """RUN_DIR is a disk of 256 KiB of its own."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk (unshare -rm)")
    code = (PRELUDE + "run.write_text(run.run_dir('kept'), 'old')\n"
            "with run.atomic_dir(run.run_dir('data'), ours='tokens') as folder:\n"
            "    (folder / 'tokens').write_bytes(bytes(10**6))\n")
    script = (f"mount -t tmpfs -o size=256k none {tmp_path} && {sys.executable} -c \"$CODE\"; "
              f"echo $?; ls -A {tmp_path}; cat {tmp_path}/kept")
    done = program("unshare", "-rm", "bash", "-c", script, RUN_DIR=str(tmp_path), CODE=code)
    assert done.stdout.split() == ["1", "kept", "old"], done.stdout
    assert done.stderr.count("\n") == 1 and "No space left on device" in done.stderr, done.stderr
    assert "Free some space there, or set RUN_DIR to a larger disk" in done.stderr


def test_a_disk_that_is_read_only_is_named(tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk (unshare -rm)")
    script = (f"mount -t tmpfs none {tmp_path} && mount -o remount,ro {tmp_path} && "
              f"{sys.executable} -c \"$CODE\"")
    code = PRELUDE + "run.write_text(run.run_dir('kept'), 'new')"
    done = program("unshare", "-rm", "bash", "-c", script, RUN_DIR=str(tmp_path), CODE=code)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "(Read-only file system). Set RUN_DIR to a disk that can be written" in done.stderr


@pytest.mark.parametrize(("number", "place", "says"), [
    (errno.EACCES, "{run}/merged/x",
     "Make it yours .sudo chown -R .USER., or set RUN_DIR to a folder"),
    (errno.EPERM, "{run}/x", "is protected from changes. Set RUN_DIR"),
    (errno.EDQUOT, "{run}/x", "quota is used up: delete something there, or set RUN_DIR"),
    (errno.EACCES, "{tmp}/base/google", "or set TMPDIR to a folder of yours"),
    (errno.ENOSPC, None,
     "/run cannot be written .No space left.*Free some space there, or set RUN_DIR"),
    (errno.EACCES, None, ""), (errno.EPERM, "/proc/1/mem", ""),
    (errno.EACCES, "/root/own.jsonl", ""),
    (errno.EACCES, "/dev/vfio/0", ""), (errno.ENOENT, "{run}/x", ""), (errno.EACCES, 3, ""),
])
def test_what_the_system_refuses_is_a_line_only_where_we_write(tmp_path, monkeypatch, number, place,
                                                               says):
    """Any refusal, of a chip's device file too, was "cannot be written ... free some space"."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    if isinstance(place, str):
        place = place.format(run=tmp_path / "run", tmp=tmp_path / "tmp")
    line = run.what_to_do(OSError(number, os.strerror(number), place))
    assert re.search(says, line) if says else line == ""


def test_a_bug_keeps_its_traceback(tmp_path):
    """Also where a room calls a builtin that raises the same class as ours."""
    for code in ("min([])", "run.clock(float('nan'))", "open('/proc/1/mem', 'r+b').read(1)"):
        done = program(sys.executable, "-c", PRELUDE + code, RUN_DIR=str(tmp_path))
        assert done.returncode == 1 and "Traceback" in done.stderr, (code, done.stderr)


WRITER = PRELUDE + "run.writing(); print('writes', flush=True); input()"


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path):
    first = subprocess.Popen([sys.executable, "-c", WRITER], cwd=ROOT, text=True,
                             stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, env={**os.environ, "RUN_DIR": str(tmp_path)})
    assert first.stdout.readline() == "writes\n"
    second = program(sys.executable, "-c", WRITER, RUN_DIR=str(tmp_path))
    assert second.returncode == 1 and second.stderr.count("\n") == 1
    assert "is being written by another process. Wait until it is done" in second.stderr
    assert "or set RUN_DIR" in second.stderr
    first.kill()
    first.wait()
    third = program(sys.executable, "-c", WRITER, stdin="\n", RUN_DIR=str(tmp_path))
    assert third.returncode == 0, third.stderr


def test_an_open_notebook_is_in_nobodys_way(tmp_path, monkeypatch):
    """Two kernels in one run directory: cells take turns, and no one waits for an idle kernel."""
    import nbformat
    from nbclient import NotebookClient
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    cell = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PRELUDE}run.writing()"
    clients = [NotebookClient(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]),
                              kernel_name="python3", timeout=60) for _ in range(2)]
    with clients[0].setup_kernel():
        clients[0].execute_cell(clients[0].nb.cells[0], 0)
        with clients[1].setup_kernel():
            clients[1].execute_cell(clients[1].nb.cells[0], 0)  # the first is open and idle
            clients[0].execute_cell(clients[0].nb.cells[0], 0)


@pytest.fixture
def project(tmp_path):
    """run_all.sh around a notebook that says that it runs, and then hangs beside a child."""
    folder = tmp_path / "project"
    folder.mkdir()
    for room in ("helpers", "tables", "tools"):
        shutil.copytree(ROOT / room, folder / room)
    shutil.copy(ROOT / "run_all.sh", folder)
    (folder / "setup.sh").write_text("#!/bin/sh\n")
    (folder / "setup.sh").chmod(0o755)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    (folder / "01_step.py").write_text(HEADER + textwrap.dedent("""\
        # %%
        import pathlib, subprocess, os, time
        child = subprocess.Popen(["sleep", "600"])
        pathlib.Path(os.environ["RUN_DIR"], "runs").write_text("yes")
        time.sleep(600)
        """))
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_run_all_leaves_no_process(project, tmp_path, number):
    place = tmp_path / "run"
    env = {**os.environ, "RUN_DIR": str(place), "SIZE": "tiny"}
    child = subprocess.Popen(["./run_all.sh", "01"], cwd=project, env=env, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             start_new_session=True)
    until = time.monotonic() + 120
    while not (place / "runs").exists() and time.monotonic() < until:
        time.sleep(0.2)
    assert (place / "runs").exists(), "the notebook did not start"
    child.send_signal(number)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + number and "ended by SIG" in said, said
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RUN_DIR") == str(place) and process.status() != "zombie":
                left.append(process)
        except (psutil.Error, OSError):
            continue
    for process in left:
        process.kill()
    assert not [process for process in left if process.name() != "sleep"], left


def test_run_all_says_what_is_wrong_with_a_range(project, tmp_path):
    (project / "06_step.py").write_text(HEADER + "# %%\nprint(1)\n")
    for words, says in ((("06", "01"), "06 comes after 01"), (("44",), "the notebooks are 01, 06"),
                        (("01", "06", "06"), "name one notebook, or the first and the last")):
        done = program("./run_all.sh", *words, cwd=project, RUN_DIR=str(tmp_path / "run"),
                       SIZE="tiny")
        assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr


def test_a_whole_folder_appears_at_once(tmp_path):
    """Killed in the middle of a write, a folder is as it was before."""
    code = (PRELUDE + f"with run.atomic_dir({str(tmp_path / 'data')!r}, ours='old') as folder:\n"
            "    (folder / 'new').write_text('1'); import os; os.kill(os.getpid(), 9)")
    with run.atomic_dir(tmp_path / "data", ours="old") as folder:
        (folder / "old").write_text("1")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["old"]
    with run.atomic_dir(tmp_path / "data", ours="old") as folder:
        (folder / "newer").write_text("1")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["newer"]


# ── What the reader has is the reader's ──

def test_a_folder_that_we_did_not_make_is_never_replaced(tmp_path, monkeypatch):
    """RUN_DIR is a project of the reader's with a `data` of its own: 02 used to delete it."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/thesis.txt").write_text("three years")
    with pytest.raises(UserError, match="data was not made by this series: it holds no meta.json"):
        run.writing()
    with pytest.raises(UserError, match="Rename it, or set RUN_DIR"):
        with run.atomic_dir(tmp_path / "data", ours="meta.json"):
            pytest.fail("refused before anything is made")
    assert (tmp_path / "data/thesis.txt").read_text() == "three years"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (tmp_path / "data/thesis.txt").unlink()  # an empty folder is nobody's work
    with run.atomic_dir(tmp_path / "data", ours="meta.json") as folder:
        (folder / "meta.json").write_text("{}")
    with run.atomic_dir(tmp_path / "data", ours="meta.json") as folder:
        (folder / "meta.json").write_text("{}")
