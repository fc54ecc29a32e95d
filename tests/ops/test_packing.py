# SPDX-License-Identifier: Apache-2.0
"""Packed weights: the bits are those of plain ones, which test_linear.py and test_moe.py check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import PackedWeight, build_info, linear, moe_experts, pack_weight, quantize_weight
from jax_paged.ops.linear import TARGET
from jax_paged.testing.projections import EXTREMES, make_case, make_codes

needs_codes = pytest.mark.skipif(
    build_info()["cpu"].get("isa") == "avx512bf16", reason="8-bit weights are not packed there"
)
FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]
# Steps of all lanes, of half of them, of one; chunks of a depth, and parts of these; groups of
# panels and rest.
SIZES = ((8, 16), (24, 48), (40, 80), (568, 64), (1336, 112), (5144, 48))
ROWS = (1, 2, 3, 5, 8, 9, 12, 17, 130)


def packed(weight):
    made = pack_weight(weight, platform="cpu")
    assert isinstance(made, PackedWeight)
    return made


def check_same(out, expected):
    assert out.dtype == expected.dtype
    np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (out, expected)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("depth", "columns"), SIZES)
def test_packed_weights_give_the_bits_of_plain_ones(depth, columns, dtype):
    most = max(ROWS)
    x, weight = make_case(most, depth, columns, dtype)
    panels = packed(weight)
    assert (panels.shape, panels.dtype, panels.ndim) == (weight.shape, weight.dtype, 2)
    check_same(panels.unpack(), weight)
    for rows in ROWS:
        for out_dtype in (jnp.float32,) if rows % 2 else (dtype,):
            options = {"out_dtype": out_dtype, "implementation": "native"}
            out, expected = (linear(x[:rows], w, **options) for w in (panels, weight))
            check_same(out, expected)


@needs_codes
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", EXTREMES)
def test_packed_codes_give_the_bits_of_plain_ones(kind, dtype):
    depth, columns = 1336, 144
    x, weight, scale = make_codes(kind, 33, depth, columns, dtype)
    blocks = jnp.linspace(0.5, 2, 2 * 11, dtype=jnp.float32).reshape(2, 11)
    for rows in (1, 3, 8, 33):
        for of_weight in (scale, blocks):
            options = {"weight_scale": of_weight, "implementation": "native"}
            out, expected = (linear(x[:rows], w, **options) for w in (packed(weight), weight))
            check_same(out, expected)


@pytest.mark.deep
def test_a_row_has_the_same_bits_among_any_number_of_rows():
    x, weight = make_case(512, 576, 96, jnp.float32)
    panels = packed(weight)
    expected = np.asarray(linear(x, weight, implementation="native"))
    for rows in (1, 2, 4, 6, 7, 8, 15, 16, 31, 63, 64, 100, 255, 256, 511, 512):
        for w in (weight, panels):
            out = linear(x[-rows:], w, implementation="native")
            np.testing.assert_array_equal(out, expected[-rows:])


@pytest.mark.parametrize(("inner", "is_code"), [(48, False), (112, True), (24, False)])
def test_packed_experts_give_the_bits_of_plain_ones(inner, is_code):
    if is_code and build_info()["cpu"]["isa"] == "avx512bf16":
        pytest.skip("8-bit weights are not packed there")
    rng = np.random.default_rng(5)
    experts, hidden, tokens = 4, 80, 67
    gate_up = jnp.asarray(rng.standard_normal((experts, 2 * inner, hidden)), jnp.float32)
    down = jnp.asarray(rng.standard_normal((experts, hidden, inner)), jnp.float32)
    options = {
        "gate_up_bias": jnp.ones((experts, 2 * inner), jnp.float32),
        "implementation": "native",
    }
    options["down_bias"] = jnp.ones((experts, hidden), jnp.float32)
    if is_code:
        (gate_up, options["gate_up_scale"]), (down, options["down_scale"]) = map(
            quantize_weight, (gate_up, down)
        )
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.float32)
    chosen = jnp.asarray(rng.integers(0, experts, (tokens, 2)), jnp.int32)
    weights = jnp.asarray(rng.random((tokens, 2)), jnp.float32)
    own = packed(gate_up) if inner % 16 == 0 else gate_up
    for count in (1, tokens):
        rest = chosen[:count], weights[:count]
        out = moe_experts(x[:count], own, packed(down), *rest, **options)
        check_same(out, moe_experts(x[:count], gate_up, down, *rest, **options))
    if inner % 16:
        with pytest.raises(ValueError, match="gate_up: expected an inner size"):
            moe_experts(x, packed(gate_up), down, chosen, weights, **options)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_workers_that_take_several_blocks_of_experts_at_once_give_the_bits_of_plain_ones(dtype):
    rng = np.random.default_rng(6)
    experts, hidden, inner, tokens = 40, 208, 176, 300  # blocks of 48, and a rest of both
    gate_up = jnp.asarray(rng.standard_normal((experts, 2 * inner, hidden)), dtype)
    down = jnp.asarray(rng.standard_normal((experts, hidden, inner)), dtype)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), dtype)
    chosen = jnp.asarray(rng.integers(0, experts, (tokens, 2)), jnp.int32)
    weights = jnp.asarray(rng.random((tokens, 2)), jnp.float32)
    for count in (40, tokens):
        rest = chosen[:count], weights[:count]
        out = moe_experts(x[:count], packed(gate_up), packed(down), *rest, implementation="native")
        check_same(out, moe_experts(x[:count], gate_up, down, *rest, implementation="native"))
        alone = moe_experts(
            x[7:8], gate_up, down, chosen[7:8], weights[7:8], implementation="native"
        )
        check_same(out[7:8], alone)


def test_what_cannot_be_packed_stays():
    x, weight = make_case(3, 24, 40, jnp.float32)
    assert pack_weight(weight, platform="cpu") is weight  # outputs
    assert pack_weight(weight[:32, :20], platform="cpu").shape == (32, 20)
    assert pack_weight(weight[:32], platform="cuda").shape == (32, 24)
    assert isinstance(pack_weight(weight[:32]), PackedWeight) == (jax.default_backend() == "cpu")
    with pytest.raises(ValueError, match="weight: expected dtype"):
        pack_weight(jnp.ones((16, 8), jnp.int32))
    with pytest.raises(ValueError, match="weight: expected shape"):
        linear(x, packed(weight[:32, :16]))


def test_gradients_and_batches():
    x, weight = make_case(6, 24, 32, jnp.float32)
    panels = packed(weight)

    def loss(weight):
        return jnp.sum(linear(x, weight) ** 2)

    check_same(jax.grad(loss)(panels).unpack(), jax.grad(loss)(weight))
    both = x.reshape(2, 3, 24)
    out = jax.vmap(lambda x: linear(x, panels))(both)
    check_same(out.reshape(6, 32), linear(x, weight))
    reference = linear(x, panels, implementation="reference")
    check_same(reference, linear(x, weight, implementation="reference"))


def test_the_handler_checks_panels():
    x, weight = make_case(2, 24, 32, jnp.float32)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((2, 32), jnp.float32))
    none = jnp.zeros(0, jnp.float32)
    wrong = packed(weight).panels[:, :16]
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"w expected panels of shape \[..., 24, 16\]"
    ):
        jax.block_until_ready(call(x, wrong, none, jnp.zeros(0, jnp.bool_)))
