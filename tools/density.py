"""How dense is our code? One row a file or room, beside what others write.

    .venv/bin/python tools/density.py                  the five rooms, recipe.py and the pages
    .venv/bin/python tools/density.py helpers/run.py   the files or folders that are named
    .venv/bin/python tools/density.py --worst helpers  its ten longest functions and densest statements

The columns: expression and statement nodes a line of code; the 90th percentile of nodes a simple
statement; comprehensions per 1,000 lines of code, and how many stand inside another one; lines of a
function, 90th percentile and longest; public functions and classes with a docstring; public functions
whose signature is typed.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tables", "helpers", "verilog", "serving", "tpu_time")
# Measured the same way in November 2026, to compare with.
OTHERS = {"nanochat": (5.4, 12, 20, 40, 147, 43, 7), "nano-vllm": (4.8, 11, 12, 18, 55, 0, 68),
          "google-deepmind/gemma": (3.7, 12, 5, 40, 167, 62, 79),
          "torchtitan": (3.4, 11, 8, 45, 353, 37, 89), "goal": (5.2, 12, 25, 35, 70, 90, 100)}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (*FUNCTIONS, ast.ClassDef, ast.If, ast.For, ast.While, ast.With, ast.Try)


def is_docstring(node: ast.stmt) -> bool:
    """Is this statement a text and nothing else?"""
    return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str))


def code_lines(text: str, tree: ast.Module) -> int:
    """The lines that hold code: not blank, not a comment alone, not of a docstring."""
    texts: set[int] = set()
    for node in ast.walk(tree):
        if is_docstring(node):
            texts.update(range(node.lineno, node.end_lineno + 1))
    count = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#") and number not in texts:
            count += 1
    return count


def size(node: ast.AST) -> int:
    """How many expressions and statements a node holds, itself included."""
    return sum(isinstance(inner, (ast.expr, ast.stmt)) for inner in ast.walk(node))


def is_typed(function: ast.FunctionDef) -> bool:
    """Do the result and all parameters but self and cls have a type?"""
    spec = function.args
    parameters = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    if spec.vararg:
        parameters.append(spec.vararg)
    if spec.kwarg:
        parameters.append(spec.kwarg)
    named = [p for p in parameters if p.arg not in ("self", "cls")]
    return function.returns is not None and all(p.annotation for p in named)


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
        self.longest_line = max(self.longest_line, *map(len, text.splitlines() or [""]))
        for node in ast.walk(tree):
            self.nodes += isinstance(node, (ast.expr, ast.stmt))
            if isinstance(node, COMPREHENSIONS):
                self.comprehensions += 1
                inner = [i for i in ast.walk(node) if isinstance(i, COMPREHENSIONS)]
                self.nested += len(inner) > 1
            if isinstance(node, ast.stmt) and not isinstance(node, BLOCKS) and not is_docstring(node):
                self.statements.append((size(node), f"{path}:{node.lineno}"))
            if isinstance(node, FUNCTIONS):
                length = node.end_lineno - node.lineno + 1
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
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            counts.add(file)
    return counts


def line_of(name: str, row: tuple[float, ...], more: str = "") -> str:
    """One line of the table."""
    nodes, statement, comprehensions, usual, longest, documented, typed = row
    return (f"{name:28} {nodes:5.1f} {statement:6.0f} {comprehensions:8.0f} {usual:6.0f} /{longest:4.0f}"
            f" {documented:8.0f} % {typed:6.0f} %  {more}")


def main(words: list[str]) -> None:
    """Print the table, or the worst places of what is named."""
    worst = "--worst" in words
    paths = [Path(word) for word in words if word != "--worst"]
    if worst:
        counts = counts_of(paths)
        for values in (counts.functions, counts.statements):
            for figure, place in sorted(values, reverse=True)[:10]:
                print(f"{figure:5} {place}")
            print()
        return
    print(f"{'':28} nodes  p90 a  compre-  lines of    public     typed  lines, longest, nested")
    print(f"{'':28} /line  stmt   hensions function    docs")
    if not paths:
        paths = [ROOT / room for room in ROOMS]
        total = counts_of(paths)
        print(line_of("the five rooms", total.row(),
                      f"{total.lines:,} {total.longest_line} {total.nested}"))
        for name, row in OTHERS.items():
            print(line_of(name, row))
        paths += [ROOT / "appendix", ROOT / "tools", ROOT / "recipe.py"]
        paths += sorted(ROOT.glob("[0-9][0-9]_*.py"))
    for path in paths:
        counts = counts_of([path])
        more = f"{counts.lines:,} {counts.longest_line} {counts.nested}"
        print(line_of(path.name, counts.row(), more))


if __name__ == "__main__":
    main(sys.argv[1:])
