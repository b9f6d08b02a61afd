"""01: its scripts are valid, ask gcloud for what is meant and clean up; its checks can fail."""

import json
import os
import re
import sys
from dataclasses import replace

import pytest
from conftest import ROOT, files_with_secrets, never_shown, page, program

from helpers import checks
from serving import environment
from tables import hardware
from tables.hardware import Hardware

V5P, V5E = Hardware("tpu", "v5p", 4), Hardware("tpu", "v5e", 8)


def vm(tmp_path, *words, refuses=(), **env):
    """(exit code, the words that a stand-in for gcloud got, one call a line) of scripts/vm.sh."""
    stub, log = tmp_path / "gcloud", tmp_path / "log"
    stub.write_text(f'#!/usr/bin/env bash\necho "$*" >> {log}\n'
                    + "".join(f'case "$*" in *{word}*) exit 1 ;; esac\n' for word in refuses))
    stub.chmod(0o755)
    log.write_text("")
    done = program("scripts/vm.sh", *words, PATH=f"{tmp_path}:{os.environ['PATH']}", **env)
    return done.returncode, log.read_text().splitlines()


@pytest.mark.parametrize("name", hardware.SLICES)
def test_a_machine_is_asked_for_in_line_then_spot_then_the_classic_way(tmp_path, name):
    one = hardware.slice_of(name)
    code, calls = vm(tmp_path, "create", "m", name, "z-a", "6", refuses=("FLEX_START", "=SPOT"))
    assert code == 0 and "tpu-vm create m --zone=z-a" in calls[-1]
    assert f"--accelerator-type={one.accelerator_type}" in calls[-1] and one.runtime in calls[-1]
    assert len(calls) == (3 if one.machine else 1)
    for call in calls[:-1]:  # every machine that Compute Engine makes ends by itself
        assert "--max-run-duration=6h --instance-termination-action=DELETE" in call
        assert f"--machine-type={one.machine}" in call and f"--boot-disk-type={one.disk}" in call
    assert ["request-valid-for-duration" in call for call in calls[:-1]] == [True,
                                                                             False][:len(calls) - 1]
    assert vm(tmp_path, "create", "m", name)[1][0].count(one.zones.split()[0]) == 1


@pytest.mark.parametrize("hours", ["3h", "0", "0.5", "-1", "us-east5-a"])
def test_hours_that_are_no_number_make_no_machine_without_a_limit(tmp_path, hours):
    """gcloud refuses such a limit both times, and what came next was a machine that never ends."""
    code, calls = vm(tmp_path, "create", "m", "v5p-8", "z-a", hours, refuses=(f"={hours}h",))
    assert code == 1 and calls == []


def test_a_machine_is_deleted_however_it_was_made_and_dry_runs_nothing(tmp_path):
    assert vm(tmp_path, "delete", "m", "z")[1] == ["compute instances delete m --zone=z --quiet"]
    code, calls = vm(tmp_path, "delete", "m", "z", refuses=("instances",))
    assert code == 0 and calls[1] == "compute tpus tpu-vm delete m --zone=z --quiet"
    assert vm(tmp_path, "delete", "m", "z", DRY_RUN="1") == (0, [])
    assert vm(tmp_path, "nonsense")[0] == 2 and vm(tmp_path, "create", "m", "v9-8")[0] != 0


def test_a_slice_that_the_table_hardly_knows_is_not_asked_for(tmp_path):
    """It was asked for with an empty --version, in an empty zone."""
    code, calls = vm(tmp_path, "create", "m", "v6e-16", "z-a")
    assert code == 1 and not calls
    done = program("scripts/vm.sh", "create", "m", "v6e-16", DRY_RUN="1")
    assert not done.stdout and "v6e-16" in done.stderr and "tables/hardware.py" in done.stderr


def test_run_ends_when_the_script_there_does(tmp_path):
    """It showed run.log for ever, so the line after it, which deletes the machine, never came."""
    (tmp_path / "work.sh").write_text("echo begun; sleep 1; echo all is in the bucket\n")
    (tmp_path / "gcloud").write_text(
        f'#!/usr/bin/env bash\ncd {tmp_path}\nfor last in "$@"; do :; done\n'
        '[ "$2" = scp ] || exec timeout 20 bash -c "${last#--command=}"\n')
    (tmp_path / "gcloud").chmod(0o755)
    done = program("scripts/vm.sh", "run", "m", "z-a", "scripts/work.sh", HF_TOKEN=None,
                   PATH=f"{tmp_path}:{os.environ['PATH']}", DRY_RUN=None, TRACK=None)
    assert done.returncode == 0, "timeout has ended it"
    assert done.stdout.splitlines()[-1] == "all is in the bucket"


COMMANDS = (["check"], ["create", "m", "v6e-8", "z-a"], ["bucket", "my-bucket", "z-a"],
            ["run", "m", "z-a", "scripts/train.sh", "my-bucket"], ["ssh", "m", "z-a"],
            ["list", "z-a"], ["delete", "m", "z-a"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("dry", ["1", ""], ids=["dry", "run"])
def test_no_secret_is_shown_or_is_a_word_of_a_command(tmp_path, words, dry):
    """`ps` shows a command's words, and gcloud writes its own into a log."""
    for name in ("gcloud", "curl"):
        (tmp_path / name).write_text('#!/usr/bin/env bash\necho "$*"\n'
                                     f'[ "$1" = compute ] || [ {name} = curl ] || exit 0\n'
                                     f"timeout 1 cat >> {tmp_path}/read\n")
        (tmp_path / name).chmod(0o755)
    secrets = never_shown()
    done = program("scripts/vm.sh", *words, DRY_RUN=dry, stdin="",
                   PATH=f"{tmp_path}:{os.environ['PATH']}", **secrets)
    assert done.returncode == 0, done.stderr
    for value in secrets.values():
        assert value not in done.stdout + done.stderr
    if words[0] in ("check", "run"):  # and yet the token arrives
        line = "Authorization: Bearer " if words[0] == "check" else ""
        if dry:
            assert f'<<<"{line}$HF_TOKEN"\n' in done.stdout
        else:
            assert (tmp_path / "read").read_text() == f"{line}{secrets['HF_TOKEN']}\n"


def test_every_secret_that_the_code_names_is_looked_for():
    """A new one belongs into never_shown.env, else nobody would notice where it's shown."""
    named = set()
    for place in ("*.py", "*.sh", "*/*.py", "*/*.sh"):
        for path in ROOT.glob(place):
            if path.parent.name in ("tests", "runs"):
                continue
            form = r"[\"']([A-Z][A-Z0-9_]+)[\"']" if path.suffix == ".py" else r"\$\{?([A-Z]\w+)"
            named.update(re.findall(form, path.read_text()))
    secrets = set(filter(environment.is_secret, named))
    assert {"HF_TOKEN", "VLLM_API_KEY"} <= secrets <= never_shown().keys()


def test_a_dry_run_can_be_pasted(tmp_path):
    """What is printed is a command of the shell, which reads the token where it is used."""
    told = program("scripts/vm.sh", "check", DRY_RUN="1", HF_TOKEN="hf_one").stdout
    said = program("bash", "-c", f"curl() {{ cat; }}; {told}", HF_TOKEN="hf_two").stdout
    assert said == "Authorization: Bearer hf_two\n"
    plain = program("scripts/vm.sh", "check", DRY_RUN="1", HF_TOKEN=None).stdout
    assert "Authorization" not in plain and plain.startswith("curl -fsIL")


def test_a_page_shows_no_secret(tmp_path):
    """01 once printed the token into its notebook, the notebook's stored copy and run.log."""
    done = page("01_setup.py", tmp_path / "run", **never_shown())
    assert done.returncode == 0, done.stderr
    assert "<<<" in done.stdout, "the dry run of `check` is shown"
    (tmp_path / "run" / "printed").write_text(done.stdout + done.stderr)
    assert files_with_secrets(tmp_path / "run") == []


def test_a_license_that_is_missing_is_said_before_anything_is_rented(tmp_path):
    for code in (0, 1):
        (tmp_path / "curl").write_text(f"#!/usr/bin/env bash\nexit {code}\n")
        (tmp_path / "curl").chmod(0o755)
        assert vm(tmp_path, "check") == (code, [])


@pytest.mark.parametrize(("status", "says", "keeps_silent"), [
    (22, "Accept its license", "can't be reached"),   # of curl --fail: 401, 403, 404
    (6, "can't be reached", "license"), (28, "can't be reached", "license")])
def test_a_hub_that_nobody_reaches_has_not_refused(tmp_path, status, says, keeps_silent):
    (tmp_path / "curl").write_text(f"#!/usr/bin/env bash\nexit {status}\n")
    (tmp_path / "curl").chmod(0o755)
    done = program("scripts/vm.sh", "check", DRY_RUN=None,
                   PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1 and says in done.stderr and keeps_silent not in done.stderr


@pytest.mark.parametrize(("name", "good", "bad", "says"), [
    ("check_space", ("x", 70, 62.5), ("x", 12, 62.5), "TMPDIR=/dev/shm"),
    ("check_slice", (V5P, ("v5p-8",)), (V5E, ("v5p-8", "v6e-8")), "a v5p-8 or v6e-8 is needed"),
    ("check_slice", (V5E, ()), (Hardware(), ("v6e-1",)), "no TPU, no GPU: a v6e-1 is needed"),
    ("check_slice", (V5P, ("v5p-8",)),
     (replace(V5P, trouble="process 7 holds the chips"), ("v5p-8",)),
     "process 7 holds"),
    ("check_slice", (V5P, ("v5p-8",)), (replace(V5P, hosts=4), ("v5p-8",)), "TPU v5p-32"),
    ("check_devices", (4, "TPU v5", 4), (1, "cpu", 4), "sees 1 x cpu, not the 4 chips"),
    ("check_devices", (1, "cpu", 0), (0, "none", 0), "sees 0 x none"),
    ("check_devices", (4, "TPU v5", 4), (0, "none", 4, "RuntimeError: the chips are busy"),
     "are busy"),
    ("check_icarus", ("Icarus Verilog version 11.0 (stable) ()",), ("",), "apt-get install"),
    ("check_icarus", ("Icarus Verilog version 12.0 (stable)",),
     ("Icarus Verilog version 13.0 (devel)",), "11 or 12 is needed"),
])
def test_checks_can_pass_and_fail(name, good, bad, says):
    check = getattr(checks, name)
    assert check(*good)[0] is True
    fine, message = check(*bad)
    assert fine is False and says in message and "\n" not in message


def test_what_jax_says_is_passed_on(monkeypatch, tmp_path):
    """Not setup.sh is the cure where the TPU's library cannot start."""
    assert checks.count_devices()[3] == ""
    monkeypatch.setenv("JAX_PLATFORMS", "tpuu")
    count, _, _, said = checks.count_devices()
    assert count == 0 and "tpuu" in said
    assert "setup.sh" not in checks.check_devices(count, "none", 4, said)[1]
    slow = tmp_path / "python"
    slow.write_text("#!/usr/bin/env bash\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert "Does every host" in checks.count_devices(timeout=0.2)[3]


def test_a_machine_that_is_not_ready_gets_one_clear_error(tmp_path):
    """As the 31B, on a machine without a TPU: setup.json is written, then one error is shown."""
    run = page("01_setup.py", tmp_path / "run", SIZE="31b")
    assert run.returncode == 1
    assert "Error: this machine is not ready." in run.stderr and "Traceback" not in run.stderr
    setup = json.loads((tmp_path / "run" / "setup.json").read_text())
    assert not setup["checks"]["accelerator"]["fine"]


def test_01_shows_how_the_first_command_begins_and_runs_none(capsys):
    checks.show_first_command("delete", "m", "z-a")
    assert capsys.readouterr().out == (
        "$ scripts/vm.sh delete m z-a\n"
        "gcloud compute instances delete m --zone=z-a --quiet\n\n")
