"""The walls between the rooms, and the budgets of tools/budget.py that are held today."""

import importlib

import pytest
from conftest import ROOT

import budget

MAY = {"tables": set(), "helpers": {"tables"}, "verilog": {"tables"}, "serving": {"tables"},
       "tpu_time": {"tables"}, "appendix": set(budget.ROOMS)}


@pytest.mark.parametrize("room", MAY)
def test_a_room_imports_what_it_may(room):
    for path in (ROOT / room).rglob("*.py"):
        others = {file.parent.name for file in budget.imports(path)} - MAY[room] - {room}
        assert not others, f"{path.name} imports from {', '.join(sorted(others))}"


@pytest.mark.parametrize("room", budget.ROOMS)
def test_no_circle(room):
    assert not budget.circle(room), " -> ".join(budget.circle(room))


@pytest.mark.parametrize("room", ["verilog", "serving", "tpu_time"])
def test_a_room_has_a_small_face(room):
    face = importlib.import_module(room)
    assert face.__doc__ and 1 <= len(face.__all__) <= 8
    assert all(callable(getattr(face, name)) for name in face.__all__)


def test_budgets_that_are_held():
    assert sum(map(budget.lines, (ROOT / "tpu_time").rglob("*.py"))) <= budget.LINES["tpu_time"]
    for number in ("01", "03", "04", "05", "06", "07"):
        behind = budget.behind(next(ROOT.glob(f"{number}_*.py")))
        assert sum(map(budget.lines, behind)) <= budget.IMPORTED[number], number
