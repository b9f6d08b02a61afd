"""What a machine can check about the pages and the code; the judgement is a reader's.

    .venv/bin/python tools/lint.py     one line per finding, exit status 1 if there is one

Each function below yields its findings as text. `tests/test_lint.py` calls them, too.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import jupytext
import nbformat
import notebooks
from notebooks import ROOT, shown, sources

WIDTH = 100
ROOMS = ("helpers", "tables", "verilog", "serving", "tpu_time", "appendix", "tools")
PAGES = [path for pattern in ("*.md", "data/*/*.md", "tests/*/*.md")
         for path in sorted(ROOT.glob(pattern))]
MODULES = sorted(path for room in ROOMS for path in ROOT.glob(f"{room}/*.py"))
OPENING = ROOT / "tools" / "opening.txt"
OWN_FOLDERS = re.compile(r"/(?:home|Users|root|content|work)/[\w.-]+")
NOISE = {"text on stderr": re.compile(r"\A<stderr>"),
         "an escape sequence or a progress bar": re.compile(r"\r(?!\n)|\x1b|\x08|\d+%\|"),
         "a warning": re.compile(r"\w*Warning:|^WARNING\b|^[WE]\d{4} [\d:.]+", re.M),
         "a widget that needs a kernel": re.compile(r"widget-view\+json|Jupyter\.Widget")}


@functools.cache
def prose(path):
    """What is read: all of a page, the markdown cells of a notebook's source."""
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    cells = jupytext.read(path).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def without_code(text):
    """Prose without fenced blocks, where a bracket is no link and a heading no heading."""
    return re.sub(r"```.*?```", "", text, flags=re.S)


# ── Pages ──
def titles(path):
    """{number: title} of the numbered sections of a notebook or page, in order."""
    found = re.findall(r"(?m)^## (\d+)\. (.+)$", without_code(prose(path)))
    return {int(number): title for number, title in found}


def anchors(text):
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"(?m)^#+ (.+)$", without_code(text))
    return {re.sub(r"[^\w\- ]", "", head.replace("`", "").lower()).replace(" ", "-")
            for head in heads}


def dead_links(path):
    """Links to a file, an anchor or a page of this repository that does not exist."""
    ours = re.search(r"https://github\.com/[\w.-]+/[\w.-]+", OPENING.read_text())[0]
    folder = notebooks.FOLDER if path.suffix == ".py" else path.parent
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(prose(path))):
        name, _, anchor = target.removeprefix(f"{ours}/blob/main/").partition("#")
        if "://" in name:
            continue
        file = path if not name else (ROOT if name in target[len(ours):] else folder) / name
        if not file.exists():
            yield f"{shown(path)}: no such file: {target}"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            yield f"{shown(path)}: no such heading: {target}"


def wrong_sections(path, known=None):
    """Sections that are not numbered 1, 2, 3, and references to sections that do not exist.

    Understood are "section 4", "section 4 of 02", "02, section 4" and "02 §4 to §6", also where
    the number is a link.
    `known` is {"02": titles of 02}, for a test.
    """
    known = known or {source.name[:2]: titles(source) for source in sources()}
    own = titles(path)
    if path.suffix == ".py" and list(own) != list(range(1, len(own) + 1)):
        yield f"{shown(path)}: sections are numbered {list(own)}"
    text = re.sub(r"`[^`\n]*`", " ", without_code(prose(path)))
    text = re.sub(r"\]\([^)]*\)", "]", text).replace("\n", " ")
    text = re.sub(r"[Ss]ection (\d+) of (?:notebook )?\[?(\d\d)\b", r"\2, section \1", text)
    other = re.compile(r"\b(\d\d)\]?,? (§\d+(?:(?:, | to | and )§\d+)*|sections? \d+\b(?!\.\d))")
    for number, places in other.findall(text):
        for place in map(int, re.findall(r"\d+", places)):
            if place not in known.get(number, ()):
                yield f"{shown(path)}: {number} has no section {place}"
    if path.suffix == ".py":
        for place in map(int, re.findall(r"[Ss]ections? (\d+)\b(?!\.\d)", other.sub(" ", text))):
            if place not in own:
                yield f"{shown(path)}: there is no section {place} here"


def stale_titles(source):
    """Links such as [06 · How fast is it?](06_bench.ipynb) whose text is not that page's title."""
    for text, stem in re.findall(r"\[(\d\d · [^\]]+)\]\((\d\d_\w+)\.ipynb\)", prose(source)):
        head = re.search(r"(?m)^# (.+)$", prose(ROOT / f"{stem}.py"))[1]
        if " ".join(text.split()) != head:
            yield f"{shown(source)}: calls {stem} {text!r}, it is {head!r}"


def misspelled(paths):
    """What codespell knows as a misspelling (dout, ans and inout are names in Verilog)."""
    run = subprocess.run([sys.executable, "-m", "codespell_lib", "-L", "dout,ans,inout",
                          *map(str, paths)], capture_output=True, text=True)
    yield from (run.stdout + run.stderr).replace(f"{ROOT}/", "").splitlines()


# ── Code ──
def shell_faults():
    """What ShellCheck says about the scripts."""
    scripts = sorted([*ROOT.glob("*.sh"), *ROOT.glob(".github/*.sh"), *ROOT.glob(".ci/run")])
    run = subprocess.run([Path(sys.executable).with_name("shellcheck"), "-f", "gcc", *scripts],
                         capture_output=True, text=True)
    yield from (run.stdout + run.stderr).replace(f"{ROOT}/", "").splitlines()


def code_lines(path):
    """(line number, text) of every line of code; a percent source's markdown is left out."""
    markdown = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("# %%"):
            markdown = "[markdown]" in line
        if not (markdown and line.startswith("#")):
            yield number, line


def hard_lines(path):
    """Lines of code that are too long for a page, or name a folder of somebody's machine."""
    for number, line in code_lines(path):
        if len(line) > WIDTH:
            yield f"{shown(path)}:{number}: {len(line)} characters"
        if path not in MODULES and (found := OWN_FOLDERS.search(line)):
            yield f"{shown(path)}:{number}: an absolute path, {found[0]}"


def caught_blindly(path):
    """Handlers that would hide any error."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            if getattr(node.type, "id", None) in (None, "Exception", "BaseException") \
                    and not isinstance(node.type, (ast.Tuple, ast.Attribute)):
                yield f"{shown(path)}:{node.lineno}: catches everything"


def undocumented(path):
    """Public functions and classes of a module without a docstring."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not ast.get_docstring(node):
            if not node.name.startswith("_") and node.name != "main":
                yield f"{shown(path)}:{node.lineno}: {node.name} has no docstring"


def attributes(tree, names):
    """The attributes that code reads from variables of these names."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name) and node.value.id in names}


def unread_settings(path, modules=MODULES):
    """Fields of `Settings` that no code reads as `cfg.field`.

    Copying all of them into a record (`asdict`) reads none of them. Where a notebook hands `cfg`
    itself to a function, the `cfg.field` of `modules` count as well.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef)
             and node.name == "Settings"]
    read = attributes(tree, {"cfg"}).union(*(attributes(kind, {"self"}) for kind in kinds))
    if any(isinstance(word, ast.Name) and word.id == "cfg" for node in ast.walk(tree)
           if isinstance(node, ast.Call) and getattr(node.func, "id", "") != "asdict"
           for word in node.args):
        read = read.union(*(attributes(ast.parse(module.read_text()), {"cfg"})
                            for module in modules))
    for kind in kinds:
        for item in kind.body:
            if isinstance(item, ast.AnnAssign) and item.target.id not in read:
                yield f"{shown(path)}:{item.lineno}: nothing reads Settings.{item.target.id}"


def other_opening(source):
    """The cells that open every notebook are the same in all of them."""
    text = re.sub(r"helpers\.machine\([^)]*\)", "helpers.machine()", source.read_text())
    if OPENING.read_text() not in text:
        yield f"{shown(source)}: the opening cells differ from {shown(OPENING)}"


# ── Stored notebooks ──
def noise(path):
    """What a reader should not have to see in a stored notebook's outputs."""
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            stream = "<stderr>\n" if output.get("name") == "stderr" else ""
            texts = [stream + output.get("text", ""), *map(str, output.get("data", {}))]
            texts += ["".join(value) for kind, value in output.get("data", {}).items()
                      if kind.startswith("text/")]
            for what, pattern in NOISE.items():
                if any(map(pattern.search, texts)):
                    yield f"{shown(path)}: {what}, below {cell.source[:50]!r}"
    if path.stat().st_size > 1.5e6:
        yield f"{shown(path)}: {path.stat().st_size / 1e6:.1f} MB"


CHECKS = {  # what is wrong: (function, files it looks at one by one)
    "dead link": (dead_links, [*sources(), *PAGES]),
    "section": (wrong_sections, [*sources(), *PAGES]),
    "title": (stale_titles, sources()),
    "line": (hard_lines, [*sources(), *MODULES]),
    "except": (caught_blindly, [*sources(), *MODULES]),
    "docstring": (undocumented, MODULES),
    "setting": (unread_settings, sources()),
    "opening": (other_opening, sources()),
    "output": (noise, sorted(notebooks.FOLDER.glob("*.ipynb"))),
}
NAMES = [*CHECKS, "spelling", "shell", "sync"]


def findings(check):
    """All findings of one entry of CHECKS, or of one that takes all files at once."""
    if check == "shell":
        return list(shell_faults())
    if check == "spelling":
        return list(misspelled([*sources(), *PAGES, *MODULES]))
    if check == "sync":  # stale notebooks, stored errors, absolute paths in outputs
        return notebooks.problems()
    function, paths = CHECKS[check]
    return [found for path in paths for found in function(path)]


def main():
    found = [line for check in NAMES for line in findings(check)]
    print("\n".join(found) or "lint: nothing to say")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
