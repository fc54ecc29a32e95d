# SPDX-License-Identifier: Apache-2.0
"""8-bit pages: what write_kv stores, what attention makes of it, and what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import (
    explain,
    kv_dtype,
    paged_attention,
    qkv_norm_rope_write,
    ragged_paged_attention,
    write_kv,
)
from jax_paged.layout import (
    LAYOUTS,
    POOLS,
    PagesShape,
    is_one_pool,
    make_shape,
    pool_of_v,
    slots_first,
)
from jax_paged.native import load
from jax_paged.ops import reference
from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.options import attend, eight_bit
from jax_paged.testing.writes import on_device

DTYPES = ["float8_e4m3fn", "float8_e5m2", "int8"]
QMAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
TARGETS = tuple(
    f"jax_paged.{name}" for name in ("attention.v1", "qkv_norm_rope_write.v2", "write_kv.v1")
)
LAYERS, PAGES, HEADS, SLOTS, DIM = 2, 5, 3, 4, 16


def pool(dtype, layout="HND", name="k"):
    if name == "v" and is_one_pool(layout):
        return None
    sizes = PagesShape(LAYERS, PAGES, HEADS, SLOTS, DIM)
    return jnp.zeros(make_shape(sizes, layout, name, dtype=dtype), jnp.dtype(dtype))


def tokens(seed, dtype="float32", count=6):
    values = np.random.default_rng(seed).standard_normal((count, HEADS, DIM), "f4") * 3
    return jnp.asarray(values, jnp.dtype(dtype))


def rounded(x, dtype):
    """x (numpy, f32) in an 8-bit dtype: nearest even, clamped."""
    x = np.clip(x, -QMAX[dtype], QMAX[dtype])
    return (np.rint(x) if dtype == "int8" else x).astype(jnp.dtype(dtype))


def as_float(x):
    return np.asarray(x).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_to_nearest_even_saturates_and_keeps_nan(dtype):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20000, np.uint32).view(np.float32)
    bits = bits[np.isfinite(bits)]
    usual = rng.standard_normal(20000).astype(np.float32) * 10.0 ** rng.integers(-6, 6, 20000)
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    ties = (codes[1:] + codes[:-1]) / 2
    near = np.concatenate([ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])
    x = np.concatenate([bits, usual, codes, near, [np.inf, -np.inf, np.nan]]).astype(np.float32)
    got = as_float(jax.jit(lambda x: reference.quantize(x, jnp.float32(1), jnp.dtype(dtype)))(x))
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(x) if dtype == "int8" else x
        expected = rounded(expected, dtype).astype(np.float32)
    if dtype == "int8":
        expected[np.isinf(x)] = np.sign(x[np.isinf(x)]) * 127
    np.testing.assert_array_equal(got, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, "scalar", "layer", "head"])
def test_a_write_divides_by_the_given_scale(dtype, layout, kind, implementation):
    shape = {None: (), "scalar": (), "layer": (LAYERS,), "head": (LAYERS, HEADS)}[kind]
    rng = np.random.default_rng(1)
    scales = {name: np.float32(rng.uniform(0.01, 0.1, shape)) for name in ("k_scale", "v_scale")}
    k, v = tokens(2, "bfloat16"), tokens(3, "bfloat16")
    slots = jnp.array([7, -1, 0, 19, 7, 99], jnp.int32)
    given = {} if kind is None else {name: jnp.asarray(x) for name, x in scales.items()}
    written = write_kv(
        *(pool(dtype, layout, name) for name in POOLS), k, v, slots, layer=1, layout=layout,
        implementation=implementation, **given,
    )  # fmt: skip
    assert len(written) == 2
    written = written[0], pool_of_v(*written, layout)
    for name, pages, x, scale in zip(POOLS, written, (k, v), scales.values(), strict=True):
        assert pages.dtype == jnp.dtype(dtype)
        scale = np.float32(1) if kind is None else scale
        scale = scale[1] if scale.ndim else scale
        expected = rounded(as_float(x) / np.reshape(scale, (-1, 1)), dtype)
        pages = slots_first(as_float(pages), layout, name)
        flat = pages.reshape(LAYERS, PAGES * SLOTS, HEADS, DIM)
        for slot, token in ((7, 4), (0, 2), (19, 3)):
            np.testing.assert_array_equal(flat[1, slot], expected[token].astype(np.float32))
        flat[1, [7, 0, 19]] = 0
        assert not flat.any(), "nothing else is written"


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_per_token_are_computed_written_and_read_back(dtype, layout, implementation):
    nowhere = jnp.full((LAYERS, PAGES, HEADS, SLOTS), jnp.nan, jnp.float32)
    k, v = tokens(4), tokens(5) * 100
    k = k.at[2].set(0)
    slots = jnp.array([7, -1, 0, 19, 7, 1], jnp.int32)
    k_pages, v_pages, k_scale, v_scale = write_kv(
        *(pool(dtype, layout, name) for name in POOLS), k, v, slots, layer=1, layout=layout,
        k_scale=nowhere + 0, v_scale=nowhere + 0, implementation=implementation,
    )  # fmt: skip
    for scale, x in ((k_scale, k), (v_scale, v)):
        scale = np.swapaxes(np.asarray(scale), 2, 3).reshape(LAYERS, PAGES * SLOTS, HEADS)
        for slot, token in ((7, 4), (0, 2), (19, 3), (1, 5)):
            largest = np.abs(as_float(x)[token]).max(-1)
            np.testing.assert_allclose(scale[1, slot], largest / QMAX[dtype], rtol=1e-6)
        scale[1, [7, 0, 19, 1]] = np.nan
        assert np.isnan(scale).all()
    table = jnp.array([[0, -1], [1, 4]], jnp.int32)  # row 0: slots 0 and 1
    out = paged_attention(
        jnp.zeros((1, HEADS, DIM), jnp.float32), k_pages, v_pages, table[:1],
        jnp.array([2], jnp.int32), layer=1, layout=layout, k_scale=k_scale, v_scale=v_scale,
        implementation=implementation,
    )  # fmt: skip
    relative = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 1 / 254}[dtype]
    error = np.abs(as_float(out[0]) - (as_float(v)[2] + as_float(v)[5]) / 2)
    largest = np.abs(as_float(v)[[2, 5]]).max()
    assert 0 < error.max() <= relative * largest


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_and_the_native_write_store_the_same_bits(dtype):
    nowhere = jnp.full((LAYERS, PAGES, HEADS, SLOTS), jnp.nan, jnp.float32)
    k, v = tokens(6, "float16"), tokens(7, "float16")
    k = k.at[0, 0, 0].set(jnp.nan)
    slots = jnp.array([3, 2, 3, -5, 11, 10], jnp.int32)
    results = [
        write_kv(
            pool(dtype), pool(dtype), k, v, slots, layer=0, k_scale=nowhere + 0,
            v_scale=nowhere + 0, implementation=implementation,
        )
        for implementation in ("native", "reference")
    ]  # fmt: skip
    for native, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(as_float(native), as_float(expected))


def test_nan_stays_nan_in_fp8():
    k = tokens(8).at[1, 2, 3].set(jnp.nan)
    pages, _ = write_kv(
        pool("float8_e4m3fn"), pool("float8_e4m3fn"), k, k, jnp.arange(6, dtype=jnp.int32), layer=0
    )
    assert np.argwhere(np.isnan(as_float(pages))).tolist() == [[0, 0, 2, 1, 3]]


def test_fp8_that_is_stored_as_uint8_is_told_and_viewed():
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(4, 1, 8, 8)
    q = jnp.ones((1, 2, 8), jnp.float32)
    table, lens = jnp.arange(4)[None], jnp.array([3])
    text = r"k_pages: expected dtype .* got uint8, which k_pages\.view\('float8_e4m3fn'\) makes fp8"
    with pytest.raises(ValueError, match=text):
        paged_attention(q, codes, codes, table, lens)
    pages = codes.view("float8_e4m3fn")
    assert pages.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(pages).view(np.uint8), codes)
    one = jnp.asarray(np.asarray(codes).view(jnp.float8_e4m3fn))
    np.testing.assert_array_equal(
        paged_attention(q, pages, pages, table, lens), paged_attention(q, one, one, table, lens)
    )


def test_a_scale_per_token_for_one_pool_only_is_refused():
    k = tokens(9)
    write = functools.partial(
        write_kv, pool("int8"), pool("int8"), k, k, jnp.zeros(6, jnp.int32), layer=0
    )
    message = "v_scale: expected a scale per token where k_scale is one, and only there, got None"
    with pytest.raises(ValueError, match=re.escape(message)):
        write(k_scale=jnp.zeros((LAYERS, PAGES, HEADS, SLOTS), jnp.float32))


def test_kv_dtype_reads_the_usual_names():
    assert kv_dtype("fp8") == kv_dtype("fp8_e4m3") == jnp.dtype("float8_e4m3fn")
    assert kv_dtype("fp8_e5m2") == jnp.dtype("float8_e5m2")
    assert kv_dtype("int8") == jnp.dtype("int8")
    assert kv_dtype("auto", jnp.float16) == jnp.dtype("float16")
    assert kv_dtype("half") == jnp.dtype("float16")
    with pytest.raises(ValueError, match=r"name: expected 'auto' or 'fp8' .*, got 'fp4'"):
        kv_dtype("fp4")
    with pytest.raises(ValueError, match="model_dtype: expected a dtype for 'auto', got None"):
        kv_dtype("auto")


def test_8_bit_pages_lower_to_the_cuda_kernels(monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr(load, "targets", lambda _: TARGETS)
    k, slots = tokens(10), jnp.zeros(6, jnp.int32)
    pages = pool("int8")
    write = jax.jit(lambda pages: write_kv(pages, pages, k, k, slots, layer=0)).trace(pages)
    table = jnp.zeros((6, 1), jnp.int32)
    read = jax.jit(lambda p: paged_attention(k, p, p, table, slots, layer=0)).trace(pages)
    qkv, angles = jnp.zeros((6, 9 * DIM), jnp.float32), jnp.zeros((6, DIM // 2), jnp.float32)
    fused = jax.jit(
        lambda p: qkv_norm_rope_write(
            qkv, p, p, slots, slots, angles, angles, num_q_heads=3, layer=0
        )
    ).trace(pages)
    for traced, target in zip((read, fused, write), TARGETS, strict=True):
        assert target in traced.lower(lowering_platforms=("cuda",)).as_text()
    monkeypatch.undo()
    jax.clear_caches()


def test_8_bit_calls_are_explained():
    pages = jax.ShapeDtypeStruct((4, 2, 16, 64), jnp.int8)
    new = jax.ShapeDtypeStruct((3, 2, 64), jnp.float32)
    plan = explain("write_kv", pages, pages, new, new, jax.ShapeDtypeStruct((3,), jnp.int32))
    assert plan["implementation"] == "native"


@pytest.mark.cuda
@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_code_is_read_as_what_it_stands_for(dtype, q_dtype, implementation):
    """One key: out is its V. Queries of one 1: lse is one element of its K."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    values = codes.astype(np.float32)
    exact = values.astype(jnp.dtype(q_dtype)).astype(np.float32)  # f16 has all but e5m2's largest
    v_pages = jnp.asarray(codes.reshape(1, 1, 1, 256))
    k_pages = jnp.asarray(np.where(np.isfinite(values), codes, codes[0]).reshape(1, 1, 1, 256))
    q = jnp.asarray(np.eye(256, dtype=np.float32).reshape(32, 8, 256), jnp.dtype(q_dtype))
    table, one = jnp.zeros((32, 1), jnp.int32), jnp.ones(32, jnp.int32)

    def attend(k_pages):
        return paged_attention(
            q, k_pages, v_pages, table, one, sm_scale=1.0, return_lse=True,
            implementation=implementation,
        )  # fmt: skip

    (out, lse), rtol = attend(k_pages), 2e-7
    if implementation in ("emulated", "sim"):  # round the weight of a logit of 57344 to q's dtype
        (out, _), rtol = attend(jnp.zeros_like(k_pages)), 0.0
    exact = np.where(np.isfinite(values), exact, np.nan)  # an infinity may come out as NaN
    out = np.where(np.isfinite(values), as_float(out), out.astype(jnp.float32) * 0)
    np.testing.assert_allclose(out, np.broadcast_to(exact, (32, 8, 256)), rtol=rtol)
    finite = np.where(np.isfinite(values), values, 0)
    np.testing.assert_allclose(np.asarray(lse).reshape(256), finite, rtol=2e-7, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("q_lens", [[1, 1], [140, 9]], ids=["decode", "prefill"])
def test_scales_of_a_wide_range_stay_within_f16(q_lens, implementation):
    batch = make_batch(Case("wide", 4, 1, 64), jnp.float16, q_lens, [300, 90])
    stored, real, scales = eight_bit(batch, "int8", "token", np.random.default_rng(1))
    factor = np.float32(10.0) ** np.random.default_rng(2).uniform(-3, 3, scales["v_scale"].shape)
    factor = np.float32(factor * 1e-3)  # P times a scale as it is would be subnormal, or overflow
    scales["v_scale"] = scales["v_scale"] * factor
    real = dataclasses.replace(real, v_pages=real.v_pages * factor[..., None])
    result = attend(stored, scales, implementation=implementation)
    assert_attention_close(*result, *dense_oracle(real))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "implementation", ["native", pytest.param("emulated", marks=pytest.mark.deep)]
)
@pytest.mark.parametrize("q_len", [1, 2, 5])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16, 24])
@pytest.mark.parametrize(("dtype", "dim", "v_dim"), [
    ("float8_e4m3fn", 128, 128), ("float8_e5m2", 72, 40), ("int8", 8, 200), ("int8", 64, 16),
])  # fmt: skip
def test_queries_of_bf16_against_the_dequantized_cache(
    dtype, dim, v_dim, group, q_len, implementation
):
    """Blocks, tiles and windows at odd places; NaN in what no query of a row sees."""
    rng = np.random.default_rng(group * 10 + q_len)
    page_size, lens, window = 5, [1, 33, 64, 131], 29
    num_pages = sum(-(-n // page_size) for n in lens) + 1
    order = rng.permutation(num_pages - 1) + 1
    table = np.full((len(lens), -(-max(lens) // page_size)), -1, np.int32)
    size = 20.0 if dtype == "int8" else 1.0
    k, v = (
        rng.standard_normal((num_pages, 2, page_size, d)).astype("f4") * size for d in (dim, v_dim)
    )
    k_scale, v_scale = (rng.uniform(0.5, 2, (num_pages, 2, page_size)) / size for _ in "kv")
    k, v = rounded(k, dtype), rounded(v, dtype)
    real_k, real_v = (
        x.astype(np.float64) * s.astype(np.float32)[..., None]
        for x, s in ((k, k_scale), (v, v_scale))
    )
    q_lens = [min(q_len, n) for n in lens]
    bounds = np.cumsum([0, *q_lens]).astype(np.int32)
    q = jnp.asarray(rng.standard_normal((bounds[-1], 2 * group, dim)), jnp.bfloat16)
    expected = np.zeros((bounds[-1], 2 * group, v_dim))
    expected_lse = np.zeros((bounds[-1], 2 * group))
    seen = np.zeros((num_pages, page_size), bool)
    used = 0
    for i, n in enumerate(lens):
        count = -(-n // page_size)
        table[i, :count] = order[used : used + count]
        used += count
        keys, values = (
            x[table[i, :count]].swapaxes(1, 2).reshape(-1, 2, x.shape[-1]) for x in (real_k, real_v)
        )
        for j in range(q_lens[i]):
            end = n - q_lens[i] + j + 1
            mine = slice(max(end - window, 0), end)
            at = np.arange(mine.start, mine.stop)
            seen[table[i, at // page_size], at % page_size] = True
            for head in range(2 * group):
                query = np.asarray(q[bounds[i] + j, head]).astype(np.float64)
                logits = keys[mine, head // group] @ query * dim**-0.5
                weights = np.exp(logits - logits.max())
                expected[bounds[i] + j, head] = (
                    weights @ values[mine, head // group] / weights.sum()
                )
                expected_lse[bounds[i] + j, head] = logits.max() + np.log(weights.sum())
    hidden = ~seen[:, None, :]
    if dtype != "int8":
        k, v = (np.where(hidden[..., None], np.float32(np.nan).astype(x.dtype), x) for x in (k, v))
    k_scale, v_scale = (
        jnp.asarray(np.where(hidden, np.nan, s), jnp.float32) for s in (k_scale, v_scale)
    )
    out, lse = ragged_paged_attention(
        q, jnp.asarray(k), jnp.asarray(v), jnp.asarray(table), jnp.asarray(lens, jnp.int32),
        jnp.asarray(bounds), k_scale=k_scale, v_scale=v_scale, sliding_window=window,
        return_lse=True, implementation=implementation,
    )  # fmt: skip
    assert_attention_close(out, lse, expected, expected_lse)


@pytest.mark.cuda
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_qkv_norm_rope_write_stores_what_write_kv_does(
    layout, dtype, per_token, style, implementation
):
    rng = np.random.default_rng(11)
    qkv = jnp.asarray(rng.standard_normal((6, (4 * HEADS) * DIM)), jnp.float32)
    norm = jnp.asarray(rng.uniform(0.5, 2, DIM), jnp.float32)
    cos, sin = (jnp.asarray(rng.standard_normal((40, DIM // 2)), jnp.float32) for _ in "cs")
    positions = jnp.array([3, 39, -1, 0, 8, 40], jnp.int32)
    slots = jnp.array([7, 0, 3, -1, 7, 9], jnp.int32)
    options = {
        "num_q_heads": 2 * HEADS, "q_norm": norm, "k_norm": norm, "layer": 1, "style": style,
    }  # fmt: skip
    plain = [jnp.zeros((LAYERS, PAGES, HEADS, SLOTS, DIM), jnp.float32) for _ in "kv"]
    q, k, v = qkv_norm_rope_write(
        qkv, *plain, positions, jnp.arange(6, dtype=jnp.int32), cos, sin,
        implementation="reference", **options,
    )  # fmt: skip
    k, v = (jnp.swapaxes(x[1], 1, 2).reshape(-1, HEADS, DIM)[:6] for x in (k, v))

    def scales():
        if per_token:
            nowhere = jnp.full((LAYERS, PAGES, HEADS, SLOTS), jnp.nan, jnp.float32)
            return {"k_scale": nowhere, "v_scale": nowhere + 0}
        return {"k_scale": jnp.float32(0.02), "v_scale": jnp.full((LAYERS, HEADS), 0.05, "f4")}

    kept = jnp.where((positions >= 0) & (positions < 40), slots, -1)
    pools = [pool(dtype, layout, name) for name in POOLS]
    expected = write_kv(
        *on_device(pools), k, v, kept, layer=1, layout=layout, **scales()
    )  # fmt: skip
    got_q, *written = qkv_norm_rope_write(
        qkv, *pools, positions, slots, cos, sin, layout=layout,
        implementation=implementation, **options, **scales(),
    )  # fmt: skip
    np.testing.assert_allclose(as_float(got_q), as_float(q), rtol=1e-5, atol=1e-6)
    assert len(written) == (4 if per_token else 2)
    assert (written[1] is None) == is_one_pool(layout)
    for got, want in zip(jax.tree.leaves(written), jax.tree.leaves(expected), strict=True):
        got, want = as_float(got), as_float(want)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        # A k that is as good as halfway between two codes may go to either.
        close = np.isclose(got, want, rtol=1e-6, equal_nan=True)
        assert np.isclose(got, want, rtol=0.3, atol=1, equal_nan=True).all()
        assert close.mean() > 0.99


def test_a_scale_per_head_is_not_rounded_where_weights_are_alike(implementation):
    """It is O's: multiplied with weights that bf16 rounds, it would be off by 3.5e-3."""
    batch = make_batch(Case("alike", 8, 2, 64), jnp.bfloat16, [1, 1], [64, 226])
    batch = dataclasses.replace(batch, sm_scale=0.0)
    stored, real, scales = eight_bit(batch, "float8_e4m3fn", "head", np.random.default_rng(0))
    scale = np.float32(0.12936)  # bf16 has 0.12891
    factor = (scale / scales["v_scale"].astype(np.float64))[:, None, None]
    real = dataclasses.replace(real, v_pages=real.v_pages.astype(np.float64) * factor)
    scales["v_scale"] = np.full_like(scales["v_scale"], scale)
    arguments, options = stored.ragged()
    out = ragged_paged_attention(*arguments, **options, **scales, implementation=implementation)
    expected, _ = dense_oracle(real)
    share = np.vdot(np.asarray(out).astype(float), expected) / np.vdot(expected, expected)
    assert abs(share - 1) < 5e-4
