"""The site builds without a warning, reads without a network, and its search knows the notebooks.

    ./build_site.sh && .venv/bin/python -m pytest tests/test_site.py
"""

import os
import subprocess

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import ROOT

pytestmark = pytest.mark.slow


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
    assert 'url=README.html' in (site / "index.html").read_text()


def test_all_links_within_the_site_lead_somewhere(site):
    pages = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    assert len(pages) >= 15
    for path in pages:
        for link in soup(path).select("main a[href], nav a[href]"):
            target = link["href"].split("#")[0].split("?")[0]
            if target and "://" not in target and not target.startswith("mailto:"):
                assert (path.parent / target).exists(), (path.name, link["href"])


def test_reading_needs_no_network(site):
    for path in site.rglob("*.html"):
        page = soup(path)
        fetched = [tag.get("src") for tag in page.select("script[src], img[src], iframe[src]")]
        fetched += [tag["href"] for tag in page.select('link[rel="stylesheet"]')]
        remote = [address for address in fetched if "//" in address and "colab-badge" not in address]
        assert not remote, path.name  # the badge has a text in its place


def test_the_search_knows_the_notebooks(site):
    index = (site / "searchindex.js").read_text()
    for word in ("notebooks/03_train", "notebooks/08_dryrun", "splash", "segment"):
        assert word in index, word


def test_links_to_the_glossary_stay_on_the_site(site):
    page = soup(site / "notebooks" / "03_train.html")
    assert page.select('a[href^="../GLOSSARY.html"]')
    assert not [link for link in page.select("a[href]") if "blob/main/GLOSSARY" in link["href"]]
