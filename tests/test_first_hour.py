"""tools/first_hour.py: the report, going on where it stopped, and the limit.

The stages are small real programs; nothing of the series is started.
"""

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, a_recipe

import first_hour
from tables.errors import UserError
from tables.hardware import Hardware

ABOUT = {"accelerator": "tpu", "kind": "v5p", "chips": 4, "hosts": 1, "trouble": "",
         "slice": "v5p-8", "size": "31b", "commit": "0123abc"}


def python(code):
    return [sys.executable, "-c", code]


def write_training(folder):
    """machine.json and log.jsonl as 03 leaves them: 30 steps, the first three slow."""
    (folder / "train").mkdir(parents=True)
    machine = {"device_kind": "TPU v5", "held_gib_per_device": 79.8}
    (folder / "train/machine.json").write_text(json.dumps(machine))
    records = [{"step": 0, "val_loss": 2.0}]
    records += [{"step": step, "loss": 3.0 - step / 100, "seconds": 9.0 if step <= 3 else 1.5,
                 "real_tokens": 7800} for step in range(1, 31)]
    (folder / "train/log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_the_report_has_the_numbers_and_the_compiled_ones_beside_them(tmp_path):
    write_training(tmp_path / "run")
    plan = {"train": (python(""), lambda: first_hour.training(tmp_path / "run"), ""),
            "serve": ([], dict, "a v5p-8 does not serve")}
    report = first_hour.measure(plan, tmp_path, ABOUT, 1)
    found = report["stages"]["train"]["result"]
    assert (found["step_seconds"], found["steps_measured"]) == (1.5, 27)
    assert found["real_tokens_per_second"] == pytest.approx(5200)
    block = first_hour.markdown(report)
    guess = first_hour.stored.compiled_fit("v5p-8", "31b")
    assert f"| held gib per device | 79.8 | {guess['hbm_gib']} |" in block
    assert "serve skipped" in block and "First hour on a v5p-8 (size 31b)" in block


def test_a_step_with_an_int8_base_stands_beside_its_own_row(tmp_path):
    write_training(tmp_path / "run")
    a_recipe(dtype="bfloat16", base_dtype="int8").save(tmp_path / "run/train/recipe.json")
    about = ABOUT | {"kind": "v5e", "chips": 8, "slice": "v5e-8"}
    trained = first_hour.training(tmp_path / "run")
    block = first_hour.markdown({"about": about, "stages": {
        "train": {"status": "done", "why": "", "result": trained}}})
    guess = first_hour.stored.compiled_fit("v5e-8", "31b", "int8")
    assert "| base dtype | int8 |" in block
    assert f"| step seconds | 1.5 | {guess['seconds_predicted']} |" in block


def test_rows_of_another_length_stand_beside_the_speed_alone():
    trained = {"step_seconds": 1.5, "real_tokens_per_second": 5200.0, "sequence_length": 3000,
               "held_gib_per_device": 79.8}
    block = first_hour.markdown({"about": ABOUT, "stages": {
        "train": {"status": "done", "why": "", "result": trained}}})
    guess = first_hour.stored.compiled_fit("v5p-8", "31b", row_length=3000)
    assert f"| real tokens per second | 5,200 | {guess['tokens_per_second_predicted']} |" in block
    assert "| step seconds | 1.5 |  |" in block and "| held gib per device | 79.8 |  |" in block


def test_a_server_that_started_says_how_to_begin_with_it():
    report = {"about": ABOUT, "stages": {
        "serve": {"status": "done", "why": "", "result": {"ready_seconds": 400.0, "try": 2}}}}
    assert "with SERVE_TRY=2 it begins with this one" in first_hour.markdown(report)


@pytest.mark.parametrize(("kind", "chips", "size", "skip"), [
    ("v6e", 8, "31b", ""), ("v5e", 8, "31b", ""), ("v6e", 1, "e2b", ""), ("v6e", 4, "e2b", ""),
    ("v5p", 4, "31b", "a v5p-8 does not serve"), ("v5e", 1, "e2b", "a v5e-1 does not serve"),
    ("v6e", 4, "31b", "a v6e-4 does not serve")])
def test_a_server_is_started_where_05_has_one(kind, chips, size, skip):
    """05 serves the E2B on one v6e chip, and the report said that a v6e-1 doesn't serve."""
    assert "e2b: one v6e chip" in (ROOT / "05_serve_vllm.py").read_text()
    plan = first_hour.stages(Hardware("tpu", kind, chips), size, Path("run"))
    assert plan["serve"].skip == skip


def test_a_second_call_goes_on_and_a_report_of_another_commit_does_not(tmp_path):
    ran = tmp_path / "ran"
    plan = {"one": (python(f"open({str(ran)!r}, 'a').write('1')"), dict, ""),
            "two": (python("print('the reason'); raise SystemExit(1)"), dict, "")}
    report = first_hour.measure(plan, tmp_path, ABOUT, 1)
    assert report["stages"]["two"] | {"seconds": 0} == {
        "status": "failed", "why": "the reason", "seconds": 0}
    plan["two"] = (python(f"open({str(ran)!r}, 'a').write('2')"), dict, "")
    assert first_hour.measure(plan, tmp_path, ABOUT, 1)["stages"]["two"]["status"] == "done"
    assert ran.read_text() == "12", "what was done is not done again"
    with pytest.raises(ValueError, match="about another commit"):
        first_hour.measure(plan, tmp_path, ABOUT | {"commit": "f"}, 1)


def test_a_training_that_fails_does_not_hide_whether_the_server_starts(tmp_path):
    fails = (python("raise SystemExit('this does not fit')"), dict, "")
    plan = {"train": fails, "serve": (python(""), lambda: {"ready_seconds": 9.0}, "")}
    report = first_hour.measure(plan, tmp_path, ABOUT, 1)
    assert report["stages"]["train"]["why"] == "this does not fit"
    assert report["stages"]["serve"]["result"] == {"ready_seconds": 9.0}
    plan = {"data": fails, "serve": plan["serve"]}
    report = first_hour.measure(plan, tmp_path / "other", ABOUT, 1)
    assert list(report["stages"]) == ["data"], "without 02 nobody knows which base to serve"


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"about": {}}', '{"about": [], '
                                  '"stages": {}}', '{"about": {}, "stages": {"one": 3}}', "{"])
def test_an_earlier_report_of_another_shape_is_one_line(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match="report.json .*(Delete|run the notebook)") as error:
        first_hour.measure({}, tmp_path, ABOUT, 1)
    assert "\n" not in str(error.value)


def test_the_limit_ends_a_stage_that_hangs_with_all_it_started(tmp_path):
    note = tmp_path / "pid"
    code = (f"import subprocess, time; child = subprocess.Popen(['sleep', '600'])\n"
            f"open({str(note)!r}, 'w').write(str(child.pid)); print('waits', flush=True); "
            "time.sleep(600)")
    start = time.monotonic()
    report = first_hour.measure({"hangs": (python(code), dict, "")}, tmp_path, ABOUT, 5 / 60)
    assert report["stages"]["hangs"]["status"] == "stopped" and time.monotonic() - start < 40
    pid = int(note.read_text())
    for _ in range(100):  # killed, and on a busy machine not yet gone
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie":
            return
        time.sleep(0.1)
    raise AssertionError(f"{pid} still runs")
