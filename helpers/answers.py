"""Find the Verilog in an answer, by one rule fixed beforehand; nothing is repaired."""

import re

FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.M)
MODULE = re.compile(r"^[ \t]*module\s+\w+\s*(?:#|\(|;|$|import\b)", re.M)


def extract_code(text, interface=""):
    """Find the Verilog in a model's answer; returns (code or None, how it was found).

    A thought channel or `<think>` block before the answer is cut off. Then, in this order: the last
    `<answer>`, text between verilog-eval's [BEGIN] and [DONE], fenced blocks, bare text from the
    first `module` to the last `endmodule`. Of several blocks the last one that defines TopModule
    counts (drafts come first, the answer after them), else the last that defines any module.
    Nothing is repaired: no module is renamed, closed or put together from pieces.

    Args:
      text: the answer.
      interface: the header a code-complete problem gives; as in verilog-eval, an answer without a
        module is then taken for the body of that one.
    """
    for opening, closing in (("<|channel>", "<channel|>"), ("<think>", "</think>")):
        if closing in text:
            text = text.rsplit(closing, 1)[1]
        elif opening in text:
            return None, "thought never ends"
    for opening, closing in (("<answer>", "</answer>"), ("[BEGIN]", "[DONE]")):
        if opening in text:
            text = text.rsplit(opening, 1)[1].split(closing, 1)[0]
    fences = list(FENCE.finditer(text))
    ends = [fence.start() for fence in fences[1::2]] + [len(text)] * (len(fences) % 2)
    blocks = [text[start.end():end].strip("\n")
              for start, end in zip(fences[::2], ends, strict=True)]
    with_module = [block for block in blocks if MODULE.search(block)]
    top = [block for block in with_module if re.search(r"\bmodule\s+TopModule\b", block)]
    if with_module:
        chosen = (top or with_module)[-1]
        if len(fences) % 2 and chosen == blocks[-1]:
            return chosen, "unclosed fence"
        return chosen, "fence" if len(blocks) == 1 else f"last module of {len(blocks)} fences"
    start, end = MODULE.search(text), text.rfind("endmodule")
    if start and end > start.start():
        return text[start.start():end + len("endmodule")], "no fence"
    body = blocks[-1] if blocks else text
    if interface and body.strip():
        return f"{interface}\n{body}", "body of the given header"
    return None, "no module"
