"""Will it fit, how fast, what does it cost: a renter's questions, from compiled rows or estimates.

`will_it_fit` answers with a row of data/dryrun/ where notebook 08 has compiled exactly that, and
else adds up the parts of a chip's memory. `run_cost` turns a speed into hours and dollars, with all
that a run does beside its steps. Standard library only: 01 and the site's cost page use it, too.
Letters: D width, N query heads, K key and value heads, H head size, F width of an MLP.
"""

import functools
import math
from dataclasses import dataclass, field
from pathlib import Path

from tables import architecture, hardware, stored
from tables.errors import UserError
from tables.hardware import chip, slice_name
from tpu_time import bands

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
RANK = 64              # of the adapters, as in 03
BLOCK = 1024           # queries that attention takes at a time, as in 03
FILL = 0.95            # share of packed positions that are real tokens; 02 projects 0.98
SPARE = 0.10           # an estimate must leave this share of the HBM free; it may be that wrong
BASE_BYTES = {"bfloat16": 2.0, "int8": 1.0, "nf4": 0.5}  # of a weight
TILE = 32              # weights that share a bfloat16 scale (nf4); int8 has one a channel
REMATS = ("NONE", "BLOCK", "DECODER")  # from the fastest to the smallest
# Tokens of a row, the better first.
LENGTHS = {"31b": (4096, 2048), "e2b": (2048, 1024), "e4b": (2048, 1024)}
# The renter's table: (kind, chips) of every slice.
SLICES: dict[str, tuple[str, int]] = {}
ONE_CHIP: dict[str, tuple[str, int]] = {}
for _name, _piece in hardware.SLICES.items():
    (SLICES if _piece.chips > 1 else ONE_CHIP)[_name] = (_piece.kind, _piece.chips)
SMALL = ("e2b", "e4b")  # models that one chip may hold

# What a run does beside its steps, and where the numbers come from. Nothing here was timed by us.
# Published: Google's repositories on the hub. E4B: its matrices here and 0.45 B of its towers.
CHECKPOINT_GB = {"31b": 62.5, "e2b": 10.2, "e4b": 16.0}
# Of the hub, the disk, a checkpoint of many arrays: assumed. Another author's 62.58 GB took 311 s
# from the hub, 337 s from a bucket in the region, and 1,093 s into it in one stream, as our copy
# goes (github.com/xbill9/gemma4-dev, gce-vllm-v6e8-31b: tpu.env and the report of 2026-08-25).
GB_PER_S = 0.2
UP_GB_PER_S = 0.057
# Three programs of five minutes: two that answer, one that validates. The step compiles while the
# base is loaded. Published: 3 to 8 minutes for one.
COMPILE_MINUTES = 15
EVERY = 100            # optimizer steps between two validations, as in 03
HELD_OUT = 64          # rows of a validation, as in 03
STEP_ROWS = stored.ROWS_PER_STEP                    # of an optimizer step, as in 03
SAVE_EVERY = {"31b": 100, "e2b": 300, "e4b": 300}   # optimizer steps, as in 03
# Tokens that 03 takes before and as often after training, one at a time: 512 answered, and up to
# 256 by which one of its prompts may be longer than another.
ANSWER_TOKENS = 2 * (512 + 256)
# What a token takes, in times of reading the chip's weights once: assumed. Six layers of the 31B,
# compiled for a v5p-8 on mesh (1, 4), say 15 ms for sixty, 2.7 times.
ANSWER_OVER_FLOOR = 3.0
# FLOPs of a step for a weight and a token: 2 forward, 2 backward, 2 more if it recomputes.
STEP_FLOPS = {"NONE": 4, "BLOCK": 6, "DECODER": 6}


WHERE_FROM = {
    "download the base": f"assumed: {GB_PER_S} GB/s", "load it onto the chips": "the same",
    "compile": "three programs, the step's beside loading; published: 3 to 8 minutes for one",
    "optimizer steps": "predicted from the compiled program (08)",
    "validate": "a forward pass: a half of a step's work, a third if it recomputes",
    "save": f"assumed: {GB_PER_S} GB/s, nothing overlaps",
    "answer before and after": f"{ANSWER_TOKENS:,} tokens, each {ANSWER_OVER_FLOOR:g} times what "
                               "reading the weights takes: assumed"}


@dataclass(frozen=True)
class Fit:
    """How one training step sits on one slice.

    Attributes:
      slice, model, base_dtype, remat, rows, row_length: what was asked (rows: computed at once).
      chips: of the slice.
      parts: {what: GiB of one chip}; their sum is `total`.
      limit: GiB of a chip that XLA can use.
      compiled: the numbers are the TPU compiler's; else an estimate.
      speed: real tokens per second as predicted from the compiled program (08), or None.
      bound: real tokens per second that cannot be exceeded: the arithmetic, of the compiled program
        if there is one, at the chips' peak. A quantised base that is not compiled gets no better
        one than bfloat16's on the same slice, since storage saves no time.
    """

    slice: str
    model: str
    base_dtype: str
    remat: str
    rows: int
    row_length: int
    chips: int
    parts: dict = field(hash=False)
    limit: float
    compiled: bool
    speed: float | None
    bound: float

    @property
    def total(self) -> float:
        """GiB that a chip needs."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Does it? An estimate has to leave `SPARE` of the chip free."""
        usable = 1.0 if self.compiled else 1 - SPARE
        return self.total <= self.limit * usable

    @property
    def pace(self) -> str:
        """Real tokens per second as text: predicted, or what the arithmetic allows at most (≤)."""
        return f"≤ {self.bound:,.0f}" if self.speed is None else f"{self.speed:,.0f}"

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        how = "compiled" if self.compiled else "estimated"
        rows = "row" if self.rows == 1 else "rows"
        return (f"{self.model}, {self.base_dtype} base, on a {self.slice}: {verdict} with "
                f"remat={self.remat} and {self.rows} {rows} of {self.row_length:,} tokens at once, "
                f"{self.total:.1f} of {self.limit:.1f} GiB per chip ({how})")


@functools.cache
def _config(model: str) -> dict:
    path = ROOT / "data" / "configs" / f"gemma4_{model}.json"
    if model not in LENGTHS:
        raise UserError(f"model={model}: there are {', '.join(LENGTHS)}.")
    return architecture.read_config(path)


def mesh_of(model: str, chips: int) -> tuple[int, int]:
    """(fsdp, tp) that 03 lays out: the largest tp that the model's heads allow."""
    return architecture.choose_mesh(_config(model), chips)


def _stored(name: str, model: str) -> list[dict]:
    """Rows of notebook 03's step as it is today, on the mesh that the heads allow with most tp."""
    rows = []
    for row in stored.compiled_rows(name, model):
        as_03_runs_it = not row["mesh"] and row["attention_block"] != "0"
        if as_03_runs_it and row["args_gib"]:
            rows.append(row)
    return rows


def held(model: str, fsdp: int, tp: int, base_dtype: str = "bfloat16") -> tuple[float, float]:
    """GiB of one chip that a step is handed: the base; adapters with Adam's two moments, float32.

    A matrix is cut over both axes. Its adapters meet one side of it each, so each of them is cut
    over one axis and repeated along the other. A quantised base keeps its embeddings in bfloat16.
    """
    config = _config(model)
    adapters = 0.0
    quantised = 0
    for module in architecture.modules(config):
        a, b = module.adapter(RANK)
        turned = module.kind in ("attn_vec_einsum", "down_proj")
        first, last = (tp, fsdp) if turned else (fsdp, tp)
        adapters += math.prod(a) / first + math.prod(b) / last
        quantised += module.size
    weights = 2.0 * (architecture.parameters(config)["total"] + _padding(config))
    if base_dtype != "bfloat16":
        scales = 2.0 / TILE if base_dtype == "nf4" else 0.0
        weights += quantised * (BASE_BYTES[base_dtype] - 2.0 + scales)
    return weights / (fsdp * tp) / GIB, 12 * adapters / GIB


def _padding(config: dict) -> int:
    """Numbers that a chip stores to fill up the per-layer table of E2B and E4B, token by token.

    A token's numbers are [layers, 256] there, and a TPU stores rows in eights.
    """
    text = architecture.text_config(config)
    missing = -int(text["num_hidden_layers"]) % 8
    return text["vocab_size"] * missing * (text.get("hidden_size_per_layer_input") or 0)


def _layer_bytes(layer: architecture.Layer, length: int, tp: int) -> tuple[float, float]:
    """Bytes of one token that the backward pass reads again: (the residual stream, all else).

    Counted from the model's code: eight arrays of the stream; queries three times (projected,
    normalised, rotated), keys three times, values twice; per pair of query and key a score and a
    weight; gate, up and their product. All in bfloat16, cut over tp.
    """
    D, N, K, H, F = layer.width, layer.heads, layer.kv_heads, layer.head_dim, layer.mlp
    ends = list(range(BLOCK, length + 1, BLOCK)) if length > BLOCK else [length]
    keys = 0
    for end in ends:
        keys += end if layer.window is None else min(end, layer.window + BLOCK)
    rest = 2 * (3 * N * H + 5 * K * H + 3 * F) + SCORES * N * keys / len(ends)
    return 8 * 2 * D / tp, rest / tp


SCORES = 2.6  # bytes of a pair: two bfloat16 numbers, of which the compiler drops some again


def _kept_activations(layers: list[architecture.Layer], remat: str, length: int,
                      tp: int) -> float:
    """Bytes of one token that stay in memory between the forward and the backward pass."""
    kept = inside = 0.0
    for layer in layers:
        stream, rest = _layer_bytes(layer, length, tp)
        if remat == "NONE":
            kept += stream + rest
        else:
            kept += stream / 2 if remat == "BLOCK" else stream / 8
        inside = max(inside, stream + rest)
    return kept if remat == "NONE" else kept + inside  # and the layer that is computed again


def estimate(model: str, fsdp: int, tp: int, base_dtype: str, remat: str, rows: int,
             row_length: int) -> dict[str, float]:
    """{what: GiB of one chip} of a training step, added up from the model's shapes.

    Within a tenth of the compiler's sum, but for one stored row: int8 on a v6e-8 with BLOCK needs
    13.6 GiB by this and 21.6 compiled. Where a chip has room the compiler's schedule works on
    several layers of the backward pass at once and keeps the MLPs' activations of them all.
    """
    config = _config(model)
    base, adapters = held(model, fsdp, tp, base_dtype)
    tokens = rows / fsdp * row_length
    kept = _kept_activations(architecture.layers(config), remat, row_length, tp)
    vocabulary = architecture.text_config(config)["vocab_size"]
    return {"base weights": base, "adapters and Adam": adapters,
            # Of the adapters, in float32, and a copy in bfloat16; beside a sum where there are
            # several.
            "gradients": adapters / 2 + (adapters / 3 if rows < STEP_ROWS[model] else 0.0),
            "activations": tokens * kept / GIB,
            "logits": tokens / 2 * vocabulary / tp * 8 / GIB,
            "gathered weights": _gathered(config, base_dtype) * (fsdp - 1) / (fsdp * tp) / GIB}


def _gathered(config: dict, base_dtype: str) -> float:
    """Bytes of all matrices' bfloat16 copies that the compiler keeps from the forward pass on.

    As far as rows are compiled: all that came from the other chips, of a quantised base half of it.
    The output matrix is never gathered.
    """
    kept = 1.0 if base_dtype == "bfloat16" else 0.5
    return kept * 2.0 * sum(module.size for module in architecture.modules(config))


def will_it_fit(kind: str, chips: int, model: str = "31b", base_dtype: str = "bfloat16",
                remat: str = "NONE", rows: int | None = None,
                row_length: int | None = None) -> Fit:
    """Whether notebook 03's step fits a slice, and how fast it is as far as that is predicted.

    Args:
      kind: v5p, v5e or v6e.
      chips: of the slice (a v5p-8 has four).
      model: 31b, e2b or e4b.
      base_dtype: of the frozen base: bfloat16, int8 or nf4 (11).
      remat: what the backward pass computes again: NONE, BLOCK or DECODER.
      rows: computed at once, over all chips; None: two on a v5p-8, else one for each part of fsdp.
      row_length: tokens of a row; None: 4,096 for the 31B, else 2,048.

    Returns:
      A `Fit`: compiled where data/dryrun/ has such a row (of several the fastest), else estimated.

    Raises:
      UserError: an unknown word, or a mesh or rows that cannot be.
    """
    if base_dtype not in BASE_BYTES or remat not in REMATS:
        raise UserError(f"base_dtype={base_dtype}, remat={remat}: there are "
                        f"{', '.join(BASE_BYTES)} and {', '.join(REMATS)}.")
    name = slice_name(kind, chips)
    fsdp, tp = mesh_of(model, chips)
    row_length = row_length or LENGTHS[model][0]
    rows = rows or (fsdp * 2 if kind == "v5p" else fsdp)
    if rows % fsdp:
        raise UserError(f"rows={rows}: a ({fsdp}, {tp}) mesh computes a multiple of {fsdp}.")
    wanted = (base_dtype, remat, rows, row_length)
    same = []
    for row in _stored(name, model):
        if _shape(row) == wanted:
            same.append(_compiled(name, model, kind, chips, row))
    if same:
        return max(same, key=lambda fit: fit.speed or 0)
    limit = chip(kind).hbm / GIB
    parts = estimate(model, fsdp, tp, base_dtype, remat, rows, row_length)
    bound = _bound(kind, chips, model, base_dtype, remat)
    return Fit(name, model, *wanted, chips, parts, limit, False, None, bound)


def _bound(kind: str, chips: int, model: str, base_dtype: str, remat: str) -> float:
    """Real tokens per second that an estimated step can't exceed; see `Fit.bound`."""
    work = STEP_FLOPS[remat] * architecture.parameters(_config(model))["matmul"] / FILL
    bound = chips * chip(kind).flops / work
    if base_dtype == "bfloat16":
        return bound
    whole = best_fit(kind, chips, model)  # storage saves no time
    recomputes_less = remat == "NONE" and whole.remat != "NONE"
    if whole.fits and not recomputes_less:
        bound = min(bound, whole.speed or whole.bound)
    return bound


def _shape(row: dict) -> tuple[str, str, int, int]:
    """(base dtype, remat, rows, row length) of a stored row."""
    return (row["base_dtype"], row["remat"], int(row["micro_batch"]), int(row["sequence_length"]))


def _compiled(name: str, model: str, kind: str, chips: int, row: dict) -> Fit:
    """The `Fit` of a stored row."""
    base, adapters = held(model, *mesh_of(model, chips), _shape(row)[0])
    base = float(row["args_gib"]) - adapters
    parts = {"base weights": base, "adapters and Adam": adapters,
             "temporaries": float(row["hbm_gib"]) - base - adapters}
    speed = row["tokens_per_second_predicted"]
    tokens, flops = float(row["real_tokens_per_step"]), float(row["flops_per_chip"])
    return Fit(name, model, *_shape(row), chips, parts, chip(kind).hbm / GIB, True,
               float(speed) if speed else None, tokens / (flops / chip(kind).flops))


def best_fit(kind: str, chips: int, model: str = "31b", base_dtype: str = "bfloat16") -> Fit:
    """The `Fit` that 03 would train with: of the compiled ones, else of the estimated ones, the one
    that recomputes least with the longest rows. If none fits, the smallest.

    Of compiled ones that recompute the same, one comes first that is a whole optimizer step; then
    the fastest.
    """
    name = slice_name(kind, chips)
    fitting = []
    for row in _stored(name, model):
        if _shape(row)[0] == base_dtype:
            fit = _compiled(name, model, kind, chips, row)
            if fit.total <= (1 - SPARE) * fit.limit:
                fitting.append(fit)
    if fitting:
        return min(fitting, key=_order)
    for length in LENGTHS[model]:
        for remat in REMATS:
            fit = will_it_fit(kind, chips, model, base_dtype, remat, row_length=length)
            if fit.fits:
                return fit
    return fit


def _order(fit: Fit) -> tuple[int, bool, float]:
    """What `best_fit` sorts compiled steps by, the best first."""
    return REMATS.index(fit.remat), fit.rows < STEP_ROWS[fit.model], -(fit.speed or 0)


def step_tokens(fit: Fit) -> float:
    """Real tokens of an optimizer step: `STEP_ROWS`, in one micro-step or several."""
    return max(fit.rows, STEP_ROWS[fit.model]) * fit.row_length * FILL


def run_cost(fit: Fit, tokens: float, dollars_per_hour: float,
             speed: float | None = None) -> dict:
    """What a whole training run takes, as 03 would do it.

    Args:
      fit: a `Fit`.
      tokens: real tokens to train on.
      dollars_per_hour: of the whole slice.
      speed: real tokens per second; None: the predicted one, or the bound where there is none.

    Returns:
      {"minutes": {part: minutes}, "hours", "dollars", "at_least": no time is predicted, the bound
      stands in for it, "hours_text", "dollars_text": the range that `bands` gives to what is
      predicted, or "≥" and the bound}.
    """
    at_least = speed is None and fit.speed is None
    speed = speed or fit.speed or fit.bound
    size, saved = CHECKPOINT_GB[fit.model], 12 * adapter_parameters(fit.model) / 1e9
    steps = int(tokens / step_tokens(fit))
    validations = steps // EVERY + 2  # the first and the last step's, too
    saves = steps // SAVE_EVERY[fit.model] + 1
    work = validations * HELD_OUT * fit.row_length * FILL * 2 / STEP_FLOPS[fit.remat]
    minutes = {
        "download the base": size / GB_PER_S / 60, "load it onto the chips": size / GB_PER_S / 60,
        "compile": float(COMPILE_MINUTES), "optimizer steps": tokens / speed / 60,
        "validate": work / speed / 60, "save": saves * saved / GB_PER_S / 60,
        "answer before and after": answer_minutes(fit)}
    hours = sum(minutes.values()) / 60
    predicted = (minutes["optimizer steps"] + minutes["validate"]) / 60
    ends = [hours]
    if not at_least:
        low, high = bands.band(predicted)
        ends = [hours - predicted + low, hours - predicted + high]
    sign = "≥ " if at_least else ""
    hours_text = " to ".join(f"{end:.2f}" for end in ends)
    dollars_text = " to ".join(f"{end * dollars_per_hour:.1f}" for end in ends)
    return {"minutes": minutes, "hours": hours, "dollars": hours * dollars_per_hour,
            "at_least": at_least, "hours_text": sign + hours_text,
            "dollars_text": sign + dollars_text}


def answer_minutes(fit: Fit) -> float:
    """Minutes that 03's answers take before and after training, on whatever mesh it trains.

    Each chip multiplies its own part of every weight, so a token takes no less than reading that.
    """
    kind = chip(fit.slice.split("-")[0])
    weights = held(fit.model, 1, fit.chips, fit.base_dtype)[0] * GIB
    return ANSWER_TOKENS * ANSWER_OVER_FLOOR * weights / kind.bandwidth / 60


@functools.cache
def adapter_parameters(model: str) -> int:
    """Numbers in all adapters of 03."""
    total = 0
    for module in architecture.modules(_config(model)):
        a, b = module.adapter(RANK)
        total += math.prod(a) + math.prod(b)
    return total


def price(kind: str, chips: int) -> float:
    """Dollars per hour of a slice, on demand (tables/hardware.py says from where).

    Not a number (nan) where nobody rents that kind of chip by the hour.
    """
    rate = chip(kind).dollars_per_hour
    return math.nan if rate is None else chips * rate


def renters_rows(models: tuple[str, ...] = ("31b",),
                 slices: dict[str, tuple[str, int]] | None = None) -> list[tuple[Fit, float]]:
    """The renter's table: for every slice and base dtype the best `Fit` and the slice's price."""
    rows = []
    for model in models:
        for kind, chips in (slices or SLICES).values():
            for dtype in BASE_BYTES:
                rows.append((best_fit(kind, chips, model, dtype), price(kind, chips)))
    return rows
