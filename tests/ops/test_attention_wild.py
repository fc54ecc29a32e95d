# SPDX-License-Identifier: Apache-2.0
"""Attention on wild values: no crash, no NaN, and what is still right stays exactly right."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import paged_attention, ragged_paged_attention
from jax_paged.layout import LAYOUTS
from jax_paged.testing import (
    TOLERANCES,
    WILD_PAGE,
    Case,
    assert_attention_close,
    dense_oracle,
    make_batch,
)

pytestmark = pytest.mark.cuda
I32_MAX, I32_MIN = 2**31 - 1, -(2**31)
PAGE_IDS = (-1, WILD_PAGE, "num_pages", I32_MAX, I32_MIN)
CASES = {  # tensor cores take the second one
    "float32": Case("small", 4, 2, 32, page_size=4),
    "bfloat16": Case("small", 8, 2, 64, page_size=8),
}
SMALL = CASES["float32"]
ROWS = (slice(0, 1), slice(1, 8), slice(8, 9), slice(9, 14))  # each row's tokens in `small_batch`
dtypes = pytest.mark.parametrize("dtype", CASES)


def small_batch(dtype="float32", **changes):
    """Four rows, decode and prefill in turn, and two padding tokens."""
    case = dataclasses.replace(CASES[dtype], **changes)
    return make_batch(case, dtype, [1, 7, 1, 5], [30, 7, 21, 12], num_tokens=16)


def run(batch, implementation, **options):
    """(out, lse) of a batch through `ragged_paged_attention`."""
    arguments, defaults = batch.ragged()
    return ragged_paged_attention(
        *arguments, **(defaults | options), return_lse=True, implementation=implementation
    )


def changed(batch, name, index, value):
    """The batch with one element of one index array replaced."""
    array = getattr(batch, name).copy()
    array[index] = value
    return dataclasses.replace(batch, **{name: array})


def without_nan(batch):
    """The batch with numbers in the slots that no row owns."""
    pages = (np.where(np.isnan(x), x.dtype.type(2), x) for x in (batch.k_pages, batch.v_pages))
    return dataclasses.replace(batch, **dict(zip(("k_pages", "v_pages"), pages, strict=True)))


@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 3}, {"split_tokens": 4}], ids=str)
@pytest.mark.parametrize("page_id", PAGE_IDS)
@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
def test_tokens_of_a_page_out_of_range_are_left_out(layout, page_id, options, implementation):
    batch = small_batch(layout=layout)
    page_id = len(batch.k_pages) if page_id == "num_pages" else page_id
    for index in [(0, 0), (0, 3), (1, 1), (2, 5), (3, 2)]:
        holed = changed(batch, "page_table", index, page_id)
        assert_attention_close(*run(holed, implementation, **options), *dense_oracle(holed))
    no_pages = dataclasses.replace(batch, page_table=np.full_like(batch.page_table, page_id))
    out, lse = run(no_pages, implementation, **options)
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("implementation", ["native", "emulated"])
@pytest.mark.parametrize("page_id", PAGE_IDS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("rows", "layout", "page_size"),
    [
        ("decode", "HND", 4), ("decode", "HND", 16), ("decode", "vllm5d", 4),
        ("decode", "vllm5d", 8), ("decode", "vllm5d", 16), ("prefill", "HND", 5),
        ("prefill", "HND", 16), ("prefill", "HND", 544), ("prefill", "vllm5d", 8),
        ("prefill", "vllm5d", 544),
    ],
)  # fmt: skip
def test_long_rows_leave_out_tokens_of_a_page_out_of_range(
    rows, layout, page_size, dtype, page_id, implementation
):
    case = Case("small", 8, 2, 64, page_size=page_size, layout=layout)
    if rows == "decode":
        batch = make_batch(case, dtype, [1, 3, 1], [120, 20, 70], seed=7)
        holes = [(0, 0), (0, 3), (1, 1), (2, 4)]
    else:
        batch = make_batch(case, dtype, [60, 1, 33], [150, 20, 33], seed=19)
        holes = [(0, 3), (0, 9), (2, 1)] if page_size < 544 else [(2, 0)]
    page_id = len(batch.k_pages) if page_id == "num_pages" else page_id
    for row, column in holes:
        batch.page_table[row, column] = page_id
    assert_attention_close(*run(batch, implementation), *dense_oracle(batch))
    nothing = dataclasses.replace(batch, page_table=np.full_like(batch.page_table, page_id))
    assert_attention_close(*run(nothing, implementation), *dense_oracle(nothing))


@pytest.mark.parametrize("page_id", [-1, WILD_PAGE, "num_pages"])
def test_decode_leaves_out_pages_out_of_range(page_id, implementation):
    batch = make_batch(SMALL, jnp.bfloat16, [1, 1], [30, 9])
    page_id = len(batch.k_pages) if page_id == "num_pages" else page_id
    batch = changed(batch, "page_table", (0, [0, 2, 7]), page_id)
    out, lse = paged_attention(*batch.operands(), return_lse=True, implementation=implementation)
    assert_attention_close(out, lse, *dense_oracle(batch))


def test_a_row_of_length_0_reads_none_of_the_pages_that_it_has(implementation):
    batch = without_nan(small_batch())
    for row, tokens in enumerate(ROWS):
        empty = changed(batch, "seq_lens", row, 0)
        out, lse = run(empty, implementation)
        assert_attention_close(out, lse, *dense_oracle(empty))
        assert not np.asarray(out)[tokens].any()


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", [-1, 3, I32_MAX, I32_MIN])
def test_layer_out_of_range_gives_zero(layer, layout, dtype, implementation):
    batch = small_batch(dtype, num_layers=3, layout=layout)
    out, lse = run(batch, implementation, layer=jnp.int32(layer))
    assert not np.asarray(out).astype("f4").any()
    assert np.isneginf(lse).all()


@dtypes
@pytest.mark.parametrize("length", [-1, I32_MIN, 33, I32_MAX])
def test_wild_seq_lens_are_clamped_and_other_rows_do_not_notice(length, dtype, implementation):
    batch = small_batch(dtype)
    expected = run(batch, implementation)
    for row, tokens in enumerate(ROWS):
        wild = changed(batch, "seq_lens", row, length)
        if length > 0:  # the row's slots beyond its own length are NaN: give it real ones
            wild = without_nan(wild)
        out, lse = run(wild, implementation)
        assert_attention_close(out, lse, *dense_oracle(wild))
        others = np.ones(16, bool)
        others[tokens] = False
        np.testing.assert_array_equal(out[others], expected[0][others])
        np.testing.assert_array_equal(lse[others], expected[1][others])


@pytest.mark.parametrize(
    "cu_q_lens",
    [
        [0, 1, 8, 9, I32_MAX],
        [0, 1, 8, 5, 14],
        [0, 1, 0, 9, 14],
        [3, 3, 8, 9, 14],
        [-9, 1, 8, 9, 14],
        [I32_MIN, I32_MAX, I32_MIN, I32_MAX, 0],
        [0, 100, 200, 300, 400],
        [14, 9, 8, 1, 0],
        [0, 0, 0, 0, 0],
    ],
    ids=str,
)
@dtypes
@pytest.mark.parametrize("causal", [True, False])
def test_wild_cu_q_lens_are_made_monotone(cu_q_lens, causal, dtype, implementation):
    batch = small_batch(dtype, causal=causal)
    q = np.random.default_rng(0).standard_normal(batch.q.shape, "f4").astype(batch.q.dtype)
    wild = dataclasses.replace(batch, q=q, cu_q_lens=np.array(cu_q_lens, np.int32))
    assert_attention_close(*run(wild, implementation), *dense_oracle(wild))


@dtypes
@pytest.mark.parametrize("num_seqs", [5, I32_MAX, -1, I32_MIN, 0, 2])
def test_num_seqs_beyond_the_rows_means_all_and_below_zero_none(num_seqs, dtype, implementation):
    batch = dataclasses.replace(small_batch(dtype), num_seqs=num_seqs)
    assert_attention_close(*run(batch, implementation), *dense_oracle(batch))


def test_long_rows_with_wild_bounds_and_lengths(implementation):
    case = Case("wild", 4, 2, 64, page_size=8)
    batch = make_batch(case, jnp.bfloat16, [40, 30, 1], [60, 30, 21], num_tokens=90, seed=21)
    batch = without_nan(batch)
    q = np.random.default_rng(0).standard_normal(batch.q.shape).astype(jnp.bfloat16)
    for bounds in ([0, I32_MAX, 40, 41], [50, 10, 90, I32_MIN], [0, 40, 70, 71]):
        for lengths in ([60, 30, 21], [I32_MAX, -1, 64], [I32_MIN, 65, I32_MAX]):
            of_rows = {"cu_q_lens": np.int32(bounds), "seq_lens": np.int32(lengths)}
            wild = dataclasses.replace(batch, q=q, **of_rows)
            assert_attention_close(*run(wild, implementation), *dense_oracle(wild))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_any_integer_dtype_serves_as_index(dtype, implementation):
    if dtype == "int64" and not jax.config.jax_enable_x64:
        pytest.skip("int64 arrays need JAX_ENABLE_X64")
    batch = small_batch(num_layers=3)
    unsigned = dtype.startswith("u")
    wild = np.iinfo(dtype).max  # as an unused page id; −1 where there is one
    table = batch.page_table.astype(np.int64)
    table[(table < 0) | (table >= batch.k_pages.shape[1])] = wild if unsigned else -1
    q, k_pages, v_pages, _, seq_lens = batch.operands()
    out, lse = ragged_paged_attention(
        q,
        k_pages,
        v_pages,
        jnp.asarray(table.astype(dtype)),
        seq_lens.astype(dtype),
        jnp.asarray(batch.cu_q_lens.astype(dtype)),
        jnp.asarray(4, dtype),
        layer=jnp.asarray(batch.layer, dtype),
        return_lse=True,
        implementation=implementation,
    )
    assert_attention_close(out, lse, *dense_oracle(batch))


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
def test_ids_beyond_i32_never_wrap_into_a_valid_page(dtype, as_array, implementation):
    if as_array is jnp.asarray and dtype != "uint32" and not jax.config.jax_enable_x64:
        pytest.skip("64-bit arrays need JAX_ENABLE_X64")
    batch = small_batch()
    holed = changed(batch, "page_table", (0, 3), -1)
    beyond = {"int64": 2**32 + 1, "uint64": 2**32 + 1, "uint32": 2**31 + 1}[dtype]
    table = batch.page_table.astype(dtype)
    table[0, 3] = beyond
    q, k_pages, v_pages, _, seq_lens = batch.operands()
    out, lse = ragged_paged_attention(
        q, k_pages, v_pages, as_array(table), seq_lens, jnp.asarray(batch.cu_q_lens),
        return_lse=True, implementation=implementation,
    )  # fmt: skip
    assert_attention_close(out, lse, *dense_oracle(holed))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("peak", [1e4, -6e4, -5e4, 6e4])
@pytest.mark.parametrize(("head_dim", "seq_lens"), [(16, [21, 9]), (64, [121, 9])])
def test_huge_logits_neither_overflow_nor_vanish(head_dim, seq_lens, peak, dtype, implementation):
    # Every logit is peak · (1 + j / 64) exactly, so that bf16 holds q and k without rounding.
    case = Case("huge", 2, 1, head_dim, page_size=4)
    batch = make_batch(case, jnp.dtype(dtype), [1, 3], seq_lens)
    owned = ~np.isnan(batch.k_pages.astype("f4"))
    steps = np.random.default_rng(0).integers(0, 64, batch.k_pages.shape[:3])[..., None] / 64
    k_pages = np.where(owned, 1 + steps, np.nan).astype(batch.k_pages.dtype)
    batch = dataclasses.replace(
        batch,
        k_pages=k_pages,
        q=np.full_like(batch.q, np.sign(peak)),
        sm_scale=abs(peak) / head_dim,
    )
    expected, expected_lse = dense_oracle(batch)
    out, lse = run(batch, implementation)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    relative, _ = TOLERANCES[dtype]
    error = np.linalg.norm(np.asarray(out).astype(np.float64) - expected, axis=-1)
    assert (error <= relative * np.linalg.norm(expected, axis=-1)).all()


def test_infinite_logits_of_one_row_stay_in_that_row(implementation):
    batch = small_batch()
    expected, _ = run(batch, implementation)
    q = batch.q.copy()
    q[ROWS[2]] = np.nan
    out, _ = run(dataclasses.replace(batch, q=q), implementation)
    assert np.isnan(out[ROWS[2]]).all(), "a NaN query must not look like an answer"
    for tokens in (ROWS[0], ROWS[1], ROWS[3]):
        np.testing.assert_array_equal(out[tokens], expected[tokens])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_nan_query_stays_in_its_head(dtype, implementation):
    batch = make_batch(CASES["bfloat16"], dtype, [1, 3, 1], [200, 9, 64], seed=14)
    expected, _ = run(batch, implementation)
    q = batch.q.copy()
    q[2, 5] = np.nan
    out = np.asarray(run(dataclasses.replace(batch, q=q), implementation)[0])
    assert np.isnan(out[2, 5].astype("f4")).all()
    others = np.ones(out.shape[:2], bool)
    others[2, 5] = False
    np.testing.assert_array_equal(out[others], np.asarray(expected)[others])


@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 3}, {"split_tokens": 4}], ids=str)
@pytest.mark.parametrize("row", [0, 3])
def test_nan_keys_make_their_row_nan_however_it_is_split(row, options, implementation):
    batch = small_batch()
    expected, _ = run(batch, implementation, **options)
    for pages in (batch.page_table[row, :2], batch.page_table[row, 1:3]):  # splits of NaN alone
        k_pages = batch.k_pages.copy()
        k_pages[pages] = np.nan
        given = dataclasses.replace(batch, k_pages=k_pages)
        out, lse = run(given, implementation, **options)
        last = ROWS[row].stop - 1  # sees them all
        assert np.isnan(out[last]).all()
        assert np.isnan(lse[last]).all()
        for other in {0, 1, 2, 3} - {row}:
            np.testing.assert_array_equal(out[ROWS[other]], expected[ROWS[other]])


@pytest.mark.skipif(not os.environ.get("JAX_PAGED_LONG"), reason="needs JAX_PAGED_LONG=1, 9 GB")
@pytest.mark.parametrize("implementation", ["native", "reference"])  # and in test_emulator.py
def test_pool_of_more_than_two_to_the_31_elements(implementation):
    num_pages, shape = 2**20 + 8, (1, 16, 128)  # 2^31 + 2^14 elements, 4 GiB each in f16
    case = Case("vast", 2, 1, 128)
    rng = np.random.default_rng(0)
    last = rng.standard_normal((2, 8, *shape), "f4").astype(np.float16)
    at_end = jax.jit(
        lambda tail: jnp.zeros((num_pages, *shape), jnp.float16).at[-8:].set(tail),
    )
    k_pages, v_pages = (at_end(jnp.asarray(x)) for x in last)
    table = num_pages - 1 - np.array([[0, 5, 3]], np.int32)
    q = rng.standard_normal((1, 2, 128), "f4").astype(np.float16)
    seq_lens = np.array([41], np.int32)
    out, lse = paged_attention(
        jnp.asarray(q), k_pages, v_pages, jnp.asarray(table), jnp.asarray(seq_lens),
        return_lse=True, implementation=implementation,
    )  # fmt: skip
    batch = make_batch(case, jnp.float16, [1], [41])
    batch = dataclasses.replace(
        batch, q=q, k_pages=last[0], v_pages=last[1], page_table=table - (num_pages - 8)
    )
    assert_attention_close(out, lse, *dense_oracle(batch))
