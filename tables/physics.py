"""What a Gemma 4 must compute and move at the least, counted from its config.json.

A latency below these floors was not measured on the work that its label names. Everything is in SI
units (seconds, bytes, FLOP). Floors are for perfect hardware at 100% of peak, so a real server
stays well above them.
"""

import math
import statistics
from collections.abc import Callable, Iterable

from tables.architecture import Layer, layers, parameters, text_config


def _flops(config: dict, tokens: int, pairs: Callable[[Layer], int], logits: int) -> int:
    """FLOP of a pass; a multiply-add counts as two.

    Args:
      tokens: that go through the layers.
      pairs: layer -> (query, key) pairs of its attention.
      logits: tokens for which the whole vocabulary is scored.
    """
    count = parameters(config)
    multiplications = count["matmul"] * tokens
    multiplications += count["embedding"] * logits
    for layer in layers(config):
        width = layer.heads * layer.head_dim
        scores_and_values = 2 * width
        multiplications += scores_and_values * pairs(layer)
    return 2 * multiplications


def prefill_flops(config: dict, tokens: int) -> int:
    """FLOP to read one prompt. A multiply-add counts as two.

    Every layer computes for every token, attention is causal and stays within each layer's window,
    and only the last token gets logits.
    """
    def pairs(layer: Layer) -> int:
        return layer.pairs(tokens)

    return _flops(config, tokens, pairs, logits=1)


def decode_flops(config: dict, batch: int, context: int) -> int:
    """FLOP of one decode step of `batch` sequences that have `context` tokens each."""
    def pairs(layer: Layer) -> int:
        return batch * layer.keys(context)

    return _flops(config, batch, pairs, logits=batch)


def kv_bytes_per_token(config: dict, dtype_bytes: int = 2, tp: int = 1) -> dict[str, int]:
    """Bytes of keys and values per cached token, by kind of layer: all layers of a kind together.

    Args:
      dtype_bytes: 2 for bfloat16, 1 for fp8.
      tp: tensor-parallel chips. Where they outnumber a layer's KV heads, the heads are replicated.
    """
    total = {"sliding": 0, "full": 0}
    for layer in layers(config):
        if layer.owns_kv:
            heads = max(layer.kv_heads, tp)
            total[layer.kind] += 2 * heads * layer.head_dim * dtype_bytes
    return total


def kv_bytes(config: dict, context: int, dtype_bytes: int = 2, tp: int = 1) -> int:
    """Bytes of one sequence's cache: sliding layers hold a window, full layers everything."""
    per_token = kv_bytes_per_token(config, dtype_bytes, tp)
    window = text_config(config)["sliding_window"]
    sliding = per_token["sliding"] * min(context, window)
    full = per_token["full"] * context
    return sliding + full


def decode_bytes(
    config: dict,
    batch: int,
    context: int,
    dtype_bytes: int = 2,
    kv_dtype_bytes: int | None = None,
    tp: int = 1,
) -> int:
    """Bytes that one decode step reads: the weights once, and every sequence's cache.

    Args:
      batch, context: sequences decoding at once, and tokens each of them has.
      dtype_bytes, kv_dtype_bytes: of a weight, and of a cached number (None: the same).
      tp: as in `kv_bytes_per_token`.
    """
    count = parameters(config)
    # A per-layer table is looked up, not read; nobody reads the K and V of layers that share.
    read = count["total"] - count["per_layer_table"] - count["unused"]
    cache = kv_bytes(config, context, kv_dtype_bytes or dtype_bytes, tp)
    return read * dtype_bytes + batch * cache


def tpot_floor(
    bytes_moved: float,
    bandwidth: float,
    flops: float = 0.0,
    peak: float = math.inf,
) -> float:
    """Least seconds of one decode step, at 100% of `bandwidth` bytes/s and `peak` FLOP/s."""
    return max(bytes_moved / bandwidth, flops / peak)


def fcfs_ttft(arrivals: Iterable[float], service: float) -> list[float]:
    """Seconds from arrival to first token of each request, one served after the other.

    Args:
      arrivals: arrival times in seconds, ascending.
      service: seconds of work per request.
    """
    waits = []
    free = -math.inf
    for arrival in arrivals:
        free = max(free, arrival) + service
        waits.append(free - arrival)
    return waits


def median_ttft_floor_fcfs(n: int, rate: float, service: float) -> float:
    """Median seconds to the first token where requests are served first come, first served.

    Args:
      n: requests, evenly spaced.
      rate: of them a second; inf: all arrive at once.
      service: seconds that each needs the whole machine.
    """
    gap = 0.0
    if not math.isinf(rate):
        gap = 1.0 / rate
    arrivals = [index * gap for index in range(n)]
    waits = fcfs_ttft(arrivals, service)
    return statistics.median(waits)
