"""The rows of CONTRIBUTING's table "How do I change…": a field is changed, and something follows.

Another dataset and row length go through all of 02 in test_data.py.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, load

from helpers import data, train
from verilog import asking


def tiny(source, /, **changes):
    """The tiny settings of a notebook, with some fields changed."""
    names = ("FULL", "TINY") if source[:2] == "03" else ("Settings", "FULL", "TINY")
    return replace(load(source, *names, length=512)[-1], **changes)


# ── The table itself ──
def rows():
    """{what: (where, what follows)} of the table."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.split("## How do I change…")[1].split("\n## ")[0]
    cells = [re.split(r" ?\| ?", line)[1:] for line in section.splitlines() if line[:3] == "| *"]
    return {what.strip("*"): where for what, where, *_ in cells}


def test_every_field_of_the_table_exists():
    assert rows()
    for what, where in rows().items():
        places = re.split(r"\b(\d\d) (?=`)", where)[1:]
        for number, fields in zip(places[::2], places[1::2], strict=True):
            source = next(ROOT.glob(f"{number}_*.py"))
            own = ["Settings"] if "class Settings" in source.read_text() else []
            settings = load(source.name, *own, "TINY", "FULL", length=512)[-1]
            named = set(re.findall(r"`(\w+)`", fields))
            assert named and named <= set(settings.__dataclass_fields__), (what, number, named)


# ── Its rows ──
class Rows:
    """Forty packed rows of eight tokens."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return train.Batch(*[np.full(8, index)] * 4)


def test_batch():
    """A step's rows are cut into micro-batches of `rows_per_device` per fsdp device."""
    for fsdp, changes, shape, steps in (
            (1, {}, (2, 2, 8), 10), (1, {"rows_per_step": 8}, (4, 2, 8), 5),
            (1, {"rows_per_device": 4}, (1, 4, 8), 10), (2, {}, (1, 4, 8), 10),
            (4, {}, (1, 8, 8), 5)):  # never less than one micro-batch
        cfg = tiny("03_train.py", epochs=1.0, max_steps=0, **changes)
        parts, micro_rows = train.micro_batches_of(cfg, fsdp)
        dataset = train.make_dataset(Rows(), parts, micro_rows, cfg.seed)
        assert next(iter(dataset)).tokens.shape == shape
        assert train.steps_of(cfg, len(Rows()), parts * micro_rows) == steps
        assert train.make_schedule(cfg, steps)(steps) == 0  # the schedule ends with the run


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    """The settings that say what is trained travel with it; how it is computed may change."""
    cfg = tiny("03_train.py")
    state = train.State(1, {"a": np.ones(2)}, {"m": np.ones(2)}, {})
    with train.open_checkpoints(tmp_path, 1, 1) as manager:
        train.save(manager, state, train.recipe_of(cfg))
        manager.wait_until_finished()
        for changes in ({"rank": 5}, {"alpha": 7.0}, {"targets": "q_einsum"}, {"dtype": "float32"},
                        {"learning_rate": 1e-4}, {"warmup_steps": 3}, {"max_grad_norm": 0.5}):
            (name, value), = changes.items()
            said = re.escape(f"{name}: {getattr(cfg, name)} there, {value} here")
            with pytest.raises(ValueError, match=said):
                train.restore(manager, state, train.recipe_of(tiny("03_train.py", **changes)))
        with pytest.raises(ValueError, match="optimizer: adamw there, muon here"):
            train.restore(manager, state, train.recipe_of(cfg) | {"optimizer": "muon"})
        same = tiny("03_train.py", remat="BLOCK", rows_per_device=1)
        assert train.restore(manager, state, train.recipe_of(same)).step == 1


def test_prompt():
    """`system` opens the training chats and the evaluation's."""
    example = {"before": [{"role": "user", "content": "A register."}], "reasoning": "",
               "answer": "module"}
    for system in ("Answer briefly.", None):
        cfg = tiny("02_data.py", system=system)
        trained = data.as_messages(example, cfg.system, cfg.reasoning)[:-1]
        problem = type("Problem", (), {"prompt": "A register.", "interface": ""})
        assert asking.messages_for(problem, "ours", cfg.system) == trained


def test_learning_rate():
    """Warm-up starts from zero, and a short run warms up sooner."""
    for rate in (5e-3, 1e-2):
        cfg = tiny("03_train.py", learning_rate=rate, warmup_steps=10)
        schedule = train.make_schedule(cfg, 100)
        assert schedule(0) == 0 and schedule(10) == pytest.approx(rate) and schedule(100) == 0
        assert train.make_schedule(cfg, 8)(4) == pytest.approx(rate)
