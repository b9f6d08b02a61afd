"""A page that shows a function's source shows the source that runs today."""

import ast
import html
import inspect
import textwrap

import nbformat
import pytest
from conftest import ROOT

SHOWING = ("show_source", "fold_source")
PAGES = sorted((ROOT / "notebooks").glob("*.ipynb"))


def imported(sources):
    """What the import statements of cells bring."""
    names = {}
    for source in sources:
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                exec(compile(ast.Module([statement], []), "page", "exec"), names)
    return names


def shown_in(source):
    """The expressions behind a cell's calls of `show_source` and `fold_source`."""
    shown = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in SHOWING:
                shown += [ast.unparse(part) for part in node.args
                          if isinstance(part, ast.Attribute)]
    return shown


def stale(notebook):
    """The functions whose source isn't the one in the outputs of their cell."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    names = None
    found = []
    for cell in code:
        shown = shown_in(cell.source)
        if not shown or not cell.outputs:
            continue
        if names is None:
            names = imported(other.source for other in code if "@title" not in other.source)
        texts = []
        for output in cell.outputs:
            for text in output.get("data", {}).values():
                texts.append(text if isinstance(text, str) else "")
        page = html.unescape("\n".join(texts))
        for name in shown:
            if inspect.getsource(eval(name, names)) not in page:
                found.append(name)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_stored_page_shows_the_source_that_the_code_has(path):
    assert stale(nbformat.read(path, as_version=4)) == []


def test_another_source_is_noticed():
    source = "import textwrap\nfrom helpers import style\nstyle.fold_source('t', textwrap.dedent)"
    right = html.escape(inspect.getsource(textwrap.dedent))
    for text, expected in ((right, []), (right.replace("margin", "edge"), ["textwrap.dedent"])):
        output = nbformat.v4.new_output("display_data", {"text/html": f"<pre>{text}</pre>"})
        cell = nbformat.v4.new_code_cell(source, outputs=[output])
        assert stale(nbformat.v4.new_notebook(cells=[cell])) == expected
