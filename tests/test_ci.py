"""The workflows in .github: valid, pinned, and made of steps that run.

    .venv/bin/python -m pytest tests/test_ci.py
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_steps_and_what_they_refer_to(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["name"] and workflow[True]  # YAML 1.1 reads the key `on` as true
    assert workflow["permissions"]["contents"] == "read"
    for name, job in workflow["jobs"].items():
        assert job["runs-on"].startswith("ubuntu-") and job["timeout-minutes"] <= 120
        assert set([job["needs"]] if "needs" in job else []) <= set(workflow["jobs"]), name
        known = {step.get("id") for step in job["steps"]}
        assert set(re.findall(r"steps\.(\w+)\.outputs", str(job))) <= known
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
    for files in re.findall(r"hashFiles\(([^)]*)\)", path.read_text()):
        assert all(list(ROOT.glob(pattern)) for pattern in re.findall(r"'([^']+)'", files))


def test_actions_are_pinned_by_one_commit_with_their_version_beside():
    pins = {}
    for path in WORKFLOWS:
        for action in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
            name, commit = action.split("@")
            assert pins.setdefault(name, commit) == commit, action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_shell_lines_pass_shellcheck_and_call_scripts_that_exist(path):
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            if "run" not in step:
                continue
            assert "${{" not in step["run"], "expressions go through env"
            done = subprocess.run([SHELLCHECK, "-s", "bash", "-"], text=True, capture_output=True,
                                  input=step["run"])
            assert done.returncode == 0, done.stdout
            if "|" in step["run"]:
                assert step.get("shell") == "bash", "without it a pipe hides the first exit status"
            for script in re.findall(r"(?:\./|\.github/)[\w.]+\.sh", step["run"]):
                assert os.access(ROOT / script, os.X_OK), script


def test_the_names_to_upgrade_are_ours_and_installed():
    names = subprocess.run([ROOT / ".github" / "newest.sh", "--names"], text=True,
                           capture_output=True, check=True).stdout.split()
    assert {"jax", "google-tunix", "orbax-checkpoint", "pytest"} <= set(names)
    assert not {"absl-py", "asttokens"} & set(names)  # these are pulled in by others
    for name in names:
        assert importlib.metadata.version(name)


@pytest.mark.parametrize(("open_issue", "command"), [("", "create"), ("41", "comment")])
def test_a_failure_is_reported_once(tmp_path, open_issue, command):
    """`gh` is recorded: it answers as the real one does, and keeps what it was given."""
    recorded = tmp_path / "bin" / "gh"
    recorded.parent.mkdir()
    recorded.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >>"{tmp_path}/calls"\n'
                        f'if [ "$2" = list ]; then echo "{open_issue}"; exit; fi\n'
                        f'cat "${{@: -1}}" >"{tmp_path}/body"\n')
    recorded.chmod(0o755)
    log = tmp_path / "log"
    log.write_text("changed versions (< pinned, > newest):\n1c1\n< jax==1\n---\n> jax==2\n"
                   "setup: ready\n" + "line\n" * 100 + "FAILED tests/test_x.py\n")
    subprocess.run([ROOT / ".github" / "report.sh", log], check=True, env=os.environ | {
        "PATH": f"{recorded.parent}:{os.environ['PATH']}", "RUN_URL": "https://run"})
    calls, body = (tmp_path / "calls").read_text(), (tmp_path / "body").read_text()
    assert f"issue\n{command}\n" in calls and (f"{command}\n41\n" in calls) == bool(open_issue)
    assert "Run: https://run" in body and "> jax==2" in body and "FAILED tests/test_x.py" in body
    assert len(body.splitlines()) < 80
