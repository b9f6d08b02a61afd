"""Several adapters on one server: what is refused, the command, and vLLM's own arithmetic."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import random_gemma
from conftest import ROOT, SERVE, a_recipe, a_server_record, needs_serve, program
from safetensors.numpy import save_file

import serving
from helpers import merge
from serving import Options, asking, commands
from serving import options as serve
from tables import architecture
from tables.errors import UserError

PREFIX, ALPHA = "model.language_model.", 8.0
ASSETS = ROOT / "assets" / "tiny_gemma4"
VLLM_HEADS = {"head_dim": 32, "global_head_dim": 64}  # its CPU attention takes no 16


def draw(config, rank, seed):
    """(targets, adapters) of a config: random A and B."""
    rng = np.random.default_rng(seed)
    targets = architecture.modules(config)
    pairs = {}
    for target in targets:
        shapes = target.adapter(rank)
        pairs[target.path] = tuple(np.float32(0.1 * rng.normal(size=shape)) for shape in shapes)
    return targets, pairs


def write_adapter(folder, config, rank=4, seed=0):
    """A PEFT folder as 04 writes it."""
    targets, pairs = draw(config, rank, seed)
    recipe = a_recipe(rank=rank, alpha=ALPHA, n_modules=len(targets))
    merge.write_adapter(folder, targets, pairs, recipe, PREFIX)
    return str(folder)


@pytest.fixture
def options(tmp_path):
    model = random_gemma.write(tmp_path / "model", random_gemma.TINY)
    adapters = (f"one={write_adapter(tmp_path / 'one', random_gemma.TINY, rank=4)}",
                f"two={write_adapter(tmp_path / 'two', random_gemma.TINY, rank=12, seed=1)}")
    return Options(model=str(model), name="base", adapters=adapters)


# ── What is refused ──

def refused(options, words):
    with pytest.raises(UserError, match=words) as caught:
        serve.check(options)
    assert "\n" not in str(caught.value)


def test_two_of_their_own_base_are_served(options):
    serve.check(options)
    words = commands.command(options)
    begin = words.index("--lora-modules")
    modules = [json.loads(word) for word in words[begin + 1:begin + 3]]
    assert [module["name"] for module in modules] == ["one", "two"]
    assert words[words.index("--max-loras") + 1] == "2"
    assert words[words.index("--max-lora-rank") + 1] == "16"  # of ranks 4 and 12


def test_each_has_a_name_of_its_own(options):
    one, two = options.adapters
    folder = one.partition("=")[2]
    refused(replace(options, adapters=(one, f"one={folder}")), "two models would be called 'one'")
    refused(replace(options, adapters=(f"base={folder}",)), "two models would be called 'base'")
    for odd in (folder, "name=", f"={folder}"):
        refused(replace(options, adapters=(odd,)), 'write each as "NAME=FOLDER"')


@pytest.mark.parametrize("change, words", [
    ({"hidden_size": 96}, r"layers.0.mlp.down_proj is \[96, 128\], there it is \[64, 128\]"),
    ({"intermediate_size": 160}, r"layers.0.mlp.down_proj is \[64, 160\]"),
    ({"num_hidden_layers": 12,
      "layer_types": random_gemma.TINY["layer_types"] * 2}, r"layers.\d+.* there is none")])
def test_an_adapter_of_another_base_is_refused(options, tmp_path, change, words):
    other = write_adapter(tmp_path / "other", random_gemma.TINY | change)
    refused(replace(options, adapters=(f"other={other}",)),
            f"was trained for another base than .*{words}.*Serve it with its own base")


def test_a_damaged_adapter_is_refused(options, tmp_path):
    folder = options.adapter_folders["one"]
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{{{{{")
    refused(options, f"{folder}/adapter_model.safetensors is damaged")


def test_matrices_that_only_others_train_are_left_to_vllm(options, tmp_path):
    """Unsloth trains E2B's gates of inputs per layer, too."""
    folder = tmp_path / "more"
    shutil.copytree(tmp_path / "one", folder)
    name = "base_model.model.model.language_model.layers.0.per_layer_input_gate.lora_A.weight"
    save_file({name: np.zeros((4, 7), np.float32)}, folder / "adapter_model.safetensors")
    serve.check(replace(options, adapters=(f"more={folder}",)))


def test_a_server_that_takes_none_while_it_runs_says_what_to_do(options, tmp_path):
    folder = options.adapter_folders["two"]
    plain = replace(a_server_record("http://127.0.0.1:1"), model=options.model)
    with pytest.raises(UserError, match="takes no adapters while it runs. Start it with at least"):
        asking.load_adapter(plain, "late", folder)
    words = commands.command(replace(options, adapters=options.adapters[:1]))
    ready = replace(plain, environment=[asking.RUNTIME], command=words)
    large = write_adapter(tmp_path / "large", random_gemma.TINY, rank=64)
    with pytest.raises(UserError, match="has rank 64, and this server was started for 8 at most"):
        asking.load_adapter(ready, "late", large)
    other = write_adapter(tmp_path / "other", random_gemma.TINY | {"hidden_size": 96})
    with pytest.raises(UserError, match="was trained for another base"):
        asking.load_adapter(ready, "late", other)
    with pytest.raises(UserError, match="no server answers"):
        asking.load_adapter(ready, "late", options.adapter_folders["one"])


# ── vLLM's own arithmetic ──

def log_probabilities(record, name, ids):
    """Of each prompt token but the first, by a server's model of this name."""
    body = {"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    entries = asking.post(record, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    pairs = zip(entries[1:], ids[1:], strict=True)
    return np.array([entry[str(token)]["logprob"] for entry, token in pairs])


@needs_serve
@pytest.mark.slow
def test_each_adapter_computes_what_its_own_merged_model_does(tmp_path):
    """Two from the start, a third while the server runs; the base stays the base."""
    config = random_gemma.TINY | VLLM_HEADS | {"vocab_size": 1280}
    base = random_gemma.write(tmp_path / "base", config, dtype=np.float32, tokenizer=ASSETS)
    ids = np.random.default_rng(3).integers(300, 1280, 60).tolist()
    float32 = ("--dtype", "float32")
    names, folders = ("first", "second", "third"), {}
    for seed, name in enumerate(names):
        targets, pairs = draw(config, 4, seed)
        folders[name] = write_adapter(tmp_path / name, config, 4, seed)
        plan = merge.plan_merge(targets, pairs, PREFIX)
        merge.merge_model(base, tmp_path / f"{name} merged", plan, ALPHA / 4)
    adapters = tuple(f"{name}={folders[name]}" for name in names[:2])
    options = Options(model=str(base), name="base", adapters=adapters, max_model_len=256,
                      flags=float32, environment=(asking.RUNTIME,))
    served = {}
    with serving.running(options, tmp_path / "serve"):
        record = serving.server.current(tmp_path / "serve")
        served["base"] = log_probabilities(record, "base", ids)
        with pytest.raises(UserError, match="third.*does not exist"):
            log_probabilities(record, "third", ids)
        asking.load_adapter(record, "third", folders["third"])
        for name in names:
            served[name] = log_probabilities(record, name, ids)
        again = log_probabilities(record, "first", ids)
        np.testing.assert_allclose(again, served["first"], atol=1e-5)
    job = {"dtype": "float32", "prompts": [ids]}
    job["folders"] = {name: str(tmp_path / f"{name} merged") for name in names}
    job["folders"]["base"] = str(base)
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = program(SERVE, "tests/merge_parity.py", tmp_path / "job.json", "bases",
                   tmp_path / "bases.npz")
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = np.load(tmp_path / "bases.npz")
    for name, found in served.items():
        wanted = theirs[name][np.arange(len(ids) - 1), ids[1:]]
        assert np.abs(found - wanted).max() < 1e-3, name
        others = [other for key, other in served.items() if key != name]
        assert min(np.abs(found - other).max() for other in others) > 0.05, name
