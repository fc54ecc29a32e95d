# SPDX-License-Identifier: Apache-2.0
"""qkv_norm_rope_write: native, reference and the emulated CUDA kernel against float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_paged
from jax_paged import explain, paged_attention, qkv_norm_rope_write, write_kv
from jax_paged.ops.rope import apply_rope, inverse_frequencies, rope_tables
from jax_paged.testing import is_in_place, pool_sized_ops
from jax_paged.testing.qkv import call_op, check_results, make_call
from jax_paged.testing.writes import REPEATS, repeated_slots

pytestmark = pytest.mark.cuda
I32_MAX, I32_MIN = 2**31 - 1, -(2**31)
LAYOUTS = ("HND", "NHD")  # of the native kernels
DTYPES = ("bfloat16", "float16", "float32")


def check(call, implementation):
    """Runs a call and compares it with the oracle."""
    check_results(call, call_op(call, implementation))


SHAPES = {  # head_dim, v_head_dim, (num_q_heads, num_kv_heads), rotary_dim, style
    "qwen3": (128, 128, (32, 4), 128, "half"),
    "smollm2": (64, 64, (9, 3), 64, "half"),
    "phi2": (80, 80, (4, 4), 32, "half"),
    "gptj": (256, 256, (3, 3), 64, "interleaved"),
    "glm4": (128, 128, (4, 2), 64, "interleaved"),
    "nine eights": (72, 40, (5, 1), 72, "half"),
    "five eights": (40, 72, (3, 2), 12, "half"),
    "eight": (8, 16, (1, 1), 4, "half"),
    "odd pairs": (24, 24, (2, 1), 10, "interleaved"),
    "one pair": (64, 64, (2, 1), 2, "interleaved"),
    "widest": (512, 512, (2, 1), 512, "half"),
    "widest in pieces": (512, 496, (2, 1), 500, "half"),
    "narrow v": (192, 128, (4, 2), 64, "half"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_matches_float64_rounded_once(shape, dtype, implementation):
    head_dim, v_head_dim, heads, rotary_dim, style = SHAPES[shape]
    index = list(SHAPES).index(shape) + DTYPES.index(dtype)
    call = make_call(
        dtype, head_dim, v_head_dim, heads, rotary_dim=rotary_dim, style=style,
        layout=LAYOUTS[index % 2], num_layers=(None, 3)[index // 2 % 2], seed=index,
    )  # fmt: skip
    check(call, implementation)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("norms", ["", "q", "k"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_norm_may_be_left_out(dtype, norms, style, implementation):
    check(make_call(dtype, norms=norms, style=style), implementation)


def test_norm_weights_may_be_f32_beside_bf16_heads(implementation):
    call = make_call("bfloat16", 72, 40, norm_dtype="float32", seed=1)
    check(call, implementation)


def test_norm_weights_of_different_dtypes_are_not_rounded(implementation):
    call = make_call("bfloat16", norm_dtype="float16", seed=2)
    call = dataclasses.replace(call, k_norm=call.k_norm.astype(jnp.bfloat16))
    check(call, implementation)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_land_in_their_slots(layout, num_layers, page_size, implementation):
    call = make_call(
        "bfloat16", layout=layout, num_layers=num_layers, page_size=page_size, num_pages=9
    )
    check(call, implementation)


def test_tokens_without_a_slot_are_turned_but_not_written(implementation):
    call = make_call(tokens=9)  # 6 pages of 5: 30 is the first slot beyond
    slots = np.array([-1, 29, 30, 31, I32_MAX, I32_MIN, -30, 0, 7], np.int32)
    qkv = call.qkv.copy()
    qkv[0] = np.nan  # padding
    check(dataclasses.replace(call, qkv=qkv, slot_mapping=slots), implementation)


@pytest.mark.parametrize("position", [-1, 11, I32_MAX, I32_MIN])
def test_a_position_without_a_row_gives_zero_and_writes_nothing(position, implementation):
    call = make_call("bfloat16", tokens=4)
    qkv = call.qkv.copy()
    qkv[1] = np.nan
    positions = np.array([10, position, 0, position], np.int32)
    check(dataclasses.replace(call, qkv=qkv, positions=positions), implementation)


@pytest.mark.parametrize("layer", [-1, 3, I32_MAX, I32_MIN])
def test_layer_out_of_range_writes_nothing(layer, implementation):
    check(make_call(num_layers=3, layer=layer), implementation)


def test_of_tokens_for_one_slot_the_last_that_is_written_wins_whole(implementation):
    for slots in ([4, 4], [9, 4, 9, -1, 4, 9], [20] * 150, [1, 2, 3] * 40 + [2], [3] + [5] * 6):
        call = make_call("bfloat16", 8, heads=(6, 17), tokens=len(slots), seed=3)
        call = dataclasses.replace(call, slot_mapping=np.array(slots, np.int32))
        check(call, implementation)
        positions = call.positions.copy()
        positions[-1] = 11  # not written: the one before it wins
        check(dataclasses.replace(call, positions=positions), implementation)


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("tokens", [2048, 2049, 2601])  # CUDA has a table from 2049 on
def test_of_many_tokens_for_one_slot_the_last_that_is_written_wins(tokens, repeats, implementation):
    call = make_call("bfloat16", 8, heads=(1, 1), tokens=tokens, page_size=16, num_pages=2500)
    rng = np.random.default_rng(tokens)
    positions = rng.integers(-4, 15, tokens).astype(np.int32)  # of 11: every other one is written
    positions[-2:] = 11
    slots = repeated_slots(repeats, tokens, 40_000)
    check(dataclasses.replace(call, slot_mapping=slots, positions=positions), implementation)


def test_no_tokens_and_no_pages(implementation):
    check(make_call(tokens=0), implementation)
    check(make_call(num_pages=0), implementation)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_call_large_enough_to_be_shared_among_threads(dtype, layout):
    call = make_call(
        dtype, 64, heads=(6, 3), tokens=700, page_size=16, num_pages=40, num_layers=2, layout=layout
    )
    rng = np.random.default_rng(1)
    slots = rng.integers(-50, 16 * 40 + 50, 700).astype(np.int32)  # some twice
    check(dataclasses.replace(call, slot_mapping=slots), "native")


def device_call(**options):
    """A call as device arrays: operands, options."""
    call = make_call(**options)
    operands = [jnp.asarray(getattr(call, f.name)) for f in dataclasses.fields(call)[:7]]
    norms = {"q_norm": jnp.asarray(call.q_norm), "k_norm": jnp.asarray(call.k_norm)}
    return operands, norms | {"num_q_heads": call.num_q_heads, "layer": call.layer}


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_it_equals_the_ops_it_is_made_of(implementation):
    (qkv, k_pages, v_pages, positions, slots, *_), options = device_call(num_layers=2)
    cos, sin = rope_tables(jnp.arange(11, dtype=jnp.int32), inverse_frequencies(64, 1e4))
    q, k, v = jnp.split(qkv.reshape(7, 9, 64), [5, 7], axis=1)

    def norm(x, weight):
        root = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.float32(1e-6))
        return apply_rope(x * root * weight[None, None], cos[positions], sin[positions])

    expected = write_kv(k_pages + 0, v_pages + 0, norm(k, options["k_norm"]), v, slots, layer=1)
    got = qkv_norm_rope_write(
        qkv, k_pages, v_pages, positions, slots, cos, sin, **options, implementation=implementation
    )
    np.testing.assert_allclose(got[0], norm(q, options["q_norm"]), rtol=1e-6, atol=2e-6)
    for a, b in zip(got[1:], expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_called_eagerly_it_writes_in_place_and_takes_the_pages(implementation):
    operands, options = device_call()
    operands[1:3] = [jax.jit(jnp.copy)(x) for x in operands[1:3]]
    before = [x.unsafe_buffer_pointer() for x in operands[1:3]]
    _, *pages = qkv_norm_rope_write(*operands, **options, implementation=implementation)
    assert [x.unsafe_buffer_pointer() for x in pages] == before
    assert operands[1].is_deleted()
    assert operands[2].is_deleted()


@pytest.mark.parametrize("loop", ["unrolled", "scan"])
def test_a_step_over_all_layers_makes_no_pool_sized_array(loop):
    pool = jax.ShapeDtypeStruct((3, 64, 2, 16, 32), jnp.float32)
    row = jax.ShapeDtypeStruct((4,), jnp.int32)
    table = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    qkv = jax.ShapeDtypeStruct((4, 8 * 32), jnp.float32)
    angles = jax.ShapeDtypeStruct((99, 16), jnp.float32)

    def layer_step(carry, layer, slots, table, lens, cos, sin):
        qkv, *pages = carry
        q, *pages = qkv_norm_rope_write(
            qkv, *pages, lens, slots, cos, sin, num_q_heads=4, layer=layer, implementation="native"
        )
        out = paged_attention(q, *pages, table, lens, layer=layer, implementation="native")
        return (jnp.concatenate([out.reshape(4, -1), qkv[:, 128:]], 1), *pages), None

    def step(k_pages, v_pages, qkv, *rest):
        carry = (qkv, k_pages, v_pages)
        if loop == "scan":
            layers = jnp.arange(3, dtype=jnp.int32)
            return jax.lax.scan(lambda c, i: layer_step(c, i, *rest), carry, layers)[0]
        for layer in range(3):
            carry, _ = layer_step(carry, jnp.int32(layer), *rest)
        return carry

    operands = (pool, pool, qkv, row, table, row, angles, angles)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*operands).compile()
    assert pool_sized_ops(compiled, pool) == []
    assert is_in_place(compiled, pool)


def test_vmap_over_one_pool_and_gradient_of_the_native_op_are_refused():
    (qkv, *rest), options = device_call()
    call = functools.partial(qkv_norm_rope_write, **options)
    with pytest.raises(NotImplementedError, match="qkv_norm_rope_write: vmap: k_pages: expected"):
        jax.vmap(lambda x: call(x, *rest))(jnp.stack([qkv, qkv]))
    with pytest.raises(NotImplementedError, match="qkv_norm_rope_write: not differentiable"):
        jax.grad(lambda x: call(x, *rest)[0].sum())(qkv)


def test_the_reference_has_gradients_and_vmap():
    (qkv, *rest), options = device_call()
    call = jax.jit(
        lambda x: qkv_norm_rope_write(x, *rest, **options, implementation="reference")[0]
    )
    direction = jnp.asarray(np.random.default_rng(0).standard_normal(qkv.shape, "f4"))
    slope = jnp.vdot(jax.grad(lambda x: jnp.sin(call(x)).sum())(qkv), direction)
    step = jnp.float32(1e-2)
    plus, minus = (jnp.sin(call(qkv + s * direction)).sum() for s in (step, -step))
    np.testing.assert_allclose(slope, (plus - minus) / (2 * step), rtol=2e-2)
    batched = jax.vmap(call)(jnp.stack([qkv, 2 * qkv]))
    np.testing.assert_allclose(batched[1], call(2 * qkv), rtol=1e-6, atol=1e-6)


def test_an_exported_program_gives_the_same_bits():
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    operands, options = device_call(num_layers=2)
    step = jax.jit(functools.partial(qkv_norm_rope_write, **options, implementation="native"))
    checks = [
        export.DisabledSafetyCheck.custom_call(name) for name in jax_paged.build_info()["targets"]
    ]
    exported = export.export(step, disabled_checks=checks)(*operands)
    restored = export.deserialize(exported.serialize())
    expected = step(*operands)
    for a, b in zip(restored.call(*operands), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_it_is_explained():
    operands, options = device_call()
    plan = explain("qkv_norm_rope_write", *operands, **options)
    assert plan["implementation"] == "native"
    assert plan["target"] == "jax_paged.qkv_norm_rope_write.v1"


def test_any_integer_dtype_serves_as_position_and_slot():
    (qkv, *pages, positions, slots, cos, sin), options = device_call()
    results = [
        qkv_norm_rope_write(
            qkv, *(x + 0 for x in pages), np.asarray(positions).astype(a),
            np.asarray(slots).astype(b), cos, sin, **options,
        )
        for a, b in itertools.product(["int32", "uint8", "int64"], repeat=2)
    ]  # fmt: skip
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("shape", ["qwen3", "phi2", "nine eights", "narrow v"])
def test_pages_of_vllm5d_are_written_in_their_own_order(shape, num_layers, dtype, implementation):
    head_dim, v_head_dim, heads, rotary_dim, style = SHAPES[shape]
    call = make_call(
        dtype, head_dim, v_head_dim, heads, rotary_dim=rotary_dim, style=style, layout="vllm5d",
        num_layers=num_layers, page_size=8, tokens=20,
    )  # fmt: skip
    check(call, implementation)
