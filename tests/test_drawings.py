"""The drawings of the pages: they are current, true, readable, and shown."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import drawings
import pandas as pd
import pytest
import snapshots
import svg
from conftest import ROOT
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from verilog.extraction import port_names

SPACE = "{http://www.w3.org/2000/svg}"
FIGURES = ROOT / "assets" / "figures"
PAGES = [*sorted(ROOT.glob("[0-9]*_*.py")), ROOT / "README.md", ROOT / "docs" / "OWN_DATA.md"]
NAMES = sorted(drawings.DRAWINGS)


def words_of(text):
    """The text elements of an SVG file."""
    return list(ET.fromstring(text).iter(f"{SPACE}text"))


def box_of(element):
    """(left, top, right, bottom) of a line of text in DejaVu, wider than Arial and Helvetica."""
    family = "DejaVu Sans Mono" if "Mono" in element.get("font-family", "") else "DejaVu Sans"
    weight = element.get("font-weight", "normal")
    path = font_manager.findfont(font_manager.FontProperties(family=family, weight=weight))
    size = float(element.get("font-size"))
    font = FT2Font(path)
    font.set_size(size, 72)
    font.set_text(element.text or "")
    wide = font.get_width_height()[0] / 64
    x, y = float(element.get("x")), float(element.get("y"))
    left = x - {"start": 0, "middle": wide / 2, "end": wide}[element.get("text-anchor")]
    return left, y - 0.72 * size, left + wide, y + 0.1 * size


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_what_the_program_draws_from_the_tables_of_today(name):
    stored = (FIGURES / f"{name}.svg").read_text()
    assert stored == drawings.DRAWINGS[name]().text(), f".venv/bin/python tools/drawings.py {name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_can_be_read_on_a_phone_in_the_dark_and_aloud(name):
    text = (FIGURES / f"{name}.svg").read_text()
    root = ET.fromstring(text)
    assert root.find(f"{SPACE}title").text and len(root.find(f"{SPACE}desc").text) > 80
    assert root.get("viewBox").startswith("0 0 900 ")
    assert min(float(line.get("font-size")) for line in words_of(text)) >= 16
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    looks = set(re.findall(r'class="([\w-]+)"', text))
    for look in looks:
        assert f" .{look} {{" in light and f" .{look} {{" in dark, look
    for element in root.iter():  # and where a page takes the style block away
        if "class" in element.attrib:
            assert re.fullmatch(r"none|#[0-9A-F]{6}", element.get("fill")), element.attrib


@pytest.mark.parametrize("name", NAMES)
def test_no_words_leave_the_sheet_or_meet_others_even_in_a_wide_font(name):
    text = (FIGURES / f"{name}.svg").read_text()
    lines = words_of(text)
    boxes = [box_of(line) for line in lines]
    height = float(ET.fromstring(text).get("height"))
    for line, (left, top, right, bottom) in zip(lines, boxes, strict=True):
        assert left > 15 and right < 885 and top > 10 and bottom < height - 8, line.text
    for place, (line, one) in enumerate(zip(lines, boxes, strict=True)):
        for other, two in zip(lines[place + 1:], boxes[place + 1:], strict=True):
            apart = (one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1])
            assert apart, f"{line.text!r} meets {other.text!r}"


def test_contrast_of_words_is_enough():
    """4.5 to 1, as WCAG asks of ordinary text, on the sheet and on a surface of the same color."""
    def light(color):
        parts = []
        for place in (1, 3, 5):
            part = int(color[place:place + 2], 16) / 255
            parts.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for colors in (svg.LIGHT, svg.DARK):
        for name, color in colors.items():
            for ground in (color.fill, colors["page"].fill):
                low, high = sorted((light(color.words), light(ground)))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)


def test_every_drawing_is_shown_with_words_for_those_who_cannot_see_it():
    shown = {}
    for page in PAGES:
        for words, name in re.findall(r"!\[([^\]]*)\]\((?:\.\./)?assets/figures/(\w+)\.svg\)",
                                      page.read_text()):
            assert (FIGURES / f"{name}.svg").exists(), (page.name, name)
            assert len(words) > 20, (page.name, name)
            shown.setdefault(name, []).append(page.name)
        for name in re.findall(r'SVG\("assets/figures/(\w+)\.svg"\)', page.read_text()):
            shown.setdefault(name, []).append(page.name)
    assert set(NAMES) <= set(shown), set(NAMES) - set(shown)
    assert {"README.md", "00_quickstart.py"} <= set(shown["road"])


def test_what_a_chip_holds_adds_up_to_the_compiled_table():
    for name, base in (("v5e-8", "int8"), ("v5p-8", "bfloat16")):
        held = drawings._filled(name, base)
        table = pd.read_csv(ROOT / "data" / "dryrun" / f"{name}_31b.csv")
        total = held.weights + held.adapters + held.temporaries
        assert (table.hbm_gib - total).abs().min() < 0.01
        assert 0 < held.free == pytest.approx(held.limit - total)
        assert 0.5 < held.adapters < held.weights


def test_the_cuts_that_are_drawn_are_those_of_the_model():
    """`shards`: fsdp cuts the rows of W, tp its columns; V, which comes after, the other way."""
    import jax
    from jax.sharding import PartitionSpec as P

    from helpers import gemma
    config = gemma.config_from_hf("assets/tiny_gemma4", num_layers=1)
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    mlp = gemma.abstract_base(config, mesh).layers[0].mlp
    assert mlp.gate_proj.kernel.get_value().sharding.spec == P("fsdp", "tp")  # [D, F]
    assert mlp.down_proj.kernel.get_value().sharding.spec == P("tp", "fsdp")  # [F, D]


def test_lora_is_drawn_to_scale():
    root = ET.fromstring((FIGURES / "lora.svg").read_text())
    sizes = {(round(float(box.get("width")), 1), round(float(box.get("height")), 1))
             for box in root.iter(f"{SPACE}rect")}
    # Hugging Face's q_proj.weight of a sliding layer: [32 * 256, 5376]; the rank is 64
    assert {(409.6, 268.8), (3.2, 268.8), (409.6, 3.2)} <= sizes


# ── snapshots.py ──
STRANGE = "& <b>\x00\tmodule\x1b[0m " + "long " * 40
PAIRS = [(0, " state to 0.\n"), (5, STRANGE), (36, "module M;\nendmodule")]
SHOTS = [snapshots.Snapshot(0, PAIRS[0][1], False, "FAIL: no code"),
         snapshots.Snapshot(5, STRANGE, False, "FAIL: 3 of 4", ("module",)),
         snapshots.Snapshot(36, PAIRS[2][1], True, "PASS: 0 mismatches")]


def seen_at(text, share):
    """The snapshots that are visible at a share of the animation's time."""
    visible = []
    frames = re.findall(r"@keyframes counter-(\d+) \{ (.*) \}\n", text)
    for place, rules in frames:
        for span, opacity in re.findall(r"([\d.%, ]+)\{ opacity: (\d) \}", rules):
            ends = [float(end) for end in re.findall(r"[\d.]+", span)]
            if opacity == "1" and ends[0] <= 100 * share <= ends[-1]:
                visible.append(int(place))
    return visible


def test_snapshots_take_turns_and_each_has_its_verdict():
    text = snapshots.animate(SHOTS, "Count up & down")
    for share, place in ((0.05, 0), (0.3, 1), (0.5, 2), (0.9, 2), (1.0, 2)):
        assert seen_at(text, share) == [place]
    groups = {group.get("class"): group for group in ET.fromstring(text).iter(f"{SPACE}g")}
    for place, shot in enumerate(SHOTS):
        words = "".join(groups[f"shot-{place}"].itertext())
        assert [other.verdict in words for other in SHOTS] == [other is shot for other in SHOTS]
        underlined = groups[f"shot-{place}"].findall(f"{SPACE}path")
        assert len(underlined) == (place == 1)
    assert "endmodule" in words
    # Without animation, and without any style, the last is seen and no other.
    assert re.findall(r"\.shot-(\d) \{ opacity: 1;", text) == ["2"]
    assert [groups[f"shot-{place}"].get("opacity") for place in range(3)] == ["0", "0", "1"]
    assert "prefers-reduced-motion" in text and "�" in text and "\x1b" not in text
    for group in groups.values():
        for line in group.iter(f"{SPACE}text"):
            assert box_of(line)[2] < snapshots.WIDTH - 15, line.text


def test_names_of_ports_are_found_whatever_stands_before_them():
    text = """module T(input [3:0] a, output reg signed [15:0] state = 0, inout wire b);
    // input nothing"""
    assert port_names(text) == ["a", "state", "b"]


def test_the_headline_says_from_where_on_every_answer_passes():
    def title(*passed):
        return snapshots.headline([snapshots.Snapshot(step, "", good, "")
                                   for step, good in enumerate(passed)])

    assert title(False, False, True, True) == "After 2 training steps the answer passes"
    assert title(False, True, False, True) == "After 3 training steps the answer passes"
    assert title(True, False) == "After 1 training steps it still fails"


def test_snapshots_that_are_none_are_refused():
    for steps in ([], [5, 5], [9, 1]):
        shots = [snapshots.Snapshot(step, "a", True, "PASS") for step in steps]
        with pytest.raises(ValueError, match="steps"):
            snapshots.animate(shots)


def test_the_program_has_answers_judged_and_writes_an_animation_or_one_line(tmp_path):
    def draw(content):
        given, made = tmp_path / "shots.json", tmp_path / "counter.svg"
        made.unlink(missing_ok=True)
        given.write_text(content)
        done = subprocess.run([sys.executable, "tools/snapshots.py", given, "-o", made],
                              cwd=ROOT, capture_output=True, text=True)
        return done, made

    told = json.loads((FIGURES / "counter.json").read_text())
    right = told["snapshots"][-1][1]
    wrong = right.replace("state - 1", "state - 2")
    done, made = draw(json.dumps({**told, "snapshots": [[1, wrong], [2, right]]}))
    assert done.returncode == 0, done.stderr
    assert re.search(r"FAIL: \d+ of 406 samples are wrong", made.read_text())
    assert "PASS: all 406 samples are right" in made.read_text()
    for bad in ("{", "[]", "{}", json.dumps({**told, "snapshots": [[1]]}),
                json.dumps({**told, "request": "Count."})):
        done, made = draw(bad)
        assert done.returncode == 2 and "holds no snapshots" in done.stderr, bad
        assert "Traceback" not in done.stderr and not made.exists()


def test_the_counter_of_the_readme_is_what_the_judge_says_of_its_snapshots():
    told = json.loads((FIGURES / "counter.json").read_text())
    shots = snapshots.judged([tuple(pair) for pair in told["snapshots"]], told["request"])
    drawn = snapshots.animate(shots, told["request"])
    assert (FIGURES / "counter.svg").read_text() == drawn, "tools/snapshots.py, then look at it"
    assert [shot.passed for shot in shots] == sorted(shot.passed for shot in shots)
