# SPDX-License-Identifier: Apache-2.0
"""ragged_attention: rows of plain K and V, against float64 softmax and the paged reference."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope_batches import tables

import jax_paged.testing
from jax_paged import explain, ragged_attention, ragged_paged_attention
from jax_paged.testing import (
    TOLERANCES,
    assert_attention_close,
    dense_oracle,
    make_batch,
)
from jax_paged.testing.flat import CASE, make_flat
from jax_paged.testing.options import random_parents, trees_of

OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "soft_cap": {"soft_cap": 2.0},
    "alibi": {"alibi_slopes": np.linspace(0.01, 0.5, 6, dtype="f4")},
    "sinks": {"sinks": np.linspace(-1, 2, 6, dtype="f4")},
    "all": {
        "sliding_window": 9,
        "soft_cap": 3.0,
        "alibi_slopes": np.linspace(0.01, 0.5, 6, dtype="f4"),
        "sinks": np.linspace(-1, 2, 6, dtype="f4"),
    },
    "pins": {
        "sliding_window": np.array([9, 0, 5, 2, 30], "i4"),
        "num_pinned": np.array([2, 0, 7, 1, 20], "i4"),
    },
    "rope": {"rope": tables(150, 16)},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_softmax_attention_of_each_row_with_its_own_keys(options, causal, implementation):
    case = dataclasses.replace(CASE, causal=causal)
    flat = make_flat([7, 1, 0, 3, 40], [7, 80, 4, 1, 70], case=case, seed=1)
    result = flat.attend(**options, implementation=implementation)
    turned = "rope" in options
    assert_attention_close(*result, *dense_oracle(flat.paged, **options), is_turned=turned)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_last_keys_of_a_row_may_be_a_tree(options, implementation):
    rng = np.random.default_rng(4)
    parents = [random_parents(rng, size, "forest") for size in (9, 0, 40, 3, 0)]
    flat = make_flat([5, 4, 40, 1, 7], [9, 30, 90, 20, 7], seed=2, live=4)
    options = options | trees_of(parents)
    result = flat.attend(**options, implementation=implementation)
    turned = "rope" in options
    assert_attention_close(*result, *dense_oracle(flat.paged, **options), is_turned=turned)
    chains = flat.attend(implementation=implementation)
    assert np.abs(np.asarray(result[0]) - chains[0]).max() > 0.01


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_dtypes_dead_rows_and_padding(dtype, implementation):
    flat = make_flat([1, 33, 2, 5, 9], [90, 33, 0, 12, 9], dtype=dtype, live=3, padding=17)
    out, lse = flat.attend(implementation=implementation)
    assert_attention_close(out, lse, *dense_oracle(flat.paged))
    padding = np.asarray(out)[36:]
    assert padding.shape[0] == 17
    np.testing.assert_array_equal(padding, 0)
    assert np.isneginf(np.asarray(lse)[36:]).all()


def test_it_gives_the_bits_of_pages_that_hold_the_same_tokens():
    flat = make_flat([5, 1, 20], [50, 64, 31])
    batch = make_batch(
        dataclasses.replace(CASE, page_size=16), jnp.dtype("f4"), [5, 1, 20], [50, 64, 31]
    )
    k_pages, v_pages = batch.k_pages.copy(), batch.v_pages.copy()
    for row in range(3):
        for token in range(batch.seq_lens[row]):
            place = (batch.page_table[row, token // 16], slice(None), token % 16)
            k_pages[place] = flat.k[flat.cu_kv_lens[row] + token]
            v_pages[place] = flat.v[flat.cu_kv_lens[row] + token]
    q = jnp.asarray(flat.paged.q)
    paged = ragged_paged_attention(
        q, jnp.asarray(k_pages), jnp.asarray(v_pages), batch.page_table, batch.seq_lens,
        batch.cu_q_lens, return_lse=True, split_tokens=64,
    )  # fmt: skip
    for mine, theirs in zip(flat.attend(split_tokens=64), paged, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_tight_max_kv_len_changes_nothing_and_a_short_one_cuts(implementation):
    flat = make_flat([3, 2], [21, 9], case=dataclasses.replace(CASE, causal=False))
    whole = flat.attend(implementation=implementation)
    tight = flat.attend(implementation=implementation, max_kv_len=21)
    atol = 0 if implementation == "native" else 2e-6  # XLA may add the 21 terms in another order
    for a, b in zip(whole, tight, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=atol)
    cut = flat.attend(implementation=implementation, max_kv_len=6)
    lengths = np.array([6, 6], np.int32)
    expected = dense_oracle(dataclasses.replace(flat.paged, seq_lens=lengths))
    assert_attention_close(*cut, *expected)


def test_wild_bounds_are_clamped(implementation):
    flat = make_flat([2, 2, 2], [10, 10, 10], padding=0)
    bounds = np.array([-7, 12, 4, 2**31 - 1], np.int32)  # rows [0, 12), none, [12, 30)
    wild = dataclasses.replace(flat, cu_kv_lens=bounds)
    table = np.full((3, 30), -1, np.int32)
    table[0, :12], table[2, :18] = np.arange(12), np.arange(12, 30)
    paged = dataclasses.replace(flat.paged, page_table=table, seq_lens=np.array([12, 0, 18]))
    assert_attention_close(*wild.attend(implementation=implementation), *dense_oracle(paged))


def test_gradients_are_those_of_the_reference_and_padding_gets_none():
    flat = make_flat([3, 1], [5, 7])
    bounds = flat.paged.cu_q_lens, flat.cu_kv_lens

    def loss(implementation, q, k, v):
        out, lse = ragged_attention(
            q, k, v, *bounds, return_lse=True, implementation=implementation
        )
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isneginf(lse), jnp.float32(0), lse))

    arrays = tuple(map(jnp.asarray, (flat.paged.q, flat.k, flat.v)))
    native = jax.jit(jax.grad(functools.partial(loss, "native"), (0, 1, 2)))(*arrays)
    expected = jax.jit(jax.grad(functools.partial(loss, "reference"), (0, 1, 2)))(*arrays)
    for mine, theirs in zip(native, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(mine[-3:], 0)  # padding
        assert np.abs(mine).max() > 0


def test_vmap_is_one_call_after_another():
    flats = [make_flat([3, 1], [5, 7], seed=seed) for seed in range(2)]
    q, k, v = (
        jnp.stack([jnp.asarray(x) for x in arrays])
        for arrays in zip(*((f.paged.q, f.k, f.v) for f in flats), strict=True)
    )
    bounds = flats[0].paged.cu_q_lens, flats[0].cu_kv_lens
    mapped = jax.vmap(lambda *x: ragged_attention(*x, *bounds))(q, k, v)
    for i, flat in enumerate(flats):
        np.testing.assert_array_equal(mapped[i], flat.attend()[0])


def test_k_and_v_are_not_copied():
    q, k = jnp.ones((1, 8, 64), jnp.float32), jnp.ones((5000, 2, 64), jnp.float32)
    call = jax.jit(lambda q, k: ragged_attention(q, k, k, jnp.array([0, 1]), jnp.array([0, 5000])))
    compiled = call.lower(q, k).compile()
    assert not jax_paged.testing.pool_sized_ops(compiled, k)


def test_no_array_has_a_place_for_each_row_and_token():
    q, k = jnp.ones((7, 8, 64), jnp.float32), jnp.ones((5003, 2, 64), jnp.float32)
    bounds = jnp.arange(8), jnp.arange(8) * 700
    text = jax.jit(ragged_attention).lower(q, k, k, *bounds).compile().as_text()
    assert "5003" in text
    assert not re.search(r"\[(7,5003|5003,7|35021)\b", text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"k": jnp.ones((5, 2, 16), jnp.float32)},
            r"k: expected shape \[kv_tokens, num_kv_heads, head_dim=8\]",
        ),
        (
            {"v": jnp.ones((4, 2, 8), jnp.float32)},
            r"v: expected shape \[kv_tokens=5, num_kv_heads=2, head_d",
        ),
        (
            {"k": jnp.ones((5, 2, 8), "bfloat16")},
            "k: expected dtype float32 or 8-bit, got bfloat16",
        ),
        (
            {"q": jnp.ones((3, 3, 8), jnp.float32)},
            "q: expected num_q_heads to be a multiple of num_kv_heads=2",
        ),
        ({"cu_kv_lens": jnp.array([0, 5])}, r"cu_kv_lens: expected shape \[num_seqs\+1=3\], got"),
        ({"max_kv_len": -1}, "max_kv_len: expected None or an int >= 0, got -1"),
        (
            {"tree": jnp.zeros((2, 1, 2), jnp.int32)},
            "tree_sizes: expected an array where tree is one",
        ),
        ({"sm_scale": -1.0}, "sm_scale: expected a finite scale >= 0"),
    ],
)
def test_wrong_arguments_are_named(change, text):
    arguments = {
        "q": jnp.ones((3, 4, 8), jnp.float32),
        "k": jnp.ones((5, 2, 8), jnp.float32),
        "v": jnp.ones((5, 2, 8), jnp.float32),
        "cu_q_lens": jnp.array([0, 2, 3]),
        "cu_kv_lens": jnp.array([0, 2, 5]),
    }
    with pytest.raises(ValueError, match=text):
        ragged_attention(**{**arguments, **change})


def test_explain_tells_the_plan_of_flat_rows():
    flat = make_flat([40, 1, 0], [40, 9, 3])
    bounds = flat.paged.cu_q_lens, flat.cu_kv_lens
    plan = explain("ragged_attention", flat.paged.q, flat.k, flat.v, *bounds)
    assert plan["kernels"] == ["prefill", "decode", "empty"]
