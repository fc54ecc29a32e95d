# SPDX-License-Identifier: Apache-2.0
"""write_kv and copy_pages: bit for bit what a plain numpy loop writes, and nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import copy_pages, write_kv
from jax_paged.layout import LAYOUTS, POOLS, PagesShape, is_one_pool, make_shape
from jax_paged.testing.writes import (
    REPEATS,
    bits,
    expected_write,
    expected_writes,
    make_pools,
    make_tokens,
    on_device,
    repeated_slots,
)

pytestmark = pytest.mark.cuda
I32_MAX, I32_MIN = 2**31 - 1, -(2**31)


def check_write(pools, tokens, slots, implementation, *, layer=None, layout="HND"):
    """Writes and compares both pools with the loop."""
    slots = np.asarray(slots, np.int32)
    written = write_kv(
        *on_device(pools), *map(jnp.asarray, tokens), jnp.asarray(slots),
        layer=None if layer is None else jnp.int32(layer), layout=layout,
        implementation=implementation,
    )  # fmt: skip
    all_expected = expected_writes(pools, tokens, slots, layer, layout)
    for pool, out, expected in zip(POOLS, written, all_expected, strict=True):
        if expected is None:
            assert out is None
            continue
        assert out.dtype == expected.dtype
        np.testing.assert_array_equal(bits(out), bits(expected), err_msg=f"{pool}_pages")


@pytest.mark.parametrize("page_size", [1, 5, 8, 544])
@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_land_in_their_slots(layout, num_layers, page_size, implementation):
    pools = make_pools(page_size, layout=layout, num_layers=num_layers)
    slots = np.random.default_rng(0).permutation(7 * page_size)[:6]
    layer = None if num_layers is None else 1
    tokens = make_tokens(len(slots), layout=layout)
    check_write(pools, tokens, slots, implementation, layer=layer, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_without_a_slot_are_skipped(layout, implementation):
    slots = [-1, 3, 35, 34, 36, I32_MAX, I32_MIN, -35, 0]  # 7 pages of 5: 35 is the first beyond
    tokens = make_tokens(len(slots), layout=layout)
    check_write(make_pools(layout=layout), tokens, slots, implementation, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_layers", [None, 2])
def test_of_tokens_for_one_slot_the_last_wins_whole(num_layers, layout, implementation):
    layer = None if num_layers is None else 0
    pools = make_pools(8, num_layers=num_layers, layout=layout)
    for slots in ([4, 4], [9, 4, 9, -1, 4, 9], [20] * 500, [1, 2, 3] * 100 + [2]):
        tokens = make_tokens(len(slots), layout=layout)
        check_write(pools, tokens, slots, implementation, layer=layer, layout=layout)


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("count", [2047, 2048, 2049, 2600])  # CUDA has a table from 2049 on
def test_of_many_tokens_for_one_slot_the_last_wins_whole(count, repeats, implementation):
    pools = make_pools(16, num_pages=2500)
    slots = repeated_slots(repeats, count, 40_000)
    check_write(pools, make_tokens(count), slots, implementation)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", [-1, 3, I32_MAX, I32_MIN])
def test_layer_out_of_range_writes_nothing(layer, layout, implementation):
    pools = make_pools(num_layers=3, layout=layout)
    tokens = make_tokens(2, layout=layout)
    check_write(pools, tokens, [1, 30], implementation, layer=layer, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_layers", [None, 2])
def test_no_tokens_and_no_pages(num_layers, layout, implementation):
    options = {"layer": None if num_layers is None else 0, "layout": layout}
    pools = make_pools(num_layers=num_layers, layout=layout)
    check_write(pools, make_tokens(0, layout=layout), [], implementation, **options)
    empty = make_pools(num_layers=num_layers, num_pages=0, layout=layout)
    check_write(empty, make_tokens(2, layout=layout), [0, -1], implementation, **options)


@pytest.mark.parametrize("tokens_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("pages_dtype", ["float32", "bfloat16", "float16"])
def test_tokens_are_cast_to_the_nearest_even(pages_dtype, tokens_dtype, implementation):
    pools = make_pools(4, dtype=jnp.dtype(pages_dtype))
    tokens = make_tokens(28, jnp.dtype(tokens_dtype))
    tokens[0][:3] = [[[np.inf]], [[-np.inf]], [[-0.0]]]
    check_write(pools, tokens, np.arange(28), implementation)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_large_enough_to_be_shared_among_threads(layout):
    rng = np.random.default_rng(2)
    shape = PagesShape(2, num_pages=64, num_kv_heads=5, page_size=16, head_dim=64)
    pools: list[np.ndarray | None] = [
        rng.standard_normal(make_shape(shape, layout, pool, dtype="float32"), "f4")
        for pool in POOLS
    ]
    if is_one_pool(layout):
        pools[1] = None
    tokens = [rng.standard_normal((700, 5, 64), "f4") for _ in range(2)]
    slots = rng.integers(-50, 64 * 16 + 50, 700)  # some twice
    check_write(pools, tokens, slots, "native", layer=1, layout=layout)


def test_ties_go_to_even(implementation):
    one = np.float32(1)
    for dtype, ulp in (("bfloat16", 2.0**-7), ("float16", 2.0**-10)):
        k = np.zeros((3, 2, 16), np.float32)
        k[:, :, 0] = [[one + ulp / 2] * 2, [one + 3 * ulp / 2] * 2, [one + 0.51 * ulp] * 2]
        pages = jnp.zeros((1, 2, 4, 16), dtype)
        out, _ = write_kv(
            pages, pages + 0, jnp.asarray(k), jnp.asarray(k), jnp.arange(3, dtype=jnp.int32),
            implementation=implementation,
        )  # fmt: skip
        np.testing.assert_array_equal(
            np.asarray(out[0, 0, :3, 0]).astype(np.float64), [1, 1 + 2 * ulp, 1 + ulp]
        )


def test_float16_overflow_becomes_infinite_and_nan_stays_nan(implementation):
    k = np.array([7e4, -7e4, np.nan, 65504], np.float32).reshape(4, 1, 1).repeat(8, axis=2)
    pages = jnp.zeros((1, 1, 4, 8), jnp.float16)
    out, _ = write_kv(
        pages, pages + 0, jnp.asarray(k), jnp.asarray(k), jnp.arange(4, dtype=jnp.int32),
        implementation=implementation,
    )  # fmt: skip
    np.testing.assert_array_equal(out[0, 0, :, 0], [np.inf, -np.inf, np.nan, 65504])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_native_writes_the_bits_of_the_reference(dtype):
    rng = np.random.default_rng(1)
    for layout, num_layers in itertools.product(LAYOUTS, (None, 2)):
        page_size = 16 if num_layers else 1
        pools = make_pools(
            page_size, layout=layout, num_layers=num_layers, dtype=jnp.dtype(dtype), num_pages=5
        )
        slots = jnp.asarray(rng.integers(-3, 5 * page_size + 3, 40), jnp.int32)
        tokens = [jnp.asarray(x) for x in make_tokens(40, layout=layout)]
        results = [
            write_kv(
                *on_device(pools), *tokens, slots,
                layer=None if num_layers is None else jnp.int32(1),
                layout=layout, implementation=implementation,
            )
            for implementation in ("native", "reference")
        ]  # fmt: skip
        natives, references = map(jax.tree.leaves, results)
        for native, reference in zip(natives, references, strict=True):
            np.testing.assert_array_equal(bits(native), bits(reference))


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint32", "int64"])
def test_any_integer_dtype_serves_as_slot(dtype, implementation):
    pools, tokens = make_pools(), make_tokens(3)
    slots = np.array([3, 34, np.iinfo(dtype).max]).astype(dtype)  # the last one: out of range
    written = write_kv(
        *map(jnp.array, pools), *map(jnp.asarray, tokens), slots, implementation=implementation
    )
    for out, pages, new in zip(written, pools, tokens, strict=True):
        expected = expected_write(pages, new, [3, 34, -1])
        np.testing.assert_array_equal(bits(out), bits(expected))


def test_slots_beyond_i32_never_wrap_into_a_valid_one(implementation):
    pools, tokens = make_pools(), make_tokens(2)
    slots = np.array([2**32 + 3, -(2**32) + 4], np.int64)
    written = write_kv(
        *map(jnp.array, pools), *map(jnp.asarray, tokens), slots, implementation=implementation
    )
    for out, pages in zip(written, pools, strict=True):
        np.testing.assert_array_equal(bits(out), bits(pages))


def test_called_eagerly_the_pages_passed_in_are_gone(implementation):
    k_pages, v_pages = map(jnp.array, make_pools())
    k, v = map(jnp.asarray, make_tokens(1))
    write_kv(k_pages, v_pages, k, v, jnp.array([3], jnp.int32), implementation=implementation)
    for pages in (k_pages, v_pages):
        with pytest.raises(RuntimeError, match="deleted"):
            pages.sum()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stacked", [False, True])
def test_copy_pages_copies_whole_pages_and_skips_wild_pairs(stacked, layout):
    pools = make_pools(num_layers=3 if stacked else None, layout=layout)
    src = np.array([2, -1, 6, 7, 0, 5, I32_MIN, 2], np.int32)
    dst = np.array([5, 1, 0, 4, -1, 7, 3, 3], np.int32)  # page 5 and 0 are read and written
    copied = copy_pages(*on_device(pools), jnp.asarray(src), jnp.asarray(dst))
    assert (copied[1] is None) == (layout == "rpa")
    for out, pages in zip(jax.tree.leaves(copied), jax.tree.leaves(pools), strict=True):
        expected = pages.copy()
        for a, b in [(2, 5), (6, 0), (2, 3)]:
            at = (slice(None), b) if stacked else b
            expected[at] = pages[(slice(None), a) if stacked else a]
        np.testing.assert_array_equal(bits(out), bits(expected))


def test_copy_pages_donates_and_takes_no_pairs():
    k_pages, v_pages = map(jnp.array, make_pools())
    before = bits(k_pages).copy()
    nothing = jnp.zeros(0, jnp.int32)
    k_copy, _ = copy_pages(k_pages, v_pages, nothing, nothing)
    np.testing.assert_array_equal(bits(k_copy), before)
    assert k_pages.is_deleted()


def test_two_writes_in_one_program_apply_in_order(implementation):
    @jax.jit
    def twice(k_pages, v_pages, k, v):
        slots = jnp.arange(3, dtype=jnp.int32)
        pages = write_kv(k_pages, v_pages, k, v, slots, implementation=implementation)
        return write_kv(*pages, -k[:2], -v[:2], slots[:2], implementation=implementation)

    pages = jnp.zeros((2, 1, 4, 8), jnp.float32)
    ones = jnp.ones((3, 1, 8), jnp.float32)
    for out in twice(pages, pages, ones, ones):
        np.testing.assert_array_equal(out[:, 0, :, 0], [[-1, -1, 1, 0], [0, 0, 0, 0]])
