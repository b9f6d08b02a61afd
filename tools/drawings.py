"""Draw the drawings of the pages, as assets/figures/<name>.svg.

    .venv/bin/python tools/drawings.py            all of them
    .venv/bin/python tools/drawings.py slice      one

What a drawing says of the 31B is computed here from data/configs/ and data/dryrun/, and a test
compares the files with what this program draws.
"""

import argparse
import csv
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from svg import Sheet  # noqa: E402

from tables import architecture, hardware, stored  # noqa: E402
from tpu_time import fit  # noqa: E402

FOLDER = ROOT / "assets" / "figures"
RANK = 64  # of 03 at the size of the 31B
CHIPS = ("blue", "orange", "green", "purple")  # the colors of chips 0 to 3
DIGITS = "0123"
RECIPES = ROOT / "data" / "recipes"
RATES = {"0.002": "blue", "0.006": "orange", "0.02": "green"}
ACROSS = 330.0  # width of a panel of `recipes`


@functools.cache
def modules_31b() -> dict[str, architecture.Module]:
    """The matrices of the 31B's first layer, a sliding one, by Tunix's name."""
    config = architecture.read_config(ROOT / "data" / "configs" / "gemma4_31b.json")
    first = architecture.layers(config)[0]
    assert first.kind == "sliding"
    return {module.kind: module for module in first.modules()}


# ── 1. The road (README, 00) ──
NODE_WIDTH, NODE_HEIGHT = 190, 116
COLUMNS = (35, 355, 675)  # where the nodes of a row begin
ROWS = (62, 244, 426)


def road() -> Sheet:
    """From a chat to a verdict: nine stations, and what travels between them."""
    sheet = Sheet(
        "road", 590, "From a chat to a verdict",
        "Nine stations in three rows. Data, page 02: a chat is rendered into token ids with a mask "
        "of the answer, and several examples are packed into one row. Training, pages 03 and 04: "
        "LoRA trains A and B on a mesh, they are saved as a checkpoint and merged into a "
        "safetensors model. Serving, pages 05 to 07: a vLLM server answers over HTTP, 06 measures "
        "how fast, a judge simulates the answers and counts which pass. Page 00 walks all stations "
        "but the merged model and the server: from the adapters it goes straight to the judge.")
    sheet.words(35, 40, "From a chat to a verdict", 21, bold=True)
    sheet.outline(502, 25, 22, 18, "blue", radius=3, line=3, dashed=False)
    sheet.words(534, 40, "00 walks these in three minutes", 17, "blue")
    _road_data(sheet)
    _road_training(sheet)
    _road_serving(sheet)
    return sheet


def _node(sheet: Sheet, column: int, row: int, name: str, color: str = "soft",
          in_00: bool = True) -> tuple[int, int]:
    """A station with its name, blue around if 00 walks it; returns where its picture begins."""
    x, y = COLUMNS[column], ROWS[row]
    sheet.rectangle(x, y, NODE_WIDTH, NODE_HEIGHT, color, radius=8)
    if in_00:
        sheet.outline(x, y, NODE_WIDTH, NODE_HEIGHT, "blue", radius=8, line=3, dashed=False)
    sheet.words(x + NODE_WIDTH / 2, y + 27, name, 18, "ink", "middle", bold=True)
    return x, y + 40


def _step(sheet: Sheet, column: int, row: int, action: str, *what: str) -> None:
    """The arrow behind a station, with what is done above it and what travels below."""
    start, end = COLUMNS[column] + NODE_WIDTH, COLUMNS[column + 1]
    y = ROWS[row] + NODE_HEIGHT / 2
    middle = (start + end) / 2
    sheet.arrow([(start + 4, y), (end - 4, y)])
    sheet.words(middle, y - 12, action, 17, "ink", "middle", bold=True)
    sheet.lines(middle, y + 25, what, 20, size=16, color="soft", anchor="middle")


def _turn(sheet: Sheet, row: int, action: str, what: str, middle: float = 450) -> None:
    """The arrow from the end of a row to the beginning of the next; `middle` is its words'."""
    start, end = COLUMNS[2] + NODE_WIDTH / 2, COLUMNS[0] + NODE_WIDTH / 2
    below, above = ROWS[row] + NODE_HEIGHT, ROWS[row + 1]
    y = (below + above) / 2
    sheet.arrow([(start, below + 4), (start, y), (end, y), (end, above - 4)])
    sheet.words(middle, y - 9, action, 17, "ink", "middle", bold=True)
    sheet.words(middle, y + 21, what, 16, "soft", "middle")


def _straight_to_the_judge(sheet: Sheet) -> None:
    """How 00 gets from the adapters to the judge, who stands right below them."""
    x = COLUMNS[1] + NODE_WIDTH / 2
    top, bottom = ROWS[1] + NODE_HEIGHT, ROWS[2]
    sheet.arrow([(x, top + 4), (x, bottom - 4)], "blue", 2, dashed=True)
    sheet.words(x - 14, bottom - 12, "00: straight to the judge", 16, "blue", "end")


def _strip(sheet: Sheet, x: float, y: float, kinds: str, size: float) -> None:
    """Tokens in a row: r is read, t is trained, | begins the next example."""
    for kind in kinds:
        if kind == "|":
            x += 3
            continue
        color = "blue" if kind == "t" else "gray"
        sheet.rectangle(x, y, size, 26, color, radius=2, line=1.2)
        x += size


def _road_data(sheet: Sheet) -> None:
    x, y = _node(sheet, 0, 0, "a chat")
    sheet.rectangle(x + 12, y, 120, 28, "gray", radius=8)
    sheet.words(x + 72, y + 20, "a counter …", 16, "ink", "middle")
    sheet.rectangle(x + 82, y + 36, 96, 28, "blue", radius=8)
    sheet.words(x + 130, y + 56, "module …", 16, "ink", "middle")
    _step(sheet, 0, 0, "02 render", "messages", "as JSON lines")
    x, y = _node(sheet, 1, 0, "tokens and mask")
    _strip(sheet, x + 15, y + 4, "rrrrrrttttt", 14.5)
    sheet.words(x + 58, y + 53, "read", 16, "soft", "middle")
    sheet.words(x + 138, y + 53, "trained", 16, "blue", "middle")
    _step(sheet, 1, 0, "02 pack", "ids, mask", "[tokens] each")
    x, y = _node(sheet, 2, 0, "packed rows")
    _strip(sheet, x + 15, y + 2, "rrtt|rrrttt|rtt", 11.8)
    _strip(sheet, x + 15, y + 36, "rrrrtt|rt|rrttt", 11.8)
    _turn(sheet, 0, "03 load", "ids, mask, segments, positions: [rows, length] each")


def _road_training(sheet: Sheet) -> None:
    x, y = _node(sheet, 0, 1, "LoRA on a mesh")
    for chip in range(4):
        left = x + 13 + 42 * chip
        sheet.rectangle(left, y, 38, 62, "ink", radius=3)
        sheet.rectangle(left + 12, y + 18, 20, 38, "gray", radius=1, line=1)
        sheet.rectangle(left + 6, y + 18, 3, 38, "blue", radius=0, line=1)
        sheet.rectangle(left + 12, y + 8, 20, 3, "blue", radius=0, line=1)
    _step(sheet, 0, 1, "03 save", "A [in, r]", "B [r, out]")
    x, y = _node(sheet, 1, 1, "adapters")
    sheet.words(x + 95, y + 20, "train/checkpoints/", 16, "soft", "middle")
    for place in range(5):
        left = x + 27 + 30 * place
        sheet.rectangle(left, y + 34, 4, 28, "blue", radius=0, line=1)
        sheet.rectangle(left + 7, y + 34, 18, 4, "blue", radius=0, line=1)
    _step(sheet, 1, 1, "04 merge", "A · B is added", "to the weights")
    x, y = _node(sheet, 2, 1, "merged model", in_00=False)
    sheet.words(x + 95, y + 16, "merged/", 16, "soft", "middle")
    sheet.rectangle(x + 12, y + 28, 166, 34, "blue", radius=4)
    sheet.words(x + 95, y + 51, "model.safetensors", 16, "ink", "middle")
    _turn(sheet, 1, "05 serve", "a folder in Hugging Face's format", 600)
    _straight_to_the_judge(sheet)


def _road_serving(sheet: Sheet) -> None:
    x, y = _node(sheet, 0, 2, "server", in_00=False)
    sheet.words(x + 95, ROWS[2] + NODE_HEIGHT + 26, "06 measures it", 17, "ink", "middle",
                bold=True)
    for lane, cells in enumerate((7, 5, 8)):
        top = y + 1 + 22 * lane
        sheet.rectangle(x + 15, top, 30, 16, "gray", radius=2, line=1)
        for place in range(cells):
            sheet.rectangle(x + 48 + 16 * place, top, 14, 16, "blue", radius=2, line=1)
    _step(sheet, 0, 2, "07 ask", "an answer,", "text over HTTP")
    x, y = _node(sheet, 1, 2, "judge")
    for place, (name, color) in enumerate((("answer", "orange"), ("reference", "blue"))):
        low = y + 26 + 34 * place
        _wave(sheet, x + 12, low, (0, 1, 1, 0, 1, 0), color)
        sheet.words(x + 104, low - 3, name, 16, color)
    _step(sheet, 1, 2, "07 count", "pass or fail", "of each answer")
    x, y = _node(sheet, 2, 2, "score", "green")
    sheet.words(x + 95, y + 26, "share that passes", 18, "green", "middle", bold=True)
    sheet.words(x + 95, y + 56, "eval/comparison.json", 16, "green", "middle")


def _wave(sheet: Sheet, x: float, y: float, bits: tuple[int, ...], color: str) -> None:
    """A signal over time, as simulators draw it; y is where it's low."""
    points: list[tuple[float, float]] = []
    for place, bit in enumerate(bits):
        points.append((x + 14 * place, y - 20 * bit))
        points.append((x + 14 * (place + 1), y - 20 * bit))
    sheet.line(points, color, 2.4)


# ── 2. LoRA beside W (03) ──
SCALE = 20  # numbers of a matrix's side in a unit of the drawing


def lora() -> Sheet:
    """A query projection of the 31B with its adapter, to scale, and what a token meets."""
    module = modules_31b()["q_einsum"]
    inputs, outputs = math.prod(module.inputs), math.prod(module.outputs)
    trained = RANK * (inputs + outputs)
    share = f"{100 * trained / module.size:.0f}%"
    sheet = Sheet(
        "lora", 456, f"LoRA trains {share} beside a frozen W",
        f"A query projection of the 31B has {inputs:,} inputs and {outputs:,} outputs, "
        f"{module.size / 1e6:.1f} million frozen numbers. Beside it stand A, {inputs:,} by {RANK}, "
        f"and B, {RANK} by {outputs:,}: {trained:,} trained numbers, "
        f"{100 * trained / module.size:.1f}% of W. A token goes through W and, beside it, "
        "through A and B; both results are added.")
    sheet.words(35, 40, f"LoRA trains {share} beside a frozen W (to scale)", 21, bold=True)
    x, y, width, height = 160, 118, outputs / SCALE, inputs / SCALE
    sheet.rectangle(x, y, width, height, "gray", radius=0)
    sheet.rectangle(x - 20, y, RANK / SCALE, height, "blue", radius=0, line=1)
    sheet.rectangle(x, y - 20, width, RANK / SCALE, "blue", radius=0, line=1)
    sheet.lines(35, y + 100, ["A", f"{inputs:,}", f"× {RANK}"], 24, size=18, color="blue",
                bold=True)
    sheet.words(x + width / 2, y - 31, f"B  {RANK} × {outputs:,}", 18, "blue", "middle", bold=True)
    sheet.words(x + width / 2, y + 92, "W", 34, "ink", "middle", bold=True)
    sheet.lines(x + width / 2, y + 128, [
        f"{inputs:,} × {outputs:,}", f"{module.size / 1e6:.1f} million numbers, frozen",
        "A · B has its shape"], 26, size=18, color="soft", anchor="middle")
    sheet.words(35, 426, f"q_proj of a sliding layer of the 31B. Only A and B are trained: "
                f"{trained:,} numbers, {100 * trained / module.size:.1f}% of W.", 17, "soft")
    _lora_flow(sheet, inputs, outputs)
    return sheet


def _lora_flow(sheet: Sheet, inputs: int, outputs: int) -> None:
    """What a token meets: W, and beside it A and B."""
    left, right = 655, 800
    sheet.words(727, 88, f"a token: {inputs:,} numbers", 17, "ink", "middle")
    sheet.line([(727, 98), (727, 112)])
    sheet.arrow([(727, 112), (left, 112), (left, 152)])
    sheet.arrow([(727, 112), (right, 112), (right, 134)], "blue")
    sheet.rectangle(left - 35, 154, 70, 124, "gray", radius=6)
    sheet.words(left, 224, "W", 24, "ink", "middle", bold=True)
    for name, top in (("A", 136), ("B", 206)):
        sheet.rectangle(right - 35, top, 70, 32, "blue", radius=6)
        sheet.words(right, top + 23, name, 20, "ink", "middle", bold=True)
    sheet.arrow([(right, 168), (right, 204)], "blue")
    sheet.words(right + 12, 192, str(RANK), 17, "blue")
    sheet.rectangle(right - 35, 256, 70, 32, "page", radius=6)
    sheet.words(right, 278, "× α/r", 17, "ink", "middle")
    sheet.line([(right, 238), (right, 256)], "blue")
    sheet.circle(727, 322, 16, "ink", 2)
    sheet.words(727, 330, "+", 24, "ink", "middle", bold=True)
    sheet.arrow([(left, 278), (left, 322), (709, 322)])
    sheet.arrow([(right, 288), (right, 322), (745, 322)], "blue")
    sheet.arrow([(727, 338), (727, 366)])
    sheet.words(727, 388, f"{outputs:,} numbers", 17, "ink", "middle")


# ── 3. A slice (01) ──
GIB_HIGH = 1.7  # units of a bar that stand for one GiB
BAR_WIDE = 48   # of every bar, so that areas can be compared
PARTS = (("weights", "gray-solid"), ("adapters", "blue-solid"), ("temporaries", "orange"))


class Filled(NamedTuple):
    """GiB of one chip of a slice while 03's step runs there, and how it was compiled.

    All of the step's arguments are compiled, and so are temporaries; how many of the arguments are
    weights follows from the shapes and the mesh.
    """

    weights: float
    adapters: float     # with Adam's moments and one batch
    temporaries: float  # activations and gradients
    limit: float
    mesh: tuple[int, int]
    rows: str           # computed at once
    again: str          # what the backward pass recomputes

    @property
    def free(self) -> float:
        """What is left."""
        return self.limit - self.weights - self.adapters - self.temporaries


def _filled(name: str, base_dtype: str) -> Filled:
    """Read it from the table of compiled steps."""
    length, *_ = fit.lengths_on(name, "31b")
    row = stored.compiled_fit(name, "31b", base_dtype, length)
    assert row is not None
    mesh = fit.mesh_of("31b", int(row["chips"]))
    if row["mesh"]:
        fsdp, tp = row["mesh"].split("x")
        mesh = (int(fsdp), int(tp))
    weights, _ = fit.held("31b", *mesh, base_dtype)
    again = {"NONE": "nothing", "BLOCK": "blocks", "DECODER": "layers"}[row["remat"]]
    rows = f"{row['micro_batch']} × {int(row['sequence_length']):,}"
    return Filled(weights, float(row["args_gib"]) - weights, float(row["temp_gib"]),
                  float(row["limit_gib"]), mesh, rows, again)


def slices() -> Sheet:
    """The chips of a v5e-8 and of a v5p-8 with their links, and what fills their memory."""
    small, large = _filled("v5e-8", "int8"), _filled("v5p-8", "bfloat16")
    sheet = Sheet(
        "slice", 574, "Two slices while they train the 31B",
        f"A v5e-8: eight chips in two rows of four, {small.limit:.2f} GiB each, linked to their "
        f"neighbors without wrap-around. With an int8 base each holds {small.weights:.1f} GiB "
        f"of weights, {small.adapters:.1f} of adapters with Adam's moments and "
        f"{small.temporaries:.1f} of activations and gradients. A v5p-8: four chips in a "
        f"square, {large.limit:.1f} GiB each. In bfloat16 each holds {large.weights:.1f}, "
        f"{large.adapters:.1f} and {large.temporaries:.1f} GiB. Compiled, not run.")
    sheet.words(35, 40, "Two slices while they train the 31B: what one chip holds", 21, bold=True)
    _slice(sheet, "v5e-8", small, 35, 4, 68, 38, 60)
    _slice(sheet, "v5p-8", large, 600, 2, 80, 62, 182)
    _slice_table(sheet, small, large)
    return sheet


def _slice(sheet: Sheet, name: str, parts: Filled, x: float, columns: int, width: float,
           gap: float, height: float) -> None:
    """Two rows of chips, linked to their neighbors, each with a bar of its memory to scale."""
    piece, top, down = hardware.slice_of(name), 114.0, 32.0
    used = parts.limit - parts.free
    sheet.words(x, 76, f"{name}: {piece.chips} chips", 18, bold=True)
    sheet.words(x, 99, f"each uses {used:.1f} of {parts.limit:.4g} GiB", 17)
    for row in range(2):
        y = top + row * (height + down)
        for column in range(columns):
            left = x + column * (width + gap)
            middle = left + width / 2
            if column + 1 < columns:
                sheet.line([(left + width, y + height / 2), (left + width + gap, y + height / 2)],
                           "ink", 4)
            if row == 0:
                sheet.line([(middle, y + height), (middle, y + height + down)], "ink", 4)
            sheet.rectangle(left, y, width, height, "ink", radius=6, line=2)
            high = parts.limit * GIB_HIGH
            _bar(sheet, left + (width - BAR_WIDE) / 2, y + (height - high) / 2, BAR_WIDE, parts)


def _bar(sheet: Sheet, x: float, y: float, width: float, parts: Filled) -> None:
    """One chip's memory from the bottom up: weights, adapters, temporaries, and what is free."""
    bottom = y + parts.limit * GIB_HIGH
    for name, color in PARTS:
        high = getattr(parts, name) * GIB_HIGH
        bottom -= high
        sheet.rectangle(x, bottom, width, high, color, radius=0, line=0)
    sheet.outline(x, y, width, parts.limit * GIB_HIGH, "soft", radius=0, line=1,
                  dashed=False)


def _slice_table(sheet: Sheet, small: Filled, large: Filled) -> None:
    """What a chip of either slice holds, and how the step was compiled."""
    y = 326.0
    for x, heads in ((328, ("v5e-8", "int8 base")), (450, ("v5p-8", "bfloat16"))):
        sheet.words(x, y, heads[0], 17, "ink", "middle", bold=True)
        sheet.words(x, y + 21, heads[1], 16, "soft", "middle")
    sheet.lines(35, y, ["GiB of one chip,", "compiled, not run"], 21, size=16, color="soft")
    texts = {"weights": "frozen base", "adapters": "adapters, optimizer",
             "temporaries": "activations, gradients", "free": "free for more"}
    for place, (name, text) in enumerate(texts.items()):
        top = y + 50 + 26 * place
        color = dict(PARTS).get(name)
        if color:
            sheet.rectangle(35, top - 14, 18, 18, color, radius=2, line=0)
        else:
            sheet.outline(35, top - 14, 18, 18, "soft", radius=2, line=1)
        sheet.words(63, top, text, 17)
        for x, parts in ((328, small), (450, large)):
            sheet.words(x, top, f"{getattr(parts, name):.1f}", 17, "ink", "middle")
    for place, (text, of) in enumerate((("rows at once", "rows"), ("recomputed", "again"),
                                        ("mesh (fsdp, tp)", "mesh"))):
        top = y + 162 + 24 * place
        sheet.words(35, top, text, 17, "soft")
        for x, parts in ((328, small), (450, large)):
            sheet.words(x, top, str(getattr(parts, of)), 17, "soft", "middle")
    sheet.words(35, y + 236, "rounded, so sums can be 0.1 off", 16, "soft")


# ── 4. fsdp against tp (03) ──
SIDE = 26  # of a cell


def shards() -> Sheet:
    """One 4 x 4 matrix on four chips, cut by fsdp and by tp: who holds what, and what travels."""
    sheet = Sheet(
        "shards", 668, "The same matrix, cut two ways",
        "A 4 x 4 matrix W on four chips. With fsdp each chip stores one row of W and owns its own "
        "rows of the batch x. Before the product an all-gather brings all of W to every chip; each "
        "multiplies its rows of x and owns those rows of y. With tp each chip stores one column "
        "of W, all have all of x, and each computes its column of y: no exchange so far. The next "
        "matrix V is cut by rows, so each chip has a sum over its own part only: a "
        "reduce-scatter adds them up and leaves each chip a quarter, an all-gather hands the "
        "quarters round.")
    sheet.words(35, 40, "One matrix, four chips, two cuts", 21, bold=True)
    _chips(sheet)
    _by_fsdp(sheet, 86)
    _by_tp(sheet, 328)
    return sheet


BY_ROWS = [[color] * 4 for color in CHIPS]
BY_COLUMNS = [list(CHIPS)] * 4
ROW_DIGITS = [[digit] * 4 for digit in DIGITS]
COLUMN_DIGITS = [list(DIGITS)] * 4
ALL_GRAY = [["gray"] * 4] * 4


def _chips(sheet: Sheet) -> None:
    """The legend: one color and one digit for each chip, gray for what all of them have."""
    for place, color in enumerate(CHIPS):
        x = 545 + 34 * place
        sheet.cells(x, 24, [[color]], 24, [[DIGITS[place]]])
    sheet.words(536, 42, "chip", 17, "soft", "end")
    sheet.cells(704, 24, [["gray"]], 24)
    sheet.words(736, 42, "on all chips", 17, "soft")


def _matrix(sheet: Sheet, x: float, y: float, name: str, colors: list[list[str]],
            digits: list[list[str]] | None = None) -> None:
    """A 4 x 4 matrix with its name below."""
    sheet.cells(x, y, colors, SIDE, digits)
    sheet.words(x + 2 * SIDE, y + 4 * SIDE + 22, name, 17, "ink", "middle")


def _sign(sheet: Sheet, x: float, y: float, sign: str) -> None:
    sheet.words(x, y + 2 * SIDE + 8, sign, 24, "ink", "middle", bold=True)


def _travel(sheet: Sheet, x: float, y: float, length: float, *what: str) -> None:
    """An arrow for what goes over the links, with its name."""
    sheet.arrow([(x, y + 2 * SIDE), (x + length, y + 2 * SIDE)], "red", 4)
    above = y + 2 * SIDE - 18 - 20 * (len(what) - 1)
    sheet.lines(x + length / 2 - 4, above, what, 20, size=17, color="red", anchor="middle",
                bold=True)


def _by_fsdp(sheet: Sheet, y: float) -> None:
    sheet.line([(35, y - 18), (865, y - 18)], "page", 1.5)
    sheet.words(35, y + 12, "fsdp: each chip has its own rows of the batch.", 18, "ink", bold=True)
    sheet.words(865, y + 12, "The weights travel.", 18, "red", "end", bold=True)
    y += 64
    _matrix(sheet, 35, y, "W, stored", BY_ROWS, ROW_DIGITS)
    gathered = 432 + 2 * SIDE  # over the middle of W, for a moment
    sheet.arrow([(147, y + 2 * SIDE), (214, y + 2 * SIDE), (214, y - 19), (gathered, y - 19),
                 (gathered, y - 3)], "red", 4)
    sheet.words(342, y - 29, "all-gather", 17, "red", "middle", bold=True)
    _matrix(sheet, 290, y, "x, the batch", BY_ROWS, ROW_DIGITS)
    _sign(sheet, 413, y, "·")
    _matrix(sheet, 432, y, "W, for a moment", ALL_GRAY)
    _sign(sheet, 556, y, "=")
    _matrix(sheet, 576, y, "y", BY_ROWS, ROW_DIGITS)
    sheet.lines(702, y + 18, [
        "Backward, W is", "gathered again;", "gradients of A, B", "are added up."], 23, size=17,
                color="soft")


def _by_tp(sheet: Sheet, y: float) -> None:
    sheet.line([(35, y - 18), (865, y - 18)], "page", 1.5)
    sheet.words(35, y + 12, "tp: each chip has its own columns of W.", 18, "ink", bold=True)
    y += 36
    _matrix(sheet, 35, y, "W, stored", BY_COLUMNS, COLUMN_DIGITS)
    sheet.lines(210, y + 48, ["no exchange", "so far"], 20, size=17, color="soft", anchor="middle")
    _matrix(sheet, 290, y, "x, the batch", ALL_GRAY)
    _sign(sheet, 413, y, "·")
    _matrix(sheet, 432, y, "W", BY_COLUMNS, COLUMN_DIGITS)
    _sign(sheet, 556, y, "=")
    _matrix(sheet, 576, y, "y", BY_COLUMNS, COLUMN_DIGITS)
    sheet.lines(702, y + 18, [
        "The next matrix,", "V, is cut by rows:", "each chip gets", "only a partial sum."], 23,
                size=17, color="soft")
    y += 158
    sheet.words(865, y - 12, "The activations travel.", 18, "red", "end", bold=True)
    _matrix(sheet, 35, y, "y", BY_COLUMNS, COLUMN_DIGITS)
    _sign(sheet, 152, y, "·")
    _matrix(sheet, 165, y, "V", BY_ROWS, ROW_DIGITS)
    _sign(sheet, 284, y, "=")
    _partial_sums(sheet, 300, y)
    _travel(sheet, 454, y, 80, "reduce-", "scatter")
    _matrix(sheet, 546, y, "the sums", BY_COLUMNS, COLUMN_DIGITS)
    _travel(sheet, 660, y, 80, "all-", "gather")
    _matrix(sheet, 752, y, "the next x", ALL_GRAY)


def _partial_sums(sheet: Sheet, x: float, y: float) -> None:
    """Four whole matrices, one on each chip, still to be added."""
    for place, color in enumerate(CHIPS):
        left, top = x + 17 * place, y + 17 * place
        sheet.rectangle(left, top, 92, 53, color, radius=0)
        sheet.words(left + 7, top + 14, DIGITS[place], 16, color, bold=True)
    sheet.words(x + 72, y + 4 * SIDE + 22, "four partial sums", 17, "ink", "middle")


# ── 5. kv_einsum comes apart (04) ──
HEADS = 4  # that the drawing shows; the 31B has 16


def kv() -> Sheet:
    """One Tunix array and its adapter become two Hugging Face matrices with two adapters."""
    module = modules_31b()["kv_einsum"]
    _, heads, size = module.outputs
    width, = module.inputs
    shapes = {name.rpartition(".")[2]: shape for name, shape in module.names.items()}
    rows, columns = shapes["k_proj"]
    sheet = Sheet(
        "kv_einsum", 544, "kv_einsum comes apart",
        f"Tunix stores the projections to keys and values of a sliding layer as one array "
        f"[2, K, D, H], in the 31B [2, {heads}, {width}, {size}]. The first half is the keys', the "
        f"second the values'. Each head's [D, H] is turned and the heads are stacked: k_proj and "
        f"v_proj are [K·H, D], [{rows}, {columns}]. Of the adapter, both matrices share A [D, r]; "
        "B [r, 2, K, H] comes apart into two matrices [r, K·H].")
    sheet.words(35, 40, "kv_einsum comes apart", 21, bold=True)
    sheet.words(35, 78, "Tunix: one array", 18, bold=True)
    sheet.words(35, 102, f"[2, K, D, H], in the 31B [2, {heads}, {width:,}, {size}]", 17, "soft")
    sheet.words(575, 78, "Hugging Face: two matrices", 18, bold=True)
    sheet.words(575, 102, f"[K·H, D], in the 31B [{rows:,}, {columns:,}]", 17, "soft")
    _kv_weights(sheet, 130)
    _kv_adapters(sheet, 398)
    return sheet


KEYS, VALUES = "blue", "orange"


def _heads(sheet: Sheet, x: float, y: float, color: str) -> None:
    """The heads of one half as Tunix has them: side by side, each [D, H]."""
    for head in range(HEADS):
        left = x + 34 * head
        sheet.rectangle(left, y, 28, 120, color, radius=0)
        sheet.words(left + 14, y + 66, DIGITS[head], 17, color, "middle", bold=True)


def _kv_weights(sheet: Sheet, y: float) -> None:
    """The frozen weight of both: heads are turned and stacked."""
    for x, color, name, title, top in ((60, KEYS, "c = 0: keys", "k_proj", y),
                                        (230, VALUES, "c = 1: values", "v_proj", y)):
        _heads(sheet, x, top + 26, color)
        sheet.words(x + 65, top + 16, name, 17, color, "middle", bold=True)
    sheet.words(50, y + 92, "D", 17, "soft", "end")
    sheet.words(74, y + 168, "H", 17, "soft", "middle")
    drawn = [f"drawn: {HEADS} of K heads;", "D inputs, H numbers a head"]
    sheet.lines(200, y + 192, drawn, size=17, color="soft", anchor="middle")
    sheet.arrow([(390, y + 86), (548, y + 86)], "ink", 3)
    sheet.lines(469, y + 44, ["each head is", "turned: [H, D]"], size=17, anchor="middle")
    sheet.lines(469, y + 116, ["then stacked,", "in the same order"], size=17, anchor="middle")
    for x, color, name in ((600, KEYS, "k_proj"), (745, VALUES, "v_proj")):
        for head in range(HEADS):
            top = y + 26 + 28 * head
            sheet.rectangle(x, top, 120, 28, color, radius=0)
            sheet.words(x + 60, top + 20, DIGITS[head], 17, color, "middle", bold=True)
        sheet.words(x + 60, y + 16, name, 17, color, "middle", bold=True)
    sheet.words(592, y + 88, "K·H", 17, "soft", "end")
    sheet.words(660, y + 162, "D", 17, "soft", "middle")
    sheet.words(805, y + 162, "D", 17, "soft", "middle")


def _kv_adapters(sheet: Sheet, y: float) -> None:
    """The adapter of both: A is shared, B comes apart."""
    sheet.line([(35, y - 36), (865, y - 36)], "page", 1.5)
    sheet.words(35, y - 6, "Its adapter: A is shared, B comes apart", 18, bold=True)
    y += 20
    sheet.rectangle(60, y, 10, 104, "purple", radius=0)
    sheet.words(84, y + 58, "A [D, r]", 17, "purple")
    for x, color in ((180, KEYS), (276, VALUES)):
        for head in range(HEADS):
            sheet.rectangle(x + 23 * head, y + 46, 23, 10, color, radius=0, line=1)
    sheet.words(226, y + 38, "keys", 17, KEYS, "middle")
    sheet.words(322, y + 38, "values", 17, VALUES, "middle")
    sheet.words(274, y + 82, "B [r, 2, K, H]", 17, "ink", "middle")
    sheet.arrow([(390, y + 51), (548, y + 51)], "ink", 3)
    sheet.words(469, y + 38, "B is split", 17, "ink", "middle")
    for x, color, name in ((600, KEYS, "k_proj"), (745, VALUES, "v_proj")):
        sheet.rectangle(x, y, 10, 104, "purple", radius=0)
        sheet.rectangle(x + 22, y + 46, 92, 10, color, radius=0)
        sheet.words(x + 68, y + 38, "B", 17, color, "middle", bold=True)
        sheet.words(x + 68, y + 82, "[r, K·H]", 17, color, "middle")
        sheet.words(x + 22, y + 12, "A", 17, "purple", bold=True)


# ── 6. Prefill and decode in a batch (05) ──
STEP, STEPS = 58, 12  # width of a step, and how many are drawn
LEFT = 150            # where step 1 begins


def batch() -> Sheet:
    """Five requests in a server with room for three: continuous batching, and waiting for all."""
    # arrives, prefill in step, last token in step
    lanes = ((1, 1, 5), (1, 1, 10), (2, 2, 6), (3, 6, 11), (4, 7, 10))
    together = ((1, 2, 6), (1, 2, 11), (2, 2, 6), (3, 12, 13), (4, 12, 13))
    done = max(last for _, _, last in lanes)
    left = sum(prefill > done for _, prefill, _ in together)
    sheet = Sheet(
        "batch", 682, "Five requests, room for three",
        "Requests are lanes and steps are columns. Continuous batching: requests 1 and 2 are "
        "prefilled in step 1, request 3 in step 2; each makes one token a step. Request 1 ends in "
        "step 5, so request 4, which waits since step 3, is prefilled in step 6. Request 3 ends "
        "in step 6, so request 5 is prefilled in step 7. All five are answered after step 11. A "
        "batch that waits for its longest answer leaves places idle and starts requests 4 and 5 "
        "in step 12 only.")
    sheet.words(35, 40, f"Room for three: 5 answers by step {done}, or {left} not begun", 21,
                bold=True)
    _batch_legend(sheet)
    sheet.words(35, 116, "Continuous batching: requests come and go between two steps", 18,
                bold=True)
    _steps(sheet, 146)
    _lanes(sheet, 158, lanes)
    _marks(sheet, 158)
    sheet.line([(35, 424), (865, 424)], "page", 1.5)
    sheet.words(35, 455, "Without it, a batch begins together and waits for its longest answer",
                18, bold=True)
    _steps(sheet, 486)
    _lanes(sheet, 498, together, idle=11, low=True)
    return sheet


def _batch_legend(sheet: Sheet) -> None:
    sheet.rectangle(35, 56, 20, 18, "orange", radius=3)
    sheet.words(63, 71, "prefill: the prompt, and the answer's first token", 16)
    sheet.rectangle(455, 56, 20, 18, "blue", radius=3)
    sheet.words(483, 71, "decode: one token", 16)
    sheet.line([(660, 65), (688, 65)], "soft", 2, dashed=True)
    sheet.words(696, 71, "waits", 16)


def _steps(sheet: Sheet, y: float) -> None:
    sheet.words(35, y, "step", 16, "soft")
    for step in range(STEPS):
        sheet.words(LEFT + STEP * (step + 0.5), y, str(step + 1), 16, "soft", "middle")


def _lanes(sheet: Sheet, y: float, lanes: tuple[tuple[int, int, int], ...], idle: int = 0,
           low: bool = False) -> None:
    """One lane for each request: it waits, is prefilled, is decoded.

    Args:
      y: the top.
      lanes: (arrives in step, is prefilled in step, has its last token in step).
      idle: the step until which the places of finished requests stay empty.
      low: lanes as low as can be read.
    """
    pitch, high = (32, 24) if low else (42, 30)
    for place, (arrives, prefill, last) in enumerate(lanes):
        top = y + pitch * place
        sheet.words(35, top + high / 2 + 6, f"request {place + 1}", 17, "ink")
        if arrives < prefill:
            sheet.line([(LEFT + STEP * (arrives - 1) + 4, top + high / 2),
                        (LEFT + STEP * (prefill - 1) - 4, top + high / 2)], "soft", 2, dashed=True)
        for step in range(prefill, min(last, STEPS) + 1):
            color = "orange" if step == prefill else "blue"
            sheet.rectangle(LEFT + STEP * (step - 1) + 3, top, STEP - 6, high, color, radius=4)
        if last < idle and prefill < idle:
            left = LEFT + STEP * last + 3
            sheet.outline(left, top, STEP * (idle - last) - 6, high, "soft", radius=4)
            sheet.words(left + STEP * (idle - last) / 2 - 3, top + high / 2 + 6, "idle", 16, "soft",
                        "middle")


def _marks(sheet: Sheet, y: float) -> None:
    """Where a place goes to the next request, and the two waits that a user feels."""
    for step, lane, to in ((5, 0, 3), (6, 2, 4)):
        x = LEFT + STEP * step
        start, end = y + 42 * lane + 15, y + 42 * to + 15
        sheet.line([(x, start), (x, end)], "green", 3)
        sheet.circle(x, start, 5, "green", 2.5)
        sheet.circle(x, end, 5, "green", 2.5)
        sheet.words(x + 16, start + 6, f"ends: its place goes to {to + 1}", 16, "green")
    _bracket(sheet, y + 216, 3, 6, "request 4: time to first token")
    _bracket(sheet, y + 216, 10, 10, "request 2: time per token")


def _bracket(sheet: Sheet, y: float, first: int, last: int, text: str) -> None:
    """A wait, from the beginning of one step to the end of another."""
    start, end = LEFT + STEP * (first - 1), LEFT + STEP * last
    sheet.line([(start + 3, y), (start + 3, y + 10), (end - 3, y + 10), (end - 3, y)], "ink", 2)
    sheet.words((start + end) / 2, y + 30, text, 16, "ink", "middle")


# ── 7. The judge (07) ──
def judge() -> Sheet:
    """The exam and the grading: two programs, and no answer is in the one that decides."""
    sheet = Sheet(
        "judge", 420, "A judge in two programs",
        "Exam: a testbench, whose names are drawn anew, asks the answer and notes its outputs. "
        "What the answer prints is thrown away. Grading: in a second program testbench and "
        "reference run, and a recording replays the outputs in the answer's place. Only the second "
        "program gives the verdict.")
    sheet.words(35, 40, "An answer never meets the reference", 21, bold=True)
    sheet.words(35, 82, "1. The exam: one program", 18, bold=True)
    sheet.words(575, 82, "2. The grading: another", 18, bold=True)
    for x, width in ((35, 330), (575, 290)):
        sheet.outline(x, 98, width, 166, "soft", radius=8)
    for x, width, y, color, text in (
            (51, 298, 112, "blue", "testbench, its names drawn anew"),
            (51, 298, 161, "orange", "the answer"),
            (51, 298, 210, "blue", "a recorder notes the outputs"),
            (591, 258, 112, "blue", "testbench"),
            (591, 258, 161, "blue", "reference"),
            (591, 258, 210, "blue", "a recording of the outputs")):
        sheet.rectangle(x, y, width, 40, color, radius=6)
        sheet.words(x + width / 2, y + 26, text, 17, "ink", "middle")
    sheet.arrow([(353, 230), (587, 230)], "ink", 3)
    sheet.words(470, 218, "the outputs", 17, "ink", "middle")
    sheet.lines(470, 256, ["and no word", "of the answer"], 20, size=16, color="soft",
                anchor="middle")
    sheet.arrow([(720, 268), (720, 304)], "green", 4)
    sheet.rectangle(591, 308, 258, 44, "green", radius=8, line=2.5)
    sheet.words(720, 336, "verdict: pass or fail", 18, "green", "middle", bold=True)
    sheet.arrow([(200, 268), (200, 304)], "soft", 2, dashed=True)
    sheet.lines(35, 325, ["What the answer prints is thrown away.",
                          "What the compiler says can only fail it."], 23, size=17, color="soft")
    sheet.rectangle(35, 376, 18, 18, "blue", radius=3)
    sheet.words(63, 391, "ours and the benchmark's", 17)
    sheet.rectangle(290, 376, 18, 18, "orange", radius=3)
    sheet.words(318, 391, "untrusted", 17)
    return sheet


# ── 8. Rates and passes (OWN_DATA) ──
def recipes() -> Sheet:
    """Loss and solved problems after each pass over few rows, from data/recipes/."""
    sheet = Sheet(
        "recipes", 700, "Which learning rate, and how many passes over few rows?",
        "Two panels for each of two LoRA ranks, 4 and 32. Above, the loss of held-out and of "
        "trained rows after one to eight passes; below, how many of 38 problems the tiny model "
        "solves after two and after eight, at three learning rates.")
    sheet.words(30, 42, _recipes_title(), 22, bold=True)
    for place, (rate, color) in enumerate(RATES.items()):
        x = 30 + 160 * place
        sheet.line([(x, 74), (x + 34, 74)], color, 4)
        sheet.words(x + 42, 80, f"rate {rate}", 17)
    sheet.line([(510, 74), (544, 74)], "ink", 2.5, dashed=True)
    sheet.words(552, 80, "trained rows", 17)
    sheet.line([(690, 74), (724, 74)], "ink", 1.5)
    sheet.circle(707, 74, 5, "ink")
    sheet.words(732, 80, "second seed", 17)
    for rank, left in (("4", 80.0), ("32", 520.0)):
        _recipes_of_rank(sheet, rank, left)
    sheet.words(30, 656, "Solid: held-out rows; a ring: the least loss of the first seed.", 16,
                "soft")
    sheet.words(30, 680, "Measured at size tiny on a CPU (data/recipes/).", 16, "soft")
    return sheet


def _recipes_title() -> str:
    """After how many passes the held-out loss of the highest rate is at its least, at most."""
    highest = max(RATES, key=float)
    least = []
    for path in RECIPES.glob(f"*-rate{highest}-seed42.csv"):
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        best = min(rows, key=lambda row: float(row["held_out"]))
        least.append(int(best["epochs"]))
    return (f"At a rate of {highest}, held-out loss rises after {max(least)} passes "
            "at the latest")


def _recipes_of_rank(sheet: Sheet, rank: str, left: float) -> None:
    """Both panels of one rank, and all of its runs."""
    sheet.words(left, 116, f"rank {rank}: loss per token (nats)", 17, bold=True)
    sheet.words(left, 406, "problems solved, of 38", 17, bold=True)
    for loss in (0.01, 0.1, 1.0):
        _tick(sheet, left, _at_loss(loss), f"{loss:g}")
    for solved in (0, 10, 20, 30):
        _tick(sheet, left, _at_solved(solved), f"{solved}")
    for passes in (1, 2, 4, 8):
        for baseline in (372, 604):
            sheet.words(_at_passes(left, passes), baseline, f"{passes}", 16, "soft", "middle")
    sheet.words(left + ACROSS / 2, 628, "passes over eight packed rows", 16, "soft", "middle")
    for path in sorted(RECIPES.glob(f"rank{rank}-*.csv")):
        with path.open(encoding="utf-8") as file:
            _draw_recipe(sheet, left, list(csv.DictReader(file)))


def _draw_recipe(sheet: Sheet, left: float, rows: list[dict[str, str]]) -> None:
    """One run in the two panels of its rank."""
    color = RATES[rows[0]["rate"]]
    is_first = rows[0]["seed"] == "42"
    dot = f"{color}-solid" if is_first else color
    held_out, trained, solved = [], [], []
    for row in rows:
        x = _at_passes(left, int(row["epochs"]))
        held_out.append((x, _at_loss(float(row["held_out"]))))
        trained.append((x, _at_loss(float(row["loss"]))))
        if row["passed"]:
            solved.append((x, _at_solved(int(row["passed"]))))
    width = 3 if is_first else 1.5
    sheet.line(trained, color, 1.5, dashed=True)
    for points in (held_out, solved):
        sheet.line(points, color, width)
        for x, y in points:
            sheet.circle(x, y, 5, dot)
    if is_first:
        x, y = max(held_out, key=lambda point: point[1])  # y grows downward
        sheet.circle(x, y, 10, f"{color}-line", 2)


def _tick(sheet: Sheet, left: float, y: float, text: str) -> None:
    """A line across a panel, with its number to the left."""
    sheet.line([(left, y), (left + ACROSS, y)], "gray", 1)
    sheet.words(left - 10, y + 6, text, 16, "soft", "end")


def _at_passes(left: float, passes: int) -> float:
    """x of a number of passes, on a scale of logarithms."""
    return round(left + ACROSS * math.log2(passes) / 3, 1)


def _at_loss(loss: float) -> float:
    """y of a loss from 0.004 to 2, on a scale of logarithms."""
    return round(350 - 220 * math.log(loss / 0.004) / math.log(2 / 0.004), 1)


def _at_solved(solved: int) -> float:
    """y of a number of solved problems from 0 to 30."""
    return round(580 - 5 * solved, 1)


DRAWINGS: dict[str, Callable[[], Sheet]] = {
    "road": road, "lora": lora, "slice": slices, "shards": shards, "kv_einsum": kv,
    "batch": batch, "judge": judge, "recipes": recipes}


def write(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def main() -> None:
    """Draw those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DRAWINGS))
    names = parser.parse_args().names or list(DRAWINGS)
    for name in names:
        if name not in DRAWINGS:
            parser.error(f"no drawing is called {name!r}; there are {', '.join(DRAWINGS)}")
        write(FOLDER / f"{name}.svg", DRAWINGS[name]().text())
        print(f"drew assets/figures/{name}.svg")


if __name__ == "__main__":
    main()
