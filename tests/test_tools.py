"""tools/: notebooks are built, executed and checked; README's figure shows its table."""

import json
import shutil
import sys

import nbformat
import pytest
from conftest import ROOT, program

import readme_figure
import series

HEADER = """# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

"""


# ── notebooks.py ──
def tool(folder, *options):
    return program(sys.executable, "tools/notebooks.py", *options, cwd=folder,
                   RUN_DIR=str(folder / "run"))


def edit(path, old, new):
    path.write_text(path.read_text().replace(old, new))


@pytest.fixture
def project(tmp_path):
    """A repository with one notebook."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "README.md").write_text("[badge](https://x/github/OLD/a-name/blob/main/a.ipynb)\n")
    (tmp_path / "01_one.py").write_text(HEADER + "# %% [markdown]\n# # One\n\n# %%\nprint(1 + 1)\n")
    return tmp_path


def test_a_prose_edit_keeps_outputs_and_a_code_edit_drops_them(project):
    assert "wrote" in tool(project).stdout
    assert tool(project).stdout == "", "a second time there is nothing to write"
    done = tool(project, "--execute")
    assert done.returncode == 0, done.stdout + done.stderr
    assert tool(project, "--check").returncode == 0
    notebook = nbformat.read(project / "notebooks" / "01_one.ipynb", as_version=4)
    assert notebook.cells[1].outputs[0].text == "2\n"
    edit(project / "01_one.py", "# # One", "# # Uno")
    assert "out of date" in tool(project, "--check").stdout
    tool(project)
    assert tool(project, "--check").returncode == 0
    edit(project / "01_one.py", "1 + 1", "1 + 2")
    tool(project)
    assert "without outputs" in tool(project, "--check").stdout


def test_what_a_page_reads_is_recorded_and_not_listed(project):
    """A module of a room reads the table for it: a list by hand once lacked 01's data/anchors."""
    for name in ("anchors", "dryrun", "qlora"):
        (project / "data" / name).mkdir(parents=True)
        (project / "data" / name / "rows.csv").write_text("a\n1\n")
    (project / "room.py").write_text(
        "from pathlib import Path\ndef rows():\n"
        "    return (Path(__file__).parent / 'data' / 'anchors' / 'rows.csv').read_text()\n")
    edit(project / "01_one.py", "print(1 + 1)", "import room\nprint(room.rows())\nopen('new', 'w')")
    done = tool(project, "--execute")
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(project / "notebooks" / "01_one.ipynb", as_version=4)
    assert list(notebook.metadata["made_from"]) == ["data/anchors"]
    assert notebook.cells[1].execution_count == 1
    (project / "data/dryrun/rows.csv").write_text("a\n2\n")
    assert tool(project, "--check").returncode == 0, "this one wasn't read"
    (project / "data/anchors/rows.csv").write_text("a\n1\na\n1\n")
    assert "before data/anchors changed" in tool(project, "--check").stdout
    del notebook.metadata["made_from"]
    nbformat.write(notebook, project / "notebooks" / "01_one.ipynb")
    assert "executed before what it reads was recorded" in tool(project, "--check").stdout


def test_outputs_older_than_the_results_they_show_are_made_again(project):
    """An executed copy from before is no way out; a prose edit keeps the mark and the outputs."""
    table = project / "data" / "dryrun" / "rows.csv"
    table.parent.mkdir(parents=True)
    table.write_text("a\n1\n")
    edit(project / "01_one.py", "print(1 + 1)",
         "print(open('data/dryrun/rows.csv').read().split())")
    tool(project, "--execute")
    edit(project / "01_one.py", "# # One", "# # Uno")
    tool(project)
    assert tool(project, "--check").returncode == 0
    table.write_text("a\n2\n")
    assert "before data/dryrun changed" in tool(project, "--check").stdout
    tool(project, "--execute")
    assert tool(project, "--check").returncode == 0
    assert "'2'" in (project / "notebooks" / "01_one.ipynb").read_text()


def test_outputs_of_another_run_are_taken_also_where_there_are_some(project):
    """After a new training some pages kept the outputs of the old one, beside new ones."""
    edit(project / "01_one.py", "print(1 + 1)", "import time\nprint(time.time_ns())")
    tool(project, "--execute")
    page = project / "notebooks" / "01_one.ipynb"
    before = nbformat.read(page, as_version=4).cells[1].outputs[0].text
    copy = project / "run" / "notebooks" / "01_one.ipynb"
    edit(copy, before.strip(), "a second run")
    tool(project, "--execute")
    assert nbformat.read(page, as_version=4).cells[1].outputs[0].text == before
    assert "outputs of 01_one" in tool(project, "--take").stdout
    assert nbformat.read(page, as_version=4).cells[1].outputs[0].text.strip() == "a second run"
    edit(project / "01_one.py", "time_ns", "time")
    assert "outputs of" not in tool(project, "--take").stdout, "that was other code"


def test_only_notebooks_of_pages_that_are_gone_are_deleted(project):
    tool(project)
    folder = project / "notebooks"
    shutil.copy(folder / "01_one.ipynb", folder / "02_gone.ipynb")
    own = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("my = 'work'")])
    for name in ("my_experiment.ipynb", "03_mine.ipynb"):
        nbformat.write(own, folder / name)
    assert tool(project).stdout == "removed notebooks/02_gone.ipynb\n"
    assert sorted(path.name for path in folder.iterdir()) == [
        "01_one.ipynb", "03_mine.ipynb", "my_experiment.ipynb"]


def test_check_refuses_orphans_errors_and_absolute_paths(project):
    (project / "notebooks").mkdir()
    (project / "notebooks" / "02_gone.ipynb").write_text("{}")
    assert "orphan" in tool(project, "--check").stdout
    edit(project / "01_one.py", "print(1 + 1)", "print('/home/someone/x')")
    tool(project, "--execute")
    assert "absolute path" in tool(project, "--check").stdout
    edit(project / "01_one.py", "print('/home/someone/x')", "raise ValueError(1)")
    failed = tool(project, "--execute")
    assert failed.returncode == 1 and "ValueError" in failed.stderr


# ── readme_figure.py ──
def test_readme_status_and_machines_have_the_numbers_of_the_pages_and_tables(tmp_path):
    """Those of a run are written by whoever has one; the others follow from files that are here."""
    assert readme_figure.described(readme_figure.bars()) in readme_figure.FIGURE.read_text()
    found = readme_figure.numbers(tmp_path)
    for page in readme_figure.NUMBERED:
        copy = tmp_path / page.name
        shutil.copy(page, copy)
        assert not readme_figure.write_numbers(found, copy), "tools/readme_figure.py numbers"
    copy = tmp_path / "README.md"
    assert readme_figure.write_numbers({**found, "ratio": "7 to 9"}, copy) == ["ratio"]
    assert "<!--ratio-->7 to 9<!---->" in copy.read_text()


def test_the_sentence_on_the_gain_reads_right_whatever_the_verdict():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for means, _ in readme_figure.MEANINGS.values():
        assert means.partition(" ")[0] in {"is", "could", "means"}
        filled = readme_figure.fill(readme, {"gain_means": means})
        assert f"That <!--gain_means-->{means}<!---->, and over nine such exams" in filled


def test_what_the_quickstart_printed_stands_in_the_readme(tmp_path):
    page = tmp_path / "00.ipynb"
    assert readme_figure.quickstart_numbers(page) == {}
    page.write_text('{"text": ["1 of 38 before, 30 of 38 after\\n"]}')
    assert readme_figure.quickstart_numbers(page) == {"quick_before": "1", "quick_after": "30"}
    page.write_text("{}")
    assert readme_figure.quickstart_numbers(page) == {}


def test_a_measurement_outside_our_range_gets_its_sentence():
    theirs, told, ours = readme_figure.bars()[:3]
    inside = told._replace(value=theirs.value, low=theirs.value, high=theirs.value)
    assert readme_figure.caution([theirs, inside, ours]) == []
    below = readme_figure.caution([theirs, told._replace(value=theirs.value / 2), ours])
    low, high = readme_figure.with_their_miss(ours.value, 2.0, 1.0)
    assert "below" in below[0] and f"{low:,.0f} to {high:,.0f}" in below[1]
    above = readme_figure.caution([theirs, told._replace(value=theirs.value * 2), ours])
    assert "above" in above[0]


def test_the_published_miss_is_told_as_the_speed_that_it_is_a_share_of():
    """It was told as a share of the time, 11 to 17, beside tokens a second, where it's larger."""
    theirs, told, ours = readme_figure.bars()[:3]
    found = readme_figure.step_numbers()
    largest = found["too_high"].split()[-1]
    assert largest == f"{100 * (theirs.value / told.value - 1):.0f}"
    slow, fast = readme_figure.told_speeds(told.value)
    assert slow == told.value and fast / slow == pytest.approx(3.34 / (3.34 - 0.25))
    low, high = (float(end.replace(",", "")) for end in found["expected_ours"].split(" to "))
    assert low == pytest.approx(ours.value * told.value / theirs.value, abs=50)
    assert low < high < ours.value
    assert found["expect"] == "the low end of our range, or a little less"  # 6,000 is below it
    assert readme_figure.what_to_expect(1, 2, (3, 4)) == "less than our range"
    assert readme_figure.what_to_expect(3, 4, (2, 5)) == "a speed inside of our range"


def test_the_bar_of_the_free_road_is_drawn_from_the_table_of_machines(tmp_path):
    text = readme_figure.MACHINES.read_text()
    parts = readme_figure.free_parts(text)
    assert {"03", "04", "05", "06", "07"} <= {part.page for part in parts}
    readme_figure.draw_free(parts, tmp_path / "free.svg")
    assert (tmp_path / "free.svg").read_text() == readme_figure.FREE_FIGURE.read_text(), (
        "tools/readme_figure.py, then look at it")
    with pytest.raises(ValueError, match="no table"):
        readme_figure.free_parts("")
    with pytest.raises(ValueError, match="how the minutes of '03: x'"):
        readme_figure.free_parts("| what | minutes | how |\n|---|---|---|\n| 03: x | 1 to 2 | ? |")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"seconds": [], "peak_gib": 1}',
                                  '{"seconds": {"02_data": 7}, "peak_gib": 1.5}'])
def test_times_that_are_damaged_end_no_run(tmp_path, monkeypatch, text):
    """They did, after a page had run for hours."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    (tmp_path / "times.json").write_text(text)
    series.note_times({"03_train": 3.0}, 1.25)
    whole = text.endswith("1.5}")
    assert json.loads((tmp_path / "times.json").read_text()) == {
        "seconds": {"02_data": 7, "03_train": 3.0} if whole else {"03_train": 3.0},
        "peak_gib": 1.5 if whole else 1.25}


def test_no_line_of_a_text_begins_with_a_mark():
    """Markdown takes a line that begins with a comment for HTML, and ends the paragraph there."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not line.lstrip().startswith("<!--"), f"{path.name}:{number}"
