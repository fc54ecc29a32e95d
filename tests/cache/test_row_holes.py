# SPDX-License-Identifier: Apache-2.0
"""Steps in which some rows of a fixed batch take no part: each other row keeps its tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

from jax_paged import (
    NO_TREE,
    KVState,
    attend,
    paged_attention,
    ragged_paged_attention,
    write,
    write_kv,
)

HEADS, KV_HEADS, DIM = 4, 2, 8
SIZES = {
    "num_pages": 40, "page_size": 4, "num_kv_heads": KV_HEADS, "head_dim": DIM, "max_seqs": 4,
    "pages_per_seq": 10, "dtype": "float32",
}  # fmt: skip
IMPLEMENTATIONS = ["native", "reference"]


def attend_densely(q, k, v) -> np.ndarray:
    """Of queries [t, HEADS, DIM], the last of as many tokens [l, KV_HEADS, DIM], in float64."""
    k, v = (np.repeat(np.float64(x), HEADS // KV_HEADS, axis=1) for x in (k, v))
    logits = np.einsum("thd,lhd->htl", np.float64(q), k) * DIM**-0.5
    later = np.arange(len(k))[None] > np.arange(len(k) - len(q), len(k))[:, None]
    weights = np.exp(np.where(later[None], -np.inf, logits))
    return np.einsum("htl,lhd->thd", weights / weights.sum(-1, keepdims=True), v)


class Histories:
    """What each row has been given; draws the tokens of the next step."""

    def __init__(self, count: int):
        self.rng, self.count = np.random.default_rng(1), count
        self.k, self.v = ([np.zeros((0, KV_HEADS, DIM), np.float32)] * 4 for _ in "kv")

    def draw(self, num_rows: int) -> tuple[np.ndarray, ...]:
        tokens = num_rows * self.count
        heads = (HEADS, KV_HEADS, KV_HEADS)
        return tuple(self.rng.standard_normal((tokens, n, DIM), "f4") for n in heads)

    def expected(self, rows, q, k, v) -> np.ndarray:
        """What attention gives for the rows of a step, whose K and V are kept."""
        out = np.zeros(q.shape)
        for place, row in enumerate(rows):
            own = slice(place * self.count, (place + 1) * self.count)
            if row == -1:
                continue
            self.k[row] = np.concatenate([self.k[row], k[own]])
            self.v[row] = np.concatenate([self.v[row], v[own]])
            out[own] = attend_densely(q[own], self.k[row], self.v[row])
        return out


def holes(num_rows: int):
    """Every choice of rows that take part, in an order of the rows of its own."""
    for number, part in enumerate(itertools.product([True, False], repeat=num_rows)):
        rows = np.roll(np.arange(num_rows), number)
        yield np.where(part, rows, -1).astype(np.int32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_token_i_is_that_of_rows_i(num_rows, implementation):
    """The pattern of README and docs/state.md, with every pattern of holes after another."""

    @jax.jit
    def step(kv, rows, q, k, v):
        kv, reserved = kv.reserve(rows, 1)
        kv, batch, stepped = kv.step(rows, 1)
        options = {"layer": 0, "implementation": implementation}
        pools = write_kv(kv.k_pages, kv.v_pages, k, v, batch.slot_mapping, **options)
        views = (*pools, batch.page_table, batch.seq_lens)
        out = paged_attention(q, *views, **options)
        ragged = ragged_paged_attention(q, *views, batch.cu_q_lens, batch.num_seqs, **options)
        kv = kv.replace(k_pages=pools[0], v_pages=pools[1])
        return kv, out, ragged, reserved | stepped

    kv, histories = KVState.create(num_layers=1, **SIZES), Histories(1)
    for rows in holes(num_rows):
        q, k, v = histories.draw(num_rows)
        kv, out, ragged, status = step(kv, rows, q, k, v)
        assert not np.any(status)
        expected = histories.expected(rows, q, k, v)
        for got in (out, ragged):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
            assert not np.asarray(got)[rows == -1].any(), "exactly 0"
        assert kv.table.seq_lens.tolist() == [len(k) for k in histories.k]


@pytest.mark.parametrize("implementation", first_of(IMPLEMENTATIONS, 1))
@pytest.mark.parametrize("trees", [False, True])
def test_several_tokens_of_each_row_keep_their_places(trees, implementation):
    """In groups of layers, too; as nodes of chains, which is what plain tokens are."""
    num_rows, count = 3, 3
    kv = KVState.create(layer_kinds=["full", 1000], **SIZES)
    histories = Histories(count)
    parents = np.tile(np.arange(count) - 1, num_rows) if trees else None

    @jax.jit
    def step(kv, rows, q, k, v):
        kv, batch, status = kv.append(
            rows, count, num_tokens=num_rows * count + 2,
            tree_parents=None if parents is None else np.append(parents, [NO_TREE] * 2),
        )  # fmt: skip
        q, k, v = (jnp.concatenate([x, jnp.full((2, *x.shape[1:]), jnp.nan)]) for x in (q, k, v))
        outs = []
        for layer in range(2):
            options = {"layer": layer, "implementation": implementation}
            kv = write(k, v, kv, batch, **options)
            outs.append(attend(q, kv, batch, **options))
        committed = jnp.zeros_like(status)
        if trees:
            kv, committed = kv.commit_tree(rows, count - 1)
        return kv, outs, status | committed

    for rows in holes(num_rows):
        q, k, v = histories.draw(num_rows)
        kv, outs, status = step(kv, rows, q, k, v)
        assert not np.any(status)
        expected = histories.expected(rows, q, k, v)
        for out in outs:
            np.testing.assert_allclose(out[:-2], expected, rtol=1e-4, atol=1e-5)
            assert not np.asarray(out)[:-2][np.repeat(rows == -1, count)].any(), "exactly 0"
            assert not np.asarray(out)[-2:].any(), "padding at the end"
