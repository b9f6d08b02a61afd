"""The losses of 03 in TensorBoard or in Weights & Biases, if the variable TRACK asks for it.

Both are backends of metrax, which comes with Tunix. `log.jsonl` stays what counts: a run that
resumes draws its curves again from what that file still holds, so the two never disagree.
"""

import atexit
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from helpers.run import UserError

if TYPE_CHECKING:
    from metrax.logging import LoggingBackend

CHOICES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # {choice: the package that it needs}
FOLDER = "tensorboard"  # beside log.jsonl
PROJECT = "gemma4-on-tpu"  # of W&B, unless WANDB_PROJECT names another
# Run by `check_login`. What W&B says in passing goes to stderr, so stdout is left for the reason.
LOGIN = """
import sys
import wandb
try:
    wandb.login(verify=sys.argv[1] == "verify")
except Exception as error:
    print(error)
    sys.exit(1)
"""


def choice() -> str:
    """What TRACK asks for: a key of `CHOICES`, or "" for nothing.

    Raises:
      UserError: it asks for something else, or its package isn't installed.
    """
    asked = os.environ.get("TRACK", "")
    if not asked:
        return ""
    if asked not in CHOICES:
        raise UserError(f"TRACK={asked} is unknown. There are {' and '.join(CHOICES)}; unset it to "
                        "keep log.jsonl alone.")
    package = CHOICES[asked]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"TRACK={asked} needs the package {package}, which this Python lacks. "
                        f"Install it (.venv/bin/python -m pip install {package}), or unset TRACK.")
    return asked


def check_login(verify: bool = False) -> None:
    """Let W&B say whether it has what a run needs, if TRACK asks for W&B.

    `wandb.login` decides that: it looks for a key in the environment, in netrc and in its own
    settings, and knows that WANDB_MODE=offline and WANDB_MODE=disabled need none. It's called in a
    process without a terminal, because it asks for a key where it sees a terminal or a notebook.
    And a process reads W&B's variables only once, so what the reader sets after a refusal would
    come too late in this one.

    Args:
      verify: also ask W&B's server whether the key is right. Without it nothing is sent.

    Raises:
      UserError: see `choice`; or there's no key, or it's wrong, or the server doesn't answer.
    """
    if choice() != "wandb":
        return
    how = "verify" if verify else "look"
    done = subprocess.run([sys.executable, "-c", LOGIN, how], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)
    if done.returncode:
        reason = done.stdout
        if not reason:  # wandb itself can't be imported
            reason = done.stderr.splitlines()[-1]
        raise UserError(_refusal(reason))


def _refusal(reason: str) -> str:
    """One line from what W&B says when it begins no run, and what helps; it holds no key."""
    words = reason.split()
    line = " ".join(words).rstrip(".")
    key = os.environ.get("WANDB_API_KEY")
    if key:
        line = line.replace(key, "$WANDB_API_KEY")
    return (f"TRACK=wandb gets no run of W&B: {line}. Run .venv/bin/wandb login, or export "
            "WANDB_API_KEY=..., or set WANDB_MODE=offline, which needs no key. Or unset TRACK to "
            "keep log.jsonl alone.")


def begin(log: Path) -> "LoggingBackend | None":
    """The backend that TRACK asks for, or None if it asks for nothing.

    Only the first host gets one. Earlier curves of this run in TensorBoard's folder are removed,
    because the caller writes them again.

    Args:
      log: the run's `log.jsonl`.

    Raises:
      UserError: see `choice`; or W&B begins no run.
    """
    asked = choice()
    if not asked:
        return None
    import jax
    from metrax import logging
    if jax.process_index() != 0:
        return None

    backend: LoggingBackend
    if asked == "tensorboard":
        folder = log.parent / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        backend = logging.TensorboardBackend(
            str(folder), flush_every_n_steps=1, flush_interval_s=10.0)
    else:
        backend = _run_of_wandb(log.parent)
    atexit.register(backend.close)
    return backend


def _run_of_wandb(folder: Path) -> "LoggingBackend":
    """A new run of W&B, whose files go to `folder/wandb/` unless WANDB_DIR names another place.

    Raises:
      UserError: W&B begins no run.
    """
    import wandb
    from metrax import logging
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    name = os.environ.get("WANDB_NAME")
    place = os.environ.get("WANDB_DIR", str(folder))
    show = sys.excepthook
    try:
        backend = logging.WandbBackend(project, name=name, dir=place)
    except wandb.Error as error:
        raise UserError(_refusal(str(error))) from error
    finally:
        sys.excepthook = show  # W&B's own prints a traceback of whatever ends a script

    def show_and_fail(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Show an error as before, and let W&B list this run as failed."""
        show(kind, error, trace)
        wandb.finish(exit_code=1)

    sys.excepthook = show_and_fail
    return backend


def write(backend: "LoggingBackend | None", record: Mapping[str, float]) -> None:
    """Give a line of `log.jsonl` to the backend, if there is one: each number under its name."""
    if backend is None:
        return
    for name, value in record.items():
        if name != "step":
            backend.log_scalar(name, value, step=record["step"])
