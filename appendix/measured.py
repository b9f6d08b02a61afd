"""The steps that 08 predicts, timed on an accelerator that is at hand: at a depth that fits on it.

    python -m appendix.measured --layers 12 --out data/measured/h100.csv
"""

import argparse
import statistics
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pandas as pd

from appendix import steps
from helpers import gemma
from helpers.run import write_text

RECIPES = [steps.PUBLISHED, *steps.ROAD[1:3], steps.DENSE, steps.ONE_ROW, steps.OURS]


def arguments(lowered):
    """Arrays for every argument: weights of the size of trained ones, token 1 everywhere, nothing masked."""
    def fill(info):
        if jnp.issubdtype(info.dtype, jnp.floating):
            return jax.random.normal(jax.random.key(0), info.shape, info.dtype) * 0.02
        return jnp.ones(info.shape, info.dtype)
    return jax.tree.map(fill, lowered.args_info)


def seconds_of(recipe, config, repeats=10):
    """Seconds of one micro-step of a `steps.Recipe` on the first device, by the host's clock.

    Returns:
      The times of `repeats` calls, after two that are not counted. What a call donates is copied
      before its clock starts.
    """
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    lower = steps.lower_published if recipe.trainer == "tunix" else steps.lower_ours
    lowered = lower(recipe, mesh, config)
    donated = jax.tree.map(lambda info: info.donated, lowered.args_info)
    positional, named = arguments(lowered)
    step, times = lowered.compile(), []
    for _ in range(repeats + 2):
        args, kwargs = jax.tree.map(lambda gone, array: jnp.copy(array) if gone else array,
                                    donated, (positional, named))
        jax.block_until_ready((args, kwargs))
        start = time.perf_counter()
        jax.block_until_ready(step(*args, **kwargs))
        times.append(time.perf_counter() - start)
    return times[2:]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--out", required=True)
    given, rows = parser.parse_args(), []
    for recipe in RECIPES:
        recipe = replace(recipe, layers=given.layers)
        try:
            times = seconds_of(recipe, steps.model_config(recipe))
        except jax.errors.JaxRuntimeError as error:  # one that does not fit is a row, too
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            times = [float("nan")]
        median, tokens = statistics.median(times), steps.real_tokens(recipe)
        rows.append({"recipe": recipe.recipe, "layers": recipe.layers, "device": jax.devices()[0].device_kind,
                     "seconds": median, "shortest": min(times), "longest": max(times),
                     "real_tokens": tokens, "tokens_per_second": tokens / median, "jax": jax.__version__})
        print(rows[-1], flush=True)
        write_text(given.out, pd.DataFrame(rows).to_csv(index=False))
        jax.clear_caches()


if __name__ == "__main__":
    main()
