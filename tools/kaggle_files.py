"""Write the two files that `kaggle kernels push` sends: kernel-metadata.json and launch.py.

    tools/kaggle_files.py FOLDER USER/NAME [--smoke] [--after USER/NAME] [NAME=VALUE...]

scripts/kaggle.sh calls it. REPOSITORY and COMMIT in the environment say what is cloned there.
"""

import argparse
import contextlib
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import kaggle_session

from helpers import run
from helpers.run import UserError

LAUNCHER = ROOT / "scripts" / "kaggle_launch.py"
SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS?)($|_)")
SETTINGS = re.compile(r"(# <settings>\n).*?(# </settings>\n)", re.DOTALL)
MODELS = {"31b": "google/gemma-4/transformers/gemma-4-31b-it/1",
          "e2b": "google/gemma-4/transformers/gemma-4-e2b-it/1"}
OURS = ("SIZE", "MAX_STEPS", "KAGGLE_HOURS", "BASE_FROM", "SERVE_TRY")


def settings_of(words: list[str]) -> dict[str, str]:
    """{name: value} of words such as MAX_STEPS=30.

    Raises:
      UserError: a word is none, or it's a secret, which Kaggle would store with the code.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch("[A-Z][A-Z0-9_]*", name):
            raise UserError(f"{word} is no setting. Write NAME=VALUE, such as MAX_STEPS=30.")
        if SECRET.search(name):
            raise UserError(f"{name} would be stored at Kaggle with the code. Leave it out: Gemma "
                            "4 is downloaded without a token.")
        found[name] = value
    return found


def check(settings: dict[str, str], size: str, smoke: bool) -> None:
    """Refuse a wrong value now; Kaggle's queue may take hours before anything else looks at it.

    Raises:
      UserError: a setting of `OURS` has a value that the session wouldn't take.
    """
    if size not in run.SIZES:
        raise UserError(f"SIZE={size} is none of {', '.join(run.SIZES)}.")
    steps = settings.get("MAX_STEPS", "")
    if steps and not steps.isdecimal():
        raise UserError(f"MAX_STEPS={steps} isn't a number of steps, such as 200.")
    attempt = settings.get("SERVE_TRY", "")
    last = kaggle_session.TRIES - 1
    if attempt and not (attempt.isdecimal() and int(attempt) <= last):
        raise UserError(f"SERVE_TRY={attempt} isn't a number from 0 to {last}. docs/MACHINES.md "
                        "lists these ways to start the server.")
    source = settings.get("BASE_FROM", "")
    if source not in ("", "hub", "mount"):
        raise UserError(f"BASE_FROM={source} is neither hub nor mount.")
    word = settings.get("KAGGLE_HOURS", "")
    longest = kaggle_session.usual_hours(size, smoke)
    hours = float("nan")
    with contextlib.suppress(ValueError):
        hours = float(word)
    if word and not 0 < hours <= longest:
        raise UserError(f"KAGGLE_HOURS={word} isn't a number above 0 and at most {longest}. Kaggle "
                        "would end a longer session before it has kept its results.")


def metadata_of(name: str, size: str, after: str) -> dict[str, object]:
    """What kernel-metadata.json says of a notebook USER/NAME.

    Args:
      after: the notebook whose output is attached, to go on from there; "" for none.
    """
    return {
        "id": name, "title": name.split("/")[1], "code_file": "launch.py", "language": "python",
        "kernel_type": "script", "is_private": True, "enable_gpu": False, "enable_tpu": True,
        "enable_internet": True, "machine_shape": "TpuV5E8", "dataset_sources": [],
        "competition_sources": [], "kernel_sources": [after] if after else [],
        "model_sources": [MODELS[size]] if size in MODELS else []}


def launcher(repository: str, commit: str, words: list[str], settings: dict[str, str]) -> str:
    """The launcher's text, with what it shall clone and set."""
    lines = (f"REPOSITORY = {repository!r}\nCOMMIT = {commit!r}\n"
             f"WORDS = {words!r}\nSETTINGS = {settings!r}\n")
    text, count = SETTINGS.subn(lambda found: found[1] + lines + found[2], LAUNCHER.read_text())
    assert count == 1
    return text


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Write what `kaggle kernels push` sends.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", help="USER/NAME of the notebook")
    parser.add_argument("--smoke", action="store_true", help="thirty steps, one server start")
    parser.add_argument("--after", default="", help="USER/NAME whose output is attached")
    parser.add_argument("settings", nargs="*", help="NAME=VALUE")
    chosen = parser.parse_intermixed_args()  # settings may come behind --smoke and --after
    settings = settings_of(chosen.settings)
    size = settings.get("SIZE") or ("e2b" if chosen.smoke else "31b")
    check(settings, size, chosen.smoke)
    for name in settings.keys() - set(OURS):
        print(f"kaggle: note: {name} is none of our settings ({', '.join(OURS)}). It travels as a "
              "variable of the environment.", file=sys.stderr)
    words = ["--smoke"] if chosen.smoke else []
    text = launcher(os.environ["REPOSITORY"], os.environ["COMMIT"], words, settings)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    (chosen.folder / "launch.py").write_text(text)
    facts = json.dumps(metadata_of(chosen.name, size, chosen.after), indent=2)
    (chosen.folder / "kernel-metadata.json").write_text(facts + "\n")


if __name__ == "__main__":
    run.one_line_errors()
    main()
