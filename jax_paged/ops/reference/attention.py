# SPDX-License-Identifier: Apache-2.0
"""Attention over pages in jax.numpy. Differentiable."""

import functools

import jax
import jax.numpy as jnp

from jax_paged.checks import is_per_token
from jax_paged.layout import Layout, Pool, is_stacked, pages_shape, pool_of_v, slots_first
from jax_paged.ops.reference.scales import QMAX, head_scale
from jax_paged.ops.rope import apply_rope


def _gather_rows(
    pages, page_table, layer, layout: Layout, pool: Pool, scale=None
) -> tuple[jax.Array, jax.Array]:
    """Each row's tokens in order: ([rows, capacity, num_kv_heads, head_dim], is there a page)."""
    if pages.dtype.name in QMAX:
        tokens, has_page = _gather_rows_as_stored(pages, page_table, layer, layout, pool)
        tokens = tokens.astype(jnp.float32)
        if scale is None:
            return tokens, has_page
        if is_per_token(scale):  # like pages with a head_dim of 1
            scale = jnp.float32(scale)[..., None]
            scales, _ = _gather_rows_as_stored(scale, page_table, layer, "HND", pool)
        else:
            stacked = is_stacked(pages, layout, pool)
            scales = head_scale(jnp.float32(scale), layer, tokens.shape[2], stacked=stacked)
            scales = scales[None, None, :, None]
        return tokens * scales, has_page
    return _gather_rows_as_stored(pages, page_table, layer, layout, pool)


def _gather_rows_as_stored(
    pages, page_table, layer, layout, pool: Pool
) -> tuple[jax.Array, jax.Array]:
    shape = pages_shape(pages, layout, pool)
    has_page = (page_table >= 0) & (page_table < shape.num_pages)
    if shape.num_pages == 0 or shape.num_layers == 0:
        rows, width = page_table.shape
        capacity = width * shape.page_size
        empty = jnp.zeros((rows, capacity, shape.num_kv_heads, shape.head_dim), pages.dtype)
        return empty, jnp.zeros((rows, capacity), bool)
    ids = jnp.where(has_page, page_table, 0)
    if shape.num_layers is not None:
        has_page &= (layer >= 0) & (layer < shape.num_layers)
        gathered = pages[jnp.clip(layer, 0, shape.num_layers - 1), ids]
    else:
        gathered = pages[ids]
    gathered = slots_first(gathered, layout, pool)
    rows, width, page_size, heads, dim = gathered.shape
    tokens = gathered.reshape(rows, width * page_size, heads, dim)
    return tokens, jnp.repeat(has_page, page_size, axis=1)


def _row_windows(rows: int, sliding_window, num_pinned, slot_offset) -> tuple[jax.Array, ...]:
    """Window (0: off), pinned tokens and slot offset of each row."""

    def of_rows(x):
        x = jnp.zeros((), jnp.int32) if x is None else jnp.int32(x)
        return jnp.broadcast_to(jnp.maximum(x.reshape(-1) if x.size == 1 else x, 0), (rows,))

    return of_rows(sliding_window), of_rows(num_pinned), of_rows(slot_offset)


def _unslid(position, slot, pinned, offset):
    """From a position among the stored tokens to that among all, for the token in `slot`."""
    return position + jnp.where(slot < pinned, 0, offset)


def _in_window(distance, slot, window, pinned):
    """Whether a window lets keys at this distance (key − query) be seen, by their stored slots."""
    unpinned = jnp.maximum(window - pinned, 1)
    return (window <= 0) | (slot < pinned) | (distance > -unpinned)


def _turn(x, position, rope) -> tuple[jax.Array, jax.Array]:
    """Tokens [tokens, heads, head_dim], turned, and whether the tables have their place.

    Turned elements have the dtype of x, as if they were written to pages and read from there.
    """
    cos, sin, style = rope
    has_angle = (position >= 0) & (position < cos.shape[0])
    entry = jnp.where(has_angle, position, 0)
    return apply_rope(x, cos[entry], sin[entry], style=style), has_angle


def _softmax_attention(
    q, k, v, visible, distance, sm_scale, *, soft_cap=None, alibi_slopes=None, sinks=None
) -> tuple[jax.Array, jax.Array]:
    """Dense attention of one row: q [t, Hq, D], k, v [l, Hkv, D], visible and distance [t, l]."""
    tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    exact = jax.lax.Precision.HIGHEST
    grouped = q.reshape(tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    logits = jnp.einsum(
        "thgd,lhd->thgl", grouped.astype(jnp.float32), k.astype(jnp.float32), precision=exact
    )
    logits = logits * sm_scale
    if soft_cap is not None:
        logits = jnp.float32(soft_cap) * jnp.tanh(logits / jnp.float32(soft_cap))
    if alibi_slopes is not None:
        slopes = alibi_slopes.reshape(1, num_kv_heads, -1, 1)
        logits += slopes * distance.astype(jnp.float32)[:, None, None, :]
    logits = jnp.where(visible[:, None, None, :], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        sinks = sinks.reshape(1, num_kv_heads, -1, 1)
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), jnp.float32(0), top))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total += jnp.exp(sinks - top)[..., 0]
    out = jnp.einsum("thgl,lhd->thgd", weights, v.astype(jnp.float32), precision=exact)
    empty = total == 0
    out = out / jnp.where(empty, jnp.float32(1), total)[..., None]
    out = jnp.where(empty[..., None], jnp.float32(0), out)  # it may be 0 · NaN
    lse = jnp.where(empty, -jnp.inf, top[..., 0] + jnp.log(jnp.where(empty, 1, total)))
    return out.reshape(tokens, num_q_heads, v.shape[-1]), lse.reshape(tokens, num_q_heads)


def _read_tree(tree, tree_size, seq_len):
    """A row's tree: (which node sees which [n, n], depths [n], place of the tree, its size).

    The size is 0 where the tree hides nothing.
    """
    node = jnp.arange(tree.shape[0], dtype=jnp.int32)
    size = jnp.clip(tree_size, 0, jnp.minimum(tree.shape[0], seq_len))
    first, end = jnp.clip(tree, 0, size).T
    sees = (node[None] <= node[:, None]) & (node < size)[None]
    before = sees
    sees &= (first[None] <= first[:, None]) & (first[:, None] < end[None])
    is_chain = jnp.all((sees == before) | (node >= size)[:, None])
    size = jnp.where(is_chain, 0, size)
    depth = jnp.sum(sees & (node[None] < node[:, None]), axis=1, dtype=jnp.int32)
    return sees, depth, seq_len - size, size


def _as_output(out, q_dtype, out_dtype, out_scale) -> jax.Array:
    """The f32 result in q's dtype, or as fp8: divided by out_scale and clamped."""
    if out_dtype is None:
        return out.astype(q_dtype)
    limit = jnp.float32(QMAX[jnp.dtype(out_dtype).name])
    scale = jnp.float32(1) if out_scale is None else jnp.reshape(jnp.float32(out_scale), ())
    return jnp.clip(out / scale, -limit, limit).astype(out_dtype)


def ragged_paged_attention(
    q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, num_seqs=None, *,
    layer=None, sm_scale=None, sliding_window=None, num_pinned=None, slot_offset=None,
    soft_cap=None, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, tree=None,
    tree_sizes=None, out_dtype=None, out_scale=None, rope=None, causal=True, return_lse=False,
    layout: Layout = "HND",
):  # fmt: skip
    """`jax_paged.ragged_paged_attention` in jax.numpy, one row at a time. Differentiable."""
    num_tokens, _, head_dim = q.shape
    rows = page_table.shape[0]
    v_pages = pool_of_v(k_pages, v_pages, layout)
    v_head_dim = pages_shape(v_pages, layout, "v").head_dim
    sm_scale = jnp.float32(head_dim**-0.5 if sm_scale is None else sm_scale)
    layer = jnp.int32(0 if layer is None else layer)
    num_seqs = jnp.int32(rows) if num_seqs is None else jnp.reshape(num_seqs, ())
    windows = _row_windows(rows, sliding_window, num_pinned, slot_offset)
    options = {"soft_cap": soft_cap, "alibi_slopes": alibi_slopes, "sinks": sinks}
    bounds = jax.lax.cummax(jnp.clip(cu_q_lens, 0, num_tokens))
    token = jnp.arange(num_tokens, dtype=jnp.int32)

    def attend_row(carry, row):
        out, lse = carry
        index, table, seq_len, start, end, window, pinned, offset, *row_tree = row
        k, has_page = _gather_rows(k_pages, table[None], layer, layout, "k", k_scale)
        v, _ = _gather_rows(v_pages, table[None], layer, layout, "v", v_scale)
        slot = jnp.arange(k.shape[1], dtype=jnp.int32)
        seq_len = jnp.clip(jnp.maximum(seq_len, 0) - offset, 0, k.shape[1])  # stored
        stored = has_page[0] & (slot < seq_len)
        query_slot = token - end + seq_len
        mine = (token >= start) & (token < end) & (index < num_seqs)
        visible = jnp.broadcast_to(stored[None], (num_tokens, k.shape[1]))
        if causal:
            visible &= slot[None] <= query_slot[:, None]
        query, position = query_slot, slot
        if row_tree:
            row_nodes, tree_size = row_tree
            sees, depth, root, size = _read_tree(row_nodes, tree_size, seq_len)
            nodes = [jnp.clip(x - root, 0, depth.shape[0] - 1) for x in (query, position)]
            in_tree = [(x >= root) & (x < root + size) for x in (query, position)]
            visible &= sees[nodes[0][:, None], nodes[1][None]] | ~in_tree[1][None]
            query, position = (
                jnp.where(inside, root + depth[node], x)
                for inside, node, x in zip(in_tree, nodes, (query, position), strict=True)
            )
        query = _unslid(query, query_slot, pinned, offset)
        position = _unslid(position, slot, pinned, offset)
        distance = position[None] - query[:, None]
        visible &= _in_window(distance, slot[None], window, pinned)
        row_q, k, v = q, k[0], v[0]
        if rope is not None:
            row_q, has_angle = _turn(q, query, rope)
            k, key_has_angle = _turn(k, position, rope)
            visible &= has_angle[:, None] & key_has_angle[None]
        # What no query of the row sees may be NaN.
        stored = jnp.any(visible & mine[:, None], axis=0)
        k = jnp.where(stored[:, None, None], k, jnp.zeros((), k.dtype))
        v = jnp.where(stored[:, None, None], v, jnp.zeros((), v.dtype))
        # The other queries may be NaN, which would reach the gradients of k and v as 0 · NaN.
        row_q = jnp.where(mine[:, None, None], row_q, jnp.zeros((), row_q.dtype))
        row_out, row_lse = _softmax_attention(row_q, k, v, visible, distance, sm_scale, **options)
        out = jnp.where(mine[:, None, None], row_out, out)
        return (out, jnp.where(mine[:, None], row_lse, lse)), None

    # A carry keeps its type, and inside shard_map the type says over which mesh axes a value
    # varies: so the empty result, too, must depend on the operands.
    operands = [q, k_pages, v_pages, page_table, seq_lens, bounds, num_seqs, layer, sm_scale]
    operands += [alibi_slopes, sinks, k_scale, v_scale, tree, tree_sizes, out_scale, *windows]
    operands += [] if rope is None else rope[:2]
    never = [jnp.any(jnp.atleast_1d(x)[..., :0]) for x in operands if x is not None]
    never = jnp.any(jnp.stack(never))
    nothing = (
        jnp.where(never, jnp.nan, jnp.zeros((*q.shape[:2], v_head_dim), jnp.float32)),
        jnp.where(never, jnp.nan, jnp.full(q.shape[:2], -jnp.inf, jnp.float32)),
    )
    index = jnp.arange(rows, dtype=jnp.int32)
    trees = () if tree is None else (jnp.int32(tree), jnp.int32(tree_sizes))
    of_rows = (index, page_table, seq_lens, bounds[:-1], bounds[1:], *windows, *trees)
    (out, lse), _ = jax.lax.scan(attend_row, nothing, of_rows)
    out = _as_output(out, q.dtype, out_dtype, out_scale)
    return (out, lse) if return_lse else out


def paged_attention(
    q, k_pages, v_pages, page_table, seq_lens, *,
    layer=None, sm_scale=None, sliding_window=None, num_pinned=None, slot_offset=None,
    soft_cap=None, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, out_dtype=None,
    out_scale=None, rope=None, return_lse=False, layout: Layout = "HND",
):  # fmt: skip
    """`jax_paged.paged_attention` in jax.numpy, all rows at once. Differentiable."""
    sm_scale = jnp.float32(q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    layer = jnp.int32(0 if layer is None else layer)
    k, has_page = _gather_rows(k_pages, page_table, layer, layout, "k", k_scale)
    v_pages = pool_of_v(k_pages, v_pages, layout)
    v, _ = _gather_rows(v_pages, page_table, layer, layout, "v", v_scale)
    rows, capacity = k.shape[:2]
    window, pinned, offset = (
        x[:, None] for x in _row_windows(rows, sliding_window, num_pinned, slot_offset)
    )
    slot = jnp.arange(capacity, dtype=jnp.int32)[None]
    num_stored = jnp.clip(jnp.maximum(seq_lens, 0)[:, None] - offset, 0, capacity)
    position, query = (_unslid(x, x, pinned, offset) for x in (slot, num_stored - 1))
    distance = position - query
    visible = has_page & (slot < num_stored) & _in_window(distance, slot, window, pinned)
    q_dtype, q = q.dtype, q[:, None]
    if rope is not None:
        turn = jax.vmap(functools.partial(_turn, rope=rope))
        (q, has_angle), (k, key_has_angle) = turn(q, query), turn(k, position)
        visible &= has_angle & key_has_angle
    k = jnp.where(visible[..., None, None], k, jnp.zeros((), k.dtype))
    v = jnp.where(visible[..., None, None], v, jnp.zeros((), v.dtype))
    options = {"soft_cap": soft_cap, "alibi_slopes": alibi_slopes, "sinks": sinks}
    attend = functools.partial(_softmax_attention, **options)
    out, lse = jax.vmap(attend, in_axes=(0, 0, 0, 0, 0, None))(
        q, k, v, visible[:, None], distance[:, None], sm_scale
    )
    out, lse = _as_output(out[:, 0], q_dtype, out_dtype, out_scale), lse[:, 0]
    return (out, lse) if return_lse else out


def mla_paged_attention(
    q, kv_pages, page_table, seq_lens, cu_q_lens, num_seqs=None, *,
    v_head_dim, kv_scale=None, **options
):  # fmt: skip
    """`jax_paged.mla_paged_attention` in jax.numpy: one KV head, its V cut out of K."""
    k_pages = kv_pages[..., None, :, :]
    return ragged_paged_attention(
        q, k_pages, k_pages[..., :v_head_dim], page_table, seq_lens, cu_q_lens, num_seqs,
        k_scale=kv_scale, v_scale=kv_scale, **options,
    )  # fmt: skip
