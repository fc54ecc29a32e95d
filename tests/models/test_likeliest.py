# SPDX-License-Identifier: Apache-2.0
"""Cuts without sorting, against a sort in float64: the same tokens, few or many, ties by id."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.models.decoder import likeliest
from jax_paged.models.decoder.likeliest import (
    first_largest,
    keep_top_k,
    keep_top_p,
    largest_in_order,
)

argmax = jax.jit(lambda x: jnp.argmax(x, axis=-1))
top_k, top_p = jax.jit(keep_top_k), jax.jit(keep_top_p)


def scaled(rng, rows: int, size: int, kind: str) -> np.ndarray:
    """Logits of a kind, the largest 0."""
    x = rng.standard_normal((rows, size)).astype(np.float32)
    if kind == "peaked":
        x *= 6
    if kind == "ties":
        x = np.round(x * 2) / 2
    if kind == "banned":
        x[:, 1:][rng.random((rows, size - 1)) < 0.5] = -np.inf
    if kind == "equal":
        x[:] = 1
    return x - x.max(axis=-1, keepdims=True)


def in_order(row: np.ndarray) -> np.ndarray:
    return np.argsort(-row, kind="stable")


KINDS = ["flat", "peaked", "ties", "banned", "equal"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 256, 257, 3000])
def test_top_k_keeps_the_first_k_of_a_stable_sort(size, kind):
    wanted = [0, 1, 2, size // 2, 255, 256, 257, size - 1, size, 2**31 - 1]
    logits = scaled(np.random.default_rng(size), len(wanted), size, kind)
    kept = np.asarray(top_k(logits, np.array(wanted, np.int32)))
    for row, got, k in zip(logits, kept, wanted, strict=True):
        expected = np.full_like(row, -np.inf)
        stay = in_order(row)[: k or size]
        expected[stay] = row[stay]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 256, 257, 3000])
def test_top_p_keeps_the_fewest_that_reach_it(size, kind):
    """What is kept reaches p, and without its last token does not: to 1e-6, rounding of counts."""
    wanted = np.array([1e-30, 0.01, 0.3, 0.5, 0.9, 0.99, 0.9999, 1], np.float32)
    logits = scaled(np.random.default_rng(size), len(wanted), size, kind)
    kept = np.isfinite(np.asarray(top_p(logits, wanted)))
    for row, got, p in zip(logits, kept, wanted, strict=True):
        weights = np.exp(row.astype(np.float64))
        weights /= weights.sum()
        order = in_order(row)
        count = int(got.sum())
        assert count >= 1
        if p == 1:
            np.testing.assert_array_equal(got, np.isfinite(row))
            continue
        assert got[order[:count]].all(), "the likeliest, and of equals the first"
        assert weights[got].sum() > p - 1e-6
        assert count == 1 or weights[order[: count - 1]].sum() < p + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_finds_what_the_look_finds(kind, monkeypatch):
    """The same cut however many tokens of other rows are needed."""
    rng = np.random.default_rng(3)
    logits, k = scaled(rng, 12, 2000, kind), rng.integers(1, 250, 12).astype(np.int32)
    p = rng.uniform(0.01, 0.12 if kind in ("flat", "equal", "banned") else 0.3, 12)
    p = p.astype(np.float32)
    looked = top_k(logits, k), top_p(logits, p)
    monkeypatch.setattr(likeliest, "_FEW", 1)
    anew = [jax.jit(lambda *of, cut=cut: cut(*of)) for cut in (keep_top_k, keep_top_p)]
    for one, cut, most in zip(looked, anew, (k, p), strict=True):
        assert np.isfinite(one).sum(axis=1).max() < 256
        np.testing.assert_array_equal(one, cut(logits, most))


def test_rows_do_not_change_each_other():
    """A row that needs many tokens makes all rows search."""
    rng = np.random.default_rng(4)
    logits = np.concatenate([scaled(rng, 6, 3000, "peaked"), scaled(rng, 1, 3000, "flat")])
    p = np.full(7, 0.9, np.float32)
    together = np.asarray(top_p(logits, p))
    assert np.isfinite(together).sum(axis=1).max() > 1000
    for row in range(7):
        alone = np.asarray(top_p(logits[row : row + 1], p[:1]))
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize(("cut", "most"), [(top_k, np.int32([500])), (top_p, np.float32([0.9]))])
def test_one_value_may_be_for_all_rows(cut, most):
    logits = scaled(np.random.default_rng(6), 3, 3000, "flat")
    np.testing.assert_array_equal(cut(logits, most), cut(logits, most.repeat(3)))


@pytest.mark.parametrize("cut", [top_k, top_p])
def test_rows_that_ask_for_nothing_are_left_alone(cut):
    logits = scaled(np.random.default_rng(5), 3, 3000, "flat")
    nothing, some = (0, 7) if cut is top_k else (1, 0.1)
    dtype = np.int32 if cut is top_k else np.float32
    kept = np.asarray(cut(logits, np.array([nothing, some, nothing], dtype)))
    np.testing.assert_array_equal(kept[::2], logits[::2])
    assert np.isfinite(kept[1]).sum() < 200


@pytest.mark.parametrize(("platform", "looks"), [("cpu", True), ("cuda", False)])
def test_nothing_sorts_the_vocabulary(platform, looks):
    """On a CPU the likeliest few are looked at; for a GPU XLA would sort for that, too."""
    logits = np.zeros((2, 3000), np.float32)
    for cut, most in ((top_k, np.int32([5, 5])), (top_p, np.float32([0.5, 0.5]))):
        text = cut.trace(logits, most).lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.sort" not in text
        assert (f"k = {likeliest._FEW}" in text) == looks
        assert ("chlo.top_k" in text) == looks


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 96, 384, 1000])
def test_the_first_of_the_largest_is_that_of_argmax(columns, dtype):
    rng = np.random.default_rng(columns)
    x = rng.integers(-4, 4, (12, columns)).astype(np.float32)
    x[1], x[2], x[3, rng.integers(columns)], x[4, -1] = -np.inf, 5, np.inf, 9
    x[5], x[6, rng.integers(0, columns, 3)] = np.nan, np.nan
    found, expected = (np.asarray(f(jnp.asarray(x, dtype))) for f in (first_largest, argmax))
    is_number = ~np.isnan(x).any(axis=1)
    np.testing.assert_array_equal(found[is_number], expected[is_number])
    assert ((found >= 0) & (found < columns)).all()


def test_the_largest_in_order_are_those_of_a_stable_sort_and_then_the_first_again():
    x = np.float32([[1, 3, 3, 2], [0, -np.inf, 5, -np.inf], [-np.inf, -np.inf, -np.inf, 1]])
    found = np.asarray(jax.jit(largest_in_order, static_argnums=1)(x, 3))
    assert found.tolist() == [[1, 2, 3], [2, 0, 2], [3, 3, 3]]
