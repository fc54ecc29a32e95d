# SPDX-License-Identifier: Apache-2.0
"""The dense projection against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import linear, quantize_weight
from jax_paged.ops.linear import TARGET
from jax_paged.testing.projections import (
    EXTREMES,
    make_case,
    make_codes,
    oracle,
    quantize_blocks,
)

kinds = pytest.mark.parametrize("kind", EXTREMES)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 130])
def test_products_match_float64(dtype, rows):
    for depth, columns in ((8, 1), (24, 5), (40, 16), (1032, 33), (2120, 17)):
        case = make_case(rows, depth, columns, dtype)
        out = linear(*case, out_dtype=jnp.float32, implementation="native")
        assert out.shape == (rows, columns)
        # Sums of `depth` products of order 1 in f32, over at least eight partial sums.
        np.testing.assert_allclose(out, oracle(*case), atol=1e-5 * depth**0.5, rtol=0)


@kinds
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 130])
def test_8_bit_products_match_float64(kind, dtype, rows):
    for depth, columns in ((8, 1), (24, 5), (40, 16), (1032, 33), (2120, 17), (64, 300)):
        x, weight, scale = make_codes(kind, rows, depth, columns, dtype)
        out = linear(x, weight, weight_scale=scale, out_dtype=jnp.float32, implementation="native")
        assert out.shape == (rows, columns)
        # As above; the weights are exact in every dtype of x.
        expected = oracle(x, weight, scale)
        np.testing.assert_allclose(out, expected, atol=1e-5 * depth**0.5, rtol=0)


@kinds
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_8_bit_products_of_the_reference_match_float64(kind, dtype):
    for rows, depth, columns in ((0, 8, 1), (1, 21, 5), (33, 1032, 17)):
        x, weight, scale = make_codes(kind, rows, depth, columns, dtype)
        options = {"out_dtype": jnp.float32, "implementation": "reference"}
        out = linear(x, weight, weight_scale=scale, **options)
        expected = oracle(x, weight, scale)
        np.testing.assert_allclose(out, expected, atol=1e-5 * depth**0.5, rtol=0)


@kinds
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 8, 9, 130, 300])
def test_sums_of_blocks_are_multiplied_by_their_scales(kind, dtype, rows, implementation):
    for depth, columns in ((8, 1), (128, 128), (136, 300), (1032, 33), (1920, 144)):
        x, weight = make_case(rows, depth, columns, dtype)
        sizes = 2.0 ** np.arange(-(-depth // 128)).repeat(128)[:depth]  # blocks are apart
        weight, scale, meant = quantize_blocks(np.asarray(weight, "f8") / sizes, kind)
        assert scale.shape == (-(-columns // 128), -(-depth // 128))
        options = {"out_dtype": jnp.float32, "implementation": implementation}
        out = linear(x, weight, weight_scale=scale, **options)
        assert out.shape == (rows, columns)
        # As above: sums of `depth` products of order 1 at most.
        np.testing.assert_allclose(out, oracle(x, meant), atol=1e-5 * depth**0.5, rtol=0)


@kinds
@pytest.mark.parametrize("depth", [8, 24, 32, 72])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_code_stands_for_its_value(kind, depth, dtype, implementation):
    """One code in each output and one 1 in each row: with few rows and with many."""
    codes = jnp.arange(256).astype(jnp.uint8).view(kind)
    for at in (0, 7, depth - 1):
        weight = jnp.zeros((256, depth), kind).at[:, at].set(codes)
        for rows in (1, 8, 20):
            x = jnp.zeros((rows, depth), dtype).at[:, at].set(1)
            options = {"out_dtype": jnp.float32, "implementation": implementation}
            out = linear(x, weight, weight_scale=jnp.ones(256, jnp.float32), **options)
            expected = np.broadcast_to(np.asarray(codes).astype(np.float32), (rows, 256))
            np.testing.assert_array_equal(out, expected)


@kinds
@pytest.mark.parametrize("out_dtype", [None, jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_scaled_sum_is_rounded_once(kind, out_dtype):
    x, weight, scale = make_codes(kind, 11, 72, 48, jnp.bfloat16)
    exact = linear(x, weight, weight_scale=scale, out_dtype=jnp.float32)
    out = linear(x, weight, weight_scale=scale, out_dtype=out_dtype)
    np.testing.assert_array_equal(out, exact.astype(out_dtype or jnp.bfloat16))


@kinds
def test_codes_of_an_odd_depth_are_left_to_the_reference(kind):
    x, weight, scale = make_codes(kind, 5, 13, 3)
    with pytest.raises(NotImplementedError, match="multiple of 8 columns, got 13"):
        linear(x, weight, weight_scale=scale)
    out = linear(x, weight, weight_scale=scale, implementation="reference")
    np.testing.assert_allclose(out, oracle(x, weight, scale), atol=1e-4)


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_sum_is_rounded_once(out_dtype):
    case = make_case(5, 64, 48, jnp.bfloat16)
    exact = linear(*case, out_dtype=jnp.float32)
    out = linear(*case, out_dtype=out_dtype)
    np.testing.assert_array_equal(out, exact.astype(out_dtype))


# Tiles of 1 to 8 rows, and from 64 on w that is put in order for all rows.
BATCHES = (1, 2, 3, 8, 12, 63, 64, 65, 256)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("depth", "columns"), [(2504, 40), (1304, 288), (5144, 24)])
def test_a_row_gets_the_same_bits_whatever_its_batch(depth, columns, dtype):
    x, weight = make_case(300, depth, columns, dtype)
    together = linear(x, weight)
    for rows in BATCHES:
        np.testing.assert_array_equal(linear(x[:rows], weight), together[:rows])


@kinds
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_gets_the_same_bits_from_8_bit_weights_whatever_its_batch(kind, dtype):
    """Up to 8 rows convert weights in registers, more of them in a panel."""
    x, weight, of_outputs = make_codes(kind, 300, 2504, 40, dtype)
    of_blocks = jnp.linspace(0.5, 1.5, 20, dtype=jnp.float32)[None, :]
    for scale in (of_outputs, of_blocks):
        together = linear(x, weight, weight_scale=scale, out_dtype=jnp.float32)
        for rows in BATCHES:
            out = linear(x[:rows], weight, weight_scale=scale, out_dtype=jnp.float32)
            np.testing.assert_array_equal(out, together[:rows])


@kinds
def test_nan_stays_in_its_row_and_scale(kind):
    for rows in (6, 20):
        x, weight, scale = make_codes(kind, rows, 72, 20)
        x, scale = x.at[2, 71].set(jnp.nan), scale.at[19].set(jnp.nan)
        out = np.asarray(linear(x, weight, weight_scale=scale))
        assert np.isnan(out[2]).all()
        assert np.isnan(out[:, 19]).all()
        assert np.isfinite(np.delete(np.delete(out, 2, 0), 19, 1)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_nan_code_stays_in_its_output(dtype, implementation):
    for rows in (1, 6, 20):
        x, weight, scale = make_codes(jnp.float8_e4m3fn, rows, 72, 20, dtype)
        exact = linear(x, weight, weight_scale=scale, implementation=implementation)
        for at, nan in ((0, 0x7F), (71, 0xFF)):
            bits = weight.view(jnp.uint8).at[19, at].set(nan)
            poisoned = bits.view(weight.dtype)
            out = linear(x, poisoned, weight_scale=scale, implementation=implementation)
            assert np.isnan(np.asarray(out[:, 19], np.float32)).all()
            np.testing.assert_array_equal(out[:, :19], exact[:, :19])


def make_weight(dtype):
    """Outputs of many sizes, one of them all 0."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((3, 5, 40)) * 2.0 ** rng.integers(-6, 7, (3, 5, 1))
    return jnp.asarray(weight, dtype).at[1, 2].set(0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_fp8_weights_are_rounded_to_the_nearest_code(dtype):
    weight = make_weight(dtype)
    weight = weight.at[..., ::3].multiply(jnp.asarray(2.0**-8, dtype))  # subnormal codes too
    codes, scale = quantize_weight(weight, dtype=jnp.float8_e4m3fn)
    assert (codes.dtype, scale.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    assert (codes.shape, scale.shape) == ((3, 5, 40), (3, 5))
    wide, codes, scale = (np.asarray(a, np.float64) for a in (weight, codes, scale))
    np.testing.assert_allclose(scale, np.abs(wide).max(-1) / 448, rtol=1e-6)
    steps = wide / np.where(scale == 0, 1, scale)[..., None]
    bound = np.maximum(np.abs(steps) / 16, 2.0**-10)
    assert (np.abs(codes - steps) <= 1.0001 * bound).all()
    assert (np.abs(codes).max(-1) == np.where(scale == 0, 0, 448)).all()
    assert np.abs(codes[codes != 0]).min() < 2.0**-6
    assert (scale[1, 2], np.abs(codes[1, 2]).max()) == (0, 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_int8_weights_are_within_half_a_step(dtype):
    weight = make_weight(dtype)
    codes, scale = quantize_weight(weight)
    assert (codes.dtype, scale.dtype) == (jnp.int8, jnp.float32)
    assert (codes.shape, scale.shape) == ((3, 5, 40), (3, 5))
    wide, codes, scale = (np.asarray(a, np.float64) for a in (weight, codes, scale))
    np.testing.assert_allclose(scale, np.abs(wide).max(-1) / 127, rtol=1e-6)
    error = np.abs(codes * scale[..., None] - wide)
    assert (error <= 0.5001 * scale[..., None]).all()
    assert np.abs(codes).max() == 127
    assert (scale[1, 2], np.abs(codes[1, 2]).max()) == (0, 0)


@kinds
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_shows_in_its_output_alone(kind, bad):
    weight = jnp.ones((3, 16), jnp.float32).at[1, 4].set(bad)
    codes, scale = quantize_weight(weight, dtype=kind)
    out = linear(jnp.ones((2, 16), jnp.float32), codes, weight_scale=scale)
    assert not np.isfinite(out[:, 1]).any()
    np.testing.assert_allclose(out[:, ::2], 16, rtol=1e-6)


@kinds
def test_derivatives_beside_8_bit_weights_are_those_of_the_reference(kind):
    x, weight, of_outputs = make_codes(kind, 3, 16, 5)

    def loss(implementation, scale):
        def square(x, scale):
            out = linear(x, weight, weight_scale=scale, implementation=implementation)
            return jnp.sum(out**2)

        return jax.grad(square, (0, 1))(x, scale)

    for scale in (of_outputs, of_outputs[:1, None]):
        for ours, theirs in zip(loss(None, scale), loss("reference", scale), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_row_and_column():
    x, weight = make_case(6, 72, 20)
    x, weight = x.at[2, 71].set(jnp.nan), weight.at[19, 0].set(jnp.nan)
    out = np.asarray(linear(x, weight))
    assert np.isnan(out[2]).all()
    assert np.isnan(out[:, 19]).all()
    assert np.isfinite(np.delete(np.delete(out, 2, 0), 19, 1)).all()


def test_derivatives_are_those_of_xlas_product():
    x, weight = make_case(3, 16, 5)

    def loss(implementation):
        return jax.grad(
            lambda x, w: jnp.sum(linear(x, w, implementation=implementation) ** 2), (0, 1)
        )(x, weight)

    for ours, theirs in zip(loss(None), loss("reference"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_matches_one_call_after_another(axes):
    x, weight = make_case(4, 16, 5)
    xs = jnp.stack([x, 2 * x, -x]) if axes[0] == 0 else x
    weights = jnp.stack([weight, weight + 1, -weight]) if axes[1] == 0 else weight
    out = jax.vmap(linear, axes)(xs, weights)
    for i in range(3):
        expected = linear(xs[i] if axes[0] == 0 else x, weights[i] if axes[1] == 0 else weight)
        np.testing.assert_array_equal(out[i], expected)


@kinds
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, 0, 0)])
def test_vmap_over_8_bit_weights_matches_one_call_after_another(kind, axes):
    operands = make_codes(kind, 4, 16, 5)
    stacked = [
        operand if axis is None else jnp.stack([operand, -operand, operand[::-1]])
        for operand, axis in zip(operands, axes, strict=True)
    ]
    out = jax.vmap(lambda x, weight, scale: linear(x, weight, weight_scale=scale), axes)(*stacked)
    for i in range(3):
        x, weight, scale = (
            a if axis is None else a[i] for a, axis in zip(stacked, axes, strict=True)
        )
        np.testing.assert_array_equal(out[i], linear(x, weight, weight_scale=scale))


@kinds
def test_bad_arguments_of_8_bit_weights_are_named(kind):
    x, weight, scale = make_codes(kind, 2, 16, 3)
    with pytest.raises(
        ValueError, match=r"weight_scale: expected f32\[out\] beside the 8-bit weight, "
    ):
        linear(x, weight)
    with pytest.raises(ValueError, match=r"weight_scale: expected None .*, got float32\[3\]"):
        linear(x, weight.astype(jnp.float32), weight_scale=scale)
    with pytest.raises(ValueError, match=r"weight_scale: expected shape \[out=3\], got \[2\]"):
        linear(x, weight, weight_scale=scale[:2])
    text = r"shape \[blocks_of_out=1, blocks_of_in=1\], got \[1, 2\]"
    with pytest.raises(ValueError, match=f"weight_scale: expected {text}"):
        linear(x, weight, weight_scale=scale[None, :2])
    with pytest.raises(ValueError, match="weight_scale: expected dtype float32, got bfloat16"):
        linear(x, weight, weight_scale=scale.astype(jnp.bfloat16))
    with pytest.raises(
        ValueError, match="weight: expected dtype float32 or int8 or float8_e4m3fn, got uint8"
    ):
        linear(x, weight.astype(jnp.uint8), weight_scale=scale)
    with pytest.raises(ValueError, match=r"weight: expected .*, got float8_e5m2"):
        linear(x, weight.astype(jnp.float8_e5m2), weight_scale=scale)
    with pytest.raises(ValueError, match="weight: expected dtype bfloat16 or float16 or float32"):
        quantize_weight(weight)
    with pytest.raises(ValueError, match=r"weight: expected shape \[..., out, in\], got \[3\]"):
        quantize_weight(scale)
    with pytest.raises(ValueError, match="dtype: expected int8 or float8_e4m3fn, got float8_e5m2"):
        quantize_weight(x, dtype=jnp.float8_e5m2)


@kinds
def test_the_handler_itself_refuses_scales_that_do_not_fit(kind):
    x, weight, scale = make_codes(kind, 2, 16, 3)
    call = jax.jit(jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((2, 3), jnp.float32)))
    for weights, scales, message in (
        (weight, scale[:2], r"scale expected shape \[3\], got \[2\]"),
        (weight.astype(jnp.float32), scale, r"scale expected shape \[0\], got \[3\]"),
        (weight.astype(jnp.uint8), scale, "w expected float32 or int8 or float8_e4m3fn, got XLA"),
        (weight.astype(jnp.float8_e5m2), scale, "w expected .* got float8_e5m2"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call(x, weights, scales, jnp.zeros(0, jnp.bool_)))


def test_bad_arguments_are_named():
    x, weight = make_case(2, 16, 3)
    with pytest.raises(ValueError, match=r"weight: expected shape \[out, in=16\], got \[3, 8\]"):
        linear(x, weight[:, :8])
    with pytest.raises(ValueError, match=r"weight: expected .* float8_e4m3fn, got bfloat16"):
        linear(x, weight.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="out_dtype: expected bfloat16, float16 or float32"):
        linear(x, weight, out_dtype=jnp.int32)
    with pytest.raises(NotImplementedError, match="multiple of 8 columns, got 12"):
        linear(x[:, :12], weight[:, :12])
    np.testing.assert_allclose(
        linear(x[:, :12], weight[:, :12], implementation="reference"),
        oracle(x[:, :12], weight[:, :12]), atol=1e-5,
    )  # fmt: skip
