"""00: its experiment with the mask runs, and what it says of its counter is so."""

import re

import jax
import jupytext
import numpy as np
from conftest import ROOT

import verilog
from helpers import chat, data, gemma, packing, train

PAGE = ROOT / "00_quickstart.py"
BASE = "assets/tiny_gemma4"


def code_of(beginning):
    """The one line of 00's code that begins like this."""
    cells = [cell.source for cell in jupytext.read(PAGE).cells if cell.cell_type == "code"]
    found = [line for line in "\n".join(cells).splitlines() if line.startswith(beginning)]
    assert len(found) == 1, found
    return found[0]


def test_the_experiment_with_the_wrong_mask_runs_and_its_picture_shows_the_mask():
    """A full row had 512 trained tokens, of which only 511 can be predicted, and that crashed."""
    edited = re.search(r"(?m)^#    (fitting = .+)$", PAGE.read_text())[1]
    shown = code_of("ids, mask = min(fitting")  # the picture draws the masks that are trained
    tokenizer = chat.load_tokenizer(BASE)
    cleaned = [data.clean(row)[0] for row in data.read_rows("data/tiny")[:200]]
    chats = [data.as_messages(example, "") for example in cleaned if example]
    space = {"rendered": chat.render_chats(tokenizer, chats), "packing": packing}
    exec(f"{edited}\n{code_of('all_ids, all_masks = ')}\n{code_of('rows = packing')}\n{shown}\n"
         f"{code_of('most_trained = ')}", space)
    assert space["mask"] == [False] + [True] * (len(space["ids"]) - 1)
    lengths = space["rows"]["segment_ids"].astype(bool).sum(-1)
    assert lengths.max() == 512, "no row is full, so this proves nothing"

    config = gemma.config_from_hf(BASE, dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    base = gemma.load_base(BASE, config, mesh)
    fullest = np.argsort(lengths)[-1:]
    batch = train.Batch(**{name: array[fullest] for name, array in space["rows"].items()})
    total, count = train.make_loss(capacity=space["most_trained"])(base, batch)
    trained = int(batch.loss_mask[:, 1:].sum())
    assert count == trained and 0 < float(total) / trained < np.log(config.num_embed) + 1

    space["rows"]["loss_mask"][:] = True  # as the experiment once said
    exec(code_of("most_trained = "), space)
    assert space["most_trained"] == 511


def test_a_request_for_nearly_the_same_counter_is_among_those_that_00_trains_on():
    """00 says so: another width, and other names for the module and its output."""
    problems = verilog.load_problems("data/tiny_eval")
    counter = next(found.prompt for found in problems if "counter state goes up" in found.prompt)
    asked = [row["prompt"] for row in data.read_rows("data/tiny")[:1_500]]
    _, closest = data.overlap(asked, {"counter": counter})
    _, place = closest["counter"]
    near = asked[place]
    for theirs, ours in (("named part", "named TopModule"), ("(8 bits)", "(16 bits)")):
        assert theirs in near
        near = near.replace(theirs, ours)
    assert re.sub(r"\bq\b", "state", near).split() == counter.split()


def test_one_training_request_differs_from_the_counters_in_its_width_alone():
    """00 and 02 say so, and 00 trains on the first 1,500 rows, without that one."""
    problems = verilog.load_problems("data/tiny_eval")
    counter = next(found.prompt for found in problems if "counter state goes up" in found.prompt)
    twin = counter.replace("(16 bits)", "(32 bits)").split()
    asked = [row["prompt"].split() for row in data.read_rows("data/tiny")]
    assert len(asked) == 4_000 and asked.count(twin) == 1 and asked.index(twin) >= 1_500
