"""Count what the project allows itself, beside what it allows: lines, words, cells, imports.

    .venv/bin/python tools/budget.py      rooms, then pages; `tests/test_imports.py` holds the walls

A page's reading time is words / 200 + lines of code it shows / 20, in minutes.
"""

import ast
import functools
import graphlib
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tables", "helpers", "verilog", "serving", "tpu_time", "appendix")
LINES = {"tables, helpers": 2800, "verilog": 1000, "serving": 1300, "tpu_time": 2000,
         "appendix": 1500, "tools": 1100, "tests": 9000}
IMPORTED = {"02": 1500, **dict.fromkeys(("00", "01", "03", "04", "05", "06", "07"), 3500)}
LESSON = {"words": 13000, "cells": 270, "code": 1400, "minutes": 120}  # 00 to 07; minutes: 01 to 07


def lines(path):
    """The lines of a file, blank ones included."""
    return len(path.read_text(encoding="utf-8").splitlines())


@functools.cache
def imports(path):
    """The files of our rooms that a Python file imports, wherever in it, with their `__init__`.

    A name that a room's `__init__` fetches when it is asked for counts for whoever imports the room.
    """
    names, tree = set(), ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, (path.parent.name if node.level else "", node.module)))
            names |= {module} | {f"{module}.{item.name}" for item in node.names}
        elif isinstance(node, ast.Constant) and path.name == "__init__.py":
            names.add(f"{path.parent.name}.{node.value}")
    found = set()
    for room, *rest in (name.split(".") for name in names):
        if room in ROOMS:
            found |= {ROOT / room / "__init__.py", ROOT / room / f"{(rest or ['__init__'])[0]}.py"}
    return frozenset(file for file in found - {path} if file.exists())


def behind(path):
    """All files of our rooms that importing this one brings in."""
    seen, new = set(), set(imports(path))
    while new:
        seen |= new
        new = set().union(*map(imports, new)) - seen
    return seen


def circle(room):
    """The modules of a room that import each other in a circle, its face left out; [] if none do."""
    files = set((ROOT / room).glob("*.py")) - {ROOT / room / "__init__.py"}
    try:
        graphlib.TopologicalSorter({file: imports(file) & files for file in files}).prepare()
    except graphlib.CycleError as error:
        return [file.stem for file in error.args[1]]
    return []


def solid(text):
    """The lines of a text that are not blank."""
    return sum(bool(line.strip()) for line in text.splitlines())


def reading(source):
    """Words, cells, own lines of code and minutes of a page; nobody reads the opening again.

    What it prints of our source (`show_source`) is read, too: it stands in the outputs that are stored.
    """
    cells = nbformat.read(ROOT / "notebooks" / f"{source.stem}.ipynb", as_version=4).cells
    words = sum(len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", cell.source)))
                for cell in cells if cell.cell_type == "markdown")
    code = [cell for cell in cells if cell.cell_type == "code"]
    last = max((i for i, cell in enumerate(code) if "helpers.machine(" in cell.source), default=0)
    said = [output.get("data", {}).get("text/markdown", "")
            for cell in code[last + 1:] for output in cell.outputs]
    read = sum(solid(cell.source) for cell in code[last + 1:]) + sum(
        solid(text) - 2 for text in said if text.startswith("```python"))  # less its fence
    return {"words": words, "cells": len(cells), "code": sum(solid(cell.source) for cell in code),
            "minutes": words / 200 + read / 20,
            "imported": sum(map(lines, behind(source)))}


def main():
    """Print both tables; a count above its budget has an exclamation mark."""
    def beside(count, most):
        return f"{count:,.0f} of {most:,}{' !' * (count > most)}"
    for names, most in LINES.items():
        files = [path for room in names.split(", ") for path in (ROOT / room).rglob("*.py")]
        print(f"{names:16}{beside(sum(map(lines, files)), most):>20}  {len(files):2} files")
    print(f"\n{'':16} words  cells  code  minutes  imported lines")
    pages = {path.stem: reading(path) for path in sorted(ROOT.glob("[0-9][0-9]_*.py"))}
    for name, page in pages.items():
        most = IMPORTED.get(name[:2])
        behind_it = beside(page["imported"], most) if most else f"{page['imported']:,}"
        print(f"{name:16}{page['words']:6,} {page['cells']:6} {page['code']:5} "
              f"{page['minutes']:8.1f}  {behind_it}")
    for key, most in LESSON.items():
        first = "01" if key == "minutes" else "00"
        count = sum(page[key] for name, page in pages.items() if first <= name < "08")
        print(f"{first} to 07: {key} {beside(count, most)}")


if __name__ == "__main__":
    main()
