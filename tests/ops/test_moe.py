# SPDX-License-Identifier: Apache-2.0
"""Routing and the mixture of experts against a float64 loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import moe_experts
from jax_paged.models.decoder.moe import gated_mlp, route
from jax_paged.ops.activations import ACTIVATIONS
from jax_paged.ops.moe import _reference
from jax_paged.testing.experts import (
    ROUNDING,
    activate,
    make_case,
    make_options,
    oracle,
    quantized,
)

pytestmark = pytest.mark.cuda
# Two roundings (product, output) over sums of some 24 terms; f16 has three bits more than bf16.
TOLERANCES = {"float32": 2e-5, "float16": 0.005, "bfloat16": 0.04}
NO_OPTIONS = (jnp.zeros(0, jnp.float32),) * 5
kinds = pytest.mark.parametrize("kind", [jnp.int8, jnp.float8_e4m3fn])
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES)


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def check(case, implementation, *, kind=None, blocks=False, rtol=1e-7, **options):
    """Runs a case, with 8-bit experts where a kind is given, and compares it with the oracle."""
    scales, meant = {}, case
    if kind is not None:
        case, scales, meant = quantized(kind, case, blocks)
    out = moe_experts(*case, **scales, **options, implementation=implementation)
    assert out.dtype == case[0].dtype
    *arrays, experts, weights = map(np.asarray, meant)
    is_expert = (experts >= 0) & (experts < len(arrays[2]))
    ids, weights = np.where(is_expert, experts, 0), np.where(is_expert, weights, 0)
    expected = oracle(*arrays, ids, weights, **options)
    tolerance = TOLERANCES[out.dtype.name]
    np.testing.assert_allclose(np.asarray(out, "f8"), expected, atol=tolerance, rtol=rtol)
    return np.asarray(out)


def with_experts(case, experts):
    """The case with other choices."""
    return [*case[:3], jnp.asarray(experts, jnp.int32), case[4]]


@dtypes
@pytest.mark.parametrize(
    ("tokens", "num_experts", "k"),
    [(0, 4, 2), (1, 4, 1), (1, 8, 8), (5, 64, 4), (7, 4, 2), (70, 5, 3), (300, 3, 2)],
)
def test_experts_match_a_float64_loop(tokens, num_experts, k, dtype, implementation):
    check(make_case(tokens, num_experts, k, dtype=dtype), implementation, rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "num_experts", "k", "hidden", "inner"),
    [
        (1, 8, 3, 16, 24), (30, 5, 3, 16, 24), (30, 5, 3, 80, 144), (30, 5, 3, 528, 48),
        (30, 5, 3, 8, 264),
    ],
)  # fmt: skip
@dtypes
@kinds
def test_8_bit_experts_match_a_float64_loop(
    tokens, num_experts, k, hidden, inner, dtype, kind, implementation
):
    case = make_case(tokens, num_experts, k, hidden, inner, dtype=dtype)
    check(case, implementation, kind=kind, rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"),
    [(1, 128, 128), (30, 264, 144), (9, 128, 264), (9, 144, 8)],
)
@dtypes
@kinds
def test_experts_whose_blocks_have_scales_match_a_float64_loop(
    tokens, hidden, inner, dtype, kind, implementation
):
    case = make_case(tokens, 5, 3, hidden, inner, dtype=dtype)
    for at, part in ((1, 96), (2, 16)):  # blocks and experts of other sizes
        case[at] = case[at].at[1:, part:].multiply(jnp.asarray(0.125, dtype))
    check(case, implementation, kind=kind, blocks=True, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", [None, jnp.int8])
def test_sums_are_given_in_f32_before_they_are_rounded(dtype, kind, implementation):
    case, scales = make_case(9, 4, 3, hidden=32, dtype=dtype), {}
    if kind is not None:
        case, scales, _ = quantized(kind, case)
    run = functools.partial(moe_experts, *case, **scales, implementation=implementation)
    wide = run(out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    assert (wide != wide.astype(dtype).astype(jnp.float32)).any()
    np.testing.assert_array_equal(wide.astype(dtype), run())


@pytest.mark.parametrize("kind", [None, jnp.int8, jnp.float8_e4m3fn])
def test_gate_and_up_may_stand_on_an_axis_of_their_own(kind, implementation):
    case = make_case(9, 4, 3, hidden=32, dtype="bfloat16")
    options, scales = make_options(case, "swiglu_oai", "float32"), {}
    blocks = kind == jnp.float8_e4m3fn
    if kind is not None:
        case, scales, _ = quantized(kind, case, blocks)
    given = options | scales
    expected = moe_experts(*case, **given, implementation=implementation)
    case[1] = case[1].reshape(4, 2, -1, 32)
    own = {name: given[name].reshape(4, 2, -1) for name in given if name.startswith("gate_up")}
    if blocks:
        own["gate_up_scale"] = own["gate_up_scale"][..., None]
    out = moe_experts(*case, **given | own, implementation=implementation)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("implementation", ["native", "reference"])
@dtypes
@kinds
def test_8_bit_experts_of_many_columns_match_a_float64_loop(dtype, kind, implementation):
    case = make_case(70, 5, 3, hidden=72, inner=1096, dtype=dtype)
    check(case, implementation, kind=kind, rtol=1e-5)


@kinds
def test_8_bit_experts_that_nobody_chose_are_never_read(kind, implementation):
    case, scales, meant = quantized(kind, make_case(6, 8, 2))
    case[3] = meant[3] = meant[3] % 4
    chosen = jnp.asarray(np.isin(np.arange(8), np.asarray(case[3])))
    poison = {name: jnp.where(chosen[:, None], x, jnp.nan) for name, x in scales.items()}
    out = moe_experts(*case, **poison, implementation=implementation)
    np.testing.assert_allclose(out, oracle(*meant), atol=2e-5)


@pytest.mark.parametrize(("hidden", "inner"), [(16, 24), (32, 48), (24, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@kinds
def test_a_nan_code_reaches_the_outputs_of_its_own_expert_alone(
    kind, dtype, hidden, inner, implementation
):
    """In `down` one output; in `gate_up` all that the expert adds. int8 has it in its scale."""
    case = make_case(20, 4, 1, hidden=hidden, inner=inner, dtype=dtype)
    case, scales, meant = quantized(kind, with_experts(case, np.repeat([[1], [2]], 10, axis=0)))
    expected = oracle(*meant)
    every = np.arange(expected.shape[1])
    for at, name, touched in ((1, "gate_up_scale", every), (2, "down_scale", every[5:6])):
        poisoned, scale = list(case), scales
        if kind == jnp.int8:
            scale = scales | {name: scales[name].at[2, 5].set(jnp.nan)}
        else:
            poisoned[at] = case[at].at[2, 5, 3].set(jnp.asarray(jnp.nan, kind))
        out = moe_experts(*poisoned, **scale, implementation=implementation)
        poisoned_out = expected.copy()
        poisoned_out[10:, touched] = np.nan
        np.testing.assert_allclose(np.asarray(out, "f8"), poisoned_out, atol=TOLERANCES[dtype])


@kinds
def test_a_token_gets_the_same_bits_from_8_bit_experts_whatever_its_batch(kind):
    case, scales, _ = quantized(kind, make_case(180, 6, 3, hidden=2056, inner=1032))
    x, gate_up, down, experts, weights = case
    together = moe_experts(*case, **scales)
    alone = moe_experts(x[7:8], gate_up, down, experts[7:8], weights[7:8], **scales)
    np.testing.assert_array_equal(together[7:8], alone)


@kinds
def test_bad_scales_are_named(kind):
    case, scales, _ = quantized(kind, make_case(3, 4, 2))
    with pytest.raises(
        ValueError, match=r"down_scale: expected f32\[experts, hidden\] beside the 8-bit"
    ):
        moe_experts(*case, gate_up_scale=scales["gate_up_scale"])
    with pytest.raises(ValueError, match=r"gate_up_scale: expected shape \[.*\], got \[4, 16\]"):
        moe_experts(*case, gate_up_scale=scales["down_scale"], down_scale=scales["down_scale"])
    case[1] = case[1].astype(jnp.float32)
    with pytest.raises(ValueError, match="gate_up_scale: expected None beside a float32 gate_up"):
        moe_experts(*case, **scales)
    name = jnp.dtype(kind).name
    with pytest.raises(ValueError, match=f"down: expected dtype float32, got {name}"):
        moe_experts(*case, down_scale=scales["down_scale"])


# ---- biases and activations ----


@pytest.mark.parametrize(("hidden", "inner"), [(16, 24), (80, 144), (136, 72)])
@pytest.mark.parametrize("bias_dtype", [None, "float32", "x"])
@pytest.mark.parametrize("kind", [None, jnp.int8, jnp.float8_e4m3fn])
@dtypes
@activations
def test_activations_and_biases_match_a_float64_loop(
    activation, dtype, kind, bias_dtype, hidden, inner, implementation
):
    case = make_case(30, 5, 3, hidden, inner, dtype=dtype)
    case = with_experts(case, np.where(np.arange(90).reshape(30, 3) % 11, case[3], -1))
    options = make_options(case, activation, dtype if bias_dtype == "x" else bias_dtype)
    check(case, implementation, kind=kind, rtol=ROUNDING[dtype], **options)


@pytest.mark.parametrize("name", ["gate_up_bias", "down_bias"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_one_bias_may_come_without_the_other(tokens, name, implementation):
    case = make_case(tokens, 4, 2, dtype=jnp.bfloat16)
    check(case, implementation, **{name: make_options(case, bias_dtype="float32")[name]})


@activations
def test_an_activation_is_right_for_any_gate(activation, implementation):
    """x is 0, so that gates and ups are the biases; down is the identity."""
    gate = np.linspace(-12, 12, 264, dtype=np.float32)
    up = np.resize(np.float32([1, -0.5, 2, -3]), 264)
    down = jnp.eye(264, dtype=jnp.float32)[None]
    x, gate_up = jnp.zeros((1, 264), jnp.float32), jnp.zeros((1, 528, 264), jnp.float32)
    limit = {"limit": 1.5} if activation == "swiglu_oai" else {}
    out = moe_experts(
        x, gate_up, down, jnp.zeros((1, 1), int), jnp.ones((1, 1), jnp.float32),
        gate_up_bias=jnp.concatenate([gate, up])[None], activation=activation,
        implementation=implementation, **limit,
    )  # fmt: skip
    # Of small results the exponent's rounding counts; XLA's tanh cancels where its result is -1.
    atol = 2e-6 if implementation == "reference" else 1e-30
    np.testing.assert_allclose(
        out[0], activate(gate, up, activation, **limit), rtol=2e-5, atol=atol
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", ["gate", "up", "down"])
@activations
def test_a_nan_passes_every_activation_and_stays_with_its_expert(
    activation, part, dtype, implementation
):
    case = with_experts(make_case(20, 3, 1, dtype=dtype), np.repeat([[1], [2]], 10, axis=0))
    options = make_options(case, activation, "float32")
    expected = oracle(*case, **options)
    name, column = {"gate": ("gate_up_bias", 5), "up": ("gate_up_bias", 29)}.get(
        part, ("down_bias", 5)
    )
    for expert in (0, 2):  # nobody's, and one that the last ten tokens chose
        options[name] = options[name].at[expert, column].set(jnp.nan)
    out = moe_experts(*case, **options, implementation=implementation)
    expected[10:, 5 if part == "down" else slice(None)] = np.nan
    np.testing.assert_allclose(np.asarray(out, "f8"), expected, atol=TOLERANCES[dtype])


@activations
def test_wild_gates_give_what_the_activation_tends_to(activation, implementation):
    x, *rest = make_case(2, 1, 1, hidden=8, inner=8)
    case = [0 * x, *rest]
    options = make_options(case, activation)
    for gate in (1e4, 1e30, -1e4, -1e30):
        bias = jnp.concatenate(
            [jnp.full((1, 8), gate, jnp.float32), jnp.ones((1, 8), jnp.float32)], 1
        )
        out = moe_experts(*case, **options, gate_up_bias=bias, implementation=implementation)
        expected = oracle(*case, **options, gate_up_bias=np.asarray(bias))
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@activations
def test_a_token_gets_the_same_bits_with_options_whatever_its_batch(activation):
    case = make_case(40, 6, 3, hidden=264, inner=136, dtype=jnp.bfloat16)
    options = make_options(case, activation, "bfloat16")
    together = moe_experts(*case, **options)
    x, gate_up, down, experts, weights = case
    alone = moe_experts(x[7:8], gate_up, down, experts[7:8], weights[7:8], **options)
    np.testing.assert_array_equal(together[7:8], alone)


def test_a_limit_may_be_traced_and_biases_batched(implementation):
    case = make_case(5, 4, 2)
    options = make_options(case, "swiglu_oai", "float32")
    limits = jnp.array([0.5, 0.75], jnp.float32)
    biases = jnp.stack([options["down_bias"], 2 * options["down_bias"]])

    def run(limit, bias):
        given = options | {"limit": limit, "down_bias": bias}
        return moe_experts(*case, **given, implementation=implementation)

    for i, out in enumerate(jax.vmap(run)(limits, biases)):
        expected = oracle(*case, **options | {"limit": float(limits[i]), "down_bias": biases[i]})
        np.testing.assert_allclose(out, expected, atol=2e-5)


@activations
def test_the_reference_has_gradients_in_every_array(activation):
    x, gate_up, down, experts, weights = make_case(7, 4, 2, hidden=8, inner=8)
    options = make_options([x, gate_up, down], activation, "float32")
    arrays = {"x": x, "gate_up": gate_up, "down": down, "weights": weights}
    arrays |= {name: x for name, x in options.items() if name != "activation"}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    fixed = {"experts": experts, "activation": activation}

    def loss(arrays):
        return (moe_experts(**fixed, **arrays, implementation="reference") ** 2).sum()

    gradient = jax.grad(loss)(arrays)
    rng = np.random.default_rng(2)
    for name, x in arrays.items():
        step = 1e-6 * rng.standard_normal(x.shape)  # so short that no clamp begins or ends
        after, before = (
            (oracle(**fixed, **arrays | {name: np.asarray(x, "f8") + s * step}) ** 2).sum()
            for s in (1, -1)
        )
        along = np.sum(np.asarray(gradient[name], "f8") * step)
        np.testing.assert_allclose(2 * along, after - before, rtol=0.01, atol=1e-9, err_msg=name)


@activations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_layers_have_the_same_activations(activation, dtype):
    x, gate_up, down, *_ = make_case(9, 1, 1, hidden=32, inner=48, dtype=dtype)
    options = make_options([x, gate_up, down], activation, dtype)
    biases = {name: options.pop(name) for name in ("gate_up_bias", "down_bias")}
    own = {name: bias[0] for name, bias in biases.items()}
    out = gated_mlp(x, gate_up[0], down[0], **own, **options)
    assert out.dtype == x.dtype
    ones = np.zeros((9, 1), int), np.ones((9, 1))
    expected = oracle(x, gate_up, down, *ones, **biases, **options)
    # Beside those of moe_experts, the projections are rounded, before and after each bias.
    tolerance = {"float32": 2e-5, "bfloat16": 0.08}[dtype]
    np.testing.assert_allclose(np.asarray(out, "f8"), expected, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu"}, "activation: expected 'silu' or 'gelu' or .*, got 'relu'"),
        ({"activation": "swiglu_oai"}, "limit: expected a scalar beside .*, got None"),
        (
            {"activation": "swiglu_oai", "limit": 0.0},
            "limit: expected a finite number above 0, got",
        ),
        (
            {"activation": "swiglu_oai", "limit": np.ones(2)},
            r"limit: expected shape \[\], got \[2\]",
        ),
        ({"limit": 7.0}, "limit: expected None beside activation='silu', got 7.0"),
        (
            {"gate_up_bias": jnp.zeros((4, 24), jnp.float32)},
            r"gate_up_bias: expected shape \[experts=4, 2·inner=48\], got \[4, 24\]",
        ),
        (
            {"down_bias": jnp.zeros((4, 16), jnp.float16)},
            "down_bias: expected dtype bfloat16 or float32, got float16",
        ),
    ],
)
def test_bad_biases_and_activations_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        moe_experts(*make_case(3, 4, 2, dtype=jnp.bfloat16), **options)


@pytest.mark.parametrize("implementation", ["native", "emulated"])
@pytest.mark.parametrize(
    ("hidden", "inner"), [(8, 8), (1032, 264), (40, 1096), (520, 264), (40, 552), (136, 72)]
)
@dtypes
def test_experts_of_any_multiple_of_8_match_a_float64_loop(dtype, hidden, inner, implementation):
    case = make_case(11, 4, 2, hidden=hidden, inner=inner, dtype=dtype)
    check(case, implementation, rtol=1e-5)


def test_more_pairs_than_one_turn_takes_match_the_reference():
    case = make_case(1400, 3, 3, hidden=8, inner=8)
    native, reference = (moe_experts(*case, implementation=i) for i in ("native", "reference"))
    np.testing.assert_allclose(native, reference, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_reference_does_not_depend_on_its_block_size(block_size):
    case = make_case(70, 5, 3)
    np.testing.assert_allclose(
        _reference(*case, *NO_OPTIONS, block_size=block_size), oracle(*case), atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind", [None, jnp.int8])
@dtypes
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(33, 16, 24), (150, 80, 48)])
def test_all_tokens_on_one_expert_match_a_float64_loop(
    tokens, hidden, inner, dtype, kind, implementation
):
    case = make_case(tokens, 6, 1, hidden=hidden, inner=inner, dtype=dtype)
    check(with_experts(case, np.full((tokens, 1), 4)), implementation, kind=kind)


@dtypes
def test_an_id_that_is_no_expert_adds_nothing_and_one_may_come_twice(dtype, implementation):
    ids = [[-1, 2, 0], [2, 2, 2], [2**31 - 1, -(2**31), 4], [3, 4, 3], [0, 0, 1], [-1, -1, -1]]
    out = check(with_experts(make_case(6, 4, 3, dtype=dtype), ids), implementation)
    np.testing.assert_array_equal(out[[2, 5]].astype("f8"), 0)


def test_infinities_and_nan_stay_in_their_own_token(implementation):
    x, *rest = make_case(20, 2, 1, dtype=jnp.bfloat16)
    wild = x.at[3].set(jnp.nan).at[9, 5].set(jnp.inf)
    out = np.asarray(moe_experts(wild, *rest, implementation=implementation), "f8")
    clean = [i for i in range(20) if i not in (3, 9)]
    np.testing.assert_allclose(out[clean], oracle(x, *rest)[clean], atol=0.04)
    assert np.isnan(out[3]).all()


def test_wild_activations_follow_silu():
    """silu(±large) is 0 or the argument; infinities and NaN stay in their own token."""
    x = jnp.array([[1e4] * 8, [-1e4] * 8, [jnp.nan] * 8, [1.0] * 8], jnp.float32)
    gate_up, down = (jnp.ones((1, rows, 8), jnp.float32) for rows in (16, 8))
    out = moe_experts(x, gate_up, down, jnp.zeros((4, 1), int), jnp.ones((4, 1), jnp.float32))
    np.testing.assert_allclose(out[0], 8 * 8e4**2, rtol=1e-6)
    np.testing.assert_allclose(out[1], 0, atol=1e-25)
    assert np.isnan(out[2]).all()
    np.testing.assert_allclose(out[3], 8 * 8 * 8 / (1 + np.exp(-8)), rtol=1e-6)


def test_bf16_experts_stay_within_bf16_rounding_of_float64(implementation):
    case = make_case(9, 4, 2, dtype=jnp.bfloat16)
    out = moe_experts(*case, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    expected = oracle(*case)
    # Two bf16 roundings (product, output) of 2^-9 each, over sums of 24 terms.
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.04)


def test_experts_that_nobody_chose_are_never_read(implementation):
    x, gate_up, down, experts, weights = make_case(6, 8, 2)
    chosen = np.isin(np.arange(8), np.asarray(experts) % 4)
    case = (x, gate_up, down, experts % 4, weights)
    poisoned = [jnp.where(chosen[:, None, None], a, jnp.nan) for a in (gate_up, down)]
    out = moe_experts(x, *poisoned, *case[3:], implementation=implementation)
    np.testing.assert_allclose(out, oracle(*case), atol=2e-5)


@pytest.mark.cuda(deep=True)
def test_dead_tokens_give_zero_and_read_no_expert(implementation):
    x, gate_up, down, experts, weights = make_case(5, 8, 1)
    experts = jnp.array([[0], [7], [1], [7], [2]], jnp.int32)
    live = jnp.array([True, False, True, False, True])
    x = jnp.where(live[:, None], x, jnp.nan)
    gate_up = gate_up.at[7].set(jnp.nan)
    case = (x, gate_up, down, experts, weights)
    out = moe_experts(*case, live=live, implementation=implementation)
    rows = np.asarray(live)
    expected = oracle(x[rows], gate_up, down, experts[rows], weights[rows])
    np.testing.assert_allclose(out[rows], expected, atol=2e-5)
    np.testing.assert_array_equal(out[~rows], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_live_token_gives_zeros(dtype, implementation):
    case = make_case(3, 4, 2, dtype=dtype)
    out = moe_experts(*case, live=jnp.zeros(3, bool), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(out, "f8"), np.zeros((3, 16)))


def test_a_token_gets_the_same_bits_whatever_its_batch():
    x, gate_up, down, experts, weights = make_case(180, 6, 3, hidden=2056, inner=1032)
    together = moe_experts(x, gate_up, down, experts, weights)
    alone = moe_experts(x[7:8], gate_up, down, experts[7:8], weights[7:8])
    np.testing.assert_array_equal(together[7:8], alone)


def test_bad_arguments_are_named():
    x, gate_up, down, experts, weights = make_case(3, 4, 2)
    with pytest.raises(ValueError, match=r"gate_up: expected shape .*got \[4, 24, 16\]"):
        moe_experts(x, gate_up[:, :24], down, experts, weights)
    with pytest.raises(ValueError, match=r"down: expected .* float8_e4m3fn, got bfloat16"):
        moe_experts(x, gate_up, down.astype(jnp.bfloat16), experts, weights)
    with pytest.raises(ValueError, match="experts"):
        moe_experts(x, gate_up, down, weights, weights)
    with pytest.raises(ValueError, match=r"gate_up: expected shape \[experts=4, 2, inner=24, "):
        moe_experts(x, gate_up.reshape(4, 3, 16, 16), down, experts, weights)
    with pytest.raises(ValueError, match="out_dtype: expected bfloat16 or float32, got float16"):
        moe_experts(*make_case(3, 4, 2, dtype="bfloat16"), out_dtype="float16")
    with pytest.raises(NotImplementedError, match="multiples of 8"):
        moe_experts(*make_case(3, 4, 2, inner=12))


@pytest.mark.parametrize("renormalize", [False, True])
def test_routing_is_softmax_over_all_experts_then_top_k(renormalize):
    logits = np.random.default_rng(1).standard_normal((11, 9)).astype(np.float32)
    experts, weights = route(jnp.asarray(logits), 4, renormalize=renormalize)
    probabilities = softmax(logits.astype(np.float64))
    expected = np.argsort(-probabilities, axis=-1)[:, :4]
    np.testing.assert_array_equal(experts, expected)
    expected_weights = np.take_along_axis(probabilities, expected, -1)
    if renormalize:
        expected_weights /= expected_weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)


def test_equal_logits_choose_the_smaller_expert_first():
    experts, _ = route(jnp.zeros((2, 5)), 3, renormalize=True)
    np.testing.assert_array_equal(experts, [[0, 1, 2]] * 2)


@pytest.mark.parametrize("implementation", ["native", "reference"])  # a callback gets numpy arrays
def test_no_array_of_all_experts_is_copied(implementation):
    case = make_case(2, 32, 2, hidden=64, inner=64)
    run = functools.partial(moe_experts, implementation=implementation)
    text = jax.jit(run).lower(*case).compile().as_text() or ""
    stack = "f32[32,128,64]"
    copies = [line for line in text.splitlines() if f"= {stack}" in line and " copy(" in line]
    assert stack in text
    assert not copies


def test_biases_are_read_as_they_are():
    case = make_case(2, 32, 2, hidden=64, inner=64, dtype=jnp.bfloat16)
    options = make_options(case, bias_dtype="bfloat16")
    run = functools.partial(moe_experts, implementation="native")
    text = jax.jit(run).lower(*case, **{k: options[k] for k in ("gate_up_bias", "down_bias")})
    text = text.compile().as_text() or ""
    assert "bf16[32,128]" in text
    assert "f32[32,128]" not in text


def test_vmap_runs_one_call_after_another():
    x, *rest = make_case(5, 8, 2)
    stacked = jnp.stack([x, 2 * x, -x])
    out = jax.vmap(lambda x: moe_experts(x, *rest))(stacked)
    for one, expected in zip(stacked, out, strict=True):
        np.testing.assert_array_equal(moe_experts(one, *rest), expected)
