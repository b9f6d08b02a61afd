"""A vLLM server: options, start, stop, load, floors, for TPU, GPU and CPU.

    import serving
    options = serving.Options(model="/models/tiny_gemma4", name="tiny")
    with serving.running(options, "serve") as url:
        results = serving.sweep("serve", options, serving.Load(seconds=1, repeats=1), "bench")
    print(url, len(results), serving.floors(results[0], options))

It needs no other part of this repository but `tables/`. By hand: `python -m serving start|status|stop
FOLDER`, where FOLDER has the options.json that notebook 05 left.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names for those who read and do not run
    from serving.limits import floors  # noqa: F401
    from serving.load import Load, confirm, sweep  # noqa: F401
    from serving.options import Options  # noqa: F401
    from serving.server import running, start, stop  # noqa: F401

PLACES = {"Load": "load", "Options": "options", "confirm": "load", "floors": "limits", "running": "server",
          "start": "server", "stop": "server", "sweep": "load"}
__all__ = list(PLACES)


def __getattr__(name):
    """The face, imported when it is asked for: vLLM's own environment has no pandas."""
    if name not in PLACES:
        raise AttributeError(f"module 'serving' has no attribute {name!r}")
    return getattr(importlib.import_module(f"serving.{PLACES[name]}"), name)
