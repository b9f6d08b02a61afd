"""The rows of CONTRIBUTING's table "How do I change…": a field is changed, and something follows.

Another dataset and row length go through all of 02 in test_data.py.
"""

import ast
import re
from dataclasses import fields, replace

import jupytext
import numpy as np
import pytest
from conftest import ROOT, a_data_meta, load, parse

import helpers
from helpers import data, style, train
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
        for number, listed in zip(places[::2], places[1::2], strict=True):
            source = next(ROOT.glob(f"{number}_*.py"))
            own = ["Settings"] if "class Settings" in source.read_text() else []
            settings = load(source.name, *own, "TINY", "FULL", length=512)[-1]
            named = set(re.findall(r"`(\w+)`", listed))
            assert named and named <= set(settings.__dataclass_fields__), (what, number, named)


@pytest.mark.parametrize("page", ["03_train.py", "05_serve_vllm.py"])
def test_a_table_shows_the_settings_that_a_page_names_and_folds_the_others(page, monkeypatch):
    settings = load(page, "TINY", length=512)
    call, = (node for node in ast.walk(parse(ROOT / page)) if isinstance(node, ast.Call)
             and getattr(node.func, "attr", "") == "show_settings")
    first = ast.literal_eval(call.args[1])
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda html: displayed.append(html.data))
    style.show_settings(settings, first)
    shown, folded = (re.findall(r'data row\d+ col0" >(\w+)<', table) for table in displayed)
    assert shown == first and len(first) < 10
    every = [field.name for field in fields(settings)]
    assert folded == [name for name in every if name not in first]
    assert "<details>" in displayed[1] and "<details>" not in displayed[0]


# ── What the reader sets is what the page uses ──
PAGES = [str(path.relative_to(ROOT))
         for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("appendix/*.py")])
         if "cfg = helpers.choose" in path.read_text()]


def marked(settings):
    """The same settings with a value in every field that nobody else would choose."""
    values = {}
    for place, field in enumerate(fields(settings)):
        value = getattr(settings, field.name)
        by_type = {bool: not value, int: 7_000 + place, float: 7_000.5 + place,
                   tuple: (f"marked {place}",)}
        values[field.name] = by_type.get(type(value), f"marked {place}")
    return type(settings)(**values)


def makes(node):
    """The names that a line of a page assigns, or the class that it defines."""
    if isinstance(node, ast.ClassDef):
        return {node.name}
    if not isinstance(node, ast.Assign):
        return set()
    parts = [part for target in node.targets for part in ast.walk(target)]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def needed_for(tree, name):
    """All names that the module-level lines which assign `name` read, and so on."""
    needed, before = {name}, None
    while before != needed:
        before = set(needed)
        for node in tree.body:
            if makes(node) & needed:
                inside = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
                needed |= {part.id for part in inside if isinstance(part.ctx, ast.Load)}
    return needed


@pytest.mark.parametrize("source", PAGES)
def test_every_field_of_the_chosen_settings_is_what_the_page_uses(source, monkeypatch):
    """After all lines that assign `cfg` it's still the set that was chosen, in every field."""
    chosen = []

    def choose(settings):
        chosen.append(marked(settings["tiny"]))
        return chosen[0]
    monkeypatch.setattr(helpers, "choose", choose)
    monkeypatch.setattr(train, "what_02_left", lambda: (None, a_data_meta(), None, None))
    for name in ("MAX_STEPS", "CHECKPOINTS", "BASE_DTYPE"):
        monkeypatch.delenv(name, raising=False)
    tree = parse(ROOT / source)
    own = set().union(*map(makes, tree.body))
    names = sorted((needed_for(tree, "cfg") & own) - {"cfg"})
    *_, cfg = load(source, *names, "cfg")
    assert cfg == chosen[0]
    read = {node.attr for path in [ROOT / source, *rooms()] for node in ast.walk(parse(path))
            if isinstance(node, ast.Attribute)}
    unused = {field.name for field in fields(cfg)} - read
    assert not unused, f"nobody reads {unused}"


def rooms():
    """The files that a page hands its settings to."""
    return [*ROOT.glob("helpers/*.py"), *ROOT.glob("serving/*.py"), *ROOT.glob("verilog/*.py")]


def test_the_environment_changes_what_is_set_there_and_nothing_else(monkeypatch):
    for name in ("MAX_STEPS", "CHECKPOINTS"):
        monkeypatch.delenv(name, raising=False)
    assert train.from_environment() == {}
    monkeypatch.setenv("MAX_STEPS", "")
    assert train.from_environment() == {}
    monkeypatch.setenv("MAX_STEPS", "20")
    assert train.from_environment() == {"max_steps": 20}
    monkeypatch.setenv("CHECKPOINTS", "gs://bucket/run")
    assert train.from_environment() == {"max_steps": 20, "checkpoints": "gs://bucket/run"}
    monkeypatch.setenv("MAX_STEPS", "a few")
    with pytest.raises(helpers.UserError, match="MAX_STEPS=a few isn't a number of steps"):
        train.from_environment()


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
        cfg = tiny("03_train.py", **{"epochs": 1.0, "max_steps": 0, "rows_per_step": 4} | changes)
        parts, micro_rows = train.micro_batches_of(cfg, fsdp)
        dataset = train.make_dataset(Rows(), parts, micro_rows, cfg.seed)
        assert next(iter(dataset)).tokens.shape == shape
        assert train.steps_of(cfg, len(Rows()), parts * micro_rows) == steps
        assert train.make_schedule(cfg, steps)(steps) == 0  # the schedule ends with the run


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path, monkeypatch):
    """The settings that say what is trained travel with it; how it is computed may change."""
    cfg = tiny("03_train.py")
    state = train.State(1, {"a": np.ones(2)}, {"m": np.ones(2)}, {})
    with train.open_checkpoints(tmp_path, 1, 1) as manager:
        train.save(manager, state, train.recipe_of(cfg))
        manager.wait_until_finished()
        for changes in ({"rank": 5}, {"alpha": 7.0}, {"targets": "q_einsum"}, {"dtype": "bfloat16"},
                        {"learning_rate": 1e-4}, {"warmup_steps": 3}, {"max_grad_norm": 0.5}):
            (name, value), = changes.items()
            said = re.escape(f"{name}: {getattr(cfg, name)} there, {value} here")
            with pytest.raises(ValueError, match=said):
                train.restore(manager, state, train.recipe_of(tiny("03_train.py", **changes)))
        with monkeypatch.context() as patch:
            patch.setattr(train, "OPTIMIZER", train.optax.lion)
            with pytest.raises(ValueError, match="optimizer: adamw there, lion here"):
                train.restore(manager, state, train.recipe_of(cfg))
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


# ── What only teaches doesn't stand between training and merging ──
def test_03_writes_its_recipe_before_anything_that_only_teaches():
    """`run_all.sh 02 04` on a rented slice goes on to 04 though a lesson's cell fails."""
    cells = [cell for cell in jupytext.read(ROOT / "03_train.py").cells if cell.cell_type == "code"]
    recipe, = (place for place, cell in enumerate(cells) if "train.write_recipe(" in cell.source)
    trained, = (place for place, cell in enumerate(cells) if "train.train(" in cell.source)
    assert recipe == trained + 1
    for place, cell in enumerate(cells):
        teaches = "raises-exception" in cell.metadata.get("tags", [])  # nbclient goes on after it
        assert teaches == (place > recipe), cell.source[:80]
