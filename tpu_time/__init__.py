"""A compiled TPU program becomes seconds, bytes and dollars; no TPU is needed, and no JAX to read one.

    from tpu_time import Slice, predict, profile
    text = '''HloModule m, is_scheduled=true
    ENTRY %main (p: bf16[1024]) -> bf16[1024] {
      %p = bf16[1024]{0} parameter(0)
      ROOT %c = bf16[1024]{0} concatenate(%p), dimensions={0}
    }'''
    print(predict(text, Slice("v5e", (1, 1))).seconds)

`compiler.start()` and `compiler.devices_of("v5p-8")` make programs to read (08_dryrun.py, section 1).
"""

import importlib

_WHERE = {"Slice": "program", "predict": "program", "profile": "program", "write_trace": "program",
          "will_it_fit": "fit", "run_cost": "fit", "band": "bands", "between": "bands"}
__all__ = list(_WHERE)


def __getattr__(name):
    """The face's names, loaded when they are asked for: NumPy is needed by some only."""
    if name not in _WHERE:
        raise AttributeError(f"tpu_time has no {name}")
    return getattr(importlib.import_module(f"tpu_time.{_WHERE[name]}"), name)
