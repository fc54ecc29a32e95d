# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters, one for each token, against a float64 loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import lora
from jax_paged.testing.experts import ROUNDING
from jax_paged.testing.low_rank import TOLERANCES, make_case, oracle

dtypes = pytest.mark.parametrize("dtype", TOLERANCES)
SIZES = [  # tokens, adapters, in, part sizes, rank
    (1, 1, 8, (8,), 8),
    (1, 3, 64, (32, 16, 16), 16),
    (7, 3, 64, (40,), 24),
    (64, 64, 72, (24, 24), 8),
    (70, 5, 1304, (96, 8, 8), 16),
    (300, 2, 16, (3, 5), 64),
    (2100, 3, 8, (8,), 8),  # in turns
]


@dtypes
@pytest.mark.parametrize("sizes", SIZES)
def test_it_matches_a_float64_loop(sizes, dtype, implementation):
    *operands, base = make_case(*sizes, dtype=dtype)
    out = lora(*operands, base=base, part_sizes=sizes[3], implementation=implementation)
    assert out.dtype == base.dtype
    expected = oracle(*operands, base, sizes[3])
    tolerance = {"atol": TOLERANCES[dtype], "rtol": ROUNDING[dtype]}
    np.testing.assert_allclose(np.asarray(out, "f8"), expected, **tolerance)
    none = (np.asarray(operands[3]) < 0) | (np.asarray(operands[3]) >= sizes[1])
    np.testing.assert_array_equal(np.asarray(out)[none], np.asarray(base)[none])


def test_without_a_base_it_is_the_product_alone(implementation):
    *operands, base = make_case(9, 3, 16, (24,), 8)
    out = lora(*operands, implementation=implementation)
    np.testing.assert_allclose(out, oracle(*operands, 0 * base, (24,)), atol=2e-6)


@dtypes
def test_a_token_gets_the_same_bits_whatever_its_batch(dtype):
    """Alone, among few, among tokens of its own adapter and of others, sorted or not."""
    sizes = (360, 4, 1304, (96, 8, 8), 16)
    x, a, b, adapters, base = make_case(*sizes, dtype=dtype)

    def run(rows):
        rows = np.asarray(rows)
        call = x[rows], a, b, adapters[rows]
        return np.asarray(lora(*call, base=base[rows], part_sizes=sizes[3]))

    together = run(range(360))
    order = np.random.default_rng(1).permutation(360)
    np.testing.assert_array_equal(run(order), together[order])
    for count in (1, 2, 3, 5, 9, 17, 150):
        rows = order[:count]
        np.testing.assert_array_equal(run(rows), together[rows])
    own = np.flatnonzero(np.asarray(adapters) == 2)
    np.testing.assert_array_equal(run(own), together[own])


def test_minus_zero_and_nan_of_a_base_without_an_adapter_keep_their_bits(implementation):
    x, a, b, _, base = make_case(4, 2, 8, (8,), 8)
    base = base.at[0].set(-0.0).at[2].set(jnp.nan)
    out = lora(x, a, b, jnp.array([-1, 0, 7, 1]), base=base, implementation=implementation)
    for row in (0, 2):
        assert np.asarray(out[row]).tobytes() == np.asarray(base[row]).tobytes()


def test_adapters_of_no_token_are_never_read(implementation):
    x, a, b, _, base = make_case(5, 4, 16, (8,), 8)
    adapters = jnp.array([1, 3, -1, 1, 2**30])
    expected = oracle(x, a, b, adapters, base, (8,))
    a, b = a.at[0].set(jnp.nan).at[2].set(jnp.nan), b.at[0].set(jnp.inf).at[2].set(jnp.nan)
    out = lora(x, a, b, adapters, base=base, implementation=implementation)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_nan_in_an_adapter_reaches_its_own_tokens_alone(implementation):
    x, a, b, _, base = make_case(40, 3, 16, (8,), 8)
    adapters = jnp.arange(40) % 3
    expected = oracle(x, a, b, adapters, base, (8,))
    expected[1::3] = np.nan
    out = lora(x, a.at[1].set(jnp.nan), b, adapters, base=base, implementation=implementation)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("missing", ["tokens", "adapters"])
def test_without_tokens_or_adapters_it_is_the_base(missing, implementation):
    x, a, b, adapters, base = make_case(4, 2, 8, (8,), 8)
    if missing == "tokens":
        x, adapters, base = x[:0], adapters[:0], base[:0]
    else:
        a, b = a[:0], b[:0]
    out = lora(x, a, b, adapters, base=base, implementation=implementation)
    np.testing.assert_array_equal(out, base)


def test_it_works_under_jit_scan_and_vmap(implementation):
    *operands, base = make_case(6, 3, 16, (8, 8), 8)
    expected = oracle(*operands, base, (8, 8))

    @jax.jit
    def twice(base):
        def one(base, _):
            out = lora(*operands, base=base, part_sizes=(8, 8), implementation=implementation)
            return out, None

        return jax.lax.scan(one, base, None, length=2)[0]

    added = expected - np.asarray(base)
    np.testing.assert_allclose(np.asarray(twice(base) - base), 2 * added, atol=1e-5)
    call = jax.vmap(
        lambda x, adapters: lora(
            x, *operands[1:3], adapters, part_sizes=(8, 8), implementation=implementation
        )
    )
    got = call(operands[0].reshape(2, 3, 16), operands[3].reshape(2, 3)).reshape(6, 16)
    np.testing.assert_allclose(np.asarray(got + base), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_formula(dtype, implementation):
    """Of x, a, b and base, against those of gathered products."""
    x, a, b, adapters, base = make_case(13, 3, 16, (8, 16), 8, dtype=dtype)
    ahead = jnp.asarray(np.random.default_rng(5).standard_normal((13, 24)), dtype)
    is_adapter = (adapters >= 0) & (adapters < 3)

    def ours(x, a, b, base):
        out = lora(x, a, b, adapters, base=base, part_sizes=(8, 16), implementation=implementation)
        return jnp.sum((out * ahead).astype(jnp.float32))

    def plain(x, a, b, base):
        ids = jnp.clip(adapters, 0, 2)
        inner = jnp.einsum("ti,tri->tr", x, a[ids])
        parts = [
            jnp.einsum("tr,tor->to", inner[:, :8], b[ids][:, :8]),
            jnp.einsum("tr,tor->to", inner[:, 8:], b[ids][:, 8:]),
        ]
        added = jnp.where(is_adapter[:, None], jnp.concatenate(parts, axis=1), 0)
        return jnp.sum((base + added) * ahead.astype(jnp.float32))

    got = jax.grad(ours, argnums=(0, 1, 2, 3))(x, a, b, base)
    wide = [v.astype(jnp.float32) for v in (x, a, b, base)]
    expected = jax.grad(plain, argnums=(0, 1, 2, 3))(*wide)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == jnp.dtype(dtype)
        scale = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(np.asarray(mine, "f4"), theirs, atol=tolerance * scale)


def test_the_base_is_updated_in_place():
    *operands, base = make_case(8, 2, 16, (128,), 8)
    text = jax.jit(lambda base: lora(*operands, base=2 * base)).lower(base).compile().as_text()
    (call,) = [line for line in text.splitlines() if '"jax_paged.lora.v1"' in line]
    assert "output_to_operand_aliasing={{}: (4, {})}" in call


def ones(shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


WRONG = {
    "x: expected shape [tokens, in], got [8]": {"x": ones(8)},
    "x: expected dtype": {"x": ones((3, 8), jnp.int8)},
    "a: expected shape [num_adapters=2, parts·rank=8, in=8]": {"a": ones((2, 16, 8))},
    "a: expected dtype float32": {"a": ones((2, 8, 8), jnp.bfloat16)},
    "b: expected shape [num_adapters, out, rank]": {"b": ones((2, 8))},
    "adapters: expected shape [tokens=3]": {"adapters": jnp.zeros(2, jnp.int32)},
    "adapters: expected an integer dtype": {"adapters": jnp.zeros(3)},
    "base: expected shape [tokens=3, out=8]": {"base": ones((3, 4))},
    "base: expected dtype float32": {"base": ones((3, 8), jnp.float16)},
    "part_sizes: expected integers of at least 1 that add up to 8": {"part_sizes": (4, 5)},
    "part_sizes: expected integers": {"part_sizes": (8, 0)},
    "implementation: expected": {"implementation": "fast"},
}


@pytest.mark.every
@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_are_named(text):
    call = {
        "x": ones((3, 8)), "a": ones((2, 8, 8)), "b": ones((2, 8, 8)),
        "adapters": jnp.zeros(3, jnp.int32),
    } | WRONG[text]  # fmt: skip
    with pytest.raises(ValueError, match="^" + text.replace("[", r"\[")):
        lora(*[call.pop(name) for name in ("x", "a", "b", "adapters")], **call)


def test_sizes_that_the_native_kernel_does_not_take_are_told():
    x, a, b, adapters, _ = make_case(3, 2, 12, (5,), 3)
    with pytest.raises(NotImplementedError, match=r"^a: expected columns and a rank that are mult"):
        lora(x, a, b, adapters)
    out = lora(x, a, b, adapters, implementation="reference")
    np.testing.assert_allclose(out, oracle(x, a, b, adapters, jnp.zeros((3, 5)), (5,)), atol=2e-6)
