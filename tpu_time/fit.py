"""Will it fit, how fast, what does it cost: a renter's questions, from compiled rows or estimates.

`will_it_fit` answers with a row of data/dryrun/ if notebook 08 has compiled exactly that step. If
not, it adds up the parts of a chip's memory. `run_cost` turns a speed into hours and dollars, and
counts all that a run does beside its steps. `renters_rows`, `what_fits` and `full_table` are the
tables that 01 and the site's cost page both show, so they stand here and not in a page. Standard
library only, because the site is built without NumPy.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tables import architecture, hardware, stored
from tables.architecture import Layer
from tables.errors import UserError
from tables.hardware import chip, slice_name
from tpu_time import bands

GIB = 2**30
RANK = 64              # of the adapters, as in 03
BLOCK = 1024           # queries that attention takes at a time, as in 03
FILL = 0.95            # share of packed positions that are real tokens; 02 projects 0.98
SPARE = 0.10           # an estimate must leave this share of the HBM free; it may be that wrong
# And this share if a step has several micro-batches. The loop over them cost 27% with an int8 base
# of the 31B on a v5e-4 (16.5 GiB instead of 13.0, compiled), and no estimate knows of it.
SPARE_IN_A_LOOP = 0.30
BASE_BYTES = {"bfloat16": 2.0, "int8": 1.0, "nf4": 0.5}  # of a weight
ADAPTER_BYTES = 12     # of a number of an adapter: itself and Adam's two moments, in float32
TILE = 32              # weights that share a bfloat16 scale (nf4); int8 has one a channel
SCORES = 2.6           # bytes of a query and key: two numbers, some of which the compiler drops
REMATS = ("NONE", "BLOCK", "DECODER")  # from the fastest to the smallest
PACKED_SHORTER = {("v5e-8", "31b"): 2048}  # tokens of 02's rows on a slice, if it isn't the better
# Tokens of a row, the better length first.
LENGTHS: dict[str, tuple[int, ...]] = {
    "31b": (4096, 2048),
    "e2b": (2048, 1024),
    "e4b": (2048, 1024),
}
# The renter's table: (kind, chips) of every slice, apart for those of a single chip.
SLICES: dict[str, tuple[str, int]] = {}
ONE_CHIP: dict[str, tuple[str, int]] = {}
for _name, _piece in hardware.SLICES.items():
    _table = SLICES if _piece.chips > 1 else ONE_CHIP
    _table[_name] = (_piece.kind, _piece.chips)
SMALL = ("e2b", "e4b")  # models that one chip may hold
# The upper end of a time also counts links that are slow: waiting for them takes so many times as
# long. Others' gathers over the eight chips of a v5e-8 took 2.3 times what our model said at first.
# It has their speed now, but 03's mesh gathers over groups of four of these chips and adds up over
# two, and nobody has timed that. On the four chips of a v5e-4 others have. We know of no timing on
# a v6e-8.
SLOW_LINKS = {"v5e-8": 2.3}
# GiB of a chip that the compiler's plan names although it makes no program, since the step doesn't
# fit: 03's step of the 31B with two rows of 2,048 tokens (LOG, 2026-11-26).
PLANNED = {("v5e-8", "31b", "bfloat16"): 17.3}
NOT_PREDICTED = "not predicted"

# What a run does beside its steps, and where the numbers come from. We have timed nothing here.
# Published: Google's repositories on the hub. E4B: its matrices here and 0.45 B of its towers.
CHECKPOINT_GB = {"31b": 62.5, "e2b": 10.2, "e4b": 16.0}
# The speed of the hub, of the disk, and of writing a checkpoint of many arrays: assumed. Another
# author's 62.58 GB took 311 s from the hub, 337 s from a bucket in the region, and 1,093 s into the
# bucket in one stream, which is how our copy goes (github.com/xbill9/gemma4-dev,
# gce-vllm-v6e8-31b: tpu.env and the report of 2026-08-25).
GB_PER_S = 0.2
UP_GB_PER_S = 0.057
# Three programs of five minutes each: two answer, one validates. The step compiles while the base
# is loaded. Published: 3 to 8 minutes for one program.
COMPILE_MINUTES = 15
EVERY = 100            # optimizer steps between two validations, as in 03
HELD_OUT = 64          # rows of a validation, as in 03
SAVE_EVERY = {"31b": 100, "e2b": 300, "e4b": 300}   # optimizer steps, as in 03
# Tokens that 03's model takes one at a time, before training and again after it: 512 that it
# answers, and up to 256 by which one of its prompts may be longer than another.
ANSWER_TOKENS = 2 * (512 + 256)
# How much longer a token takes than reading the chip's weights once: assumed. The whole programs,
# compiled for a v5p-8, predict 2.1 to 2.5 times (data/dryrun/beside_the_step.csv).
ANSWER_OVER_FLOOR = 3.0
# FLOPs of a step per weight and token: 2 forward, 2 backward, and 2 more if it recomputes.
STEP_FLOPS = {"NONE": 4, "BLOCK": 6, "DECODER": 6}


# GB/s at which a checkpoint is written if the disk is as slow as others report. On Kaggle theirs
# took 43 s and held 0.76 GB: adapters of rank 32 on q, o and down of 30 layers, Adam's two moments,
# and the adapters once more in bfloat16 (damsolanke/gemma4-swe-kit, 401aa98: examples/tpu).
SLOW_DISKS = {"v5e-8": 0.76 / 43}

# Nobody has timed what a run does beside its steps, so each of these parts has a range of its own:
# its minutes times the first number, to its minutes times the second.
ASSUMED = {
    # Others: 62.6 GB in 5.2 minutes from the hub and 5.6 from a bucket, and in 8 on Kaggle.
    "download the base": (1.0, 1.6),
    # Others read the 31B's files from a disk in 23 s; the rest is assumed. 2 to 10 minutes.
    "load it onto the chips": (0.4, 2.0),
    # Others: 1 to 3.3 minutes for one program, and 3 to 8. 3 to 24 minutes for all three.
    "compile": (0.2, 1.6),
    # Nothing if all of it happens beside the steps. On slow disks it's more (`assumed_of`).
    "save": (0.0, 1.5),
    # The whole programs predict 12 to 14 ms a token on a v5p-8, for which we count 17, 7 to 9 on a
    # v6e-8, for which we count 14, and 12 to 17 on a v5e-8 with an int8 base (we count 15).
    # (A v5p-32 is worse: 39 to 41 ms on mesh (16, 1), for which we count 4. That's a minute a run.)
    "answer before and after": (0.5, 2.0),
}
WHERE_FROM = {
    "download the base": "measured by others",
    "load it onto the chips": "assumed",
    "compile": "measured by others: 1 to 8 minutes for a program; a run waits for three, because "
               "the step compiles while the base is loaded",
    "optimizer steps": "predicted from the compiled program (08)",
    "validate": "predicted: half the work of a training step, or a third if that step recomputes",
    "save": "assumed: nothing if saving overlaps with training, at most 1.5 times as long as "
            f"writing at {GB_PER_S} GB/s; on a v5e-8 as long as at the {SLOW_DISKS['v5e-8']:.3f} "
            "GB/s that others had on Kaggle",
    "answer before and after": f"assumed: {ANSWER_TOKENS:,} tokens, each "
                               f"{ANSWER_OVER_FLOOR:g} times what reading the weights takes",
}


@dataclass(frozen=True)
class Fit:
    """How one training step sits on one slice.

    Attributes:
      slice, model, base_dtype, remat, rows, row_length: what was asked (rows: computed at once).
      chips: of the slice.
      mesh: (fsdp, tp) that the chips are laid out as.
      parts: {what: GiB of one chip}; their sum is `total`.
      limit: GiB of a chip that XLA can use.
      compiled: the numbers are the TPU compiler's; False: they're an estimate.
      speed: real tokens per second, predicted from the compiled program (08), or None.
      bound: real tokens per second that the step can't exceed, because the chips would do all its
        arithmetic at their peak; the arithmetic is the compiled program's if there is one. Storing
        weights in fewer bits saves no time. So a quantized base that isn't compiled gets a bound
        no better than bfloat16's on the same slice.
      slowed: how many times as long the step takes with slow links (`SLOW_LINKS`); 1 if we know of
        no slow links on that slice, or if no speed is predicted.
    """

    slice: str
    model: str
    base_dtype: str
    remat: str
    rows: int
    row_length: int
    chips: int
    mesh: tuple[int, int]
    parts: dict = field(hash=False)
    limit: float
    compiled: bool
    speed: float | None
    bound: float
    slowed: float = 1.0

    @property
    def total(self) -> float:
        """GiB that a chip needs."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Does the step fit? An estimate has to leave a share of the chip free.

        That's `SPARE`, or `SPARE_IN_A_LOOP` if the step has several micro-batches.
        """
        usable = self.limit
        if not self.compiled:
            has_a_loop = self.rows < stored.rows_per_step(self.model, self.row_length)
            usable *= 1 - (SPARE_IN_A_LOOP if has_a_loop else SPARE)
        return self.total <= usable

    @property
    def is_tight(self) -> bool:
        """Does it fit, but leave less than `SPARE` of the chip free?"""
        return self.fits and self.total > self.limit * (1 - SPARE)

    def speeds(self, sigmas: float = 1.0) -> tuple[float, float]:
        """(least, most) real tokens per second: the range of `bands`, and slow links below it.

        Raises:
          UserError: no speed is predicted.
        """
        if self.speed is None:
            raise UserError(f"no speed is predicted of the {self.model} on a {self.slice}.")
        least, most = bands.band(self.speed, sigmas=sigmas)
        return least / self.slowed, most

    @property
    def pace(self) -> str:
        """Real tokens per second as text: the range of `speeds`, or the arithmetic's bound (≤)."""
        if self.speed is None:
            return f"≤ {self.bound:,.0f}"
        slow, fast = self.speeds()
        return f"{slow:,.0f} to {fast:,.0f}"

    @property
    def how(self) -> str:
        """How its numbers are known: compiled or estimated."""
        if self.compiled:
            return "compiled"
        return "estimated"

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        rows = "row" if self.rows == 1 else "rows"
        return (
            f"{self.model}, {self.base_dtype} base, on a {self.slice}: {verdict} with "
            f"remat={self.remat} and {self.rows} {rows} of {self.row_length:,} tokens at once, "
            f"{self.total:.1f} of {self.limit:.1f} GiB per chip ({self.how})"
        )


def lengths_of(model: str) -> tuple[int, ...]:
    """Tokens of a row that are tried for a model, the better length first.

    Raises:
      UserError: it's no model whose memory is estimated here. (`of_row` reads the 12B's stored
        rows. There's no estimate of it, because ours counts too much for gathered weights there.)
    """
    if model not in LENGTHS:
        models = ", ".join(LENGTHS)
        raise UserError(f"model={model}: there are {models}.")
    return LENGTHS[model]


def lengths_on(slice_name: str, model: str) -> tuple[int, ...]:
    """`lengths_of` on a slice: on a v5e-8 02 makes rows of 2,048 for the 31B.

    Raises:
      UserError: as `lengths_of`.
    """
    lengths = lengths_of(model)
    if (slice_name, model) in PACKED_SHORTER:
        return (PACKED_SHORTER[slice_name, model],)
    return lengths


@functools.cache
def _config(model: str) -> dict:
    """The model's config.json."""
    return architecture.read_config(stored.config_of(model))


def mesh_of(model: str, chips: int) -> tuple[int, int]:
    """(fsdp, tp) that 03 lays out: the largest tp that the model's heads allow."""
    return architecture.choose_mesh(_config(model), chips)


def _stored(name: str, model: str) -> list[dict]:
    """Rows of notebook 03's step as it is today, on the mesh that the heads allow with most tp."""
    rows = []
    for row in stored.compiled_rows(name, model):
        is_usual_mesh = not row["mesh"]
        is_in_blocks = row["attention_block"] != "0"
        if is_usual_mesh and is_in_blocks and row["args_gib"]:
            rows.append(row)
    return rows


@functools.cache
def held(model: str, fsdp: int, tp: int, base_dtype: str = "bfloat16") -> tuple[float, float]:
    """GiB of one chip that a step starts with: (the base, the adapters with Adam's two moments).

    A matrix is cut over both axes of the mesh. Its adapter A meets one side of it and B the other,
    so each of the two is cut over one axis and repeated along the other. Adapters and moments are
    in float32. A quantized base keeps its embeddings in bfloat16.
    """
    config = _config(model)
    count = architecture.parameters(config)
    numbers = count["total"] + _padding(config, fsdp)
    weights = 2.0 * numbers
    adapters = 0.0  # numbers that a chip has of them
    quantized = 0  # numbers of the base that are stored in fewer bits
    for module in architecture.modules(config):
        quantized += module.size
        a, b = module.adapter(RANK)
        cuts_of_a = fsdp
        cuts_of_b = tp
        if module.kind in ("attn_vec_einsum", "down_proj"):
            cuts_of_a = tp
            cuts_of_b = fsdp
        adapters += math.prod(a) / cuts_of_a + math.prod(b) / cuts_of_b

    if base_dtype != "bfloat16":
        scales = 0.0
        if base_dtype == "nf4":
            scales = 2.0 / TILE
        saved = BASE_BYTES[base_dtype] - 2.0 + scales  # bytes of a number; below 0
        weights += quantized * saved
    chips = fsdp * tp
    base_gib = weights / chips / GIB
    adapters_gib = ADAPTER_BYTES * adapters / GIB
    return base_gib, adapters_gib


def _padding(config: dict, fsdp: int) -> int:
    """Numbers that fill up the per-layer table of E2B and E4B in the chips' memory, on all of them.

    A token has [layers, 256] numbers in that table. A TPU stores rows in eights and columns in
    blocks of 128, and each of `fsdp` chips has its share of the columns.
    """
    text = architecture.text_config(config)
    layers = int(text["num_hidden_layers"])
    width = text.get("hidden_size_per_layer_input") or 0
    rows = math.ceil(layers / 8) * 8
    columns = fsdp * math.ceil(width / fsdp / 128) * 128
    return text["vocab_size"] * (rows * columns - layers * width)


def _layer_bytes(layer: Layer, length: int, tp: int) -> tuple[float, float]:
    """Bytes of one token that the backward pass reads again: (the residual stream, all else).

    Counted from the model's code: the stream eight times; queries three times (projected,
    normalized, rotated), keys three times, values twice; a score and a weight for each pair of
    query and key; gate, up and their product. All of it is bfloat16 and cut over tp.
    """
    queries = layer.heads * layer.head_dim
    keys = layer.kv_heads * layer.head_dim
    numbers = 3 * queries + 5 * keys + 3 * layer.mlp
    blocks = _ends_of_blocks(length)
    met = 0  # keys that a query is multiplied with, over all blocks
    for end in blocks:
        if layer.window is None:
            met += end
        else:
            met += min(end, layer.window + BLOCK)

    stream = 8 * 2 * layer.width
    scores = SCORES * layer.heads * met / len(blocks)
    rest = 2 * numbers + scores
    return stream / tp, rest / tp


def _ends_of_blocks(length: int) -> list[int]:
    """Where the blocks of queries end into which attention cuts a row of `length` tokens."""
    if length <= BLOCK:
        return [length]
    return list(range(BLOCK, length + 1, BLOCK))


def _kept_activations(
    layers: list[Layer],
    remat: str,
    length: int,
    tp: int,
) -> float:
    """Bytes of one token that stay in memory between the forward and the backward pass."""
    kept = 0.0
    largest = 0.0  # of what a single layer needs
    for layer in layers:
        stream, rest = _layer_bytes(layer, length, tp)
        largest = max(largest, stream + rest)
        if remat == "NONE":
            kept += stream + rest
        elif remat == "BLOCK":
            kept += stream / 2
        else:
            kept += stream / 8
    if remat == "NONE":
        return kept
    return kept + largest  # the layer that is computed again


def estimate(
    model: str,
    fsdp: int,
    tp: int,
    base_dtype: str,
    remat: str,
    rows: int,
    row_length: int,
) -> dict[str, float]:
    """{what: GiB of one chip} of a training step, added up from the model's shapes.

    It's within a tenth of the compiler's sum for all stored rows but four. int8 on a v6e-8 with
    BLOCK needs 13.6 GiB by this estimate and 21.6 GiB compiled: if a chip has room, the compiler
    works on several layers of the backward pass at once, and keeps the activations of all their
    MLPs. And int8 on a v5e-4 needs 12.8 GiB by this estimate and 16.5 compiled, because its two
    micro-batches are a loop (`SPARE_IN_A_LOOP`). Rows of 16,384 need 27.0 GiB on a v6e-8 and 20.1
    on a v5e-8 by this estimate, and 20.6 and 16.5 compiled: the compiler keeps less there of what
    it has gathered.
    """
    config = _config(model)
    base, adapters = held(model, fsdp, tp, base_dtype)
    tokens = rows / fsdp * row_length
    vocabulary = architecture.text_config(config)["vocab_size"]
    logits = tokens / 2 * vocabulary / tp * 8
    layers = architecture.layers(config)
    kept = _kept_activations(layers, remat, row_length, tp)
    gathered = _gathered(config, base_dtype) * (fsdp - 1) / (fsdp * tp)

    # The adapters' gradients in float32, and a copy in bfloat16. A step of several micro-batches
    # holds their sum as well.
    gradients = adapters / 2
    if rows < stored.rows_per_step(model, row_length):
        gradients += adapters / 3
    return {
        "base weights": base,
        "adapters and Adam": adapters,
        "gradients": gradients,
        "activations": tokens * kept / GIB,
        "logits": logits / GIB,
        "gathered weights": gathered / GIB,
    }


def _gathered(config: dict, base_dtype: str) -> float:
    """Bytes of the matrices, gathered in bfloat16, that are kept from the forward pass on.

    That's what the compiler does in the stored rows: it keeps all that came from the other chips,
    or half of it if the base is quantized. The output matrix is never gathered.
    """
    kept = 0.5
    if base_dtype == "bfloat16":
        kept = 1.0
    numbers = 0
    for module in architecture.modules(config):
        numbers += module.size
    return kept * 2.0 * numbers


def will_it_fit(
    kind: str,
    chips: int,
    model: str = "31b",
    base_dtype: str = "bfloat16",
    remat: str = "NONE",
    rows: int | None = None,
    row_length: int | None = None,
) -> Fit:
    """Does notebook 03's step fit a slice, and how fast is it, as far as we predict that?

    Args:
      kind: a name of `tables.hardware.CHIPS`, such as v5p.
      chips: of the slice (a v5p-8 has four).
      model: 31b, e2b or e4b.
      base_dtype: of the frozen base: bfloat16, int8 or nf4 (11).
      remat: what the backward pass computes again: NONE, BLOCK or DECODER.
      rows: computed at once, over all chips; None: two on a v5p-8, else one for each part of fsdp.
      row_length: tokens of a row; None: 4,096 for the 31B, else 2,048.

    Returns:
      A `Fit`: compiled if data/dryrun/ has such a row (the fastest, if it has several), or else
      estimated.

    Raises:
      UserError: a word is unknown, or there's no such mesh or number of rows.
    """
    if base_dtype not in BASE_BYTES or remat not in REMATS:
        dtypes = ", ".join(BASE_BYTES)
        remats = ", ".join(REMATS)
        raise UserError(
            f"base_dtype={base_dtype}, remat={remat}: there are {dtypes} and {remats}."
        )
    longest, *_ = lengths_of(model)
    row_length = row_length or longest
    name = slice_name(kind, chips)
    fsdp, tp = mesh_of(model, chips)
    if not rows:
        rows = fsdp
        if kind == "v5p":
            rows *= 2
    if rows % fsdp:
        raise UserError(f"rows={rows}: a ({fsdp}, {tp}) mesh computes a multiple of {fsdp}.")

    same = []
    for row in _stored(name, model):
        if _shape(row) == (base_dtype, remat, rows, row_length):
            same.append(of_row(name, model, row))
    if same:
        return max(same, key=lambda fit: fit.speed or 0)
    return Fit(
        slice=name,
        model=model,
        base_dtype=base_dtype,
        remat=remat,
        rows=rows,
        row_length=row_length,
        chips=chips,
        mesh=(fsdp, tp),
        parts=estimate(model, fsdp, tp, base_dtype, remat, rows, row_length),
        limit=chip(kind).hbm / GIB,
        compiled=False,
        speed=None,
        bound=_bound(kind, chips, model, base_dtype, remat),
    )


def _bound(kind: str, chips: int, model: str, base_dtype: str, remat: str) -> float:
    """Real tokens per second that an estimated step can't exceed; see `Fit.bound`."""
    weights = architecture.parameters(_config(model))["matmul"]
    work = STEP_FLOPS[remat] * weights / FILL
    bound = chips * chip(kind).flops / work
    if base_dtype == "bfloat16":
        return bound
    whole = best_fit(kind, chips, model)  # storage saves no time
    recomputes_less = remat == "NONE" and whole.remat != "NONE"
    if whole.fits and not recomputes_less:
        bound = min(bound, whole.speed or whole.bound)
    return bound


def _shape(row: Mapping[str, str]) -> tuple[str, str, int, int]:
    """(base dtype, remat, rows, row length) of a stored row."""
    rows = int(row["micro_batch"])
    row_length = int(row["sequence_length"])
    return row["base_dtype"], row["remat"], rows, row_length


def of_row(name: str, model: str, row: Mapping[str, str]) -> Fit:
    """The `Fit` of a row of data/dryrun/.

    Args:
      name: Google's name of the slice, such as "v5e-8".
      model: its size: "31b", "12b" and so on.
      row: {column: text}.
    """
    piece = hardware.SLICES[name]
    base_dtype, remat, rows, row_length = _shape(row)
    fsdp, tp = stored.mesh_of(row, model)
    _, adapters = held(model, fsdp, tp, base_dtype)
    base = float(row["args_gib"]) - adapters
    temporaries = float(row["hbm_gib"]) - base - adapters
    seconds_at_peak = float(row["flops_per_chip"]) / piece.chip.flops
    bound = float(row["real_tokens_per_step"]) / seconds_at_peak
    speed = None
    slowed = 1.0
    if row["tokens_per_second_predicted"]:
        speed = float(row["tokens_per_second_predicted"])
        waiting = float(row["seconds_exposed"])
        longer = (SLOW_LINKS.get(name, 1.0) - 1) * waiting
        slowed = 1 + longer / float(row["seconds_predicted"])
    return Fit(
        slice=name,
        model=model,
        base_dtype=base_dtype,
        remat=remat,
        rows=rows,
        row_length=row_length,
        chips=piece.chips,
        mesh=(fsdp, tp),
        parts={
            "base weights": base,
            "adapters and Adam": adapters,
            "temporaries": temporaries,
        },
        limit=piece.chip.hbm / GIB,
        compiled=True,
        speed=speed,
        bound=bound,
        slowed=slowed,
    )


def best_fit(
    kind: str,
    chips: int,
    model: str = "31b",
    base_dtype: str = "bfloat16",
    row_length: int | None = None,
) -> Fit:
    """The `Fit` that 03 would train with, or the smallest one if none fits.

    `stored.compiled_fit` chooses among the compiled steps, for 03 as for us. If none of them fits,
    it's an estimate: the longest rows come first, and then the one that recomputes least.

    Args:
      kind, chips, model, base_dtype: as for `will_it_fit`.
      row_length: tokens of a row; None: as for `will_it_fit`, and an estimate that doesn't fit is
        tried with half as many. (On a v5e-8 it's the 2,048 that 02 makes there.)
    """
    name = slice_name(kind, chips)
    lengths = lengths_on(name, model)
    if row_length is not None:
        lengths = (row_length,)
    row = stored.compiled_fit(name, model, base_dtype, lengths[0])
    if row is not None:
        return of_row(name, model, row)

    for length in lengths:
        for remat in REMATS:
            fit = will_it_fit(kind, chips, model, base_dtype, remat, row_length=length)
            if fit.fits:
                return fit
    return fit


def step_tokens(fit: Fit) -> float:
    """Real tokens of an optimizer step of 03, in one micro-step or several."""
    rows = max(fit.rows, stored.rows_per_step(fit.model, fit.row_length))
    return rows * fit.row_length * FILL


def run_cost(
    fit: Fit,
    tokens: float,
    dollars_per_hour: float,
    speed: float | None = None,
) -> dict:
    """What a whole training run takes, as 03 would do it.

    Args:
      fit: the step, and where it runs.
      tokens: real tokens to train on.
      dollars_per_hour: of the whole slice.
      speed: real tokens per second; None: the predicted one, or the bound if none is predicted.

    Returns:
      A dict with:
        "minutes": {part: minutes}, in the middle of their ranges.
        "ranges": {part: (least minutes, most)}: by `bands` if it's predicted, and then the most
          also counts slow links (`Fit.slowed`); else by `ASSUMED`. If no speed is predicted, the
          bound's time is the least, and nothing is the most.
        "hours", "dollars": of the whole run, in the middle.
        "at_least": True if no speed is predicted, so that the bound stands in for it.
        "hours_text", "dollars_text": from the sum of the least to the sum of the most; or "≥" and
          the sum of the least. No text of dollars if the price isn't known (nan).
    """
    at_least = speed is None and fit.speed is None
    assumed_speed = speed or fit.speed or fit.bound
    minutes = _minutes(fit, tokens, assumed_speed)
    slowed = 1.0
    if speed is None:
        slowed = fit.slowed
    assumed = assumed_of(fit)
    ranges = {}
    for part, middle in minutes.items():
        ranges[part] = _range(assumed.get(part), middle, at_least, slowed)
    hours = sum(minutes.values()) / 60
    least = sum(low for low, _ in ranges.values()) / 60
    most = sum(high for _, high in ranges.values()) / 60
    dollars_text = ""
    if not math.isnan(dollars_per_hour):
        cheapest = f"{least * dollars_per_hour:.1f}"
        dearest = f"{most * dollars_per_hour:.1f}"
        dollars_text = _ends(cheapest, dearest, at_least)
    return {
        "minutes": minutes,
        "ranges": ranges,
        "hours": hours,
        "dollars": hours * dollars_per_hour,
        "at_least": at_least,
        "hours_text": _ends(f"{least:.2f}", f"{most:.2f}", at_least),
        "dollars_text": dollars_text,
    }


def _ends(least: str, most: str, at_least: bool) -> str:
    """A range as text; only its lower end if the upper one isn't known."""
    if at_least:
        return f"≥ {least}"
    return f"{least} to {most}"


def assumed_of(fit: Fit) -> dict[str, tuple[float, float]]:
    """`ASSUMED` on a slice: there saving may take as long as on the slow disk that others had."""
    assumed = dict(ASSUMED)
    if fit.slice in SLOW_DISKS:
        never, _ = ASSUMED["save"]
        assumed["save"] = never, GB_PER_S / SLOW_DISKS[fit.slice]
    return assumed


def save_every(fit: Fit) -> int:
    """Optimizer steps between two checkpoints, as in 03."""
    usual = SAVE_EVERY[fit.model]
    return stored.SELDOM_SAVED.get((fit.slice, fit.model), usual)


def _range(
    assumed: tuple[float, float] | None,
    middle: float,
    at_least: bool,
    slowed: float,
) -> tuple[float, float]:
    """(least, most) minutes of a part of a run, by its entry in `assumed_of` if it has one."""
    if assumed is not None:
        least, most = assumed
        return middle * least, middle * most
    if at_least:
        return middle, math.inf
    least, most = bands.band(middle)
    return least, most * slowed


def _minutes(fit: Fit, tokens: float, speed: float) -> dict[str, float]:
    """{part: minutes} of a run on `tokens` real tokens, at `speed` of them a second."""
    steps = int(tokens / step_tokens(fit))
    validations = steps // EVERY + 2  # the first and the last step's, too
    saves = steps // save_every(fit) + 1
    validated = validations * HELD_OUT * fit.row_length * FILL
    work = validated * 2 / STEP_FLOPS[fit.remat]  # in tokens of training: only the forward pass
    base = CHECKPOINT_GB[fit.model]
    saved = ADAPTER_BYTES * adapter_parameters(fit.model) / 1e9
    return {
        "download the base": base / GB_PER_S / 60,
        "load it onto the chips": base / GB_PER_S / 60,
        "compile": float(COMPILE_MINUTES),
        "optimizer steps": tokens / speed / 60,
        "validate": work / speed / 60,
        "save": saves * saved / GB_PER_S / 60,
        "answer before and after": answer_minutes(fit),
    }


def answer_minutes(fit: Fit) -> float:
    """Minutes that 03's answers take before and after training, on whatever mesh it trains.

    Each chip multiplies with its own part of every weight, so a token takes at least as long as
    reading that part.
    """
    kind, _, _ = fit.slice.partition("-")
    base, _ = held(fit.model, 1, fit.chips, fit.base_dtype)
    weights = base * GIB
    bandwidth = chip(kind).bandwidth
    seconds = ANSWER_TOKENS * ANSWER_OVER_FLOOR * weights / bandwidth
    return seconds / 60


@functools.cache
def adapter_parameters(model: str) -> int:
    """Numbers in all adapters of 03."""
    total = 0
    for module in architecture.modules(_config(model)):
        a, b = module.adapter(RANK)
        total += math.prod(a) + math.prod(b)
    return total


def price(kind: str, chips: int) -> float:
    """Dollars per hour of a slice, on demand (tables/hardware.py says where we have them from).

    Not a number (nan) if the table has no price of that kind of chip.
    """
    rate = chip(kind).dollars_per_hour
    if rate is None:
        return math.nan
    return chips * rate


def renters_rows(
    models: tuple[str, ...] = ("31b",),
    slices: dict[str, tuple[str, int]] | None = None,
    prices: Mapping[str, float] | None = None,
) -> list[tuple[Fit, float]]:
    """For every slice and base dtype the best `Fit` and what the slice costs, in dollars an hour.

    Args:
      models: names of Gemma 4's sizes.
      slices: {slice: (kind of chip, chips)}; without it, `SLICES`.
      prices: {slice: dollars an hour}; without one, `price` says what Google asks for.
    """
    listed = slices or SLICES
    asked = prices or {}
    rows = []
    for model in models:
        for kind, chips in listed.values():
            for dtype in BASE_BYTES:
                fit = best_fit(kind, chips, model, dtype)
                usual = price(kind, chips)
                dollars_per_hour = asked.get(fit.slice, usual)
                rows.append((fit, dollars_per_hour))
    return rows


def what_fits(rows: list[tuple[Fit, float]], tokens: float) -> list[dict[str, str]]:
    """One row for each slice on which a compiled step fits, in the best base dtype that does.

    Args:
      rows: of `renters_rows`, where bfloat16 stands before what saves memory.
      tokens: real tokens to train on.

    Returns:
      Rows of text for a table, with the dollars of the whole of 03 and its download. Dollars that
      nobody has predicted say so.
    """
    row_of: dict[str, dict[str, str]] = {}
    for step, dollars_per_hour in rows:
        is_known = step.compiled and step.fits
        if not is_known or step.slice in row_of:
            continue
        name = f"the {step.model.upper()}"
        if step.base_dtype != "bfloat16":
            name += f", weights in {step.base_dtype}"
        dollars = NOT_PREDICTED
        if step.speed is not None:
            cost = run_cost(step, tokens, dollars_per_hour)
            dollars = cost["dollars_text"]
        row_of[step.slice] = {
            "slice": step.slice,
            "what fits": name,
            "USD for all of 03": dollars,
        }
    return list(row_of.values())


def full_table(rows: list[tuple[Fit, float]], tokens: float) -> list[dict[str, str]]:
    """All that we know of each slice, as rows of text; no int8 where bfloat16 fits, and no nf4.

    Args:
      rows: of `renters_rows`, where bfloat16 stands before int8.
      tokens: real tokens to train on.
    """
    listed = []
    fits_whole = set()  # (slice, model) that fits in bfloat16
    for step, dollars_per_hour in rows:
        here = (step.slice, step.model)
        if step.base_dtype == "bfloat16" and step.fits:
            fits_whole.add(here)
        is_needed = step.base_dtype == "int8" and here not in fits_whole
        if step.base_dtype == "bfloat16" or is_needed:
            row = _full_row(step, tokens, dollars_per_hour)
            listed.append(row)
    return listed


def needed(step: Fit) -> tuple[float, str]:
    """GiB of a chip that a step needs, and how we know: the compiler's plan goes before a sum."""
    asked = (step.slice, step.model, step.base_dtype)
    if asked in PLANNED and not step.compiled:
        return PLANNED[asked], "planned"
    return step.total, step.how


def _full_row(step: Fit, tokens: float, dollars_per_hour: float) -> dict[str, str]:
    """One row of `full_table`; its speed, hours and dollars are empty if the step doesn't fit."""
    memory, how = needed(step)
    fits = "no"
    unknown = ""
    if step.fits:
        fits = "yes"
        unknown = NOT_PREDICTED
    if step.is_tight:
        fits = "yes, tight"
    speed = minutes = hours = dollars = unknown
    if step.fits and step.speed is not None:
        speed = step.pace
        cost = run_cost(step, tokens, dollars_per_hour)
        least, most = cost["ranges"]["optimizer steps"]
        minutes = f"{least:.0f} to {most:.0f} min"
        hours = cost["hours_text"]
        dollars = cost["dollars_text"]
    fsdp, tp = step.mesh
    return {
        "slice": step.slice,
        "model": step.model,
        "weights": step.base_dtype,
        "rows x length": f"{step.rows} x {step.row_length:,}",
        "mesh": f"{fsdp} x {tp}",
        "remat": step.remat,
        "GiB a chip": f"{memory:.1f} of {step.limit:.4g}",
        "fits": fits,
        "how we know": how,
        "tokens/s, without padding": speed,
        "training steps": minutes,
        "hours": hours,
        "USD": dollars,
    }
