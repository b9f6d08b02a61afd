"""Cellular automata as training data: rules worked by hand, tokens, guessers, transfer, the runs."""

import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from conftest import ROOT
from flax import nnx

from appendix import nca, pretrain

WORLD = nca.World()

# -- Rules whose films one can work out -----------------------------------------------------------

def pointing(down, right):
    """The rule "take the state of that neighbour": one kernel position passes, the rest is zero."""
    kernel = np.zeros((3, 3, 4, 4), np.float32)
    kernel[down + 1, right + 1] = np.eye(4)
    passing = np.eye(4, 16, dtype=np.float32)
    return nca.Rule(jnp.array(kernel), jnp.array(passing), jnp.array(passing.T))


def cells(seed=0, side=8, states=4):
    return np.random.default_rng(seed).integers(0, states, (side, side)).astype(np.int32)


@pytest.mark.parametrize("down", (-1, 0, 1))
@pytest.mark.parametrize("right", (-1, 0, 1))
def test_a_shift_moves_the_world_and_the_edges_are_joined(down, right):
    """A cell takes its neighbour's state; at the edge that neighbour is on the other side."""
    start = cells(1)
    after = np.asarray(nca.next_frame(pointing(down, right), start))
    for row in range(8):
        for column in range(8):
            assert after[row, column] == start[(row + down) % 8, (column + right) % 8]


def test_a_film_is_the_rule_applied_again_and_again_after_the_burn_in():
    start = cells(3)
    frames = np.asarray(nca.film(pointing(0, 1), start, WORLD))
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
    """D = 10 on 12 x 12: 46 % of random rules exceed 0.5 and 8 to 9 % lie in 0.3 to 0.4."""
    world = nca.World(states=10, side=12)
    frames = np.asarray(nca.films(*nca.openings(0, 0, 600, world), world))
    scores = nca.complexity(frames, world)
    assert 0.40 < (scores > 0.5).mean() < 0.52
    assert 0.06 < ((scores > 0.3) & (scores < 0.4)).mean() < 0.13


def test_cells_of_gives_the_films_back():
    frames = np.random.default_rng(3).integers(0, 4, (3, WORLD.frames, 8, 8)).astype(np.uint8)
    np.testing.assert_array_equal(nca.cells_of(nca.rows(frames, 4), WORLD), frames)


# -- Guessers -------------------------------------------------------------------------------------

def test_a_guesser_that_counts_by_hand():
    """Two frames of four patches, two films; token by token in plain Python."""
    world = nca.World(side=4, frames=2)
    films = np.random.default_rng(0).integers(0, 2, (3, 2, 4, 4)).astype(np.uint8)
    ids = nca.rows(films, world.states)
    patches = nca.patches(films, world.states)
    share = {p: float((patches == p).mean()) for p in np.unique(patches)}
    cost = 0.0
    for first, second in patches:
        past = first.tolist()
        for patch in second.tolist():
            cost -= np.log((past.count(patch) + 8 * share[patch]) / (len(past) + 8))
            past.append(patch)
    assert nca.counting(ids, world) == pytest.approx(cost / (3 * world.frame_tokens))


def test_a_guesser_that_looks_up_by_hand():
    """Three frames of 4 x 4 cells: every pair of neighbourhoods compared in plain Python."""
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
    assert nca.looking_up(nca.rows(frames, 3), world) == pytest.approx(
        cost / (2 * 2 * world.frame_tokens), rel=1e-6)


# -- Runs -----------------------------------------------------------------------------------------

SMALL = nca.Plan(first_steps=4, text_steps=4, alone=2, rows_per_step=2, tokens_per_step=256, every=2,
                 documents=2_000, validation=1, seeds=1, gate=-9.0,
                 model=(("num_layers", 1), ("hidden_dim", 32)))


def test_transfer_moves_the_named_parts_and_no_other():
    _, fresh = nca.fresh_model(SMALL, 0)
    learned = jax.tree.map(lambda leaf: leaf + 1, nca.fresh_model(SMALL, 1)[1])
    names = jax.tree.leaves(nca.named_parts(fresh))
    assert set(names) == {"embedder", *nca.BLOCKS}
    for _, parts in nca.ARMS.values():
        moved = nca.transfer(fresh, learned, parts)
        for name, new, old, got in zip(names, *map(jax.tree.leaves, (fresh, learned, moved)),
                                       strict=True):
            np.testing.assert_array_equal(got, old if name in parts else new)


def test_blocks_wait_and_then_learn_at_a_share_of_the_rate():
    """Beside the plain optimizer: no update for `alone` steps, then `moved` times as large."""
    _, params = nca.fresh_model(SMALL, 0)
    gradients = jax.tree.map(lambda leaf: 1e-4 * jnp.ones_like(leaf), params)
    split = nca.text_optimizer(SMALL, params)
    plain = pretrain.make_optimizer(params, SMALL.text_steps, SMALL.text_rate, 1, 0.05)
    states = [split.init(params), plain.init(params)]
    for step in range(4):
        ours, states[0] = split.update(gradients, states[0], params)
        theirs, states[1] = plain.update(gradients, states[1], params)
        for name, a, b in zip(*map(jax.tree.leaves, (nca.named_parts(params), ours, theirs)),
                              strict=True):
            factor = 1 if name in ("embedder", "norms") else 0.3 * (step >= SMALL.alone)
            np.testing.assert_allclose(a, factor * b, rtol=1e-6)


def test_documents_of_the_stages_and_of_validation_are_apart():
    text, first, validation = nca.text_batches(SMALL, 0)
    seen = [{row.tobytes() for batch in part for row in batch} for part in (text, first, validation)]
    assert len(text) == SMALL.text_steps and not seen[0] & seen[1]
    assert not seen[2] & (seen[0] | seen[1])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nca")
    assert nca.compare(SMALL, folder)
    return folder


def test_the_comparison_holds_every_arm_and_is_not_made_twice(compared, capsys):
    table = nca.stored(compared)
    assert set(table.arm) == set(nca.ARMS) and set(table.seed) == {0}
    ends = table.groupby(["arm", "stage"]).step.max().unstack()
    assert (ends["text"] == 4).all() and set(ends["first"].dropna()) == {2}  # this gate opens at once
    assert table.val_loss.between(1, 9).all()
    before = {path.name: path.stat().st_mtime_ns for path in compared.iterdir()}
    capsys.readouterr()
    assert nca.compare(SMALL, compared) and capsys.readouterr().out == ""
    assert before == {path.name: path.stat().st_mtime_ns for path in compared.iterdir()}
    assert set(nca.differences(nca.final(table)).arm) == set(nca.ARMS) - {"scratch"}


def test_a_run_that_was_cut_off_ends_with_the_same_numbers(compared, tmp_path, monkeypatch):
    whole, real = pretrain.pretrain, pretrain.save_state
    calls = []

    def save(path, tree, history):
        real(path, tree, history)
        calls.append(len(history))
        if len(calls) == 1:
            raise KeyboardInterrupt
    monkeypatch.setattr(pretrain, "save_state", save)
    with pytest.raises(KeyboardInterrupt):
        nca.run(SMALL, "scratch", 0, tmp_path)
    nca.run(SMALL, "scratch", 0, tmp_path)
    assert pretrain.pretrain is whole
    again, first = (pd.read_csv(folder / "scratch-0.csv") for folder in (tmp_path, compared))
    pd.testing.assert_frame_equal(again, first)


# -- Results --------------------------------------------------------------------------------------

def test_paired_differences_against_scipy_and_by_hand():
    scratch, other = pd.Series([1.0, 2.0, 3.0, 4.0]), pd.Series([0.9, 1.7, 2.9, 3.7])
    mean, low, high, pairs = nca.difference(other, scratch)
    # Differences -0.1, -0.3, -0.1, -0.3: mean -0.2, deviation 0.11547, t(3) = 3.18245.
    assert (mean, pairs) == (pytest.approx(-0.2), 4)
    assert high - low == pytest.approx(2 * 3.18245 * 0.11547 / 2, rel=1e-4)
    wide = nca.difference(other, scratch, comparisons=5)
    assert wide[1:3] == pytest.approx(scipy.stats.ttest_rel(other, scratch).confidence_interval(0.99))


def test_what_12_says_of_the_stored_runs():
    """Its first lines, from the stored rows by SciPy alone."""
    table = pd.read_csv(ROOT / "data" / "nca" / "short_first_stage.csv")
    ends = table[table.stage == "text"].sort_values("step").groupby(["arm", "seed"]).val_loss.last()
    scratch = ends["scratch"]
    assert scratch.mean() == pytest.approx(0.294, abs=5e-4)
    for base, numbers in (("scratch", (0.022, 0.018, 0.026)), ("text", (0.020, 0.007, 0.032))):
        gaps = ends["automata"] - ends[base]
        interval = scipy.stats.ttest_1samp(gaps, 0).confidence_interval(1 - 0.05 / 8)
        assert (gaps.mean(), *interval) == pytest.approx(numbers, abs=1e-3), base
    first = table[table.arm == "first-automata"].sort_values("step").groupby("seed").last()
    closed = (first.counting - first.val_loss) / (first.counting - first.looking_up)
    assert len(first) == 5 and closed.mean() == pytest.approx(0.06, abs=0.005)
