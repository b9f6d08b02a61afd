"""The files that travel between pages: read, checked, written, and what a damaged one is told."""

import dataclasses
import json
import math

import pytest
from conftest import ROOT, a_comparison, a_data_meta, a_recipe, load

from helpers import merge, packing, records, run
from helpers.run import UserError

MERGE = records.Merge(
    inputs={"step": 20, "base": "b"}, step=20, scale=2.0, base="base", recipe=a_recipe(),
    files={"model.safetensors": "0"}, adapter_files={"adapter_model.safetensors": "1"},
    norms=[{"tensor": "x", "base": 1.0, "delta": 0.1, "rounding": 0.01}])
CHAT = [{"role": "user", "content": "a counter"}]
ANSWERS = records.Answers(asked=CHAT, limit=160, before=".", after="module")
ALL = [a_data_meta(), a_recipe(), a_recipe(adapter_sha256="a", system=None), MERGE, ANSWERS,
       a_comparison()]
FORMS = pytest.mark.parametrize(
    "record", ALL, ids=["data", "recipe", "full recipe", "merge", "answers", "comparison"])


def refused(record, path, text):
    """What `load` says about a file with this text: one line that names the file and the page."""
    path.write_text(text)
    with pytest.raises(UserError) as error:
        type(record).load(path)
    said = str(error.value)
    assert len(said.splitlines()) == 1 and str(path) in said, said
    assert f"Run {record.PAGE} again" in said, said
    return said


def test_files_that_04_did_not_write_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    for name in ("merged", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.safetensors").write_text(name)
    merged, adapter = (run.hashes(tmp_path / name) for name in ("merged", "adapter"))
    written = dataclasses.replace(MERGE, files=merged, adapter_files=adapter)
    assert written.compare_files("merged") == written.compare_files("adapter") == 1
    (tmp_path / "adapter" / "b.safetensors").write_text("of another merge")
    assert written.compare_files("merged") == 1
    with pytest.raises(UserError, match="adapter is not what 04_merge wrote.*b.saf.*unexpected"):
        written.compare_files("adapter")


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


def test_a_recipe_and_norms_that_cannot_be_meant_are_named(tmp_path):
    for changes in ({"rank": 0}, {"rank": -1}, {"base_dtype": "fp8"}):
        text = json.dumps(a_recipe().to_json() | changes)
        assert repr(*changes) in refused(a_recipe(), tmp_path / "recipe.json", text)
        whole = MERGE.to_json()
        whole["recipe"] |= changes
        said = refused(MERGE, tmp_path / "merge.json", json.dumps(whole))
        assert "'recipe'" in said and repr(*changes) in said
    row = MERGE.norms[0]
    for bad in ({}, row | {"tensor": 3}, row | {"delta": None}, row | {"base": "1"}):
        text = json.dumps(MERGE.to_json() | {"norms": [row, bad] if bad else []})
        assert "'norms'" in refused(MERGE, tmp_path / "merge.json", text)


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


def test_a_comparison_without_what_is_quoted_is_named(tmp_path):
    best = a_comparison().against["comment"]
    for changes, named in (({"base": {"pass@1": 0.5}}, "n_problems"), ({"tuned": {}}, "pass@1"),
                           ({"against": {"comment": best | {"interval": [0.1]}}}, "interval"),
                           ({"against": {"comment": {"interval": [0.1, 0.2]}}}, "interval")):
        text = json.dumps(a_comparison().to_json() | changes)
        assert named in refused(a_comparison(), tmp_path / "comparison.json", text)


# Who reads JSON without a record, and why that's fine. Any other file gets a record, else a renamed
# field, or a file of another shape, would be found where it's used, hours later.
CHECKS_ITSELF = {
    "05_serve_vllm.py": 1,    # data/configs of the repository
    "09_tiny_base.py": 2,     # data/configs and assets of the repository
    "10_published.py": 1,     # data/configs
    "four_bits.py": 1,        # another shape counts as no export
    "own.py": 1,              # looks at the shape
    "first_hour.py": 2,       # looks at the shape; what its own child has just written
    "series.py": 1,           # a record
    "options.py": 4,          # a record; rank, vocabulary and model type look at the shape
}
# Who calls `json.loads`, which reads files as well.
LOADS_ITSELF = {
    "recipe.py": 2,           # stands alone; a tool's arguments, a row that it looks at
    "data.py": 1,             # rows, whose shape it looks at
    "own.py": 1,              # options that its log printed
    "weights.py": 2,          # a safetensors header and an index, which it checks
    "tools.py": 1,            # a tool's arguments
    "pretrain.py": 1,         # the history of a run that isn't finished
    "kept.py": 1,             # another shape counts as another notebook's file
    "checks.py": 1,           # what its own child has just printed
    "report.py": 1,           # files without a record: times, machine, ready, first hour
    "results.py": 1,          # a record
    "asking.py": 2,           # a server's answers
    "vllm_cpu.py": 1,         # what `load` sends it
    "load.py": 1,             # what vLLM's client has just saved
    "options.py": 2,          # a copy; a header, whose shape it looks at
    "qlora_runs.py": 1,       # stored runs of the repository
    "steps.py": 1,            # stored programs of the repository
    "rl_runs.py": 1,          # notes of the repository's adapters
    "readme_figure.py": 1,    # times.json, by its maintainer
    "snapshots.py": 1,        # looks at the shape
}


def test_no_page_reads_one_of_the_files_as_a_dict():
    read, loaded = {}, {}
    for folder in (".", "helpers", "serving", "verilog", "appendix", "tools"):
        for path in (ROOT / folder).glob("*.py"):
            text = path.read_text().replace("pd.read_json(", "")  # pandas' own
            if path.name in ("run.py", "records.py"):  # which define and check
                continue
            for counts, call in ((read, "read_json("), (loaded, "json.loads(")):
                if call in text:
                    counts[path.name] = counts.get(path.name, 0) + text.count(call)
    assert read == CHECKS_ITSELF
    assert loaded == LOADS_ITSELF


def refused_samples(path, value, text):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(UserError) as error:
        records.load_samples(path)
    said = str(error.value)
    assert len(said.splitlines()) == 1 and str(path) in said and text in said, said
    assert "Run 02_data.py" in said, said


def test_samples_of_another_shape_are_one_line_that_names_the_example(tmp_path):
    path = tmp_path / "samples.json"
    good = {"messages": CHAT, "answer": "module"}
    path.write_text(json.dumps([good, good]))
    assert records.load_samples(path) == [records.Sample(CHAT, "module")] * 2
    for value in ("", "{", "[" * 100_000, "\x00"):
        refused_samples(path, value, "is not valid JSON")
    for value in ("{}", "[]", "null", "NaN", "3", json.dumps({"samples": [good]})):
        refused_samples(path, value, "instead of a list of examples")
    for bad in (None, [], 3, "text", {}, {"messages": CHAT}, {"answer": "x"}, good | {"answer": 3},
                good | {"messages": None}, good | {"messages": {}}, good | {"messages": []},
                good | {"messages": ["text"]}, good | {"messages": [{}]},
                good | {"messages": [{"role": "user", "content": 3}]},
                good | {"messages": [{"role": None, "content": "x"}]}):
        refused_samples(path, [good, bad], "example 2 ")
    path.unlink()
    with pytest.raises(UserError, match="samples.json is missing. Run 02_data.py first"):
        records.load_samples(path)


def test_a_question_that_cannot_be_asked_is_one_line(tmp_path):
    for asked in ([], [{}], [{"role": "user", "content": None}], [{"role": 1, "content": "x"}]):
        text = json.dumps(ANSWERS.to_json() | {"asked": asked})
        assert "'asked'" in refused(ANSWERS, tmp_path / "answers.json", text)


def test_nan_is_no_number_unless_a_field_says_so(tmp_path):
    whole = a_recipe().to_json()
    for name in ("alpha", "learning_rate", "rank", "val_loss_after"):
        text = json.dumps(whole | {name: float("nan")})
        assert f"NaN as {name!r}" in refused(a_recipe(), tmp_path / "recipe.json", text)
    lost_log = a_recipe(val_loss_before=float("nan"))  # its log was lost, so nobody knows
    lost_log.save(tmp_path / "recipe.json")
    found = records.Recipe.load(tmp_path / "recipe.json")
    assert math.isnan(found.val_loss_before) and found.alpha == lost_log.alpha


def test_04_goes_on_where_its_own_file_is_torn(tmp_path, monkeypatch, capsys):
    """04 is the page that writes merge.json, so a torn one can't stop it."""
    import pandas as pd
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setattr(merge.weights, "fingerprint", lambda base: "b")
    monkeypatch.setattr(merge, "plan_merge", lambda *parts: {})
    monkeypatch.setattr(merge, "write_adapter", lambda *parts: None)
    norms = pd.DataFrame(MERGE.norms)
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
