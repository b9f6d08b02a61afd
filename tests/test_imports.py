"""The walls between the rooms, and that importing one changes nothing."""

import importlib
import sys

import pytest
from conftest import ROOT, program

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


IMPORT = """
import importlib, os, pkgutil
import jax, tunix, transformers, matplotlib.pyplot  # what libraries set is theirs
before = dict(os.environ)
for room in {rooms}:
    for module in pkgutil.iter_modules(importlib.import_module(room).__path__, room + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print({{name: value for name, value in os.environ.items() if before.get(name) != value}})
"""


def test_an_import_has_no_side_effect(tmp_path):
    """`helpers.remote` once set a variable of the environment, for all that came after."""
    code = IMPORT.format(rooms=[room for room in budget.ROOMS if room != "appendix"])
    done = program(sys.executable, "-c", code, PYTHONPATH=str(ROOT), cwd=tmp_path,
                   GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=None)
    assert done.stdout.strip() == "{}", done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
