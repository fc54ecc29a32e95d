"""The dense projection against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import linear


def make_case(rows, depth, columns, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, depth)), rng.standard_normal((columns, depth))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def oracle(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 130])
def test_products_match_float64(dtype, rows):
    for depth, columns in ((8, 1), (24, 5), (40, 16), (1032, 33), (2120, 17)):
        case = make_case(rows, depth, columns, dtype)
        out = linear(*case, out_dtype=jnp.float32, implementation="native")
        assert out.shape == (rows, columns)
        # Sums of `depth` products of order 1 in f32, over at least eight partial sums.
        np.testing.assert_allclose(out, oracle(*case), atol=1e-5 * depth**0.5, rtol=0)


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_sum_is_rounded_once(out_dtype):
    case = make_case(5, 64, 48, jnp.bfloat16)
    exact = linear(*case, out_dtype=jnp.float32)
    out = linear(*case, out_dtype=out_dtype)
    np.testing.assert_array_equal(out, exact.astype(out_dtype))


def test_a_row_gets_the_same_bits_whatever_its_batch():
    x, weight = make_case(29, 2504, 40)
    together = linear(x, weight)
    for rows in (1, 2, 3, 8, 12):
        np.testing.assert_array_equal(linear(x[:rows], weight), together[:rows])


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


def test_bad_arguments_are_named():
    x, weight = make_case(2, 16, 3)
    with pytest.raises(ValueError, match=r"weight: expected shape \[out, in=16\], got \[3, 8\]"):
        linear(x, weight[:, :8])
    with pytest.raises(ValueError, match="weight: expected dtype float32, got bfloat16"):
        linear(x, weight.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="out_dtype: expected bfloat16, float16 or float32"):
        linear(x, weight, out_dtype=jnp.int32)
    with pytest.raises(NotImplementedError, match="multiple of 8 columns, got 12"):
        linear(x[:, :12], weight[:, :12])
    np.testing.assert_allclose(
        linear(x[:, :12], weight[:, :12], implementation="reference"),
        oracle(x[:, :12], weight[:, :12]), atol=1e-5,
    )  # fmt: skip
