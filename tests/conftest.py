"""Shared by the tests: where the repository is, and how to import a function defined in a notebook."""

import ast
import gc
import os
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)
os.environ.setdefault("SIZE", "tiny")


@contextmanager
def collector_paused():
    """No garbage collection inside.

    CPython 3.11 counts the depth of the syntax tree for the whole interpreter: a finaliser that the
    collector runs while `ast.parse` builds its tree, and that parses something itself (printing a
    traceback does), makes it fail with "AST constructor recursion depth mismatch" (gh-106905).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load(source, *names):
    """Execute only the imports and the named definitions of a notebook's source file.

    Returns the definitions in the order named, or the only one itself when one is named.
    """
    def wanted(node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return node.name in names
        if isinstance(node, ast.Assign):
            return any(getattr(target, "id", None) in names for target in node.targets)
        return isinstance(node, (ast.Import, ast.ImportFrom))
    path = ROOT / source
    with collector_paused():
        tree = ast.parse(path.read_text())
    body = [node for node in tree.body if wanted(node)]
    space = {"__name__": path.stem}
    exec(compile(ast.Module(body, []), str(path), "exec"), space)
    found = [space[name] for name in names]
    return found[0] if len(found) == 1 else found
