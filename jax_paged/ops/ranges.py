# SPDX-License-Identifier: Apache-2.0
"""Ranges of a sequence, read from its pages or set in them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.checks import (
    FLOAT_DTYPES,
    INT32_MAX,
    Implementation,
    as_index,
    check_kv_scale,
    check_layer,
    check_pages,
    check_shape,
    expect,
    is_eight_bit,
    is_per_token,
    kind_text,
)
from jax_paged.layout import (
    SLOT_AXIS,
    Layout,
    Pool,
    is_one_pool,
    of_slots,
    pages_shape,
    pool_of_v,
)
from jax_paged.ops import reference
from jax_paged.ops.batch import pages_for
from jax_paged.ops.mla import check_latent_pages, check_latent_scale, write_mla_kv
from jax_paged.ops.options import check_slid
from jax_paged.ops.write import write_kv


def gather_kv(
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    page_table: Int[Array, "num_seqs pages_per_seq"],
    rows: Int[Array, "n"],
    begins: Int[Array, "n"],
    ends: Int[Array, "n"],
    *,
    max_tokens: int,
    num_pinned: Int[Array, "..."] | int | None = None,
    slot_offset: Int[Array, "..."] | int | None = None,
    layer: Int[Array, ""] | int | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
    dtype: Any = None,
    return_exists: bool = False,
    layout: Layout = "HND",
) -> tuple[Any, ...]:
    """Reads tokens begins[i] ≤ t < ends[i] of row rows[i] back from the pages.

    Args:
      k_pages, v_pages, layout: as for `paged_attention`, any KV dtype. Or latent rows, as kv_pages
        of `mla_paged_attention`, and None.
      page_table: of all rows, e.g. that of the page state (`state.table.page_table`).
      rows, begins, ends: which row of the table, and which of its tokens; a row may come often.
        Lengths of rows are not known here: what the pages hold beyond them is returned as it is.
      max_tokens: the longest range; longer ones are cut there. Static.
      num_pinned, slot_offset: of the rows of the table, [num_seqs] or a scalar, as for
        `paged_attention`; a table with windows has them (`state.table.windows`). A row that slid
        needs them: without, its slots are taken for its tokens.
      layer: which layer of stacked pages; may be traced.
      k_scale, v_scale: of 8-bit pages, as for `paged_attention`; None: 1. Of latent rows k_scale is
        their kv_scale.
      dtype: of the results, bf16, f16 or f32; None: that of the pages, for 8-bit pages f32.
      return_exists: also tell which tokens are there.

    Returns:
      (k [n, max_tokens, num_kv_heads, head_dim], v the same with its head_dim), or (latent rows
      [n, max_tokens, latent + rope], None): token begins[i] + j at [i, j]. 0 where there is no such
      token: past ends[i], before 0, past the table, slid out of the window, on a page outside
      [0, num_pages) (never dereferenced), of a row or a layer out of range. With return_exists also
      bool[n, max_tokens]: False there.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.

    jit-able, differentiable in k_pages and v_pages. XLA gathers on every platform. It is what TVM's
    cache calls DebugGetKV.

    >>> import jax.numpy as jnp
    >>> k_pages = jnp.arange(12.0).repeat(8).reshape(3, 1, 4, 8)
    >>> table = jnp.array([[2, 0]])
    >>> one = [jnp.array([x]) for x in (0, 2, 5)]  # row 0, tokens 2, 3 and 4
    >>> k, _ = gather_kv(k_pages, k_pages, table, *one, max_tokens=4)
    >>> print(k[0, :, 0, 0])
    [10. 11.  0.  0.]
    """
    is_latent = _is_latent(k_pages, v_pages, layout, layer)
    if is_latent:
        index, k_scale = _check_latent(k_pages, layer, k_scale, v_scale)
        k_pages, scales = jnp.expand_dims(k_pages, -3), (k_scale, None)  # of one head
    else:
        index = _check_pages(k_pages, v_pages, layout, layer)
        v_pages = pool_of_v(k_pages, v_pages, layout)
        scales = _check_scales(k_pages, v_pages, layout, k_scale, v_scale)
    ranges = _check_ranges(page_table, rows, begins, ends, num_pinned, slot_offset)
    whole = isinstance(max_tokens, int) and max_tokens is not True and max_tokens >= 0
    expect(whole, "max_tokens", "an int >= 0", max_tokens)
    if dtype is not None:
        dtype = jnp.dtype(dtype)
        names = "dtype " + " or ".join(d.name for d in FLOAT_DTYPES)
        expect(dtype in FLOAT_DTYPES, "dtype", names, dtype.name)
    elif is_eight_bit(k_pages):
        dtype = jnp.dtype(jnp.float32)
    k, v, exists = _gather(layout, max_tokens, dtype, k_pages, v_pages, scales, ranges, index)
    if is_latent:
        k = k[..., 0, :]
    return (k, v, exists) if return_exists else (k, v)


def scatter_kv(
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    k: Float[Array, "n max_tokens ..."],
    v: Float[Array, "n max_tokens num_kv_heads v_head_dim"] | None,
    page_table: Int[Array, "num_seqs pages_per_seq"],
    rows: Int[Array, "n"],
    begins: Int[Array, "n"],
    ends: Int[Array, "n"],
    *,
    num_pinned: Int[Array, "..."] | int | None = None,
    slot_offset: Int[Array, "..."] | int | None = None,
    layer: Int[Array, ""] | int | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
) -> tuple[Any, ...]:
    """Sets tokens begins[i] ≤ t < ends[i] of row rows[i] in the pages, the inverse of `gather_kv`.

    Args:
      k_pages, v_pages, k_scale, v_scale, layer, layout, implementation: as for `write_kv`: pages
        (and scales per token) are donated and updated in place, 8-bit pages are quantized. Or
        latent rows and None, with their kv_scale as k_scale.
      k, v: [n, max_tokens, num_kv_heads, head_dim], bf16, f16 or f32; [i, j]: token begins[i] + j.
        Latent rows: [n, max_tokens, latent + rope] and None.
      page_table, rows, begins, ends, num_pinned, slot_offset: as for `gather_kv`. Tokens that have
        no page or slid out of the window are skipped, and
        so is what lies past ends[i]: it is not read either, it may be NaN. Where ranges overlap the
        last one wins. A page that several rows share changes for all of them.

    Returns:
      (k_pages, v_pages), and with scales per token also (k_scale, v_scale), as `write_kv`; or
      (latent rows, None).

    Raises:
      As `write_kv`.

    >>> import jax.numpy as jnp
    >>> k_pages, v_pages = jnp.zeros((3, 1, 4, 8)), jnp.zeros((3, 1, 4, 8))
    >>> one = [jnp.array([x]) for x in (0, 2, 5)]  # row 0, tokens 2, 3 and 4
    >>> k = jnp.ones((1, 4, 1, 8))
    >>> k_pages, v_pages = scatter_kv(k_pages, v_pages, k, k, jnp.array([[2, 0]]), *one)
    >>> print(k_pages[:, 0, :, 0])
    [[1. 0. 0. 0.]
     [0. 0. 0. 0.]
     [0. 0. 1. 1.]]
    """
    ranges = _check_ranges(page_table, rows, begins, ends, num_pinned, slot_offset)
    if _is_latent(k_pages, v_pages, layout, layer):
        _check_latent(k_pages, layer, k_scale, v_scale)
        check_shape("k", k, "n max_tokens latent+rope", (ranges[1].shape[0], None, None))
        expect(v is None, "v", "None for latent rows", kind_text(v))
        slots = slots_of_ranges(*k_pages.shape[-3:-1], k.shape[1], *ranges).reshape(-1)
        k = k.reshape(-1, k.shape[-1])
        return write_mla_kv(k_pages, k, slots, layer=layer, kv_scale=k_scale), None
    _check_pages(k_pages, v_pages, layout, layer)
    shape = pages_shape(k_pages, layout)
    expect(v is not None, "v", "an array for pages of K and V", "None")
    assert v is not None
    for name, x in (("k", k), ("v", v)):
        heads = (ranges[1].shape[0], None, shape.num_kv_heads, None)
        check_shape(name, x, "n max_tokens num_kv_heads head_dim", heads)
    check_shape("v", v, "n max_tokens num_kv_heads head_dim", (None, k.shape[1], None, None))
    slots = slots_of_ranges(shape.num_pages, shape.page_size, k.shape[1], *ranges)
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    return write_kv(
        k_pages, v_pages, k, v, slots.reshape(-1), layer=layer, k_scale=k_scale, v_scale=v_scale,
        layout=layout, implementation=implementation,
    )  # fmt: skip


def _is_latent(k_pages, v_pages, layout: Layout, layer) -> bool:
    """Whether pages are latent rows; else there are V pages, or one pool holds both."""
    if v_pages is not None or is_one_pool(layout):
        return False
    ok = len(getattr(k_pages, "shape", ())) == 3 + (layer is not None)
    expect(ok, "v_pages", "an array, or None beside latent rows in k_pages", "None")
    return True


def _check_latent(kv_pages, layer, kv_scale, v_scale) -> tuple[jax.Array, Any]:
    expect(v_scale is None, "v_scale", "None for latent rows", kind_text(v_scale))
    return check_latent_pages(kv_pages, layer), check_latent_scale(kv_scale, kv_pages)


def _check_pages(k_pages, v_pages, layout: Layout, layer) -> jax.Array:
    k_shape, _ = check_pages(k_pages, v_pages, layout, layer)
    return check_layer(layer, k_shape.num_layers)


def _check_scales(k_pages, v_pages, layout: Layout, k_scale, v_scale) -> tuple[Any, Any]:
    return (
        check_kv_scale("k_scale", k_scale, k_pages, pages_shape(k_pages, layout)),
        check_kv_scale("v_scale", v_scale, v_pages, pages_shape(v_pages, layout, "v")),
    )


def _check_ranges(page_table, rows, begins, ends, num_pinned, slot_offset) -> tuple[Any, ...]:
    page_table, rows = as_index("page_table", page_table), as_index("rows", rows)
    begins, ends = as_index("begins", begins), as_index("ends", ends)
    check_shape("page_table", page_table, "num_seqs pages_per_seq", (None, None))
    check_shape("rows", rows, "n", (None,))
    check_shape("begins", begins, "n", rows.shape)
    check_shape("ends", ends, "n", rows.shape)
    slid = check_slid(num_pinned, slot_offset, page_table.shape[0]).values()
    return page_table, rows, begins, ends, *slid


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def slots_of_ranges(
    num_pages, page_size, max_tokens, page_table, rows, begins, ends, num_pinned=None,
    slot_offset=None,
):  # fmt: skip
    """The slot of each token of the ranges, i32[n, max_tokens]; −1 where it has none.

    num_pinned, slot_offset: [num_seqs] of rows that slid, or twice None.
    """
    num_seqs, width = page_table.shape
    if 0 in (num_seqs, width, num_pages):
        return jnp.full((rows.shape[0], max_tokens), -1, jnp.int32)
    step = jnp.arange(max_tokens, dtype=jnp.int32)[None]
    begins = begins[:, None]
    capacity, row = width * page_size, jnp.clip(rows, 0, num_seqs - 1)[:, None]
    exists = step <= INT32_MAX - jnp.maximum(begins, 0)  # else begins + step overflows
    token = jnp.where(exists, begins, 0) + step
    exists &= (token >= 0) & (token < ends[:, None]) & ((rows >= 0) & (rows < num_seqs))[:, None]
    stored = token
    if num_pinned is not None and slot_offset is not None:
        pinned, offset = jnp.clip(num_pinned[row], 0, capacity), jnp.maximum(slot_offset[row], 0)
        # What stands behind the pinned tokens in their last page has slid away, too.
        first = jnp.where(offset > 0, pages_for(pinned, page_size) * page_size, pinned)
        stored = jnp.where(token < pinned, token, token - offset)
        exists &= (token < pinned) | (stored >= first)
    exists &= stored < capacity
    safe = jnp.where(exists, stored, 0)
    page = page_table[row, safe // page_size]
    exists &= (page >= 0) & (page < num_pages)
    return jnp.where(exists, jnp.where(exists, page, 0) * page_size + safe % page_size, -1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _gather(layout, max_tokens, dtype, k_pages, v_pages, scales, ranges, layer):
    shape = pages_shape(k_pages, layout)
    slots = slots_of_ranges(shape.num_pages, shape.page_size, max_tokens, *ranges)
    exists = slots >= 0
    if shape.num_layers is not None:
        exists &= (layer >= 0) & (layer < shape.num_layers)
    pools: tuple[tuple[Any, Pool, Any], ...] = (
        (k_pages, "k", scales[0]), (v_pages, "v", scales[1]),
    )  # fmt: skip
    k, v = (
        _tokens(pages, layout, pool, scale, slots, exists, layer, dtype)
        if pages is not None else None
        for pages, pool, scale in pools
    )  # fmt: skip
    return k, v, exists


def _tokens(pages, layout: Layout, pool: Pool, scale, slots, exists, layer, dtype):
    shape = pages_shape(pages, layout, pool)
    dtype = pages.dtype if dtype is None else dtype
    if shape.num_pages == 0 or shape.num_layers == 0:
        return jnp.zeros((*slots.shape, shape.num_kv_heads, shape.head_dim), dtype)
    slots = jnp.where(exists, slots, 0)
    page, offset = slots // shape.page_size, slots % shape.page_size

    def at(array, layout: Layout):  # the indexed axes come first, wherever the slots stand
        index: tuple[Any, ...] = (page, *(slice(None),) * (SLOT_AXIS[layout] - 1), offset)
        if shape.num_layers is not None:
            index = (jnp.broadcast_to(jnp.clip(layer, 0, shape.num_layers - 1), page.shape), *index)
        return array[index]

    tokens = of_slots(at(pages, layout), shape, layout, pool)
    if is_eight_bit(pages):
        tokens = tokens.astype(jnp.float32)
    if scale is not None:
        if is_per_token(scale):
            factor = at(scale[..., None], "HND")
        else:
            stacked = shape.num_layers is not None
            factor = reference.head_scale(scale, layer, shape.num_kv_heads, stacked=stacked)
            factor = factor[None, None, :, None]
        tokens = tokens * factor
    tokens = jnp.where(exists[..., None, None], tokens, jnp.zeros((), tokens.dtype))
    return tokens.astype(dtype)
