# SPDX-License-Identifier: Apache-2.0
"""Steps that tell what rows share: `attend` reads it once, and gives what it gives without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import KVState, attend, write
from jax_paged.ops import cascade
from jax_paged.testing import pool_sized_ops

PAGE = 8


def shared_state(kind):
    """Five rows that begin with the same three pages, and one that does not; K and V of layer 0."""
    sizes = {"num_pages": 40, "page_size": PAGE, "max_seqs": 6, "pages_per_seq": 8}
    sizes |= {"dtype": jnp.float32}
    if kind == "mla":
        state = KVState.create(layer_kinds=["mla"], latent_dim=48, **sizes)
    else:
        state = KVState.create(num_layers=1, num_kv_heads=2, head_dim=32, **sizes)
    rng = np.random.default_rng(0)

    def append(state, rows, q_lens, **options):
        state, batch, status = state.append(rows, q_lens, num_tokens=int(np.sum(q_lens)), **options)
        assert not np.asarray(status).any()
        tokens = len(batch.slot_mapping)
        if kind == "mla":
            rows = jnp.asarray(rng.standard_normal((tokens, 48), "f4"))
            return write(rows, None, state, batch, layer=0), batch
        k, v = (jnp.asarray(rng.standard_normal((tokens, 2, 32), "f4")) for _ in "kv")
        return write(k, v, state, batch, layer=0), batch

    state, _ = append(state, [0, 5], [3 * PAGE, 5])
    children = np.arange(1, 5)
    state, status = state.fork(np.zeros(4, int), children, np.full(4, 3 * PAGE))
    assert not np.asarray(status).any()
    return append(state, np.arange(6), np.array([1, 2, 3, 1, 1, 2]), cascade=3)


@pytest.mark.parametrize("least", [2 * PAGE, 512])
@pytest.mark.parametrize("layer_window", [None, 100, 7])
@pytest.mark.parametrize("kind", ["full", "mla"])
def test_attend_reads_what_rows_share_once_where_it_is_much(kind, layer_window, least, monkeypatch):
    monkeypatch.setattr(cascade, "LEAST_TOKENS", least)
    monkeypatch.setattr(cascade, "LEAST_SAVED", 0)
    state, batch = shared_state(kind)
    assert len(batch.levels) == 3
    q = jnp.asarray(np.random.default_rng(1).standard_normal((10, 6, 48), "f4"))
    options = {"sm_scale": 0.2, "v_head_dim": 32} if kind == "mla" else {}
    q = q if kind == "mla" else q[..., :32]
    options |= {"sliding_window": layer_window, "return_lse": True}
    call = functools.partial(attend, q, layer=0, **options)
    got = call(state, batch)
    alone = call(state, dataclasses.replace(batch, levels=None))
    for mine, theirs in zip(got, alone, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)
    together = least == 2 * PAGE and layer_window != 7  # a short window hides what they share
    same_bits = all(np.array_equal(*pair) for pair in zip(got, alone, strict=True))
    assert same_bits != together


def test_a_step_may_have_a_cascade_of_two_levels_or_more():
    table = KVState.create(num_layers=1, num_kv_heads=1, head_dim=8, num_pages=4, page_size=4,
                           max_seqs=2, pages_per_seq=2, dtype=jnp.float32).table  # fmt: skip
    assert len(table.append([0, 1], 1, cascade=True)[1].levels) == 2
    assert table.append([0, 1], 1)[1].levels is None
    for wrong in (1, 0, "two"):
        with pytest.raises(ValueError, match="cascade: expected a bool or an int >= 2, got "):
            table.append([0, 1], 1, cascade=wrong)


def test_no_pool_is_copied():
    state, batch = shared_state("full")

    def layer(state, batch, q, k):
        state = write(k, k, state, batch, layer=0)
        out = attend(q, state, batch, layer=0)
        return write(k + out[:, :2], k, state, batch, layer=0), out

    q, k = jnp.ones((10, 6, 32), jnp.float32), jnp.ones((10, 2, 32), jnp.float32)
    compiled = jax.jit(layer, donate_argnums=0).lower(state, batch, q, k).compile()
    assert not pool_sized_ops(compiled, state.k_pages)
