"""Notebook 10's tables, the arithmetic that it repeats, and its two figures.

Everything in data/published/ was published by others, or read off what they published
(data/published/README.md has the sources); nothing here was measured by us.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from helpers import style
from tables import physics
from tables.hardware import chip

FOLDER = Path("data/published")
PROMPTS = 30  # requests per point of the sweep (S8.1)
DISPUTED = (99, 118, 134, 135, 153)  # problems of verilog-eval whose tests a pull request changes
PEAK = {"tpu": 8 * chip("v6e").flops, "gpu": 2 * chip("h100").flops}  # of the serving machines
SIDES = {"tpu": ("TPU v6e-8", style.BLUE, "o"), "gpu": ("2 x H100", style.ORANGE, "s")}
RATES = [1, 2, 4, 8, 16, 32, 64]  # requests per second of the sweep


def table(name: str) -> pd.DataFrame:
    """One published table."""
    return pd.read_csv(FOLDER / f"{name}.csv")


def claimed_ratios(results: pd.DataFrame) -> pd.DataFrame:
    """The rows of `inference_results` that claim a ratio, which `recomputed` says in its form."""
    is_ratio = results.claimed_ratio.str.match(r"^\+?[\d.]+[x%]$", na=False)
    rows = results[is_ratio & ~results.metric.eq("kv_cache_dtype")].copy()
    recomputed = []
    for row in rows.itertuples():
        recomputed.append(_ratio(float(row.tpu), float(row.gpu), row.claimed_ratio))
    rows["recomputed"] = recomputed
    return rows


def _ratio(tpu: float, gpu: float, like: str) -> str:
    """The larger number divided by the smaller one, rounded and written like a claim."""
    ratio = max(tpu, gpu) / min(tpu, gpu)
    if like.endswith("%"):
        return f"+{100 * (ratio - 1):.0f}%"
    digits = len(like.rstrip("x").partition(".")[2])
    return f"{ratio:.{digits}f}x"


def floor_ms(config: dict, side: str, tokens: int) -> float:
    """Least milliseconds to read a prompt on one of the two serving machines, "tpu" or "gpu"."""
    return 1e3 * physics.prefill_flops(config, tokens) / PEAK[side]


def pool_tokens(config: dict, side: str, dtype_bytes: int) -> float:
    """Tokens whose keys and values fit beside the weights if every layer keeps every token.

    The memory is what the log says was in use, without the weights.
    """
    hardware = table("hardware_inference").set_index("spec")[side]
    chips = int(hardware["accelerator_count"])
    used = float(hardware["hbm_used_per_chip"]) * 2**30 * chips
    weights = float(hardware["weights_bf16"]) * 1e9
    per_token = sum(physics.kv_bytes_per_token(config, dtype_bytes, chips).values())
    return (used - weights) / per_token


def fits_in_cache(config: dict, tokens: int, side: str, fp8_on_tpu: bool) -> bool:
    """Do all prompts and answers of one point of the sweep fit into a server's cache at once?"""
    answer = 256 if tokens == 512 else 512
    dtype_bytes = 1 if fp8_on_tpu and side == "tpu" else 2
    return PROMPTS * (tokens + answer) < pool_tokens(config, side, dtype_bytes)


def sampling_z(first: NDArray, second: NDArray, samples: int) -> float:
    """z of the difference in pass@1 against the noise of drawing `samples` per problem alone.

    Args:
      first, second: how many samples of each problem passed, of two models.
      samples: how many were drawn.
    """
    variance = 0.0
    for passed in (first, second):
        share = passed / samples
        variance += (share * (1 - share) / (samples - 1)).sum() / len(share) ** 2
    return float((second.mean() - first.mean()) / samples / math.sqrt(variance))


def is_sound(problems: pd.Series) -> NDArray[np.bool_]:
    """Which problems of verilog-eval aren't disputed, by their names."""
    numbers = problems.str.extract(r"Prob(\d+)_")[0].astype(int)
    return ~numbers.isin(DISPUTED).to_numpy()


# ── Figures ──


def draw_sweep(points: pd.DataFrame) -> None:
    """Six panels, one a prompt length: published medians, and their floors dashed.

    Args:
      points: of `limits.published_floors`, with the prompt's `tokens`.
    """
    fig, axes = style.figure(9, 6.0, rows=2, columns=3, sharex=True, sharey=True)
    falling = 0
    for ax, (tokens, group) in zip(axes.flat, points.groupby("tokens"), strict=True):
        for side, (label, color, marker) in SIDES.items():
            series = group[group.device == side].sort_values("qps")
            wrong = series[series.too_fast]
            ax.plot(series.qps, series.floor_ms, "--", color=color, linewidth=1.2)
            ax.plot(series.qps, series.value, marker + "-", color=color, linewidth=0.8, ms=5.5,
                    label=label)
            ax.plot(wrong.qps, wrong.value, marker, color=color, ms=5.5, markerfacecolor="white")
            first, second = series.value.iloc[:2]
            falling += second < first
        name = f"{tokens:,} tokens in" if tokens < 15_360 else "about 16k in, 7 prompts"
        ax.set_title(name, fontsize=10, fontweight="normal")
        _log_axes(ax, RATES)
        ax.set(yscale="log", ylim=(2, 20_000))
        ax.yaxis.set_major_formatter("{x:,.0f}")
    axes[0, 0].legend(fontsize=9, loc="upper left")
    axes[0, 0].set_ylabel("median TTFT, ms")
    axes[1, 0].set_ylabel("median TTFT, ms")
    axes[1, 1].set_xlabel("offered requests per second (dashed: the floor; open: too fast)")
    fig.suptitle(f"{falling} of {2 * axes.size} series fall at their second point: more load, less "
                 "waiting", fontsize=11, fontweight="bold", x=0.01, ha="left")
    style.finish(fig, "10_sweep", "digitized from the draft's PDF, p. 15; floors at 100% of peak")


def draw_headline(parts: Mapping[str, float], told: str) -> None:
    """The factors of a ratio as bars on a logarithmic axis; the first is the one to remember.

    Args:
      parts: {name: factor}.
      told: their product, as it was published: "23.6x".
    """
    fig, ax = style.figure(height=2.4)
    left = 1.0
    for row, (factor, color) in enumerate(
            zip(parts.values(), (style.BLUE, style.GRAY, style.GRAY), strict=True)):
        ax.barh(row, left * factor - left, left=left, color=color)
        left *= factor
        text = f"{factor:.1f} times"
        if row > 0:
            text += f", together {left:.1f}"
        ax.text(left * 1.05, row, text, va="center")
    first, *_ = parts.values()
    ax.set(yticks=range(3), yticklabels=list(parts), ylim=(2.6, -0.6),
           xlabel="median TTFT at 4,096 tokens, GPU / TPU (log scale)",
           title=f"Of {left:.1f} times (printed as {told}), {first:.1f} are left with both cold")
    _log_axes(ax, [1, 2, 5, 10, 20])
    ax.set_xlim(1, 150)
    ax.grid(axis="y", visible=False)
    style.finish(fig, "10_headline", "published table (S8.1) and digitized sweep")


def _log_axes(ax: Any, ticks: list[int]) -> None:
    """A logarithmic x axis with these ticks and no others."""
    ax.set(xscale="log", xticks=ticks)
    ax.set_xticklabels(ticks)
    ax.minorticks_off()
