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
from jax_paged.layout import LAYOUTS, POOLS, PagesShape, is_one_pool, make_shape, slots_first
from jax_paged.ops.reference import QMAX
from jax_paged.ops.rope import apply_rope, inverse_frequencies, rope_tables
from jax_paged.testing import is_in_place, pool_sized_ops
from jax_paged.testing.qkv import call_op, check_results, make_call, scales_of_heads
from jax_paged.testing.writes import REPEATS, repeated_slots

pytestmark = pytest.mark.cuda
I32_MAX, I32_MIN = 2**31 - 1, -(2**31)
DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
SCALES = (None, "scalar", "layer", "head", "token")


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
    layout = LAYOUTS[index % 4]
    if is_one_pool(layout) and v_head_dim != head_dim:
        layout = "NHD"
    call = make_call(
        dtype, head_dim, v_head_dim, heads, rotary_dim=rotary_dim, style=style, layout=layout,
        num_layers=(None, 3)[index // 2 % 2], seed=index,
    )  # fmt: skip
    check(call, implementation)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_quantized_from_f32(shape, kv_dtype, implementation):
    head_dim, v_head_dim, heads, rotary_dim, style = SHAPES[shape]
    index = list(SHAPES).index(shape) + KV_DTYPES.index(kv_dtype)
    call = make_call(
        DTYPES[index % 3], head_dim, v_head_dim, heads, rotary_dim=rotary_dim, style=style,
        num_layers=(None, 3)[index % 2], kv_dtype=kv_dtype, scale=SCALES[index % 5], seed=index,
    )  # fmt: skip
    check(call, implementation)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_bit_pages_of_every_layout(layout, kv_dtype, scale, implementation):
    index = SCALES.index(scale) + KV_DTYPES.index(kv_dtype)
    call = make_call(
        DTYPES[index % 3], 48, heads=(6, 3), style=("half", "interleaved")[index % 2],
        layout=layout, num_layers=(3, None)[index % 2], page_size=(5, 1, 16)[index % 3],
        num_pages=9, kv_dtype=kv_dtype, scale=scale, seed=index,
    )  # fmt: skip
    positions = call.positions.copy()
    positions[2] = 11  # not written
    check(dataclasses.replace(call, positions=positions), implementation)


def quantized(x, scale, dtype):
    """Codes of x [..., dim] / scale [...] in f32, and NaN as 0x7f."""
    with np.errstate(invalid="ignore"):
        x = x / np.where(scale == 0, np.float32(1), scale)[..., None]
        x = np.clip(x, -np.float32(QMAX[dtype]), np.float32(QMAX[dtype]))
        x = np.nan_to_num(np.rint(x)) if dtype == "int8" else x
        return np.where(np.isnan(x), np.uint8(0x7F), x.astype(jnp.dtype(dtype)).view(np.uint8))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_codes_and_scales_have_the_bits_of_a_division_in_f32(kv_dtype, scale, implementation):
    """K without a norm, turned by nothing or by a quarter, is exact. With ties, and what clamps."""
    call = make_call(
        "float32", 64, heads=(2, 3), tokens=8, num_layers=2, norms="", kv_dtype=kv_dtype,
        scale=scale,
    )  # fmt: skip
    rng = np.random.default_rng(7)
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(kv_dtype)).astype("f4")
    codes = np.unique(codes[np.isfinite(codes)])
    kv = rng.standard_normal((8, 6, 64), "f4") * np.float32(10.0) ** rng.integers(-4, 5, (8, 1, 1))
    kv[0] = rng.choice((codes[1:] + codes[:-1]) / 2, (6, 64))
    kv[1] = rng.choice(codes, (6, 64))
    kv[2, :, ::5] = np.nan
    kv[3, 1:5] = 0
    kv[4, :, ::7] = np.inf
    kv[5] *= 1e20
    kv = kv.astype("f4")
    qkv = np.concatenate([call.qkv[:, : 2 * 64], kv.reshape(8, -1)], 1)
    quarter = (rng.random(call.cos.shape) < 0.5).astype("f4")
    call = dataclasses.replace(call, qkv=qkv, cos=1 - quarter, sin=quarter)
    _, k_pages, v_pages, *pools = call_op(call, implementation)

    k, v = np.split(kv, 2, axis=1)
    cos, sin = (x[call.positions][:, None] for x in (call.cos, call.sin))
    first, second = np.split(k, 2, axis=-1)
    with np.errstate(invalid="ignore"):
        k = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    at = np.divmod(call.slot_mapping, 5)
    for i, (x, pages, name) in enumerate(zip((k, v), (k_pages, v_pages), POOLS, strict=True)):
        if scale == "token":
            scales = np.abs(x).max(-1) * np.float32(1 / QMAX[kv_dtype])
            np.testing.assert_array_equal(pools[i][1].swapaxes(1, 2)[at], scales)
        else:
            scales = np.broadcast_to(scales_of_heads(call, name).astype("f4"), x.shape[:2])
        got = slots_first(pages, call.layout, name)[1][at]
        got = np.where(np.isnan(got.astype("f4")), np.uint8(0x7F), got.view(np.uint8))
        same = got == quantized(x, scales, kv_dtype)
        # XLA may multiply with 1 / scale: then what is as good as a tie goes to either code.
        assert same.mean() > 0.999 if implementation == "reference" else same.all()


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
        positions = call.positions.copy()
        positions[-1] = 11  # not written: the one before it wins
        of_int8 = make_call(
            "bfloat16", 8, heads=(6, 17), tokens=len(slots), kv_dtype="int8", scale="token", seed=4
        )
        slots = np.array(slots, np.int32)
        for one in (call, dataclasses.replace(call, positions=positions), of_int8):
            check(dataclasses.replace(one, slot_mapping=slots), implementation)


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
    for options in ({"tokens": 0}, {"num_pages": 0}):
        check(make_call(**options), implementation)
        check(make_call(**options, kv_dtype="int8", scale="token", layout="rpa"), implementation)


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_call_large_enough_to_be_shared_among_threads(dtype, layout, kv_dtype):
    call = make_call(
        dtype, 64, heads=(6, 3), tokens=700, page_size=16, num_pages=40, num_layers=2,
        layout=layout, kv_dtype=kv_dtype, scale=kv_dtype and "token",
    )  # fmt: skip
    rng = np.random.default_rng(1)
    slots = rng.integers(-50, 16 * 40 + 50, 700).astype(np.int32)  # some twice
    check(dataclasses.replace(call, slot_mapping=slots), "native")


def device_call(**options):
    """A call as device arrays: operands, options."""
    call = make_call(**options)
    operands = [getattr(call, field.name) for field in dataclasses.fields(call)[:7]]
    given = {name: getattr(call, name) for name in ("q_norm", "k_norm", "k_scale", "v_scale")}
    operands, given = jax.tree.map(jnp.asarray, (operands, given))
    static = {name: getattr(call, name) for name in ("num_q_heads", "layer", "layout")}
    return operands, given | static


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [None, "head", "token"])
@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_called_eagerly_it_writes_in_place_and_takes_the_pools(implementation, scale, layout):
    operands, options = device_call(layout=layout, kv_dtype=scale and "int8", scale=scale)
    names = ("k_scale", "v_scale")
    copied = jax.jit(lambda x: jax.tree.map(jnp.copy, x))  # which jax owns
    operands[1:3] = copied(operands[1:3])
    options |= copied({name: options[name] for name in names})
    pools = [*operands[1:3], *(options[name] for name in names if scale == "token")]
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pools)]
    _, *written = qkv_norm_rope_write(*operands, **options, implementation=implementation)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(written)] == before
    assert all(x.is_deleted() for x in jax.tree.leaves(pools))
    if scale == "head":
        assert not options["k_scale"].is_deleted()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loop", ["unrolled", "scan"])
def test_a_step_over_all_layers_makes_no_pool_sized_array(loop, layout, kv_dtype):
    sizes = PagesShape(3, 64, 2, 16, 32)
    pools = [
        jax.ShapeDtypeStruct(make_shape(sizes, layout, pool, dtype=kv_dtype), jnp.dtype(kv_dtype))
        for pool in POOLS
    ]
    if is_one_pool(layout):
        pools[1] = None
    if kv_dtype == "int8":
        pools += [jax.ShapeDtypeStruct((3, 64, 2, 16), jnp.float32)] * 2
    row = jax.ShapeDtypeStruct((4,), jnp.int32)
    table = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    qkv = jax.ShapeDtypeStruct((4, 8 * 32), jnp.float32)
    angles = jax.ShapeDtypeStruct((99, 16), jnp.float32)

    def layer_step(carry, layer, slots, table, lens, cos, sin):
        qkv, *pools = carry
        options = {"layer": layer, "layout": layout, "implementation": "native"}

        def scales():
            return dict(zip(("k_scale", "v_scale"), pools[2:], strict=False))

        q, *pools = qkv_norm_rope_write(
            qkv, *pools[:2], lens, slots, cos, sin, num_q_heads=4, **scales(), **options
        )
        out = paged_attention(q, *pools[:2], table, lens, **scales(), **options)
        return (jnp.concatenate([out.reshape(4, -1), qkv[:, 128:]], 1), *pools), None

    def step(pools, qkv, *rest):
        carry = (qkv, *pools)
        if loop == "scan":
            layers = jnp.arange(3, dtype=jnp.int32)
            return jax.lax.scan(lambda c, i: layer_step(c, i, *rest), carry, layers)[0]
        for layer in range(3):
            carry, _ = layer_step(carry, jnp.int32(layer), *rest)
        return carry

    operands = (pools, qkv, row, table, row, angles, angles)
    compiled = jax.jit(step, donate_argnums=0).lower(*operands).compile()
    for pool in jax.tree.leaves(pools):
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_it_is_explained(kv_dtype, layout):
    operands, options = device_call(layout=layout, kv_dtype=kv_dtype)
    plan = explain("qkv_norm_rope_write", *operands, **options)
    assert plan["implementation"] == "native"
    assert plan["target"] == "jax_paged.qkv_norm_rope_write.v2"


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
