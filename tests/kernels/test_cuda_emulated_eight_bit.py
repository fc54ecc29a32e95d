# SPDX-License-Identifier: Apache-2.0
"""8-bit pages in the emulated CUDA kernels: every code, every head_dim, the kernel that serves."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from emulation import CHOICE, Device, emulate

from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.options import eight_bit

KINDS = ("float8_e4m3fn", "float8_e5m2", "int8")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kv", KINDS)
def test_every_code_is_read_as_its_value(kv, dtype):
    """One key of weight 1, so that out is V: all 256 codes, of which f16 holds each exactly."""
    case = Case("codes", 4, 1, 256, page_size=16)
    batch = make_batch(case, jnp.dtype(dtype), [1], [1])
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(kv))
    pages = {name: np.zeros(batch.k_pages.shape, codes.dtype) for name in ("k_pages", "v_pages")}
    pages["v_pages"][batch.page_table[0, 0], 0, 0] = codes
    buffers = {}
    out, _ = emulate(dataclasses.replace(batch, **pages), buffers=buffers)
    assert (buffers["chosen_stages"] > 0) == (dtype != "float32")
    expected = np.broadcast_to(codes.astype(np.float32), out.shape[1:])
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(out[0].astype(np.float32)[finite], expected[finite])
    # 0 x infinity is NaN in an mma with 15 more tokens of weight 0 that are no infinity.
    assert not np.isfinite(out[0].astype(np.float32)[~finite]).any()


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("scale", [None, "head", "token"])
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_head_dims_scales_and_pages(head_dim, kv, scale, page_size):
    count = head_dim + KINDS.index(kv) + page_size
    dtype = ("bfloat16", "float16")[count // 16 % 2]
    case = Case("8bit", 8, 2, head_dim, page_size=page_size, layout=("HND", "NHD")[count % 2])
    batch = make_batch(case, jnp.dtype(dtype), [1, 2, 0, 9], [130, 40, 3, 70], num_tokens=14)
    stored, real, scales = eight_bit(batch, kv, scale, np.random.default_rng(count))
    buffers = {}
    device = Device(num_workers=1 + count % 5, seed=count)
    out, lse = emulate(stored, device, buffers=buffers, **scales)
    assert [buffers[name] > 0 for name in CHOICE] == [True, True, False]
    assert_attention_close(out, lse, *dense_oracle(real))


def test_scales_of_a_wide_range_stay_within_f16():
    case = Case("wide", 4, 1, 64)
    batch = make_batch(case, jnp.float16, [1, 1], [300, 90])
    stored, real, scales = eight_bit(batch, "int8", "token", np.random.default_rng(1))
    factor = np.float32(10.0) ** np.random.default_rng(2).uniform(-3, 3, scales["v_scale"].shape)
    factor = np.float32(factor * 1e-3)  # P times a scale as it is would be subnormal, or overflow
    scales["v_scale"] = scales["v_scale"] * factor
    real = dataclasses.replace(real, v_pages=real.v_pages * factor[..., None])
    assert_attention_close(*emulate(stored, **scales), *dense_oracle(real))


OUTPUTS = ("float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("out_dtype", OUTPUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_fp8_output_is_the_nearest_code(dtype, out_dtype):
    """One key of weight 1, so that out is V over the scale: each rounded once, and clamped."""
    rng = np.random.default_rng(3)
    case = Case("fp8", 4, 1, 256)
    batch = make_batch(case, jnp.dtype(dtype), [1, 1, 40], [1, 1, 1])
    exact = rng.choice([-1, 1], (3, 256)) * 2.0 ** rng.uniform(-22, 12, (3, 256))
    exact[0, :6] = [0.0, -0.0, 2.0**-10, 3 * 2.0**-10, np.nan, 1.0625]  # ties among them
    v_pages = batch.v_pages.copy()
    for row in range(3):
        v_pages[batch.page_table[row, 0], 0, 0] = exact[row].astype(v_pages.dtype)
    batch = dataclasses.replace(batch, q=0 * batch.q, v_pages=v_pages)  # weights exactly 1
    scale, buffers = np.float32([0.75]), {}
    out, _ = emulate(batch, out_dtype=out_dtype, out_scale=scale[0], buffers=buffers)
    assert (buffers["chosen_prefill_rows"] > 0) == (dtype != "float32")
    limit = np.float32(jnp.finfo(out_dtype).max)
    for row, token in enumerate((0, 1, 41)):
        stored = v_pages[batch.page_table[row, 0], 0, 0].astype(np.float32)
        codes = np.clip(stored / scale, -limit, limit).astype(out.dtype)
        got, expected = (x.astype(np.float32) for x in (out[token], np.tile(codes, (4, 1))))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("out_dtype", OUTPUTS)
@pytest.mark.parametrize("case", [
    Case("bf16", 8, 2, 128), Case("odd", 3, 1, 24, page_size=5), Case("wide", 6, 3, 192),
])  # fmt: skip
def test_fp8_outputs_of_all_kernels_and_padding(case, out_dtype):
    batch = make_batch(case, jnp.bfloat16, [1, 60, 3, 0], [200, 90, 3, 5], num_tokens=70)
    out, lse = emulate(batch, out_dtype=out_dtype, num_kv_splits=3)
    expected, expected_lse = dense_oracle(batch)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)
    assert not out[64:].view(np.uint8).any()
    # Half a step: 2^-4 or 2^-3 of a normal number, or half of the smallest number; and bf16's P.
    step = 2.0**-4 if out_dtype.endswith("fn") else 2.0**-3
    smallest = float(jnp.finfo(out_dtype).smallest_subnormal)
    error = np.abs(out.astype(np.float64) - expected)
    peak = np.abs(expected).max()
    assert (error <= step * np.abs(expected) + smallest / 2 + 2.0**-7 * peak).all()
