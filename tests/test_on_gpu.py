"""The steps that appendix/on_gpu.py times, here small and on a CPU, and what it measured."""

from dataclasses import replace

import pandas as pd
import pytest
from conftest import ROOT

from appendix import on_gpu, steps

WIDTHS = {"num_embed": 512, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "num_kv_heads": 2,
          "head_dim": 32, "num_global_kv_heads": 2, "global_key_size": 32}


def small(recipe):
    """The same recipe with rows and layers for a CPU."""
    loss = recipe.loss
    if loss != "one-hot":
        loss = str(int(loss) // 32)
    return replace(recipe, sequence_length=recipe.sequence_length // 32, loss=loss, layers=6,
                   attention_block=min(recipe.attention_block, 32), compute_dtype="float32")


@pytest.fixture
def narrow(monkeypatch):
    real = steps.model_config

    def config_of(recipe):
        config = real(recipe)
        for name, value in WIDTHS.items():
            setattr(config, name, value)
        return config

    monkeypatch.setattr(steps, "model_config", config_of)


def test_our_step_has_the_loss_of_tunix_s_own_trainer_and_lowers_it(narrow):
    (theirs,), _ = on_gpu.losses_and_times(small(on_gpu.KINDS["published"]), 1)
    ours, times = on_gpu.losses_and_times(small(on_gpu.KINDS["its row"]), 4)
    assert ours[0] == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < ours[0] and len(times) == 4


@pytest.mark.parametrize("kind", ["int8 products", "nf4"])
def test_a_quantized_base_of_random_codes_runs(narrow, kind):
    losses, _ = on_gpu.losses_and_times(small(on_gpu.KINDS[kind]), 2)
    assert losses[1] != losses[0]


def test_what_the_pages_say_of_the_gpu_is_in_the_table():
    table = pd.read_csv(on_gpu.STORED)
    assert (table.tokens_per_second / (table.real_tokens / table.seconds) - 1).abs().max() < 1e-4
    assert (table.fastest <= table.seconds).all() and (table.seconds <= table.slowest).all()
    speeds = on_gpu.speeds(table)
    ours, theirs = speeds["ours, four rows of 2,048"], speeds["published"]
    six = table[table.layers == 6].set_index("recipe").seconds
    page = (ROOT / "data/measured/README.md").read_text()
    for row in table.itertuples():
        assert f"| {1e3 * row.seconds:.0f} | {row.tokens_per_second:,.0f} |" in page
    said = f"{ours / theirs:.1f} times"
    assert f"{ours:,.0f}" in page and f"{theirs:.0f} real tokens" in page and said in page
    alone = six["published"] / six["ours, on the published row"]
    status = (ROOT / "docs/STATUS.md").read_text()
    assert f"it's {said}" in status and f"with 6 layers: {alone:.1f} times" in status
    assert said in " ".join((ROOT / "README.md").read_text().split())
