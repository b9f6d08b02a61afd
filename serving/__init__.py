"""A vLLM server: options, start, stop, load, floors, for TPU, GPU and CPU.

    from serving import Options, limits, load, running
    options = Options(model="/models/tiny_gemma4", name="tiny")
    with running(options, "serve") as url, load.Client("serve") as client:
        results = load.sweep(client, options, load.Load(seconds=1, repeats=1), "bench")
    print(url, len(results), limits.floors(results[0], limits.machine_of(options)))

It needs no other part of this repository but `tables/`. By hand: `python -m serving
start|status|stop FOLDER`, where FOLDER has the options.json that notebook 05 left.
"""

from serving.options import Options
from serving.server import is_alive, running, start, stop

__all__ = ["Options", "is_alive", "running", "start", "stop"]
