"""The workflows in .github: pinned, and made of steps that run."""

import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, program

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


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
            done = program(SHELLCHECK, "-s", "bash", "-", stdin=step["run"])
            assert done.returncode == 0, done.stdout
            if "|" in step["run"]:
                assert step.get("shell") == "bash", "without it a pipe hides the first exit status"
            for script in re.findall(r"(?:\./|\.github/)[\w.]+\.sh", step["run"]):
                assert os.access(ROOT / script, os.X_OK), script
