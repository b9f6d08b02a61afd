"""Shared by the tests: where the repository is, and how to import what one notebook defines."""

import ast
import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)
os.environ.setdefault("SIZE", "tiny")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def no_garbage_collection():
    """For blocks that parse Python.

    CPython 3.11 (gh-106905): `ast.parse` fails with "AST constructor recursion depth mismatch" if a
    finaliser that the collector runs meanwhile parses something itself, as a traceback printed for
    an abandoned task does.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """pytest parses every test module that it rewrites."""
    with no_garbage_collection():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish():
    """So it does with what it imports for its last words."""
    with no_garbage_collection():
        return (yield)


def parse(path):
    """The syntax tree of a Python file."""
    with no_garbage_collection():
        return ast.parse(Path(path).read_text())


def load(source, *names):
    """Execute only the imports and the named definitions of a notebook's source file.

    For functions that live in one notebook; what two files use is in `helpers` and imported.
    Returns the definitions in the order named, or the only one itself when one is named.
    """
    def wanted(node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return node.name in names
        if isinstance(node, ast.Assign):
            return any(getattr(part, "id", None) in names
                       for target in node.targets for part in ast.walk(target))
        return isinstance(node, (ast.Import, ast.ImportFrom))
    path = ROOT / source
    body = [node for node in parse(path).body if wanted(node)]
    space = {"__name__": path.stem}
    exec(compile(ast.Module(body, []), str(path), "exec"), space)
    found = [space[name] for name in names]
    return found[0] if len(found) == 1 else found
