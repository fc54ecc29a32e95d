"""8-bit pages in the emulated CUDA kernels: every code, every head_dim, the kernel that serves."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from emulation import CHOICE, Device, emulate
from test_attention_options import eight_bit

from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch

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
