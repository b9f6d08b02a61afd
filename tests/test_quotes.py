"""What a page's text quotes of its own stored run: the next run may change it, and then it must."""

import re

import nbformat
from conftest import ROOT


def printed(page):
    """All text that a stored notebook printed."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{page}.ipynb", as_version=4)
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts.append(output.get("text", ""))
            texts.append(str(output.get("data", "")))
    return "\n".join(texts)


def opening(page):
    """The text of a page's first cell, without its comment marks."""
    text = (ROOT / f"{page}.py").read_text(encoding="utf-8")
    first = text[text.index("# %% [markdown]"):text.index("## Before we start")]
    return re.sub(r"^# ?", "", first, flags=re.M)


def test_03_opens_with_what_its_tuned_model_answered():
    module = re.search(r"```verilog\n(.*?)\n```", opening("03_train"), re.S)[1]
    shown = printed("04_merge")  # where the merged model answers the same, as text
    assert module in shown and "the same to the letter" in shown


def test_06_opens_with_a_rate_that_held():
    rate = re.search(r"at (\d+) requests a second", opening("06_bench"))[1]
    assert f"at {rate}/s" in printed("06_bench")


def test_07_opens_with_the_scores_in_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shares = [re.search(rf"<!--pass_{name}-->(\d+)<!---->", readme)[1]
              for name in ("tuned", "base", "rival")]
    tuned, base, rival = shares
    text = " ".join(opening("07_eval").split())
    assert f"{tuned}% of the tuned model's answers pass, and {base}% or {rival}%" in text
