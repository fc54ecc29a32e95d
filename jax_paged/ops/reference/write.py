# SPDX-License-Identifier: Apache-2.0
"""Writes to the pages in jax.numpy. Differentiable."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_paged.checks import RopeStyle, is_per_token
from jax_paged.layout import (
    SLOT_AXIS,
    Layout,
    Pool,
    is_one_pool,
    of_slots,
    pages_rank,
    pages_shape,
    pool_of_v,
    side_by_side,
)
from jax_paged.ops.reference.scales import QMAX, quantize, scale_of_layer, token_scale
from jax_paged.ops.rope import apply_rope


def quantized(k_pages, v_pages, k, v, k_scale, v_scale):
    """k and v in the dtype of the pages, and the scales of their tokens where those are stored.

    The scales are those of `scale_of_layer`. Returns (k, v, scales [tokens, num_kv_heads] of k,
    of v), the latter None unless per token.
    """
    results, token_scales = [], []
    for pages, x, scale in ((k_pages, k, k_scale), (v_pages, v, v_scale)):
        per_token = is_per_token(scale)
        if pages.dtype.name not in QMAX:
            x = x.astype(pages.dtype)
        elif per_token:
            scale = token_scale(x, pages.dtype)
            x = quantize(x, scale[..., None], pages.dtype)
        else:
            scale = jnp.ones(1, jnp.float32) if scale is None else scale
            x = quantize(x, scale[None, :, None], pages.dtype)
        results.append(x)
        token_scales.append(scale if per_token else None)
    return (*results, *token_scales)


def write_kv(
    k_pages, v_pages, k, v, slot_mapping, *,
    layer=None, k_scale=None, v_scale=None, layout: Layout = "HND",
):  # fmt: skip
    """`jax_paged.write_kv` in jax.numpy: a scatter that drops what has no slot."""
    k_scale, v_scale = (scale_of_layer(x, layer, k.shape[1]) for x in (k_scale, v_scale))
    pools = (k_pages, v_pages, k_scale, v_scale)
    return write_to_layer(pools, k, v, slot_mapping, layer, layout)


def write_to_layer(pools, k, v, slot_mapping, layer, layout: Layout) -> tuple[Any, ...]:
    """The same; pools: k_pages, v_pages, and k_scale and v_scale of `scale_of_layer`."""
    k_pages, v_pages, k_scale, v_scale = pools
    v_pool = pool_of_v(k_pages, v_pages, layout)
    k, v, k_tokens, v_tokens = quantized(k_pages, v_pool, k, v, k_scale, v_scale)
    written = scatter_tokens(k_pages, v_pages, k, v, slot_mapping, layer, layout)
    if k_tokens is None:
        return written
    return (*written, *write_scales(k_scale, v_scale, k_tokens, v_tokens, slot_mapping, layer))


def write_scales(k_scale, v_scale, k_tokens, v_tokens, slot_mapping, layer):
    """Writes the scales of tokens [tokens, num_kv_heads] to their slots."""
    pools = (k_scale[..., None], v_scale[..., None])
    new = (k_tokens[..., None], v_tokens[..., None])
    written = scatter_tokens(*pools, *new, slot_mapping, layer, "HND")
    return tuple(x[..., 0] for x in written)


def read_tokens(pages, slots, layer, layout: Layout, pool: Pool) -> jax.Array:
    """What is stored in slots, all of them in range: [tokens, num_kv_heads, head_dim]."""
    shape = pages_shape(pages, layout, pool)
    page, offset = slots // shape.page_size, slots % shape.page_size
    index = (page, *(slice(None),) * (SLOT_AXIS[layout] - 1), offset)
    if shape.num_layers is not None:
        index = (jnp.broadcast_to(layer, page.shape), *index)
    return of_slots(pages[index], shape, layout, pool)


def last_of_equal(slot_mapping, num_slots):
    """(order, slot): the tokens sorted by slot, and where each of them goes.

    Of several for one slot the last wins, which a scatter does not promise; the others get
    num_slots, and so do those without a slot in range.
    """
    order = jnp.argsort(slot_mapping, stable=True)
    slot = slot_mapping[order]
    wins = jnp.ones(slot.shape, bool).at[:-1].set(slot[:-1] != slot[1:])
    return order, jnp.where(wins & (slot >= 0) & (slot < num_slots), slot, num_slots)


def scatter_tokens(k_pages, v_pages, k, v, slot_mapping, layer, layout: Layout) -> tuple[Any, Any]:
    """Writes tokens that have the dtype of their pages."""
    shape = pages_shape(k_pages, layout)
    num_slots = shape.num_pages * shape.page_size
    layer = jnp.int32(0 if layer is None else layer)
    order, slot = last_of_equal(slot_mapping, num_slots)
    if shape.num_layers is not None:
        slot = jnp.where((layer >= 0) & (layer < shape.num_layers), slot, num_slots)
    page, offset = slot // shape.page_size, slot % shape.page_size

    def scatter(pages, tokens, pool):
        tokens = tokens[order].astype(pages.dtype)
        # The tokens' axis comes first in the indexed shape, wherever the slots stand.
        index = (page, *(slice(None),) * (SLOT_AXIS[layout] - 1), offset)
        if shape.num_layers is not None:
            index = (jnp.broadcast_to(layer, page.shape), *index)
        if pages_rank(layout, pool) == 5:
            tokens = tokens.reshape(*tokens.shape[:2], *pages.shape[-3::2])
        return pages.at[index].set(tokens, mode="drop")

    if is_one_pool(layout):
        return scatter(k_pages, side_by_side(k, v), "k"), None
    return scatter(k_pages, k, "k"), scatter(v_pages, v, "v")


def qkv_norm_rope_write(
    qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, *,
    q_norm=None, k_norm=None, eps=1e-6, num_q_heads, style: RopeStyle = "half", layer=None,
    k_scale=None, v_scale=None, layout: Layout = "HND",
):  # fmt: skip
    """`jax_paged.qkv_norm_rope_write` in jax.numpy. Differentiable."""
    q, k, v, slots = qkv_heads(
        qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, q_norm=q_norm, k_norm=k_norm,
        eps=eps, num_q_heads=num_q_heads, style=style, layout=layout,
    )  # fmt: skip
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return q, *write_kv(k_pages, v_pages, k, v, slots, layer=layer, layout=layout, **scales)


def qkv_heads(
    qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, *,
    q_norm, k_norm, eps, num_q_heads, style: RopeStyle, layout: Layout,
):  # fmt: skip
    """What qkv_norm_rope_write returns and writes: q in qkv's dtype, k in f32, v, and the slots."""
    shape = pages_shape(k_pages, layout)
    v_shape = pages_shape(pool_of_v(k_pages, v_pages, layout), layout, "v")
    heads = num_q_heads + shape.num_kv_heads
    qk, v = jnp.split(qkv, [heads * shape.head_dim], axis=1)
    qk = qk.reshape(qk.shape[0], heads, shape.head_dim)
    q, k = jnp.split(qk, [num_q_heads], axis=1)
    v = v.reshape(v.shape[0], shape.num_kv_heads, v_shape.head_dim)
    has_position = (positions >= 0) & (positions < cos.shape[0])
    row = jnp.where(has_position, positions, cos.shape[0])
    cos, sin = (jnp.take(x, row, axis=0, mode="fill", fill_value=0) for x in (cos, sin))

    def norm_and_turn(x, weight):
        x = x.astype(jnp.float32)
        if weight is not None:
            mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
            x = x * jax.lax.rsqrt(mean_square + jnp.float32(eps))
            x = x * weight.astype(jnp.float32)[None, None]
        return apply_rope(x, cos, sin, style=style)

    q = norm_and_turn(q, q_norm).astype(qkv.dtype)
    q = jnp.where(has_position[:, None, None], q, jnp.zeros((), qkv.dtype))
    return q, norm_and_turn(k, k_norm), v, jnp.where(has_position, slot_mapping, -1)
