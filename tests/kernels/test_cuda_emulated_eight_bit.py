# SPDX-License-Identifier: Apache-2.0
"""8-bit pages in the emulated CUDA kernels: every head_dim, and the kernel that serves."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from emulation import CHOICE, Device, emulate

from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.options import eight_bit

KINDS = ("float8_e4m3fn", "float8_e5m2", "int8")


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
    assert [buffers[name] > 0 for name in CHOICE] == [True, True, True, False]
    assert_attention_close(out, lse, *dense_oracle(real))


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("scale", [None, "head", "token"])
@pytest.mark.parametrize("kv", KINDS)
def test_pages_of_vllm5d_go_to_simt(kv, scale, page_size):
    case = Case("8bit", 8, 2, 64, page_size=page_size, layout="vllm5d")
    batch = make_batch(case, jnp.bfloat16, [1, 2, 0, 9], [130, 40, 3, 70], num_tokens=14)
    stored, real, scales = eight_bit(batch, kv, scale, np.random.default_rng(page_size))
    buffers = {}
    out, lse = emulate(stored, buffers=buffers, **scales)
    assert not any(buffers[name] for name in CHOICE)
    assert_attention_close(out, lse, *dense_oracle(real))


@pytest.mark.parametrize("option", [{}, {"soft_cap": 3.0}, {"sliding_window": 37}], ids=str)
@pytest.mark.parametrize("scale", ["head", "token"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_may_be_negative_in_decode_and_prefill(dtype, scale, option):
    batch = make_batch(Case("signs", 8, 2, 64), jnp.dtype(dtype), [1, 70], [100, 130])
    rng = np.random.default_rng(3)
    stored, real, scales = eight_bit(batch, "float8_e4m3fn", scale, rng)
    negative = {}
    for name in ("k", "v"):
        sign = np.where(rng.random(scales[f"{name}_scale"].shape) < 0.5, np.float32(-1), 1)
        scales[f"{name}_scale"] = scales[f"{name}_scale"] * sign
        wide = sign[..., None] if scale == "token" else sign[:, None, None]
        negative[f"{name}_pages"] = getattr(real, f"{name}_pages") * wide
    real = dataclasses.replace(real, **negative)
    window = {k: np.int32(v) if k == "sliding_window" else v for k, v in option.items()}
    out, lse = emulate(stored, Device(num_workers=3), **scales, **window)
    assert_attention_close(out, lse, *dense_oracle(real, **option))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_scale_of_zero_makes_all_keys_alike_and_values_zero(dtype):
    batch = make_batch(Case("zero", 8, 2, 64), jnp.dtype(dtype), [1, 40], [50, 60])
    stored, _, scales = eight_bit(batch, "int8", "head", np.random.default_rng(4))
    out, lse = emulate(stored, Device(), **scales | {"k_scale": scales["k_scale"] * 0})
    seen = np.array([50, *range(21, 61)])
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(seen)[:, None], lse.shape), rtol=1e-6)
    out, _ = emulate(stored, Device(), **scales | {"v_scale": scales["v_scale"] * 0})
    np.testing.assert_array_equal(out.astype(np.float32), np.zeros(out.shape, np.float32))
