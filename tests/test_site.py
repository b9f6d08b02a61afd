"""The site builds without a warning, reads without a network, and its page of costs shows what tpu_time says.

    ./build_site.sh && .venv/bin/python -m pytest tests/test_site.py
"""

import json
import os
import re
import shutil
import subprocess
from urllib.parse import urlencode

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import ROOT

from tpu_time import fit

pytestmark = pytest.mark.slow
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
SOURCE = ROOT / "tools" / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(["./build_site.sh", "-W"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "SITE": str(folder)})
    assert done.returncode == 0, done.stderr[-2_000:]
    return folder / "html"


def soup(path):
    return BeautifulSoup(path.read_text(), "html.parser")


def test_every_notebook_is_a_page_with_its_outputs(site):
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = soup(site / "notebooks" / f"{path.stem}.html")
        outputs = [output for cell in nbformat.read(path, as_version=4).cells
                   for output in cell.get("outputs", ())]
        pictures = [output for output in outputs if "image/png" in output.get("data", {})]
        assert outputs and page.select("div.cell_output"), path.stem
        assert len(page.select(".cell_output img")) == len(pictures), path.stem
    index = (site / "searchindex.js").read_text()
    assert all(word in index for word in ("notebooks/03_train", "notebooks/08_dryrun", "segment"))


def test_all_links_lead_somewhere_and_reading_needs_no_network(site):
    pages = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    assert len(pages) >= 18
    for path in pages:
        page = soup(path)
        for link in page.select("main a[href], nav a[href]"):
            target = link["href"].split("#")[0].split("?")[0]
            if target and "://" not in target and not target.startswith("mailto:"):
                assert (path.parent / target).exists(), (path.name, link["href"])
            assert not re.search(r"blob/main/\w+\.md", link["href"]), (path.name, link["href"])
        fetched = [tag.get("src") for tag in page.select("script[src], img[src], iframe[src]")]
        fetched += [tag["href"] for tag in page.select('link[rel="stylesheet"]')]
        assert not [url for url in fetched if "//" in url and "colab-badge" not in url], path.name


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of costs with its own script and today's data, as the site shows it."""
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine")
    folder = tmp_path_factory.mktemp("cost")
    html = re.search(r"```\{raw\} html\n(.*?)```", (SOURCE / "cost.md").read_text(), re.S)[1]
    html = html.replace("COST_DATA", json.dumps(fit.page_data()))
    html = html.replace("../../_static/", f"{SOURCE / 'static'}/")
    (folder / "cost.html").write_text(f"<!doctype html><meta charset=utf-8>{html}")
    return folder


def shown(page, **wanted):
    """Rows of the two tables and the headline, as Chromium shows them for these choices."""
    run = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                          f"--user-data-dir={page / 'profile'}",
                          f"file://{page / 'cost.html'}#{urlencode(wanted)}"],
                         capture_output=True, text=True, timeout=120)
    found = BeautifulSoup(run.stdout, "html.parser")
    assert found.select("#cost"), run.stderr[-500:]
    tables = [[[cell.text for cell in line.select("td")] for line in found.select(f"{name} tbody tr")]
              for name in ("#cost-slices", "#cost-parts")]
    return *tables, found.select_one("#cost-title").text


@pytest.mark.parametrize("model, base, slice_name, tokens, price", [
    ("31b", "bfloat16", "v5p-8", 9_220_000, 16.80), ("31b", "int8", "v6e-4", 123_456_789, 3.5),
    ("31b", "bfloat16", "v5e-4", 1_000, 1.0), ("e4b", "nf4", "v5e-1", 50_000_000, 0.6)])
def test_hours_and_dollars_are_those_of_run_cost(page, model, base, slice_name, tokens, price):
    slices, parts, title = shown(page, model=model, base=base, unit="tokens", amount=tokens,
                                 slice=slice_name, price=price)
    names = fit.ONE_CHIP | fit.SLICES if model in fit.SMALL else fit.SLICES
    assert [line[0] for line in slices] == list(names)
    for line in slices:
        kind, chips = names[line[0]]
        found = fit.best_fit(kind, chips, model, base)
        cost = fit.run_cost(found, tokens, price if line[0] == slice_name else fit.price(kind, chips))
        assert line[1] == ("yes" if found.fits else "no")
        least = "≥ " if cost["at_least"] else ""
        assert line[5:] == ([f"{least}{cost['hours']:.2f}", f"{least}{cost['dollars']:.2f}"]
                            if found.fits else ["", ""])
        if line[0] == slice_name and found.fits:
            assert {name: minutes for name, minutes, _ in parts} == {
                name: f"{minutes:.1f}" for name, minutes in cost["minutes"].items()}
            assert f"{cost['dollars']:.2f} dollars for {tokens:,} tokens" in title
        elif line[0] == slice_name:
            assert not parts and "does not hold it" in title
