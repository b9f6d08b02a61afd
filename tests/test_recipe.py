"""recipe.py against the functions of 02 to 04, and as a command that is killed and started again."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import random_gemma
from conftest import ROOT
from flax import nnx
from safetensors.numpy import load_file

import recipe
from helpers import chat, data, gemma, merge, train
from tables import architecture

ASSETS, RANK, ALPHA, STEPS = ROOT / "assets" / "tiny_gemma4", 8, 16.0, 20


@pytest.fixture(scope="module")
def chats():
    """160 answers of the tiny world as chats, one of them with a second turn."""
    with gzip.open(ROOT / "data" / "tiny" / "train.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for _, line in zip(range(170), file)]
    split = [(row["prompt"], *data.split_response(row["response"])[1:]) for row in rows]
    found = [[{"role": "user", "content": prompt.strip()}, {"role": "assistant", "content": answer}]
             for prompt, answer, problem in split if not problem][:160]
    found[0] += [{"role": "user", "content": "Again."}, {"role": "assistant", "content": "No."}]
    return found


@pytest.fixture(scope="module")
def file(chats, tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return path


def test_ids_and_masks_are_those_of_02(chats, file):
    tokenizer = chat.load_tokenizer(ASSETS)
    found = recipe.read_examples(tokenizer, file)
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

    examples = recipe.read_examples(chat.load_tokenizer(ASSETS), file)
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
            *state, loss = step(*state, frozen, jnp.asarray(batch))
            *state_of_03, metrics = step_of_03(*state_of_03, still, train.Batch(
                tokens, mask.astype(bool), segments, positions))
            ours.append(float(loss))
            losses_of_03.append(float(metrics["loss"]))
    assert ours[-1] < 0.7 * ours[0]
    np.testing.assert_allclose(ours, losses_of_03, rtol=2e-4)

    pairs = {}
    for path, variable in nnx.to_flat_state(state[0]):
        pairs.setdefault(".".join(map(str, path[:-1])), []).append(np.array(variable.get_value()))
    recipe.export(tmp_path, base, pairs, RANK, ALPHA, "tiny")
    targets = merge.targets_of(base, pairs, {})
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


@pytest.mark.slow
def test_the_command_resumes_and_leaves_nothing_half_written(file, tmp_path):
    """On four devices: on one, a restored array fits wherever the others are."""
    told = {"text": True, "env": os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}}

    def command(out, *more):
        return [sys.executable, "-W", "ignore", ROOT / "recipe.py", "--model", ASSETS, "--data", file,
                "--out", out, "--rank=4", "--alpha=8", "--learning_rate=5e-3", "--warmup_steps=2",
                "--sequence_length=256", "--rows_per_step=4", "--epochs=0.3", "--every=2", *more]

    def losses(text):
        return {int(n): loss for n, loss in re.findall(r"^step (\d+)/\S+ {'loss': ([\d.]+)", text, re.M)}

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
    assert all(f"--{name}" in shown for name in recipe.CONSTANTS)
    assert len((ROOT / "recipe.py").read_text().splitlines()) <= 250
