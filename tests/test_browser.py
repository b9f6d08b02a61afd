"""00, 02 and 07 in JupyterLab, in a headless Chromium, as a reader opens them: all cells run, figures appear.

    ./setup.sh browser && .venv/bin/python -m pytest tests/test_browser.py

07 judges the saved answers of a finished run again (RUN_DIR, default runs/tiny), so no server is needed.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow
RUN = (ROOT / (os.environ.get("RUN_DIR") or "runs/tiny")).resolve()
BROWSERS = ("chromium", "google-chrome", "chrome")
RUN_ALL = "() => window.jupyterapp.commands.execute('notebook:run-all-cells')"
STATE = """() => {
  const panel = window.jupyterapp.shell.currentWidget;
  return {name: panel.context.path, kernel: panel.sessionContext.session?.kernel?.status,
          cells: panel.content.model.toJSON().cells};
}"""


def copy_of_the_repository(target):
    """The files git would commit, outputs removed: what appears later was made in this test."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for name in ("00_quickstart", "02_data", "07_eval"):
        subprocess.run([sys.executable, "-m", "nbconvert", "--clear-output", "--inplace",
                        target / "notebooks" / f"{name}.ipynb"], check=True, capture_output=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on a copy of the repository; gives its address and the run directory."""
    pytest.importorskip("jupyterlab", reason="no JupyterLab: ./setup.sh browser installs it")
    folder = tmp_path_factory.mktemp("lab")
    root, run, home = folder / "gemma4-on-tpu", folder / "run", folder / "home"
    home.mkdir()
    copy_of_the_repository(root)
    subprocess.run([sys.executable, "tools/notebooks.py"], cwd=root, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "SIZE": "tiny", "RUN_DIR": str(run), "JUPYTER_PREFER_ENV_PATH": "1",
           "HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with open(folder / "lab.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
             "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}", "--IdentityProvider.token=",
             "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=", "--ServerApp.terminals_enabled=False"],
            env=env, cwd=root, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert server.poll() is None, (folder / "lab.log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address, run
    finally:
        server.terminate()  # it ends its kernels, too
        server.wait(timeout=60)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: ./setup.sh browser")
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


def run_all_cells(browser, address, name, minutes):
    """Open a notebook, run it, return (its page, its cells)."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(120_000)
    page.goto(f"{address}/lab/tree/notebooks/{name}.ipynb?reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    page.wait_for_function(f"({STATE})().kernel === 'idle'")
    before = page.evaluate(STATE)
    assert not any(cell.get("outputs") for cell in before["cells"])
    page.evaluate(f"() => {{ window.finished = null; ({RUN_ALL})().then("
                  "() => window.finished = 'done', error => window.finished = String(error)); }")
    page.wait_for_function("() => window.finished", timeout=minutes * 60_000, polling=1_000)
    state = page.evaluate(STATE)
    assert state["name"] == f"notebooks/{name}.ipynb"
    return page, state["cells"]


def check(cells):
    """Every code cell ran to its end, and none wrote an error or a warning."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error", (cell["source"][:80], output["evalue"])
            assert output.get("name") != "stderr", (cell["source"][:80], output["text"])
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    return code


def figures_of(page, cells):
    """Scroll to every figure; return how many pictures are really drawn, and how many there should be."""
    wanted = 0
    for place, cell in enumerate(cells):
        for output in cell.get("outputs", ()):
            kinds = output.get("data", {})
            if "image/png" in kinds or "image/svg+xml" in kinds:
                wanted += 1
    drawn = set()
    for image in page.query_selector_all(".jp-OutputArea-output img"):
        image.scroll_into_view_if_needed()
        width, height = image.evaluate("i => i.decode().then(() => [i.naturalWidth, i.naturalHeight])")
        box = image.bounding_box()
        assert width > 200 and height > 100 and box["width"] > 200, "a figure is empty"
        drawn.add(image.get_attribute("src")[-200:])
    return len(drawn), wanted


def overflowing(page):
    """Code lines that do not fit into their cell at this window's width."""
    return page.evaluate("""() => [...document.querySelectorAll('.jp-CodeCell .cm-scroller')]
        .filter(e => e.scrollWidth > e.clientWidth + 2).map(e => e.innerText.slice(0, 80))""")


def test_00_in_jupyterlab(lab, browser):
    address, _ = lab
    page, cells = run_all_cells(browser, address, "00_quickstart", 15)
    assert len(check(cells)) <= 10
    drawn, wanted = figures_of(page, cells)
    assert drawn == wanted == 3
    assert page.locator(".jp-RenderedHTMLCommon table").count() >= 3
    assert not overflowing(page)
    page.close()


def test_02_in_jupyterlab(lab, browser):
    address, run = lab
    page, cells = run_all_cells(browser, address, "02_data", 10)
    check(cells)
    drawn, wanted = figures_of(page, cells)
    assert drawn == wanted >= 3
    assert page.locator(".jp-RenderedHTMLCommon table").count() >= 5
    assert not overflowing(page)
    assert (run / "data" / "meta.json").exists()
    page.close()


@pytest.mark.series
@pytest.mark.skipif(not (RUN / "eval" / "comparison.json").exists(),
                    reason=f"no finished run in {RUN}: ./run_all.sh makes one")
def test_07_in_jupyterlab_without_a_server(lab, browser):
    address, run = lab
    for name in ("data/meta.json", "train/recipe.json", "merge.json", "serve/options.json",
                 "eval/base/samples.jsonl", "eval/tuned/samples.jsonl"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(RUN / name, run / name)
    if not (run / "merged").exists():
        (run / "merged").symlink_to(RUN / "merged")
    page, cells = run_all_cells(browser, address, "07_eval", 15)
    check(cells)
    drawn, wanted = figures_of(page, cells)
    assert drawn == wanted >= 3
    assert not overflowing(page)
    assert [path.name for path in (run / "serve").iterdir()] == ["options.json"], "a server ran"
    assert (run / "eval" / "comparison.json").exists()
    page.close()
