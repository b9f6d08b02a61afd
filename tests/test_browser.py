"""00 and 02 in JupyterLab, in a headless Chromium, as a reader opens them: all cells run, figures appear.

    ./setup.sh browser && .venv/bin/python -m pytest tests/test_browser.py
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
RUN_ALL = "() => window.jupyterapp.commands.execute('notebook:run-all-cells')"
STATE = """() => {
  const panel = window.jupyterapp.shell.currentWidget;
  return {kernel: panel.sessionContext.session?.kernel?.status, cells: panel.content.model.toJSON().cells};
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on a copy of what git would commit, outputs removed; gives its address."""
    pytest.importorskip("jupyterlab", reason="no JupyterLab: ./setup.sh browser installs it")
    folder = tmp_path_factory.mktemp("lab")
    root = folder / "gemma4-on-tpu"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    subprocess.run([sys.executable, "tools/notebooks.py"], cwd=root, check=True, capture_output=True)
    for path in (root / "notebooks").glob("0[02]_*.ipynb"):
        subprocess.run([sys.executable, "-m", "nbconvert", "--clear-output", "--inplace", path],
                       check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "SIZE": "tiny", "RUN_DIR": str(folder / "run"), "JUPYTER_PREFER_ENV_PATH": "1",
           "HOME": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with open(folder / "lab.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
             "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}", "--IdentityProvider.token=",
             "--LabApp.expose_app_in_browser=True", "--LabApp.news_url="],
            env=env, cwd=root, stdout=log, stderr=log)
    try:
        for _ in range(240):
            assert server.poll() is None, (folder / "lab.log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()  # it ends its kernels, too
        server.wait(timeout=60)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: ./setup.sh browser")
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize(("name", "figures"), [("00_quickstart", 1), ("02_data", 3)])
def test_run_all_in_jupyterlab(lab, browser, name, figures):
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(120_000)
    page.goto(f"{lab}/lab/tree/notebooks/{name}.ipynb?reset")
    page.wait_for_function(f"({STATE})().kernel === 'idle'")
    page.evaluate(f"() => {{ window.finished = null; ({RUN_ALL})().then("
                  "() => window.finished = 'done', error => window.finished = String(error)); }")
    page.wait_for_function("() => window.finished", timeout=15 * 60_000, polling=1_000)
    code = [cell for cell in page.evaluate(STATE)["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [output for output in outputs if output["output_type"] == "error"
                or output.get("name") == "stderr"]
    drawn = set()
    for image in page.query_selector_all(".jp-OutputArea-output img"):
        image.scroll_into_view_if_needed()
        width, height = image.evaluate("i => i.decode().then(() => [i.naturalWidth, i.naturalHeight])")
        assert width > 200 and height > 100, "a figure is empty"
        drawn.add(image.get_attribute("src")[-200:])
    assert len(drawn) == sum("image/png" in output.get("data", {}) for output in outputs) >= figures
    wide = page.evaluate("""() => [...document.querySelectorAll('.jp-CodeCell .cm-scroller')]
        .filter(e => e.scrollWidth > e.clientWidth + 2).map(e => e.innerText.slice(0, 80))""")
    assert not wide, "code that does not fit into its cell"
    page.close()
