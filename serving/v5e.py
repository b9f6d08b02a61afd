"""The 31B on eight v5e chips, the machine that Kaggle lends: how to start, and what to try next.

Nobody has published a start of the 31B by vLLM on a v5e. A 27B of another family started there by
`vllm-tpu` 0.28.0 (github.com/ARahim3/kaggle-tpu-lab, 2026): 40 minutes cold, 12 to 22 with XLA's
cache, 6 without compiling ahead. So there's a list: if one try doesn't start, the next asks less.
"""

import os
from dataclasses import dataclass, field, replace
from typing import Any

from serving.options import Options
from tables.errors import UserError

SLICE = "v5e-8"
# vLLM takes 0.86 of a chip: 2.2 GiB stay to compute in. Servers of others started with 2.5 on a v6e
# and failed with 0.6. The weights take 7.3 GiB, so 54,779 tokens of cache are left
# (`limits.memory_plan`): six requests of 8,192, or all 32 of 1,700.
SHARE = 0.86
PLANNED = Options(
    engine="tpu", port=8000, max_model_len=8192, max_num_batched_tokens=1024, tensor_parallel=8,
    chip="v5e", timeout=3600.0,  # docs/MACHINES.md counts an hour for a try that doesn't start
    flags=("--max-num-seqs", "32", "--gpu-memory-utilization", str(SHARE)))


@dataclass(frozen=True)
class Try:
    """One way to start the server."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)  # of `PLANNED`
    version: str = ""  # of vllm-tpu, if it's another than the one in requirements/serve-tpu.txt


_FEW = {"max_model_len": 4096, "max_num_batched_tokens": 256,
        "flags": ("--max-num-seqs", "8", "--gpu-memory-utilization", "0.8")}
_LAZY = _FEW | {"environment": ("SKIP_JAX_PRECOMPILE=1",)}
# The version is among the options: 06 starts the same one again, and keeps its measurements apart.
_OLDER = _FEW | {"environment": ("SKIP_JAX_PRECOMPILE=1", "VLLM_TPU=0.28.0")}
TRIES = (
    Try("as planned"),
    Try("fewer shapes, less memory", _FEW),
    Try("nothing compiled ahead", _LAZY),
    Try("PyTorch's model code", _LAZY | {"implementation": "vllm"}),
    Try("vllm-tpu 0.28.0", _OLDER, "0.28.0"),
)
QUICKEST = 2  # of `TRIES`: nothing compiled ahead, so a first hour learns in minutes if it starts


def try_here(default: int = 0) -> int:
    """The number in `TRIES` that SERVE_TRY names; `default` if it's unset.

    Raises:
      UserError: SERVE_TRY isn't a number of `TRIES`.
    """
    given = os.environ.get("SERVE_TRY", "")
    word = given.strip() or str(default)
    if not word.isdecimal() or int(word) >= len(TRIES):
        choices = []
        for number, attempt in enumerate(TRIES):
            choices.append(f"{number} ({attempt.name})")
        names = ", ".join(choices)
        raise UserError(f"SERVE_TRY={word} isn't a way to start a server. There are {names}.")
    return int(word)


def options_here(default: int = 0) -> Options:
    """The options of the try that SERVE_TRY names; if it's unset, of try `default` (0: as planned).

    A try with another version of vllm-tpu also sets VLLM_TPU, which `setup.sh serve-tpu` reads.

    Raises:
      UserError: SERVE_TRY isn't a number of `TRIES`.
    """
    chosen = TRIES[try_here(default)]
    if chosen.version:
        os.environ["VLLM_TPU"] = chosen.version
    return replace(PLANNED, **chosen.changes)
