"""Figures that several notebooks share: coloured tokens and packed rows, and the study of lengths.

    .venv/bin/python -m pytest tests/test_style.py
"""

import matplotlib
import numpy as np
import pytest

from helpers import packing, style

matplotlib.use("agg")


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """The figures that are shown, kept open."""
    import matplotlib.pyplot as plt
    figures = []
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setattr(plt, "show", lambda: figures.append(plt.gcf()))
    yield figures
    plt.close("all")


def test_tokens_are_drawn_in_the_colour_of_what_is_done_with_them(shown, tmp_path):
    pieces, mask = ["<bos>", "ask\n", "module", " m;\n  ", "$x$", "end"], [False] * 2 + [True] * 4
    style.show_tokens(pieces, mask, "tokens", "a title", columns=10)
    ax = shown[0].axes[0]
    drawn = {text.get_text(): text for text in ax.texts}
    assert list(drawn) == ["<bos>", "ask↵", "module", "·m;↵··", "$x$", "end"]
    colors = [patch.get_facecolor() for patch in ax.patches[:len(pieces)]]
    assert len(set(colors[:2])) == 1 and len(set(colors[2:])) == 1 and colors[0] != colors[2]
    assert matplotlib.colors.same_color(colors[2], style.BLUE)
    assert drawn["module"].get_position()[1] > drawn["<bos>"].get_position()[1]  # another line
    assert (tmp_path / "figures" / "tokens.png").stat().st_size > 1_000


def test_packed_rows_are_drawn_place_by_place():
    ids = [np.ones(n, np.int32) for n in (6, 3, 5)]
    masks = [np.arange(len(row)) >= 2 for row in ids]
    packed = packing.pack_arrays(ids, masks, 8, 0)
    fig, ax = style.figure()
    packing.draw_rows(ax, packed, "rows")
    drawn = np.zeros(packed["tokens"].shape, int)
    for bars in ax.collections:
        for path in bars.get_paths():
            box = path.get_extents()
            drawn[round(box.y0 + 0.4), round(box.x0):round(box.x1)] += 1
    assert np.array_equal(drawn, (packed["segment_ids"] > 0) + 1 * packed["loss_mask"])


def test_length_study_by_hand():
    table = packing.length_study(np.array([4, 4, 8]), [4, 8], 8, 0)
    assert table["examples kept"].tolist() == pytest.approx([2 / 3, 1])
    assert table["padding, one per row"].tolist() == pytest.approx([0, 1 - 16 / 3 / 8])
    assert table["real tokens, packed"].tolist() == [1.0, 1.0]
