# SPDX-License-Identifier: Apache-2.0
"""Rotary tables: each scaling against its formula in float64, and turning by them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.ops.rope import (
    apply_rope,
    dynamic_frequencies,
    inverse_frequencies,
    longrope_attention_factor,
    longrope_frequencies,
    rope_tables,
)

HEAD_DIM, THETA, CONTEXT = 64, 1e4, 512
PLAIN = inverse_frequencies(HEAD_DIM, THETA)
SHORT = np.linspace(1.0, 1.5, HEAD_DIM // 2)
LONG = np.linspace(1.0, 32.0, HEAD_DIM // 2)


def dynamic(length, factor=4.0):
    return dynamic_frequencies(
        HEAD_DIM, THETA, factor=factor, original_context=CONTEXT, length=length
    )


def longrope(length):
    return longrope_frequencies(
        PLAIN, short_factor=SHORT, long_factor=LONG, original_context=CONTEXT, length=length
    )


@pytest.mark.parametrize("length", [1, CONTEXT, CONTEXT + 1, 5000, 100_000])
def test_dynamic_frequencies_follow_the_formula(length):
    theta = THETA
    if length > CONTEXT:
        theta *= (4.0 * length / CONTEXT - 3.0) ** (HEAD_DIM / (HEAD_DIM - 2))
    np.testing.assert_allclose(dynamic(length), inverse_frequencies(HEAD_DIM, theta), rtol=4e-6)


@pytest.mark.parametrize("frequencies", [dynamic, longrope])
def test_a_length_may_be_traced_and_differ_by_token(frequencies):
    lengths = jnp.array([3, CONTEXT, CONTEXT + 1, 4000], jnp.int32)
    each = jnp.stack([frequencies(int(n)) for n in lengths])
    np.testing.assert_array_equal(jax.jit(frequencies)(lengths), each)
    positions = lengths - 1
    cos, sin = rope_tables(positions, each, 2.0)
    angles = np.asarray(positions, np.float64)[:, None] * np.asarray(each, np.float64)
    np.testing.assert_allclose(cos, 2 * np.cos(angles), atol=1e-3)
    np.testing.assert_allclose(sin, 2 * np.sin(angles), atol=1e-3)


def test_longrope_divides_each_dimension_by_its_factor():
    np.testing.assert_allclose(longrope(CONTEXT), PLAIN / SHORT, rtol=1e-6)
    np.testing.assert_allclose(longrope(CONTEXT + 1), PLAIN / LONG, rtol=1e-6)
    assert longrope_attention_factor(1.0, CONTEXT) == 1.0
    expected = math.sqrt(1 + math.log(32) / math.log(4096))
    assert longrope_attention_factor(32.0, 4096) == pytest.approx(expected)


def test_a_wrong_number_of_factors_is_named():
    with pytest.raises(ValueError, match=r"^long_factor: expected 32 numbers, one"):
        longrope_frequencies(
            PLAIN, short_factor=SHORT, long_factor=LONG[:-1], original_context=1, length=1
        )


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_dimensions_beyond_the_tables_stay(style):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 2, 24)), jnp.float32)
    cos, sin = rope_tables(jnp.arange(5, dtype=jnp.int32), inverse_frequencies(16, THETA))
    turned = np.asarray(apply_rope(x, cos, sin, style=style))
    np.testing.assert_array_equal(turned[..., 16:], x[..., 16:])
    pairs = (slice(0, 8), slice(8, 16)) if style == "half" else (slice(0, 16, 2), slice(1, 16, 2))
    z = np.asarray(x)[..., pairs[0]] + 1j * np.asarray(x)[..., pairs[1]]
    z *= np.exp(1j * np.arange(5)[:, None] * inverse_frequencies(16, THETA))[:, None]
    np.testing.assert_allclose(turned[..., pairs[0]], z.real, atol=2e-6)
    np.testing.assert_allclose(turned[..., pairs[1]], z.imag, atol=2e-6)
