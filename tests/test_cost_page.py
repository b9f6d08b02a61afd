"""The site's page "What will it cost me?" in a real browser: the same numbers as tpu_time.fit.

    .venv/bin/python -m pytest tests/test_cost_page.py
"""

import json
import re
import shutil
import subprocess
from urllib.parse import urlencode

import pytest
from bs4 import BeautifulSoup
from conftest import ROOT

from tpu_time import fit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
SITE = ROOT / "tools" / "site"
pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(not CHROMIUM, reason="no Chromium: ./setup.sh browser says how")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's own HTML and script with today's data, as the site shows it."""
    folder = tmp_path_factory.mktemp("cost")
    html = re.search(r"```\{raw\} html\n(.*?)```", (SITE / "cost.md").read_text(), re.S)[1]
    html = html.replace("COST_DATA", json.dumps(fit.page_data()))
    html = html.replace("../../_static/", f"{SITE / 'static'}/")
    (folder / "cost.html").write_text(f"<!doctype html><meta charset=utf-8>{html}")
    return folder


def shown(page, **wanted):
    """Rows of the two tables and the headline, as Chromium shows them for these choices."""
    address = f"file://{page / 'cost.html'}#{urlencode(wanted)}"
    run = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
                          f"--user-data-dir={page / 'profile'}", "--dump-dom", address],
                         capture_output=True, text=True, timeout=120)
    soup = BeautifulSoup(run.stdout, "html.parser")
    assert soup.select("#cost"), run.stderr[-500:]
    tables = [[[cell.text for cell in line.select("td")] for line in soup.select(f"{name} tbody tr")]
              for name in ("#cost-slices", "#cost-parts")]
    return *tables, soup.select_one("#cost-title").text


@pytest.mark.parametrize("model, base, slice_name, tokens, price", [
    ("31b", "bfloat16", "v5p-8", 9_220_000, 16.80), ("31b", "int8", "v6e-4", 123_456_789, 3.5),
    ("31b", "bfloat16", "v5e-4", 1_000, 1.0), ("e2b", "bfloat16", "v5e-1", 50_000_000, 0.6),
    ("e4b", "nf4", "v5e-1", 50_000_000, 0.6)])
def test_hours_and_dollars_are_those_of_run_cost(page, model, base, slice_name, tokens, price):
    slices, parts, title = shown(page, model=model, base=base, unit="tokens", amount=tokens,
                                 slice=slice_name, price=price)
    names = fit.ONE_CHIP | fit.SLICES if model in fit.SMALL else fit.SLICES
    assert [line[0] for line in slices] == list(names)
    for line in slices:
        kind, chips = names[line[0]]
        found = fit.best_fit(kind, chips, model, base)
        dollars = price if line[0] == slice_name else fit.price(kind, chips)
        cost = fit.run_cost(found, tokens, dollars)
        assert line[1] == ("yes" if found.fits else "no")
        assert line[2].endswith("compiled" if found.compiled else "estimated")
        least = "≥ " if cost["at_least"] else ""
        assert line[4] == (found.pace if found.fits else "")
        assert line[5:] == ([f"{least}{cost['hours']:.2f}", f"{least}{cost['dollars']:.2f}"]
                            if found.fits else ["", ""])
        if line[0] == slice_name and found.fits:
            assert {name: minutes for name, minutes, _ in parts} == {
                name: f"{minutes:.1f}" for name, minutes in cost["minutes"].items()}
            assert f"{cost['dollars']:.2f} dollars for {tokens:,} tokens" in title
        elif line[0] == slice_name:
            assert not parts and "does not hold it" in title


def test_examples_are_tokens_by_their_length(page):
    by_example = shown(page, model="31b", amount=500, each=800, unit="examples")
    assert by_example == shown(page, model="31b", amount=400_000, unit="tokens")


def test_the_tables_keep_their_heads(page):
    """The site hides empty heads of notebooks' tables; these are not empty."""
    css = (SITE / "static" / "site.css").read_text()
    probe = "document.title = getComputedStyle(document.querySelector('#cost-slices thead')).display"
    html = (page / "cost.html").read_text() + f"<style>{css}</style><script>{probe}</script>"
    (page / "heads.html").write_text(html)
    run = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
                          f"--user-data-dir={page / 'profile'}", "--dump-dom",
                          f"file://{page / 'heads.html'}"], capture_output=True, text=True, timeout=120)
    assert BeautifulSoup(run.stdout, "html.parser").title.text == "table-header-group"
