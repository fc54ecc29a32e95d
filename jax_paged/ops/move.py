# SPDX-License-Identifier: Apache-2.0
"""Moves within the pages: whole pages onto others, and tokens from slot to slot.

These ops donate the pages they are given, as the writes do (`jax_paged.ops.write`).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged import checks
from jax_paged.layout import LAYOUTS, POOLS, Layout, is_stacked, pages_shape, pool_of_v
from jax_paged.ops import reference
from jax_paged.ops.scatter_rows import copy_rows, in_each_layer
from jax_paged.ops.write import native_write, reference_write


def copy_pages(
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    src_pages: Int[Array, "n"],
    dst_pages: Int[Array, "n"],
) -> tuple[jax.Array, jax.Array | None]:
    """Copies whole pages, dst_pages[i] ← src_pages[i], in every layer; returns the updated pages.

    Args:
      k_pages, v_pages: pages in any layout, optionally with a leading num_layers axis; v_pages
        None: of layout "rpa". Donated: updated in place.
      src_pages, dst_pages: page ids. A pair with an id outside [0, num_pages) is skipped. No page
        may be named twice in dst_pages; a page that is both read and written is read as it was.

    Raises:
      ValueError: shapes disagree.

    >>> import jax.numpy as jnp
    >>> k_pages, v_pages = jnp.arange(3.0).reshape(3, 1, 1, 1), jnp.zeros((3, 1, 1, 1))
    >>> k_pages, _ = copy_pages(k_pages, v_pages, jnp.array([2, -1]), jnp.array([0, 1]))
    >>> print(k_pages.ravel())
    [2. 1. 2.]
    """
    checks.check_array("k_pages", k_pages)
    if v_pages is None:
        stacked = is_stacked(k_pages, "rpa")
        checks.check_pages(k_pages, None, "rpa", 0 if stacked else None)
        src_pages, dst_pages = checks.as_pairs(src_pages=src_pages, dst_pages=dst_pages)
        return *copy_in_pools(1 + stacked, (k_pages,), src_pages, dst_pages), None
    checks.check_array("v_pages", v_pages)
    # A page is a page in every layout: HND stands for NHD too, and only K of "vllm5d" has its rank.
    layout = "vllm5d" if len(k_pages.shape) == len(v_pages.shape) + 1 else "HND"
    stacked = is_stacked(k_pages, layout)
    checks.check_pages(k_pages, v_pages, layout, 0 if stacked else None)
    src_pages, dst_pages = checks.as_pairs(src_pages=src_pages, dst_pages=dst_pages)
    return copy_in_pools(1 + stacked, (k_pages, v_pages), src_pages, dst_pages)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy_in_pools(leading, pools, src, dst):
    """`copy_pages` in any pools, of rows that stand behind so many leading axes.

    1 or, with a num_layers axis in front, 2: pages, of K and V or of scales per token. 3: tokens,
    where a page has its tokens first.
    """

    num_layers = pools[0].shape[0] if leading > 1 else 1
    num_rows = math.prod(pools[0].shape[:leading]) // max(num_layers, 1)
    valid = (src >= 0) & (src < num_rows) & (dst >= 0) & (dst < num_rows)
    source, target = (
        jnp.where(valid[None], in_each_layer(num_layers, num_rows, rows), -1).ravel()
        for rows in (src, dst)
    )
    return tuple(copy_rows(pool, leading, target, source) for pool in pools)


def move_slots(
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    src_slots: Int[Array, "n"],
    dst_slots: Int[Array, "n"],
    *,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    layout: Layout = "HND",
    implementation: checks.Implementation = None,
) -> tuple[Any, ...]:
    """Copies tokens, slot dst_slots[i] ← slot src_slots[i], in every layer; returns the pages.

    Args:
      k_pages, v_pages: pages as for `write_kv`. Donated: updated in place.
      src_slots, dst_slots: page · page_size + offset. A pair with a slot out of range, e.g. −1, is
        skipped. All are read before one is written; of several tokens for one slot the last wins.
      k_scale, v_scale: pools of scales per token and head, as for `write_kv`: copied along, donated
        and returned behind the pages. None for other scales, which do not belong to slots.
      implementation: as for `write_kv`.

    Raises:
      ValueError: shapes disagree, or scales are not per token.
      NotImplementedError: as `write_kv`.

    >>> import jax.numpy as jnp
    >>> k_pages, v_pages = jnp.arange(6.0).reshape(3, 1, 2, 1), jnp.zeros((3, 1, 2, 1))
    >>> k_pages, _ = move_slots(k_pages, v_pages, jnp.array([5, -1, 1]), jnp.array([1, 3, 0]))
    >>> print(k_pages.ravel())
    [1. 5. 2. 3. 4. 5.]
    """
    checks.check_implementation(implementation)
    checks.check_choice("layout", layout, LAYOUTS)
    checks.check_array("k_pages", k_pages)
    stacked = is_stacked(k_pages, layout)
    shapes = checks.check_pages(k_pages, v_pages, layout, 0 if stacked else None)
    scales = tuple(
        checks.check_kv_scale(name, scale, pages, shape)
        for name, scale, pages, shape in zip(
            ("k_scale", "v_scale"),
            (k_scale, v_scale),
            (k_pages, pool_of_v(k_pages, v_pages, layout)),
            shapes,
            strict=True,
        )
    )
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        checks.expect(
            checks.is_per_token(scale) == any(x is not None for x in scales),
            name,
            "a scale per token, or None twice",
            "None" if scale is None else f"rank {scale.ndim}",
        )
    src_slots, dst_slots = checks.as_pairs(src_slots=src_slots, dst_slots=dst_slots)
    scales = None if scales[0] is None else scales
    return _move_slots(layout, implementation, k_pages, v_pages, scales, src_slots, dst_slots)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3, 4))
def _move_slots(layout, implementation, k_pages, v_pages, scales, src_slots, dst_slots):
    shape = pages_shape(k_pages, layout)
    num_slots = shape.num_pages * shape.page_size
    inside = [(slots >= 0) & (slots < num_slots) for slots in (src_slots, dst_slots)]
    source = jnp.where(inside[0], src_slots, 0)
    target = jnp.where(inside[0] & inside[1], dst_slots, -1)
    if implementation == "reference":
        write = functools.partial(reference_write, layout)
    else:
        write = native_write(layout, implementation)

    def move_in(write, k_pages, v_pages, layer, layout):
        k, v = (
            reference.read_tokens(pages, source, layer, layout, pool)
            for pages, pool in zip(
                (k_pages, pool_of_v(k_pages, v_pages, layout)), POOLS, strict=True
            )
        )
        return tuple(write(k_pages, v_pages, k, v, target, layer))

    def move(layer, pools):  # a layer at a time, so that what is on the move stays small
        k_pages, v_pages, *scales = pools
        moved = move_in(write, k_pages, v_pages, layer, layout)
        if scales:  # like pages with a head_dim of 1
            k_scale, v_scale = (x[..., None] for x in scales)
            write_scales = functools.partial(reference_write, "HND")
            wide = move_in(write_scales, k_scale, v_scale, layer, "HND")
            moved += tuple(x[..., 0] for x in wide)
        return moved

    pools = (k_pages, v_pages, *(scales or ()))
    if shape.num_layers is None:
        return move(jnp.int32(0), pools)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(shape.num_layers), move, pools)
