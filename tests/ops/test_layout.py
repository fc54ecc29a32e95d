# SPDX-License-Identifier: Apache-2.0
"""The layouts: one place that knows the order of the axes, and moves between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import convert_pages, page_table_from_addresses, paged_attention
from jax_paged.layout import (
    LAYOUTS,
    POOLS,
    PagesShape,
    make_shape,
    of_slots_first,
    pages_shape,
    pool_of_v,
    slots_first,
)

SHAPE = PagesShape(None, num_pages=5, num_kv_heads=2, page_size=3, head_dim=16)


def random_pools(layout, num_layers=None, dtype="float32", head_dims=(16, 24)):
    """K and V pools of a layout, filled with different numbers, and what they hold by slot."""
    by_slot = []
    for first, head_dim in enumerate(head_dims):
        shape = make_shape(SHAPE._replace(num_layers=num_layers, head_dim=head_dim), "NHD")
        by_slot.append((np.arange(np.prod(shape)) + first).reshape(shape).astype(dtype))
    return of_slots_first(*by_slot, layout), by_slot


def dims_for(*layouts):
    """Head dims of K and V that the layouts can hold."""
    return (16, 16) if "rpa" in layouts else (16, 24)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("pool", ["k", "v"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_layers", [None, 3])
def test_make_shape_is_the_inverse_of_pages_shape(num_layers, layout, pool, dtype):
    shape = SHAPE._replace(num_layers=num_layers)
    dtype = jnp.dtype(dtype)
    array = jax.ShapeDtypeStruct(make_shape(shape, layout, pool, dtype=dtype), dtype)
    assert pages_shape(array, layout, pool) == shape


def test_the_axis_orders_are_those_of_the_names():
    assert make_shape(SHAPE, "HND") == (5, 2, 3, 16)
    assert make_shape(SHAPE, "NHD") == (5, 3, 2, 16)
    assert make_shape(SHAPE._replace(num_layers=7), "HND") == (7, 5, 2, 3, 16)
    for dtype, k_shape in [
        (jnp.bfloat16, (5, 2, 2, 3, 8)),
        (jnp.float32, (5, 2, 4, 3, 4)),
        (jnp.int8, (5, 2, 1, 3, 16)),
    ]:
        assert make_shape(SHAPE, "vllm5d", "k", dtype=dtype) == k_shape
        assert make_shape(SHAPE, "vllm5d", "v", dtype=dtype) == (5, 2, 16, 3)
    assert make_shape(SHAPE._replace(num_layers=7), "rpa") == (7, 5, 3, 4, 16)


@pytest.mark.parametrize("num_layers", [None, 2])
def test_slots_first_finds_each_element(num_layers):
    layer = () if num_layers is None else (1,)
    page, slot, head, dim = 4, 2, 1, 13
    for layout, k_at, v_at in [
        ("HND", (page, head, slot, dim), (page, head, slot, dim)),
        ("NHD", (page, slot, head, dim), (page, slot, head, dim)),
        ("vllm5d", (page, head, dim // 4, slot, dim % 4), (page, head, dim, slot)),
        ("rpa", (page, slot, 2 * head, dim), (page, slot, 2 * head + 1, dim)),
    ]:
        pools, by_slot = random_pools(layout, num_layers, head_dims=dims_for(layout))
        pools = pools[0], pool_of_v(*pools, layout)
        for pool, at, pages, tokens in zip(POOLS, (k_at, v_at), pools, by_slot, strict=True):
            assert pages[(*layer, *at)] == tokens[(*layer, page, slot, head, dim)]
            np.testing.assert_array_equal(slots_first(pages, layout, pool), tokens)
            np.testing.assert_array_equal(slots_first(jnp.asarray(pages), layout, pool), tokens)


@pytest.mark.parametrize("dst", LAYOUTS)
@pytest.mark.parametrize("src", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_pages_convert_between_any_two_layouts(dtype, src, dst):
    for num_layers in (None, 3):
        pools, by_slot = random_pools(src, num_layers, jnp.dtype(dtype), dims_for(src, dst))
        pools = [None if x is None else jnp.asarray(x) for x in pools]
        converted = convert_pages(*pools, src, dst)
        assert (converted[1] is None) == (dst == "rpa")
        converted = converted[0], pool_of_v(*converted, dst)
        for pool, pages, tokens in zip(POOLS, converted, by_slot, strict=True):
            shape = SHAPE._replace(num_layers=num_layers, head_dim=tokens.shape[-1])
            assert pages.shape == make_shape(shape, dst, pool, dtype=pages.dtype)
            assert pages.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(slots_first(pages, dst, pool), tokens)


def test_gradients_of_a_read_reach_the_pages_of_every_layout():
    rng = np.random.default_rng(0)
    q, k_pages, v_pages = (
        jnp.asarray(rng.standard_normal(shape, "f4"))
        for shape in ((2, 4, 8), (5, 2, 3, 8), (5, 2, 3, 8))
    )
    table, seq_lens = jnp.array([[4, 1], [2, -1]], jnp.int32), jnp.array([5, 2], jnp.int32)

    def gradients(layout):
        def total(pages):
            return jnp.sum(paged_attention(q, *pages, table, seq_lens, layout=layout) ** 2)

        grads = jax.grad(total)(convert_pages(k_pages, v_pages, "HND", layout))
        return convert_pages(*grads, layout, "HND")

    expected = gradients("HND")
    assert all(jnp.abs(x).max() > 0.01 for x in expected)
    for layout in LAYOUTS:
        for x, y in zip(gradients(layout), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def f32(*shape):
    return jnp.zeros(shape, jnp.float32)


@pytest.mark.parametrize(
    ("k_pages", "v_pages", "src", "dst", "message"),
    [
        (f32(5, 2, 3, 16), f32(5, 2, 3, 16), "HDN", "HND", "src: expected 'HND' or .*, got 'HDN'"),
        (f32(5, 2, 3, 16), f32(5, 2, 3, 16), "HND", None, "dst: expected 'HND' or .*, got None"),
        (
            f32(5, 2, 16), f32(5, 2, 3, 16), "HND", "NHD",
            r"k_pages: expected rank 4, \[num_pages, .*, got \[5, 2, 16\]",
        ),
        (
            f32(5, 2, 4, 3, 4), f32(5, 2, 16), "vllm5d", "NHD",
            r"v_pages: expected rank 4, \[.*, head_dim, page_size\], or 5 .*, got \[5, 2, 16\]",
        ),
        (
            f32(5, 2, 2, 3, 8), f32(5, 2, 16, 3), "vllm5d", "HND",
            r"k_pages: expected \[.*, x\] with x=4 elements of float32 in 16 bytes, "
            r"got \[5, 2, 2, 3, 8\]",
        ),
        (
            f32(5, 2, 4, 3, 4), f32(5, 2, 16, 4), "vllm5d", "HND",
            r"v_pages: expected the sizes of k_pages \[.*\], head_dim aside, got \[5, 2, 16, 4\]",
        ),
        (
            f32(5, 3, 4, 16), f32(5, 3, 4, 16), "rpa", "HND",
            r"v_pages: expected None for layout 'rpa', whose k_pages hold V, got \[5, 3, 4, 16\]",
        ),
        (
            f32(5, 3, 5, 16), None, "rpa", "HND",
            r"k_pages: expected \[num_pages, page_size, 2·num_kv_heads, head_dim\], "
            r"got \[5, 3, 5, 16\] with an odd number of rows per slot",
        ),
        (
            f32(5, 2, 3, 16), f32(5, 2, 3, 8), "HND", "rpa",
            "v_pages: expected head_dim=16 and dtype float32 as of k_pages for layout 'rpa', "
            "got head_dim=8 and dtype float32",
        ),
        (
            f32(5, 2, 3, 18), f32(5, 2, 3, 18), "NHD", "vllm5d",
            r"head_dim: expected a multiple of x=4 \(float32 elements in 16 bytes\) for layout "
            "'vllm5d', got 18",
        ),
    ],
)  # fmt: skip
def test_a_wrong_conversion_is_told_in_one_line(k_pages, v_pages, src, dst, message):
    with pytest.raises(ValueError, match=message):
        convert_pages(k_pages, v_pages, src, dst)


def test_addresses_become_page_ids():
    pool = np.zeros((6, 2, 3, 16), np.float32)
    base, page_bytes = pool.ctypes.data, pool[0].nbytes
    ids = np.array([[5, 0, -1], [2, -1, -1]])
    addresses = np.where(ids < 0, 0, base + ids * page_bytes).astype(np.uint64)
    table = page_table_from_addresses(addresses, base, page_bytes)
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table, ids)
    assert page_table_from_addresses(addresses[:0], base, page_bytes).shape == (0, 3)


def test_addresses_use_all_64_bits():
    base = 2**64 - 2**20
    addresses = np.array([base, base + 2**20 - 1024, 0], np.uint64)
    np.testing.assert_array_equal(page_table_from_addresses(addresses, base, 1024), [0, 1023, -1])


def halves(addresses):
    return jnp.asarray(addresses.view(np.uint32).reshape(*addresses.shape, 2))


@pytest.mark.parametrize("page_bytes", [1, 3, 1024, 24 * 1024, 2**33 + 5, 2**63 + 1, 2**64 - 1])
@pytest.mark.parametrize("base", [0, 0x7000, 2**40 + 13, 2**63])
def test_a_device_finds_the_ids_of_addresses(base, page_bytes):
    rng = np.random.default_rng(0)
    most = min((2**64 - 1 - base) // page_bytes, 2**31 - 1)
    ids = [0, most, *(int(x) for x in rng.integers(0, most + 1, 40))]
    pages = [base + page * page_bytes for page in ids]
    wrong = [page + 1 for page in pages if page_bytes > 1 and page + 1 < 2**64]
    wrong += [base - 1] * (base > 1)
    wrong += [base + 2**31 * page_bytes] * (base + 2**31 * page_bytes < 2**64)
    addresses = np.array([*pages, *wrong, 0], np.uint64)
    found = jax.jit(page_table_from_addresses, static_argnums=(1, 2))(
        halves(addresses), base, page_bytes
    )
    want = [page if address else -1 for page, address in zip(ids, pages, strict=True)]
    np.testing.assert_array_equal(found, want + [-1] * (len(wrong) + 1))
    right = addresses[: len(pages)]
    host = page_table_from_addresses(right, base, page_bytes)
    np.testing.assert_array_equal(host, found[: len(pages)])
    if jax.config.jax_enable_x64:
        whole = page_table_from_addresses(jnp.asarray(addresses), base, page_bytes)
        assert whole.dtype == np.int32
        np.testing.assert_array_equal(whole, found)


def test_halves_of_addresses_come_in_pairs():
    with pytest.raises(ValueError, match=r"addresses: expected halves \[..., 2\] of 64 bits"):
        page_table_from_addresses(jnp.zeros(3, jnp.uint32), 0, 1024)
    with pytest.raises(ValueError, match="addresses: expected 64-bit integers, or their halves"):
        page_table_from_addresses(jnp.zeros(2, jnp.float32), 0, 1024)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"addresses": np.array([[0x7000, 0], [0x7401, 0x7400]], np.uint64)},
            r"addresses\[1, 0\]: expected 0 or base 0x7000 plus fewer than 2\^31 times "
            "page_bytes=1024, got 0x7401",
        ),
        ({"addresses": np.array([0x6C00], np.uint64)}, r"addresses\[0\]: .*, got 0x6c00"),
        (
            {"addresses": np.array([0x7000 + 2**41], np.uint64)},
            r"addresses\[0\]: .*, got 0x20000007000",
        ),
        ({"addresses": np.array([0x7000])}, "addresses: expected dtype uint64, got int64"),
        ({"base": -1}, r"base: expected an int in \[0, 2\^64\), got -1"),
        ({"base": 2.0}, r"base: expected an int in \[0, 2\^64\), got 2.0"),
        ({"page_bytes": 0}, r"page_bytes: expected an int in \[1, 2\^64\), got 0"),
    ],
)
def test_an_address_that_is_no_page_is_refused(change, message):
    good = {"addresses": np.array([0x7000], np.uint64), "base": 0x7000, "page_bytes": 1024}
    with pytest.raises(ValueError, match=message):
        page_table_from_addresses(**good | change)
