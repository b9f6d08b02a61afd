"""A vLLM server: options, start, stop, load, floors, for TPU, GPU and CPU.

    import serving
    options = serving.Options(model="/models/tiny_gemma4", name="tiny")
    with serving.running(options, "serve") as url, serving.Client("serve") as client:
        results = serving.sweep(client, options, serving.Load(seconds=1, repeats=1), "bench")
    print(url, len(results), serving.floors(results[0], options))

It needs no other part of this repository but `tables/`. By hand: `python -m serving start|status|stop
FOLDER`, where FOLDER has the options.json that notebook 05 left.
"""

from serving.limits import floors
from serving.load import Client, Load, sweep
from serving.options import Options
from serving.server import running, start, stop

__all__ = ["Client", "Load", "Options", "floors", "running", "start", "stop", "sweep"]
