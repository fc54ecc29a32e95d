"""8-bit pages: what write_kv stores, what attention makes of it, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import _ffi, explain, kv_dtype, paged_attention, reference, write_kv

DTYPES = ["float8_e4m3fn", "float8_e5m2", "int8"]
QMAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
LAYERS, PAGES, HEADS, SLOTS, DIM = 2, 5, 3, 4, 16


def pool(dtype, layout="HND"):
    shape = (PAGES, HEADS, SLOTS, DIM) if layout == "HND" else (PAGES, SLOTS, HEADS, DIM)
    return jnp.zeros((LAYERS, *shape), jnp.dtype(dtype))


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
    got = as_float(jax.jit(lambda x: reference.quantise(x, jnp.float32(1), jnp.dtype(dtype)))(x))
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(x) if dtype == "int8" else x
        expected = rounded(expected, dtype).astype(np.float32)
    if dtype == "int8":
        expected[np.isinf(x)] = np.sign(x[np.isinf(x)]) * 127
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
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
        pool(dtype, layout), pool(dtype, layout), k, v, slots, layer=1, layout=layout,
        implementation=implementation, **given,
    )  # fmt: skip
    assert len(written) == 2
    for pages, x, scale in zip(written, (k, v), scales.values(), strict=True):
        assert pages.dtype == jnp.dtype(dtype)
        scale = np.float32(1) if kind is None else scale
        scale = scale[1] if scale.ndim else scale
        expected = rounded(as_float(x) / np.reshape(scale, (-1, 1)), dtype)
        pages = as_float(pages)
        pages = np.swapaxes(pages, 2, 3) if layout == "HND" else pages
        flat = pages.reshape(LAYERS, PAGES * SLOTS, HEADS, DIM)
        for slot, token in ((7, 4), (0, 2), (19, 3)):
            np.testing.assert_array_equal(flat[1, slot], expected[token].astype(np.float32))
        flat[1, [7, 0, 19]] = 0
        assert not flat.any(), "nothing else is written"


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_per_token_are_computed_written_and_read_back(dtype, layout, implementation):
    nowhere = jnp.full((LAYERS, PAGES, HEADS, SLOTS), jnp.nan, jnp.float32)
    k, v = tokens(4), tokens(5) * 100
    k = k.at[2].set(0)
    slots = jnp.array([7, -1, 0, 19, 7, 1], jnp.int32)
    k_pages, v_pages, k_scale, v_scale = write_kv(
        pool(dtype, layout), pool(dtype, layout), k, v, slots, layer=1, layout=layout,
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
    monkeypatch.setattr(
        _ffi, "_targets", lambda _: ("jax_paged.attention.v1", "jax_paged.write_kv.v1")
    )
    k, slots = tokens(10), jnp.zeros(6, jnp.int32)
    pages = pool("int8")
    write = jax.jit(lambda pages: write_kv(pages, pages, k, k, slots, layer=0)).trace(pages)
    table = jnp.zeros((6, 1), jnp.int32)
    read = jax.jit(lambda p: paged_attention(k, p, p, table, slots, layer=0)).trace(pages)
    for traced, target in ((write, "write_kv"), (read, "attention")):
        assert f"jax_paged.{target}.v1" in traced.lower(lowering_platforms=("cuda",)).as_text()
    monkeypatch.undo()
    jax.clear_caches()


def test_8_bit_calls_are_explained():
    pages = jax.ShapeDtypeStruct((4, 2, 16, 64), jnp.int8)
    new = jax.ShapeDtypeStruct((3, 2, 64), jnp.float32)
    plan = explain("write_kv", pages, pages, new, new, jax.ShapeDtypeStruct((3,), jnp.int32))
    assert plan["implementation"] == "native"
