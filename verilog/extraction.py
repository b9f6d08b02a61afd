"""Find the Verilog in an answer, by a rule fixed beforehand: ours, or verilog-eval's own."""

import re

FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.M)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
MODULE = re.compile(r"^[ \t]*(?:\(\*[^\n]*?\*\)\s*)?module\s+(?:automatic\s+|static\s+)?(\w+)"
                    r"\s*(?:#|\(|;|$|import\b)", re.M)
# `state[DONE]` is a bit select and no mark.
MARKED = (re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.S),
          re.compile(r"(?<![\w\]])\[BEGIN\](.*?)(?:(?:(?<=endmodule)|(?<![\w\]]))\[DONE\]|\Z)",
                     re.S))


def extract_code(text, interface=""):
    """Find the Verilog in a model's answer; returns (code or None, how it was found).

    A thought channel or `<think>` block before the answer is cut off. Then, in this order: the last
    `<answer>` and text between verilog-eval's [BEGIN] and [DONE] that hold a whole module; there,
    all of it if it has no fence. Fenced blocks; bare text from the first header of a module to the
    last `endmodule` (a macro above it is lost). Of several blocks the last one that defines
    TopModule counts (drafts come first, the answer after them), else the last that defines any
    module. Comments define nothing, and a closed block without `endmodule` does not count as
    TopModule. Nothing is repaired: no module is renamed, closed or put together from pieces.

    Args:
      text: the answer.
      interface: the header a code-complete problem gives; as in verilog-eval, an answer that does
        not define TopModule is then taken for the body of that one.
    """
    for opening, closing in (("<|channel>", "<channel|>"), ("<think>", "</think>")):
        if closing in text:
            text = text.rsplit(closing, 1)[1]
        elif opening in text:
            return None, "thought never ends"
    marked = False
    for pattern in MARKED:
        if found := pattern.findall(text):
            text, marked = ([part for part in found if "endmodule" in part] or found)[-1], True
    fences = list(FENCE.finditer(text))
    if marked and not fences and "TopModule" in _headers(text):
        return text.strip("\n"), "marked"  # with the macros and packages above its modules
    ends = [fence.start() for fence in fences[1::2]] + [len(text)] * (len(fences) % 2)
    blocks = [text[start.end():end].strip("\n")
              for start, end in zip(fences[::2], ends, strict=True)]
    unclosed = blocks[-1] if len(fences) % 2 else None
    defined = {block: _headers(block) for block in blocks}
    with_module = [block for block in blocks if defined[block]]
    top = [block for block in with_module if "TopModule" in defined[block]
           and ("endmodule" in block or block is unclosed)]
    if top or with_module and not interface:
        chosen = (top or with_module)[-1]
        if chosen is unclosed:
            return chosen, "unclosed fence"
        return chosen, "fence" if len(blocks) == 1 else f"last module of {len(blocks)} fences"
    headers, end = _headers(text), text.rfind("endmodule")
    if headers and end > min(headers.values()) and ("TopModule" in headers or not interface):
        return text[min(headers.values()):end + len("endmodule")], "no fence"
    whole = [block for block in blocks if "endmodule" in block] or blocks
    body = whole[-1] if whole else text[:end + len("endmodule")] if end >= 0 else text
    if interface and body.strip():
        return f"{interface}\n{body}", "body of the given header"
    return None, "no module"


def _headers(code):
    """{name: where its header starts} of the modules in a text; comments do not count."""
    blank = COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), code)
    return {found[1]: found.start() for found in reversed([*MODULE.finditer(blank)])}


def extract_official(text, interface=""):
    """The same by the rule of verilog-eval's `sv-generate`; returns (code or None, how).

    spec-to-rtl: the lines from the first that starts with [BEGIN] to the first that ends in [DONE],
    fences among them included; nothing where [DONE] is missing. Without [BEGIN], and for
    code-complete: the first fenced block of two fence lines or more, else the text from
    `module TopModule` to the first `endmodule`. code-complete puts `interface` before an answer that
    has no module of its own.
    """
    lines = text.splitlines()
    begins = [place for place, line in enumerate(lines) if line.lstrip().startswith("[BEGIN]")]
    if begins and not interface:
        first, *rest = lines[begins[0]:]
        done = [place for place, line in enumerate(rest) if line.rstrip().endswith("[DONE]")]
        if not done:
            return None, "no [DONE]"
        last = rest[done[0]].rstrip().replace("[DONE]", "")
        marked = "\n".join([first.lstrip().replace("[BEGIN]", ""), *rest[:done[0]], last])
        return (marked, "marked") if marked.strip() else (None, "no [DONE]")
    own = next((line for line in lines if line.startswith(("endmodule", "module TopModule"))),
               "").startswith("module")
    fences = [place for place, line in enumerate(lines) if line.startswith("```")]
    plain = [line for line in lines if not line.startswith("```")]
    first, last = (next((place for place, line in enumerate(plain) if line.strip().startswith(words)),
                        len(plain)) for words in ("module TopModule", "endmodule"))
    fenced = len(fences) > 1
    kept = lines[fences[0] + 1:fences[1]] if fenced else plain[first if own else 0:last + 1]
    if not "".join(kept).strip():
        return None, "nothing kept"
    head = [interface] if interface and not own else []
    return "\n".join([*head, *kept]), "fence" if fenced else "no fence"


def bare_modules(text):
    """The modules in a text without comments, spaces and names: who shares one has copied it."""
    return {re.sub(r"\s+", "", found) for found in
            re.findall(r"\bmodule\s+\w+\b(.*?)\bendmodule\b", COMMENT.sub(" ", text), re.S)}
