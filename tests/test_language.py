"""What a reader reads: spelling, words, links, the parts every notebook has, README's numbers.

    .venv/bin/python -m pytest tests/test_language.py
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import codespell_lib
import jupytext
import nbformat
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import readme_figure

SOURCES = sorted(ROOT.glob("[0-9][0-9]_*.py"))
IDS = [source.stem for source in SOURCES]
PAGES = [ROOT / name for name in ("README.md", "GLOSSARY.md", "CONTRIBUTING.md", "LOG.md",
                                  "data/published/README.md", "data/generate/README.md")]
CODE = [path for pattern in ("helpers/*.py", "tools/*.py", "tests/*.py", "data/*/*.py", "*.sh")
        for path in sorted(ROOT.glob(pattern)) if path.name != Path(__file__).name]
OPENING = (ROOT / "tools" / "opening.txt").read_text()
OURS = re.search(r'"(https://github\.com/[\w.-]+/[\w.-]+)"', OPENING)[1]
# Terms of the libraries, which keep their own spelling in British text.
TERMS = {"optimizer", "optimizers", "tokenizer", "tokenizers", "program", "programs", "artifact",
         "artifacts", "quantization"}
MARKETING = re.compile(
    r"\b(powerful|seamless(ly)?|robust(ly)?|cutting[- ]edge|state[- ]of[- ]the[- ]art|blazing(ly)?|"
    r"effortless(ly)?|leverag(e|es|ing)|unlock(s|ing)?|game[- ]chang\w+|revolution\w*|"
    r"supercharg\w+|"
    r"(best|world)[- ]in[- ]class|world[- ]class|amazing(ly)?|awesome|simply|obviously|basically|"
    r"super[- ](easy|fast)|delve|elevate|synerg\w+)\b", re.I)
WORKPLACE = re.compile(
    r"/work/|/tmp/team|/opt/pypi|\bagents?\b|\bissue[s]? ?#?\d|\bthe lead\b|\bsub-?agents?\b|"
    r"\b(this|last|next|several|another|previous) sessions?\b|\bCONTRACT\b|\b(AUDIT|FACTS|STYLE|"
    r"DESIGN)\.md\b", re.I)
HOSTS = {"github.com", "arxiv.org", "colab.research.google.com", "huggingface.co", "dev.to",
         "jfly.uni-koeln.de", "docs.cloud.google.com"}


@functools.cache
def prose(path):
    """The text that is read: of a notebook its markdown cells, of a page all of it."""
    if path.suffix == ".py":
        cells = jupytext.read(path).cells
        return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return path.read_text()


def words_only(text):
    """Prose without code blocks, code spans and link targets, where spelling is not ours."""
    text = re.sub(r"```.*?```", " ", text, flags=re.S)
    text = re.sub(r"``[^`]*``|`[^`\n]*`", " ", text)
    return re.sub(r"\]\([^)]*\)|https?://\S+", "] ", text)


@functools.cache
def american_words():
    """The right-hand side of codespell's dictionary from British to American."""
    path = Path(codespell_lib.__file__).parent / "data" / "dictionary_en-GB_to_en-US.txt"
    lines = path.read_text().splitlines()
    return {word.strip() for line in lines for word in line.split("->")[1].split(",")}


def american(text):
    """American spellings in a text of British ones."""
    known = american_words()
    text = re.sub(r"\b[A-Z]{2,}\b", " ", words_only(text))  # LICENSE is a file's name
    ending = re.compile(r"[a-z]{3,}(iz(e[sd]?|ing|ations?)|yz(e[sd]?|ing))")
    found = {word for word in re.findall(r"[a-z]+", text.lower())
             if word in known or ending.fullmatch(word)}
    return found - TERMS - {"size", "sized", "sizes", "resize", "resized", "prize", "sizing"}


def headings(text):
    """Anchors as GitHub makes them from a page's headings."""
    lines = re.findall(r"(?m)^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S))
    return {re.sub(r"[^\w\- ]", "", line.replace("`", "").lower()).replace(" ", "-")
            for line in lines}


def sections(source):
    """{number: title} of a notebook's numbered sections, in order."""
    return {int(number): title for number, title in re.findall(r"(?m)^## (\d+)\. (.+)$",
                                                               prose(source))}


def title_of(source):
    return re.search(r"(?m)^# (.+)$", prose(source))[1]


# ── Words ──
def test_spelling():
    files = [str(path) for path in [*SOURCES, *PAGES, *CODE]]
    run = subprocess.run([sys.executable, "-m", "codespell_lib", "--builtin", "clear,rare,usage",
                          "-L", "dout,ans,inout", *files],  # port names and a Verilog keyword
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: path.name)
def test_british_throughout_and_no_marketing(path):
    text = prose(path)
    assert not american(text)
    assert not (found := MARKETING.search(words_only(text))), found


@pytest.mark.parametrize("path", [*SOURCES, *PAGES, *CODE], ids=lambda path: path.name)
def test_nothing_about_the_workplace(path):
    assert not (found := WORKPLACE.search(path.read_text())), found


def test_the_word_rules_can_fail():
    assert american("The color of `color` is grey; we initialize.") == {"color", "initialize"}
    assert not american("The optimizer's colour, a tokenizer, a size. `normalize`")
    assert MARKETING.search("a powerful tool") and not MARKETING.search("a power of two")
    assert WORKPLACE.search("see issue 12") and not WORKPLACE.search("in a session of its own")


# ── Links ──
def links(path):
    """(text, target) of every link of a page or notebook."""
    text = re.sub(r"```.*?```", "", prose(path), flags=re.S)
    return re.findall(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    folder = ROOT / "notebooks" if path in SOURCES else path.parent
    for text, target in links(path):
        if target.startswith("http"):
            parts = urlsplit(target)
            assert parts.scheme == "https" and parts.hostname in HOSTS, target
            assert not re.search(r"[.,;:]$|//", parts.path), target
            if parts.hostname == "github.com":
                assert re.match(r"/[\w.-]+/[\w.-]+", parts.path), target
            if target.startswith(f"{OURS}/blob/main/"):
                assert (ROOT / target.removeprefix(f"{OURS}/blob/main/")).exists(), target
            continue
        name, _, anchor = target.partition("#")
        file = (folder / name).resolve() if name else path
        assert file.exists(), f"{target}, from {text!r}"
        if anchor:
            assert anchor in headings(file.read_text()), target


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_links_to_a_notebook_say_its_title(source):
    titles = {path.stem: title_of(path) for path in SOURCES}
    for text, target in links(source):
        if re.match(r"\d\d · ", text) and target.endswith(".ipynb"):
            assert text == titles[Path(target).stem], f"{text!r}, not {titles[Path(target).stem]!r}"


# ── The form of a notebook ──
@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_sections_are_numbered_and_references_to_them_exist(source):
    assert list(sections(source)) == list(range(1, len(sections(source)) + 1))
    by_number = {path.name[:2]: sections(path) for path in SOURCES}
    text = words_only(prose(source)).replace("\n", " ")
    here = source.name[:2]
    for pattern, order in ((r"[Ss]ection (\d+) of (?:notebook )?(\d\d)\b", (1, 0)),
                           (r"\b(\d\d)\]?(?: §|, section )(\d+)(?![\d.]*\.\d)", (0, 1))):
        for found in re.findall(pattern, text):
            notebook, number = (found[place] for place in order)
            assert notebook in by_number, found
            assert int(number) in by_number[notebook], f"{here}: {found}"
        text = re.sub(pattern, " ", text)
    for number in re.findall(r"[Ss]ections? (\d+)(?!\d*\.\d)", text):
        assert int(number) in sections(source), f"{here} has no section {number}"


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_closing_parts(source):
    text = prose(source)
    assert re.search(r"(?m)^## Recap$", text)
    table = re.search(r"(?im)^\|\s*(symptom|what you see)\s*\|\s*cause\s*\|\s*fix\s*\|$", text)
    assert table, "no table of what can go wrong"
    rows = re.match(r"(?:\|.*\n?)+", text[table.start():])[0].strip().splitlines()[2:]
    assert len(rows) >= 4 and all(row.count("|") - row.count("\\|") == 4 for row in rows), rows
    exercises = re.split(r"(?m)^##+ Exercises$", text)[1]
    folded = re.findall(r"<details>.*?</details>", exercises, flags=re.S)
    asked = re.sub(r"<details>.*?</details>", "", exercises, flags=re.S)
    assert re.findall(r"(?m)^(\d)\. ", asked) == ["1", "2"]
    assert len(folded) in (1, 2) and all("<summary>Solution" in part for part in folded)
    if len(folded) == 1:
        assert re.findall(r"(?m)^(\d)\. ", folded[0]) == ["1", "2"]
    for block in re.findall(r"```python\n(.*?)```", exercises, flags=re.S):
        ast.parse(block)
    assert f"[glossary]({OURS}/blob/main/GLOSSARY.md)" in text


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_stored_outputs_are_quiet_and_small(source):
    path = ROOT / "notebooks" / f"{source.stem}.ipynb"
    assert path.stat().st_size < 1.5e6
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", output.text[:300]
            text = output.get("text", "") or "".join(output.get("data", {}).get("text/plain", ""))
            assert "\r" not in text and "\x1b[" not in text, text[:300]
            assert not re.search(r"\w+Warning\b", text), text[:300]


# ── README ──
README = (ROOT / "README.md").read_text()


def test_readme_tells_the_reading_time_of_every_notebook():
    lines = {path: [line for line in README.splitlines()
                    if line.startswith(f"| [{path.name[:2]} ")] for path in SOURCES}
    for path, found in lines.items():
        assert len(found) == 1, path.name
        said = int(re.search(r"\| (\d+) min \|", found[0])[1])
        counted = readme_figure.reading_minutes(path)
        assert abs(said - counted) <= 8, f"{path.name}: README says {said}, counted {counted:.0f}"
    seven, all_of_them = map(float, re.search(
        r"seven take about ([\d.]+) hours to read, all \w+ about ([\d.]+)", README).groups())
    minutes = [readme_figure.reading_minutes(path) for path in SOURCES]
    assert abs(60 * seven - sum(minutes[:7])) <= 30 and abs(60 * all_of_them - sum(minutes)) <= 30


def test_every_correction_links_a_section_that_exists():
    table = README.split("## The published recipe and this series")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 30
    for row in rows:
        proof = row.rstrip(" |").rpartition("|")[2]
        found = re.findall(r"\[(\d\d)\]\((?:notebooks|drafts)/(\d\d)_\w+\.(?:ipynb|py)\)"
                           r"((?: to|,)? §\d+(?:(?: to|,) §\d+)*)", proof)
        assert found or "](" in proof, row
        for number, linked, places in found:
            assert number == linked, row
            source = next(iter([*ROOT.glob(f"{number}_*.py"), *ROOT.glob(f"drafts/{number}_*.py")]))
            for place in re.findall(r"§(\d+)", places):
                assert int(place) in sections(source), f"{number} has no section {place}: {row}"


def test_reading_minutes_are_words_and_lines(tmp_path):
    source = tmp_path / "01_x.py"
    source.write_text("# %% [markdown]\n# " + "word " * 400 + "\n\n# %%\nhelpers.machine()\n\n"
                      "# %%\n" + "x = 1\n" * 60)
    assert readme_figure.reading_minutes(source) == pytest.approx(400 / 200 + 60 / 20)
