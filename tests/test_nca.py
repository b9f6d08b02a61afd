"""Cellular automata as training data: rules by hand, tokens, guessers, transfer, the runs."""

import dataclasses
import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from flax import nnx

from appendix import nca, pretrain, runs
from appendix import nca_runs as lab
from appendix.world import make

pytestmark = pytest.mark.laboratory

WORLD = nca.World(states=4, side=8, frames=10)

# -- Rules whose films one can work out -----------------------------------------------------------

def test_a_film_is_the_rule_applied_again_and_again_after_the_burn_in():
    """The rule "take the state of the neighbor on the right": one kernel position passes."""
    kernel = np.zeros((3, 3, 4, 4), np.float32)
    kernel[1, 2] = np.eye(4)
    passing = np.eye(4, 16, dtype=np.float32)
    rule = nca.Rule(jnp.array(kernel), jnp.array(passing), jnp.array(passing.T))
    start = np.random.default_rng(3).integers(0, 4, (8, 8)).astype(np.int32)
    frames = np.asarray(nca.film(rule, start, WORLD))
    assert frames.shape == (WORLD.frames, 8, 8)
    for number, frame in enumerate(frames):
        np.testing.assert_array_equal(frame, np.roll(start, -(WORLD.burn_in + number), axis=1))


def test_random_rules_agree_with_a_circular_convolution_of_flax():
    rules, starts = nca.openings(5, 0, 8, WORLD)
    conv = nnx.Conv(4, 4, (3, 3), padding="CIRCULAR", use_bias=False, rngs=nnx.Rngs(0))
    for i in range(8):
        rule = jax.tree.map(lambda leaf, i=i: leaf[i], rules)
        conv.kernel.set_value(rule.kernel)
        logits = jax.nn.relu(conv(jax.nn.one_hot(starts[i], 4)) @ rule.hidden) @ rule.out
        np.testing.assert_array_equal(nca.next_frame(rule, starts[i]), logits.argmax(-1))


# -- Tokens ---------------------------------------------------------------------------------------

def test_patches_of_a_frame_worked_by_hand():
    frame = np.array([[0, 1, 3, 3],
                      [2, 3, 3, 3],
                      [0, 0, 1, 0],
                      [0, 1, 0, 0]])
    # 0·64 + 1·16 + 2·4 + 3 = 27; 255; 1; 64
    assert nca.patches(frame, 4).tolist() == [27, 255, 1, 64]
    assert nca.patches(frame[None, None], 10).tolist() == [[[123, 3333, 1, 1000]]]


def test_complexity_is_gzip_of_the_patch_numbers():
    static = np.zeros((1, WORLD.frames, 8, 8), np.uint8)
    noise = np.random.default_rng(0).integers(0, 4, static.shape).astype(np.uint8)
    raw = nca.patches(noise[0], 4).astype(np.int32).tobytes()
    scores = nca.complexity(np.concatenate([static, noise]), WORLD)
    assert len(raw) == WORLD.frames * 16 * 4
    assert scores[1] == len(gzip.compress(raw, 9)) / len(raw)
    assert scores[0] < 0.06 < 0.45 < scores[1]


def test_published_shares_of_rules_come_out_of_our_generator():
    """D = 10 on 12 x 12: 46% of random rules exceed 0.5 and 8 to 9% lie in 0.3 to 0.4."""
    world = nca.World(states=10, side=12)
    frames = np.asarray(nca.films(*nca.openings(0, 0, 600, world), world))
    scores = nca.complexity(frames, world)
    assert 0.40 < (scores > 0.5).mean() < 0.52
    assert 0.06 < ((scores > 0.3) & (scores < 0.4)).mean() < 0.13


# -- Guessers -------------------------------------------------------------------------------------

def test_a_guesser_that_counts_by_hand():
    """Two frames of four patches, two films; token by token in plain Python."""
    world = nca.World(side=4, frames=2)
    films = np.random.default_rng(0).integers(0, 2, (3, 2, 4, 4)).astype(np.uint8)
    patches = nca.patches(films, world.states)
    share = {p: float((patches == p).mean()) for p in np.unique(patches)}
    cost = 0.0
    for first, second in patches:
        past = first.tolist()
        for patch in second.tolist():
            cost -= np.log((past.count(patch) + 8 * share[patch]) / (len(past) + 8))
            past.append(patch)
    assert nca.counting(films, world) == pytest.approx(cost / (3 * world.frame_tokens))


def test_a_guesser_that_looks_up_by_hand():
    """Three frames of 4 x 4 cells: every pair of neighborhoods compared in plain Python."""
    world = nca.World(states=3, side=4, frames=3)
    frames = np.random.default_rng(1).integers(0, 3, (2, 3, 4, 4)).astype(np.uint8)

    def around(frame, row, column):
        return [frame[(row + i) % 4, (column + j) % 4] for i in (-1, 0, 1) for j in (-1, 0, 1)]
    places, cost = [(row, column) for row in range(4) for column in range(4)], 0.0
    for film in frames:
        for now in (1, 2):
            share = [1 + (film[:now] == state).sum() for state in range(3)]
            for place in places:
                odds = [0.03 * count / sum(share) for count in share]
                for then in range(1, now):
                    for other in places:
                        equal = sum(a == b for a, b in zip(around(film[now - 1], *place),
                                                           around(film[then - 1], *other)))
                        odds[film[then][other]] += np.exp(2.5 * (equal - 9))
                cost -= np.log(odds[film[now][place]] / sum(odds))
    assert nca.looking_up(frames, world) == pytest.approx(
        cost / (2 * 2 * world.frame_tokens), rel=1e-6)


def test_brackets_are_balanced_and_of_all_kinds():
    ids = nca.brackets(200, 20, 3, 0) - nca.FIRST
    for row in ids:
        stack = []
        for bracket in row:
            if bracket < 3:
                stack.append(bracket)
            else:
                assert stack.pop() == bracket - 3
        assert not stack
    assert set(ids.ravel()) == set(range(6))
    assert 0.4 < (ids[:, 1] < 3).mean() < 0.6  # the second bracket may open or close


# -- Runs -----------------------------------------------------------------------------------------

TINY = nca.World(side=4, frames=4)
SMALL = lab.Plan(world=TINY, rows=2, first_steps=4, text_steps=4, every=2, documents=200,
                 validation=4, seeds=2, gate=-999.0, kinds=8,
                 model=(("num_layers", 1), ("num_heads", 4), ("num_kv_heads", 2),
                        ("hidden_dim", 32)))


def test_transfer_moves_the_named_parts_and_no_other():
    _, fresh = lab.fresh_model(SMALL, 0)
    learned = jax.tree.map(lambda leaf: leaf + 1, lab.fresh_model(SMALL, 1)[1])
    names = jax.tree.leaves(lab.named_parts(fresh))
    assert set(names) == {"embedder", *lab.BLOCKS}
    for _, parts in lab.ARMS.values():
        moved = lab.transfer(fresh, learned, parts)
        for name, new, old, got in zip(names, *map(jax.tree.leaves, (fresh, learned, moved)),
                                       strict=True):
            np.testing.assert_array_equal(got, old if name in parts else new)


def test_documents_of_the_stages_and_of_validation_are_apart():
    text, first, validation = lab.text_data(SMALL)
    assert text.shape == (2, 8, TINY.film_tokens) and first.shape == text.shape
    for seed in range(2):
        parts = [{row.tobytes() for row in part[seed]} for part in (text, first, validation)]
        assert not parts[0] & parts[1] and not parts[2] & (parts[0] | parts[1])
    assert (validation[0] == validation[1]).all() and (text[0] != text[1]).any()


def test_the_text_is_the_corpus_without_bugs(monkeypatch):
    """The stored runs read that one; what 09's base reads may get other bugs, or more of them."""
    shares, documents = [], make.documents

    def noting(*words, **settings):
        shares.append(settings["bug_share"])
        return documents(*words, **settings)
    monkeypatch.setattr(make, "documents", noting)
    lab.text_data.__wrapped__(SMALL)
    assert shares == [0, 0]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nca")
    lab.compare(SMALL, folder)
    return folder


@pytest.mark.slow
def test_the_comparison_holds_every_arm_and_is_not_made_twice(compared, capsys):
    table = runs.stored(compared)
    assert set(table.arm) == set(lab.ARMS) and set(table.seed) == {0, 1}
    points = table.groupby(["arm", "stage", "seed"]).step.apply(list)
    assert len(points) == 22 and all(steps == [2, 4] for steps in points)
    assert table.val_loss.between(1, 9).all() and table.train_loss.between(1, 9).all()
    before = {path.name: path.stat().st_mtime_ns for path in compared.iterdir()}
    lab.compare(SMALL, compared)
    assert before == {path.name: path.stat().st_mtime_ns for path in compared.iterdir()}
    ends = lab.final(table)
    assert set(lab.differences(ends).arm) == set(lab.ARMS) - {"scratch"}
    two = lab.differences(ends[["scratch", "text"]])  # the other arms are not stored yet
    assert two[["arm", "against"]].values.tolist() == [["text", "scratch"]]


@pytest.mark.slow
def test_seeds_side_by_side_are_the_loop_of_09_one_by_one(compared, tmp_path):
    """`scratch` again with 09's step and evaluation, seed by seed, batch by batch."""
    text, _, validation = lab.text_data(SMALL)
    stored = pd.read_csv(compared / "scratch.csv").set_index(["seed", "step"]).val_loss
    for seed in range(2):
        graph, params = lab.fresh_model(SMALL, seed)
        seen = pretrain.tokens_seen([text, validation], 1280)
        optimizer = lab.optimizer_of(SMALL, "text", params)
        step, evaluate = pretrain.make_steps(graph, optimizer, seen)
        moments = optimizer.init(params)
        for batch in text[seed].reshape(4, 2, -1):
            params, moments, _ = step(params, moments, batch)
        assert pretrain.validation_loss(params, [validation[seed]], evaluate) == pytest.approx(
            stored[seed, 4], abs=2e-5)


def test_every_seed_has_to_close_half_of_the_gap(monkeypatch):
    """One of two seeds stays under the gate at its last point: nothing is moved."""
    ends = {2: [1.0, 1.0], 4: [1.2, 1.55]}  # counting 2, looking up 1
    points = pd.DataFrame([{"seed": seed, "step": step, "val_loss": ends[step][seed],
                            "counting": 2.0, "looking_up": 1.0}
                           for step in ends for seed in (0, 1)])
    assert lab.closed(points).tolist() == pytest.approx([0.8, 0.45])
    monkeypatch.setattr(lab, "first_stage", lambda *_: (None, points))
    with pytest.raises(lab.UserError, match="45% closed"):
        lab.run(lab.Plan(), "automata")


# -- Results --------------------------------------------------------------------------------------

def test_stored_runs_are_whole_and_of_the_plan():
    table = runs.stored(lab.STORED)
    assert set(table.arm) == set(lab.ARMS) and set(table.seed) == set(range(lab.Plan.seeds))
    assert set(table.plan) == {lab.digest(dataclasses.asdict(lab.Plan()))[:12]}


def test_paired_differences_by_hand():
    """Differences -0.1, -0.3, -0.1, -0.3: mean -0.2, deviation 0.11547, 3 degrees of freedom."""
    ends = pd.DataFrame({"text": [1.0, 2.0, 3.0, 4.0], "automata": [0.9, 1.7, 2.9, 3.7]})
    row = lab.differences(ends).iloc[0]
    wide = scipy.stats.t.ppf(1 - 0.05 / 8 / 2, 3)  # eight comparisons
    assert row.difference == pytest.approx(-0.2)
    assert row.high - row.low == pytest.approx(2 * wide * 0.11547 / 2, rel=1e-4)
