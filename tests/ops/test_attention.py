# SPDX-License-Identifier: Apache-2.0
"""Attention on good input: against a dense float64 softmax, and the bits that the docs promise."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import paged_attention, ragged_paged_attention
from jax_paged.layout import LAYOUTS, convert_pages, is_one_pool
from jax_paged.testing import (
    CASES,
    TOLERANCES,
    Case,
    assert_attention_close,
    dense_oracle,
    make_batch,
)

pytestmark = pytest.mark.cuda
emulated_deep = pytest.mark.cuda(deep=True)
kernels = pytest.mark.parametrize("implementation", ["native", "emulated"])
DTYPES = tuple(TOLERANCES)
SMALL = Case("small", 8, 2, 64, page_size=8)
SPLITS = (
    {},
    {"num_kv_splits": 1},
    {"num_kv_splits": 4},
    {"num_kv_splits": 1000},
    {"split_tokens": 1},
    {"split_tokens": 64},
    {"split_tokens": 100},
    {"split_tokens": 512},
)


def run(batch, implementation, **options):
    """(out, lse) of a batch through `ragged_paged_attention`."""
    arguments, defaults = batch.ragged()
    return ragged_paged_attention(
        *arguments, **(defaults | options), return_lse=True, implementation=implementation
    )


def assert_same_bits(a, b):
    """Both arrays hold the same bytes."""
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@emulated_deep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_mixed_batch_matches_float64_softmax(name, dtype, implementation):
    case = CASES[name]
    page = case.page_size
    q_lens = [1, 0, 19, 1, 3, page % 37, 1]
    seq_lens = [page + 1, 2 * page, 19, 0, page - 1, 2 * page, 1]
    batch = make_batch(case, dtype, q_lens, seq_lens, num_tokens=sum(q_lens) + 5, seed=len(name))
    assert_attention_close(*run(batch, implementation), *dense_oracle(batch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_decode_matches_float64_softmax(name, dtype, implementation):
    case = CASES[name]
    page = case.page_size
    seq_lens = [3 * page, 1, page + 1, 0, page - 1]
    batch = make_batch(case, dtype, [1] * 5, seq_lens, seed=len(name))
    out, lse = paged_attention(
        *batch.operands(), layout=case.layout, return_lse=True, implementation=implementation
    )
    assert_attention_close(out, lse, *dense_oracle(batch))


@emulated_deep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("v_head_dim", [32, 64, 128])
def test_layouts_stacks_and_value_dims_match(layout, num_layers, v_head_dim, implementation):
    case = dataclasses.replace(SMALL, layout=layout, num_layers=num_layers, v_head_dim=v_head_dim)
    batch = make_batch(case, jnp.bfloat16, [1, 20, 3], [40, 33, 3], shared_pages=True)
    assert_attention_close(*run(batch, implementation), *dense_oracle(batch))


@kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_batches_of_stacked_pages_match(dtype, layout, causal, implementation):
    case = dataclasses.replace(SMALL, layout=layout, causal=causal, num_layers=3)
    q_lens, seq_lens = [1, 4, 0, 37, 1, 5, 9], [70, 66, 9, 37, 0, 2, 200]
    batch = make_batch(case, dtype, q_lens, seq_lens, num_tokens=64, seed=3)
    assert_attention_close(*run(batch, implementation), *dense_oracle(batch))


@kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(8, 8), (40, 40), (64, 128), (512, 24)])
def test_any_head_dims_match(head_dim, v_head_dim, dtype, layout, implementation):
    case = Case("odd", 6, 2, head_dim, page_size=5, v_head_dim=v_head_dim, layout=layout)
    batch = make_batch(case, dtype, [1, 7, 1], [66, 9, 1], num_tokens=11, seed=4)
    assert_attention_close(*run(batch, implementation), *dense_oracle(batch))


@emulated_deep
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
def test_long_prompt_matches(layout, dtype, causal, implementation):
    case = Case("long", 4, 2, 64, causal=causal, layout=layout)
    batch = make_batch(case, dtype, [300, 1, 77], [300, 2000, 200], seed=3)
    assert_attention_close(*run(batch, implementation), *dense_oracle(batch))


@kernels
@pytest.mark.parametrize("options", SPLITS, ids=str)
@pytest.mark.parametrize(
    ("case", "longest"), [(SMALL, 2000), (Case("wide", 20, 1, 128), 600)], ids=["small", "wide"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_split_matches(dtype, case, longest, options, implementation):
    longest = longest if implementation == "native" else 600  # an emulator takes its time
    batch = make_batch(case, dtype, [1, 1, 4, 0, 12], [longest, 513, 300, 9, 70], seed=4)
    assert_attention_close(*run(batch, implementation, **options), *dense_oracle(batch))
    decode = make_batch(case, dtype, [1, 1, 1], [longest, 0, 511], seed=5)
    out, lse = paged_attention(
        *decode.operands(), return_lse=True, implementation=implementation, **options
    )
    assert_attention_close(out, lse, *dense_oracle(decode))


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_matches_reference(dtype):
    batch = make_batch(SMALL, dtype, [1, 30, 7, 0, 1], [100, 30, 64, 10, 0], num_tokens=44, seed=6)
    expected, expected_lse = run(batch, "reference")
    out, lse = run(batch, "native")
    # Both are within the tolerance of the exact answer, so they are within twice it of each other.
    relative, _ = TOLERANCES[dtype]
    expected, out = (np.asarray(x).astype(np.float64) for x in (expected, out))
    error = np.linalg.norm(out - expected, axis=-1)
    assert (error <= 2 * relative * np.linalg.norm(expected, axis=-1)).all()
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=4e-5)


@emulated_deep
def test_paged_attention_is_ragged_attention_with_one_query_per_row(implementation):
    batch = make_batch(SMALL, jnp.float32, [1] * 4, [31, 0, 8, 100], seed=7)
    out, lse = run(batch, implementation, sm_scale=None)
    decode, decode_lse = paged_attention(
        *batch.operands(), return_lse=True, implementation=implementation
    )
    np.testing.assert_allclose(decode, out, rtol=0, atol=1e-6)
    np.testing.assert_allclose(decode_lse, lse, rtol=0, atol=1e-5)


@emulated_deep
def test_prefill_in_chunks_gives_what_prefill_at_once_gives(implementation):
    whole = make_batch(SMALL, jnp.float32, [100], [100], seed=8)
    out, _ = run(whole, implementation)
    for start, end in [(0, 37), (37, 64), (64, 65), (65, 100)]:
        part = dataclasses.replace(
            whole,
            q=whole.q[start:end],
            seq_lens=np.array([end], np.int32),
            cu_q_lens=np.array([0, end - start], np.int32),
        )
        np.testing.assert_allclose(run(part, implementation)[0], out[start:end], rtol=0, atol=2e-6)


def test_empty_rows_are_exactly_zero_and_padding_never_shows(implementation):
    batch = make_batch(
        SMALL, jnp.float16, [2, 1, 1, 9], [0, 5, 0, 9], num_seqs=3, num_tokens=11, seed=9
    )
    out, lse = run(batch, implementation)
    empty = np.array([True, True, False, True] + [False] * 7)
    empty[4:] = True  # padding, whose queries are NaN
    assert_same_bits(out[empty], np.zeros_like(out[empty]))
    np.testing.assert_array_equal(np.isneginf(lse), np.repeat(empty[:, None], 8, axis=1))
    assert np.abs(np.asarray(out[2])).min() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("q_len", "seq_len"), [(5, 2), (50, 30), (200, 1), (129, 128), (40, 0)])
def test_queries_before_the_first_key_see_nothing(q_len, seq_len, dtype, implementation):
    batch = make_batch(SMALL, dtype, [q_len, 1], [seq_len, 20], num_tokens=q_len + 4, seed=10)
    out, lse = run(batch, implementation)
    assert_attention_close(out, lse, *dense_oracle(batch))
    sees = np.arange(q_len) >= q_len - seq_len
    np.testing.assert_array_equal(np.isneginf(lse[:q_len, 0]), ~sees)


def test_return_lse_false_returns_just_the_output(implementation):
    batch = make_batch(SMALL, jnp.float32, [1, 3], [5, 9], seed=11)
    out, lse = run(batch, implementation)
    arguments, options = batch.ragged()
    alone = ragged_paged_attention(*arguments, **options, implementation=implementation)
    assert_same_bits(alone, out)
    assert lse.dtype == jnp.float32
    assert out.dtype == batch.q.dtype


@emulated_deep
@pytest.mark.parametrize("causal", [True, False])
def test_num_seqs_may_be_none_int_scalar_or_one_element(causal, implementation):
    batch = make_batch(dataclasses.replace(SMALL, causal=causal), jnp.float32, [1, 4], [5, 9])
    (*arguments, _), options = batch.ragged()
    call = functools.partial(
        ragged_paged_attention, *arguments, **options, implementation=implementation
    )
    expected = call()
    for num_seqs in (2, jnp.int32(2), jnp.array([2], jnp.int32), np.int32(2)):
        assert_same_bits(call(num_seqs), expected)
    assert_same_bits(call(1)[:1], expected[:1])
    assert_same_bits(call(1)[1:], np.zeros_like(expected[1:]))


def test_default_scale_is_one_over_root_head_dim(implementation):
    batch = make_batch(SMALL, jnp.float32, [1, 4], [5, 9], seed=12)
    assert_same_bits(
        run(batch, implementation, sm_scale=None)[0], run(batch, implementation, sm_scale=0.125)[0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "q_lens", "seq_lens", "scales"),
    [
        (64, [3, 1], [7, 9], (0.0, 0.3, 2.0)), (64, [1, 3], [70, 9], (0.0, -0.3, 2.0)),
        (80, [40, 1], [70, 9], (0.0, -0.3, 0.5)), (256, [40, 1], [70, 9], (0.0, -0.3, 0.5)),
    ],
)  # fmt: skip
def test_scale_may_be_traced_and_zero_gives_the_mean(
    head_dim, q_lens, seq_lens, scales, dtype, implementation
):
    case = dataclasses.replace(SMALL, head_dim=head_dim)
    batch = make_batch(case, dtype, q_lens, seq_lens, seed=13)
    traced = jax.jit(lambda scale: run(batch, implementation, sm_scale=scale))
    for scale in scales:
        expected = dense_oracle(dataclasses.replace(batch, sm_scale=scale))
        # What nvcc compiles rounds elsewhere, and tensor cores cut the last bit of sums. Of logits
        # of the size √head_dim · scale that is more than of their softmax.
        size = max(1.0, abs(scale) * head_dim**0.5) if implementation == "sim" else 1.0
        assert_attention_close(*traced(jnp.float32(scale)), *expected, logit_size=size)


def test_no_rows_no_tokens_no_pages(implementation):
    q = jnp.ones((0, 4, 16), jnp.float32)
    pages = jnp.ones((2, 2, 4, 16), jnp.float32)
    no_rows = (jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros(1, jnp.int32))
    call = functools.partial(ragged_paged_attention, return_lse=True, implementation=implementation)
    assert [x.shape for x in call(q, pages, pages, *no_rows)] == [(0, 4, 16), (0, 4)]
    q = jnp.ones((2, 4, 16), jnp.float32)
    for _ in range(20):  # padding alone, in memory that has held something else
        dirty = [jnp.full(shape, jnp.nan, jnp.float32) for shape in ((2, 4, 16), (2, 4))]
        jax.block_until_ready(dirty)
        del dirty
        out, lse = call(q, pages, pages, *no_rows)
        assert_same_bits(out, np.zeros_like(out))
        assert np.isneginf(lse).all()
    one_row = (jnp.zeros((1, 3), jnp.int32), jnp.ones(1, jnp.int32))
    for table, no_pages in [
        (one_row[0], jnp.ones((0, 2, 4, 16), jnp.float32)),
        (one_row[0][:, :0], pages),
    ]:
        cu_q_lens = jnp.array([0, 2], jnp.int32)
        out, lse = call(q, no_pages, no_pages, table, one_row[1], cu_q_lens)
        assert_same_bits(out, np.zeros_like(out))
        assert np.isneginf(lse).all()


@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 3}, {"split_tokens": 32}], ids=str)
def test_repeated_runs_give_the_same_bits(options, dtype, layout):
    case = dataclasses.replace(SMALL, layout=layout)
    batch = make_batch(case, dtype, [1, 40, 1, 3], [900, 40, 65, 300], seed=14)
    first = run(batch, "native", **options)
    for _ in range(20):
        for a, b in zip(run(batch, "native", **options), first, strict=True):
            assert_same_bits(a, b)


@emulated_deep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_head_dim", [40, None])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_every_layout_gives_the_same_bits(page_size, v_head_dim, dtype, implementation):
    """But on CUDA: there vllm5d pages of a size that is no multiple of 8 have another kernel."""
    case = dataclasses.replace(SMALL, page_size=page_size, v_head_dim=v_head_dim)
    batches = {
        x: make_batch(dataclasses.replace(case, layout=x), dtype, [1, 9, 1], [130, 70, 3], seed=17)
        for x in LAYOUTS
        if v_head_dim is None or not is_one_pool(x)
    }
    results = {x: run(batch, implementation) for x, batch in batches.items()}
    on_cuda = implementation in ("emulated", "sim") or jax.default_backend() == "gpu"
    if on_cuda and page_size % 8 and dtype != jnp.float32:
        assert_attention_close(*results.pop("vllm5d"), *dense_oracle(batches["vllm5d"]))
    for other in results.values():
        for a, b in zip(other, results["HND"], strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split_tokens", [32, 512])
def test_split_tokens_makes_a_row_independent_of_its_batch(split_tokens, dtype):
    batch = make_batch(SMALL, dtype, [1, 1, 30, 1, 2], [700, 33, 400, 1300, 64], seed=15)
    out, lse = run(batch, "native", split_tokens=split_tokens)
    for row, (start, end) in enumerate(itertools.pairwise(batch.cu_q_lens)):
        row_out, row_lse = run(batch.alone(row), "native", split_tokens=split_tokens)
        assert_same_bits(row_out, out[start:end])
        assert_same_bits(row_lse, lse[start:end])


@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_heads_have_the_bits_that_each_has_alone(dtype, layout):
    for num_rows in (2, 9, 18):  # a worker takes one head, two or four together
        seq_lens = [700 - 30 * row for row in range(num_rows)]
        q_dtype = jnp.bfloat16 if dtype == "int8" else dtype
        batch = make_batch(
            Case("heads", 8, 4, 64, page_size=16), q_dtype, [1] * num_rows, seq_lens, seed=17
        )
        q, k, v, table, lens = map(jnp.asarray, batch.ragged()[0][:5])
        scale = None
        if dtype == "int8":
            k, v = ((jnp.nan_to_num(x.astype(jnp.float32)) * 30).astype(jnp.int8) for x in (k, v))
            scale = jnp.linspace(0.02, 0.04, 4, dtype=jnp.float32)
        k, v = convert_pages(k, v, "HND", layout)
        options = {"sliding_window": 500, "num_kv_splits": 1, "layout": layout, "return_lse": True}
        out, lse = paged_attention(q, k, v, table, lens, k_scale=scale, v_scale=scale, **options)
        for head in range(4):
            kv, queries = slice(head, head + 1), slice(2 * head, 2 * head + 2)
            of_head = None if scale is None else scale[kv]
            alone = paged_attention(
                q[:, queries], k[:, kv], v[:, kv], table, lens, k_scale=of_head, v_scale=of_head,
                **options,
            )  # fmt: skip
            assert_same_bits(alone[0], out[:, queries])
            assert_same_bits(alone[1], lse[:, queries])


@emulated_deep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unused_slots_do_not_change_a_bit(layout, implementation):
    case = dataclasses.replace(SMALL, num_layers=2, layout=layout)
    batch = make_batch(case, jnp.float32, [1, 9, 1], [30, 9, 0], num_tokens=14, seed=16)
    expected = run(batch, implementation)
    for filler in (0.0, 1e30, -np.inf):
        filled = dataclasses.replace(
            batch,
            k_pages=np.where(np.isnan(batch.k_pages), np.float32(filler), batch.k_pages),
            v_pages=np.where(np.isnan(batch.v_pages), np.float32(filler), batch.v_pages),
        )
        for a, b in zip(run(filled, implementation), expected, strict=True):
            assert_same_bits(a, b)
