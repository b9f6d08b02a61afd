"""How dense is our code, how long does a page take to read, and which room imports which?

    .venv/bin/python tools/budget.py                  our rooms beside what others write; pages
    .venv/bin/python tools/budget.py helpers/run.py   the files or folders that are named
    .venv/bin/python tools/budget.py --worst helpers  the longest functions, densest statements

The columns: expression and statement nodes a line of code; the 90th percentile of nodes a simple
statement; comprehensions per 1,000 lines of code; lines of a function, 90th percentile and longest;
public functions and classes with a docstring; public functions whose signature is typed; then lines
of code, the longest line, and how many comprehensions hold another one. A page's reading time is
words / 200 + lines of code it shows / 20, in minutes. `tests/test_imports.py` holds the walls.
"""

import ast
import functools
import graphlib
import re
import sys
from pathlib import Path
from typing import TypeGuard

import nbformat

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tables", "helpers", "verilog", "serving", "tpu_time", "appendix")
# Measured the same way in November 2026, to compare with.
OTHERS = {"nanochat": (5.4, 12, 20, 40, 147, 43, 7), "nano-vllm": (4.8, 11, 12, 18, 55, 0, 68),
          "google-deepmind/gemma": (3.7, 12, 5, 40, 167, 62, 79),
          "torchtitan": (3.4, 11, 8, 45, 353, 37, 89), "goal": (5.2, 12, 25, 35, 70, 90, 100)}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (*FUNCTIONS, ast.ClassDef, ast.If, ast.For, ast.While, ast.With, ast.Try)


# ── Walls ──

@functools.cache
def imports(path: Path) -> frozenset[Path]:
    """The files of our rooms that a Python file imports, wherever in it, with their `__init__`.

    A name that a room's `__init__` fetches when it's asked for counts for all who import the room.
    """
    found = set()
    for name in _imported_names(path):
        room, *rest = name.split(".")
        if room in ROOMS:
            module = rest[0] if rest else "__init__"
            found |= {ROOT / room / "__init__.py", ROOT / room / f"{module}.py"}
    return frozenset(file for file in found if file.exists() and file != path)


def pages() -> list[Path]:
    """The notebooks' sources in order: lesson, appendices, and last the page for own data."""
    files = [*ROOT.glob("[0-9][0-9]_*.py"), *(ROOT / "appendix").glob("[0-9][0-9]_*.py")]
    files += ROOT.glob("own_data.py")
    return sorted(files, key=lambda path: path.name)


def number_of(page: Path) -> str:
    """What a page is called where a range is given: its number, or "own"."""
    return page.name.partition("_")[0]


def _imported_names(path: Path) -> set[str]:
    """The dotted names of all that a file imports, its own room's relative ones completed."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"{path.parent.name}.{module}".rstrip(".")
            names.add(module)
            names.update(f"{module}.{item.name}" for item in node.names)
        elif isinstance(node, ast.Constant) and path.name == "__init__.py":
            names.add(f"{path.parent.name}.{node.value!s}")
    return names


def circle(room: str) -> list[str]:
    """The modules of a room that import each other in a circle, its face left out, or []."""
    files = set((ROOT / room).glob("*.py")) - {ROOT / room / "__init__.py"}
    graph = {file: imports(file) & files for file in files}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [file.stem for file in error.args[1]]
    return []


# ── Density ──

def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Is this a statement that is a text and nothing else?"""
    return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str))


def last_line(node: ast.stmt) -> int:
    """The line on which a statement ends."""
    return node.end_lineno or node.lineno


def is_simple(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Is this a statement that holds no others, and no docstring?"""
    return (isinstance(node, ast.stmt) and not isinstance(node, BLOCKS)
            and not is_docstring(node))


def code_lines(text: str, tree: ast.Module) -> int:
    """The lines that hold code: not blank, not a comment alone, not of a docstring."""
    texts: set[int] = set()
    for node in ast.walk(tree):
        if is_docstring(node):
            texts.update(range(node.lineno, last_line(node) + 1))
    count = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#") and number not in texts:
            count += 1
    return count


def size(node: ast.AST) -> int:
    """How many expressions and statements a node holds, itself included."""
    return sum(isinstance(inner, (ast.expr, ast.stmt)) for inner in ast.walk(node))


def holds_another(comprehension: ast.AST) -> bool:
    """Does a comprehension hold another one?"""
    for node in ast.walk(comprehension):
        if node is not comprehension and isinstance(node, COMPREHENSIONS):
            return True
    return False


def is_typed(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Do the result and all parameters but self and cls have a type?"""
    spec = function.args
    parameters = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    if spec.vararg:
        parameters.append(spec.vararg)
    if spec.kwarg:
        parameters.append(spec.kwarg)
    for parameter in parameters:
        if parameter.annotation is None and parameter.arg not in ("self", "cls"):
            return False
    return function.returns is not None


def percentile(values: list[int], share: float) -> int:
    """The value that a `share` of the values doesn't exceed."""
    ordered = sorted(values)
    if not ordered:
        return 0
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Counts:
    """What is counted over one or more files."""

    def __init__(self) -> None:
        self.lines = self.nodes = self.comprehensions = self.nested = self.longest_line = 0
        self.statements: list[tuple[int, str]] = []  # (nodes, place)
        self.functions: list[tuple[int, str]] = []  # (lines, place)
        self.documented: list[bool] = []
        self.typed: list[bool] = []

    def add(self, path: Path) -> None:
        """Count one file, too."""
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        self.lines += code_lines(text, tree)
        for line in text.splitlines():
            self.longest_line = max(self.longest_line, len(line))
        for node in ast.walk(tree):
            self.nodes += isinstance(node, (ast.expr, ast.stmt))
            if isinstance(node, COMPREHENSIONS):
                self.comprehensions += 1
                self.nested += holds_another(node)
            if is_simple(node):
                self.statements.append((size(node), f"{path}:{node.lineno}"))
            if isinstance(node, FUNCTIONS):
                length = last_line(node) - node.lineno + 1
                self.functions.append((length, f"{path}:{node.lineno} {node.name}"))
        self._public(tree)

    def _public(self, tree: ast.Module | ast.ClassDef) -> None:
        for node in tree.body:
            if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) or node.name.startswith("_"):
                continue
            self.documented.append(ast.get_docstring(node) is not None)
            if isinstance(node, ast.ClassDef):
                self._public(node)
            else:
                self.typed.append(is_typed(node))

    def row(self) -> tuple[float, ...]:
        """The figures of the table, in the order of OTHERS."""
        lengths = [length for length, _ in self.functions]
        documented = sum(self.documented) / max(len(self.documented), 1)
        typed = sum(self.typed) / max(len(self.typed), 1)
        return (self.nodes / max(self.lines, 1),
                percentile([nodes for nodes, _ in self.statements], 0.9),
                1000 * self.comprehensions / max(self.lines, 1), percentile(lengths, 0.9),
                max(lengths, default=0), 100 * documented, 100 * typed)


def counts_of(paths: list[Path]) -> Counts:
    """The counts over files and folders."""
    counts = Counts()
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(path.rglob("*.py"))
        for file in files:
            counts.add(file)
    return counts


def row_of(name: str, figures: tuple[float, ...]) -> str:
    """One row of the table."""
    nodes, statement, comprehensions, usual, longest, documented, typed = figures
    return (f"{name:28} {nodes:5.1f} {statement:6.0f} {comprehensions:8.0f} {usual:6.0f} "
            f"/{longest:4.0f} {documented:8.0f}% {typed:6.0f}%")


def line_of(name: str, counts: Counts) -> str:
    """One row, with what only our own code is asked for."""
    return (f"{row_of(name, counts.row())}  {counts.lines:,} {counts.longest_line} "
            f"{counts.nested}")


# ── Reading ──

def solid(text: str) -> int:
    """The lines of a text that are not blank."""
    return sum(bool(line.strip()) for line in text.splitlines())


def words_in(markdown: str) -> int:
    """The words of a markdown text, without the addresses of its links."""
    return len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", markdown)))


def reading(source: Path) -> dict[str, float]:
    """Words, cells, own lines of code and minutes of a page; nobody reads the opening again.

    What it prints of our source (`show_source`) is read, too: the stored outputs hold it.
    """
    notebook = nbformat.read(ROOT / "notebooks" / f"{source.stem}.ipynb", as_version=4)
    words = own = shown = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            words += words_in(cell.source)
            continue
        own += solid(cell.source)
        if "helpers.machine(" in cell.source:
            shown = 0
            continue
        shown += solid(cell.source)
        for output in cell.outputs:
            text = output.get("data", {}).get("text/markdown", "")
            if text.startswith("```python"):
                shown += solid(text) - 2  # less its fence
    return {"words": words, "cells": len(notebook.cells), "code": own,
            "minutes": words / 200 + shown / 20}


def show_worst(paths: list[Path]) -> None:
    """Print the ten longest functions and the ten densest statements."""
    counts = counts_of(paths)
    for values in (counts.functions, counts.statements):
        for figure, place in sorted(values, reverse=True)[:10]:
            print(f"{figure:5} {place}")
        print()


def show_density(paths: list[Path]) -> None:
    """Print one row a file or folder; without any, our rooms beside what others write."""
    print(f"{'':28} nodes  p90 a  compre-  lines of    public     typed  lines, longest, nested")
    print(f"{'':28} /line  stmt   hensions function    docs")
    if not paths:
        five = counts_of([ROOT / room for room in ROOMS[:-1]])
        print(line_of("the five rooms", five))
        for name, figures in OTHERS.items():
            print(row_of(name, figures))
        paths = [*(ROOT / room for room in ROOMS), ROOT / "tools", ROOT / "recipe.py"]
        paths += pages()
    for path in paths:
        print(line_of(path.name, counts_of([path])))


def show_reading() -> None:
    """Print what it takes to read each page."""
    print(f"\n{'':16} words  cells  code  minutes")
    for source in pages():
        page = reading(source)
        print(f"{source.stem:16}{page['words']:6,} {page['cells']:6} {page['code']:5} "
              f"{page['minutes']:8.1f}")


def main(words: list[str]) -> None:
    """Print the tables, or the worst places of what is named."""
    paths = [Path(word) for word in words if word != "--worst"]
    if "--worst" in words:
        show_worst(paths)
        return
    show_density(paths)
    if not paths:
        show_reading()


if __name__ == "__main__":
    main(sys.argv[1:])
