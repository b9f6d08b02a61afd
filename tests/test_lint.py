"""What tools/lint.py finds in this repository, and that it can find something.

    .venv/bin/python tools/lint.py && .venv/bin/python -m pytest tests/test_lint.py
"""

import sys
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, no_garbage_collection

sys.path.insert(0, str(ROOT / "tools"))
import lint
import notebooks

HERE = f"https://github.com/{notebooks.repository()}"


@pytest.mark.parametrize("check", lint.CHECKS)
def test_nothing_is_found(check):
    with no_garbage_collection():  # lint parses every file
        found = lint.CHECKS[check]()
    assert not found, "\n".join(found)


HEAD = "# %% [markdown]\n# # 02 · A title\n#\n# ## 1. One\n#\n# ## 2. Two\n#\n"


@pytest.mark.parametrize(("prose", "found"), [
    ("see section 2, 03, section 4 and arXiv section 5.1", 0),
    ("see section 3", 1), ("[03](03.ipynb) §4, §6", 1), ("03 §4 to §5", 1), ("section 9 of 03", 1),
    ("section 3.1 of the paper", 0), ("as `section 7` says", 0), ("\n#\n# ## 4. Four", 1)])
def test_a_section_that_is_not_there(tmp_path, prose, found):
    source = tmp_path / "02_x.py"
    source.write_text(f"{HEAD}# {prose}\n")
    assert len(list(lint.wrong_sections(source, {"03": {4: "Four"}}))) == found


@pytest.mark.parametrize(("link", "found"), [
    ("a.md", 0), ("a.md#the-head-of-it", 0), ("a.md#no-head", 1), ("b.md", 1),
    (f"{HERE}/blob/main/README.md", 0), (f"{HERE}/blob/main/NONE.md", 1), ("#own", 0), ("#other", 1)])
def test_a_link_that_leads_nowhere(tmp_path, link, found):
    (tmp_path / "a.md").write_text("# The `head` of it\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Own\n\n[a link]({link})\n\n```\n[code](none.md)\n```\n")
    assert len(list(lint.dead_links(page))) == found


def test_a_long_line_of_code_but_not_of_prose(tmp_path):
    source = tmp_path / "02_x.py"
    source.write_text(f"# %% [markdown]\n# | {'x' * 200}\n\n# %%\na = 1\n# {'x' * 99}\n"
                      "b = '/home/someone/data'\n")
    first, second = lint.hard_lines(source)
    assert "101 characters" in first and "an absolute path" in second


@pytest.mark.parametrize(("text", "found"), [
    ("10%|█  | 1/10", 1), ("\rstep 1", 1), ("\x1b[31mred", 1), ("a.py:3: UserWarning: old", 1),
    ("W0000 00:00:17 cpu.cc", 1), ("step 1/10 | left 9s\n17 % of rows; a warning\n", 0)])
def test_noise_in_a_stored_notebook(tmp_path, text, found):
    output = nbformat.v4.new_output("stream", text=text)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("f()", outputs=[output])])
    nbformat.write(notebook, path := tmp_path / "02_x.ipynb")
    assert len(list(lint.noise(path))) == found
    output.name = "stderr"
    nbformat.write(notebook, path)
    assert len(list(lint.noise(path))) == found + 1


def test_ruff_and_codespell_speak(tmp_path):
    (tmp_path / "page.md").write_text("We recieve it. The colour of a tokenizer.\n")
    assert len(lint.misspelled([Path(tmp_path / "page.md")])) == 1
    (tmp_path / "x.py").write_text("def f():\n    try:\n        return g()\n    except Exception:\n        pass\n")
    found = lint.said(sys.executable, "-m", "ruff", "check", "-q", "--output-format=concise",
                      f"--config={ROOT / 'ruff.toml'}", tmp_path / "x.py")
    assert {line.split()[1] for line in found} == {"F821", "BLE001", "D103"}
