"""Your own requests: a file of prompts, what a prefix cache can keep of them, what that gained."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from serving import asking
from serving.records import ServerRecord
from serving.results import Measurement, two_digits
from tables import texts


def tokens_of(record: ServerRecord, text: str) -> list[int]:
    """The ids that the server makes of a prompt."""
    question = {"model": record.name, "prompt": text}
    answer = asking.post(record, "/tokenize", question)
    return answer["tokens"]


def write(
        path: str | Path,
        record: ServerRecord,
        prompts: Sequence[Sequence[int]],
        decode: Callable[[Sequence[int]], str]) -> None:
    """Write prompts into a file for `--dataset-name custom`, a JSON object a line.

    Args:
      prompts: the ids of each.
      decode: of the tokenizer. A server may add the first token, <bos>, to a text on its own; then
        the file leaves it out.
    """
    lines = []
    for ids in prompts:
        text = decode(ids)
        if tokens_of(record, text) != list(ids):
            text = decode(ids[1:])
        line = json.dumps({"prompt": text})
        lines.append(f"{line}\n")
    Path(path).write_text("".join(lines), encoding="utf-8")


def read(path: str | Path, record: ServerRecord) -> list[list[int]]:
    """The ids that the server makes of each prompt of a file (`load.check_prompts`), in order."""
    content = Path(path).read_bytes()
    prompts = []
    for line in texts.json_lines(content):
        ids = tokens_of(record, line.value["prompt"])
        prompts.append(ids)
    return prompts


def reusable(prompts: Sequence[Sequence[int]], block: int) -> list[int]:
    """How many tokens of each prompt a prefix cache still has from the prompts before it.

    It keeps whole blocks, and the last token of a prompt is always computed, because somebody has
    to say what follows it.

    Args:
      prompts: ids, in the order in which they're sent.
      block: tokens of a block.
    """
    seen: set[tuple[int, ...]] = set()  # beginnings of prompts, in whole blocks
    hits = []
    for ids in prompts:
        hit = 0
        for end in range(block, len(ids), block):
            beginning = tuple(ids[:end])
            if beginning in seen:
                hit = end
        for end in range(block, len(ids) + 1, block):
            beginning = tuple(ids[:end])
            seen.add(beginning)
        hits.append(hit)
    return hits


def compare(off: Sequence[Measurement], on: Sequence[Measurement],
            hits: Sequence[int]) -> pd.DataFrame:
    """The waits of the same requests without a prefix cache and with one, in milliseconds.

    There's a difference only if the median of *every* run with the cache lies outside of all that
    was measured without it, and on the same side. Anything else is within the spread.

    Args:
      off, on: runs of the same file, with the cache off and on.
      hits: of `reusable`: the tokens of each request that come from the cache.

    Returns:
      a row for each kind of wait: what it is, off and on as "median (smallest to largest)", and
      what follows: "shorter", "longer" or "within the spread".
    """
    is_hit = np.array(hits) > 0
    is_miss = ~is_hit
    rows = []
    if is_hit.any():
        name = f"TTFT of the {is_hit.sum()} that find their beginning"
        rows.append(_row(name, _ttfts(off, is_hit), _ttfts(on, is_hit)))
    if is_miss.any():
        name = f"TTFT of the other {is_miss.sum()}"
        rows.append(_row(name, _ttfts(off, is_miss), _ttfts(on, is_miss)))
    tpots_off = [_tpot(run) for run in off]
    tpots_on = [_tpot(run) for run in on]
    rows.append(_row("TPOT of all", tpots_off, tpots_on))
    return pd.DataFrame(rows)


def _row(name: str, off: Sequence[np.ndarray], on: Sequence[np.ndarray]) -> dict[str, str]:
    """A row of `compare`, of the milliseconds of each run."""
    return {
        "milliseconds": name,
        "cache off": _in_words(np.concatenate(off)),
        "cache on": _in_words(np.concatenate(on)),
        "with the cache": _verdict(off, on),
    }


def _ttfts(runs: Sequence[Measurement], chosen: np.ndarray) -> list[np.ndarray]:
    """By run, the milliseconds to the first token of the chosen requests, in the file's order.

    Args:
      chosen: a bool for each request.
    """
    waits = []
    for run in runs:
        milliseconds = 1e3 * np.array(run.ttfts)
        waits.append(milliseconds[chosen & _is_answered(run)])
    return waits


def _tpot(measurement: Measurement) -> np.ndarray:
    """The milliseconds for each further token of each request, in the order of the file."""
    first = np.array(measurement.ttfts)
    decoding = np.array(measurement.latencies) - first
    gaps = np.array(measurement.output_lens) - 1
    milliseconds = 1e3 * decoding / np.maximum(gaps, 1)
    return milliseconds[_is_answered(measurement)]


def _is_answered(measurement: Measurement) -> np.ndarray:
    """Of each request, whether it was answered: to one that failed, vLLM gives a wait of 0."""
    return np.array([not error for error in measurement.errors])


def _in_words(values: np.ndarray) -> str:
    """The median, and the range in brackets, with two digits."""
    middle = two_digits(np.median(values))
    low = two_digits(values.min())
    high = two_digits(values.max())
    return f"{middle} ({low} to {high})"


def _verdict(off: Sequence[np.ndarray], on: Sequence[np.ndarray]) -> str:
    """Whether the medians of all runs with the cache lie outside of what was seen without it."""
    seen = np.concatenate(off)
    medians = [np.median(run) for run in on]
    if max(medians) < seen.min():
        return "shorter"
    if min(medians) > seen.max():
        return "longer"
    return "within the spread"
