"""Cellular automata as training data: rules worked by hand, tokens, filter, transfer, resuming."""

import gzip
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jupytext
import numpy as np
import optax
import pandas as pd
import pytest
import scipy.stats
from conftest import ROOT, load
from flax import nnx

import helpers
from appendix import nca, pretrain
from helpers import style

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


def test_identity_keeps_every_cell():
    start = cells()
    np.testing.assert_array_equal(nca.next_frame(pointing(0, 0), start), start)


@pytest.mark.parametrize("down", (-1, 0, 1))
@pytest.mark.parametrize("right", (-1, 0, 1))
def test_a_shift_moves_the_world_and_the_edges_are_joined(down, right):
    """A cell takes its neighbour's state; at the edge that neighbour is on the other side."""
    start = cells(1)
    after = np.asarray(nca.next_frame(pointing(down, right), start))
    for row in range(8):
        for column in range(8):
            assert after[row, column] == start[(row + down) % 8, (column + right) % 8]


def test_one_live_cell_leaves_at_a_corner_and_comes_back_at_the_other():
    start = np.zeros((8, 8), np.int32)
    start[0, 0] = 3
    after = np.asarray(nca.next_frame(pointing(1, 1), start))
    assert after[7, 7] == 3 and after.sum() == 3


def test_a_constant_rule_forgets_its_first_frame():
    kernel = np.zeros((3, 3, 4, 4), np.float32)
    kernel[..., 0] = 1  # nine neighbours, whatever their state, make a nine in channel 0
    hidden, out = np.zeros((4, 16), np.float32), np.zeros((16, 4), np.float32)
    hidden[0, 5], out[5, 2] = 1, 1
    rule = nca.Rule(*map(jnp.array, (kernel, hidden, out)))
    np.testing.assert_array_equal(nca.next_frame(rule, cells(2)), np.full((8, 8), 2))


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
        rule = jax.tree.map(lambda leaf: leaf[i], rules)
        conv.kernel.set_value(rule.kernel)
        logits = jax.nn.relu(conv(jax.nn.one_hot(starts[i], 4)) @ rule.hidden) @ rule.out
        np.testing.assert_array_equal(nca.next_frame(rule, starts[i]), logits.argmax(-1))


def test_all_films_at_once_are_those_of_the_plain_loop():
    """The notebook's NumPy loop computes one film after the other."""
    plain = load("12_nca.py", "plain_film")
    rules, starts = nca.openings(6, 0, 8, WORLD)
    frames = np.asarray(nca.films(rules, starts, WORLD))
    for i in range(8):
        rule = [np.asarray(leaf[i]) for leaf in rules]
        np.testing.assert_array_equal(frames[i], plain(*rule, np.asarray(starts[i]), WORLD))


def test_a_seed_and_a_number_make_a_film_and_nothing_else_does():
    def made(seed, first):
        return np.asarray(nca.films(*nca.openings(seed, first, 8, WORLD), WORLD))
    eight = made(1, 0)
    np.testing.assert_array_equal(eight[5:], made(1, 5)[:3])
    assert (eight != made(2, 0)).any()
    some, more = nca.kept_films(1, 2, WORLD, chunk=8), nca.kept_films(1, 9, WORLD, chunk=8)
    assert len(some) == 2 and len(more) == 9
    np.testing.assert_array_equal(some, more[:2])


# -- Tokens ---------------------------------------------------------------------------------------

def test_patches_of_a_frame_worked_by_hand():
    frame = np.array([[0, 1, 3, 3],
                      [2, 3, 3, 3],
                      [0, 0, 1, 0],
                      [0, 1, 0, 0]])
    # 0·64 + 1·16 + 2·4 + 3 = 27; 255; 1; 64
    assert nca.patches(frame, 4).tolist() == [27, 255, 1, 64]
    assert nca.patches(frame[None, None], 10).tolist() == [[[123, 3333, 1, 1000]]]


def test_rows_hold_every_frame_between_its_marks():
    frames = np.random.default_rng(0).integers(0, 4, (3, WORLD.frames, 8, 8)).astype(np.uint8)
    ids = nca.rows(frames, 4)
    assert ids.shape == (3, WORLD.frames * WORLD.frame_tokens) and ids.dtype == np.int32
    cut = ids.reshape(3, WORLD.frames, WORLD.frame_tokens)
    assert (cut[..., 0] == nca.FRAME_START).all() and (cut[..., -1] == nca.FRAME_END).all()
    np.testing.assert_array_equal(cut[..., 1:-1] - nca.FIRST, nca.patches(frames, 4))
    assert cut[..., 1:-1].min() >= nca.FIRST and ids.max() < WORLD.vocabulary


def test_complexity_is_gzip_of_the_patch_numbers():
    static = np.zeros((1, WORLD.frames, 8, 8), np.uint8)
    noise = np.random.default_rng(0).integers(0, 4, static.shape).astype(np.uint8)
    raw = nca.patches(noise[0, :WORLD.judged], 4).astype(np.int32).tobytes()
    scores = nca.complexity(np.concatenate([static, noise]), WORLD)
    assert len(raw) == WORLD.judged * 16 * 4
    assert scores[1] == len(gzip.compress(raw, 9)) / len(raw)
    assert scores[0] < 0.06 < 0.45 < scores[1]


def test_published_shares_of_rules_come_out_of_our_generator():
    """D = 10 on 12 x 12: 46 % of random rules exceed 0.5 and 8 to 9 % lie in 0.3 to 0.4."""
    world = nca.World(states=10, side=12)
    frames = np.asarray(nca.films(*nca.openings(0, 0, 600, world), world))
    scores = nca.complexity(frames, world)
    assert 0.40 < (scores > 0.5).mean() < 0.52
    assert 0.06 < ((scores > 0.3) & (scores < 0.4)).mean() < 0.13


def test_the_band_keeps_the_share_that_its_percentiles_say():
    scores = np.random.default_rng(0).random(1_000)
    inside, (low, high) = nca.kept(scores, (40, 70))
    assert 295 <= inside.sum() <= 305
    assert scores[inside].min() >= low and scores[inside].max() <= high


def test_shuffling_keeps_the_frames_of_a_film_and_loses_their_order():
    frames = nca.kept_films(0, 20, WORLD)
    other = nca.shuffled(frames, 0)
    assert (other != frames).any(axis=(1, 2, 3)).mean() > 0.9
    for film, mixed in zip(frames, other, strict=True):
        assert sorted(f.tobytes() for f in film) == sorted(f.tobytes() for f in mixed)
    np.testing.assert_array_equal(other, nca.shuffled(frames, 0))
    assert (other != nca.shuffled(frames, 1)).any()


def test_the_stream_gives_every_row_once_in_an_order_of_its_seed():
    ids = np.arange(60, dtype=np.int32).reshape(20, 3)
    batches = nca.stream(ids, 4, seed=0)
    assert len(batches) == 5 and batches[3].shape == (4, 3)
    seen = np.concatenate([batches[i] for i in range(5)])
    assert sorted(seen[:, 0]) == sorted(ids[:, 0]) and (seen != ids).any()
    np.testing.assert_array_equal(batches[2], nca.stream(ids, 4, seed=0)[2])
    assert (np.concatenate(list(nca.stream(ids, 4, seed=1)))[:20] != seen).any()


# -- Training -------------------------------------------------------------------------------------

SMALL = nca.Plan(text_steps=2, first_steps=2, rows_per_step=2, tokens_per_step=256, every=2,
                 documents=2_000, validation=1, model=(("num_layers", 1), ("hidden_dim", 32)))


def test_transfer_moves_the_named_parts_and_no_other():
    _, fresh = nca.fresh_model(SMALL, 0)
    _, learned = nca.fresh_model(SMALL, 1)
    # At the start norms are equal in both, so make them differ.
    learned = jax.tree.map(lambda leaf: leaf + 1, learned)
    names = jax.tree.leaves(nca.named_parts(fresh))
    assert set(names) == {"embedder", *nca.PARTS}
    assert all("embedder" not in arm.parts for name, arm in nca.ARMS.items() if name != "whole")
    for parts in ((), ("attention",), ("mlp",), ("norms",), nca.PARTS, nca.ARMS["whole"].parts):
        moved = nca.transfer(fresh, learned, parts)
        for name, new, old, got in zip(names, *map(jax.tree.leaves, (fresh, learned, moved)),
                                       strict=True):
            np.testing.assert_array_equal(got, old if name in parts else new)


@pytest.mark.parametrize("arm", ["nca", "text", "attention"])
def test_what_is_moved_has_never_met_the_embedder_that_it_is_moved_to(tmp_path, monkeypatch, arm):
    """Both stages once began with one draw: text's blocks came back to nearly their own embedder."""
    began = []

    def train(plan, params, graph, batches, validation, seen, steps, state, given=0, slow=None):
        began.append((params, {row.tobytes() for batch in batches for row in batch}))
        last = {"step": plan.text_steps, "loss": 1.0, "val_loss": 1.0, "seconds": 1.0}
        return jax.tree.map(lambda leaf: leaf + 1, params), [last]
    monkeypatch.setattr(nca, "train", train)
    nca.run(SMALL, arm, 0, tmp_path)
    (first, films), (text, documents) = began
    assert not films & documents
    parts = nca.ARMS[arm].parts
    for name, before, after in zip(*map(jax.tree.leaves, (nca.named_parts(first), first, text)),
                                   strict=True):
        if name in parts:
            np.testing.assert_array_equal(after, before + 1)
        elif before.ndim > 1:
            assert abs(np.corrcoef(before.ravel(), after.ravel())[0, 1]) < 0.05
    assert all(seed != source for seed, source in enumerate(nca.Plan().sources))
    assert sorted(nca.Plan().sources) == list(range(nca.Plan().main_seeds))


def test_every_weight_belongs_to_the_part_that_its_name_says():
    assert nca.part_of("embedder.input_embedding") == "embedder"
    assert nca.part_of("layers.0.attn._query_norm.scale") == "attention"
    assert nca.part_of("layers.5.attn.attn_vec_einsum.w") == "attention"
    assert nca.part_of("layers.3.mlp.gate_proj.kernel") == "mlp"
    for name in ("final_norm.scale", "layers.1.pre_ffw_norm.scale", "layers.1.skip_scale"):
        assert nca.part_of(name) == "norms"


def test_a_slower_rate_reaches_only_what_it_names():
    params = {"old": jnp.ones((2, 2)), "new": jnp.ones((2, 2))}
    gradients = jax.tree.map(lambda leaf: 0.3 * leaf, params)
    moves = {}
    for name, slow in (("same", None), ("slow", ({"old": True, "new": False}, 0.1))):
        optimizer = pretrain.make_optimizer(params, 10, 1e-2, 2, 0.05, slow)
        state, now = optimizer.init(params), params
        for _ in range(2):  # the rate of the first step is zero
            updates, state = optimizer.update(gradients, state, now)
            now = optax.apply_updates(now, updates)
        moves[name] = jax.tree.map(lambda a, b: a - b, now, params)
    np.testing.assert_allclose(moves["slow"]["old"], 0.1 * moves["same"]["old"], rtol=1e-3)
    np.testing.assert_array_equal(moves["slow"]["new"], moves["same"]["new"])
    assert (moves["same"]["new"] != 0).all()


def test_given_tokens_are_read_and_not_predicted():
    tokens = np.array([[5, 6, 7, 8], [9, 5, 6, 0]], np.int32)
    seen = np.ones(10, bool)

    def even(tokens, attention_mask):
        return jnp.zeros((*tokens.shape, 10)), None
    for given, predicted in ((0, 5), (1, 5), (2, 3), (3, 1)):
        total, count = pretrain.token_loss(even, tokens, seen, given)
        assert count == predicted
        assert float(total) == pytest.approx(predicted * np.log(10), rel=1e-5)


class Stop(Exception):
    """What a test cuts a run off with."""


def test_a_loop_that_saves_by_the_clock_goes_on_where_it_was_cut_off(tmp_path):
    def loop(path, minutes, cut=None):
        def step(params, moments, batch):
            if cut is not None and moments == cut:
                raise Stop
            return params * 0.9 + batch.mean(), moments + 1, params
        batches = [np.full((1, 2), i, np.int32) for i in range(7)]
        return pretrain.pretrain(jnp.array(3.0), jnp.array(0), step, lambda p, b: (p, 1.0),
                                 batches, batches[:1], 20, path, every=50, minutes=minutes)
    whole, history = loop(tmp_path / "whole.npz", None)
    with pytest.raises(Stop):
        loop(tmp_path / "cut.npz", 0, cut=13)
    assert len(pretrain.load_state(tmp_path / "cut.npz", (whole, 0))[1]) == 13
    again, entries = loop(tmp_path / "cut.npz", 0)
    assert again == whole
    assert [e["loss"] for e in entries] == [e["loss"] for e in history]
    with pytest.raises(Stop):
        loop(tmp_path / "never.npz", None, cut=13)
    assert not (tmp_path / "never.npz").exists()


def test_text_of_the_two_stages_is_apart_and_as_long_as_the_automata():
    text, first, validation, seen = nca.text_batches(SMALL, 0)
    assert len(text) == SMALL.text_steps
    sums = nca.budgets(SMALL, 0)
    assert sums.steps.to_list() == [2, 2, len(first), 1]
    assert sums.tokens["first, films"] == SMALL.first_tokens
    assert sums["longest row"].to_list() == [max(batch.shape[1] for batch in part) for part in (
        text, [np.zeros((2, 180))], first, validation)]
    wanted = SMALL.first_steps * SMALL.rows_per_step * WORLD.frames * WORLD.frame_tokens
    tokens = [(batch > 0).sum() for batch in first]
    assert sum(tokens[:-1]) < wanted <= sum(tokens)
    documents = [{row.tobytes() for batch in part for row in batch} for part in (text, first)]
    assert not documents[0] & documents[1]
    again, other = nca.text_batches(SMALL, 0)[0], nca.text_batches(SMALL, 1)[0]
    assert all((a == b).all() for a, b in zip(text, again, strict=True))
    assert any(a.shape != b.shape or (a != b).any() for a, b in zip(text, other, strict=True))
    assert all(seen[batch].all(where=batch > 0) for batch in text)


def test_the_comparison_goes_on_run_by_run(tmp_path, capsys):
    """Both stages of a model with one layer, through 09's loop; then nothing is left to do."""
    nca.compare(SMALL, tmp_path, [("nca", 0)])
    table = nca.stored(tmp_path)
    assert table.columns.tolist() == nca.COLUMNS and set(table.recipe) == {nca.recipe(SMALL)}
    end = table[table.stage == "text"].iloc[-1]
    text = sum((batch > 0).sum() for batch in nca.text_batches(SMALL, 0)[0])
    automata = SMALL.first_steps * SMALL.rows_per_step * WORLD.frames * WORLD.frame_tokens
    assert (end.step, end.text_tokens, end.all_tokens) == (2, text, text + automata)
    assert set(table.arm) == {"nca", "first-nca"} and table.val_loss.between(3, 9).all()
    assert not list(tmp_path.glob("state-*")), "what a run no longer needs is gone"
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    capsys.readouterr()
    nca.compare(SMALL, tmp_path, [("nca", 0)])
    assert capsys.readouterr().out == ""
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_the_order_holds_every_run_once_and_the_main_arms_first():
    runs = nca.order(nca.Plan())
    plan = nca.Plan()
    assert len(runs) == len(set(runs)) == (plan.main_seeds * len(nca.MAIN)
                                           + plan.other_seeds * len(nca.OTHERS))
    assert runs[:4] == [("scratch", 0), ("nca", 0), ("shuffled", 0), ("text", 0)]
    assert max(seed for arm, seed in runs if arm in nca.OTHERS) == plan.other_seeds - 1


# -- Results --------------------------------------------------------------------------------------

def table(**losses):
    """A results table: losses per seed at the end of a text stage."""
    return pd.DataFrame([{"arm": arm, "seed": seed, "stage": "text", "step": step,
                          "val_loss": value + (0 if step == 400 else 1), "recipe": "a"}
                         for arm, values in losses.items() for seed, value in enumerate(values)
                         for step in (40, 400)], columns=nca.COLUMNS)


def test_paired_difference_against_scipy_and_by_hand():
    ends = nca.final(table(scratch=[1.0, 2.0, 3.0, 4.0], nca=[0.9, 1.7, 2.9, 3.7], text=[0.5]))
    mean, low, high, pairs = nca.difference(ends.nca, ends.scratch)
    # Differences -0.1, -0.3, -0.1, -0.3: mean -0.2, deviation 0.11547, t(3) = 3.18245.
    assert (mean, pairs) == (pytest.approx(-0.2), 4)
    assert (low, high) == (pytest.approx(-0.2 - 3.18245 * 0.11547 / 2, abs=1e-4),
                           pytest.approx(-0.2 + 3.18245 * 0.11547 / 2, abs=1e-4))
    mean, low, high, pairs = nca.difference(ends.text, ends.scratch)
    assert (mean, pairs) == (-0.5, 1) and np.isnan([low, high]).all()


def test_equal_gaps_are_no_proof():
    ends = nca.final(table(scratch=[1.0, 2.0], nca=[0.9, 1.9], text=[0.9, 1.8]))
    verdicts = nca.against(ends).set_index("arm").verdict
    assert verdicts.nca == "no spread known" and verdicts.text == "no difference shown"


def test_a_verdict_has_to_survive_as_many_comparisons_as_there_are():
    gaps = np.array([-0.013, -0.02, -0.027])
    wide = scipy.stats.ttest_1samp(gaps, 0.0)
    assert wide.confidence_interval(0.95).high < 0 < wide.confidence_interval(0.975).high
    base = [1.0, 2.0, 3.0]
    losses = {"nca": base + gaps, "text": base - np.array([0.02, 0.021, 0.019])}
    found = nca.against(nca.final(table(scratch=base, **losses))).set_index("arm")
    assert found.verdict.to_dict() == {"nca": "perhaps better", "text": "better"}
    assert found.high["nca"] == pytest.approx(wide.confidence_interval(0.95).high)
    alone = nca.against(nca.final(table(scratch=base, nca=losses["nca"])))
    assert alone.verdict.to_list() == ["better"]


def test_the_two_losses_of_a_comparison_are_of_the_same_seeds():
    """A fourth seed of scratch alone once moved its mean away from the difference."""
    found = nca.against(nca.final(table(scratch=[1.0, 2.0, 3.0, 10.0], nca=[1.1, 2.2, 3.3])))
    row = found.iloc[0]
    assert row["scratch's"] == pytest.approx(2.0)
    assert row.loss - row["scratch's"] == pytest.approx(row["against scratch"]) == 0.2


def test_a_guesser_that_counts_by_hand():
    """Two frames of four patches, two films; token by token in plain Python."""
    world = nca.World(side=4, frames=2, judged=2)
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


def test_a_guesser_that_counts_cannot_use_the_order_of_frames():
    frames = nca.kept_films(0, 40, WORLD)
    ids = nca.rows(frames, WORLD.states)
    still = nca.rows(np.repeat(frames[:, :1], WORLD.frames, axis=1), WORLD.states)
    # Of a film that stands still a reader of the last frame knows all; who counts does not.
    assert 0.5 < nca.counting(still, WORLD) < nca.counting(ids, WORLD)


def test_a_guesser_that_looks_up_by_hand():
    """Three frames of 4 x 4 cells: every pair of neighbourhoods compared in plain Python."""
    world = nca.World(states=3, side=4, frames=3, judged=3)
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


def test_looking_up_uses_the_dynamics_and_has_nothing_without_their_order():
    frames = nca.kept_films(0, 30, WORLD)
    ids, mixed = (nca.rows(some, WORLD.states) for some in (frames, nca.shuffled(frames, 0)))
    assert nca.looking_up(ids, WORLD) < nca.counting(ids, WORLD) - 1
    assert nca.looking_up(mixed, WORLD) > nca.counting(mixed, WORLD)


def test_tokens_to_reach_a_loss():
    curve = pd.DataFrame({"text_tokens": [0, 100, 200], "val_loss": [4.0, 2.0, 1.0]})
    assert nca.tokens_to_reach(curve, 2.0) == pytest.approx(100)
    assert nca.tokens_to_reach(curve, 2 ** 0.5) == pytest.approx(150)
    assert nca.tokens_to_reach(curve, 9.0) == 0
    assert np.isnan(nca.tokens_to_reach(curve, 0.9))


def test_a_speed_is_averaged_only_where_every_run_arrives():
    """A mean over those that arrive makes an arm the faster the more of its runs fail."""
    def run(arm, seed, *losses):
        tokens = [100 * (i + 1) for i in range(len(losses))]
        return pd.DataFrame({"arm": arm, "seed": seed, "stage": "text", "step": tokens,
                             "text_tokens": tokens, "val_loss": losses}, columns=nca.COLUMNS)
    text = pd.concat([run("scratch", 0, 4.0, 2.0, 1.0), run("scratch", 1, 4.0, 2.0, 1.0),
                      run("nca", 0, 2.0, 1.5, 1.0), run("nca", 1, 4.0, 4.0, 2.0),
                      run("mlp", 2, 4.0, 2.0, 1.0)])
    shares = nca.sooner(text, 2.0)
    assert list(shares) == ["nca"], "no pair with scratch"
    assert shares["nca"].to_dict() == {0: 0.5, 1: 1.5}
    assert np.isnan(nca.sooner(text)["nca"][1]) and nca.sooner(text)["nca"][0] == 1
    found = nca.speed(text, (2.0, 1.2)).loc["nca"]
    assert found["to 2 nats"].startswith("0.87 (") and found["to 1.2 nats"] == ""
    assert found["to scratch's end"] == "1 of 2 runs"


def test_missing_runs_are_named_also_where_nothing_is_stored(tmp_path):
    plan = nca.Plan()
    nothing = nca.stored(tmp_path)
    assert nothing.columns.tolist() == nca.COLUMNS
    assert nca.missing(nothing, plan) == nca.order(plan)
    some = nca.missing(table(scratch=[1.0, 2.0]), plan)
    assert len(some) == len(nca.order(plan)) - 2 and ("scratch", 2) in some
    assert nca.final(nothing).empty


def made_up(folder, runs, plan):
    """Stored runs with invented losses."""
    for number, (arm, seed) in enumerate(runs):
        steps = np.arange(plan.every, plan.text_steps + 1, plan.every)
        loss = 0.3 + np.exp(-steps / 80) + 0.01 * (number % 7)
        pd.DataFrame({"arm": arm, "seed": seed, "stage": "text", "step": steps,
                      "made": "2026-01-01", "text_tokens": 1_000 * steps,
                      "all_tokens": 1_000 * steps, "val_loss": loss,
                      "recipe": nca.recipe(plan), "jax": "1"}, columns=nca.COLUMNS
                     ).to_csv(folder / f"{arm}-{seed}.csv", index=False)


ALL_RUNS = len(nca.order(nca.Plan()))


@pytest.mark.parametrize("count", (0, 1, 3, ALL_RUNS))
def test_the_conclusions_of_the_notebook_need_no_complete_comparison(tmp_path, monkeypatch, capsys,
                                                                     count):
    """The cells from section 8 on, as they stand, beside none, some and all runs."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    plan, folder = nca.Plan(), tmp_path / "data" / "nca"
    folder.mkdir(parents=True)
    made_up(folder, nca.order(plan)[:count], plan)
    cells = jupytext.read(ROOT / "12_nca.py").cells
    first = next(i for i, cell in enumerate(cells) if cell.source.startswith("## 8."))
    live = pd.DataFrame({"step": [1, 2], "loss": [5.0, 4.0], "val_loss": [np.nan, 4.2]})
    space = {"helpers": helpers,
             "cfg": SimpleNamespace(full=False), "plan": plan, "world": plan.world,
             "nca": nca, "np": np, "pd": pd, "style": style, "Path": Path, "live": live,
             "display": print,
             "level": 2.3}
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for cell in cells[first:]:
        if cell.cell_type == "code":
            exec(cell.source, space)
    said = capsys.readouterr().out
    assert f"{count} of {ALL_RUNS} runs are stored" in said
    assert ("missing: none" in said) == ("Preliminary" not in said) == (count == ALL_RUNS)
    assert ("No pair" in said) == (count < 2)
    others = ALL_RUNS - plan.main_seeds  # all but scratch itself
    assert space["results"].pairs.sum() == {0: 0, 1: 0, 3: 2, ALL_RUNS: others}[count]
    drawn = len(list(tmp_path.glob("figures/12_*.png")))  # no figure without a row to draw
    assert drawn == {0: 1, 1: 2, 3: 4, ALL_RUNS: 4}[count]


def test_runs_of_two_plans_are_not_put_together(tmp_path):
    for number, recipe in enumerate("ab"):
        table(scratch=[1.0]).assign(recipe=recipe).to_csv(tmp_path / f"{number}.csv", index=False)
    with pytest.raises(ValueError, match="different plans"):
        nca.stored(tmp_path)
