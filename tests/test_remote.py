"""Models and checkpoints in a bucket, through fsspec against a local Google Cloud Storage."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import jax.numpy as jnp
import pytest
from conftest import ROOT, program

from helpers import records, remote, train, weights
from tables.errors import UserError


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    """The address of a local storage service, in the environment variables that clients read."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("gcs")
    server = subprocess.Popen([sys.executable, str(ROOT / "tests" / "gcs_server.py"), str(port),
                               str(folder / "data")], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    address = f"http://localhost:{port}"
    for _ in range(200):
        try:
            socket.create_connection(("localhost", port), 0.2).close()
            break
        except OSError:
            time.sleep(0.1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            patch.setenv(name, address)
        yield
    server.terminate()
    server.wait()


def copy_there(folder, address):
    """What `gcloud storage rsync` does."""
    files, inner = remote.bucket(address)
    for path in folder.rglob("*"):
        if path.is_file():
            files.put_file(str(path), f"{inner}/{path.relative_to(folder).as_posix()}")


@pytest.fixture
def model(tmp_path):
    """A folder with the files of a model, not all of which are of use."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors",
                 "consolidated.safetensors", "README.md", "original/params.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    an_index(folder, "model-1.safetensors", "model-2.safetensors")
    return folder


def an_index(folder, *names):
    """The index of a model whose weights are these files."""
    places = {f"tensor {number}": name for number, name in enumerate(names)}
    text = json.dumps({"weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)


SMALL = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
SHARDS = {"model-1.safetensors", "model-2.safetensors"}


def names_in(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["gs", "file"])
def test_a_model_in_a_bucket_is_staged_once(storage, model, tmp_path, monkeypatch, kind):
    """Any storage that fsspec knows: Google's, and a folder as the address of one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    address = f"gs://runs/{tmp_path.name}/m" if kind == "gs" else model.as_uri()
    if kind == "gs":
        copy_there(model, address)
    remote.stage(address, fetch=False)
    small = remote.stage(address, weights=False)
    assert names_in(small) == SMALL | {".small"}
    with monkeypatch.context() as patch:
        patch.setattr(remote, "_in_bucket", lambda *_: pytest.fail("they are here already"))
        assert remote.stage(address, weights=False) == small
    assert remote.stage(address) == small
    assert names_in(small) == SMALL | SHARDS | {".small", ".complete"}
    assert (small / "model-1.safetensors").read_text() == "model-1.safetensors"
    assert {path.name for path in weights.files_of(small)} == SHARDS
    monkeypatch.setattr(remote, "_in_bucket", lambda *_: pytest.fail("it is here already"))
    assert remote.stage(address) == small


class Hub:
    """Stands for `huggingface_hub`: a repository is a folder, and what's fetched is noted."""

    def __init__(self, folder):
        self.folder = folder
        self.fetched = []

    def HfApi(self):
        return self

    def model_info(self, source, files_metadata):
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        siblings = [types.SimpleNamespace(rfilename=path.relative_to(self.folder).as_posix(),
                                          size=path.stat().st_size) for path in files]
        return types.SimpleNamespace(sha="1234", siblings=siblings)

    def snapshot_download(self, source, revision, local_dir, allow_patterns):
        assert revision == "1234"
        for name in allow_patterns:
            self.fetched.append(name)
            shutil.copy(self.folder / name, local_dir / name)


@pytest.fixture
def hub(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hub = Hub(model)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_a_second_set_of_weights_stays_on_the_hub(hub):
    """`*.safetensors` would fetch `consolidated.safetensors`, too: more bytes, then refused."""
    target = remote.stage("somebody/model", fetch=False)
    assert hub.fetched == ["model.safetensors.index.json"]
    assert remote.stage("somebody/model") == target
    assert set(hub.fetched) == SMALL | SHARDS
    assert {path.name for path in weights.files_of(target)} == SHARDS


def test_one_file_of_weights_needs_no_index(hub):
    (hub.folder / "model.safetensors.index.json").unlink()
    (hub.folder / "model.safetensors").write_text("all of them")
    target = remote.stage("somebody/model")
    assert names_in(target) == {"config.json", "tokenizer.json", "model.safetensors", ".complete"}


@pytest.mark.parametrize("change, says", [
    (lambda folder: (folder / "model-2.safetensors").unlink(),
     "somebody/model lacks model-2.safetensors, which its index names"),
    (lambda folder: (folder / "model.safetensors.index.json").unlink(),
     "somebody/model lacks model.safetensors, which a model without an index has"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
     "index.json has no weight_map"),
    (lambda folder: an_index(folder, "../../.ssh/id.safetensors"), "no safetensors file of this"),
])
def test_weights_that_are_not_whole_are_refused_before_the_first_of_them(hub, change, says):
    change(hub.folder)
    with pytest.raises(UserError, match=says):
        remote.stage("somebody/model")
    assert set(hub.fetched) <= {"model.safetensors.index.json"}


def test_a_bucket_that_is_missing_or_holds_no_model_is_one_line(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError,
                       match="no-such-bucket.*refuses us(?s:.)*roles/storage.objectUser"):
        remote.check_writable("gs://no-such-bucket/x")
    remote.check_writable("gs://runs/x")
    with pytest.raises(ValueError, match="gs://runs/nothing is empty, or has no config.json"):
        remote.stage("gs://runs/nothing")
    with pytest.raises(ValueError, match="neither a directory, nor a hub id, nor a gs:// address"):
        remote.stage("./nothing/there")


def test_a_bug_of_ours_is_not_called_a_refusal(monkeypatch):
    monkeypatch.setattr(remote, "bucket", lambda address: (None, "x"))
    with pytest.raises(AttributeError):
        remote.check_writable("gs://runs/x")


def tree(folder):
    """{path: its bytes} of all files below a folder, git's own among them."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def verilog_eval(tmp_path, monkeypatch):
    """A repository with one problem stands for NVIDIA's; we are in an empty folder beside it."""
    origin, here = tmp_path / "origin", tmp_path / "here"
    (origin / "dataset_spec").mkdir(parents=True)
    (origin / "dataset_spec/Prob001_prompt.txt").write_text("Invert a bit.")
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "problems"]):
        subprocess.run(["git", "-C", origin, *words], check=True)
    commit = subprocess.run(["git", "-C", origin, "rev-parse", "HEAD"], check=True, text=True,
                            capture_output=True).stdout.strip()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("VERILOG_EVAL_DIR", raising=False)
    monkeypatch.setattr(remote, "VERILOG_EVAL", origin.as_uri())
    monkeypatch.setattr(remote, "COMMIT", commit)
    return here


def test_verilog_eval_is_fetched_into_a_folder_of_ours_and_once(verilog_eval, monkeypatch):
    folder = remote.checkout("{checkout}/dataset_spec")
    assert str(folder) == "runs/verilog-eval/dataset_spec"
    assert (folder / "Prob001_prompt.txt").read_text() == "Invert a bit."
    monkeypatch.setattr(remote, "VERILOG_EVAL", "file:///nowhere")
    assert remote.checkout("{checkout}/dataset_spec") == folder
    with pytest.raises(UserError, match="no folder runs/verilog-eval/dataset_typo"):
        remote.checkout("{checkout}/dataset_typo")


@pytest.mark.parametrize(("name", "own", "says"), [
    ("my_problems", None, "no folder my_problems. Name one with problems in verilog-eval's layout"),
    ("data/tiny_evla", None, "no folder data/tiny_evla"),
    ("data", None, "data holds no problem in verilog-eval's layout"),
    ("a{b}/c", None, "no folder a.b./c"),
    ("{checkout}/dataset_spec", "/no/checkout", r"VERILOG_EVAL_DIR is /no/checkout"),
    ("{checkout}/dataset_spec", "data", "no folder data/dataset_spec"),
])
def test_a_folder_that_the_reader_names_is_never_written(verilog_eval, monkeypatch, name, own,
                                                         says):
    """A mistyped name once switched this repository to verilog-eval's files."""
    if own:
        monkeypatch.setenv("VERILOG_EVAL_DIR", own)
    subprocess.run(["git", "init", "-q"], check=True)
    Path("data").mkdir()
    Path("data/mine.txt").write_text("mine")
    before = tree(verilog_eval)
    with pytest.raises(UserError, match=says):
        remote.checkout(name)
    assert tree(verilog_eval) == before and not list(verilog_eval.glob("data/.git"))


def test_a_fetch_that_fails_leaves_nothing(verilog_eval, monkeypatch):
    monkeypatch.setattr(remote, "COMMIT", "0" * 40)
    with pytest.raises(UserError, match="could not be fetched .see above.. Set VERILOG_EVAL_DIR"):
        remote.checkout("{checkout}/dataset_spec")
    monkeypatch.setenv("PATH", str(verilog_eval))
    with pytest.raises(UserError, match="git is missing.*apt-get install -y git"):
        remote.checkout("{checkout}/dataset_spec")
    assert tree(verilog_eval) == {} and not Path("runs/verilog-eval").exists()


def test_an_address_cannot_lead_out_of_the_folder_for_bases(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.raises(UserError, match="has .. in it. Write the address without"):
        remote.stage("gs://runs/../../mine")
    assert list(tmp_path.iterdir()) == []


def test_two_that_stage_one_model_fetch_it_once(model, tmp_path):
    """Two processes at once; one says that it fetches."""
    code = (f"from helpers import remote; print(remote.stage({model.as_uri()!r}))")
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                             text=True,
                             env={**os.environ, "TMPDIR": str(tmp_path)}) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert sum("staging" in text for text in said) == 1, said
    assert len({text.splitlines()[-1] for text in said}) == 1


def test_checkpoints_of_another_recipe_in_a_bucket_are_refused(storage, tmp_path, monkeypatch):
    """The address was made a path once: an empty folder, in which nothing was to be refused."""
    monkeypatch.chdir(tmp_path)
    with train.open_checkpoints("gs://runs/other/checkpoints", 1, 2) as manager:
        state = train.State(2, {"a": jnp.ones(2)}, {"b": jnp.ones(2)}, {})
        train.save(manager, state, {"rank": 4})
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="(?s)rank: 4 there, 8 here.*CHECKPOINTS"):
            train.restore(manager, state, {"rank": 8})
    assert not list(tmp_path.iterdir())


def test_fresh_checkpoints_in_a_bucket_delete_no_other_objects(storage, monkeypatch):
    address = "gs://runs/fresh/checkpoints"
    with train.open_checkpoints(address, 1, 2) as manager:
        train.save(manager, train.State(2, {"a": jnp.ones(2)}, {"b": jnp.ones(2)}, {}), {})
        manager.wait_until_finished()
    files, inner = remote.bucket("gs://runs/fresh")
    files.pipe_file(f"{inner}/data.csv", b"mine")
    with pytest.raises(UserError, match="isn't a checkpoint"):
        train.throw_away("gs://runs/fresh")
    assert files.find(f"{inner}/checkpoints") and files.exists(f"{inner}/data.csv")
    train.throw_away(address)
    assert files.find(inner) == [f"{inner}/data.csv"]


def notebook(name, folder, wait=None, edit=("", ""), **environment):
    """A notebook as a script in the run directory `folder`; killed once it prints `wait`."""
    source = folder / name
    folder.mkdir(exist_ok=True)
    text = (ROOT / name).read_text()
    assert edit[0] in text
    source.write_text(text.replace(*edit) if edit[0] else text)
    program = subprocess.Popen(
        [sys.executable, str(source)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "XLA_FLAGS": "", "SIZE": "tiny", "RUN_DIR": str(folder),
                                       "MPLBACKEND": "agg", **environment})
    said = []
    for line in program.stdout:
        said.append(line)
        if wait and wait in line:
            program.kill()
    assert program.wait() == (-signal.SIGKILL if wait else 0), "".join(said[-30:])
    return "".join(said)


@pytest.mark.parametrize("script", ["train.sh", "serve.sh"])
def test_files_that_are_being_written_are_not_copied_into_the_bucket(script):
    """By gcloud's own rule: `Patterns` in its regex_util.py asks `match`, from a path's start."""
    text = (ROOT / "scripts" / script).read_text()
    patterns = [re.compile(found) for found in re.findall("--exclude='([^']*)'", text)]
    assert patterns
    writing = [".lock", ".merged.partial/model.safetensors", "train/.log.jsonl.123",
               "notebooks/.03_train.ipynb.7"]
    whole = ["adapter/adapter_model.safetensors", "train/log.jsonl", "merge.json", "data/meta.json"]
    for pattern in patterns:
        assert all(pattern.match(name) for name in writing)
        assert not any(pattern.match(name) for name in whole)
    assert script != "train.sh" or patterns[0].match("serve/server.lock")
    assert patterns[0].match("jax_cache/jit_step-1")


def test_a_copy_that_fails_once_does_not_end_the_copies_of_a_rented_machine(tmp_path):
    """train.sh with stand-ins: the second copy of five fails, as when the network is away."""
    log = tmp_path / "copies"
    stand_ins = {
        "bin/gcloud": f"echo copy >> {log}; [ $(wc -l < {log}) != 2 ]",
        "bin/python3": "echo HOSTS=1",
        "bin/sleep": "exec /bin/sleep 0.1",
        "gemma4-on-tpu/setup.sh": "",
        "gemma4-on-tpu/.venv/bin/python": "",
        "gemma4-on-tpu/run_all.sh": f"for _ in $(seq 100); do [ $(wc -l < {log}) -lt 4 ] || exit 0;"
                                    " /bin/sleep 0.1; done; exit 1"}
    for name, status in (("sudo", 0), ("mkdir", 0), ("curl", 1)):  # no metadata: the only host
        stand_ins[f"bin/{name}"] = f"exit {status}"
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    done = program("bash", ROOT / "scripts/train.sh", "my-bucket", cwd=tmp_path, TRACK=None,
                   PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 0, "no copy came after the one that failed"
    assert "all is in the bucket" in done.stdout


@pytest.mark.slow
def test_checkpoints_in_a_bucket_outlive_the_machine(storage, tmp_path):
    """02, 03 killed, an empty disk, 02 and 03 again, 04: base model, checkpoints and cache on gs://."""
    base = "gs://runs/base/tiny_gemma4"
    copy_there(ROOT / "assets" / "tiny_gemma4", base)
    there = {"CHECKPOINTS": "gs://runs/bucket-run/checkpoints",
             "JAX_COMPILATION_CACHE_DIR": "gs://runs/jax_cache"}
    for folder, kill, found in (("first", "step 120/", "starting at step 0"),
                                ("second", None, "resuming from step 60")):
        run = tmp_path / folder
        own = there | {"TMPDIR": str(tmp_path / f"{folder}-disk")}
        (tmp_path / f"{folder}-disk").mkdir()
        notebook("02_data.py", run, edit=('base="assets/tiny_gemma4"', f'base="{base}"'), **own)
        said = notebook("03_train.py", run, wait=kill, **own)
        assert found in said, said[-3000:]
    assert not (run / "train" / "checkpoints").exists() and remote.bucket("gs://runs")[0].find("runs/jax_cache")
    notebook("04_merge.py", run, **own)
    recipe = records.Recipe.load(run)
    assert recipe.checkpoints == there["CHECKPOINTS"] and recipe.base_path == base
    assert records.Merge.load(run)
