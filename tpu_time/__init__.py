"""A compiled TPU program becomes seconds, bytes and dollars.

No TPU is needed, and no JAX to read a program.

    from tpu_time import Box, predict, profile
    text = '''HloModule m, is_scheduled=true
    ENTRY %main (p: bf16[1024]) -> bf16[1024] {
      %p = bf16[1024]{0} parameter(0)
      ROOT %c = bf16[1024]{0} concatenate(%p), dimensions={0}
    }'''
    print(predict(text, Box("v5e", (1, 1))).seconds)

`fit` answers a renter's questions, `bands` says how far a prediction may be off.
`compiler.start()` and `compiler.devices_of("v5p-8")` make programs to read (section 1 of
appendix/08_dryrun.py).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpu_time.clock import predict
    from tpu_time.links import Box
    from tpu_time.report import profile, write_trace

_FROM = {  # the file in which each name is defined
    "Box": "links",
    "predict": "clock",
    "profile": "report",
    "write_trace": "report",
}
__all__ = ["Box", "predict", "profile", "write_trace"]


def __getattr__(name: str) -> object:
    """Import one of this room's names when it's asked for: `fit` and `bands` need no NumPy."""
    if name not in _FROM:
        raise AttributeError(f"tpu_time has no {name}")
    module = importlib.import_module(f"tpu_time.{_FROM[name]}")
    return getattr(module, name)
