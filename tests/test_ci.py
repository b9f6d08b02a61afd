"""The workflows in .github: pinned, and made of steps that run."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from _pytest.mark.expression import Expression
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


def suites():
    """{suite of run_tests.sh: pytest's expression of the marks that it takes}."""
    lines = (ROOT / "run_tests.sh").read_text().splitlines()
    found = {}
    for line in lines:
        if match := re.match(r'([a-z |]+)\) run -m "?([a-z ()]+?)"? (?:-n|"\$@")', line):
            for name in match[1].split(" | "):
                found.setdefault(name, []).append(Expression.compile(match[2]))
    return found


@pytest.mark.parametrize("marks", [
    {name for place, name in enumerate(("slow", "laboratory", "series")) if number >> place & 1}
    for number in range(8)], ids=lambda marks: "-".join(sorted(marks)) or "none")
def test_each_test_is_in_one_of_the_two_jobs_or_slow(marks):
    takes = {name: [expression.evaluate(lambda word, **_: word in marks) for expression in given]
             for name, given in suites().items()}
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    both = jobs["test"]["strategy"]["matrix"]["suite"]
    assert sum(map(sum, (takes[suite] for suite in both))) == ("slow" not in marks)
    assert takes["fast"] == ["slow" not in marks] and takes["slow"] == ["slow" in marks]
    assert sum(takes["all"]) == 1


@pytest.fixture
def stubs(tmp_path):
    """run_tests.sh among programs that only say how they were called."""
    shutil.copy(ROOT / "run_tests.sh", tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests",
                    ignore=lambda _, names: [name for name in names if name != "never_shown.env"])
    for name in ("setup.sh", "run_all.sh", ".venv/bin/python"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {path.name} \"$@\" >> {tmp_path}/calls\n"
                        "echo '=== 1 passed in 0.1s ==='\n")
        path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(("words", "series", "marks"), [
    ([], "run_all.sh 00 07", ["not slow"]),
    (["--lesson"], "run_all.sh 00 07", ["not slow and (not laboratory or series)"]),
    (["--lesson", "03"], "run_all.sh 03", ["not slow and (not laboratory or series)"]),
    (["--laboratory"], "", ["not slow and laboratory and not series"]),
    (["--all"], "run_all.sh 00 07", ["not slow", "slow"]),
    (["--lesson", "tests/test_data.py"], "run_all.sh 00 07",
     ["not slow and (not laboratory or series)"]),
])
def test_each_suite_runs_its_pages_and_its_tests(stubs, words, series, marks):
    done = program("bash", stubs / "run_tests.sh", *words, RUN_DIR=None)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (stubs / "calls").read_text().splitlines()
    whole = [series, "run_all.sh own"] if series.endswith("00 07") else [series]
    assert [call for call in calls if call.startswith("run_all")] == (whole if series else [])
    log = stubs / "runs/test/run_all.log"  # tests/test_series.py looks for secrets in it, too
    said = log.read_text().splitlines() if log.exists() else []
    assert len(said) == (len(whole) if series else 0)
    tests = [call for call in calls if call.startswith("python -m pytest")]
    assert [call.split(" -m ")[2].partition(" -n ")[0].split(" tests/")[0]
            for call in tests] == marks
    if words[-1:] == ["tests/test_data.py"]:
        assert tests[0].endswith("tests/test_data.py")


def test_a_series_that_fails_ends_run_tests_though_its_words_go_through_a_pipe(stubs):
    (stubs / "run_all.sh").write_text("#!/bin/sh\necho 02 failed >&2\nexit 3\n")
    done = program("bash", stubs / "run_tests.sh", RUN_DIR=None)
    assert done.returncode == 3 and "02 failed" in done.stdout
    assert "pytest" not in (stubs / "calls").read_text()
    assert (stubs / "runs/test/run_all.log").read_text() == "02 failed\n"
