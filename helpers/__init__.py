"""Small shared pieces of the series: what is boring, or needed by two notebooks or more.

Only the standard library is imported here: the opening cell of every page calls `helpers.machine`
before anything else is there, and a page that talks HTTP to a server (05, 06, 07) never starts JAX
by accident. Each topic has its own file, such as `helpers.chat` or `helpers.gemma`.
"""

from helpers.opening import machine
from helpers.run import (
    Progress,
    UserError,
    always,
    atomic_dir,
    catch_up,
    changed,
    choose,
    phase,
    read_json,
    require,
    run_dir,
    same_size,
    sha256_file,
    size,
    write_json,
    write_text,
)
from helpers.style import show_source

__all__ = [
    "Progress", "UserError", "always", "atomic_dir", "catch_up", "changed", "choose",
    "machine", "phase", "read_json", "require", "run_dir", "same_size",
    "sha256_file", "show_source", "size", "write_json", "write_text",
]
