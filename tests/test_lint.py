"""What tools/lint.py finds in this repository, and that it can find something."""

import sys

import nbformat
import pytest
from conftest import no_garbage_collection

import lint
import notebooks

HERE = f"https://github.com/{notebooks.repository()}"


@pytest.mark.parametrize("check", lint.CHECKS)
def test_nothing_is_found(check):
    with no_garbage_collection():  # lint parses every file
        found = lint.CHECKS[check]()
    assert not found, "\n".join(found)


def test_a_call_that_does_not_fit_its_signature_is_found(tmp_path):
    """By the settings that the rooms are read with."""
    (tmp_path / "room.py").write_text("def twice(count: int) -> int:\n    return 2 * count\n\n\n"
                                      "def wrong() -> str:\n    return twice('a')\n")
    found = lint.objections(sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir",
                            tmp_path / "cache", tmp_path / "room.py")
    assert len(found) == 2 and "arg-type" in found[1] + found[0], found


HEAD = "# %% [markdown]\n# # 02 · A title\n#\n# ## 1. One\n#\n# ## 2. Two\n#\n"


@pytest.mark.parametrize(("prose", "found"), [
    ("see section 2, 03, section 4 and arXiv section 5.1", 0),
    ("see section 3", 1), ("[03](03.ipynb) §4, §6", 1), ("03 §4 to §5", 1), ("section 9 of 03", 1),
    ("section 3.1 of the paper", 0), ("as `section 7` says", 0), ("\n#\n# ## 4. Four", 1)])
def test_a_section_that_is_not_there(tmp_path, prose, found):
    source = tmp_path / "02_x.py"
    source.write_text(f"{HEAD}# {prose}\n")
    assert len(list(lint.wrong_sections(source, {"03": [4]}))) == found


@pytest.mark.parametrize(("link", "found"), [
    ("a.md", 0), ("a.md#the-head-of-it", 0), ("a.md#no-head", 1), ("b.md", 1),
    (f"{HERE}/blob/main/README.md", 0), (f"{HERE}/blob/main/NONE.md", 1), ("#own", 0),
    ("#other", 1)])
def test_a_link_that_leads_nowhere(tmp_path, link, found):
    (tmp_path / "a.md").write_text("# The `head` of it\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Own\n\n[a link]({link})\n\n```\n[code](none.md)\n```\n")
    assert len(list(lint.dead_links(page))) == found


@pytest.mark.parametrize(("text", "found"), [
    ("10%|█  | 1/10", 1), ("\rstep 1", 1), ("\x1b[31mred", 1), ("a.py:3: UserWarning: old", 1),
    ("W0000 00:00:17 cpu.cc", 1), ("step 1/10 | left 9s\n17% of rows; a warning\n", 0)])
def test_noise_in_a_stored_notebook(tmp_path, text, found):
    output = nbformat.v4.new_output("stream", text=text)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("f()", outputs=[output])])
    nbformat.write(notebook, path := tmp_path / "02_x.ipynb")
    assert len(list(lint.noise(path))) == found
    output.name = "stderr"
    nbformat.write(notebook, path)
    assert len(list(lint.noise(path))) == found + 1
