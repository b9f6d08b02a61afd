"""The rows of CONTRIBUTING's table "How do I change…": a field is changed, and something follows.

Another dataset and row length go through all of 02 in test_data.py.
"""

import ast
import functools
import json
import math
import re
from dataclasses import fields, replace

import jupytext
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, a_data_meta, load, parse

import helpers
import serving
import verilog
from helpers import data, style, train
from serving import limits
from tables import architecture, hardware
from tpu_time import fit, links
from verilog import asking, plans, scores


def tiny(source, /, **changes):
    """The tiny settings of a notebook, with some fields changed."""
    names = ("FULL", "TINY") if source[:2] == "03" else ("Settings", "FULL", "TINY")
    return replace(load(source, *names, length=512, base=None)[-1], **changes)


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
            tree = parse(source)
            own = set().union(*map(makes, tree.body))
            names = sorted((needed_for(tree, "TINY") & own) - {"TINY"})
            asked = [*names, "TINY", "TINY"]  # TINY twice: then it's a list in any case
            *_, settings = load(source.name, *asked, length=512, base=None)
            named = set(re.findall(r"`(\w+)`", listed))
            assert named and named <= set(settings.__dataclass_fields__), (what, number, named)


@pytest.mark.parametrize("page", ["03_train.py", "05_serve_vllm.py"])
def test_a_table_shows_the_settings_that_a_page_names_and_folds_the_others(page, monkeypatch):
    settings = load(page, "TINY", length=512, base=None)
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
            longer_memory = functools.partial(train.optax.adamw, b2=0.95)
            patch.setattr(train, "OPTIMIZER", longer_memory)
            said = re.escape("optimizer: adamw there, adamw(b2=0.95) here")
            with pytest.raises(ValueError, match=said):
                train.restore(manager, state, train.recipe_of(cfg))
        same = tiny("03_train.py", remat="BLOCK", rows_per_device=1)
        assert train.restore(manager, state, train.recipe_of(same)).step == 1


def test_an_optimizer_without_a_name_is_refused(monkeypatch):
    """Two lambdas would look the same to the recipe, and one would go on from the other's state."""
    monkeypatch.setattr(train, "OPTIMIZER", lambda rate, **words: train.optax.lion(rate, **words))
    with pytest.raises(helpers.UserError, match=r"needs a name.*functools.partial"):
        train.recipe_of(tiny("03_train.py"))


@pytest.mark.parametrize("optimizer, numbers", [("adamw", 2), ("lion", 1)])
def test_optimizer(optimizer, numbers, monkeypatch):
    """The log finds the rate of another one, too. What 01 and 08 count for its state is ours."""
    monkeypatch.setattr(train, "OPTIMIZER", getattr(train.optax, optimizer))
    adapters = {"a": np.ones(1_000, np.float32)}
    rule = train.make_optimizer(lambda step: 0.25, 0.001, 1.0)
    state = rule.init(adapters)
    _, state = rule.update({"a": np.ones(1_000, np.float32)}, state, adapters)
    assert state.hyperparams["learning_rate"] == 0.25
    kept = [array for array in train.jax.tree.leaves(state) if array.size == 1_000]
    assert len(kept) == numbers


def test_the_memory_of_an_adapter_counts_what_the_optimizer_keeps():
    """If this fails, `OPTIMIZER` is another one: make ADAPTER_BYTES in tpu_time/fit.py follow."""
    numbers = np.ones(1_000, np.float32)
    state = train.make_optimizer(lambda step: 1.0, 0.001, 1.0).init({"a": numbers})
    arrays = [array for array in train.jax.tree.leaves(state) if array.size == numbers.size]
    held = numbers.nbytes + sum(array.nbytes for array in arrays)
    assert held / numbers.size == fit.ADAPTER_BYTES


@pytest.fixture
def a_chip(monkeypatch):
    """A row in each of the two tables: a chip that exists nowhere, and a slice of four."""
    row = hardware.Chip(
        name="test", pci="0xfffe", jax=("TPU test",), google="test", cores=2, flops=1000e12,
        int8=None, hbm=64 * 2**30, bandwidth=3000e9, link_bandwidth=80e9, dollars_per_hour=None)
    monkeypatch.setitem(hardware.CHIPS, "test", row)
    monkeypatch.setitem(hardware.SLICES, "test-8", hardware.Slice("test-8", "31b", "2x2x1"))

    def change(**numbers):
        monkeypatch.setitem(hardware.CHIPS, "test", replace(row, **numbers))
    return change


def test_chip_by_its_row(a_chip):
    """Memory, price and floors follow from the row; a number that nobody knows isn't made up."""
    fitted = fit.best_fit("test", 4)
    assert fitted.slice == "test-8" and fitted.fits and not fitted.compiled
    assert fitted.limit == 64
    (listed, price), *_ = fit.renters_rows(slices={"test-8": ("test", 4)})
    assert listed == fitted and math.isnan(price)
    assert fit.run_cost(fitted, 1e6, price)["dollars_text"] == ""
    a_chip(dollars_per_hour=2.0)
    cost = fit.run_cost(fitted, 1e6, fit.price("test", 4))
    assert cost["dollars"] == pytest.approx(8 * cost["hours"]) and cost["dollars_text"]

    config = architecture.read_config(ROOT / "data" / "configs" / "gemma4_31b.json")
    options = serving.Options(chip="test", tensor_parallel=4, quantization="int8")
    assert limits.machine_of(options, config).peak == 4 * 2 * 1000e12, "never too slow"
    a_chip(int8=1500e12)
    machine = limits.machine_of(options, config)
    assert machine.system == "test-8" and machine.peak == 4 * 1500e12
    plan = limits.memory_plan(config, hardware.chip("test").hbm, 4, 1, 2, 62.5e9)
    assert plan["requests of 16,384"] > 0


def test_a_chip_is_timed_when_clock_and_wiring_are_known(a_chip):
    with pytest.raises(helpers.UserError, match="clock of a test.*tables/hardware.py"):
        links.box_of("test-8").clock  # noqa: B018
    with pytest.raises(helpers.UserError, match="how test chips are wired.*torus"):
        links.box_of("test-8").reach([0, 1])
    a_chip(clock=2e9, torus=3)
    box = links.box_of("test-8")
    assert box.shape == (2, 2, 1) and box.clock == 2e9
    assert box.reach([0, 1]).speed == links.LINK * 80e9
    assert links.Box("test", (4, 4, 4)).ring(0) and not links.Box("test", (16, 2, 1)).ring(0)
    a_chip(clock=2e9, torus=2)
    assert links.Box("test", (16, 2)).ring(0) and links.Box("test", (2, 4)).snakes(range(8))


def test_a_slice_without_a_topology_is_not_timed():
    """It was a ValueError about int(): slice_of knows such a slice, and box_of doesn't."""
    with pytest.raises(helpers.UserError, match="v6e-16 stand.*topology.*SLICES"):
        links.box_of("v6e-16")


def test_the_site_gets_no_number_that_json_does_not_have(a_chip, monkeypatch):
    """A chip without a price was NaN, which no browser's JSON reads."""
    monkeypatch.syspath_prepend(ROOT / "tools" / "site")
    import cost_data
    monkeypatch.setattr(fit, "SLICES", {"test-8": ("test", 4)})
    page = json.loads(json.dumps(cost_data.page_data(), allow_nan=False))
    assert [row["price"] for row in page["rows"] if row["slice"] == "test-8"][0] is None


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


BENCHMARK = """{"question": "How wide is [7:0]?", "answer": "8"}
{"question": "And [3:0]?", "answer": "4"}
"""


def test_benchmark_of_questions_in_02(tmp_path, monkeypatch):
    """02 compares with a .jsonl of questions as with a folder, and 03 asks no counter then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text(BENCHMARK)
    (tmp_path / "mine.json").write_text("[]")
    exam_prompts = functools.partial(data.exam_prompts, questions=verilog.questions)
    exams = exam_prompts("mine.jsonl")
    assert exam_prompts("") == {}
    assert list(exams.values()) == ["How wide is [7:0]?", "And [3:0]?"]
    assert data.overlap(["and  [3:0]?", "another"], exams)[0] == {0}
    with pytest.raises(helpers.UserError, match="mine.json' is a file.*a .jsonl file"):
        exam_prompts("mine.json")
    with pytest.raises(helpers.UserError, match="no file none.jsonl"):
        exam_prompts("none.jsonl")
    assert len(exam_prompts(str(ROOT / "data" / "tiny_eval"))) == 38
    verilogs = {exam: a_data_meta(evaluation=exam).asks_verilog
                for exam in ("mine.jsonl", "", "data/tiny_eval")}
    assert verilogs == {"mine.jsonl": False, "": False, "data/tiny_eval": True}


def test_benchmark_of_questions_of_your_own(tmp_path, monkeypatch, capsys):
    """The lines that the guide prints for it run as they stand there, with answers of ours."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text(BENCHMARK)
    guide = (ROOT / "docs/OWN_DATA.md").read_text()
    printed = guide.split("## Score questions of your own")[1]
    lines = printed.split("```python")[1].split("```")[0]
    answered = {"base": ["eight", "4"], "tuned": ["8", "4"]}

    def answers_of(label, path, plans, tasks, prompts, folder):
        jobs = asking.plan_jobs(plans, tasks, prompts, path)
        assert folder == "mine" and len(jobs) == 2
        return {place: {"text": text} for place, text in zip(jobs, answered[label], strict=True)}
    space = {
        "verilog": verilog, "scores": scores, "asking": asking, "replace": replace,
        "ways": plans, "meta": a_data_meta(),
        "models": {"base": "a", "tuned": "b"}, "answers_of": answers_of,
        "render": (lambda messages, thinking: [len(messages)], None)}
    exec(lines, space)
    assert {name: list(marks) for name, marks in space["grades"].items()} == {
        "base": [0.0, 1.0], "tuned": [1.0, 1.0]}
    assert "'difference'" in capsys.readouterr().out


def test_answers_are_told_apart_by_plan_and_keep_their_order():
    samples = {("mine", "b", 0): {"text": "3"}, ("mine", "a", 1): {"text": "2"},
               ("mine", "a", 0): {"text": "1"}, ("other", "a", 0): {"text": "4"}}
    assert scores.texts_of(samples, "mine") == {"a": ["1", "2"], "b": ["3"]}


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


def test_a_table_of_words_shows_every_letter_of_a_cell():
    shown = style.words(pd.DataFrame({"a < b": ["<think> x & y"], "n": [2]})).to_html()
    assert "&lt;think&gt; x &amp; y" in shown and "a &lt; b" in shown and ">2<" in shown
