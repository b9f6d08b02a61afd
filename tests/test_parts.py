"""appendix/parts: of a step compiled on the CPU, each part has the FLOPs that it must have."""

import math
import types
from collections import Counter

import jax
import optax
import pytest
import random_gemma

from appendix import parts
from helpers import gemma, train
from tables import architecture
from tpu_time import hlo, tape

pytestmark = pytest.mark.laboratory

RANK, MICRO_BATCHES, ROWS, LENGTH, TRAINED = 4, 2, 2, 64, 16
TOKENS = MICRO_BATCHES * ROWS * LENGTH


def add_up(records, sums, times=1):
    """FLOPs of a tape by part and direction, into `sums`."""
    for record in records:
        if isinstance(record, tape.Loop):
            add_up(record.body, sums, times * (record.trips or 1))
        elif isinstance(record, tape.Compute):
            about = record.about
            sums[about.part, about.direction] += about.flops * times


def flops_by_part(base):
    """{(part, direction): FLOPs} of 03's step on one CPU device."""
    config = gemma.config_from_hf(base)
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    model = gemma.load_base(base, config, mesh)
    gemma.use_block_attention(model, 16)
    model = gemma.inject_lora(model, RANK, 8.0, mesh)
    optimizer = train.make_optimizer(optax.constant_schedule(1e-3), 0.0, 1.0)
    lowered = train.lower_step(model, optimizer, train.make_loss(TRAINED), mesh,
                               (MICRO_BATCHES, ROWS, LENGTH))
    program = hlo.Program(lowered.compile().as_text())
    sums = Counter()
    add_up(tape.read(program, parts.part_of), sums)
    return sums


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return random_gemma.write(tmp_path_factory.mktemp("parts") / "base", random_gemma.TINY)


@pytest.fixture(scope="module")
def counted(base):
    return flops_by_part(base)


def test_each_part_has_the_products_that_the_architecture_gives_it(base, counted):
    config = architecture.read_config(base)
    mlp = projections = lora = 0
    for module in architecture.modules(config):
        a, b = module.adapter(RANK)
        lora += math.prod(a) + math.prod(b)
        if module.kind in ("gate_proj", "up_proj", "down_proj"):
            mlp += module.size
        else:
            projections += module.size
    assert counted["MLP", "forward"] == 2 * TOKENS * mlp == counted["MLP", "backward"]
    assert counted["projections", "forward"] == 2 * TOKENS * projections
    # The first layer's input has no gradient, because the embedding is frozen.
    assert 0.8 < counted["projections", "backward"] / counted["projections", "forward"] < 1.0
    text = architecture.text_config(config)
    output = 2 * MICRO_BATCHES * ROWS * TRAINED * text["hidden_size"] * text["vocab_size"]
    assert counted["output matrix", "forward"] == output == counted["output matrix", "backward"]
    assert counted["attention", "forward"] > 0
    assert counted["LoRA", "forward"] == 2 * TOKENS * lora
    assert not any(flops for (part, _), flops in counted.items()
                   if part in ("norms", "conversions", "optimizer", "other"))


def test_a_function_may_be_renamed(base, counted, monkeypatch):
    """Parts are known by scopes, so another name of a function of ours changes no attribution."""
    for room, name in ((gemma, "attend"), (train, "token_losses"), (train, "hidden_states")):
        function = getattr(room, name)
        code = function.__code__.replace(co_name="something_else", co_qualname="something_else")
        renamed = types.FunctionType(code, function.__globals__, "something_else",
                                     function.__defaults__, function.__closure__)
        monkeypatch.setattr(room, name, renamed)
    assert flops_by_part(base) == counted
