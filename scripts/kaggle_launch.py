"""What scripts/kaggle.sh pushes: clone one commit of the series, and hand over to it.

No code of the series is in here. The lines between the two marks are written by scripts/kaggle.sh.
It runs with Kaggle's own Python and imports the standard library alone: a JAX of this process would
hold the chips, and no other could have them.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

# <settings>
REPOSITORY, COMMIT, WORDS, SETTINGS = "", "", [], {}
# </settings>
WORKING = Path(os.environ.get("KAGGLE_WORKING", "/kaggle/working"))  # persists, 20 GB
SCRATCH = Path(os.environ.get("KAGGLE_SCRATCH", "/tmp"))             # a terabyte, gone at the end


def stop(why: str) -> None:
    """End before anything began: leave a report that says why.

    Raises:
      SystemExit: always, with the reason as its one line.
    """
    text = json.dumps({"series": "gemma4-on-tpu", "outcome": f"failed: {why}"}, indent=2)
    (WORKING / "report.json").write_text(text + "\n")
    sys.exit(f"Error: {why}")


def clone() -> Path:
    """The commit in a folder of the large disk; one that is there already is used as it is."""
    folder = SCRATCH / "gemma4-on-tpu"
    folder.mkdir(parents=True, exist_ok=True)
    if not shutil.which("git"):
        subprocess.run(["apt-get", "install", "-y", "-q", "git"])
    git = ["git", "-C", str(folder)]
    for words in (["init", "-q"], ["fetch", "-q", "--depth=1", REPOSITORY, COMMIT],
                  ["checkout", "-q", "--force", "FETCH_HEAD"]):
        done = subprocess.run(git + words, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["git said nothing"])[-1]
            stop(f"{REPOSITORY} gives no commit {COMMIT[:12]} ({said}). Push that commit to a "
                 "public repository, and switch the internet on in the notebook's settings.")
    return folder


def main() -> int:
    """Clone, start the session, pass on what it prints and the signals we get; its exit status."""
    os.environ.update(SETTINGS)
    folder = clone()
    print(f"commit {COMMIT[:12]} of {REPOSITORY} is in {folder}", flush=True)
    session = subprocess.Popen(
        [sys.executable, "-u", "tools/kaggle_session.py", *WORDS], cwd=folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        errors="replace", start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: session.send_signal(number))
    assert session.stdout
    for line in session.stdout:
        print(line, end="", flush=True)
    return session.wait()


if __name__ == "__main__":
    status = main()
    if status:
        sys.exit(status)
