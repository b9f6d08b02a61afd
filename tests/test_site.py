"""The site builds without a warning, and reads without a network."""

import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import ROOT, program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = program("./build_site.sh", "-W", SITE=str(folder))
    assert done.returncode == 0, done.stderr[-2_000:]
    return folder / "html"


def soup(path):
    return BeautifulSoup(path.read_text(), "html.parser")


def test_every_notebook_is_a_page_with_its_outputs(site):
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = soup(site / "notebooks" / f"{path.stem}.html")
        outputs = [output for cell in nbformat.read(path, as_version=4).cells
                   for output in cell.get("outputs", ())]
        pictures = [output for output in outputs
                    if any(kind.startswith("image/") for kind in output.get("data", {}))]
        assert outputs and page.select("div.cell_output"), path.stem
        assert len(page.select(".cell_output img")) == len(pictures), path.stem
    index = (site / "searchindex.js").read_text()
    assert all(word in index for word in ("notebooks/03_train", "notebooks/08_dryrun", "segment"))


def test_nothing_with_words_is_hidden(site):
    """The heads of data frames were: Markdown's empty heads were meant."""
    css = re.sub(r"/\*.*?\*/", "", (site / "_static" / "site.css").read_text(), flags=re.DOTALL)
    rules = re.findall(r"([^{}]+)\{[^}]*display: none", css)
    assert len(rules) == 1
    heads = hidden = 0
    for path in sorted((site / "notebooks").glob("*.html")):
        page = soup(path)
        heads += len(page.select(".cell_output thead"))
        for rule in rules:
            for element in page.select(rule.strip()):
                hidden += 1
                assert not element.get_text(strip=True), (path.name, element)
    assert heads > 50 and hidden > 10


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
        badges = ("colab-badge", "open-in-kaggle")
        fetched = [url for url in fetched if not any(badge in url for badge in badges)]
        assert not [url for url in fetched if "//" in url], path.name
