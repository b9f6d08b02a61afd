"""The stored notebooks as a web page shows them: code that fits, outputs without noise.

    .venv/bin/python -m pytest tests/test_render.py
"""

import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import ROOT
from nbconvert import HTMLExporter

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WIDTH = 100
NOISE = {
    "a carriage return, as progress bars use": re.compile(r"\r(?!\n)"),
    "an escape sequence": re.compile(r"\x1b"),
    "backspaces": re.compile(r"\x08"),
    "a progress bar": re.compile(r"\d+%\|[\s█▏▎▍▌▋▊▉#]*\||\d+(\.\d+)?(it/s|s/it)\]|[█▉▊▋▌▍▎▏]{2,}|━{3,}"),
    "a warning": re.compile(r"\b\w*Warning\b:|^\s*WARNING\b|\bwarnings\.warn\(|^[WE]\d{4} [\d:.]+", re.M),
    "a traceback": re.compile(r"Traceback \(most recent call last\)"),
    "a widget that only lives in a kernel": re.compile(r"Jupyter\.Widget|IProgress|widget-view\+json"),
}


def texts_of(output):
    """The text in an output, by MIME type; pictures are not text."""
    if output.output_type == "stream":
        yield output.text
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/") or "widget" in kind:
            yield kind if "widget" in kind else "".join(value)


def noise_in(notebook):
    """(what, cell, excerpt) for everything in the outputs that a reader should not have to see."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "error" or output.get("name") == "stderr":
                yield "an error, or text on stderr", cell.source[:60], str(output)[:200]
            for text in texts_of(output):
                for what, pattern in NOISE.items():
                    if found := pattern.search(text):
                        yield what, cell.source[:60], text[max(0, found.start() - 60):found.end() + 60]


def code_blocks(page):
    """Every block of code on a page, cells and prose alike, as text."""
    soup = BeautifulSoup(page, "html.parser")
    for block in soup.select(".jp-Cell-inputWrapper pre, .jp-RenderedMarkdown pre, .highlight pre"):
        yield block.get_text()


def too_long(page):
    """Lines of code on a page that do not fit."""
    return [line for block in code_blocks(page) for line in block.splitlines()
            if len(line.rstrip()) > WIDTH]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_has_code_that_fits_and_outputs_without_noise(path):
    notebook = nbformat.read(path, as_version=4)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    blocks = list(code_blocks(page))
    assert len(blocks) >= sum(cell.cell_type == "code" for cell in notebook.cells)
    assert not too_long(page)
    assert not list(noise_in(notebook))
    assert path.stat().st_size < 1.5e6


def test_there_are_pages():
    assert [path.name[:2] for path in NOTEBOOKS][:7] == [f"0{number}" for number in range(1, 8)]


def page_of(*cells):
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    return HTMLExporter().from_notebook_node(notebook)[0]


def test_a_long_line_is_found_in_code_prose_and_shown_source():
    long, fits = "x = " + "1" * 97, "x = " + "1" * 96
    shown = nbformat.v4.new_output("display_data", {
        "text/html": f'<div class="highlight"><pre>{long}</pre></div>'})
    assert too_long(page_of(nbformat.v4.new_code_cell(long))) == [long]
    assert too_long(page_of(nbformat.v4.new_markdown_cell(f"```python\n{long}\n```"))) == [long]
    assert too_long(page_of(nbformat.v4.new_code_cell("f()", outputs=[shown]))) == [long]
    assert not too_long(page_of(nbformat.v4.new_code_cell(fits)))


@pytest.mark.parametrize("text", [
    "10%|█         | 1/10 [00:01<00:09]", "\rstep 1", "\x1b[31mred", "a.py:3: UserWarning: old",
    "W0000 00:00:17 cpu.cc", "WARNING:absl:no", "  warnings.warn(x)", "1.2it/s]",
    "Traceback (most recent call last):"])
def test_noise_is_heard(text):
    def outputs(value):
        cell = nbformat.v4.new_code_cell("f()", outputs=[nbformat.v4.new_output("stream", text=value)])
        return list(noise_in(nbformat.v4.new_notebook(cells=[cell])))
    assert outputs(text) and not outputs("step 1/10 | 3/s | left 9s\n17 % of rows; a warning is a line\n")
