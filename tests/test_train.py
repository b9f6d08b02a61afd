"""Notebook 03 and helpers/gemma.py: config, mesh, LoRA, loss, step, checkpoints."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import random_gemma
import train_driver
from conftest import ROOT, needs_serve, serve
from flax import nnx
from tunix.models.gemma4 import model as gemma4

from helpers import gemma, merge, pictures, train, weights
from tables import architecture
from tables.errors import UserError

CONFIGS = ROOT / "data" / "configs"
PUBLISHED_TARGETS = ".*q_einsum|.*kv_einsum|.*attn_vec_einsum|.*gate_proj|.*down_proj|.*up_proj"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(tuned, mesh, config, base): a small random 31B-like model in float32, B random, too."""
    folder = random_gemma.write(tmp_path_factory.mktemp("base"), random_gemma.SHALLOW)
    config = gemma.config_from_hf(folder, dtype="float32")
    mesh = gemma.make_mesh(config)
    base = gemma.place(gemma.load_base(folder, config, mesh), mesh)
    return randomize_b(gemma.inject_lora(base, 4, 8.0, mesh)), mesh, config, base


def randomize_b(model, seed=0):
    rng = np.random.default_rng(seed)
    for pair in gemma.adapted_modules(model).values():
        value = pair["b"].get_value()
        new = rng.normal(size=value.shape).astype(np.float32) * 0.05
        pair["b"].set_value(jax.device_put(new, value.sharding))
    return model


def forward(model, mesh, tokens):
    graph, state = nnx.split(model)
    length = tokens.shape[1]
    mask = np.tril(np.ones((1, length, length), bool))
    with mesh:
        return np.asarray(jax.jit(lambda s, t, p, m: nnx.merge(graph, s)(t, p, None, m)[0])(
            state, tokens, np.arange(length)[None], mask))


# ── Config ──

@pytest.mark.parametrize("count,shared", [(35, 20), (42, 18), (7, 1), (29, 11), (31, 6)])
def test_shared_layers_survive_tunix_rounding(count, shared):
    first = count - shared
    kinds = ["full_attention" if i == first - 1 or i == count - 1 else "sliding_attention"
             for i in range(count)]
    config = gemma.config_from_hf(random_gemma.E2B | {
        "num_hidden_layers": count, "num_kv_shared_layers": shared, "layer_types": kinds})
    types = tuple(gemma4.AttentionType.GLOBAL if kind == "full_attention"
                  else gemma4.AttentionType.LOCAL_SLIDING for kind in kinds)
    origins = gemma4.create_kv_cache_sharing_patterns(
        count, config.frac_shared_layers, True, True, types)
    assert sum(origin != i for i, origin in enumerate(origins)) == shared


# ── Mesh ──

def test_mesh_choices_and_refusals():
    read, choose = architecture.read_config, architecture.choose_mesh
    big = read(CONFIGS / "gemma4_31b.json")
    chosen = {1: (1, 1), 4: (1, 4), 8: (2, 4), 16: (4, 4)}
    assert {devices: choose(big, devices) for devices in chosen} == chosen
    assert choose(read(CONFIGS / "gemma4_e2b.json"), 4) == (4, 1)
    for name in ("31b", "e2b", "e4b"):
        file = CONFIGS / f"gemma4_{name}.json"
        through_tunix = gemma._as_hf(gemma.config_from_hf(file))
        for devices in chosen:
            assert choose(through_tunix, devices) == choose(read(file), devices), name
    assert "4 KV heads of the full-attention layers" in architecture.mesh_problem(big, 1, 8)
    assert "16 KV heads of the sliding layers" in architecture.mesh_problem(big, 1, 32)
    with pytest.raises(ValueError, match="needs 8 devices"):
        gemma.make_mesh(gemma.config_from_hf(CONFIGS / "gemma4_31b.json"), (2, 4), jax.devices())


# ── LoRA ──

def test_every_module_is_adapted_and_the_specs_fit():
    """Adapters on twelve of the 31B's own layers, without memory."""
    remat = gemma4.RematConfig.DECODER
    config = gemma.config_from_hf(CONFIGS / "gemma4_31b.json", num_layers=12, remat_config=remat)
    mesh = gemma.make_mesh(config)
    model = gemma.inject_lora(gemma.abstract_base(config, mesh), 64, 64.0, mesh)
    modules = gemma.adapted_modules(model)
    assert len(modules) == 72 and sorted(modules) == sorted(gemma.expected_modules(config))
    missed = [path for path in modules if not re.fullmatch(PUBLISHED_TARGETS, path)]
    assert len(missed) == 2 and all(path.endswith(".k_einsum") for path in missed)
    assert model.config.remat_config == remat  # off only for the injection
    for path, pair in modules.items():
        for variable in pair.values():
            array = variable.get_value()
            assert array.dtype == np.float32, path
            assert len(array.sharding.spec) <= array.ndim, path
            array.sharding.shard_shape(array.shape)  # raises where an axis does not divide
            assert not array.sharding.spec or array.sharding.spec[-1] is not None, "not canonical"
    for name, count in (("31b", 360), ("e2b", 190)):
        config = gemma.config_from_hf(CONFIGS / f"gemma4_{name}.json")
        assert len(gemma.expected_modules(config)) == count


def test_the_published_pattern_is_refused(tiny):
    _, mesh, _, base = tiny
    with pytest.raises(ValueError, match=r"1 modules got no adapter.*layers.1.attn.k_einsum"):
        gemma.inject_lora(base, 4, 8.0, mesh, PUBLISHED_TARGETS)


def test_zero_b_changes_nothing_and_random_b_does(tiny):
    tuned, mesh, _, base = tiny
    tokens = np.random.default_rng(0).integers(3, 320, (1, 40)).astype(np.int32)
    before = forward(base, mesh, tokens)
    fresh = gemma.inject_lora(base, 4, 8.0, mesh)
    np.testing.assert_array_equal(before, forward(fresh, mesh, tokens))
    assert np.abs(before - forward(tuned, mesh, tokens)).max() > 0.01


# ── Text ──

def test_greedy_equals_the_argmax_of_full_forward_passes(tiny):
    tuned, mesh, _, _ = tiny
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, 320, n).tolist() for n in (5, 30)]  # the window is 16
    answers = gemma.greedy(tuned, prompts, 20, [], mesh)
    for prompt, answer in zip(prompts, answers):
        ids = np.zeros((1, 50), np.int32)
        ids[0, :len(prompt) + 20] = prompt + answer
        best = forward(tuned, mesh, ids)[0].argmax(-1)
        assert best[len(prompt) - 1:len(prompt) + 19].tolist() == answer
    stop = answers[0][3]
    stopped = gemma.greedy(tuned, prompts[:1], 20, [stop], mesh)[0]
    assert stopped == answers[0][:answers[0].index(stop) + 1]


# ── Loss and step ──

def packed(micro_batches=2, rows=2, length=32):
    data = train_driver.examples(micro_batches * rows, length, seed=7)
    data["loss_mask"][0, :20] = False  # micro-batches with different numbers of trained tokens
    return train.Batch(**{name: a.reshape(micro_batches, rows, length) for name, a in data.items()})


def one_step(run, batch):
    """(new adapters, new optimizer state, metrics) of a copy of the run's arrays."""
    adapters, opt_state = jax.tree.map(jnp.copy, (run.state.adapters, run.state.opt_state))
    with run.mesh:
        return run.step(adapters, opt_state, run.frozen, batch)


def brute_force_loss(model, batch):
    """Mean over all trained tokens, every example alone in a row of its own, from all logits."""
    tokens, mask, segments = (np.asarray(getattr(batch, name)).reshape(-1, batch.tokens.shape[-1])
                              for name in ("tokens", "loss_mask", "segment_ids"))
    length = tokens.shape[1]
    alone, wanted = [], []
    for row in range(len(tokens)):
        for segment in range(1, segments[row].max() + 1):
            at = np.flatnonzero(segments[row] == segment)
            for source, rows in ((tokens, alone), (mask, wanted)):
                rows.append(np.pad(source[row, at], (0, length - len(at))))
    alone, wanted = np.stack(alone), np.stack(wanted)
    logits, _ = model(alone, jnp.tile(jnp.arange(length), (len(alone), 1)), None,
                      np.tril(np.ones((1, length, length), bool)))
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), alone[:, 1:, None], axis=-1)
    return -jnp.sum(scores[..., 0] * wanted[:, 1:]) / wanted[:, 1:].sum()


@pytest.mark.parametrize("shape", ["SHALLOW", pytest.param("E2B", marks=pytest.mark.slow)])
def test_packed_gradients_are_those_of_the_examples_one_by_one(tmp_path, shape):
    """A textbook loss, Tunix's own attention; also for shared keys and per-layer inputs."""
    folder = random_gemma.write(tmp_path, getattr(random_gemma, shape))
    config = gemma.config_from_hf(folder, dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    textbook = randomize_b(gemma.inject_lora(gemma.load_base(folder, config, mesh), 4, 8.0, mesh))
    blocked = gemma.load_base(folder, config, mesh)
    gemma.use_block_attention(blocked, 16)
    blocked = randomize_b(gemma.inject_lora(blocked, 4, 8.0, mesh))
    graphs = [nnx.split(model, nnx.LoRAParam, ...) for model in (textbook, blocked)]
    batch = packed(1)
    rows, adapters = jax.tree.map(lambda array: array[0], batch), graphs[0][1]

    def packed_loss(adapters, rows):
        total, tokens = train.make_loss(31)(nnx.merge(graphs[1][0], adapters, graphs[1][2]), rows)
        return total / tokens
    with mesh:
        single, wanted = jax.jit(jax.value_and_grad(lambda adapters: brute_force_loss(
            nnx.merge(graphs[0][0], adapters, graphs[0][2]), batch)))(adapters)
        together = jax.jit(jax.value_and_grad(packed_loss))
        found, gradients = together(graphs[1][1], rows)
        assert abs(found - single) < 1e-5
        largest = max(float(jnp.abs(one).max()) for one in jax.tree.leaves(wanted))
        for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
            assert jnp.abs(one - other).max() < 1e-4 * largest  # float32, added up in another order
        leaking = rows.replace(segment_ids=np.minimum(rows.segment_ids, 1))
        assert abs(together(graphs[1][1], leaking)[0] - single) > 1e-3, "it can fail"


@pytest.mark.slow
def test_one_step_is_tunixs_trainers_where_micro_batches_train_equally_many_tokens(tiny):
    """And where they do not, it is not: Tunix 0.1.7 averages micro-batches, then the averages."""
    from tunix.sft import peft_trainer
    _, mesh, _, base = tiny
    model, sgd = randomize_b(gemma.inject_lora(base, 4, 8.0, mesh)), optax.sgd(1.0)
    step = jax.jit(train.make_train_step(model, sgd, train.make_loss(31)))
    _, start, frozen = nnx.split(model, nnx.LoRAParam, ...)
    data = train_driver.examples(4, 32, seed=7)
    whole = np.zeros((2, 2, 32), np.int32)
    equal = train.Batch(data["tokens"].reshape(whole.shape), whole == 0, whole + 1,
                        whole + np.arange(32, dtype=np.int32))
    late = (equal.positions >= 24) | [[[False]], [[True]]]  # in the first micro-batch
    uneven = equal.replace(loss_mask=equal.loss_mask & late)
    for name, rows in (("equal", equal), ("uneven", uneven)):
        student = nnx.clone(model)
        trainer = peft_trainer.PeftTrainer(student, sgd, peft_trainer.TrainingConfig(
            eval_every_n_steps=1_000, gradient_accumulation_steps=2))
        trainer.with_gen_model_input_fn(lambda pair: {
            "input_tokens": pair[0], "input_mask": pair[1],
            "positions": jnp.tile(jnp.arange(32), (2, 1)),
            "attention_mask": jnp.tile(jnp.tril(jnp.ones((32, 32), bool)), (2, 1, 1))})
        with mesh:
            trainer.train(list(zip(rows.tokens, rows.loss_mask)))
            ours, _, metrics = step(start, sgd.init(start), frozen, rows)
        loss, *_ = trainer.metrics_logger.get_metric_history("", "loss", "train")
        theirs = nnx.state(student, nnx.LoRAParam)
        gap = optax.global_norm(jax.tree.map(jnp.subtract, ours, theirs)) / metrics["grad_norm"]
        same = abs(loss - metrics["loss"]) < 1e-5 and gap < 1e-4
        assert same == (name == "equal"), (name, loss, metrics["loss"], gap)


def dots(jaxpr):
    """The dtypes of all matrix multiplications of a traced function, at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(str(variable.aval.dtype) for variable in equation.invars)
        for value in equation.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    yield from dots(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from dots(inner.jaxpr)


@pytest.fixture(scope="session")
def bfloat16(tmp_path_factory):
    """A run on a small bfloat16 model, as 03 makes it."""
    return train_driver.build(tmp_path_factory.mktemp("bf16"), steps=5)


def test_every_matmul_of_the_step_is_bfloat16(bfloat16):
    run = bfloat16
    with run.mesh:
        traced = jax.make_jaxpr(train.make_train_step(run.model, run.optimizer, run.loss_fn))(
            run.state.adapters, run.state.opt_state, run.frozen, packed())
    found = list(dots(traced.jaxpr))
    assert len(found) > 100
    assert set(found) == {("bfloat16", "bfloat16")}
    assert {a.dtype for a in jax.tree.leaves(run.state.adapters)} == {np.dtype("float32")}
    assert {str(a.dtype) for a in jax.tree.leaves(run.frozen)} == {"bfloat16"}
    moments = [a for a in jax.tree.leaves(run.state.opt_state) if a.ndim > 1]
    assert {a.dtype for a in moments} == {np.dtype("float32")}


def shardings(*trees):
    return [array.sharding for array in jax.tree.leaves(trees)]


def test_one_compilation_and_no_base_in_the_outputs(bfloat16):
    run = bfloat16
    adapters, opt_state = jax.tree.map(jnp.copy, (run.state.adapters, run.state.opt_state))
    before, first = shardings(adapters, opt_state), jax.tree.leaves(adapters)
    with run.mesh:
        for _ in range(3):
            batch = train.to_mesh(packed(), run.mesh)
            adapters, opt_state, _ = run.step(adapters, opt_state, run.frozen, batch)
    assert run.step._cache_size() == 1
    assert shardings(adapters, opt_state) == before
    assert all(array.is_deleted() for array in first), "the old adapters were donated"
    memory = run.compiled.memory_analysis()
    base = sum(a.nbytes // len(a.sharding.device_set) for a in jax.tree.leaves(run.frozen))
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.05 * base


@pytest.mark.slow
def test_the_step_computes_the_same_on_either_mesh_and_with_its_constraints(tiny, monkeypatch):
    """Tunix leaves its constraints out on a CPU; here they are forced on, as on a TPU."""
    batch, results, constrained = packed(rows=4), [], []

    def constrain(x, axes, eager=False):
        constrained.append(axes)
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(*axes)))
    for shape in ((1, 4), (4, 1)):
        model, mesh = nnx.clone(tiny[0]), gemma.make_mesh(tiny[2], shape)
        gemma.use_block_attention(gemma.place(model, mesh), 16)
        table = model.embedder.input_embedding.get_value()
        assert next(iter(table.addressable_shards)).data.shape[0] == 80
        run = train_driver.make(model, mesh)
        results.append(one_step(run, batch))
        constrained.clear()
        with monkeypatch.context() as patch:
            patch.setattr(gemma4, "shard", constrain)
            patch.setattr(gemma, "shard", constrain)
            results.append(one_step(train_driver.make(model, mesh), batch))
        assert len(constrained) == 2 + 4 * tiny[2].num_layers, "embeddings, logits; q, k, v, output"
        assert shardings(results[-2][0]) == shardings(results[-1][0])
    start, (plain, _, first) = run.state.adapters, results[0]  # SGD subtracts the gradient
    for other, _, metrics in results[1:]:
        assert float(first["loss"]) == pytest.approx(float(metrics["loss"]), abs=1e-5)
        for before, a, b in zip(*map(jax.tree.leaves, (start, plain, other)), strict=True):
            before, a, b = map(np.asarray, (before, a, b))
            close = min(1e-4 * float(first["grad_norm"]), 1e-3 * abs(a - before).max())
            np.testing.assert_allclose(a, b, rtol=0, atol=close)


@pytest.mark.parametrize(("kind", "shape", "expected"), [
    ("TPU v5 lite", (4, 2), train.LESS_AT_ONCE), ("TPU v5 lite", (8, 1), train.GATHERS_BESIDE),
    ("TPU v5 lite", (1, 4), None), ("TPU v5", (1, 4), train.LARGE_TILES),
    ("TPU v5", (4, 1), train.LARGE_TILES | train.GATHERS_BESIDE), ("TPU v6 lite", (2, 4), None),
    ("cpu", (2, 2), None), ("TPU v5 lite", (1, 1), None)])
def test_the_compilers_options_by_chip_and_mesh(kind, shape, expected):
    devices = np.full(shape, SimpleNamespace(device_kind=kind))
    mesh = SimpleNamespace(devices=devices, size=devices.size, shape=dict(zip(
        ("fsdp", "tp"), shape, strict=True)))
    assert train.compiler_options(mesh) == expected
    several_small_chips = kind == "TPU v5 lite" and shape != (1, 1)
    assert gemma.answer_options(mesh) == (train.LESS_AT_ONCE if several_small_chips else None)


# ── Log, checkpoints, resume ──


def test_a_step_that_does_not_fit_is_refused(bfloat16, monkeypatch):
    run = bfloat16
    held = train.memory_of(run.compiled, run.state, run.frozen)
    assert held["Adam's moments"] > 1.9 * held["adapters"] > 0 and held["base weights"] > 0
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(ValueError, match="does not fit.*rows_per_device"):
        train.memory_of(run.compiled, run.state, run.frozen)


def read_log(folder):
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def final_arrays(folder, step):
    """All arrays of a checkpoint, by path, as bytes, and the data's position."""
    manager = train.open_checkpoints((folder / "checkpoints").resolve(), 2, step)
    found = manager.restore(step, args=ocp.args.Composite(
        model_params=ocp.args.PyTreeRestore(), optimizer_state=ocp.args.PyTreeRestore(),
        data=ocp.args.JsonRestore()))
    manager.close()
    arrays = {name: found[name] for name in ("model_params", "optimizer_state")}
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    contents = {str(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
    return contents | {"data": found["data"]}


def test_a_stopped_run_continues_bit_for_bit(tmp_path, capsys):
    whole = train_driver.go(train_driver.build(tmp_path / "whole", steps=5))
    first = train_driver.build(tmp_path / "parts", steps=5)
    twice = iter([first.validate] * 2)  # the third validation, after step 5, breaks off
    first.validate = lambda adapters: next(twice)(adapters)
    with pytest.raises(StopIteration):
        train_driver.go(first)
    first.manager.close()  # waits for the files of step 4
    second = train_driver.build(tmp_path / "parts", steps=5)
    assert second.state.step == 4
    assert shardings(second.state.adapters, second.state.opt_state) == shardings(
        whole.state.adapters, whole.state.opt_state)
    train_driver.go(second)
    assert read_log(tmp_path / "parts") == read_log(tmp_path / "whole")
    assert final_arrays(tmp_path / "parts", 5) == final_arrays(tmp_path / "whole", 5)

    again = train_driver.build(tmp_path / "whole", steps=5)  # nothing left to train
    capsys.readouterr()
    assert train_driver.go(again).state.step == 5 and not capsys.readouterr().out
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "parts")
    step, adapters, notes = merge.restore_adapters(tmp_path / "whole" / "checkpoints", 0)
    assert step == 5 and notes == {"rank": 4, "steps": 5}
    assert train.adapters_sha256(whole.state.adapters) == weights.adapters_digest(adapters)
    nnx.update(whole.model, whole.state.adapters)
    ours = {path: [np.asarray(pair[side].get_value()) for side in "ab"]
            for path, pair in gemma.adapted_modules(whole.model).items()}
    assert adapters.keys() == ours.keys()
    for path, pair in adapters.items():
        jax.tree.map(np.testing.assert_array_equal, list(pair), ours[path])
    from_an_earlier_checkpoint(tmp_path / "whole", whole)


def from_an_earlier_checkpoint(folder, run):
    """As 03 shows it: back to the newest checkpoint but the last, and on to the same bits."""
    files = sorted(folder.rglob("*"))
    with train.open_checkpoints(folder / "checkpoints", 2, 5) as manager:
        earlier = train.restore(manager, run.state, run.recipe, before=5)
        assert earlier.step == 4
        assert train.restore(manager, run.state, run.recipe, before=1) is run.state
    with run.mesh:
        (last, record), = train.steps_from(train_driver.parts_of(run), earlier)
    assert last.step == 5 and last.data == run.state.data
    wanted = train.adapters_sha256(run.state.adapters)
    assert train.adapters_sha256(last.adapters) == wanted
    logged = train.read_log(folder / "log.jsonl").dropna(subset="loss").set_index("step")
    assert record["loss"] == logged.loss[5] and record["grad_norm"] == logged.grad_norm[5]
    assert sorted(folder.rglob("*")) == files, "nothing is written"


def test_a_checkpoint_continues_on_another_number_of_devices(bfloat16, tmp_path):
    run = bfloat16
    with train.open_checkpoints(tmp_path, 1, 1) as manager:
        save_all(manager, run, 1)
        mesh = gemma.make_mesh(run.model.config, (1, 2), jax.devices()[:2])
        other, _ = train.start(gemma.place(nnx.clone(run.model), mesh), run.optimizer, mesh)
        found = train.restore(manager, other, {"rank": 4})
    assert found.data == {"next": 1} and found.step == 1
    for before, after in zip(*(jax.tree.leaves((state.adapters, state.opt_state))
                               for state in (run.state, found))):
        np.testing.assert_array_equal(before, after)
        assert after.sharding.mesh == mesh


def save_all(manager, run, *steps):
    """A checkpoint of each of the steps, all of the same arrays."""
    for step in steps:
        state = dataclasses.replace(run.state, step=step, data={"next": step})
        train.save(manager, state, {"rank": 4})
    manager.wait_until_finished()


def varied(run, step):
    """The run's state at a step, with numbers in its arrays that no other step has."""
    def vary(array):
        if array.dtype != np.float32:
            return array
        values = np.random.default_rng(step).normal(size=array.shape).astype(np.float32)
        return jax.device_put(values, array.sharding)
    adapters, opt_state = jax.tree.map(vary, (run.state.adapters, run.state.opt_state))
    return train.State(step, adapters, opt_state, {"next": step})


def contents(state):
    """All of a state, to compare it bit for bit."""
    arrays = jax.tree.leaves((state.adapters, state.opt_state))
    return [np.asarray(array).tobytes() for array in arrays] + [state.data, state.step]


@pytest.fixture(scope="module")
def two_checkpoints(bfloat16, tmp_path_factory):
    """(folder, {step: its state}) of checkpoints 1 and 2, which have different numbers."""
    folder = tmp_path_factory.mktemp("two")
    states = {step: varied(bfloat16, step) for step in (1, 2)}
    with train.open_checkpoints(folder, 1, 2) as manager:
        for state in states.values():
            train.save(manager, state, {"rank": 4, "alpha": 8.0})
        manager.wait_until_finished()
    return folder, states


def restored(folder, run):
    with train.open_checkpoints(folder, 1, 2) as manager:
        return train.restore(manager, run.state, {"rank": 4, "alpha": 8.0})


def files_of_each_kind(folder):
    """One file of each kind that a checkpoint has, the largest, relative to its folder."""
    kinds = {}
    for path in sorted(folder.rglob("*"), key=lambda path: path.stat().st_size):
        if path.is_file():
            name = "data" if path.parent.name == "d" else path.name
            kinds[path.parent.relative_to(folder), name] = path.relative_to(folder)
    return list(kinds.values())


def damaged(content):
    """A file's bytes after what disks and killed processes do; None where the file is gone."""
    yield "gone", None
    yield "empty", b""
    yield "half", content[:len(content) // 2]
    yield "zeros", bytes(len(content))
    for share in (0.1, 0.5, 0.9):
        flipped = bytearray(content)
        flipped[int(share * len(content))] ^= 1 << int(10 * share) % 8
        yield f"a bit at {share}", bytes(flipped)


@pytest.mark.slow
def test_however_a_checkpoint_is_damaged_it_is_whole_or_left_aside(
        bfloat16, two_checkpoints, tmp_path, capsys):
    """Equal, or the older one with a line: never a traceback, never other numbers."""
    whole, states = two_checkpoints
    left_aside = 0
    for file in files_of_each_kind(whole / "2"):
        for what, content in damaged((whole / "2" / file).read_bytes()):
            shutil.copytree(whole, folder := tmp_path / "damaged")
            (folder / "2" / file).unlink()
            if content is not None:
                (folder / "2" / file).write_bytes(content)
            found = restored(folder, bfloat16)
            said = capsys.readouterr().out
            assert contents(found) == contents(states[found.step]), (file, what)
            assert found.step == 2 or "checkpoint 2 is damaged" in said, (file, what, said)
            left_aside += found.step == 1
            shutil.rmtree(folder)
    assert left_aside > 10


@pytest.mark.parametrize("part,named", [
    ("model_params", "adapters"), ("optimizer_state", "optimizer state"),
    ("data", "position in the data")])
def test_a_checkpoint_with_other_numbers_is_left_aside(
        bfloat16, two_checkpoints, tmp_path, capsys, part, named):
    """All files are whole, so nobody but the digest can notice."""
    whole, states = two_checkpoints
    folder = shutil.copytree(whole, tmp_path / "mixed")
    shutil.rmtree(folder / "2" / part)
    shutil.copytree(folder / "1" / part, folder / "2" / part)
    found = restored(folder, bfloat16)
    assert contents(found) == contents(states[1])
    assert f"other bytes than were saved: {named}" in capsys.readouterr().out


def test_a_recipe_that_a_flipped_bit_changed_is_damage_not_another_recipe(
        bfloat16, two_checkpoints, tmp_path, capsys):
    whole, states = two_checkpoints
    folder = shutil.copytree(whole, tmp_path / "flipped")
    notes = folder / "2" / "_CHECKPOINT_METADATA"
    notes.write_text(notes.read_text().replace('"rank": 4', '"rank": 5'))
    assert contents(restored(folder, bfloat16)) == contents(states[1])
    assert "its recipe isn't the one that was saved" in capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_version_has_no_digests(bfloat16, two_checkpoints, tmp_path):
    whole, states = two_checkpoints
    folder = shutil.copytree(whole, tmp_path / "old")
    notes = folder / "2" / "_CHECKPOINT_METADATA"
    content = json.loads(notes.read_text())
    del content["custom_metadata"]["digests"]
    notes.write_text(json.dumps(content))
    assert contents(restored(folder, bfloat16)) == contents(states[2])


def test_a_bug_of_ours_is_not_called_damage(bfloat16, two_checkpoints, tmp_path, monkeypatch):
    """Each whole checkpoint was left aside as "damaged", and the traceback was lost."""
    monkeypatch.setattr(train, "_same_shapes", None)
    with pytest.raises(TypeError):
        restored(shutil.copytree(two_checkpoints[0], tmp_path / "whole"), bfloat16)
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["1", "2"]


def test_an_error_inside_orbax_that_a_wrong_argument_brings_is_not_called_damage(
        bfloat16, two_checkpoints, tmp_path, monkeypatch, capsys):
    """It fails for one checkpoint only, so the older one could be restored, and 2 deleted."""
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "whole")
    restore = train.ocp.CheckpointManager.restore

    def at_the_bottom(manager, step, args):
        if step == 2:
            len(step)  # as a library does with what isn't a list
        return restore(manager, step, args=args)

    monkeypatch.setattr(train.ocp.CheckpointManager, "restore", at_the_bottom)
    with pytest.raises(TypeError, match="has no len") as caught:
        restored(folder, bfloat16)
    assert "at_the_bottom" in [entry.name for entry in caught.traceback], "where it happened"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    with pytest.raises(TypeError, match="has no len"):
        merge.restore_adapters(folder, 2)
    assert "damaged" not in capsys.readouterr().out

    wrong = ValueError("DATA_LOSS: what a library says of a file\nand more")
    monkeypatch.setattr(train.ocp.CheckpointManager, "restore", lambda *parts, **more: fail(wrong))
    with pytest.raises(UserError, match="none of the checkpoints"):
        restored(folder, bfloat16)
    assert "2 is damaged (ValueError: DATA_LOSS: what a library says of a file) and" in (
        capsys.readouterr().out)


def fail(error):
    raise error


@pytest.mark.parametrize("notes", [None, {}, {"recipe": []}, {"recipe": {}, "digests": [1]},
                                   {"recipe": {}, "digests": {"adapters": "0"}}], ids=str)
def test_notes_of_another_shape_are_damage(bfloat16, two_checkpoints, tmp_path, capsys, notes):
    whole, states = two_checkpoints
    folder = shutil.copytree(whole, tmp_path / "other")
    path = folder / "2" / "_CHECKPOINT_METADATA"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"custom_metadata": notes}))
    assert contents(restored(folder, bfloat16)) == contents(states[1])
    assert "checkpoint 2 is damaged (" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "3", '{"custom_metadata": []}', '{"item_handlers": 3}'])
def test_notes_that_orbax_cannot_open_are_one_line(two_checkpoints, tmp_path, text):
    """It reads those of every checkpoint when it opens the folder, and 03 and 04 ended there."""
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "other")
    (folder / "2" / "_CHECKPOINT_METADATA").write_text(text)
    for opened in (lambda: train.open_checkpoints(folder, 1, 2).close(),
                   lambda: merge.restore_adapters(folder, 1)):
        try:
            opened()
        except UserError as error:
            assert "is damaged, in its _CHECKPOINT_METADATA" in str(error)
            assert len(str(error).splitlines()) == 1


def test_no_memory_is_not_called_damage(bfloat16, two_checkpoints, tmp_path, monkeypatch):
    def full(*parts):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 2 GiB")
    monkeypatch.setattr(train, "_restore_step", full)
    with pytest.raises(jax.errors.JaxRuntimeError):
        restored(shutil.copytree(two_checkpoints[0], tmp_path / "whole"), bfloat16)
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["1", "2"]


def test_each_bit_of_each_array_counts_in_the_digest():
    rng = np.random.default_rng(0)
    for kind in (np.float32, np.int32, jnp.bfloat16, np.int8, bool):
        array = (rng.normal(size=(3, 5)) * 9).astype(kind)
        sums = {int(train.word_sum(jnp.asarray(array)))}
        changes = 0
        for place in range(array.nbytes):
            for bit in range(1 if kind is bool else 8):
                raw = bytearray(array.tobytes())
                raw[place] ^= 1 << bit
                changed = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
                sums.add(int(train.word_sum(jnp.asarray(changed))))
                changes += 1
        assert len(sums) == changes + 1, kind
    swapped = jnp.array([2.0, 1.0])
    assert train.word_sum(swapped) != train.word_sum(swapped[::-1])


def log_lines():
    """A log of three steps, as the loop writes it."""
    fields = dict.fromkeys(train.STEP_FIELDS, 1.5) | {"real_tokens": 9}
    return [{"step": 0, "val_loss": 2.0}, *({"step": step} | fields for step in (1, 2, 3)),
            {"step": 3, "val_loss": 1.0}]


@pytest.mark.parametrize("line", [
    b'{"step": 4, "loss"', b"{}}", b"3", b"[]", b"null", b'{"step": "x"}', b'{"step": null}',
    b'{"loss": 1.0}', b"\xff\xfe{}", b"\x00" * 40, b'{"step": 2, "val_loss": {"a": 1}}',
    b'{"step": 2.5, "val_loss": 1.0}', b'{"step": true, "val_loss": 1.0}', b"[" * 100_000])
@pytest.mark.parametrize("place", ["middle", "end"])
def test_a_damaged_line_of_the_log_is_left_out_and_said(tmp_path, capsys, line, place):
    whole = [json.dumps(record).encode() for record in log_lines()]
    at = 2 if place == "middle" else len(whole)
    (path := tmp_path / "log.jsonl").write_bytes(b"\n".join([*whole[:at], line, *whole[at:]]))
    log = train.StepLog(path, 4, 1)
    log.rewind(3)
    said = capsys.readouterr().out
    assert "1 damaged lines are left out" in said and f"line {at + 1}" in said
    assert read_log(tmp_path) == [
        {key: value for key, value in record.items() if key != "seconds"} for record in log_lines()]
    assert log.validations == [2.0, 1.0]
    assert len(train.read_log(path)) == 5
    log.rewind(2)
    assert len(train.read_log(path)) == 3 and not capsys.readouterr().out


def test_a_printed_line_has_the_mean_time_of_its_steps(tmp_path, capsys):
    log = train.StepLog(tmp_path / "log.jsonl", 4, 2)
    log.rewind(0)
    for step, (seconds, tokens) in enumerate([(9.0, 9), (2.0, 30), (1.0, 10), (3.0, 30)], 1):
        log.training({"step": step, "loss": 1.0, "learning_rate": 0.1, "grad_norm": 1.0,
                      "seconds": seconds, "real_tokens": tokens})
    first, second, last = capsys.readouterr().out.splitlines()
    assert "step 1/4" in first and "9.00 s/step | 1 real tok/s" in first
    assert "step 2/4" in second and "2.00 s/step | 15 real tok/s" in second
    assert "step 4/4" in last and "2.00 s/step | 10 real tok/s" in last
    assert len(read_log(tmp_path)) == 4


def test_sizes_are_shown_with_a_unit_that_reads_well():
    assert [pictures.memory(gib) for gib in (14.61, 0.003399, 2e-6)] == [
        "14.6 GiB", "3.48 MiB", "2.1 KiB"]


@pytest.mark.parametrize("step", [0, 3])
def test_a_log_of_somebody_else_is_not_emptied(tmp_path, step):
    theirs = '{"epoch": 1, "loss": 2.0}\n{"epoch": 2, "loss": 1.5}\n'
    (path := tmp_path / "log.jsonl").write_text(theirs)
    with pytest.raises(UserError, match="isn't a log of this page"):
        train.StepLog(path, 4, 1).rewind(step)
    assert path.read_text() == theirs


@pytest.mark.slow
def test_a_finished_run_whose_log_is_lost_measures_once_more(tmp_path, capsys):
    train_driver.go(train_driver.build(tmp_path, steps=3))
    last = read_log(tmp_path)[-1]
    for lost in (lambda path: path.unlink(), lambda path: path.write_bytes(b"\x00" * 99)):
        lost(tmp_path / "log.jsonl")
        train_driver.go(train_driver.build(tmp_path, steps=3))
        assert read_log(tmp_path) == [last] and last["step"] == 3
        fig = pictures.draw_loss(train.read_log(tmp_path / "log.jsonl"), 3, 1.0)
        assert "at step 3" in fig.axes[0].get_title("left")


def lose_moments(step):
    shutil.rmtree(step / "optimizer_state")


def cut_arrays(step):
    for file in (step / "model_params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:file.stat().st_size // 2])


def cut_position(step):
    (step / "data" / "metadata").write_text('{"next_in')


@pytest.mark.parametrize("damage", [lose_moments, cut_arrays, cut_position])
def test_the_newest_checkpoint_that_restores_is_taken(bfloat16, tmp_path, capsys, damage):
    run = bfloat16
    with train.open_checkpoints(tmp_path, 1, 3) as manager:
        save_all(manager, run, 1, 2, 3)
    damage(tmp_path / "3")
    with train.open_checkpoints(tmp_path, 1, 3) as manager:
        other = "holds step . of another recipe: rank: 4 there, 8 here"
        with pytest.raises(ValueError, match=other):
            train.restore(manager, run.state, {"rank": 8})
        found = train.restore(manager, run.state, {"rank": 4})
        assert found.step == 2 and found.data == {"next": 2}
        assert "checkpoint 3 is damaged" in capsys.readouterr().out
        assert manager.all_steps() == [1, 2]
        save_all(manager, run, 3)
        assert train.restore(manager, run.state, {"rank": 4}).step == 3
    for step in (1, 2, 3):
        lose_moments(tmp_path / str(step))
    with train.open_checkpoints(tmp_path, 1, 3) as manager:
        with pytest.raises(ValueError, match="none of the checkpoints .*fresh=True"):
            train.restore(manager, run.state, {"rank": 4})
        assert manager.all_steps() == [1, 2, 3]


@pytest.mark.parametrize("damage", [lose_moments, cut_arrays, cut_position, lambda folder: None])
def test_fresh_throws_checkpoints_away_whatever_they_look_like(bfloat16, tmp_path, damage):
    folder = tmp_path / "checkpoints"
    with train.open_checkpoints(folder, 1, 3) as manager:
        save_all(manager, bfloat16, 1, 2, 3)
    damage(folder / "3")
    (folder / "4.orbax-checkpoint-tmp-1700000000").mkdir()
    (folder / "5").mkdir()
    train.throw_away(folder)
    assert not folder.exists()
    train.throw_away(folder)  # there is nothing to throw away, as before the first run


@pytest.mark.parametrize("name", ["thesis.txt", "2024/holiday.jpg", "photos/2024/one.jpg", "3/x"])
def test_a_folder_that_we_did_not_make_is_neither_thrown_away_nor_replaced(
        bfloat16, tmp_path, name):
    """CHECKPOINTS=~ and fresh=True once deleted a home; a folder called 2024 was a torn step."""
    with train.open_checkpoints(tmp_path, 1, 2) as manager:
        save_all(manager, bfloat16, 1, 2)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = {path for path in tmp_path.rglob("*")}
    with pytest.raises(UserError, match="isn't a checkpoint.*set CHECKPOINTS"):
        train.throw_away(tmp_path)
    if name[0].isdecimal():
        with train.open_checkpoints(tmp_path, 1, 2) as manager:
            with pytest.raises(UserError, match="isn't a checkpoint.*set CHECKPOINTS"):
                train.restore(manager, bfloat16.state, {"rank": 4})
    assert {path for path in tmp_path.rglob("*")} == before


def test_one_of_several_hosts_stops_at_a_torn_checkpoint(bfloat16, tmp_path, monkeypatch):
    """Where one went on from an older step and another did not, they would wait forever."""
    run = bfloat16
    with train.open_checkpoints(tmp_path, 1, 2) as manager:
        save_all(manager, run, 1, 2)
        lose_moments(tmp_path / "2")
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(ValueError, match="checkpoint 2 .* is damaged .*Delete it"):
            train.restore(manager, run.state, {"rank": 4})


def test_a_gradient_that_is_not_finite_stops_before_anything_is_written(bfloat16, tmp_path):
    run = bfloat16
    with train.open_checkpoints(tmp_path / "checkpoints", 1, 4) as manager:
        def broken(adapters, opt_state, frozen, batch):
            return adapters, opt_state, {"loss": jnp.nan, "grad_norm": jnp.nan, "real_tokens": 1}
        parts = train.Run(
            train_step=broken, frozen=run.frozen, validate=lambda adapters: 1.0, validate_every=3,
            dataset=run.dataset, mesh=run.mesh, log=train.StepLog(tmp_path / "log.jsonl", 4, 1),
            manager=manager, recipe={})
        with pytest.raises(ValueError, match="step 1: loss nan.*Lower learning_rate"):
            train.train(parts, run.state)
        assert not manager.all_steps()
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        {"step": 0, "val_loss": 1.0}]


def run_driver(folder, steps, kill_when=None):
    """Run the driver; `kill_when(folder)` decides when it gets SIGKILL. Was it killed?"""
    driver = [sys.executable, "-W", "ignore", ROOT / "tests/train_driver.py", folder, str(steps)]
    with open(folder / "out.txt", "a") as out:
        process = subprocess.Popen(driver, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            if kill_when and kill_when(folder):
                process.send_signal(signal.SIGKILL)
                process.wait()
                return True
            time.sleep(0.001)
    assert process.returncode == 0, (folder / "out.txt").read_text()[-2000:]
    return False


def steps_logged(folder):
    log = folder / "log.jsonl"
    return log.read_text().count('"loss"') if log.exists() else 0


@pytest.mark.slow
def test_kill_9_changes_no_bit(tmp_path):
    """During a save, if one can be met, else between two."""
    steps = 16
    (tmp_path / "whole").mkdir()
    run_driver(tmp_path / "whole", steps)
    (folder := tmp_path / "killed").mkdir()
    assert run_driver(folder, steps, lambda folder: steps_logged(folder) >= 8 and any(
        (folder / "checkpoints").glob("*tmp*")) or steps_logged(folder) >= 11)
    assert steps_logged(folder) < steps
    run_driver(folder, steps)
    starts = re.findall(r"training from step (\d+)", (folder / "out.txt").read_text())
    assert starts[0] == "0" and len(starts) == 2 and 0 < int(starts[1]) < steps
    assert read_log(folder) == read_log(tmp_path / "whole")
    assert final_arrays(folder, steps) == final_arrays(tmp_path / "whole", steps)


# ── Against PyTorch, in the serving environment ──

@needs_serve
@pytest.mark.parametrize("shape", ["TINY", "E2B"])
def test_logits_equal_transformers(tmp_path, shape):
    folder = random_gemma.write(tmp_path / "base", getattr(random_gemma, shape))
    config = gemma.config_from_hf(folder, dtype="float32")
    mesh = gemma.make_mesh(config)
    model = gemma.load_base(folder, config, mesh)
    tokens = np.random.default_rng(0).integers(3, config.num_embed, (4, 100)).astype(np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    serve("tests/torch_step.py", "logits", folder, tmp_path / "tokens.npy", tmp_path / "logits.npy")
    theirs = np.load(tmp_path / "logits.npy")
    assert np.abs(theirs).max() > 1
    assert np.abs(theirs - forward(model, mesh, tokens)).max() < 1e-3


@needs_serve
def test_one_optimizer_step_equals_torch_and_peft(tmp_path):
    """The same A, B and batch; loss, adapter gradients and the AdamW update."""
    folder = random_gemma.write(tmp_path / "base", random_gemma.TINY)
    config = gemma.config_from_hf(folder, dtype="float32")
    mesh = gemma.make_mesh(config)
    model = randomize_b(gemma.inject_lora(gemma.load_base(folder, config, mesh), 4, 8.0, mesh))
    # The first moment of the first step is (1 - b1) times the clipped gradient.
    run = train_driver.make(model, mesh, train.make_optimizer(lambda step: 1e-3, 0.01, 1.0))
    batch = packed()
    given = {f"batch.{field}": np.asarray(array) for field, array in vars(batch).items()}
    for path, pair in gemma.adapted_modules(model).items():
        for side, variable in pair.items():
            given[f"{path}.{side}"] = np.asarray(variable.get_value())
    np.savez(tmp_path / "in.npz", **given)
    serve("tests/torch_step.py", "step", folder, tmp_path / "in.npz", tmp_path / "out.npz",
          4, 8.0, 1e-3, 0.01, 1.0)
    adapters, opt_state, metrics = one_step(run, batch)
    nnx.update(model, adapters)
    moments = optax.tree_utils.tree_get(opt_state, "mu")
    moments = {".".join(map(str, path)): np.asarray(variable.get_value())
               for path, variable in nnx.to_flat_state(moments)}
    theirs = np.load(tmp_path / "out.npz")
    assert float(metrics["loss"]) == pytest.approx(float(theirs["loss"]), abs=1e-4)
    assert float(metrics["grad_norm"]) == pytest.approx(float(theirs["grad_norm"]), rel=1e-4)
    clip = min(1.0, 1.0 / float(metrics["grad_norm"]))
    compared = 0
    for path, pair in gemma.adapted_modules(model).items():
        for side, variable in pair.items():
            name = f"{path}.{side}"
            moment = next(v for k, v in moments.items()
                          if k.startswith(f"{path}.") and k.endswith(f"_{side}"))
            ours, grad = moment / 0.1 / clip, theirs[f"grad.{name}"]
            assert np.abs(ours - grad).max() <= 1e-4 * np.abs(grad).max(), name
            sure = np.abs(grad) * clip > 1e-6  # below, Adam's eps decides
            now, other = np.asarray(variable.get_value()), theirs[f"new.{name}"]
            # 1% of the step's length, 1e-3: where g is near 1e-6, g / (|g| + eps) amplifies noise.
            np.testing.assert_allclose(now[sure], other[sure], atol=1e-5, err_msg=name)
            compared += int(sure.sum())
    assert compared > 10_000


def test_no_room_is_said_in_two_lines_with_the_fix():
    """What the allocator of this machine says about 256 TiB; other errors pass as they are."""
    with pytest.raises(ValueError, match="(?s)this does not fit: .*rows_per_device") as found:
        with train.within_memory():
            jnp.zeros((2**46,), jnp.float32).block_until_ready()
    assert len(str(found.value).splitlines()) == 2
    with pytest.raises(TypeError), train.within_memory():
        jnp.zeros(("no", "shape"))
