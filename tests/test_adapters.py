"""Several adapters on one server: what is refused, the command, and vLLM's own arithmetic."""

import json
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import random_gemma
from conftest import ROOT, SERVE, a_recipe, a_server_record, needs_serve, program
from conftest import serve as run_serve
from safetensors.numpy import save_file

import serving
from helpers import four_bits, merge
from serving import Options, asking, commands
from serving import options as serve
from tables import architecture
from tables.errors import UserError

PREFIX, ALPHA = "model.language_model.", 8.0
ASSETS = ROOT / "assets" / "tiny_gemma4"
VLLM_HEADS = {"head_dim": 32, "global_head_dim": 64}  # its CPU attention takes no 16
MOE = random_gemma.TINY | {  # what the 26B-A4B has beside the others: experts
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


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


def peft_folder(folder, shapes, rank=4, **config):
    """A PEFT folder with zeros, for {module: (out, in)} by their whole names."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        start = f"base_model.model.{name}"
        tensors[f"{start}.lora_A.weight"] = np.zeros((rank, inputs), np.float32)
        tensors[f"{start}.lora_B.weight"] = np.zeros((outputs, rank), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    whole = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return str(folder)


def of_shared_layers(folder):
    """An adapter of every matrix that google's E2B holds, as PEFT made it until April 2026."""
    tensors = random_gemma.tensors(random_gemma.E2B)
    shapes = {name.removesuffix(".weight"): shape for name, shape in tensors.items()
              if name.endswith("_proj.weight") and "model_proj" not in name}
    return peft_folder(folder, shapes)


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


def test_keys_and_values_of_layers_that_share_them_are_no_other_base(tmp_path):
    """transformers had these modules until April 2026, and google's files still hold them."""
    model = random_gemma.write(tmp_path / "model", random_gemma.E2B, keep_unused=False)
    adapter = of_shared_layers(tmp_path / "adapter")
    options = Options(model=str(model), adapters=(f"a={adapter}",))
    serve.check(options)
    wide = {"model.language_model.layers.5.self_attn.k_proj": (64, 64)}
    wide = peft_folder(tmp_path / "wide", wide)
    refused(replace(options, adapters=(f"a={wide}",)),
            r"layers.5.self_attn.k_proj is \[64, 64\], there it is \[32, 64\]")


def test_a_base_in_four_bits_has_the_same_shapes_but_not_on_a_tpu(options, tmp_path):
    four_bits.export(options.model, tmp_path / "packed")
    packed = replace(options, model=str(tmp_path / "packed"))
    serve.check(packed)
    serve.check(replace(packed, engine="gpu-docker"))
    tpu = replace(packed, engine="tpu-docker", implementation="vllm")
    refused(tpu, "has its weights in four bits .W4A16., .*Serve the adapters with the base in")
    serve.check(replace(tpu, model=options.model))
    other = write_adapter(tmp_path / "other", random_gemma.TINY | {"hidden_size": 96})
    refused(replace(packed, adapters=(f"other={other}",)), "was trained for another base")


def test_a_model_that_only_training_refuses_is_left_to_vllm(options, tmp_path):
    path = Path(options.model) / "config.json"
    path.write_text(json.dumps(MOE))
    serve.check(options)
    other = write_adapter(tmp_path / "other", random_gemma.TINY | {"hidden_size": 96})
    refused(replace(options, adapters=(f"other={other}",)), "was trained for another base")
    for config in ({"model_type": "llama"}, {"text_config": 3},
                   random_gemma.TINY | {"attention_bias": True}):
        path.write_text(json.dumps(config))
        serve.check(replace(options, adapters=(f"other={other}",)))


def test_an_adapter_without_weights_or_of_another_family_is_one_line(options, tmp_path):
    folder = tmp_path / "other"
    peft_folder(folder, {"transformer.h.0.attn.c_attn": (192, 64)})
    other = replace(options, adapters=(f"other={folder}",))
    refused(other, "none of its names belongs to a Gemma 4's language model")
    vision = peft_folder(tmp_path / "vision", {
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear": (64, 64)})
    refused(replace(options, adapters=(f"v={vision}",)), "none of its names belongs")
    (folder / "adapter_model.safetensors").unlink()
    refused(other, "has no adapter_model.safetensors, so there's nothing to serve")
    (folder / "adapter_model.bin").write_bytes(b"PyTorch's")  # vLLM reads it
    serve.check(other)


def test_the_adapter_s_own_word_about_its_base_is_repeated_if_it_is_another(
        options, tmp_path, capsys):
    shapes = {"model.layers.0.mlp.up_proj": (128, 64)}

    def said(base, model):
        folder = tmp_path / f"of {len(list(tmp_path.iterdir()))}"
        adapter = peft_folder(folder, shapes, base_model_name_or_path=base)
        serve.check_adapter(adapter, str(model))
        return capsys.readouterr().out

    hub = tmp_path / "models--google--gemma-4-E2B-it" / "snapshots" / "0a1b"
    random_gemma.write(hub, random_gemma.TINY)
    assert said("google/gemma-4-E2B-it", hub) == said("", hub) == said(None, hub) == ""
    assert "was trained on google/gemma-4-E2B: make sure" in said("google/gemma-4-E2B", hub)
    assert said("a/model", options.model) == said("/b/model/", options.model) == ""


def test_a_larger_rank_in_the_pattern_is_the_rank(options, tmp_path):
    """vLLM refuses the adapter, and does not start, if --max-lora-rank is less."""
    shapes = {"model.layers.0.mlp.up_proj": (128, 64)}
    folder = peft_folder(tmp_path / "pattern", shapes, rank=4, rank_pattern={"up_proj": 24})
    words = commands.command(replace(options, adapters=(f"a={folder}",)))
    assert words[words.index("--max-lora-rank") + 1] == "32"
    for pattern, words in (({"up_proj": 0}, "names no rank r, or one in rank_pattern"),
                           ({"up_proj": 1024}, "has rank 1024, and vLLM serves at most 512")):
        other = peft_folder(tmp_path / str(pattern), shapes, rank_pattern=pattern)
        refused(replace(options, adapters=(f"a={other}",)), words)


def test_a_measurement_without_adapters_is_none_of_a_server_with_them():
    """--enable-lora adds work to every matrix, even for requests to the base."""
    plain, adapted = Options(model="m"), Options(model="m", adapters=("x=y",))
    assert plain.measured() != adapted.measured() == Options(
        model="m", adapters=("x=y",), name="n", port=3).measured()
    assert "adapters" not in plain.measured(), "or no stored measurement would count any more"


# ── While it runs ──

def ready(options, **changes):
    """The record of a server that takes adapters while it runs, and that nobody started."""
    record = replace(a_server_record("http://127.0.0.1:1"), model=options.model,
                     environment=[asking.RUNTIME], command=commands.command(options))
    return replace(record, **changes)


def loads(record, adapter, words="no server answers"):
    """It's refused in these words; by default, the server is asked."""
    with pytest.raises(UserError, match=words) as caught:
        asking.load_adapter(record, "late", adapter)
    assert "\n" not in str(caught.value)


def test_a_container_only_has_the_adapters_of_its_start(options):
    container = replace(options, engine="gpu-docker", environment=(asking.RUNTIME,))
    record = ready(container, environment=[], container="gemma4-vllm-1a2b")
    for folder in (options.adapter_folders["one"], "/adapters/0"):
        loads(record, folder, "only has the adapters named at its start. Name this one in adapters")


def test_the_variable_is_read_as_vllm_reads_it(options, monkeypatch):
    adapter, name = options.adapter_folders["one"], asking.RUNTIME.partition("=")[0]
    for value in ("1", "true", "True", " TRUE "):
        loads(ready(options, environment=[f"{name}={value}"]), adapter)
    for value in ("", "0", "yes", "11"):
        loads(ready(options, environment=[f"{name}={value}"]), adapter, "takes no adapters while")
    loads(ready(options, environment=[f"{name}=1", f"{name}=0"]), adapter, "takes no adapters")
    loads(ready(options, environment=[f"A{name}=1"]), adapter, "takes no adapters")
    monkeypatch.delenv(name, raising=False)
    loads(ready(options, environment=[name]), adapter)  # the shell that started it had it
    for value, words in (("true", "no server answers"), ("0", "takes no adapters")):
        monkeypatch.setenv(name, value)
        loads(ready(options, environment=[name]), adapter, words)


TWICE = (("--max-lora-rank", "64"), ("--max-lora-rank=64",), ("--max_lora_rank", "64"),
         ("--max_lora_rank=8", "--max-lora-rank=64"))


@pytest.mark.parametrize("flags", TWICE)
def test_of_two_largest_ranks_the_last_one_counts(options, tmp_path, flags):
    large = write_adapter(tmp_path / "large", random_gemma.TINY, rank=64)
    larger = write_adapter(tmp_path / "larger", random_gemma.TINY, rank=65)
    loads(ready(options), large, "has rank 64, and this server was started for 16 at most")
    record = ready(replace(options, flags=flags))
    loads(record, large)
    loads(record, larger, "has rank 65, and this server was started for 64 at most")


def test_a_server_gets_the_whole_path_whatever_folder_it_stands_in(options, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(asking, "request", lambda record, path, payload: asked.append(payload))
    monkeypatch.chdir(tmp_path)
    asking.load_adapter(ready(options), "late", "one")
    assert asked == [{"lora_name": "late", "lora_path": str(tmp_path / "one")}]


# ── What PEFT writes, and what vLLM says of it ──

ELSEWHERE = """
import json, sys
from types import SimpleNamespace
sys.path.insert(0, ".")
from serving.vllm_cpu import patch_version
patch_version()
from peft import LoraConfig, get_peft_model
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.models import gemma4
from vllm.utils.argparse_utils import FlexibleArgumentParser
job = json.load(sys.stdin)
for folder, (config, settings) in job["write"].items():
    model = Gemma4ForCausalLM(Gemma4TextConfig(**config))
    get_peft_model(model, LoraConfig(**settings)).save_pretrained(folder)
theirs = gemma4.Gemma4ForCausalLM
expected = {"o_proj", "down_proj"}.union(*theirs.packed_modules_mapping.values())
told = {}
for folder, rank in job["read"].items():
    try:
        helper = PEFTHelper.from_local_dir(folder, None)
        helper.validate_legal(SimpleNamespace(max_lora_rank=rank))
        loaded = LoRAModel.from_local_checkpoint(
            folder, expected, helper, lora_model_id=1, device="cpu",
            weights_mapper=theirs.hf_to_vllm_mapper.get_rename_mapper())
        told[folder] = sorted(loaded.loras)
    except ValueError as error:
        told[folder] = str(error)
ranks = []
for flags in job["flags"]:
    parser = FlexibleArgumentParser()
    parser.add_argument("--max-lora-rank", type=int)
    ranks.append(parser.parse_args(["--max-lora-rank", "16", *flags]).max_lora_rank)
print(json.dumps([told, ranks]))
"""


@needs_serve
def test_peft_s_own_adapters_and_what_vllm_says_of_them(tmp_path):
    settings = {"r": 4, "target_modules": r".*\.(q_proj|up_proj)"}
    write = {"moe": (MOE, settings),
             "pattern": (random_gemma.TINY, settings | {"rank_pattern": {"up_proj": 24}}),
             "dora": (random_gemma.TINY, settings | {"use_dora": True})}
    read = {"moe": 8, "pattern": 8, "dora": 8, "shared": 8}
    of_shared_layers(tmp_path / "shared")
    job = {"write": {str(tmp_path / name): value for name, value in write.items()},
           "read": {str(tmp_path / name): value for name, value in read.items()}, "flags": TWICE}
    done = program(SERVE, "-c", ELSEWHERE, stdin=json.dumps(job), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-2000:]
    told, ranks = json.loads(done.stdout.splitlines()[-1])
    told = {Path(folder).name: value for folder, value in told.items()}
    assert ranks == [64] * len(TWICE), "of two, vLLM takes the last"

    names = [f"model.layers.{layer}.{name}" for layer in range(6)
             for name in ("mlp.up_proj", "self_attn.q_proj")]
    assert told["moe"] == names
    assert "LoRA rank 24 is greater than max_lora_rank 8" in told["pattern"]
    assert "DoRA" in told["dora"]
    assert "model.layers.5.self_attn.k_proj" in told["shared"], "vLLM keeps the name"

    tiny = random_gemma.write(tmp_path / "tiny", random_gemma.TINY)
    moe = tmp_path / "base of moe"
    moe.mkdir()
    (moe / "config.json").write_text(json.dumps({"text_config": MOE}))
    serve.check(Options(model=str(moe), adapters=(f"a={tmp_path}/moe",)))
    serve.check(Options(model=str(tiny), adapters=(f"a={tmp_path}/pattern",)))
    assert serve.adapter_rank(f"{tmp_path}/pattern") == 24
    refused(Options(model=str(tiny), adapters=(f"a={tmp_path}/dora",)),
            "is a DoRA, which vLLM doesn't serve. Merge it into its base")


# ── vLLM's own arithmetic ──

FOUR_BITS = """
import json, sys
sys.path.insert(0, ".")
from serving.vllm_cpu import patch_version
patch_version()
import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper import get_punica_wrapper
from vllm.lora.utils import from_layer
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig)
folder, method = sys.argv[1], json.loads(sys.argv[2])
job = {name: torch.tensor(value) for name, value in np.load(folder + "/job.npz").items()}
torch.set_default_dtype(torch.bfloat16)
lora = LoRAConfig(max_lora_rank=8, max_loras=2, lora_dtype=torch.bfloat16)
answers = {}
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(1, 0, f"file://{folder}/meet", 0, backend="gloo")
    initialize_model_parallel(1, 1)
    layer = RowParallelLinear(128, 64, bias=False, prefix="model.layers.0.mlp.down_proj",
                              quant_config=CompressedTensorsConfig.from_config(method))
    for name in ("weight_packed", "weight_scale", "weight_shape"):
        getattr(layer, name).data.copy_(job[name])
    layer.quant_method.process_weights_after_loading(layer)
    adapted = from_layer(layer, 2, lora, [], None)
    punica = get_punica_wrapper(64, max_batches=8, device="cpu", lora_config=lora)
    adapted.set_mapping(punica)
    for slot in (0, 1):
        adapted.set_lora(slot, job["a"][slot].bfloat16(), job["b"][slot].bfloat16())
    for name, ids in {"base": (0, 0), "both": (1, 2), "mixed": (1, 0)}.items():
        of_tokens = (ids[0],) * 4 + (ids[1],) * 4
        punica.update_metadata(LoRAMapping(of_tokens, ids, is_prefill=True),
                               [1, 2], 3, 320)
        answers[name] = adapted(job["x"].bfloat16())[0].float().numpy()
np.savez(folder + "/answers.npz", **answers)
"""


@needs_serve
@pytest.mark.skipif(platform.machine() != "x86_64"
                    or "avx512f" not in Path("/proc/cpuinfo").read_text(),
                    reason="vLLM's four-bit kernel for CPUs needs AVX-512, which this CPU lacks")
def test_vllm_adds_adapters_to_a_matrix_in_four_bits(tmp_path):
    """And on a CPU it adds the last one to the base's tokens, if both are in one step.

    That's github.com/vllm-project/vllm/pull/48421, which isn't merged.
    """
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(64, 128)) / 11
    numbers, scales = four_bits.quantize(matrix)
    packed = four_bits.pack(numbers)
    x, a, b = (rng.normal(size=size) for size in ((8, 128), (2, 8, 128), (2, 64, 8)))
    a /= 11
    np.savez(tmp_path / "job.npz", weight_packed=packed, weight_scale=scales.astype(np.float32),
             weight_shape=[64, 128], x=x, a=a, b=b)
    run_serve("-c", FOUR_BITS, tmp_path, json.dumps(four_bits.METHOD))
    found = np.load(tmp_path / "answers.npz")
    base = x @ four_bits.restore(packed, scales).astype(np.float64).T
    first, second = (x @ (b[slot] @ a[slot]).T for slot in (0, 1))
    close = {"atol": 0.15, "rtol": 0.02}
    assert min(np.abs(first).mean(), np.abs(second).mean()) > 1
    np.testing.assert_allclose(found["base"], base, **close)
    np.testing.assert_allclose(found["both"][:4], (base + first)[:4], **close)
    np.testing.assert_allclose(found["both"][4:], (base + second)[4:], **close)
    np.testing.assert_allclose(found["mixed"][4:], (base + second)[4:], **close,
                               err_msg="mended? Then SERVING's sentence about it can go.")


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
