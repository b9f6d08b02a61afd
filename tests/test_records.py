"""The files that travel between pages: read, checked, written, and what a damaged one is told."""

import dataclasses
import json

import pytest
from conftest import ROOT, a_data_meta, a_recipe, load

from helpers import merge, packing, records
from helpers.run import UserError

MERGE = records.Merge(
    inputs={"step": 20, "base": "b"}, step=20, scale=2.0, base="base", recipe=a_recipe(),
    files={"model.safetensors": "0"}, adapter_files={"adapter_model.safetensors": "1"},
    norms=[{"tensor": "x", "base": 1.0, "delta": 0.1, "rounding": 0.01}])
ALL = [a_data_meta(), a_recipe(), a_recipe(adapter_sha256="a", system=None), MERGE]
FORMS = pytest.mark.parametrize("record", ALL, ids=["data", "recipe", "full recipe", "merge"])


def refused(record, path, text):
    """What `load` says about a file with this text: one line that names the file and the page."""
    path.write_text(text)
    with pytest.raises(UserError) as error:
        type(record).load(path)
    said = str(error.value)
    assert len(said.splitlines()) == 1 and str(path) in said, said
    assert f"Run {record.PAGE} again" in said, said
    return said


@FORMS
def test_what_is_written_is_read_again(record, tmp_path):
    record.save(tmp_path / "file.json")
    assert type(record).load(tmp_path / "file.json") == record
    place = tmp_path.joinpath(*record.PLACE)  # in its place, it's found by the run directory
    record.save(place)
    assert type(record).load(tmp_path) == record
    assert place.read_bytes() == (tmp_path / "file.json").read_bytes()


@FORMS
@pytest.mark.parametrize("text", ["", "[]", "3", "null", '"text"', '{"size": "ti', "\x00" * 9,
                                  "[" * 100_000, "{}"])
def test_another_thing_than_a_record_is_one_line(record, tmp_path, text):
    refused(record, tmp_path / "file.json", text)


def wrong_values(name, right):
    """Values of other types than a field's right one."""
    values = [1, True, "1", [1], {"a": {}}]
    fits = {"inputs": dict, "system": str, "partial": bool}.get(name, type(right))
    values = [value for value in values if type(value) is not fits or name in ("files", "dropped")]
    return [value for value in values if not (fits is float and type(value) is int)]


@FORMS
def test_each_missing_and_each_misshapen_field_is_named(record, tmp_path):
    whole = record.to_json()
    for name in whole:
        fewer = {key: value for key, value in whole.items() if key != name}
        if name != "adapter_sha256":  # the one that older files lack
            said = refused(record, tmp_path / "file.json", json.dumps(fewer))
            assert repr(name) in said
        for wrong in wrong_values(name, whole[name]):
            said = refused(record, tmp_path / "file.json", json.dumps(whole | {name: wrong}))
            assert repr(name) in said


def test_a_damaged_recipe_inside_merge_json_sends_the_reader_to_04(tmp_path):
    whole = MERGE.to_json()
    whole["recipe"]["rank"] = "64"
    said = refused(MERGE, tmp_path / "merge.json", json.dumps(whole))
    assert "'recipe'" in said and "'rank'" in said and "whole number" in said


@FORMS
def test_names_that_nobody_knows_do_no_harm(record, tmp_path):
    (tmp_path / "file.json").write_text(json.dumps(record.to_json() | {"later": 1}))
    assert type(record).load(tmp_path / "file.json") == record


def test_a_missing_file_names_the_page_that_writes_it(tmp_path):
    for record in ALL:
        with pytest.raises(UserError, match=f"is missing. Run {record.PAGE} first"):
            type(record).load(tmp_path)


def test_a_wrong_value_is_found_before_it_is_written(tmp_path):
    with pytest.raises(TypeError, match="rank is \"64\", which should be a whole number"):
        a_recipe(rank="64").save(tmp_path / "recipe.json")
    assert not (tmp_path / "recipe.json").exists()


def test_every_setting_of_02_is_a_field_of_its_record():
    settings = load("02_data.py", "Settings")
    names = {field.name for field in dataclasses.fields(settings)}
    assert names <= {field.name for field in dataclasses.fields(records.DataMeta)}


def test_rules_that_are_spelled_once():
    recipe, data = a_recipe(rank=4, alpha=2.0), a_data_meta()
    assert recipe.scale == 0.5 and not recipe.thinking and a_recipe(reasoning="kept").thinking
    assert recipe.system_messages == [{"role": "system", "content": "s"}]
    assert a_recipe(system=None).system_messages == a_recipe(system="").system_messages == []
    assert recipe.asked_otherwise(data) == []
    changed = a_data_meta(reasoning="kept", template_sha256="u", fill=0.1)
    assert recipe.asked_otherwise(changed) == ["reasoning", "template_sha256"]


def test_no_page_reads_one_of_the_files_as_a_dict():
    """Else a renamed field would be found where it's used, hours later."""
    names = ("recipe.json", "meta.json", "merge.json")
    for path in [*ROOT.glob("*.py"), *ROOT.glob("helpers/*.py"), *ROOT.glob("serving/*.py"),
                 *ROOT.glob("appendix/*.py"), *ROOT.glob("tools/*.py")]:
        lines = path.read_text().splitlines()
        reads = [line for line in lines if "read_json" in line and any(n in line for n in names)]
        assert not reads, (path.name, reads)


def test_04_goes_on_where_its_own_file_is_torn(tmp_path, monkeypatch, capsys):
    """04 is the page that writes merge.json, so a torn one can't stop it."""
    import pandas as pd
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setattr(merge.weights, "fingerprint", lambda base: "b")
    monkeypatch.setattr(merge, "plan_merge", lambda *parts: {})
    monkeypatch.setattr(merge, "write_adapter", lambda *parts: None)
    norms = pd.DataFrame(columns=["tensor", "base", "delta", "rounding"])
    monkeypatch.setattr(merge, "merge_model", lambda *parts: norms)
    (tmp_path / "merged").mkdir()
    (tmp_path / "adapter").mkdir()
    for text in ("", '{"inputs": {', "[]", "3", "{}"):
        (tmp_path / "merge.json").write_text(text)
        record = merge.run("base", [], {}, 20, a_recipe(), "model.")
        assert records.Merge.load(tmp_path) == record
    assert "is current" not in capsys.readouterr().out
    assert merge.run("base", [], {}, 20, a_recipe(), "model.") == record
    assert "is current" in capsys.readouterr().out


def test_what_02_saves_can_be_loaded_or_is_not_saved(tmp_path):
    parts = {"train": {}, "val": {}}
    for facts in ({"size": "tiny"}, a_data_meta().to_json() | {"rows": "4000"}):
        with pytest.raises(UserError, match="02_data.py"):
            packing.save_data(tmp_path / "data", parts, [], facts)
        assert not (tmp_path / "data").exists()
    packing.save_data(tmp_path / "data", parts, [], a_data_meta().to_json() | {"more": 1})
    assert json.loads((tmp_path / "data" / "meta.json").read_text())["more"] == 1
    assert packing.check_data(tmp_path / "data").size == "tiny"
