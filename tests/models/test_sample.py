# SPDX-License-Identifier: Apache-2.0
"""The sampler: exact cuts, the right distribution, and draws that depend on nothing else."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.models.decoder.sample import RowSamplers, Sampler

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))


sample = jax.jit(lambda sampler, *arguments: sampler(*arguments))
cut = jax.jit(lambda sampler, logits: sampler.cut(logits))


def kept_ids(sampler: Sampler, logits) -> list[int]:
    """The ids that can be drawn, likeliest first."""
    left = np.asarray(cut(sampler, np.asarray(logits, np.float32)[None]))[0]
    order = np.argsort(-left, kind="stable")
    return order[np.isfinite(left[order])].tolist()


def draw(sampler: Sampler, logits, count: int) -> np.ndarray:
    """`count` draws from the same logits, each for a position of its own."""
    tiled = np.tile(np.asarray(logits, np.float32), (count, 1))
    return np.asarray(sample(sampler, tiled, *row_and_position(np.zeros(count), np.arange(count))))


def row_and_position(rows, positions) -> list[np.ndarray]:
    return [np.asarray(rows, np.int32), np.asarray(positions, np.int32)]


def test_greedy_takes_the_first_of_equals():
    logits = jnp.array([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]], jnp.float32)
    sampler = Sampler.create(temperature=0.0, top_k=2, top_p=0.5)
    chosen = sample(sampler, logits, *row_and_position([0, 1], [0, 0]))
    assert chosen.tolist() == [1, 0]
    assert chosen.dtype == jnp.int32


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 9}, [1, 3, 4, 2, 0]),  # more than there are
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.84}, [1, 3, 4]),
        ({"top_p": 0.86}, [1, 3, 4, 2]),
        ({"top_p": 1e-30}, [1]),  # never none
        ({"top_k": 3, "top_p": 0.46}, [1]),  # 0.4 / 0.85 = 0.47: probabilities of what top_k left
        ({"top_k": 3, "top_p": 0.48}, [1, 3]),
        ({"top_k": 4, "top_p": 1.0}, [1, 3, 4, 2]),
    ],
)
def test_top_k_and_top_p_keep_exactly(options, kept):
    assert kept_ids(Sampler.create(temperature=1.0, **options), LOGITS) == kept


def test_temperature_comes_before_top_p():
    # At temperature 0.5 the probabilities are squared: 0.16 of 0.275 is 0.58.
    assert kept_ids(Sampler.create(temperature=0.5, top_p=0.57), LOGITS) == [1]
    assert kept_ids(Sampler.create(temperature=1.0, top_p=0.57), LOGITS) == [1, 3]


def test_ties_at_the_cut_keep_the_lower_ids():
    assert kept_ids(Sampler.create(temperature=1.0, top_k=2), np.zeros(4)) == [0, 1]
    assert kept_ids(Sampler.create(temperature=1.0, top_p=0.6), np.zeros(4)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"temperature": 1.0}, [0.05, 0.4, 0.1, 0.25, 0.2]),
        ({"temperature": 0.5}, [0.0025, 0.16, 0.01, 0.0625, 0.04]),
        ({"temperature": 1.0, "top_k": 2}, [0, 0.4, 0, 0.25, 0]),
        ({"temperature": 1.0, "top_p": 0.8}, [0, 0.4, 0, 0.25, 0.2]),
    ],
)
def test_draws_follow_the_distribution(options, weights):
    count = 20_000
    expected = np.array(weights) / np.sum(weights) * count
    seen = np.bincount(draw(Sampler.create(seed=7, **options), LOGITS, count), minlength=5)
    assert (seen[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 23.5  # 1 in 10,000 for 4 degrees of freedom; the seed is fixed


def test_a_tiny_temperature_is_greedy_and_finite():
    assert set(draw(Sampler.create(temperature=1e-44), LOGITS, 20_000).tolist()) == {1}


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.95}])
def test_a_draw_depends_only_on_its_logits_seed_row_and_position(options):
    rng = np.random.default_rng(0)
    logits, others = rng.standard_normal((2, 3, 50), np.float32)
    sampler = Sampler.create(temperature=2.0, seed=3, **options)
    together = sample(sampler, logits, *row_and_position([4, 2, 9], [0, 7, 3]))
    others[0] = logits[1]  # the same row at another place, with other neighbours
    alone = sample(sampler, others, *row_and_position([2, 5, 6], [7, 1, 1]))
    assert alone[0] == together[1]


def test_seed_row_and_position_each_change_the_draws():
    logits = np.zeros((64, 1000), np.float32)
    zeros, index = np.zeros(64), np.arange(64)
    one, two = Sampler.create(temperature=1.0, seed=0), Sampler.create(temperature=1.0, seed=1)
    by_row = sample(one, logits, *row_and_position(index, zeros)).tolist()
    by_position = sample(one, logits, *row_and_position(zeros, index)).tolist()
    by_seed = sample(two, logits, *row_and_position(index, zeros)).tolist()
    for draws in (by_row, by_position, by_seed):
        assert len(set(draws)) > 50
    for one_way, other_way in ((by_row, by_position), (by_row, by_seed)):
        assert sum(x == y for x, y in zip(one_way, other_way, strict=True)) < 10


@pytest.mark.parametrize("options", [{"top_k": 40}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_a_cut_changes_the_draws_of_what_it_cuts_off_alone(options):
    logits = np.random.default_rng(1).standard_normal((400, 300), np.float32) * 2
    where = row_and_position(np.zeros(400), np.arange(400))
    free = np.asarray(sample(Sampler.create(temperature=1.0), logits, *where))
    sampler = Sampler.create(temperature=1.0, **options)
    drawn, left = np.asarray(sample(sampler, logits, *where)), np.asarray(cut(sampler, logits))
    stays = np.isfinite(left[np.arange(400), free])
    assert 40 < stays.sum() < 390
    assert (drawn == free)[stays].all()
    assert np.isfinite(left[np.arange(400), drawn]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "temperature: expected a finite number >= 0, got -0.5"),
        ({"temperature": float("nan")}, "temperature: expected a finite number >= 0, got nan"),
        ({"temperature": float("inf")}, "temperature: expected a finite number >= 0, got inf"),
        ({"temperature": "hot"}, "temperature: expected a finite number >= 0, got 'hot'"),
        ({"top_k": 0}, "top_k: expected None or an integer >= 1, got 0"),
        ({"top_k": 2.5}, "top_k: expected an integer, got 2.5"),
        ({"top_p": 0.0}, "top_p: expected None or a number in (0, 1], got 0.0"),
        ({"top_p": 1.5}, "top_p: expected None or a number in (0, 1], got 1.5"),
        ({"top_p": float("nan")}, "top_p: expected None or a number in (0, 1], got nan"),
        ({"seed": -1}, "seed: expected an integer in [0, 2**32), got -1"),
        ({"seed": 2**32}, "seed: expected an integer in [0, 2**32), got 4294967296"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Sampler.create(**options)


def test_the_largest_seed_works():
    assert draw(Sampler.create(temperature=1.0, seed=2**32 - 1), LOGITS, 20_000).shape == (20_000,)


def test_ranked_draws_are_the_draws_without_those_before_them():
    """With the same noise: Gumbel top-k. Greedy, free and cut rows side by side."""
    rows, count = 60, 3
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, 12), "f4")
    samplers = RowSamplers(
        seed=np.arange(rows, dtype=np.uint32), draw_index=np.zeros(rows, np.int32),
        temperature=np.array([0, 1, 0.7] * (rows // 3), np.float32),
        top_k=np.array([0, 0, 5] * (rows // 3), np.int32), top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
    )  # fmt: skip
    positions = np.arange(rows, dtype=np.int32)
    draw = jax.jit(RowSamplers.ranked, static_argnums=3)
    ranked = np.asarray(draw(samplers, logits, positions, count))
    assert ranked[:, 0].tolist() == sample(samplers, logits, positions).tolist()
    assert (np.diff(np.sort(ranked, axis=1)) > 0).all()
    np.testing.assert_array_equal(ranked[::3], np.argsort(-logits[::3], axis=1)[:, :count])
    keys = samplers.keys(positions)
    noise = np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, (12,), jnp.float32))(keys))
    np.testing.assert_array_equal(
        ranked[1::3], np.argsort(-(logits + noise)[1::3], axis=1)[:, :count]
    )
    likeliest = np.argsort(-logits[2::3], axis=1)[:, :5]
    assert all(set(a) <= set(b) for a, b in zip(ranked[2::3], likeliest, strict=True))
    few = dataclasses.replace(samplers, top_k=np.ones(rows, np.int32))
    one = np.asarray(draw(few, logits, positions, count))[1::3]
    np.testing.assert_array_equal(one, np.argmax(logits[1::3], axis=1)[:, None].repeat(count, 1))
