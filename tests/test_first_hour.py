"""tools/first_hour.py: the report, resuming, the limit, and which prediction is put beside.

The stages are small real programs; nothing of the series is started.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, load

import helpers
from serving import Options, server

sys.path.insert(0, str(ROOT / "tools"))
import first_hour
from first_hour import Stage

ABOUT = {"accelerator": "tpu", "kind": "v5p", "chips": 4, "hosts": 1, "trouble": "",
         "slice": "v5p-8", "size": "31b", "commit": "0123abc"}
MACHINE = {"device_kind": "TPU v5", "devices": 4, "hosts": 1, "mesh": [1, 4], "load_seconds": 310.0,
           "compile_seconds": 290.0, "held_gib_per_device": 79.8, "bytes_in_use": 18 * 2**30,
           "peak_bytes_in_use": 80 * 2**30, "bytes_limit": 95 * 2**30, "steps": 30,
           "micro_batches": 1, "micro_rows": 2, "sequence_length": 4096, "remat": "NONE"}


def python(code):
    return [sys.executable, "-c", code]


def write_training(folder):
    """machine.json, log.jsonl and a trace as 03 leaves them: 30 steps, the first three slow."""
    (folder / "train/trace/plugins").mkdir(parents=True)
    (folder / "train/trace/plugins/a.xplane.pb").write_bytes(b"x" * 10)
    (folder / "train/machine.json").write_text(json.dumps(MACHINE))
    records = [{"step": 0, "val_loss": 2.0}]
    records += [{"step": step, "loss": 3.0 - step / 100, "seconds": 9.0 if step <= 3 else 1.5,
                 "real_tokens": 7800} for step in range(1, 31)]
    (folder / "train/log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def counting(folder, name, **more):
    """A stage that leaves a line in a file whenever it runs."""
    file = folder / f"{name}.ran"
    return Stage(name, python(f"open({str(file)!r}, 'a').write('x')"),
                 lambda: {"runs": len(file.read_text())}, **more)


def test_the_report_has_the_numbers_and_the_prediction_beside_them(tmp_path):
    write_training(tmp_path)
    stages = [Stage("setup", [], lambda: {"versions": {"jax": "0.10.2", "libtpu": None}}),
              Stage("train", python("print('trained')"), lambda: first_hour.training(tmp_path)),
              Stage("serve", [], dict, skip="a v5p-8 does not serve")]
    report = first_hour.run(stages, tmp_path / "first_hour", ABOUT, minutes=1)
    assert report == json.loads((tmp_path / "first_hour/report.json").read_text())
    assert report["finished"] and report["stages"]["serve"]["status"] == "skipped"
    found = report["summary"]
    assert found["step_seconds"] == 1.5 and found["real_tokens_per_second"] == pytest.approx(5200)
    assert found["steps_measured"] == 27 and found["bytes_limit"] == 95 * 2**30
    assert (found["load_seconds"], found["compile_seconds"]) == (310.0, 290.0)
    assert (found["slice"], found["chips"], found["hosts"]) == ("v5p-8", 4, 1)
    assert report["stages"]["train"]["result"]["trace"]["bytes"] == 10
    with open(ROOT / "data/dryrun/v5p-8_31b.csv", newline="") as file:
        ours = next(row for row in csv.DictReader(file) if row["recipe"] == "ours, faster")
    best = ours.get("seconds_predicted") or ours["seconds_estimate"]
    assert found["predicted"]["step_seconds"] == float(best) and not found["predicted"]["differs"]
    block = first_hour.markdown(report)
    assert "5,200" in block and found["predicted"]["kind"] in block and "jax 0.10.2" in block
    columns = {line.count("|") for line in block.splitlines() if line.startswith("|")}
    assert columns == {4}, "one table of three columns"


def test_a_second_call_skips_what_is_finished_and_repeats_what_failed(tmp_path, capsys):
    def stages(works):
        return [counting(tmp_path, "one"),
                Stage("two", python(f"raise SystemExit({'0' if works else repr('no chip')})"), dict),
                counting(tmp_path, "three", needs=("two",)), counting(tmp_path, "four")]
    report = first_hour.run(stages(False), tmp_path / "hour", ABOUT, minutes=1)
    assert [entry["status"] for entry in report["stages"].values()] == [
        "done", "failed", "left", "done"]
    assert report["stages"]["two"]["why"] == "no chip" and not report["finished"]
    assert report["stages"]["three"]["why"] == "needs two"
    report = first_hour.run(stages(True), tmp_path / "hour", ABOUT, minutes=1)
    assert report["finished"] and "why" not in report["stages"]["two"]
    runs = {name: report["stages"][name]["result"]["runs"] for name in ("one", "three", "four")}
    assert runs == {"one": 1, "three": 1, "four": 1}
    assert report["stages"]["two"]["attempts"] == 2 and "one: done earlier" in capsys.readouterr().out


def test_a_report_of_another_commit_is_not_continued(tmp_path):
    first_hour.run([counting(tmp_path, "one")], tmp_path / "hour", ABOUT, minutes=1)
    with pytest.raises(ValueError, match="another commit"):
        first_hour.run([counting(tmp_path, "one")], tmp_path / "hour",
                       ABOUT | {"commit": "4567def"}, minutes=1)


HANGS = """import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({file!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
print("waiting for the chip", flush=True)
time.sleep(600)
"""


def gone(pid):
    """No such process, or only its entry until somebody asks for its status."""
    try:
        return psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_limit_ends_a_stage_that_hangs_with_all_it_started(tmp_path, monkeypatch):
    """It ignores SIGTERM and has a child; afterwards neither is there and the rest is left."""
    ends = first_hour.end
    monkeypatch.setattr(first_hour, "end", lambda process: ends(process, seconds=1.0))
    pids, after = tmp_path / "pids", tmp_path / "after"
    stages = [Stage("hangs", python(HANGS.format(file=str(pids))), dict,
                    after=python(f"open({str(after)!r}, 'w')")),
              counting(tmp_path, "next")]
    start = time.monotonic()
    report = first_hour.run(stages, tmp_path / "hour", ABOUT, minutes=0.15)
    assert 8 < time.monotonic() - start < 25
    entry = report["stages"]["hangs"]
    assert entry["status"] == "stopped" and entry["why"].endswith("waiting for the chip")
    assert report["stages"]["next"] == {"attempts": 0, "status": "left",
                                        "why": "no time was left"}
    assert all(gone(pid) for pid in pids.read_text().split()) and after.exists()
    assert not report["finished"] and report["summary"]["predicted"] is None
    assert "stopped" in first_hour.markdown(report)


COMMAND = """import signal, sys
from pathlib import Path
sys.path.insert(0, {tools!r})
import first_hour
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
stage = first_hour.Stage("waits", [sys.executable, "-c", {waits!r}], dict)
first_hour.run([stage], Path({folder!r}), {about!r}, 2)
"""


def test_ending_the_command_ends_its_stage(tmp_path):
    """SIGTERM, as a spot machine sends it, leaves a report and no process."""
    pids = tmp_path / "pids"
    waits = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    process = subprocess.Popen(python(COMMAND.format(
        tools=str(ROOT / "tools"), waits=waits, folder=str(tmp_path / "hour"), about=ABOUT)))
    until = time.monotonic() + 60
    while not (pids.exists() and pids.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=40) == 143
    assert gone(int(pids.read_text()))
    report = json.loads((tmp_path / "hour/report.json").read_text())
    assert report["stages"]["waits"]["status"] == "started"


FIELDS = ("recipe", "trainer", "layers", "fits", "micro_batch", "sequence_length", "remat",
          "seconds_estimate", "seconds_roofline", "real_tokens_per_second",
          "real_tokens_per_second_roofline", "hbm_gib", "libtpu", "seconds_predicted",
          "tokens_per_second_predicted")


@pytest.fixture
def tables(tmp_path):
    """A stored table of two recipes: one with all three times, one with the roofline's alone."""
    rows = [("ours, DECODER", "03", 0, True, 2, 4096, "DECODER", "", 0.56, "", 13840, 20.6, "0.1",
             "", ""),
            ("published", "tunix", 0, True, 2, 4096, "NONE", 0.1, 0.1, 1, 1, 20, "0.1", "", ""),
            ("ours", "03", 0, True, 2, 4096, "NONE", 0.955, 0.61, 8148, 12752, 79.8, "0.1", 1.37,
             5690)]
    for name in ("v5p-8_31b", "v6e-8_31b"):
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(FIELDS)
            writer.writerows(rows[:2] if name == "v6e-8_31b" else rows)
    return tmp_path


def test_the_prediction_is_the_slices_own_and_says_what_differs(tables):
    own = first_hour.prediction("v5p-8", "31b", MACHINE | {"micro_batches": 2}, tables)
    assert own["recipe"] == "ours" and not own["differs"]
    assert own["step_seconds"] == pytest.approx(2.74) and own["kind"].startswith("predicted")
    other = first_hour.prediction("v6e-8", "31b", MACHINE, tables)
    assert other["recipe"] == "ours, DECODER" and other["differs"] == [
        "remat DECODER there, NONE here"]
    assert other["kind"].startswith("roofline") and other["real_tokens_per_second"] == 13840
    assert first_hour.prediction("v4-8", "31b", MACHINE, tables) is None
    assert first_hour.prediction("", "tiny", MACHINE, tables) is None


def test_the_prediction_is_that_of_the_step_that_03_runs():
    """data/dryrun has our step twice; 03 compiles the faster one."""
    own = first_hour.prediction("v5p-8", "31b", MACHINE)
    assert own["recipe"] == "ours, faster" and not own["differs"]


def test_the_server_is_started_as_05_starts_it():
    full, e2b, second, tiny = load("05_serve_vllm.py", "FULL", "E2B", "SECOND", "TINY")
    for settings, options in zip((full, second, e2b, tiny), (
            *first_hour.SERVING["31b"], *first_hour.SERVING["e2b"], *first_hour.SERVING["tiny"]), strict=True):
        for name in ("max_model_len", "tensor_parallel", "data_parallel", "kv_cache_dtype",
                     "quantization", "implementation", "environment", "flags"):
            assert options.get(name, getattr(Options(), name)) == getattr(settings, name)


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_server_that_does_not_fit_is_started_the_second_way(monkeypatch, fails):
    tried = []

    def start(options, folder):
        tried.append(options)
        if len(tried) <= fails:
            raise helpers.UserError("out of memory")
        return {"engine": options.engine}

    monkeypatch.setattr(server, "start", start)
    if fails == 2:
        with pytest.raises(ValueError, match="out of memory"):
            first_hour.start_server("31b", "model")
    else:
        assert first_hour.start_server("31b", "model")[1] == first_hour.SERVING["31b"][fails]
    assert len(tried) == min(fails + 1, 2)


@pytest.mark.parametrize("kind,chips,size,served", [
    ("v6e", 8, "31b", True), ("v5p", 4, "31b", False), ("v6e", 1, "e2b", False)])
def test_only_the_serving_slice_serves(tmp_path, monkeypatch, kind, chips, size, served):
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache")
    monkeypatch.setenv("CHECKPOINTS", "gs://bucket/checkpoints/")
    stages = {stage.name: stage for stage in first_hour.plan(
        tables.hardware.Hardware("tpu", kind, chips), size, tmp_path / "first_hour")}
    assert list(stages) == ["setup", "data", "train", "serve"]
    assert (stages["serve"].skip == "") == served
    inside = first_hour.environment_of(stages["train"])
    assert inside["MAX_STEPS"] == "30" and "JAX_COMPILATION_CACHE_DIR" not in inside
    assert inside["RUN_DIR"] == str(tmp_path / "first_hour/run")
    assert inside["CHECKPOINTS"] == "gs://bucket/checkpoints/first_hour"
