"""Sphinx settings of the site: README, the notebooks with their stored outputs, glossary and log.

    ./build_site.sh     writes site/html/index.html; nothing is executed
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from cost_data import page_data  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = html_title = "Gemma 4 on TPU"
extensions = ["myst_nb"]
root_doc = "README"
MORE = ["docs/OWN_DATA", "docs/MACHINES", "docs/SERVING", "docs/TROUBLE", "docs/STATUS", "docs/COMPARE", "tools/site/cost",
        "docs/GLOSSARY", "CONTRIBUTING", "LOG",
        "data/dryrun/README", "data/measured/README"]  # beside the notebooks
include_patterns = ["notebooks/*.ipynb", *(f"{page}.md" for page in (root_doc, *MORE))]
exclude_patterns = [".*", "runs", "site"]
nb_execution_mode = "off"
myst_heading_anchors = 3
html_theme = "sphinx_book_theme"
html_theme_options = {"home_page_in_toc": True, "show_toc_level": 2, "navbar_persistent": [],
                      "use_fullscreen_button": False, "extra_footer": "Apache-2.0"}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = html_show_copyright = html_show_sphinx = False

CONTENTS = """
```{toctree}
:hidden:
:caption: %s

%s
```
"""
OWN_PAGE = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/blob/main/(%s)\.md" % "|".join([root_doc, *MORE]))


def prepare(app: Sphinx, name: str, source: list[str]) -> None:
    """README is the first page, with a table of contents; links to our own pages stay on the site."""
    if name.startswith("notebooks/"):
        source[0] = OWN_PAGE.sub(r"../\1.md", source[0])
    if name == "tools/site/cost":
        source[0] = source[0].replace("COST_DATA", json.dumps(page_data()))
    if name == root_doc:
        stems = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
        pages = [f"notebooks/{stem}" for stem in stems]
        parts = {"The series": [page for page in pages if page < "notebooks/08"],
                 "Your own chats": ["notebooks/own_data"],
                 "Appendices": [page for page in pages if "notebooks/08" <= page < "notebooks/own"],
                 "More": MORE}
        source[0] += "".join(CONTENTS % (what, "\n".join(pages)) for what, pages in parts.items())


def write_index(app: Sphinx, failure: Exception | None) -> None:
    """index.html leads to the first page."""
    if not failure:
        page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Sphinx) -> None:
    """What Sphinx calls: our two functions take part in its build."""
    app.connect("source-read", prepare)
    app.connect("build-finished", write_index)
