"""Small shared pieces of the series: what is boring, or needed by two notebooks or more.

Only the standard library is imported here, so a notebook that talks HTTP to a server (05, 06, 07)
never starts JAX by accident. Each topic has its own file: `helpers.chat`, `helpers.gemma`,
`helpers.server`, `helpers.judge`, `helpers.answers`, `helpers.waves`, `helpers.style`.
"""

from helpers.machine import chip, machine, show_source
from helpers.run import (
    Progress,
    UserError,
    atomic_dir,
    catch_up,
    choose,
    phase,
    read_json,
    require,
    run_dir,
    sha256_file,
    size,
    write_json,
    write_text,
)

__all__ = [
    "Progress", "UserError", "atomic_dir", "catch_up", "chip", "choose", "machine", "phase",
    "read_json", "require", "run_dir", "sha256_file", "show_source", "size", "write_json",
    "write_text",
]
