# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits: `linear` against float64, packing, quantizing, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits

from jax_paged import Int4Weight, linear, moe_experts, pack_int4, quantize_int4

DTYPES = ["float32", "bfloat16", "float16"]
SIZES = [(16, 32, 32), (48, 64, 32), (160, 256, 128), (32, 96, 96), (64, 320, 32)]


def random_weight(out, depth, group, offsets, dtype="float32"):
    """A weight, and its values in float64."""
    rng = np.random.default_rng([out, depth, group])
    codes = rng.integers(0, 16, (out, depth)).astype(np.uint8)
    scale = rng.standard_normal((out, depth // group)).astype(dtype)
    offset = rng.standard_normal((out, depth // group)).astype(dtype) if offsets else None
    given = (None if x is None else jnp.asarray(x) for x in (codes, scale, offset))
    wide = np.repeat(scale, group, -1).astype("f8")
    if offsets:
        return pack_int4(*given), codes * wide + np.repeat(offset, group, -1).astype("f8")
    return pack_int4(*given), (codes - 8.0) * wide


def scales_of(weight):
    """[out, groups] in float64."""
    scales = weight.scales[:, :, 0] if weight.has_offsets else weight.scales
    return np.swapaxes(np.asarray(scales, np.float64), 1, 2).reshape(weight.shape[0], -1)


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("of_scales", ["float32", "float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_linear_matches_float64(sizes, dtype, of_scales, offsets, implementation):
    out, depth, group = sizes
    weight, exact = random_weight(out, depth, group, offsets, of_scales)
    assert weight.scales.dtype == of_scales
    rng = np.random.default_rng(1)
    for rows in (1, 2, 3, 4, 7, 8, 21, 45):
        x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
        expected = np.asarray(x, np.float64) @ exact.T
        # Rounded in f32 at each of `depth` additions, of terms as large as these.
        most = np.abs(exact) + 15 * np.repeat(np.abs(scales_of(weight)), group, -1)
        terms = np.abs(np.asarray(x, np.float64)) @ most.T
        got = linear(x, weight, out_dtype=jnp.float32, implementation=implementation)
        assert (np.abs(np.asarray(got) - expected) <= 5e-7 * terms).all()
        rounded = linear(x, weight, implementation=implementation)
        assert rounded.dtype == x.dtype
        assert_same_bits(rounded, got.astype(x.dtype))


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [16, 64, 96, 112])  # one to three panels of a tile
def test_bits_of_a_token_do_not_depend_on_its_batch(outputs, dtype, offsets):
    weight, _ = random_weight(outputs, 352, 32, offsets)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((512, 352)), dtype)
    whole = linear(x, weight, implementation="native")
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 23, 24, 31, 100):
        for begin in (0, 17, 512 - rows):
            part = linear(x[begin : begin + rows], weight, implementation="native")
            assert_same_bits(part, whole[begin : begin + rows])


@pytest.mark.parametrize("offsets", [True, False])
def test_words_hold_the_codes(offsets):
    weight, exact = random_weight(32, 64, 32, offsets)
    assert (weight.shape, weight.ndim, weight.size) == ((32, 64), 2, 2048)
    assert (weight.dtype, weight.group, weight.has_offsets) == (jnp.int4, 32, offsets)
    np.testing.assert_allclose(weight.dequantize(), exact, rtol=2e-7, atol=1e-6)
    word = int(weight.codes[1, 3, 5])
    for d in range(8):
        code = (word >> (d % 2 * 16 + d // 2 * 4)) & 15
        scale = weight.scales[1, 0, 0, 5] if offsets else weight.scales[1, 0, 5]
        offset = float(weight.scales[1, 0, 1, 5]) if offsets else 0
        value = float(scale) * (code if offsets else code - 8) + offset
        assert abs(value - exact[21, 24 + d]) < 1e-5


def test_experts_are_packed_each_on_its_own():
    rng = np.random.default_rng(3)
    codes = jnp.asarray(rng.integers(0, 16, (3, 16, 64)), jnp.int8)
    scale = jnp.asarray(rng.standard_normal((3, 16, 2)), jnp.float32)
    all_of_them = pack_int4(codes, scale, scale)
    assert all_of_them.shape == (3, 16, 64)
    for i in range(3):
        one = pack_int4(codes[i], scale[i], scale[i])
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], all_of_them).codes, one.codes)
        assert_same_bits(all_of_them.dequantize()[i], one.dequantize())


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("offsets", [True, False])
def test_quantizing_errs_by_half_a_step(offsets, group):
    weight = jnp.asarray(np.random.default_rng(4).standard_normal((32, 128)), jnp.float32)
    made = quantize_int4(weight, group=group, offsets=offsets)
    parts = np.asarray(weight).reshape(32, -1, group)
    step = np.ptp(parts, axis=-1) / 15 if offsets else np.abs(parts).max(-1) / 8
    # Without offsets the number opposite to the largest one is 7 / 8 of it, and may be a step off.
    most = step[..., None] * (0.5 if offsets else 1.0) + 1e-6
    error = np.abs(np.asarray(made.dequantize()).reshape(parts.shape) - parts)
    assert (error <= most).all()
    again = quantize_int4(made.dequantize(), group=group, offsets=offsets)
    np.testing.assert_allclose(again.dequantize(), made.dequantize(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offsets", [True, False])
def test_equal_weights_stay_and_what_is_not_finite_shows(offsets):
    weight = np.full((16, 64), 0.375, "f4")
    weight[1] = 0
    got = np.asarray(quantize_int4(jnp.asarray(weight), offsets=offsets).dequantize())
    np.testing.assert_allclose(got, weight, rtol=1e-6)
    weight[2, 5] = np.nan
    got = np.asarray(quantize_int4(jnp.asarray(weight), offsets=offsets).dequantize())
    assert np.isnan(got[2, :32]).all()
    assert np.isfinite(got[2, 32:]).all()


def test_vmap_and_gradients_are_those_of_the_product():
    weight, exact = random_weight(32, 64, 32, True)
    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 3, 64)), jnp.float32)
    batched = jax.vmap(lambda x: linear(x, weight))(x)
    assert_same_bits(batched[1], linear(x[1], weight))
    other = jax.tree.map(lambda a: jnp.stack([a, a]), weight)
    assert_same_bits(jax.vmap(linear)(x, other), batched)
    gradient = jax.grad(lambda x: linear(x, weight).sum())(x[0])
    np.testing.assert_allclose(gradient, np.tile(exact.sum(0), (3, 1)), rtol=1e-4, atol=1e-4)


CODES, SCALE = jnp.zeros((32, 64), jnp.int8), jnp.zeros((32, 2), jnp.float32)
WEIGHT, X = pack_int4(CODES, SCALE), jnp.zeros((2, 64), jnp.float32)
WRONG = [
    (lambda: pack_int4(CODES[:8], SCALE), "codes: expected out to be a multiple of 16, got 8"),
    (lambda: pack_int4(CODES[:, :40], SCALE), "codes: expected in to be a multiple of 32, got 40"),
    (lambda: pack_int4(CODES.astype(jnp.float32), SCALE), "codes: expected an integer dtype, got"),
    (lambda: pack_int4(CODES, SCALE[:4]), "scale: expected shape [out=32, groups=2], got [4, 2]"),
    (lambda: pack_int4(CODES, SCALE, SCALE[:, :1]), "offset: expected shape [out=32, groups=2]"),
    (
        lambda: pack_int4(CODES, jnp.zeros((32, 4), jnp.float32)),
        "scale: expected groups of a multiple of 32 of 64 elements, got 4 groups",
    ),
    (lambda: quantize_int4(SCALE, group=24), "group: expected a multiple of 32, got 24"),
    (lambda: quantize_int4(SCALE), "weight: expected in to be a multiple of 32, got 2"),
    (lambda: linear(X[:, :32], WEIGHT), "weight: expected codes u32[out / 16, 4, 16]"),
    (
        lambda: linear(X, WEIGHT, weight_scale=jnp.zeros(32)),
        "weight_scale: expected None beside 4 bits, got one",
    ),
    (
        lambda: linear(X, Int4Weight(WEIGHT.codes, WEIGHT.scales[:1])),
        "weight: expected f16 or f32 scales [out / 16, groups, 16]",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[w[1][:40] for w in WRONG])
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call()


def experts_case(offsets, tokens, *, dtype="float32", num_experts=4, hidden=96, inner=64):
    """Operands of `moe_experts` in 4 bits, and the same with their values in f32."""
    rng = np.random.default_rng([tokens, hidden])
    wide = [
        jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), jnp.float32)
        for shape in ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
    ]
    codes = [quantize_int4(w, offsets=offsets) for w in wide]
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), dtype)
    rest = (
        jnp.asarray(rng.integers(-1, num_experts + 1, (tokens, 2)), jnp.int32),
        jnp.asarray(rng.random((tokens, 2)), jnp.float32),
    )
    biases = {
        "gate_up_bias": jnp.asarray(rng.standard_normal((num_experts, 2 * inner)), dtype),
        "down_bias": jnp.asarray(rng.standard_normal((num_experts, hidden)), dtype),
    }
    return (x, *codes, *rest), (x, *(c.dequantize() for c in codes), *rest), biases


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_those_of_their_f32_values(dtype, offsets, implementation):
    given, wide, biases = experts_case(offsets, 37, dtype=dtype)
    got = moe_experts(*given, **biases, out_dtype=jnp.float32, implementation=implementation)
    x, *weights = wide
    expected = moe_experts(
        x.astype(jnp.float32), *weights, **{k: v.astype(jnp.float32) for k, v in biases.items()},
        implementation="reference",
    )  # fmt: skip
    # What gate and up make is rounded to x's dtype.
    bound = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert np.abs(np.asarray(got - expected)).max() < bound * np.abs(np.asarray(expected)).max()


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_experts_do_not_depend_on_the_batch(dtype, offsets):
    (x, gate_up, down, experts, weights), _, biases = experts_case(offsets, 100, dtype=dtype)
    whole = moe_experts(x, gate_up, down, experts, weights, **biases, implementation="native")
    for rows in (1, 2, 5, 8, 33):
        part = slice(100 - rows, 100)
        own = moe_experts(
            x[part], gate_up, down, experts[part], weights[part], **biases, implementation="native"
        )
        assert_same_bits(own, whole[part])


def test_wrong_experts_are_named():
    (x, gate_up, down, *rest), _, _ = experts_case(True, 3)
    half = Int4Weight(gate_up.codes[:, :4], gate_up.scales[:, :4])
    with pytest.raises(ValueError, match=r"^gate_up: expected \[4, 128, 96\], got \[4, 64, 96\]"):
        moe_experts(x, half, down, *rest)
    with pytest.raises(ValueError, match=r"^down: expected f16 or f32 scales \[4, out / 16,"):
        moe_experts(x, gate_up, Int4Weight(down.codes, down.scales[:3]), *rest)
    with pytest.raises(ValueError, match=r"^gate_up_scale: expected None beside 4 bits"):
        moe_experts(x, gate_up, down, *rest, gate_up_scale=jnp.zeros((4, 128)))
    with pytest.raises(ValueError, match=r"^gate_up, down: expected both or neither in 4 bits"):
        moe_experts(x, gate_up, down.dequantize(), *rest)
