"""What a machine can check about the pages and the code; the judgment is a reader's.

    .venv/bin/python tools/lint.py     one line per finding, exit status 1 if there is one

ruff reads the code, mypy its types, codespell the words, ShellCheck the scripts. The functions
below look for what they do not know, and yield their findings as text.
"""

import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jupytext
import nbformat

import budget
import notebooks
from notebooks import ROOT, code_cells, shown, sources

SOURCE_OF = {path.stem: path for path in sources()}
PAGES: list[Path] = []
for _pattern in ("*.md", "docs/*.md", "appendix/*/*.md", "data/*/*.md", "tests/*.md",
                 "tests/*/*.md"):
    PAGES += sorted(ROOT.glob(_pattern))
NOISE = {"text on stderr": re.compile(r"\A<stderr>"),
         "an escape sequence or a progress bar": re.compile(r"\r(?!\n)|\x1b|\x08|\d+%\|"),
         "a warning": re.compile(r"\w*Warning:|^WARNING\b|^[WE]\d{4} [\d:.]+", re.M),
         "a widget that needs a kernel": re.compile(r"widget-view\+json|Jupyter\.Widget")}


def objections(*command: object) -> list[str]:
    """What a checker prints, one finding a line; nothing if it ends with 0."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return []
    printed = done.stdout + done.stderr
    return printed.replace(f"{ROOT}/", "").splitlines()


@functools.cache
def prose(path: Path) -> str:
    """What is read, without fenced blocks, where a bracket is no link and a heading no heading."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":  # the markdown cells of a notebook's source
        cells = jupytext.reads(text, fmt="py:percent").cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"```.*?```", "", text, flags=re.S)


def numbers(path: Path) -> list[int]:
    """The numbers of the sections of a notebook or page, in order."""
    return [int(number) for number in re.findall(r"(?m)^## (\d+)\. ", prose(path))]


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    names = set()
    for head in re.findall(r"(?m)^#+ (.+)$", prose(path)):
        kept = re.sub(r"[^\w\- ]", "", head.lower())
        names.add(kept.replace(" ", "-"))
    return names


def dead_links(path: Path) -> Iterator[str]:
    """Links to a file, an anchor or a page of this repository that does not exist."""
    ours = f"https://github.com/{notebooks.repository()}/blob/main/"
    folder = notebooks.FOLDER if path.suffix == ".py" else path.parent
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        name, _, anchor = target.removeprefix(ours).partition("#")
        if "://" in name:
            continue
        file = path
        if name:
            start = ROOT if target.startswith(ours) else folder
            file = start / name
        if not file.exists():
            yield f"{shown(path)}: no such file: {target}"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{shown(path)}: no such heading: {target}"


SECTIONS_OF = re.compile(  # "02, section 4" and "02 §4 to §6"
    r"\b(\d\d)\]?,? (§\d+(?:(?:, | to | and )§\d+)*|sections? \d+\b(?!\.\d))")


def wrong_sections(path: Path, known: dict[str, list[int]] | None = None) -> Iterator[str]:
    """Sections that are not numbered 1, 2, 3, and references to sections that do not exist.

    Understood are "section 4", "section 4 of 02", "02, section 4" and "02 §4 to §6", also where
    the number is a link. `known` is {"02": numbers of 02}, for a test.
    """
    known = known or {source.name[:2]: numbers(source) for source in sources()}
    own = numbers(path)
    is_page = path.suffix == ".py"
    if is_page and own != list(range(1, len(own) + 1)):
        yield f"{shown(path)}: sections are numbered {own}"
    text = re.sub(r"`[^`\n]*`", " ", prose(path))
    text = re.sub(r"\]\([^)]*\)", "]", text).replace("\n", " ")
    text = re.sub(r"[Ss]ection (\d+) of (?:notebook )?\[?(\d\d)\b", r"\2, section \1", text)
    for number, places in SECTIONS_OF.findall(text):
        for place in re.findall(r"\d+", places):
            if int(place) not in known.get(number, ()):
                yield f"{shown(path)}: {number} has no section {place}"
    if not is_page:
        return
    without_others = SECTIONS_OF.sub(" ", text)
    for place in re.findall(r"[Ss]ections? (\d+)\b(?!\.\d)", without_others):
        if int(place) not in own:
            yield f"{shown(path)}: there is no section {place} here"


def stale_titles(source: Path) -> Iterator[str]:
    """Links such as [06 · How fast is it?](06_bench.ipynb) whose text is not that page's title."""
    for text, stem in re.findall(r"\[(\d\d · [^\]]+)\]\((\d\d_\w+)\.ipynb\)", prose(source)):
        head = re.findall(r"(?m)^# (.+)$", prose(SOURCE_OF[stem]))[0]
        if " ".join(text.split()) != head:
            yield f"{shown(source)}: calls {stem} {text!r}, it is {head!r}"


def hard_lines(source: Path) -> Iterator[str]:
    """Lines of a page's code that are too long to show, or name a folder of somebody's machine."""
    cells = code_cells(jupytext.read(source))
    for line in "\n".join(cell.source for cell in cells).splitlines():
        if len(line) > 100:
            yield f"{shown(source)}: {len(line)} characters: {line[:60]}"
        if found := notebooks.PRIVATE_PATHS.search(line):
            yield f"{shown(source)}: an absolute path, {found[0]}"


def other_opening(source: Path) -> Iterator[str]:
    """The first code cell is the same in every notebook, but for how many devices it asks for."""
    def opening(path: Path) -> str:
        return re.sub(r"machine\([^)]*\)", "machine()", code_cells(jupytext.read(path))[0].source)
    if opening(source) != opening(sources()[0]):
        yield f"{shown(source)}: another opening cell than {sources()[0].name}"


def noise_of(output: dict) -> Iterator[str]:
    """Which kinds of `NOISE` are in one output of a cell."""
    stream = "<stderr>\n" if output.get("name") == "stderr" else ""
    kinds_of_data = list(output.get("data", {}))
    text = "\n".join([stream + notebooks.said(output), *kinds_of_data])
    for what, pattern in NOISE.items():
        if pattern.search(text):
            yield what


def noise(path: Path) -> Iterator[str]:
    """What a reader should not have to see in a stored notebook's outputs."""
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            for what in noise_of(output):
                yield f"{shown(path)}: {what}, below {cell.source[:50]!r}"
    if path.stat().st_size > 1.5e6:
        yield f"{shown(path)}: {path.stat().st_size / 1e6:.1f} MB"


def in_files(function: Callable[[Path], Iterable[str]], *paths: Path) -> list[str]:
    """All findings of a function, file by file."""
    findings: list[str] = []
    for path in paths:
        findings += function(path)
    return findings


CHECKS: dict[str, Callable[[], list[str]]] = {
    "code": lambda: objections(
        sys.executable, "-m", "ruff", "check", "-q", "--output-format=concise"),
    "types": lambda: objections(sys.executable, "-m", "mypy", "--no-error-summary"),
    "spelling": lambda: objections(  # dout, ans and inout are names in Verilog
        sys.executable, "-m", "codespell_lib", "-L", "dout,ans,inout,dialogues",
        "--builtin", "clear,rare,en-GB_to_en-US", *sources(), *PAGES, *budget.ROOMS, "tools"),
    "shell": lambda: objections(
        Path(sys.executable).with_name("shellcheck"), "-f", "gcc", *ROOT.glob("*.sh"),
        *ROOT.glob("scripts/*.sh"), *ROOT.glob(".github/*.sh"), ROOT / ".ci/run"),
    "dead link": lambda: in_files(dead_links, *sources(), *PAGES),
    "section": lambda: in_files(wrong_sections, *sources(), *PAGES),
    "title": lambda: in_files(stale_titles, *sources()),
    "line": lambda: in_files(hard_lines, *sources()),
    "opening": lambda: in_files(other_opening, *sources()),
    "output": lambda: in_files(noise, *sorted(notebooks.FOLDER.glob("*.ipynb"))),
    "sync": notebooks.problems,  # stale notebooks, stored errors, absolute paths in outputs
}


def main() -> None:
    """Print all findings."""
    findings: list[str] = []
    for check in CHECKS.values():
        findings += check()
    print("\n".join(findings) or "lint: nothing to say")
    raise SystemExit(1 if findings else 0)


if __name__ == "__main__":
    main()
