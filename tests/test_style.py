"""House rules that a reader would notice when they are broken.

    .venv/bin/python -m pytest tests/test_style.py
"""

import ast
import re

import jupytext
import pytest
from conftest import ROOT

SOURCES = sorted(ROOT.glob("[0-9][0-9]_*.py"))
OPENING = (ROOT / "tools" / "opening.txt").read_text()
IDS = [source.stem for source in SOURCES]


def cells(source):
    return jupytext.read(source).cells


def code(source):
    return [cell.source for cell in cells(source) if cell.cell_type == "code"]


def body_lines(text):
    return [line for line in text.splitlines() if line.strip()]


def after_opening(source):
    """The cells after the fixed opening."""
    found = cells(source)
    last = max(i for i, cell in enumerate(found) if "helpers.machine(" in cell.source)
    return found[last + 1:]


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_valid_python_without_live_magics(source):
    text = source.read_text()
    compile(text, source.name, "exec")
    assert not re.search(r"(?m)^\s*[%!]", text)
    assert "jupytext_version" not in text


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_header_says_what_it_is(source):
    first = cells(source)[0]
    assert first.cell_type == "markdown"
    for word in ("**Needs**", "**Takes**", "**Makes**", "**Costs**"):
        assert word in first.source, word
    assert f"notebooks/{source.stem}.ipynb" in first.source, "Colab badge"
    headings = [line for cell in cells(source) if cell.cell_type == "markdown"
                for line in re.sub(r"```.*?```", "", cell.source, flags=re.S).splitlines()
                if line.startswith("# ")]
    assert len(headings) == 1, headings


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_fixed_opening(source):
    text = re.sub(r"helpers\.machine\([^)]*\)", "helpers.machine()", source.read_text())
    assert OPENING in text, "the opening cells differ from tools/opening.txt"


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_cells_are_short_and_prose_stands_between(source):
    run = 0
    for cell in after_opening(source):
        run = run + 1 if cell.cell_type == "code" else 0
        assert run <= 2, f"three code cells in a row:\n{cell.source[:200]}"
        if cell.cell_type == "code":
            assert len(body_lines(cell.source)) <= 40, f"a long cell:\n{cell.source[:200]}"
    long = [line for line in source.read_text().splitlines()
            if len(line) > 100 and not line.startswith(("# |", "# [!["))]
    assert not long, long[:3]


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_no_patches_no_blanket_except_no_branches_on_the_machine(source):
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "a bare except"
            assert getattr(node.type, "id", "") not in ("Exception", "BaseException")
        if isinstance(node, ast.If):
            assert not (isinstance(node.test, ast.Constant)), "if False / if True"
    joined = "\n".join(code(source))
    assert not re.search(r"USE_COLAB|IN_COLAB|device_count\(\) ==|size\(\) ==|\btiny\s*:", joined)
    assert not re.search(r"/home/|/Users/|/content\b|/root/", joined)


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_every_setting_is_read(source):
    tree = ast.parse(source.read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Settings":
            fields = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
            for field in fields:
                reads = len(re.findall(rf"\.{field}\b", source.read_text()))
                assert reads or "asdict(" in source.read_text(), f"Settings.{field} is never read"


def test_the_series_is_complete_and_helpers_stay_small():
    assert [source.name[:2] for source in SOURCES][:7] == [f"0{i}" for i in range(1, 8)]
    files = list((ROOT / "helpers").glob("*.py"))
    assert len(files) <= 10
    assert sum(len(path.read_text().splitlines()) for path in files) <= 2_500


def test_helpers_import_only_the_standard_library_and_numpy():
    allowed = set(__import__("sys").stdlib_module_names) | {"numpy", "helpers"}
    for path in (ROOT / "helpers").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name} at the top"


def test_public_helpers_have_docstrings():
    for path in (ROOT / "helpers").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_a_broken_rule_is_seen(tmp_path):
    """The rules themselves can fail."""
    bad = tmp_path / "01_bad.py"
    bad.write_text("# %%\n%load_ext autoreload\n")
    with pytest.raises((AssertionError, SyntaxError)):
        test_valid_python_without_live_magics(bad)
    bad.write_text("try:\n    x = 1\nexcept Exception:\n    pass\n")
    with pytest.raises(AssertionError):
        test_no_patches_no_blanket_except_no_branches_on_the_machine(bad)
