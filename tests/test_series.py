"""A finished tiny run: its files, its numbers, and that two engines agree on the merged model.

`./run_tests.sh` makes the run; RUN_DIR says where it is.
"""

import contextlib
import json
import re

import nbformat
import numpy as np
import psutil
import pytest
from conftest import ROOT, RUN, files_with_secrets, needs_serve, serve

from helpers import chat, gemma, packing, records

pytestmark = [pytest.mark.series, pytest.mark.skipif(
    not (RUN / "notebooks").is_dir(), reason=f"no run in {RUN}: ./run_all.sh makes one")]


def read(path):
    return json.loads((RUN / path).read_text())


def test_every_notebook_ran_without_an_error():
    for number in range(8):
        found = list((RUN / "notebooks").glob(f"{number:02d}_*.ipynb"))
        assert len(found) == 1
        for cell in nbformat.read(found[0], as_version=4).cells:
            if cell.cell_type == "code":
                assert cell.execution_count is not None, (found[0].name, cell.source[:80])
                assert not [o for o in cell.outputs if o.output_type == "error"]


def test_the_quickstart_taught_the_model_to_write_modules_that_pass():
    notebook = nbformat.read(RUN / "notebooks" / "00_quickstart.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    before, after = re.search(r"(\d+) of 38 before, (\d+) of 38 after", said).groups()
    assert int(before) == 0 and int(after) >= 20
    assert len(code) <= 17


def test_no_secret_is_shown():
    """run_tests.sh ran the series with recognizable values in the variables that hold secrets.

    It alone leaves run_all.log. A series without these values would pass whatever it shows.
    """
    if not (RUN / "run_all.log").exists():
        pytest.skip(f"no run_all.log in {RUN}: ./run_tests.sh runs the series with secrets")
    assert files_with_secrets(RUN) == []


def test_files_between_notebooks():
    for path in ("setup.json", "data/meta.json", "train/log.jsonl", "train/recipe.json",
                 "train/checkpoints", "merged/config.json", "merged/chat_template.jinja",
                 "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "merge.json",
                 "serve/server.log", "bench/results.csv", "eval/base/samples.jsonl",
                 "eval/tuned/samples.jsonl", "eval/base/summary.json", "eval/tuned/summary.json",
                 "eval/comparison.json"):
        assert (RUN / path).exists(), path
    packing.check_data(RUN / "data")
    for split in ("train", "val"):
        rows = {}
        for name, kind in (("tokens", np.int32), ("loss_mask", bool), ("segment_ids", np.int32),
                           ("positions", np.int32)):
            rows[name] = np.load(RUN / "data" / split / f"{name}.npy", mmap_mode="r")
            assert rows[name].dtype == kind and rows[name].ndim == 2
        assert len({array.shape for array in rows.values()}) == 1
        padding = rows["segment_ids"] == 0
        assert not (rows["loss_mask"] & padding).any(), "padding is never trained"


def test_fine_tuning_lifts_pass_at_1():
    comparison = read("eval/comparison.json")
    for name in ("base", "tuned"):
        assert {"pass@1", "pass@5", "n_problems"} <= set(comparison[name])
        assert comparison[name]["n_problems"] >= 30
    assert comparison["base"]["pass@1"] < 0.10
    assert comparison["tuned"]["pass@1"] >= 0.40  # 0.60 after the 180 steps of run_tests.sh


def test_the_loss_fell_and_the_recipe_traveled():
    log = [json.loads(line) for line in (RUN / "train/log.jsonl").read_text().splitlines()]
    losses = [row["val_loss"] for row in log if "val_loss" in row]
    assert len(losses) >= 3 and losses[-1] < 0.8 * losses[0]
    meta, recipe = records.DataMeta.load(RUN), records.Recipe.load(RUN)
    assert recipe.data_sha256 == meta.data_sha256
    assert recipe.template_sha256 == meta.template_sha256


def test_no_server_is_left_and_memory_stayed_small():
    record = RUN / "serve" / "server.json"
    if record.exists():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(json.loads(record.read_text())["pid"])
            assert process.status() == psutil.STATUS_ZOMBIE
    assert read("times.json")["peak_gib"] <= 8.0


@pytest.mark.slow
@needs_serve
def test_greedy_text_of_the_merged_model_is_the_same_in_vllm_and_in_jax(tmp_path):
    """Ten prompts, bfloat16 weights, both engines computing in float32."""
    tokenizer = chat.load_tokenizer(RUN / "merged")
    system = records.DataMeta.load(RUN).system_messages
    problems = sorted((ROOT / "data" / "tiny_eval").glob("*_prompt.txt"))[::3][:10]
    assert len(problems) == 10
    prompts = []
    for path in problems:
        messages = [*system, {"role": "user", "content": path.read_text()}]
        prompts.append([int(i) for i in chat.prompt_ids(tokenizer, messages)])
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"model": str(RUN / "merged"), "prompts": prompts,
                               "max_tokens": 160}))
    serve("tests/greedy_vllm.py", job, tmp_path / "vllm.json")
    config = gemma.config_from_hf(RUN / "merged", dtype="float32")
    mesh = gemma.make_mesh(config)
    stops = read("merged/generation_config.json")["eos_token_id"]
    ours = gemma.greedy(gemma.load_base(RUN / "merged", config, mesh), prompts, 160, stops, mesh)
    assert json.loads((tmp_path / "vllm.json").read_text()) == ours
    assert sum(map(len, ours)) > 200
