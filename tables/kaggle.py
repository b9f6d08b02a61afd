"""Kaggle's TPU machine: what its environment gets wrong, and whether it's the one asked for.

Kaggle lends a TPU v5e-8 (eight chips on one host) for nothing. Its image is made for its own JAX,
and there is no metadata server that a TPU's driver could ask. Standard library only, because the
Python that Kaggle starts reads this file before anything is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from tables import hardware
from tables.hardware import Hardware

SLICE = "v5e-8"
# Of the host's memory, what 03 needs to quantize the base: 58 for its weights, 10 for the queries,
# keys and values that Tunix stacks, and what the system takes beside them.
HOST_GIB = {"31b": 80}
ADDRESS = re.compile(r"[\w.:-]+(,[\w.:-]+)*")  # of hosts: names or addresses, with commas between


def on_kaggle() -> bool:
    """Whether this process runs in a Kaggle session, interactive or pushed."""
    return bool(os.environ.get("KAGGLE_KERNEL_RUN_TYPE"))


def topology() -> dict[str, str]:
    """What a TPU's driver wants to know of the eight chips, and can't ask of a metadata server.

    The image sets these variables in its first process; a shell started otherwise lacks them.
    """
    piece = hardware.slice_of(SLICE)
    chips = piece.topology.replace("x", ",")
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": piece.accelerator_type,
        "TPU_CHIPS_PER_HOST_BOUNDS": f"{chips},1",
        "TPU_HOST_BOUNDS": "1,1,1",
    }


def mend(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Change what an environment of Kaggle's gets wrong, before JAX or vLLM start in it.

    - TPU_LIBRARY_PATH goes. It names the image's old libtpu, and a newer JAX would load that one.
    - TPU_WORKER_HOSTNAMES goes where it holds a warning instead of names, as images have had it.
    - JAX_PLATFORMS gets the CPU beside the TPU: an int8 base is quantized there, before it's sent
      to the chips, and "tpu" alone hides the CPU from JAX.
    - The four variables of `topology` are set, unless they are, or a metadata server answers.

    Args:
      environment: is changed in place.

    Returns:
      One line for each change, to print.
    """
    changes = []
    if environment.pop("TPU_LIBRARY_PATH", None) is not None:
        changes.append("TPU_LIBRARY_PATH unset: it names the image's own, older libtpu")
    names = environment.get("TPU_WORKER_HOSTNAMES")
    if names is not None and not ADDRESS.fullmatch(names):
        del environment["TPU_WORKER_HOSTNAMES"]
        changes.append("TPU_WORKER_HOSTNAMES unset: it held no names of hosts")
    platforms = environment.get("JAX_PLATFORMS", "").split(",")
    if "tpu" in platforms and "cpu" not in platforms:
        environment["JAX_PLATFORMS"] = ",".join([*platforms, "cpu"])
        changes.append("JAX_PLATFORMS has the CPU, too: the base is quantized there")
    wanted = {}
    for name, value in topology().items():
        if name not in environment:
            wanted[name] = value
    if "TPU_SKIP_MDS_QUERY" in wanted and hardware.metadata("accelerator-type"):
        return changes
    for name, value in wanted.items():
        environment[name] = value
        changes.append(f"{name}={value}: there's no metadata server to ask")
    return changes


def refusal(machine: Hardware) -> str:
    """Why this session isn't the v5e-8 that was asked for, in one line; "" if it is one.

    Kaggle doesn't fail where it has no TPU to give: an account whose phone number isn't verified,
    or a push whose TPU was overlooked, starts on a CPU and says nothing.
    """
    if machine.accelerator != "tpu":
        return (f"Kaggle gave this session no TPU ({machine}). Verify your phone number on "
                "kaggle.com/settings, choose the accelerator TPU v5e-8 (scripts/kaggle.sh push "
                "asks for it), and start again: a CPU would burn hours without a word")
    wanted = hardware.slice_of(SLICE).chips
    if machine.chips < wanted:
        return (f"this session shows {machine.chips} of the {wanted} chips of a TPU {SLICE}. Stop "
                "it and start another: with fewer nothing fits as planned")
    return ""


def no_memory(size: str, memory: int) -> str:
    """Why this session's host can't load the base, in one line; "" if it can, or nobody knows.

    03 stores the base as int8 there. It loads the whole base into the host's memory first, and
    sends one quantized matrix at a time to the chips.

    Args:
      size: of the series.
      memory: bytes, of `hardware.host_memory`; 0 if that's unknown.
    """
    needed = HOST_GIB.get(size, 0)
    available = memory / hardware.GIB
    if memory and available < needed:
        return (f"this session's host has {available:.0f} GiB of memory, and 03 needs about "
                f"{needed} to load the {size.upper()} before it's quantized. Stop it and start "
                "another, or take SIZE=e2b")
    return ""
