"""Find the Verilog in an answer, by a rule that's fixed beforehand: ours, or verilog-eval's own."""

import re
from collections.abc import Callable
from typing import NamedTuple

from tables.texts import split_thought

FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)
HEADER = re.compile(
    r"^[ \t]*(?:\(\*[^\n]*?\*\)\s*)?module\s+(?:automatic\s+|static\s+)?(?P<name>\w+)"
    r"\s*(?:#|\(|;|$|import\b)", re.MULTILINE)
HEADER_OR_END = re.compile(HEADER.pattern + r"|\bendmodule\b", re.MULTILINE)
ANY_HEADER = re.compile(r"\bmodule\s+\w+\b")
ANY_END = re.compile(r"\bendmodule\b")
PORT = re.compile(
    r"\b(?:input|output|inout)\b(?:\s|wire\b|reg\b|logic\b|signed\b|\[[^\]]*\])*(\w+)")
COMMENT_START = re.compile(r"//|/\*")
LINE_COMMENT_START = re.compile(r"//")
ANSWER_TAGS = re.compile(r"(?P<opening><answer>)|(?P<closing></answer>)")
# verilog-eval's marks. `state[DONE]` is a bit select and no mark.
BEGIN_AND_DONE = re.compile(r"(?P<opening>(?<![\w\]])\[BEGIN\])"
                            r"|(?P<closing>(?:(?<=endmodule)|(?<![\w\]]))\[DONE\])")
END = "endmodule"


class Extracted(NamedTuple):
    """What was found in an answer."""

    code: str | None  # None: no Verilog
    how: str          # how it was found, or why it wasn't


Extractor = Callable[[str, str], Extracted | None]  # from an answer and the header that's given


class Block(NamedTuple):
    """The text between two fences (lines that begin with three backticks)."""

    code: str
    closed: bool  # False: the text ends before a second fence
    headers: dict[str, int]

    def defines_top(self) -> bool:
        """Does it hold a whole TopModule? A block that the token limit cut needs no `endmodule`."""
        is_whole = END in self.code or not self.closed
        return is_whole and "TopModule" in self.headers


# ---- Our rule ----

def extract_code(text: str, interface: str = "") -> Extracted:
    """Find the Verilog in a model's answer; the first of `EXTRACTORS` that finds some decides.

    A thought that the answer begins with is cut off (`tables.texts.split_thought`). We repair
    nothing: we don't rename a module, close one, or put one together from pieces. A tag, mark or
    header that stands in a comment is text like any other.

    Args:
      text: the answer.
      interface: the header that a code-complete problem gives. As in verilog-eval, an answer that
        doesn't define TopModule is then taken for the body of that header.
    """
    thought = split_thought(text)
    if not thought.closed:
        return Extracted(None, "thought never ends")
    for extractor in EXTRACTORS:
        extracted = extractor(thought.rest, interface)
        if extracted:
            return extracted
    return Extracted(None, "no module")


def between_marks(text: str, interface: str) -> Extracted | None:
    """What stands in `<answer>` tags, or between verilog-eval's [BEGIN] and [DONE].

    Without a fence that's all of it, with the macros and packages above its modules. Marks that
    hold no Verilog are prose: "I put it between [BEGIN] and [DONE]".
    """
    part = None
    for marks in (ANSWER_TAGS, BEGIN_AND_DONE):
        around = text if part is None else part
        inner = marked_part(around, marks)
        if inner is not None:
            part = inner
    if part is None:
        return None
    if "TopModule" in module_headers(part) and not FENCE.search(part):
        code = part.strip("\n")
        return Extracted(code, "marked")
    for extractor in (in_fences, in_bare_text, as_body):
        extracted = extractor(part, interface)
        if extracted:
            return extracted
    return None


def in_fences(text: str, interface: str) -> Extracted | None:
    """The last fenced block that holds a whole TopModule: drafts come first, the answer after them.

    Without such a block it's the last that defines any module, unless the header is given.
    """
    blocks = fenced_blocks(text)
    chosen = None
    for block in blocks:
        if block.defines_top():
            chosen = block
    if chosen is None and not interface:
        for block in blocks:
            if block.headers:
                chosen = block
    if chosen is None:
        return None
    if not chosen.closed:
        return Extracted(chosen.code, "unclosed fence")
    if len(blocks) == 1:
        return Extracted(chosen.code, "fence")
    return Extracted(chosen.code, f"last module of {len(blocks)} fences")


def in_bare_text(text: str, interface: str) -> Extracted | None:
    """From the first header of a module to the last `endmodule`; a macro above that is lost."""
    headers = module_headers(text)
    if not headers or (interface and "TopModule" not in headers):
        return None
    start = min(headers.values())
    last = text.rfind(END)
    if last <= start:
        return None
    end = last + len(END)
    return Extracted(text[start:end], "no fence")


def as_body(text: str, interface: str) -> Extracted | None:
    """The given header and what completes it: the last fenced block, or all up to `endmodule`."""
    if not interface:
        return None
    body = text
    before, ending, _ = text.rpartition(END)
    if ending:
        body = before + END
    blocks = fenced_blocks(text)
    if blocks:
        body = blocks[-1].code
    for block in blocks:
        if END in block.code:
            body = block.code
    if not body.strip():
        return None
    return Extracted(f"{interface}\n{body}", "body of the given header")


EXTRACTORS: tuple[Extractor, ...] = (between_marks, in_fences, in_bare_text, as_body)


# ---- Its pieces ----

def marked_part(text: str, marks: re.Pattern[str]) -> str | None:
    """The last part between marks that holds an `endmodule`, else the last with a module's header.

    A mark counts outside of comments and whole modules alone. A part begins at the last opening
    before its closing, and what isn't closed goes on to the end of the text.
    """
    parts = []
    start = None
    for mark in marks.finditer(outside_modules(text)):
        if mark["opening"]:
            start = mark.end()
        elif start is not None:
            parts.append(text[start:mark.start()])
            start = None
    if start is not None:
        parts.append(text[start:])
    for part in reversed(parts):
        if END in part:
            return part
    for part in reversed(parts):
        if module_headers(part):
            return part
    return None


def fenced_blocks(text: str) -> list[Block]:
    """The fenced blocks of a text, in order; fences come in pairs, but the last may be missing."""
    blocks = []
    start = None
    for fence in FENCE.finditer(text):
        if start is None:
            start = fence.end()
            continue
        code = text[start:fence.start()].strip("\n")
        blocks.append(Block(code, True, module_headers(code)))
        start = None
    if start is not None:
        code = text[start:].strip("\n")
        blocks.append(Block(code, False, module_headers(code)))
    return blocks


def module_headers(text: str) -> dict[str, int]:
    """{name of a module: where its first header starts}; comments don't count."""
    plain = without_comments(text)
    headers: dict[str, int] = {}
    for header in HEADER.finditer(plain):
        name = header["name"]
        headers.setdefault(name, header.start())
    return headers


def port_names(text: str) -> list[str]:
    """The first name after each `input`, `output` and `inout` of a text, in its order."""
    return PORT.findall(without_comments(text))


def without_comments(text: str) -> str:
    """The text with spaces in the place of comments, so that everything else stays where it is.

    A `/*` that nothing closes is no comment. The time grows with the length of the text alone.
    """
    pieces = []
    kept = position = 0
    starts = COMMENT_START
    while opening := starts.search(text, position):
        start = opening.start()
        if opening[0] == "//":
            end = text.find("\n", start)
            if end == -1:
                end = len(text)
        else:
            end = text.find("*/", start + 2) + 2
            if end == 1:  # nothing closes this one, nor any later one: don't look again
                starts = LINE_COMMENT_START
                position = start + 1
                continue
        comment = text[start:end]
        pieces.append(text[kept:start])
        pieces.append(re.sub(r"[^\n]", " ", comment))
        kept = position = end
    pieces.append(text[kept:])
    return "".join(pieces)


def outside_modules(text: str) -> str:
    """The text with spaces in the place of comments and of whole modules."""
    pieces = []
    kept = 0
    start = None
    plain = without_comments(text)
    for word in HEADER_OR_END.finditer(plain):
        if word["name"]:
            start = word.start()
        elif start is not None:
            end = word.end()
            pieces.append(plain[kept:start])
            pieces.append(" " * (end - start))
            kept = end
            start = None
    pieces.append(plain[kept:])
    return "".join(pieces)


def bare_modules(text: str) -> set[str]:
    """The modules in a text without comments, spaces and names: equal ones have been copied."""
    plain = without_comments(text)
    modules = set()
    position = 0
    while header := ANY_HEADER.search(plain, position):
        end = ANY_END.search(plain, header.end())
        if not end:
            break
        inside = plain[header.end():end.start()]
        modules.add(re.sub(r"\s+", "", inside))
        position = end.end()
    return modules


# ---- verilog-eval's rule ----

def extract_official(text: str, interface: str = "") -> Extracted:
    """The same by the rule of verilog-eval's `sv-generate`.

    spec-to-rtl: the lines from the first that starts with [BEGIN] to the first that ends in [DONE],
    fences among them included; nothing where [DONE] is missing. Without [BEGIN], and for
    code-complete: the first fenced block of two fence lines or more, else the text from
    `module TopModule` to the first `endmodule`. code-complete puts `interface` before an answer
    that has no module of its own.

    sv-generate gets its answers from an API that keeps the thought apart, and so never sees one. We
    get both in one text, so the thought that an answer begins with is cut off first.
    """
    def has_begin(line: str) -> bool:
        return line.lstrip().startswith("[BEGIN]")

    thought = split_thought(text)
    if not thought.closed:
        return Extracted(None, "thought never ends")
    lines = thought.rest.splitlines()
    begin = first_place(lines, has_begin)
    if begin < len(lines) and not interface:
        return official_marks(lines[begin:])

    fences = []
    for place, line in enumerate(lines):
        if line.startswith("```"):
            fences.append(place)
    has_module = has_official_module(lines)
    if len(fences) > 1:
        how = "fence"
        first, second, *_ = fences
        kept = lines[first + 1:second]
    else:
        how = "no fence"
        kept = official_bare_text(lines, has_module)
    if not "".join(kept).strip():
        return Extracted(None, "nothing kept")
    if interface and not has_module:
        kept = [interface, *kept]
    code = "\n".join(kept)
    return Extracted(code, how)


def official_bare_text(lines: list[str], has_module: bool) -> list[str]:
    """The lines up to the first `endmodule`, from `module TopModule` if there is one; no fences."""
    def begins_module(line: str) -> bool:
        return line.strip().startswith("module TopModule")

    def ends_module(line: str) -> bool:
        return line.strip().startswith(END)

    plain = [line for line in lines if not line.startswith("```")]
    first = 0
    if has_module:
        first = first_place(plain, begins_module)
    last = first_place(plain, ends_module)
    return plain[first:last + 1]


def official_marks(lines: list[str]) -> Extracted:
    """What stands between [BEGIN], in the first of these lines, and the first [DONE] after it."""
    def has_done(line: str) -> bool:
        return line.rstrip().endswith("[DONE]")

    first, *rest = lines
    done = first_place(rest, has_done)
    if done == len(rest):
        return Extracted(None, "no [DONE]")
    last = rest[done]
    opening = first.lstrip().replace("[BEGIN]", "")
    closing = last.rstrip().replace("[DONE]", "")
    between = rest[:done]
    code = "\n".join([opening, *between, closing])
    if not code.strip():
        return Extracted(None, "no [DONE]")
    return Extracted(code, "marked")


def has_official_module(lines: list[str]) -> bool:
    """Does a line begin with `module TopModule` before one begins with `endmodule`?"""
    for line in lines:
        if line.startswith((END, "module TopModule")):
            return line.startswith("module")
    return False


def first_place(lines: list[str], wanted: Callable[[str], bool]) -> int:
    """The place of the first line that's wanted; the number of lines if none is."""
    for place, line in enumerate(lines):
        if wanted(line):
            return place
    return len(lines)
