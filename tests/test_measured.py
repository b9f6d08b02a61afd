"""Reports that readers send: what a run leaves, read back beside the predictions.

Every report here is made up, and says so.
"""

import csv
import json

import pytest
import readme_figure
from conftest import ROOT, a_comparison, a_recipe

from helpers import report as reports
from tables import measured, stored
from tables.errors import UserError


def made_up(row, **changes):
    """A made-up report of a compiled row: a tenth slower than 08 predicts, at two micro-batches."""
    fsdp, tp = (row["mesh"] or "2x4").split("x")
    seconds = float(row["seconds_predicted"]) / int(row.get("micro_batches") or 1)
    return {
        "series": "gemma4-on-tpu", "form": 1, "made_up": True, "outcome": "done", "about": {
            "slice": "v5e-8", "size": "31b", "commit": "0123abcdef", "mesh": [int(fsdp), int(tp)],
            "remat": row["remat"], "base_dtype": row["base_dtype"], "micro_batches": 2,
            "micro_rows": int(row["micro_batch"]), "sequence_length": int(row["sequence_length"])},
        "measured": {"step_seconds": 2.2 * seconds,
                     "real_tokens_per_second": float(row["tokens_per_second_predicted"]) / 1.1,
                     "pass_at_1_tuned": 0.5}} | changes


@pytest.fixture
def folder(tmp_path):
    row = stored.compiled_rows("v5e-8", "31b")[0]
    (tmp_path / "v5e-8_31b.json").write_text(json.dumps(made_up(row)))
    return tmp_path


def test_a_report_stands_beside_the_predictions_without_a_change_of_code(folder):
    rows = measured.beside_predictions(folder)
    assert [row["what"] for row in rows] == ["micro batch seconds", "real tokens per second"]
    assert rows[0]["miss"] == pytest.approx(1 / 1.1 - 1, abs=1e-3)
    assert rows[1]["miss"] == pytest.approx(0.1, abs=1e-3)
    assert all("(made up)" in row["source"] and row["slice"] == "v5e-8" for row in rows)


def test_a_report_is_a_bar_of_the_figure(folder, tmp_path):
    bars = readme_figure.measured_bars(folder)
    assert [bar.label for bar in bars] == [
        "this series on a v5e-8, measured by a reader (made up)"]
    readme_figure.draw(bars, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert f"{bars[0].value:,.0f}" in text or str(round(bars[0].value)) in text


def test_no_report_has_come_back_or_the_readme_of_the_folder_says_so():
    found = measured.reports()
    text = (measured.FOLDER / "README.md").read_text()
    assert ("No report has come back yet" in text) == (not found)
    assert len(readme_figure.bars()) == 3 + len(readme_figure.measured_bars())


@pytest.mark.parametrize(("change", "says"), [
    ({"series": "another"}, "another series"), ({"form": 2}, "another form"),
    ({"measured": {"step_seconds": "fast"}}, "'step_seconds' is no number"),
    ({"measured": {"step_seconds": float("nan")}}, "'step_seconds' is no number"),
    ({"measured": {"speed": 1.0}}, "no field 'speed'"),
    ({"about": {"slice": "v5e-8", "size": 31, "commit": "0"}}, "about has no 'size'"),
    ({"about": []}, "")])
def test_what_is_no_report_is_named(folder, change, says):
    row = stored.compiled_rows("v5e-8", "31b")[0]
    (folder / "bad.json").write_text(json.dumps(made_up(row, **change)))
    with pytest.raises(UserError, match=f"bad.json is no report of a run: .*{says}"):
        measured.reports(folder)
    (folder / "bad.json").write_text("{")
    with pytest.raises(UserError, match="bad.json is no report"):
        measured.reports(folder)


def test_the_folder_itself_takes_nothing_made_up(folder, monkeypatch):
    monkeypatch.setattr(measured, "FOLDER", folder)
    (folder / "fields.csv").write_text((ROOT / "data/measured/fields.csv").read_text())
    with pytest.raises(UserError, match="v5e-8_31b.json says that it's made up"):
        measured.reports(folder)


def a_run(folder):
    """The files that pages 02 to 07 leave, with numbers that are made up."""
    texts = {
        "times.json": {"seconds": {"03_train": 100.0}},
        "train/machine.json": {"device_kind": "TPU v5 lite", "mesh": [4, 2], "micro_batches": 1,
                               "micro_rows": 4, "sequence_length": 2048, "remat": "DECODER",
                               "held_gib_per_device": 5.0, "peak_bytes_in_use": 2**33,
                               "load_seconds": 30.0, "compile_seconds": 200.0},
        "train/recipe.json": a_recipe(rank=64, dtype="bfloat16", base_dtype="int8").to_json(),
        "serve/ready.json": {"seconds": 2400.0},
        "eval/comparison.json": a_comparison().to_json()}
    for name, value in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    lines = [{"step": 0, "val_loss": 1.0}]
    lines += [{"step": step, "loss": 1.0, "seconds": 60.0 if step < 4 else 2.0,
               "real_tokens": 4000} for step in range(1, 8)]
    (folder / "train/log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "bench").mkdir()
    columns = ("input_len", "rate", "ttft_p50_ms", "tpot_p50_ms", "tpot_floor_ms", "output_tok_s")
    with open(folder / "bench/results.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns, (4096, 0.1, 900, 22, 10, 10), (1024, 0.1, 90, 20, 10,
                                    12), (1024, "inf", 9000, 60, 10, 300)])
    return folder


def test_a_run_becomes_a_report_that_reads_back(tmp_path):
    found = reports.collect(a_run(tmp_path / "run"), "done")
    assert found["measured"] == {
        "step_seconds": 2.0, "first_step_seconds": 60.0, "steps_measured": 4, "first_loss": 1.0,
        "last_loss": 1.0, "real_tokens_per_second": 2000.0, "load_seconds": 30.0,
        "compile_seconds": 200.0, "held_gib_per_device": 5.0, "peak_gib_per_device": 8.0,
        "server_ready_seconds": 2400.0, "ttft_p50_ms": 90.0, "tpot_p50_ms": 20.0,
        "tpot_floor_ms": 10.0, "output_tokens_per_second": 300.0, "pass_at_1_base": 0.5,
        "val_loss_before": 2.0, "val_loss_after": 1.0,
        "pass_at_1_tuned": 0.625, "problems": 156}
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent/one.json").write_text(json.dumps(found | {"made_up": True}))
    assert measured.reports(tmp_path / "sent")[0].values == found["measured"]


def test_a_report_of_an_int8_base_finds_its_prediction(tmp_path):
    """03 says in its recipe how it stored the base. Without that, a v5e-8 has no such row."""
    found = reports.collect(a_run(tmp_path / "run"))
    about = found["about"] | {"slice": "v5e-8", "size": "31b", "commit": "0123abcdef"}
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent/one.json").write_text(json.dumps(found | {"about": about, "made_up": True}))
    report = measured.reports(tmp_path / "sent")[0]
    row = measured.compiled_row(report)
    assert row is not None and row["base_dtype"] == "int8"
    a_recipe(dtype="bfloat16").save(tmp_path / "run/train/recipe.json")
    assert reports.collect(tmp_path / "run")["about"]["base_dtype"] == "bfloat16"


@pytest.mark.parametrize("lost", ["train/log.jsonl", "train/machine.json", "eval/comparison.json",
                                  "bench/results.csv", "serve/ready.json", "times.json"])
def test_what_did_not_run_is_missing_and_nothing_else(tmp_path, lost):
    whole = reports.collect(a_run(tmp_path / "whole"))["measured"]
    run = a_run(tmp_path / "run")
    (run / lost).write_text("{")  # cut short, as by a full disk
    if lost.endswith("csv"):
        (run / lost).unlink()
    rest = reports.collect(run)
    assert rest["measured"].items() <= whole.items()
    if lost != "times.json":
        assert len(rest["measured"]) < len(whole)
    assert reports.collect(tmp_path / "nothing")["measured"] == {}


@pytest.mark.parametrize("text", ["[]", "3", "null", "NaN", '"text"', "[" * 100_000, "\x00", "{}",
                                  '{"seconds": [], "stages": 3, "base": [1], "tuned": null}',
                                  '{"seconds": null, "stages": {"serve": []}, "base": {"pass@1": '
                                  '"0.5"}, "peak_bytes_in_use": "8 GB"}'])
def test_a_file_of_another_shape_is_as_if_it_were_missing(tmp_path, text):
    for lost in ("train/machine.json", "train/log.jsonl", "train/recipe.json", "times.json",
                 "serve/ready.json", "eval/comparison.json", "first_hour/report.json"):
        run = a_run(tmp_path / lost.replace("/", "_"))
        (run / lost).parent.mkdir(parents=True, exist_ok=True)
        (run / lost).write_text(text)
        for number in reports.collect(run)["measured"].values():
            assert measured.is_number(number), lost


def test_a_run_with_int8_products_is_compared_with_no_row_of_another_program(folder):
    path, = folder.glob("*.json")
    report = json.loads(path.read_text())
    assert len(measured.beside_predictions(folder)) == 2
    report["about"]["int8_products"] = True
    path.write_text(json.dumps(report))
    assert measured.beside_predictions(folder) == []


def test_a_report_names_no_account_and_no_path(tmp_path):
    text = json.dumps(reports.collect(a_run(tmp_path / "run"), "done"))
    assert str(tmp_path) not in text and str(ROOT) not in text
