"""Copies of a run directory in a bucket, through gcsfs against a local Google Cloud Storage."""

import contextlib
import http.server
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import train_driver
from conftest import ROOT
from test_faults import world  # noqa: F401  (a fixture)

from appendix import quantized
from helpers import gemma, remote, train
from helpers import run as run_lock


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    """The address of a local storage service, in the environment variables that clients read."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("gcs")
    server = subprocess.Popen([sys.executable, str(ROOT / "tests" / "gcs_server.py"), str(port),
                               str(folder / "data")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://localhost:{port}"
    before = {name: os.environ.get(name) for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")}
    os.environ.update(dict.fromkeys(before, address))
    remote._storage.cache_clear()
    for _ in range(200):
        try:
            socket.create_connection(("localhost", port), 0.2).close()
            break
        except OSError:
            time.sleep(0.1)
    yield SimpleNamespace(address=address, slow=folder / "data.slow")
    server.terminate()
    server.wait()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    remote._storage.cache_clear()


@pytest.fixture
def run(tmp_path):
    """A run directory with two checkpoints, and things that nobody has finished."""
    folder = tmp_path / "run"
    for name, text in {
            "setup.json": "{}", "data/train/tokens.npy": "tokens", "train/log.jsonl": "one\n",
            "train/checkpoints/20/_CHECKPOINT_METADATA": "{}",
            "train/checkpoints/20/model_params/a": "a" * 1000,
            "train/checkpoints/40/_CHECKPOINT_METADATA": "{}",
            "train/checkpoints/40/model_params/a": "b" * 1000,
            "train/checkpoints/60.orbax-checkpoint-tmp-1/model_params/a": "half",
            ".merged.partial/model.safetensors": "half", "train/.recipe.json.77": "half"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def tree(folder):
    """{path: text} of a folder."""
    return {file.relative_to(folder).as_posix(): file.read_text()
            for file in sorted(folder.rglob("*")) if file.is_file()}


def whole(run):
    """What of `run` is finished."""
    return {name: text for name, text in tree(run).items() if "half" not in text}


def test_a_copy_comes_back_whole_and_without_what_was_unfinished(storage, run, tmp_path):
    remote.push(run, "gs://runs/one")
    assert remote.pull("gs://runs/one", tmp_path / "back") == 7
    assert tree(tmp_path / "back") == whole(run)
    assert remote.pull("gs://runs/one", tmp_path / "back") == 0


def test_two_that_fetch_into_one_folder_take_turns(storage, run, tmp_path):
    remote.push(run, "gs://runs/turns")
    with ThreadPoolExecutor() as pool:
        counts = list(pool.map(lambda _: remote.pull("gs://runs/turns", tmp_path / "back"), range(3)))
    assert sorted(counts) == [0, 0, 7]
    assert tree(tmp_path / "back") == whole(run)


def test_a_second_pass_sends_what_changed_and_removes_steps_that_were_removed(storage, run, tmp_path):
    copy = remote.Copy(run, "gs://runs/two")
    assert copy.once() == 7 and copy.once() == 0
    (run / "train" / "log.jsonl").write_text("one\ntwo\n")
    for file in (run / "train" / "checkpoints" / "20").rglob("*"):
        file.unlink() if file.is_file() else None
    (run / "train" / "checkpoints" / "20" / "model_params").rmdir()
    (run / "train" / "checkpoints" / "20").rmdir()
    assert copy.once() == 1
    there = remote.objects("gs://runs/two")
    assert not [name for name in there if "/20" in name]
    remote.pull("gs://runs/two", tmp_path / "back")
    assert tree(tmp_path / "back") == whole(run)
    assert remote.Copy(run, "gs://runs/two").once() == 0  # another process finds nothing to do either


def test_a_copy_that_was_cut_off_leaves_a_step_without_its_mark_there(storage, run, tmp_path, capsys):
    copy, sent = remote.Copy(run, "gs://runs/three"), []

    def up(name, plain=copy._up):
        if len(sent) == 3:  # step 40 is up and marked, step 20 half
            raise KeyboardInterrupt
        sent.append(name)
        plain(name)
    copy._up = up
    with pytest.raises(KeyboardInterrupt):
        copy.once()
    assert sum("/20/" in name for name in remote.objects("gs://runs/three")) == 1
    remote.pull("gs://runs/three", tmp_path / "back")
    assert "checkpoint 20 in gs://runs/three is not whole" in capsys.readouterr().out
    assert set(tree(tmp_path / "back")) == {name for name in tree(run) if "checkpoints/40/" in name}


def test_a_step_that_lost_a_file_in_the_bucket_stays_there(storage, run, tmp_path, capsys):
    remote.push(run, "gs://runs/four")
    remote._storage().rm_file("runs/four/train/checkpoints/40/model_params/a")
    remote.pull("gs://runs/four", tmp_path / "back")
    assert "checkpoint 40 in gs://runs/four is not whole" in capsys.readouterr().out
    assert not (tmp_path / "back" / "train" / "checkpoints" / "40").exists()
    assert (tmp_path / "back" / "train" / "checkpoints" / "20").exists()


def test_what_is_here_already_stays(storage, run, tmp_path):
    remote.push(run, "gs://runs/five")
    (tmp_path / "back" / "train").mkdir(parents=True)
    (tmp_path / "back" / "train" / "log.jsonl").write_text("newer")
    remote.pull("gs://runs/five", tmp_path / "back")
    assert (tmp_path / "back" / "train" / "log.jsonl").read_text() == "newer"


def test_an_empty_folder_is_not_a_missing_or_refused_bucket(storage, tmp_path, monkeypatch):
    assert remote.pull("gs://runs/nothing-here", tmp_path / "back") == 0
    with pytest.raises(ValueError, match="there is no bucket absent"):
        remote.pull("gs://absent/run", tmp_path / "back")
    with pytest.raises(ValueError, match="not an address"):
        remote.pull("runs/one", tmp_path / "back")

    class Refuses(http.server.BaseHTTPRequestHandler):
        """A service that knows us not."""

        def do_GET(self):
            body = json.dumps({"error": {"code": 403, "message": "does not have access"}}).encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            """Nothing."""
    server = http.server.ThreadingHTTPServer(("localhost", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{server.server_port}")
    remote._storage.cache_clear()
    try:
        with pytest.raises(ValueError, match="(?s)refuses us.*.*roles/storage.objectUser"):
            remote.pull("gs://runs/one", tmp_path / "back")
    finally:
        server.shutdown()
        remote._storage.cache_clear()


def test_a_gcsfs_that_somebody_imported_first_does_not_choose_the_protocol(storage):
    """Its default class asks by gRPC for a bucket's kind, a minute a file where nobody answers."""
    done = subprocess.run(
        [sys.executable, "-c", "import gcsfs; from helpers import remote\n"
         "assert gcsfs.GCSFileSystem is not gcsfs.core.GCSFileSystem\n"
         "print(type(remote._storage()) is gcsfs.core.GCSFileSystem)"],
        cwd=ROOT, text=True, capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("GCSFS")})
    assert done.stdout.strip() == "True", done.stderr


def test_checkpoints_of_another_base_in_a_bucket_are_refused(storage, tmp_path, monkeypatch):
    """The address was made a path once: an empty folder, in which nothing was to be refused."""
    monkeypatch.chdir(tmp_path)
    config = gemma.config_from_hf(ROOT / "assets" / "tiny_gemma4")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    address = "gs://runs/other-base/checkpoints"
    with train.open_checkpoints(address, 1, 2) as manager:
        state = train.State(2, {"a": jnp.ones(2)}, {"b": jnp.ones(2)}, {})
        train.save(manager, state, {"rank": 4, "base_dtype": "int8"})
        manager.wait_until_finished()
    ours = SimpleNamespace(base_dtype="bfloat16", tile_size=0, int8_products=False, fresh=False)
    with pytest.raises(ValueError, match="int8 there, bfloat16 here.*CHECKPOINTS"):
        quantized.check_run(ours, config, mesh, address)
    assert not list(tmp_path.iterdir())


def test_a_termination_signal_leaves_the_newest_step_marked(storage, run, tmp_path):
    """SIGTERM while the command sleeps: one more pass, then it ends by itself."""
    command = subprocess.Popen([sys.executable, "-m", "helpers.remote", "push", str(run),
                                "gs://runs/six", "--every", "600"], cwd=ROOT)
    deadline = time.monotonic() + 120
    while "setup.json" not in remote.objects("gs://runs/six") and time.monotonic() < deadline:
        time.sleep(0.2)
    step = run / "train" / "checkpoints" / "60"
    (step / "model_params").mkdir(parents=True)
    (step / "model_params" / "a").write_text("c" * 1000)
    command.send_signal(signal.SIGTERM)
    assert command.wait(60) == 0
    remote.pull("gs://runs/six", tmp_path / "back")
    assert tree(tmp_path / "back") == whole(run)


def until(true, seconds=120):
    """Wait until `true()` is; False if it never was."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.2)
    return true()


def test_ctrl_c_on_the_log_does_not_end_the_copy(storage, run, tmp_path):
    """As in 01's scripts: a copy in the background, `tail -f` in front, ^C at the terminal."""
    script, pid_file, over = tmp_path / "t.sh", tmp_path / "pid", tmp_path / "over"
    script.write_text(f"""cd {ROOT}
nohup {sys.executable} -m helpers.remote push {run} gs://runs/watched --every 0.5 > {tmp_path}/log 2>&1 &
echo $! > {pid_file}
tail -f {tmp_path}/log
""")
    terminal, ours = pty.openpty()
    shell = subprocess.Popen(["setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"],
                             stdin=ours, stdout=ours, stderr=ours)

    def in_front():
        os.write(terminal, f"touch {over}\n".encode())  # only the shell would do that
        return over.exists()

    try:
        os.write(terminal, f"bash {script}\n".encode())
        assert until(lambda: "setup.json" in remote.objects("gs://runs/watched")) and not in_front()
        os.write(terminal, b"\x03")
        assert until(in_front, 20), "the script is still in front"
        (run / "after.json").write_text("{}")
        assert until(lambda: "after.json" in remote.objects("gs://runs/watched"), 20)
    finally:
        if pid_file.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid_file.read_text()), signal.SIGTERM)
        shell.kill()
        shell.wait()
        os.close(terminal)
        os.close(ours)


def test_one_process_copies_again_and_again_and_others_take_turns(storage, run):
    """A second `bash vm.sh` starts a second copy; the script's last one comes beside the first."""
    command = [sys.executable, "-m", "helpers.remote", "push", str(run), "gs://runs/turns-up"]
    first = subprocess.Popen([*command, "--every", "600"], cwd=ROOT)
    try:
        assert until(lambda: "setup.json" in remote.objects("gs://runs/turns-up"))
        second = subprocess.run([*command, "--every", "600"], cwd=ROOT, text=True,
                                capture_output=True, timeout=60)
        assert second.returncode == 1 and "copied by another process already" in second.stderr
        (run / "late.json").write_text("{}")
        with run_lock.alone(run / ".copy.lock"):  # a pass of the first one
            once = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
            assert "waiting for it" in once.stdout.readline()
            assert "late.json" not in remote.objects("gs://runs/turns-up")
        assert once.communicate(timeout=60)[0] == "1 files to gs://runs/turns-up\n"
        assert once.returncode == 0 and "late.json" in remote.objects("gs://runs/turns-up")
    finally:
        first.terminate()
        assert first.wait(60) == 0
    assert not list(run.glob(".copy*"))


def test_the_hashes_of_a_merge_go_up_after_its_weights(storage, run):
    """A serving machine that starts early finds no merge, not half of one."""
    for name in ("merged/model.safetensors", "zuletzt"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(name)
    (run / "merge.json").write_text("{}")
    copy, order = remote.Copy(run, "gs://runs/merge-last"), []
    plain = copy._up
    copy._up = lambda name: (order.append(name), plain(name))
    copy.once()
    assert order[-1] == "merge.json" and "merged/model.safetensors" in order


SAVING = """
import sys, time
import numpy as np
from helpers import remote, train
manager = train.open_checkpoints(sys.argv[1], 1, last=9)
state = train.State(int(sys.argv[2]), {"a": np.ones((8, 8), np.float32)}, (np.ones(3),), {})
with remote.finishing(manager.wait_until_finished, seconds=float(sys.argv[3])):
    train.save(manager, state, {})
    print("trains on", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number, seconds", [
    (signal.SIGTERM, 20), *(pytest.param(*case, marks=pytest.mark.slow)
                            for case in ((signal.SIGTERM, 0.5), (signal.SIGHUP, 20)))])
def test_a_signal_lets_a_checkpoint_arrive(storage, number, seconds):
    """03 on a spot machine, whose checkpoint is on its way: it arrives, or is none."""
    address = f"gs://runs/saving-{number}-{seconds}"
    training = subprocess.Popen([sys.executable, "-c", SAVING, address, "4", str(seconds)], cwd=ROOT,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    storage.slow.write_text("0.5")
    try:
        assert training.stdout.readline() == "trains on\n"
        assert not train.open_checkpoints(address, 1, last=9).all_steps()
        training.send_signal(number)
        _, said = training.communicate(timeout=25)
    finally:
        storage.slow.unlink()
        training.kill()
    assert training.returncode == 128 + number, said
    assert "finishing what is being saved" in said and "Traceback" not in said
    arrived = seconds > 1
    assert train.open_checkpoints(address, 1, last=9).all_steps() == [4] * arrived
    assert ("not finished in time" in said) != arrived


@pytest.mark.parametrize("mark", ["", "{", "[]", "{}", "[" * 100_000])
def test_a_mark_that_says_nothing_marks_nothing(storage, run, tmp_path, mark):
    remote.push(run, "gs://runs/marks")
    remote._storage().pipe_file(f"runs/marks/train/checkpoints/40{remote.MARK}", mark.encode())
    remote.pull("gs://runs/marks", tmp_path / "back")
    assert [path.name for path in (tmp_path / "back/train/checkpoints").iterdir()] == ["20"]


def test_a_machine_without_checkpoints_takes_none_away(storage, run, tmp_path):
    """The serving machine pulls without them, and pushes what it has measured."""
    remote.push(run, "gs://runs/taken")
    serving = tmp_path / "serving"
    remote.pull("gs://runs/taken", serving, only=lambda name: not name.startswith("train/check"))
    (serving / "eval.json").write_text("{}")
    (serving / "train/log.jsonl").write_text("another\n")
    remote.push(serving, "gs://runs/taken")
    remote.pull("gs://runs/taken", tmp_path / "back")
    assert tree(tmp_path / "back") == whole(run) | {"eval.json": "{}"}


def test_a_training_that_began_again_does_not_replace_one_that_came_further(storage, run, tmp_path):
    """Somebody forgot to pull first."""
    remote.push(run, "gs://runs/further")
    new = tmp_path / "new"
    for name, text in {"train/checkpoints/20/a": "new", "train/log.jsonl": "new\n"}.items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_text(text)
    with pytest.raises(ValueError, match="checkpoint 40, .* only 20.*pull"):
        remote.push(new, "gs://runs/further")
    remote.pull("gs://runs/further", tmp_path / "back")
    assert tree(tmp_path / "back") == whole(run)


@pytest.mark.slow
def test_a_copy_survives_a_storage_that_is_away(run, tmp_path, monkeypatch):
    """`push --every` says so, and goes on when the storage is back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")

    def serve():
        return subprocess.Popen([sys.executable, str(ROOT / "tests" / "gcs_server.py"), str(port),
                                 str(tmp_path / "data")], stderr=subprocess.DEVNULL)
    first = serve()
    time.sleep(4)
    command = subprocess.Popen([sys.executable, "-m", "helpers.remote", "push", str(run),
                                "gs://runs/away", "--every", "0.5"], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert "files to gs://runs/away" in command.stdout.readline()
    first.kill()
    first.wait()
    (run / "setup.json").write_text('{"new": 1}')
    said = command.stdout.readline()
    assert "did not take all" in said and "again in" in said
    second = serve()
    while "files to" not in said:
        said = command.stdout.readline()
        assert said, command.wait()
    command.terminate()
    assert command.wait(60) == 0
    second.kill()
    second.wait()
    command.stdout.close()


def test_two_that_stage_one_model_fetch_it_once(storage, tmp_path, monkeypatch, capsys):
    """Two runs with one TMPDIR: the second waits for the first, and finds all of it."""
    source, disk = tmp_path / "model", tmp_path / "disk"
    for name in ("config.json", "model.safetensors"):
        source.mkdir(exist_ok=True)
        (source / name).write_text(name)
    disk.mkdir()
    monkeypatch.setenv("TMPDIR", str(disk))
    remote.push(source, "gs://runs/base/twice")
    fetched, fetch = [], remote._fetch

    def slow(address, folder, missing, count):
        fetched.append(sorted(missing))
        time.sleep(1)
        fetch(address, folder, missing, count)
    monkeypatch.setattr(remote, "_fetch", slow)
    with ThreadPoolExecutor(2) as pool:
        both = set(pool.map(remote.stage, ["gs://runs/base/twice"] * 2))
    assert both == {disk / "base/runs/base/twice"}
    assert fetched == [["config.json", "model.safetensors"]]
    assert "twice in" in (said := capsys.readouterr().out) and "waiting for it" in said
    assert {name: text for name, text in tree(both.pop()).items() if text} == tree(source)
    assert not list(disk.rglob("*.lock"))


def test_a_model_is_staged_in_no_folder_that_is_not_there(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    with pytest.raises(ValueError, match="TMPDIR=/no/such/folder.*mkdir -p"):
        remote.stage("gs://runs/base/any")


def test_a_signal_is_what_it_was_after_a_copy():
    before = signal.getsignal(signal.SIGTERM)
    with remote.finishing(lambda: None):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


# ── Whole programs ──

COPIES = """
import numpy as np, time
from helpers import remote, train
manager = train.open_checkpoints("gs://runs/series", 1, last=9)
state = train.State(4, {"a": np.ones((8, 8), np.float32)}, (np.ones(3),), {})
with remote.finishing(manager.wait_until_finished):
    train.save(manager, state, {})
    print("trains on", flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.mark.slow
def test_sigterm_to_run_all_lets_a_checkpoint_arrive(world, storage):
    """What 03 does where CHECKPOINTS is a bucket, in a kernel of run_all.sh."""
    world.notebooks(n03=COPIES)
    storage.slow.write_text("0.5")
    try:
        child = world.start("./run_all.sh", "03", cwd=world.project)
        world.until(child, "trains on")
        child.terminate()
        outcome = world.ended(child, 35)
    finally:
        storage.slow.unlink()
    assert outcome.returncode == 143 and "ended by SIGTERM" in outcome.text
    assert "saved" in (world.run / "notebooks/kernel.log").read_text()
    assert train.open_checkpoints("gs://runs/series", 1, last=9).all_steps() == [4]
    assert not world.left()

def driver(folder, steps=12, wait=None):
    """The training driver on `folder`/train, to its end or until `wait` steps are logged."""
    program = subprocess.Popen([sys.executable, str(ROOT / "tests" / "train_driver.py"),
                                str(folder / "train"), str(steps)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if wait is None:
        assert program.wait(900) == 0
        return None
    log, deadline = folder / "train" / "log.jsonl", time.monotonic() + 900
    while not log.exists() or log.read_text().count('"loss"') < wait:
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("grace", [30, 0.5])
def test_a_preempted_machine_is_followed_by_an_empty_one(storage, tmp_path, grace):
    """SIGTERM to the training and to its copy, SIGKILL after the grace; then another machine."""
    whole, spot, new = tmp_path / "whole", tmp_path / "spot", tmp_path / "new"
    address = f"gs://runs/spot-{grace}"
    (whole / "train").mkdir(parents=True)
    driver(whole)
    (spot / "train").mkdir(parents=True)
    (spot / "ballast").write_bytes(os.urandom(40_000_000))  # so that a copy takes a while
    copier = subprocess.Popen([sys.executable, "-m", "helpers.remote", "push", str(spot), address,
                               "--every", "1"], cwd=ROOT)
    training = driver(spot, wait=7)
    deadline = time.monotonic() + 60  # an earlier pass has brought a checkpoint away
    while not any(name.endswith(remote.MARK) for name in remote.objects(address)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    training.send_signal(signal.SIGTERM)
    copier.send_signal(signal.SIGTERM)
    try:
        assert copier.wait(grace) == 0
    except subprocess.TimeoutExpired:
        assert grace < 30, "the last pass was not done in time"
    training.kill()
    copier.kill()
    training.wait()
    copier.wait()
    assert remote.pull(address, new)
    steps = sorted(int(path.name) for path in (new / "train" / "checkpoints").iterdir())
    assert steps and max(steps) < 12
    driver(new)
    final, again = (train_driver.final_adapters(run / "train", 12) for run in (whole, new))
    assert final.keys() == again.keys()
    for name in final:
        assert final[name].tobytes() == again[name].tobytes()


def notebook(name, folder, wait=None, edit=("", ""), **environment):
    """A notebook as a script in the run directory `folder`; killed once it prints `wait`."""
    source = folder / name
    folder.mkdir(exist_ok=True)
    text = (ROOT / name).read_text()
    assert edit[0] in text
    source.write_text(text.replace(*edit) if edit[0] else text)
    program = subprocess.Popen(
        [sys.executable, str(source)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "SIZE": "tiny", "RUN_DIR": str(folder),
                                       "MPLBACKEND": "agg", **environment})
    said = []
    for line in program.stdout:
        said.append(line)
        if wait and wait in line:
            program.kill()
    assert program.wait() == (-signal.SIGKILL if wait else 0), "".join(said[-30:])
    return "".join(said)


@pytest.mark.slow
def test_checkpoints_in_a_bucket_outlive_the_machine(storage, tmp_path):
    """02, 03 killed, an empty disk, 02 and 03 again, 04: base model, checkpoints and cache on gs://."""
    base = "gs://runs/base/tiny_gemma4"
    remote.push(ROOT / "assets" / "tiny_gemma4", base)
    there = {"CHECKPOINTS": "gs://runs/bucket-run/checkpoints",
             "JAX_COMPILATION_CACHE_DIR": "gs://runs/jax_cache"}
    for folder, kill, found in (("first", "step 50/", "starting at step 0"),
                                ("second", None, "resuming from step 40")):
        run = tmp_path / folder
        own = there | {"TMPDIR": str(tmp_path / f"{folder}-disk")}
        (tmp_path / f"{folder}-disk").mkdir()
        notebook("02_data.py", run, edit=('base="assets/tiny_gemma4"', f'base="{base}"'), **own)
        said = notebook("03_train.py", run, wait=kill, **own)
        assert found in said, said[-3000:]
    assert not (run / "train" / "checkpoints").exists() and remote.objects("gs://runs/jax_cache")
    notebook("04_merge.py", run, **own)
    recipe = json.loads((run / "train" / "recipe.json").read_text())
    assert recipe["checkpoints"] == there["CHECKPOINTS"] and recipe["base_path"] == base
    assert json.loads((run / "merge.json").read_text())
