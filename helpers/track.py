"""The losses of 03 in TensorBoard or in Weights & Biases, if the variable TRACK asks for it.

Both are backends of metrax, which comes with Tunix. `log.jsonl` stays what counts: a run that
resumes draws its curves again from what that file still holds, so the two never disagree.
"""

import atexit
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.run import UserError

if TYPE_CHECKING:
    from metrax.logging import LoggingBackend

CHOICES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # {choice: the package that it needs}
FOLDER = "tensorboard"  # beside log.jsonl
PROJECT = "gemma4-on-tpu"  # of W&B, unless WANDB_PROJECT names another


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


def begin(log: Path) -> "LoggingBackend | None":
    """The backend that TRACK asks for, or None if it asks for nothing.

    Only the first host gets one. Earlier curves of this run in TensorBoard's folder are removed,
    because the caller writes them again.

    Args:
      log: the run's `log.jsonl`.

    Raises:
      UserError: see `choice`.
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
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        backend = logging.WandbBackend(project, name=os.environ.get("WANDB_NAME"))
    atexit.register(backend.close)
    return backend


def write(backend: "LoggingBackend | None", record: Mapping[str, float]) -> None:
    """Give a line of `log.jsonl` to the backend, if there is one: each number under its name."""
    if backend is None:
        return
    for name, value in record.items():
        if name != "step":
            backend.log_scalar(name, value, step=record["step"])
