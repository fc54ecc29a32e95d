# SPDX-License-Identifier: Apache-2.0
"""Attention with an fp8 output: divided by out_scale, rounded to nearest even, clamped."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import paged_attention, ragged_paged_attention
from jax_paged.native import load
from jax_paged.testing import Case, dense_oracle, make_batch

pytestmark = pytest.mark.cuda
QMAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
LENS = [0, 1, 30, 150]


def batch(dtype, dim=40, q_lens=(1, 1, 7, 20), seed=0):
    """A call of ragged attention with one padding token at the end."""
    rng = np.random.default_rng(seed)
    num_pages, page_size, heads = 40, 8, 2
    bounds = np.cumsum([0, *q_lens]).astype(np.int32)
    table = rng.permutation(num_pages)[: 4 * 10].reshape(4, 10)
    table = np.pad(table, ((0, 0), (0, 9)), constant_values=-1).astype(np.int32)
    table[3, 10:] = rng.integers(0, num_pages, 9)
    q = rng.standard_normal((bounds[-1] + 1, 6, dim))
    k, v = (rng.standard_normal((num_pages, heads, page_size, dim)) for _ in "kv")
    # Values over all of fp8's range, subnormal and too large ones among them.
    v = v * 2.0 ** rng.integers(-20, 18, v.shape)
    v = np.clip(v, -6e4, 6e4) if dtype == "float16" else v
    arrays = [jnp.asarray(x, jnp.dtype(dtype)) for x in (q, k, v)]
    return *arrays, *map(jnp.asarray, (table, np.int32(LENS), bounds))


def as_float(x):
    return np.asarray(x).astype(np.float32)


@pytest.mark.cuda(deep=True)
@pytest.mark.parametrize("out_scale", [None, 0.37, 64.0])
@pytest.mark.parametrize("dim", [8, 40, 128])
@pytest.mark.parametrize("out_dtype", list(QMAX))
def test_the_f32_result_is_divided_rounded_and_clamped(out_dtype, dim, out_scale, implementation):
    arguments = batch("float32", dim)
    attend = functools.partial(ragged_paged_attention, *arguments, implementation=implementation)
    plain, plain_lse = attend(return_lse=True)
    scale = None if out_scale is None else jnp.float32(out_scale)
    out, lse = attend(out_dtype=out_dtype, out_scale=scale, return_lse=True)
    assert out.dtype == jnp.dtype(out_dtype)
    limit = QMAX[out_dtype]
    divided = as_float(plain) / np.float32(1 if out_scale is None else out_scale)
    assert out_scale == 64 or (np.abs(divided) > limit).any()
    assert (np.abs(divided) < 2**-6).any()
    expected = np.clip(divided, -limit, limit).astype(jnp.dtype(out_dtype))
    np.testing.assert_array_equal(as_float(out), expected.astype(np.float32))
    np.testing.assert_array_equal(lse, plain_lse)
    assert not as_float(out)[[0, -1]].any(), "no keys, and padding"


@pytest.mark.cuda(deep=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out_dtype", list(QMAX))
def test_results_of_16_bits_agree_to_a_step_of_fp8(out_dtype, dtype, implementation):
    arguments = batch(dtype, 128)
    arguments = (*arguments[:2], jnp.clip(arguments[2], -60, 60), *arguments[3:])
    attend = functools.partial(ragged_paged_attention, *arguments, implementation=implementation)
    plain = as_float(attend())
    out = as_float(attend(out_dtype=out_dtype, out_scale=0.5))
    step = {"float8_e4m3fn": 2**-3, "float8_e5m2": 2**-2}[out_dtype]
    least = {"float8_e4m3fn": 2**-9, "float8_e5m2": 2**-16}[out_dtype]
    np.testing.assert_allclose(out, 2 * plain, rtol=0.6 * step, atol=least)


@pytest.mark.parametrize("out_dtype", list(QMAX))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_result_is_rounded_to_the_nearest_code(dtype, out_dtype, implementation):
    """One key of weight 1, so that out is V over the scale: each rounded once, and clamped."""
    rng = np.random.default_rng(3)
    made = make_batch(Case("fp8", 4, 1, 256), jnp.dtype(dtype), [1, 1, 40], [1, 1, 1])
    exact = rng.choice([-1, 1], (3, 256)) * 2.0 ** rng.uniform(-22, 12, (3, 256))
    exact[0, :6] = [0.0, -0.0, 2.0**-10, 3 * 2.0**-10, np.nan, 1.0625]  # ties among them
    for row in range(3):
        made.v_pages[made.page_table[row, 0], 0, 0] = exact[row].astype(made.v_pages.dtype)
    arguments, options = made.ragged()
    scale, limit = np.float32(0.75), np.float32(jnp.finfo(out_dtype).max)
    out = ragged_paged_attention(
        0 * arguments[0], *arguments[1:], **options, out_dtype=out_dtype, out_scale=scale,
        implementation=implementation,
    )  # fmt: skip
    for row, token in enumerate((0, 1, 41)):
        stored = made.v_pages[made.page_table[row, 0], 0, 0].astype(np.float32)
        codes = np.clip(stored / scale, -limit, limit).astype(jnp.dtype(out_dtype))
        np.testing.assert_array_equal(as_float(out[token]), as_float(np.tile(codes, (4, 1))))


@pytest.mark.parametrize("out_dtype", list(QMAX))
@pytest.mark.parametrize("case", [
    Case("bf16", 8, 2, 128), Case("odd", 3, 1, 24, page_size=5), Case("wide", 6, 3, 192),
])  # fmt: skip
def test_fp8_outputs_of_all_kernels_and_padding(case, out_dtype, implementation):
    made = make_batch(case, jnp.bfloat16, [1, 60, 3, 0], [200, 90, 3, 5], num_tokens=70)
    arguments, options = made.ragged()
    out, lse = ragged_paged_attention(
        *arguments, **options, out_dtype=out_dtype, num_kv_splits=3, return_lse=True,
        implementation=implementation,
    )  # fmt: skip
    expected, expected_lse = dense_oracle(made)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)
    assert not np.asarray(out[64:]).view(np.uint8).any()
    # Half a step: 2^-4 or 2^-3 of a normal number, or half of the smallest number; and bf16's P.
    step = 2.0**-4 if out_dtype.endswith("fn") else 2.0**-3
    smallest = float(jnp.finfo(out_dtype).smallest_subnormal)
    error = np.abs(np.asarray(out).astype(np.float64) - expected)
    peak = np.abs(expected).max()
    assert (error <= step * np.abs(expected) + smallest / 2 + 2.0**-7 * peak).all()


@pytest.mark.parametrize("kv", ["float8_e4m3fn", "int8"])
def test_8_bit_pages_may_give_an_8_bit_output(kv, implementation):
    q, k, v, table, lens, _ = batch("bfloat16", 64, q_lens=(1, 1, 1, 1))
    q, k, v = q[:4], k.astype(jnp.dtype(kv)), jnp.clip(v, -100, 100).astype(jnp.dtype(kv))
    attend = functools.partial(
        paged_attention, q, k, v, table, lens, k_scale=0.5, v_scale=2.0,
        implementation=implementation,
    )  # fmt: skip
    out = as_float(attend(out_dtype=jnp.float8_e4m3fn, out_scale=jnp.float32(3)))
    np.testing.assert_allclose(out, as_float(attend()) / 3, rtol=0.075, atol=2**-9)


@pytest.mark.parametrize("out_dtype", list(QMAX))
def test_nan_stays_nan(out_dtype, implementation):
    q, k, v, table, lens, bounds = batch("float32")
    v = v.at[table[2, 0], 1, 2, 5].set(jnp.nan)
    out = ragged_paged_attention(
        q, k, v, table, lens, bounds, out_dtype=out_dtype, implementation=implementation
    )
    found = np.argwhere(np.isnan(as_float(out))[2:9])
    assert np.unique(found[:, 2]).tolist() == [5]
    assert np.unique(found[:, 1]).tolist() == [3, 4, 5]


def test_out_scale_may_be_traced_and_has_a_gradient():
    q, k, v, table, lens, bounds = batch("float32")

    @jax.jit
    def total(scale):
        out = ragged_paged_attention(
            q, k, jnp.clip(v, -9, 9), table, lens, bounds, out_dtype="float8_e5m2", out_scale=scale
        )
        return jnp.sum(jnp.abs(out.astype(jnp.float32)))

    scale = jnp.float32(0.5)
    np.testing.assert_allclose(jax.grad(total)(scale), -total(scale) / scale, rtol=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_scale": 1.0}, "out_scale: expected None without an out_dtype, got a scale"),
        ({"out_dtype": "int8"}, "out_dtype: expected None or dtype(float8_e4m3fn) or "),
        ({"out_dtype": "nonsense"}, "out_dtype: expected None or dtype(float8_e4m3fn) or "),
        (
            {"out_dtype": "float8_e5m2", "out_scale": jnp.ones(3, jnp.float32)},
            "out_scale: expected shape [], got [3]",
        ),
        (
            {"out_dtype": "float8_e5m2", "out_scale": -1.0},
            "out_scale: expected a finite scale >= 0, got -1.0",
        ),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged_paged_attention(*batch("float32"), **options)


def test_an_fp8_output_lowers_to_the_cuda_kernels(monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr(load, "targets", lambda _: ("jax_paged.attention.v1",))
    q, *rest = batch("bfloat16")
    traced = jax.jit(
        lambda q: ragged_paged_attention(q, *rest, out_dtype="float8_e4m3fn", out_scale=2.0)
    ).trace(q)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_paged.attention.v1" in text
    assert "f8E4M3FN" in text
    monkeypatch.undo()
    jax.clear_caches()
