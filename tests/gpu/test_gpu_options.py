# SPDX-License-Identifier: Apache-2.0
"""MLA, trees, rows that slid, rope inside and fp8 outputs on a GPU, at sizes that fill it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pinned_batches
import pytest
import rope_batches

from jax_paged import ragged_paged_attention
from jax_paged.testing import (
    TOLERANCES,
    Case,
    assert_attention_close,
    dense_oracle,
    make_batch,
    mla,
)
from jax_paged.testing.options import random_parents, trees_of

pytestmark = pytest.mark.gpu

SPLITS = ({}, {"num_kv_splits": 5}, {"split_tokens": 256})


def run(batch, **options):
    arguments, defaults = batch.ragged()
    return ragged_paged_attention(
        *arguments, **defaults | options, return_lse=True, implementation="native"
    )


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", [16, 128])
def test_mla_at_deepseek_sizes_matches_float64_softmax(heads, dtype, splits):
    batch = mla.make_mla(
        576, 512, heads, [1, 9, 0, 1], [1500, 70, 5, 64], dtype=dtype, page_size=64, num_tokens=13
    )
    result = mla.attend(batch, implementation="native", **splits)
    assert_attention_close(*result, *dense_oracle(batch))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_mla_of_8_bit_rows_matches_float64_softmax(heads, kind):
    batch = mla.make_mla(576, 512, heads, [1, 9, 1], [1500, 70, 64], dtype="bfloat16", page_size=64)
    scale = np.float32(0.03 if kind == "int8" else 0.1)
    stored, real = mla.eight_bit(batch, kind, scale)
    result = mla.attend(stored, kv_scale=scale, implementation="native")
    assert_attention_close(*result, *dense_oracle(real))


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_trees_on_long_rows_match_float64_softmax(head_dim, dtype, layout, splits):
    rng = np.random.default_rng(head_dim)
    case = Case("tree", 8, 2, head_dim, layout=layout)
    batch = make_batch(case, jnp.dtype(dtype), [8, 60, 1, 200], [3000, 900, 65, 300], seed=4)
    sizes = {8: "tree", 60: "forest", 1: "chain", 0: "none"}
    parents = [random_parents(rng, size, kind) for size, kind in sizes.items()]
    options = trees_of(parents)
    assert_attention_close(*run(batch, **options, **splits), *dense_oracle(batch, **options))
    options["sliding_window"] = 200
    assert_attention_close(*run(batch, **options, **splits), *dense_oracle(batch, **options))


@pytest.mark.parametrize("layout", ["HND", "NHD", "vllm5d"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_slid_match_float64_softmax(head_dim, dtype, layout):
    batch = pinned_batches.small_batch(dtype, head_dim=head_dim, layout=layout)
    batch, offsets = pinned_batches.slid(batch)
    options = {
        "sliding_window": pinned_batches.WINDOW, "num_pinned": pinned_batches.PINNED,
        "slot_offset": offsets,
    }  # fmt: skip
    assert_attention_close(*run(batch, **options), *dense_oracle(batch, **options))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rope_inside_matches_float64_softmax(head_dim, dtype, style):
    batch = rope_batches.batch_of(jnp.dtype(dtype), head_dim=head_dim)
    rope = rope_batches.tables(200, head_dim, style)
    result = run(batch, rope=rope)
    assert_attention_close(*result, *dense_oracle(batch, rope=rope), logit_size=2)


@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8_outputs_are_within_a_step_of_the_float64_softmax(head_dim, dtype, out_dtype):
    case = Case("fp8", 8, 2, head_dim)
    batch = make_batch(case, jnp.dtype(dtype), [1, 100, 1], [2000, 300, 17], seed=7)
    out, lse = run(batch, out_dtype=out_dtype, out_scale=0.05)
    expected, expected_lse = dense_oracle(batch)
    info = jnp.finfo(out_dtype)
    # Half a step of fp8, and what the dtype of q may be off before: at most another half.
    limit = np.abs(expected) * float(info.eps) + 0.05 * float(info.smallest_subnormal)
    limit += TOLERANCES[dtype][1] * np.abs(expected).max()
    error = np.abs(np.asarray(out).astype("f8") * 0.05 - expected)
    assert (error <= limit).all(), f"{error.max():.3g} at {np.argmax(error - limit)}"
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-7, atol=2e-5)


def test_float8_pages_trees_windows_and_fp8_output_go_together():
    batch = make_batch(Case("all", 16, 2, 128), jnp.bfloat16, [4, 30, 1], [600, 90, 33], seed=9)
    codes = {
        name: getattr(batch, name).astype(jnp.float8_e4m3fn) for name in ("k_pages", "v_pages")
    }
    stored = dataclasses.replace(batch, **codes)
    real = {name: pages.astype("f8") for name, pages in codes.items()}
    rng = np.random.default_rng(9)
    options = trees_of([random_parents(rng, n, kind) for n, kind in ((4, "tree"), (30, "forest"))])
    options = {name: np.concatenate([x, x[:1]]) for name, x in options.items()}
    options["tree_sizes"][2] = 0
    options["sliding_window"] = 100
    out, lse = run(stored, **options)
    assert_attention_close(out, lse, *dense_oracle(dataclasses.replace(batch, **real), **options))
