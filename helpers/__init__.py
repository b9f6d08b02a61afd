"""What the lesson teaches with: what is boring, or what two pages need or more.

    run        the size, the run directory and its one writer, whole files, progress
    opening    the first cell: install what is missing, say what this machine is, start JAX
    style      one look for figures and for colored tokens; pictures: the figures of 03 and 04
    checks     is this machine ready? (01)
    remote     a base on the hub or in a bucket
    chat       messages become token ids and a mask (02, and every request)
    data       rows of any form become examples (02); tools: those of chats that call functions
    packing    several examples in one row, and the folder in which 03 finds them (02)
    late_mask  a mask in the wrong place, and what it does (02)
    gemma      Tunix's Gemma 4: config, mesh, weights, adapters, greedy text (03, 04)
    train      loss, step, loop, log and checkpoints (03); track: its curves elsewhere
    answers    ask a model that is in this process (00, 03, 04)
    records    what 02, 03 and 04 leave for the pages after them
    weights    safetensors files too large to load
    merge      adapters added to the weights, and as PEFT stores them (04); four_bits: packed
    own        a reader's own chats, from the file to the hub (own data)
    report     what a run measured, as one file to send; kept: what of a run is worth keeping

Importing `helpers` itself needs the standard library alone: the opening cell calls
`helpers.machine` before anything else is there, and a page that talks HTTP to a server (05, 06, 07)
never starts JAX by accident.
"""

from helpers.opening import machine
from helpers.run import (
    Progress, UserError, catch_up, changed, choose, phase, read_json, require, run_dir, same_size,
    sha256_file, size, write_json, write_text)
from helpers.style import show_source

__all__ = [
    "Progress", "UserError", "catch_up", "changed", "choose", "machine", "phase", "read_json",
    "require", "run_dir", "same_size", "sha256_file", "show_source", "size", "write_json",
    "write_text",
]
