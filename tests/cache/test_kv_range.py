# SPDX-License-Identifier: Apache-2.0
"""gather_kv and scatter_kv: ranges of a sequence, against a walk over the table in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import gathers_in_place

from jax_paged import KVState, gather_kv, scatter_kv, write_kv
from jax_paged.layout import (
    LAYOUTS,
    POOLS,
    is_one_pool,
    make_shape,
    of_slots_first,
    pages_shape,
    slots_first,
)
from jax_paged.ops.reference import QMAX
from jax_paged.testing import Case, is_in_place, make_batch, pool_sized_ops

CASE = Case("ranges", 4, 2, 16, page_size=4, v_head_dim=8)
# row, begin, end: whole, a part, empty, backwards, before 0, past the length and past the table,
# rows out of range, begins that would overflow.
RANGES = np.array(
    [
        (0, 0, 11), (1, 3, 9), (2, 5, 5), (1, 6, 2), (0, -3, 2), (2, 14, 99), (3, 0, 4), (-1, 0, 4),
        (0, 2**31 - 1, 2**31 - 1), (1, -(2**31), 3),
    ],
    np.int32,
)  # fmt: skip
MAX_TOKENS = 11


def make(layout="HND", num_layers=None, dtype="float32"):
    """A batch whose pages hold a number in every slot that a row owns, NaN elsewhere."""
    case = dataclasses.replace(CASE, layout=layout, num_layers=num_layers)
    return make_batch(case, jnp.dtype(dtype), [1, 1, 1], [11, 9, 16])


def walk(batch, ranges=RANGES):
    """(range, place in it, page, offset) of each token of the ranges that has a page."""
    table, page_size = batch.page_table, batch.case.page_size
    for i, (row, begin, end) in enumerate(ranges.astype(int)):
        for j in range(MAX_TOKENS):
            token = begin + j
            if not (0 <= row < len(table) and 0 <= token < min(end, table.shape[1] * page_size)):
                continue
            page = table[row, token // page_size]
            if 0 <= page < len(slots_of(batch, "k")):
                yield i, j, page, token % page_size


def slots_of(batch, pool):
    pages = batch.k_pages if pool == "k" else batch.v_pages
    pages = pages if batch.layer is None else pages[batch.layer]
    return slots_first(pages, batch.case.layout, pool)


@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_reads_the_tokens_that_exist_and_zeros(layout, num_layers):
    batch = make(layout, num_layers)
    _, k_pages, v_pages, table, _ = batch.operands()
    gathered = gather_kv(
        k_pages, v_pages, table, *RANGES.T, max_tokens=MAX_TOKENS, layer=batch.layer, layout=layout
    )
    for pool, result in zip("kv", gathered, strict=True):
        pages = slots_of(batch, pool)
        expected = np.zeros((len(RANGES), MAX_TOKENS, *pages.shape[2:]), "f4")
        for i, j, page, offset in walk(batch):
            expected[i, j] = pages[page, offset]
        assert np.count_nonzero(expected) > 0
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("num_layers", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scatter_sets_those_tokens_and_nothing_else(layout, num_layers, implementation):
    batch = make(layout, num_layers)
    ranges = RANGES[[0, 1, 2, 3, 5, 6, 7, 8]]  # those that do not overlap
    rng = np.random.default_rng(0)
    dims = [slots_of(batch, pool).shape[-1] for pool in "kv"]
    new = [rng.standard_normal((len(ranges), MAX_TOKENS, 2, d), "f4") for d in dims]
    wanted = [slots_of(batch, pool).copy() for pool in "kv"]
    used = np.zeros((len(ranges), MAX_TOKENS), bool)
    for i, j, page, offset in walk(batch, ranges):
        used[i, j] = True
        for pages, x in zip(wanted, new, strict=True):
            pages[page, offset] = x[i, j]
    for x in new:
        x[~used] = np.nan
    _, *pools, _, _ = batch.operands()
    written = scatter_kv(
        *pools, *map(jnp.asarray, new), batch.page_table, *ranges.T, layer=batch.layer,
        layout=layout, implementation=implementation,
    )  # fmt: skip
    expected = of_slots_first(*wanted, layout)
    for pages, mine, old in zip(written, expected, (batch.k_pages, batch.v_pages), strict=True):
        if mine is None:  # V lies in the pool of K
            assert pages is None
            continue
        whole = old.copy()
        whole[... if batch.layer is None else batch.layer] = mine
        np.testing.assert_array_equal(pages, whole)


@pytest.mark.parametrize(("window", "pinned"), [(6, 0), (6, 2), (9, 5), (11, 4)])
def test_of_a_row_that_slid_the_tokens_that_are_there_are_told(window, pinned):
    """Row 1 slides as it grows, row 0 does not; token t has K = t + 1."""
    kv = KVState.create(
        num_layers=1, num_pages=20, page_size=4, num_kv_heads=1, head_dim=8, max_seqs=2,
        pages_per_seq=7, dtype="float32", windows=True,
    )  # fmt: skip
    kv, _ = kv.reserve([0, 1], 1)
    kv, _ = kv.set_window([1], window, pinned)
    pools, length = (kv.k_pages, kv.v_pages), 0
    slid = 0
    for count in [5, *[3] * 7]:
        kv, reserved = kv.reserve([0, 1], count)
        kv, batch, stepped = kv.step([0, 1], count, num_tokens=2 * count)
        assert not np.any(reserved | stepped)
        k = np.tile(np.arange(length, length + count) + 1.0, 2)[:, None, None]
        k = jnp.asarray(np.broadcast_to(k, (2 * count, 1, 8)), jnp.float32)
        pools = write_kv(*pools, k, -k, batch.slot_mapping, layer=0)
        length += count
        windows = kv.table.windows
        given = {"num_pinned": windows.num_pinned, "slot_offset": windows.slot_offset}
        rows, begins, ends = np.int32([[0, 0, length], [1, 0, length], [1, 3, length - 1]]).T
        k, v, exists = gather_kv(
            *pools, kv.table.page_table, rows, begins, ends, max_tokens=28, layer=0,
            return_exists=True, **given,
        )  # fmt: skip
        token = begins[:, None] + np.arange(28)[None]
        inside = token < ends[:, None]
        np.testing.assert_array_equal(k[..., 0, 0], np.where(exists, token + 1, 0))
        np.testing.assert_array_equal(v, -k)
        offset = int(windows.slot_offset[1])
        slid = max(slid, offset)
        first = -(-pinned // 4) * 4 + offset if offset else 0  # the first one that has not slid
        there = (token < pinned) | (token >= first) | (rows[:, None] == 0)
        np.testing.assert_array_equal(exists, inside & there)
        assert there[1, max(0, length - window + pinned) : length].all(), "what the window shows"
        # What is read back is set where it was, and what is gone nowhere.
        fresh = scatter_kv(
            *(jnp.zeros_like(x) for x in pools), k, v, kv.table.page_table, rows, begins, ends,
            layer=0, **given,
        )  # fmt: skip
        again = gather_kv(
            *fresh, kv.table.page_table, rows, begins, ends, max_tokens=28, layer=0, **given
        )
        np.testing.assert_array_equal(again[0], k)
    assert slid > 0
    wild = np.int32([[2**31 - 1, -5], [-(2**31), 2**31 - 1]])
    for num_pinned, slot_offset in wild:
        got = gather_kv(
            *pools, kv.table.page_table, rows, begins, ends, max_tokens=28, layer=0,
            num_pinned=num_pinned, slot_offset=slot_offset,
        )  # fmt: skip
        assert np.isfinite(got[0]).all()


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("dtype", sorted(QMAX))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_bit_pages_come_back_dequantized(layout, dtype, per_token):
    batch = make(num_layers=2)
    sizes = [pages_shape(x, "HND") for x in (batch.k_pages, batch.v_pages)]
    if is_one_pool(layout):
        sizes[1] = sizes[0]
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((1, MAX_TOKENS, 2, x.head_dim), "f4") for x in sizes)
    shapes = [
        make_shape(x, layout, pool, dtype=dtype) for x, pool in zip(sizes, POOLS, strict=True)
    ]
    pages = [jnp.zeros(shape, dtype) for shape in shapes]
    pages[1] = None if is_one_pool(layout) else pages[1]
    if per_token:
        scales = [jnp.zeros(batch.k_pages.shape[:-1], jnp.float32) for _ in "kv"]
    else:
        scales = [jnp.full((2, 2), 5 / QMAX[dtype], jnp.float32) for _ in "kv"]
    one = [np.array([x]) for x in (0, 0, MAX_TOKENS)]
    names = ("k_scale", "v_scale")
    written = scatter_kv(
        *pages, jnp.asarray(k), jnp.asarray(v), batch.page_table, *one, layer=1, layout=layout,
        **dict(zip(names, scales, strict=True)),
    )  # fmt: skip
    scales = written[2:] if per_token else scales
    back = gather_kv(
        *written[:2], batch.page_table, *one, max_tokens=MAX_TOKENS, layer=jnp.int32(1),
        layout=layout, **dict(zip(names, scales, strict=True)),
    )  # fmt: skip
    # Half a step of the largest value: 4 bits of mantissa, 3 bits, or 1 / 127.
    relative = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 0.5 / 127}[dtype]
    for mine, theirs in zip(back, (k, v), strict=True):
        assert mine.dtype == jnp.float32
        error = np.abs(np.asarray(mine) - theirs).max()
        assert 0 < error <= 1.01 * relative * 5
    half = gather_kv(
        *written[:2], batch.page_table, *one, max_tokens=3, layer=1, layout=layout,
        dtype="bfloat16",
    )  # fmt: skip
    assert half[0].dtype == jnp.bfloat16


def test_scatter_under_jit_is_in_place():
    pool = jax.ShapeDtypeStruct((2, 512, 2, 16, 8), jnp.float32)

    def write(k_pages, v_pages, k, layer):
        one = (jnp.array([0]), jnp.array([1]), jnp.array([9]))
        return scatter_kv(k_pages, v_pages, k, k, jnp.array([[3, 7]]), *one, layer=layer)

    operands = (pool, pool, jnp.ones((1, 9, 2, 8), jnp.float32), jnp.int32(1))
    compiled = jax.jit(write, donate_argnums=(0, 1)).lower(*operands).compile()
    assert is_in_place(compiled, pool), pool_sized_ops(compiled, pool)


@gathers_in_place
def test_gather_does_not_copy_the_pool_and_is_differentiable():
    pool = jax.ShapeDtypeStruct((2, 512, 2, 16, 8), jnp.float32)
    one = (jnp.array([0]), jnp.array([1]), jnp.array([9]))

    def read(pages, layer):
        return gather_kv(pages, pages, jnp.array([[3, 7]]), *one, max_tokens=8, layer=layer)[0]

    compiled = jax.jit(read).lower(pool, jnp.int32(1)).compile()
    assert not pool_sized_ops(compiled, pool)
    gradient = jax.grad(lambda x: jnp.sum(read(x, 1)))(jnp.ones((2, 8, 2, 4, 8), jnp.float32))
    assert float(gradient.sum()) == 7 * 2 * 8
    np.testing.assert_array_equal(gradient[0], 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_tokens": -1}, "max_tokens: expected an int >= 0, got -1"),
        ({"begins": np.zeros(2, np.int32)}, r"begins: expected shape \[n=1\], got \[2\]"),
        ({"rows": np.zeros(1, "f4")}, "rows: expected an integer dtype, got dtype float32"),
        ({"dtype": "int8"}, "dtype: expected dtype bfloat16 or float16 or float32, got int8"),
        ({"layer": 0}, "layer: expected an i32 scalar for stacked pages"),
        ({"k_scale": 1.0}, "k_scale: expected None for pages of float32, got a scale"),
    ],
)
def test_wrong_arguments_are_named(change, text):
    pages = jnp.zeros((2, 1, 4, 8), jnp.float32)
    zero = np.zeros(1, np.int32)
    arguments = {
        "k_pages": pages, "v_pages": pages, "page_table": np.zeros((1, 1), np.int32), "rows": zero,
        "begins": zero, "ends": zero, "max_tokens": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        gather_kv(**{**arguments, **change})
