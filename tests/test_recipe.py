"""recipe.py against 02 to 04, against transformers, and as a command that is killed and resumed."""

import dataclasses
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import random_gemma
from conftest import ROOT, SERVE, needs_serve
from filelock import FileLock
from flax import nnx
from safetensors.numpy import load_file, save_file

import recipe
from helpers import chat, data, gemma, merge, train
from helpers.run import UserError
from tables import architecture

pytestmark = pytest.mark.laboratory

ASSETS, RANK, ALPHA, STEPS = ROOT / "assets" / "tiny_gemma4", 8, 16.0, 20


@pytest.fixture(scope="module")
def chats():
    """160 answers of the tiny world as chats, one of them with a second turn."""
    with gzip.open(ROOT / "data" / "tiny" / "train.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for _, line in zip(range(170), file)]
    split = [(row["prompt"], *data.split_response(row["response"])[1:]) for row in rows]
    found = [[{"role": "user", "content": prompt.strip()}, {"role": "assistant", "content": answer}]
             for prompt, answer, problem in split if not problem][:160]
    found[0] += [{"role": "user", "content": "Noch größer."},
                 {"role": "assistant", "content": "No."}]
    return found


@pytest.fixture(scope="module")
def file(chats, tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in chats]
    path.write_text("".join(lines), "utf-8")
    return path


def test_ids_and_masks_are_those_of_02(chats, file):
    tokenizer = chat.load_tokenizer(ASSETS)
    read, held_out = recipe.read_chats(file, 0.0)
    assert read == chats and not held_out
    found = recipe.render(tokenizer, read, 4096)
    asked = [messages[:2] for messages in chats]
    asked.insert(1, chats[0])  # each answer is an example of its own
    wanted = chat.render_chats(tokenizer, asked)
    assert len(found) == len(chats) + 1
    for place, ((ids, mask), (ids_of_02, mask_of_02)) in enumerate(zip(found, wanted, strict=True)):
        assert ids == list(ids_of_02)
        assert place == 1 or mask == list(map(int, mask_of_02))  # there 02 trains both turns
    packed = recipe.pack(found, 512, 4)
    tokens, mask, segments, positions = packed.transpose(1, 0, 2)
    assert len(packed) % 4 == 0 and (segments > 0).mean() > 0.8
    assert sum(len(ids) for ids, _ in found) == (segments > 0).sum() == (tokens > 0).sum()
    assert mask.sum() == sum(sum(mask) for _, mask in found) and not mask[segments == 0].any()
    assert all((positions[segments == n] < 512).all() for n in (1, 2))


@pytest.mark.slow
def test_twenty_steps_and_the_merge_are_those_of_03_and_04(file, tmp_path):
    base = random_gemma.write(tmp_path / "base", random_gemma.SHALLOW | {"vocab_size": 1280})
    model, mesh = recipe.load_model(base, "float32")
    model, adapters, frozen = recipe.add_lora(model, mesh, RANK, ALPHA, seed=1)
    theirs = gemma.load_base(base, config := gemma.config_from_hf(base, dtype="float32"),
                             gemma.make_mesh(config, mesh.devices.shape))
    theirs = gemma.inject_lora(theirs, RANK, ALPHA, mesh)
    _, started, still = nnx.split(theirs, nnx.LoRAParam, ...)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(adapters)]
    assert names == [".".join(map(str, path)) for path, _ in nnx.to_flat_state(started)]
    same = jax.tree.unflatten(jax.tree.structure(started),
                              [jnp.array(leaf) for leaf in jax.tree.leaves(adapters)])

    examples = recipe.render(chat.load_tokenizer(ASSETS), recipe.read_chats(file, 0.0)[0], 256)
    rows = recipe.pack(examples, 256, 1)
    places = int(rows[:, 1].sum(axis=-1).max())
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-2, 4, STEPS)
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.001))
    step, _ = recipe.make_steps(model, plain, places)
    reported = train.make_optimizer(schedule, 0.001, 1.0)
    step_of_03 = jax.jit(train.make_train_step(theirs, reported, train.make_loss(places)))
    state, state_of_03 = (adapters, plain.init(adapters)), (same, reported.init(same))
    ours, losses_of_03 = [], []
    with mesh:
        for number in range(STEPS):
            batch = rows[[number % len(rows), -1 - number % len(rows)]].reshape(2, 1, 4, -1)
            tokens, mask, segments, positions = np.moveaxis(batch, 2, 0)
            *state, loss, _ = step(*state, frozen, jnp.asarray(batch))
            *state_of_03, metrics = step_of_03(*state_of_03, still, train.Batch(
                tokens, mask.astype(bool), segments, positions))
            ours.append(float(loss))
            losses_of_03.append(float(metrics["loss"]))
    assert ours[-1] < 0.7 * ours[0]
    np.testing.assert_allclose(ours, losses_of_03, rtol=2e-4)

    pairs = recipe.pairs_of(state[0])
    cfg = recipe.Settings(rank=RANK, alpha=ALPHA, model="tiny")
    recipe.export(tmp_path, recipe.files_of(base), pairs, cfg)
    targets = merge.targets_of(base, pairs, SimpleNamespace(partial=False))
    assert len(targets) == len(pairs)
    plan = merge.plan_merge(targets, pairs, "model.language_model.")
    merge.merge_model(base, tmp_path / "by_04", plan, ALPHA / RANK)
    before, mine, by_04 = (load_file(tmp_path / name / "model.safetensors")
                           for name in ("base", "merged", "by_04"))
    assert mine.keys() == by_04.keys()
    changed = {name for name in mine if (mine[name] != before[name]).any()}
    assert changed == set(plan)
    apart = sum(int((mine[name] != by_04[name]).sum()) for name in mine)
    assert apart <= 1e-5 * sum(array.size for array in mine.values())  # a sum on the edge of two
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wanted = merge.peft_tensors(targets, pairs, "model.language_model.")
    assert stored.keys() == wanted.keys()
    assert all((stored[name] == wanted[name]).all() for name in stored)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == architecture.PEFT_TARGETS and config["r"] == RANK


# ── Rows ──

ASK, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}
CALL = {"role": "assistant", "content": "Let me look.", "tool_calls": [{"name": "look"}]}


def write_rows(path, rows):
    """Rows as JSON lines, with what a Windows editor puts before and after them."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    content = "\r\n".join(lines).encode(errors="surrogateescape")
    path.write_bytes(b"\xef\xbb\xbf" + content + b"\r\n\r\n")
    return path


def test_rows_that_cannot_be_trained_are_counted(tmp_path, capsys):
    bad = ["no json", "[" * 100_000, "3", "null", "{}", {"messages": None}, {"messages": ["x"]},
           {"messages": [ASK, {"role": "assistant", "content": None}]},
           {"messages": [ASK, {"role": "assistant", "content": "\ud800"}]},
           {"messages": [ASK, {"role": "assistant", "content": " "}]},
           {"messages": [ANSWER, ASK, ANSWER]}, {"messages": [ASK]}, {"messages": []},
           {"messages": [ASK, CALL, {"role": "tool", "content": "7"}, ANSWER]},
           {"messages": [ASK, {**CALL, "content": None}]}]
    good = {"messages": [ASK, ANSWER]}
    bad.append(json.dumps(good).replace("What", "Wh\udce4t"))  # Latin-1
    trained, held_out = recipe.read_chats(write_rows(tmp_path / "a.jsonl", [*bad, good]), 0.0)
    assert (trained, held_out) == ([good["messages"]], [])
    said = capsys.readouterr().out
    counts = [int(count) for count in re.findall(r"^(\d+) rows 'left out", said, re.M)]
    assert sum(counts) == len(bad) and "2 rows 'left out: a call is not {id: " in said


def test_what_is_not_used_of_a_row_that_is_kept_is_named(tmp_path, capsys):
    answer = {**ANSWER, "reasoning_content": "Hm.", "name": None, "content": "Yes.</s>"}
    rows = [{"messages": [ASK, answer], "images": ["a.png"], "gr\u00f6\u00dfe": 3}] * 2
    rows.append({"messages": [{**ASK, "content": "<start_of_turn>user\nWhat?"}, ANSWER]})
    assert len(recipe.read_chats(write_rows(tmp_path / "a.jsonl", rows), 0.0)[0]) == 3
    said = capsys.readouterr().out
    for key in ("images", "reasoning_content", r"gr\xf6\xdfe"):  # ASCII: any terminal can show it
        assert f"2 rows 'kept, but not used: {key}'" in said
    assert "name" not in said
    assert "2 rows 'kept, read as letters: </s>'" in said
    assert "1 rows 'kept, read as letters: <start_of_turn>'" in said


def test_a_column_is_not_used_because_a_key_of_that_name_is(tmp_path, capsys):
    """A row's `weight` or `name` was passed over in silence, since messages have such keys."""
    row = {"messages": [ASK, ANSWER], "weight": 0.5, "name": "x", "reasoning": "y", "train": 0}
    recipe.read_chats(write_rows(tmp_path / "a.jsonl", [row]), 0.0, kept=True)
    printed = re.findall(r"1 rows 'kept, but not used: (.*)'", capsys.readouterr().out)
    assert sorted(printed) == ["name", "reasoning", "weight"]


@pytest.mark.parametrize("place", [0, 1])
def test_tools_of_a_message_are_not_used_and_named(place, tmp_path, capsys):
    """The first message's went to the template unchecked, and the others' weren't named."""
    turns = [dict(ASK), dict(ANSWER)]
    turns[place]["tools"] = "a hammer"
    chats, _ = recipe.read_chats(write_rows(tmp_path / "a.jsonl", [{"messages": turns}]), 0.0)
    assert "1 rows 'kept, but not used: tools of a message'" in capsys.readouterr().out
    tokenizer = chat.load_tokenizer(ASSETS)
    wanted = recipe.render(tokenizer, [[ASK, ANSWER]], 4096)
    assert recipe.render(tokenizer, chats, 4096) == wanted


def test_two_runs_print_what_is_not_used_in_the_same_order(tmp_path, capsys):
    """The order was that of a set of texts, which Python shuffles in each process."""
    columns = {letter: 1 for letter in "hgfedcba"}
    tags = "<eos></s><|im_end|>[INST]"
    row = {"messages": [ASK, {**ANSWER, "content": tags}], **columns}
    recipe.read_chats(write_rows(tmp_path / "a.jsonl", [row]), 0.0)
    printed = re.findall(r"(?:not used|as letters): (.*)'", capsys.readouterr().out)
    assert printed == [*"abcdefgh", "</s>", "<eos>", "<|im_end|>", "[INST]"]


def test_an_answer_of_weight_0_is_read_and_not_trained(tmp_path):
    tokenizer = chat.load_tokenizer(ASSETS)
    turns = [ASK, {**ANSWER, "content": "One.", "weight": 0}, ASK, {**ANSWER, "train": False}, ASK,
             {**ANSWER, "content": "Three.", "weight": 1, "train": True}]
    chats, _ = recipe.read_chats(write_rows(tmp_path / "a.jsonl", [{"messages": turns}]), 0.0)
    (ids, mask), = recipe.render(tokenizer, chats, 4096)
    assert tokenizer.decode([i for i, trained in zip(ids, mask) if trained]) == "Three.<turn|>"
    assert "One.<turn|>" in tokenizer.decode(ids)


@pytest.mark.parametrize("empty", [[], "", None, {}], ids=str)
def test_an_answer_without_calls_may_say_so(tmp_path, empty):
    """Files that hold tools somewhere have an empty list in every other answer."""
    tokenizer = chat.load_tokenizer(ASSETS)
    plain = [ASK, ANSWER, ASK, ANSWER]
    turns = [{**turn, "tool_calls": empty} for turn in plain]
    chats, _ = recipe.read_chats(write_rows(tmp_path / "a.jsonl", [{"messages": turns}]), 0.0)
    assert recipe.render(tokenizer, chats, 4096) == recipe.render(tokenizer, [plain], 4096)


def test_parameters_of_a_tool_may_be_a_text(tmp_path):
    """The text "{}" stayed a text, and the template wrote parameters that nobody had given."""
    tokenizer = chat.load_tokenizer(ASSETS)
    schema = {"type": "object", "properties": {"bits": {"type": "integer"}}}
    for parameters in ({}, schema):
        rendered = []
        for form in (parameters, json.dumps(parameters)):
            tool = {"type": "function", "function": {"name": "look", "parameters": form}}
            row = {"messages": [ASK, ANSWER], "tools": [tool]}
            chats, _ = recipe.read_chats(write_rows(tmp_path / "a.jsonl", [row]), 0.0)
            rendered.append(recipe.render(tokenizer, chats, 4096))
        assert len(rendered[0]) == 1 and rendered[0] == rendered[1]


def test_what_people_write_never_becomes_a_control_token():
    tokenizer = chat.load_tokenizer(ASSETS)
    plain = [{"role": "system", "content": "Be brief."}, ASK, ANSWER, ASK, ANSWER]
    for (ids, mask), end in zip(recipe.render(tokenizer, [plain], 4096), (2, 4), strict=True):
        prompt = tokenizer.apply_chat_template(plain[:end], add_generation_prompt=True)["input_ids"]
        assert ids[:len(prompt)] == prompt and sum(mask) == len(ids) - len(prompt)
    rude = "<turn|>\n<|turn>model\n<bos> <|channel>thought\n<channel|>"
    turns = [{**ASK, "content": rude}, {**ANSWER, "content": rude}] * 2
    control = set(chat.special_ids(tokenizer).values())
    of_rude = recipe.render(tokenizer, [turns], 4096)
    of_plain = recipe.render(tokenizer, [[ASK, ANSWER] * 2], 4096)
    for (ids, mask), (ids_of_plain, _) in zip(of_rude, of_plain, strict=True):
        assert [i for i in ids if i in control] == [i for i in ids_of_plain if i in control]
        assert tokenizer.decode([i for i, trained in zip(ids, mask) if trained]) == rude + "<turn|>"
    assert of_rude[-1][0] == list(chat.render(tokenizer, turns)[0])  # and that's how 02 has it


def test_held_out_questions_are_those_of_02_and_stand_in_no_trained_prompt(tmp_path):
    rows = []
    for number in range(400):  # each question twice, once as the first of two
        question = {**ASK, "content": f"Question {number}?"}
        rows += [{"messages": [question, ANSWER]},
                 {"messages": [{**ASK, "content": f" question  {number} ?"}, ANSWER, ASK, ANSWER]}]
    trained, held_out = recipe.read_chats(write_rows(tmp_path / "a.jsonl", rows), 0.1)
    assert 20 < len(held_out) < 140 and len(trained) + len(held_out) == len(rows)
    for side, wanted in ((trained, False), (held_out, True)):
        assert {data.held_out(turns[0]["content"], 0.1) for turns in side} == {wanted}
    questions = [{tuple(data.words_of(turns[0]["content"])) for turns in side}
                 for side in (trained, held_out)]
    assert not questions[0] & questions[1]


@pytest.mark.parametrize("thought", [{"text": "Hm."}, ["Hm."], 3], ids=str)
def test_a_thought_that_is_not_text_is_no_thought(thought, tmp_path, capsys):
    """With --reasoning=kept, Python's spelling of it was trained: {'text': 'Hm.'}."""
    row = {"messages": [ASK, {**ANSWER, "thinking": thought}]}
    chats, _ = recipe.read_chats(write_rows(tmp_path / "a.jsonl", [row]), 0.0, kept=True)
    assert not chats
    assert "1 rows 'left out: a thought that is not text'" in capsys.readouterr().out


def test_answers_that_are_too_long_are_counted(capsys):
    tokenizer = chat.load_tokenizer(ASSETS)
    long = {**ANSWER, "content": "word " * 300}
    assert len(recipe.render(tokenizer, [[ASK, ANSWER], [ASK, long]], 100)) == 1
    assert "1 answers; 1 more are too long" in capsys.readouterr().out


# ── The base ──


def test_a_second_set_of_weights_is_refused_by_name(tmp_path):
    for name in ("model.safetensors", "config.json", "consolidated.safetensors", "old.bin"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(SystemExit, match="consolidated.safetensors"):
        recipe.files_of(tmp_path)
    (tmp_path / "consolidated.safetensors").rename(tmp_path / "model-00002-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(SystemExit, match=r"model-00001.*'model.safetensors'.* missing"):
        recipe.files_of(tmp_path)
    for text in (b"{", b"[]", b"{}", b"3", b"\xff", b'{"weight_map": {}}', b'{"weight_map": [1]}'):
        index.write_bytes(text)
        with pytest.raises(SystemExit, match="index.json has no weight_map"):
            recipe.files_of(tmp_path)
    index.write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "model.safetensors").rename(tmp_path / shards["a"])
    names = [path.name for path in recipe.files_of(tmp_path)]
    assert names == ["config.json", *shards.values(), "model.safetensors.index.json"]


ROPE = {"full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize("change", [
    {"hidden_activation": "silu"}, {"rms_norm_eps": 1e-5}, {"tie_word_embeddings": False},
    {"rope_parameters": ROPE | {"sliding_attention": {"rope_type": "default", "rope_theta": 5e4}}},
    {"rope_parameters": ROPE | {"full_attention": ROPE["full_attention"] | {"factor": 8.0}}},
    {"enable_moe_block": True}, {"model_type": "gemma3_text"}, {"attention_k_eq_v": False},
    {"layer_types": ["full_attention"]}, {"use_bidirectional_attention": "all"}], ids=str)
def test_a_base_that_computes_something_else_is_refused(change, tmp_path):
    config = random_gemma.SHALLOW | {"rope_parameters": ROPE}
    random_gemma.write(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SystemExit, match=re.escape(str(tmp_path))):
        recipe.load_model(tmp_path, "float32")


@pytest.mark.parametrize("config, said", [
    ({"model_type": "llama", "num_hidden_layers": 2}, "not a Gemma 4's: model_type llama. Take"),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
     "not a Gemma 4's: model_type gemma3_text. Take"),
    ({"model_type": ["llama"]}, r"model_type ['llama']. Take"),
    ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "layer_types": []}},
     "describes no layers of a Gemma 4 (layer_types): download it again"),
    (random_gemma.SHALLOW | {"rope_parameters": ROPE, "enable_moe_block": True}, "")])
def test_another_model_is_named(config, said, tmp_path):
    """All got "describes no layers", or "asks for {'enable_moe_block': True}" with no reason."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not said:  # as 02 to 04 say it
        with pytest.raises(UserError) as error:
            architecture.text_config(config)
        said = str(error.value).removesuffix(".")
        assert "e31e280e" in said
    with pytest.raises(SystemExit) as stopped:
        recipe.read_config(tmp_path)
    line = str(stopped.value)
    assert said in line and str(tmp_path / "config.json") in line and "\n" not in line


def test_no_experts_may_be_said_as_null(tmp_path):
    config = random_gemma.SHALLOW | {"rope_parameters": ROPE, "enable_moe_block": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert recipe.read_config(tmp_path) == config


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"null", b"\xff", b"{}", b"[" * 10**5,
                                  b'{"text_config": []}', b'{"layer_types": 3}',
                                  b'{"layer_types": []}',  # was a division by zero
                                  b'{"layer_types": [], "rope_parameters": [1]}'])
def test_a_config_of_another_shape_is_one_line(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(SystemExit, match="config.json describes no layers of a Gemma 4") as error:
        recipe.load_model(tmp_path, "float32")
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.language_model.extra.weight"])
def test_a_tensor_that_nobody_would_use_is_refused(name, tmp_path):
    random_gemma.write(tmp_path, random_gemma.SHALLOW)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: np.ones((320, 64), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match="numbers"):
        recipe.load_model(tmp_path, "float32")


@pytest.mark.parametrize("prefix", ["model.", ""])  # the first as Gemma4ForCausalLM saves it
def test_a_base_with_other_names_is_one_line(prefix, tmp_path):
    """Tunix loads one without a prefix, and an export would find no place for its adapters."""
    random_gemma.write(tmp_path, random_gemma.SHALLOW)
    renamed = {}
    for name, array in load_file(tmp_path / "model.safetensors").items():
        renamed[name.replace("model.language_model.", prefix)] = array
    save_file(renamed, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match=f"numbers under {prefix}[a-z]") as error:
        recipe.load_model(tmp_path, "float32")
    said = str(error.value)
    assert str(tmp_path) in said and "take google's own files" in said and "\n" not in said


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_dtypes_are_read_as_they_are_and_stay_what_they_are(kind, tmp_path):
    """Norms of another dtype and a counter of a tower beside bfloat16 matrices."""
    random_gemma.write(tmp_path / "base", random_gemma.E2B)
    file = tmp_path / "base" / "model.safetensors"
    plain = load_file(file)
    model, _ = recipe.load_model(tmp_path / "base", "float32")
    mixed = dict(plain)
    for name in mixed:
        if mixed[name].ndim == 1:
            mixed[name] = mixed[name].astype(kind)
    mixed["model.vision_tower.steps"] = np.array([2**40 + 1])
    save_file(mixed, file)
    again, _ = recipe.load_model(tmp_path / "base", "float32")
    for one, two in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, again)), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-3)  # float16 rounds what bfloat16 held
    a, b = np.ones((64, 2), np.float32), np.ones((2, 128), np.float32)
    recipe.export(tmp_path, recipe.files_of(tmp_path / "base"), {"layers.0.mlp.gate_proj": (a, b)},
                  recipe.Settings(rank=2, alpha=2.0, model="x"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: array.dtype for name, array in merged.items()} == {
        name: array.dtype for name, array in mixed.items()}
    changed = [name for name, array in mixed.items() if array.tobytes() != merged[name].tobytes()]
    assert changed == ["model.language_model.layers.0.mlp.gate_proj.weight"]
    name, = changed
    wanted = (mixed[name].astype(np.float32) + 2).astype(ml_dtypes.bfloat16)
    assert (merged[name] == wanted).all()


def test_an_adapter_without_its_matrix_is_a_bug_that_is_named(tmp_path):
    a, b = np.ones((64, 2), np.float32), np.ones((2, 128), np.float32)
    with pytest.raises(AssertionError, match=r"no place for .*layers\.99\.mlp\.gate_proj"):
        recipe.export(tmp_path, recipe.files_of(ASSETS), {"layers.99.mlp.gate_proj": (a, b)},
                      recipe.Settings(rank=2))


# ── Checkpoints ──


def test_a_damaged_checkpoint_is_left_aside(tmp_path, capsys):
    def state(step):
        array = jnp.arange(5000, dtype=jnp.float32) + step
        return {"a": array}, {"moment": 2 * array, "count": jnp.array(step)}

    for step in (2, 9, 100, 2000):
        recipe.save(tmp_path, step, state(step))
        assert not (tmp_path / "partial").exists()
    older, newest = sorted(tmp_path.iterdir())  # two are kept
    step, found = recipe.restore(tmp_path, state(0))
    assert step == 2000 and jax.tree.structure(found) == jax.tree.structure(state(0))
    for ours, wanted in zip(*map(jax.tree.leaves, (found, state(2000))), strict=True):
        assert ours.dtype == wanted.dtype and (ours == wanted).all()
    for name in ("best.safetensors", "0.safetensors"):  # the reader's own stay as they are
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "partial").write_bytes(b"killed while it was written")
    newest.write_bytes(newest.read_bytes()[:900])  # torn
    step, found = recipe.restore(tmp_path, state(0))
    assert step == 100 and (found[1]["moment"] == state(100)[1]["moment"]).all()
    assert "2000" in capsys.readouterr().out and newest.with_suffix(".damaged").exists()
    content = bytearray(older.read_bytes())
    content[-1] ^= 1  # a bit that flipped, in Adam's moments
    older.write_bytes(content)
    assert recipe.restore(tmp_path, state(0))[0] == 0
    assert "its bytes have changed" in capsys.readouterr().out
    recipe.save(tmp_path, 3000, state(3000))
    assert (tmp_path / "best.safetensors").exists() and (tmp_path / "0.safetensors").exists()


# ── The command ──


@dataclass
class Case:
    """A command that cannot work, and what its one line says."""

    name: str
    options: list
    says: str
    rows: tuple = ({"messages": [ASK, ANSWER]},)


CASES = [
    Case("no data", ["--data", "missing.jsonl"], "missing.jsonl is no file"),
    Case("null answer", [], "no answer to train",
         ({"messages": [ASK, {"role": "assistant", "content": None}]},)),
    Case("assistant first", [], "no answer to train", ({"messages": [ANSWER, ASK]},)),
    Case("nothing", [], "no answer to train", ()),
    Case("too long", ["--sequence_length=8"], "within --sequence_length 8"),
    Case("no rank", ["--rank=0"], "--rank 0 is not a number from 1 on"),
    Case("never", ["--every=0"], "--every 0 is not"),
    Case("no such dtype", ["--dtype=int3"], "--dtype int3: bfloat16 or float32"),
    Case("no such dtype, before the download", ["--dtype=int3", "--model=me/mine"], "--dtype int3"),
    Case("no such reasoning, before the download", ["--reasoning=some", "--model=me/mine"],
         "--reasoning some: stripped or kept"),
    Case("cut data", ["--data=cut.jsonl.gz"], "end-of-stream marker"),
    Case("pretrained base", ["--model=plain"], "plain has no chat template: take its -it model"),
    Case("no such base", ["--model", "./nowhere/at/all"], "nowhere/at/all"),
    Case("out is a file", ["--out", "chats.jsonl"], "chats.jsonl")]


def no_network(name):
    """What the hub's client says of a name when nothing can be downloaded."""
    raise OSError(f"{name} cannot be downloaded here")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_one_line_before_the_model_is_loaded(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe, "load_model", lambda *_: pytest.fail("the model is loaded"))
    monkeypatch.setattr(recipe, "snapshot_download", no_network)
    write_rows(tmp_path / "chats.jsonl", case.rows)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}")[:15])
    shutil.copytree(ASSETS, tmp_path / "plain", ignore=shutil.ignore_patterns("*.jinja"))
    with pytest.raises(SystemExit) as ended:
        recipe.main(["--model", str(ASSETS), "--out", "new", *case.options])
    assert str(ended.value).startswith("Error: ") and case.says in str(ended.value)
    assert not (tmp_path / "new" / "recipe.txt").exists()


def test_one_writer_and_nothing_of_the_readers_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "load_model", lambda *_: pytest.fail("the model is loaded"))
    told = ["--model", str(ASSETS), "--out", str(tmp_path / "out"),
            "--data", str(write_rows(tmp_path / "a.jsonl", [{"messages": [ASK, ANSWER]}]))]
    with FileLock(tmp_path / "out" / "one_run_at_a_time.lock"):
        with pytest.raises(SystemExit, match="one_run_at_a_time"):
            recipe.main(told)
    (tmp_path / "out" / "adapter").mkdir()
    with pytest.raises(SystemExit, match="'adapter'"):
        recipe.main(told)
    assert (tmp_path / "out" / "adapter").is_dir()


@pytest.fixture(scope="module")
def trained(file, tmp_path_factory):
    """(options, folder) of one short run, with nothing held out, from a read-only base."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(ASSETS, folder / "base")
    for path in (folder / "base").iterdir():
        path.chmod(0o444)
    (folder / "base").chmod(0o555)
    shutil.copy(file, folder / "chats.jsonl")
    options = ["--model", str(folder / "base"), "--data", str(folder / "chats.jsonl"), "--rank=4",
               "--alpha=8", "--sequence_length=256", "--rows_per_step=4", "--epochs=0.1",
               "--every=1", "--learning_rate=1e-2", "--validation=0"]
    recipe.main([*options, "--out", str(folder / "out")])
    return options, folder


def test_the_same_bytes_at_another_place_are_the_same_recipe(trained, tmp_path, monkeypatch):
    options, folder = trained
    monkeypatch.setattr(recipe, "load_model", lambda *_: pytest.fail("the model is loaded"))
    assert (folder / "out/merged/model.safetensors").stat().st_mode & 0o200  # the base's has none
    shutil.copytree(folder / "out", tmp_path / "out", ignore=shutil.ignore_patterns("merged"))
    note = (folder / "out" / "recipe.txt").read_text("utf-8")
    assert str(folder) not in note and "rank: 4" in note
    monkeypatch.chdir(folder)
    spelled = [*options, "--model", "base/../base", "--data", "./chats.jsonl",
               "--out", str(tmp_path / "out")]
    with pytest.raises(pytest.fail.Exception):  # it comes as far as loading
        recipe.main(spelled)
    shutil.copytree(folder / "base", tmp_path / "base", copy_function=shutil.copyfile)
    (tmp_path / "base").chmod(0o755)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["model.language_model.norm.weight"] = tensors["model.language_model.norm.weight"] * 2
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match="model.safetensors: "):
        recipe.main([*spelled, "--model", str(tmp_path / "base")])
    with pytest.raises(SystemExit, match="rank: 5"):
        recipe.main([*spelled, "--rank=5"])


@needs_serve
def test_transformers_says_that_merged_is_base_plus_adapter(trained, tmp_path):
    folder = trained[1]
    prompts = [list(range(150, 190)), list(range(400, 430))]
    job = {"dtype": "float32", "prompts": prompts, "base": str(folder / "base"),
           **{name: str(folder / "out" / name) for name in ("merged", "adapter")}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    told = [SERVE, "tests/merge_parity.py", tmp_path / "job.json", "hf", tmp_path / "hf.npz"]
    subprocess.run(told, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    said = np.load(tmp_path / "hf.npz")
    moved = np.abs(said["adapter"] - said["base"]).mean()
    assert moved > 0.02
    assert np.abs(said["merged"] - said["adapter"]).mean() < 0.2 * moved  # rounded to bfloat16


@pytest.mark.slow
def test_the_command_resumes_and_leaves_nothing_half_written(file, tmp_path):
    """On four devices: on one, a restored array fits wherever the others are."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = {"text": True, "env": os.environ | ascii_only | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}}

    def command(out, *more):
        return [sys.executable, "-W", "ignore", ROOT / "recipe.py", "--model", ASSETS,
                "--data", file, "--out", out, "--rank=4", "--alpha=8", "--learning_rate=5e-3",
                "--warmup_steps=2", "--validation=0.1", "--sequence_length=256",
                "--rows_per_step=4", "--epochs=0.3", "--every=2", *more]

    def losses(text):
        steps = re.findall(r"^step (\d+)/\S+ {'loss': ([\d.]+)", text, re.M)
        return {int(step): loss for step, loss in steps}

    whole = subprocess.run(command(tmp_path / "whole"), capture_output=True, check=True, **told)
    whole = losses(whole.stdout)
    last = max(whole)
    assert last >= 5 and sorted(whole) == list(range(1, last + 1))
    killed = subprocess.Popen(command(tmp_path / "parts"), stdout=subprocess.PIPE, **told)
    first = ""
    while not first.count("step 4/"):
        first += killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "parts" / "merged").exists()
    rest = subprocess.run(command(tmp_path / "parts"), capture_output=True, check=True, **told)
    rest = losses(rest.stdout)
    assert 1 < min(rest) <= 5 and all(whole[step] == rest[step] for step in rest)
    for name in ("merged/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    assert not (tmp_path / "parts" / "partial" / "merged").exists()
    other = subprocess.run(command(tmp_path / "parts", "--seed=7"), capture_output=True, text=True)
    assert other.returncode and "choose another --out" in other.stderr
    shown = subprocess.run([sys.executable, "-W", "ignore", ROOT / "recipe.py", "--help"],
                           capture_output=True, text=True, check=True).stdout
    assert all(f"--{field.name}" in shown for field in dataclasses.fields(recipe.Settings))


def test_it_is_one_file_that_can_be_copied():
    text = (ROOT / "recipe.py").read_text("utf-8")
    rooms = "helpers|tables|verilog|serving|tpu_time|appendix|tools"
    assert not re.search(rf"^\s*(from|import) ({rooms})", text, re.M)
