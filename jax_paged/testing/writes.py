# SPDX-License-Identifier: Apache-2.0
"""What `write_kv` stores, as a loop."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.layout import (
    POOLS,
    Layout,
    PagesShape,
    Pool,
    from_slots_first,
    is_one_pool,
    make_shape,
    side_by_side,
    slots_first,
)
from jax_paged.ops.write import cuda_workspace_words


def bits(x):
    """The bytes of an array, so that NaN compares equal to itself."""
    return np.ascontiguousarray(x).view(np.uint8)


def make_pools(
    page_size=5, *, layout: Layout = "HND", num_layers=None, dtype: Any = "float32", num_pages=7
):
    """Numpy K and V pools, full of random numbers and NaN, with different head dims.

    Layout "rpa": one pool, and None.
    """
    rng = np.random.default_rng(page_size)
    pools: list[Any] = []
    for pool, head_dim in zip(POOLS, head_dims(layout), strict=True):
        if pool == "v" and is_one_pool(layout):
            return [*pools, None]
        sizes = PagesShape(num_layers, num_pages, 2, page_size, head_dim)
        shape = make_shape(sizes, layout, pool, dtype=dtype)
        values = rng.standard_normal(shape, "f4")
        pools.append(np.where(rng.random(shape) < 0.1, np.nan, values).astype(dtype))
    return pools


def head_dims(layout: Layout) -> tuple[int, int]:
    """Of K and V in `make_pools`."""
    return (16, 16) if is_one_pool(layout) else (16, 24)


def make_tokens(count, dtype: Any = "float32", layout: Layout = "HND"):
    """Random k and v for `make_pools`."""
    rng = np.random.default_rng(count)
    dims = head_dims(layout)
    return [rng.standard_normal((count, 2, dim), "f4").astype(dtype) for dim in dims]


def on_device(pools) -> tuple[Any, ...]:
    """Copies of pools as the ops take them."""
    return tuple(None if x is None else jnp.array(x) for x in pools)


# Of `repeated_slots`.
REPEATS = ("one slot", "few slots", "most slots once", "one place of the table")


def repeated_slots(kind: str, count: int, num_slots: int) -> np.ndarray:
    """Slots of many tokens, some for the same slot, and all but the first kind some for none.

    The last kind are slots that the hash of CUDA's table (ffi/cuda/written_tokens.cuh) puts into
    its last 64 entries. Where slots are several times the tokens, there are more of them than
    entries: a search goes on and on, and beyond the table's end.
    """
    rng = np.random.default_rng(count)
    if kind == "one slot":
        return np.full(count, num_slots // 2, np.int32)
    low, high = (-1, 9) if kind == "few slots" else (-num_slots // 8, num_slots + num_slots // 8)
    slots = np.arange(low, high)
    if kind == "one place of the table":
        words = cuda_workspace_words(count)
        entry = (slots.astype(np.uint32) * np.uint32(2654435769)).astype(np.uint64) * words >> 32
        slots = slots[entry >= words - 64]
    return rng.choice(slots, count).astype(np.int32)


def expected_writes(pools, tokens, slots, layer=None, layout: Layout = "HND"):
    """The contract of write_kv for K and V: what becomes of the pools."""
    if is_one_pool(layout):  # rows of twice as many heads
        return [expected_write(pools[0], side_by_side(*tokens), slots, layer, "NHD"), None]
    return [
        expected_write(pages, new, slots, layer, layout, pool)
        for pool, pages, new in zip(POOLS, pools, tokens, strict=True)
    ]


def expected_write(pages, tokens, slots, layer=None, layout: Layout = "HND", pool: Pool = "k"):
    """The contract of write_kv as a loop."""
    if layer is not None and not 0 <= layer < len(pages):
        return pages
    by_slot = slots_first(pages, layout, pool).copy()
    view = by_slot if layer is None else by_slot[layer]
    for token, slot in zip(tokens, slots, strict=True):
        if 0 <= slot < view.shape[0] * view.shape[1]:
            view[divmod(int(slot), view.shape[1])] = token.astype(pages.dtype)
    return from_slots_first(by_slot, layout, pool)
