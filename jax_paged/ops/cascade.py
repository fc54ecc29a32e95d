# SPDX-License-Identifier: Apache-2.0
"""Cascade attention: what many rows share is read once for all of them.

A level is a set of rows of K and V, and says which of them each row of the batch attends. All the
queries of a shared row are one row of a ragged call, so its pages are read once for the group; the
levels' results are merged by their log-sum-exp.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_paged.checks import (
    Implementation,
    as_index,
    check_array,
    check_layer,
    check_pages,
    check_scale,
    check_shape,
    expect,
)
from jax_paged.layout import Layout
from jax_paged.ops.attention import paged_attention, ragged_paged_attention
from jax_paged.ops.batch import OF_ROWS, CascadeLevel, StepBatch
from jax_paged.ops.merge import merge_attention_states
from jax_paged.ops.mla import check_latent_pages, mla_paged_attention
from jax_paged.ops.options import check_out_dtype, documented
from jax_paged.ops.reference import quantize


@documented
def cascade_attention(
    q: Float[Array, "tokens num_q_heads head_dim"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    levels: Sequence[Any],
    cu_q_lens: Int[Array, "num_seqs+1"] | None = None,
    num_seqs: Int[Array, "..."] | int | None = None,
    *,
    layer: Int[Array, ""] | int | None = None,
    sm_scale: Float[Array, ""] | float | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
    sinks: Float[Array, "num_q_heads"] | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
    out_dtype: DTypeLike | None = None,
    out_scale: Float[Array, ""] | float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    num_kv_splits: int | None = None,
    split_tokens: int | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
):
    """Attends each row's queries to the union of what the levels hold for that row.

    The result is that of `ragged_paged_attention` over rows that hold the tokens of all their
    levels one after the other, rounding aside: each level's out is rounded to q's dtype before it
    is merged. `cascade_levels` finds levels in the pages that rows share.

    Args:
      q: [tokens, num_q_heads, head_dim], bf16, f16 or f32; one query per row without cu_q_lens.
      k_pages, v_pages: as for `paged_attention`.
      levels: `CascadeLevel`s (page_table, seq_lens, row_groups, …), at least one, any number. No
        key may be in two levels of one row. A level with row_groups is seen whole by every query of
        its rows: it must hold no token of this step, in a causal call, and none that a window or a
        tree hides from one of them. Windows and trees are told by the levels without row_groups.
      cu_q_lens, num_seqs: as for `ragged_paged_attention`; None: one query per row, all live.
      causal: of the levels without row_groups.
      {options}
      return_lse: as for `paged_attention`.
      alibi_slopes: as for `paged_attention`, the distances being those in the rows that hold all
        their levels; the last level must be one without row_groups.
      sinks: counted once, in the last level without row_groups, which must be there.
      out_dtype, out_scale: as for `paged_attention`; the merged result is rounded so.
      There is no rope: a query would be turned by its place in each level. Store turned keys.

    Returns:
      [tokens, num_q_heads, v_head_dim] in q's dtype or out_dtype; with return_lse also f32[tokens,
      num_q_heads]. Padding is exactly 0 with lse −inf.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: as `paged_attention`.

    Differentiable in q, k_pages, v_pages, sm_scale, alibi_slopes and sinks by reverse mode, and
    mapped by vmap as `paged_attention` is: it is made of it and of `merge_attention_states`.

    After FlashInfer's cascade attention (multi-level, merged states); the grouping by a map from
    rows needs no order of the rows.

    >>> import jax.numpy as jnp
    >>> pages = jnp.arange(3.0)[:, None, None, None] * jnp.ones((3, 1, 4, 8))
    >>> prefix = CascadeLevel(jnp.array([[0]]), jnp.array([4]), jnp.array([0, 0]))  # page 0, both
    >>> own = CascadeLevel(jnp.array([[1], [2]]), jnp.array([4, 1]))
    >>> out = cascade_attention(jnp.zeros((2, 2, 8)), pages, pages, [prefix, own])
    >>> print(out[:, 0, 0])  # (4 · 0 + 4 · 1) / 8 and (4 · 0 + 1 · 2) / 5
    [0.5 0.4]
    """
    check_array("q", q)
    k_shape, _ = check_pages(k_pages, v_pages, layout, layer)
    pools = (k_pages, v_pages)
    options = {
        "layer": None if layer is None else check_layer(layer, k_shape.num_layers),
        "sm_scale": check_scale("sm_scale", q.shape[-1] ** -0.5 if sm_scale is None else sm_scale),
        "k_scale": np.float32(k_scale) if isinstance(k_scale, float) else k_scale,
        "v_scale": np.float32(v_scale) if isinstance(v_scale, float) else v_scale,
        "alibi_slopes": alibi_slopes,
    }
    static = {
        "soft_cap": soft_cap, "num_kv_splits": num_kv_splits, "split_tokens": split_tokens,
        "layout": layout, "implementation": implementation,
    }  # fmt: skip
    result = _checked(
        k_shape.page_size, causal, static, q, pools, levels, cu_q_lens, num_seqs, sinks, options
    )
    return _given(result, out_dtype, out_scale, return_lse)


@documented
def mla_cascade_attention(
    q: Float[Array, "tokens num_q_heads latent_rope"],
    kv_pages: Float[Array, "..."],
    levels: Sequence[Any],
    cu_q_lens: Int[Array, "num_seqs+1"] | None = None,
    num_seqs: Int[Array, "..."] | int | None = None,
    *,
    sm_scale: Float[Array, ""] | float,
    v_head_dim: int,
    layer: Int[Array, ""] | int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
    sinks: Float[Array, "num_q_heads"] | None = None,
    kv_scale: Float[Array, "..."] | float | None = None,
    out_dtype: DTypeLike | None = None,
    out_scale: Float[Array, ""] | float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    num_kv_splits: int | None = None,
    split_tokens: int | None = None,
    implementation: Implementation = None,
):
    """`cascade_attention` over latent rows: that of `mla_paged_attention`.

    Args:
      q, kv_pages, sm_scale, v_head_dim, kv_scale: as for `mla_paged_attention`.
      levels, cu_q_lens, num_seqs, and all options but these: as for `cascade_attention`.

    Returns and raises: as `cascade_attention`.

    >>> import jax.numpy as jnp
    >>> kv_pages = jnp.arange(3.0)[:, None, None] * jnp.ones((3, 4, 16))
    >>> prefix = CascadeLevel(jnp.array([[0]]), jnp.array([4]), jnp.array([0, 0]))
    >>> own = CascadeLevel(jnp.array([[1], [2]]), jnp.array([4, 1]))
    >>> out = mla_cascade_attention(
    ...     jnp.zeros((2, 2, 16)), kv_pages, [prefix, own], sm_scale=1.0, v_head_dim=8)
    >>> print(out[:, 0, 0])
    [0.5 0.4]
    """
    check_array("q", q)
    check_latent_pages(kv_pages, layer)
    options = {
        "layer": layer if layer is None else jnp.int32(layer),
        "sm_scale": check_scale("sm_scale", sm_scale),
        "kv_scale": np.float32(kv_scale) if isinstance(kv_scale, float) else kv_scale,
        "alibi_slopes": alibi_slopes,
    }
    static = {
        "soft_cap": soft_cap, "num_kv_splits": num_kv_splits, "split_tokens": split_tokens,
        "v_head_dim": v_head_dim, "implementation": implementation,
    }  # fmt: skip
    result = _checked(
        kv_pages.shape[-2], causal, static, q, (kv_pages,), levels, cu_q_lens, num_seqs, sinks,
        options,
    )  # fmt: skip
    return _given(result, out_dtype, out_scale, return_lse)


def _checked(
    page_size: int, causal: bool, static: dict[str, Any], q: jax.Array,
    pools: tuple[Any, ...], levels: Sequence[Any], cu_q_lens: Any, num_seqs: Any, sinks: Any,
    options: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(out, lse) of a call, once what is the same for all kinds of pages has been checked."""
    batch_rows = q.shape[0]
    if cu_q_lens is None and num_seqs is not None:
        cu_q_lens = as_index("cu_q_lens", np.arange(batch_rows + 1))
    if cu_q_lens is not None:
        cu_q_lens = as_index("cu_q_lens", cu_q_lens)
        check_shape("cu_q_lens", cu_q_lens, "num_seqs+1", (None,))
        expect(cu_q_lens.shape[0] >= 1, "cu_q_lens", "at least one element", 0)
        batch_rows = cu_q_lens.shape[0] - 1
    checked = _check_levels(levels, batch_rows)
    expect(
        sinks is None or any(level.row_groups is None for level in checked),
        "sinks",
        "a level without row_groups, to count them in",
        "none",
    )
    expect(
        options["alibi_slopes"] is None or checked[-1].row_groups is None,
        "alibi_slopes",
        "a last level without row_groups, whose last tokens are the queries",
        "one with them",
    )
    if num_seqs is not None:
        num_seqs = as_index("num_seqs", num_seqs)
    return _cascade(
        page_size, causal, tuple(static.items()), q, pools, checked, cu_q_lens, num_seqs, sinks,
        options,
    )  # fmt: skip


def _given(result: tuple[jax.Array, jax.Array], out_dtype: Any, out_scale: Any, return_lse: bool):
    """What a call returns of (out, lse)."""
    out, lse = result
    if out_dtype is not None:
        dtype = check_out_dtype(out_dtype)
        scale = jnp.float32(1) if out_scale is None else check_scale("out_scale", out_scale)
        out = quantize(out, jnp.reshape(scale, ()), dtype)
    else:
        expect(out_scale is None, "out_scale", "None without an out_dtype", "a scale")
    return (out, lse) if return_lse else out


def _check_levels(levels: Sequence[Any], batch_rows: int) -> tuple[CascadeLevel, ...]:
    checked = []
    expect(len(levels) >= 1, "levels", "at least one level", len(levels))
    for i, given in enumerate(levels):
        level, name = CascadeLevel(*given), f"levels[{i}]"
        table = as_index(f"{name}.page_table", level.page_table)
        seq_lens = as_index(f"{name}.seq_lens", level.seq_lens)
        groups = level.row_groups
        check_shape(f"{name}.page_table", table, "groups pages_per_seq", (None, None))
        check_shape(f"{name}.seq_lens", seq_lens, "groups", table.shape[:1])
        if groups is None:
            got = table.shape[0]
            expect(
                got == batch_rows, name, f"the batch's {batch_rows} rows without row_groups", got
            )
        else:
            groups = as_index(f"{name}.row_groups", groups)
            check_shape(f"{name}.row_groups", groups, "num_seqs", (batch_rows,))
            for option in level.of_rows:
                expect(False, f"{name}.{option}", "None with row_groups", "a value")
        of_rows = {option: as_index(f"{name}.{option}", x) for option, x in level.of_rows.items()}
        checked.append(CascadeLevel(table, seq_lens, groups, **of_rows))
    return tuple(checked)


def group_queries(num_tokens, level: CascadeLevel, cu_q_lens, num_seqs):
    """Puts the queries of each group side by side: (order i32[tokens], cu_q_lens i32[groups + 1]).

    Query order[t] is the t-th; those of no group come last, past the end of cu_q_lens.
    """
    num_groups, batch_rows = level.page_table.shape[0], level.row_groups.shape[0]
    row, _ = rows_of_tokens(num_tokens, cu_q_lens)
    live = (row >= 0) & (row < batch_rows)
    if cu_q_lens is not None and num_seqs is not None:
        live &= row < jnp.reshape(num_seqs, ())
    group = jnp.take(level.row_groups, row, mode="fill", fill_value=-1)
    in_group = live & (group >= 0) & (group < num_groups)
    group = jnp.where(in_group, group, num_groups)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    edges = jnp.arange(num_groups + 1, dtype=jnp.int32)
    return order, jnp.searchsorted(group[order], edges).astype(jnp.int32)


def rows_of_tokens(num_tokens, cu_q_lens):
    """Of each token: its row, and how many tokens the row has from it on; padding has any."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if cu_q_lens is None:
        return token, jnp.ones(num_tokens, jnp.int32)
    bounds = jax.lax.cummax(jnp.clip(jnp.asarray(cu_q_lens), 0, num_tokens))
    row = jnp.searchsorted(bounds, token, side="right").astype(jnp.int32) - 1
    return row, jnp.take(bounds, row + 1, mode="clip") - token


def _row_lengths(level: CascadeLevel, page_size):
    """How many tokens of a level each row of the batch has, those that slid away included."""
    capacity = level.page_table.shape[1] * page_size
    if level.slot_offset is not None:
        capacity += jnp.maximum(level.slot_offset, 0)
    lengths = jnp.clip(level.seq_lens, 0, capacity)
    if level.row_groups is None:
        return lengths
    group = jnp.where(level.row_groups >= 0, level.row_groups, level.seq_lens.shape[0])
    return jnp.take(lengths, group, mode="fill", fill_value=0)


def _distance_to_end(to_end, row, level: CascadeLevel, page_size):
    """How far a call over the level puts each token before the end of its row.

    A node of a tree goes by its depth, and a query that is itself pinned has not slid.
    """
    distance = to_end
    if level.tree is not None:
        size = jnp.clip(level.tree_sizes, 0, level.tree.shape[1])
        first, end = level.tree[..., 0], level.tree[..., 1]
        node = jnp.arange(level.tree.shape[1], dtype=jnp.int32)
        is_above = (first[:, None] <= first[..., None]) & (first[..., None] < end[:, None])
        depth = jnp.sum(is_above & (node[None] < node[:, None])[None], axis=2, dtype=jnp.int32)
        size = jnp.take(size, row, mode="clip")
        own = jnp.take(depth, row, axis=0, mode="clip")
        own = jnp.take_along_axis(own, jnp.clip(size - to_end, 0, node.size - 1)[:, None], axis=1)
        distance = jnp.where(to_end <= size, size - own[:, 0], to_end)
    if level.slot_offset is not None and level.num_pinned is not None:
        lengths = _row_lengths(level, page_size)
        slid = jnp.broadcast_to(jnp.maximum(level.slot_offset, 0), lengths.shape)
        unpinned = lengths - slid - level.num_pinned
        pinned = to_end > jnp.take(unpinned, row, mode="clip")
        distance += jnp.where(pinned, jnp.take(slid, row, mode="clip"), 0)
    return distance


def _attend_rows(q, pools, level: CascadeLevel, cu_q_lens, num_seqs, **options):
    """(out, lse) of the rows of a level."""
    operands: Any = (q, *pools, level.page_table, level.seq_lens)
    options |= level.of_rows | {"return_lse": True}
    if len(pools) == 1:
        if cu_q_lens is None:
            cu_q_lens = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
        operands += (cu_q_lens, num_seqs)
        return mla_paged_attention(*operands, **options)
    if cu_q_lens is not None:
        operands += (cu_q_lens, num_seqs)
        return ragged_paged_attention(*operands, **options)
    del options["causal"]  # one query sees all keys
    return paged_attention(*operands, **options)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _cascade(
    page_size, causal, static, q, pools, levels, cu_q_lens, num_seqs, sinks, options
):  # fmt: skip
    options = {**options, **dict(static)}
    own = [i for i, level in enumerate(levels) if level.row_groups is None]
    row, to_end = rows_of_tokens(q.shape[0], cu_q_lens)
    merged = None
    for i, level in enumerate(levels):
        if level.row_groups is not None:
            order, bounds = group_queries(q.shape[0], level, cu_q_lens, num_seqs)
            part = _attend_rows(q[order], pools, level, bounds, None, causal=False, **options)
            back = jnp.zeros_like(order).at[order].set(jnp.arange(q.shape[0], dtype=jnp.int32))
            part = tuple(x[back] for x in part)
            group = jnp.searchsorted(bounds, back, side="right").astype(jnp.int32)
            to_end_of_call = jnp.take(bounds, group, mode="clip") - back
        else:
            given = sinks if i == own[-1] else None
            part = _attend_rows(
                q, pools, level, cu_q_lens, num_seqs, causal=causal, sinks=given, **options
            )
            to_end_of_call = _distance_to_end(to_end, row, level, page_size)
        slopes, later = options["alibi_slopes"], levels[i + 1 :]
        if slopes is not None and later:
            # The call counts a query's distances from another place, by as much for all its keys:
            # its weights are right, and its lse is off by that place times the slope.
            after = functools.reduce(jnp.add, (_row_lengths(x, page_size) for x in later))
            before_end = _distance_to_end(to_end, row, levels[-1], page_size)
            off = before_end - to_end_of_call - jnp.take(after, row, mode="clip")
            shift = slopes.astype(jnp.float32)[None, :] * off.astype(jnp.float32)[:, None]
            part = (part[0], part[1] + shift)
        if merged is None:
            merged = part
        else:
            implementation = options["implementation"]
            merged = merge_attention_states(*merged, *part, implementation=implementation)
    return merged


def cascade_levels(
    page_table: Int[Array, "num_seqs pages_per_seq"] | StepBatch,
    seq_lens: Int[Array, "num_seqs"] | None = None,
    cu_q_lens: Int[Array, "num_seqs+1"] | None = None,
    num_seqs: Int[Array, "..."] | int | None = None,
    *,
    page_size: int,
    num_levels: int = 2,
    max_groups: int | None = None,
    min_rows: int = 2,
    min_tokens: int = 0,
    min_saved: int = 0,
    sliding_window: Int[Array, "..."] | int | None = None,
    num_pinned: Int[Array, "..."] | int | None = None,
    slot_offset: Int[Array, "..."] | int | None = None,
    tree: Int[Array, "num_seqs max_tree 2"] | None = None,
    tree_sizes: Int[Array, "num_seqs"] | None = None,
) -> tuple[CascadeLevel, ...]:
    """Levels for `cascade_attention` from pages that rows share: once per step, for all layers.

    Rows whose first page is the same form a group; the group's part is the longest run of whole
    pages that all its rows begin with, short of each row's queries and tree. What is left of the
    rows is the next level's input; the last level holds the rest of each row. A row that shares
    nothing is in no group, and a batch where none does costs a few empty launches. Of a row that is
    longer than its window, pages of pinned tokens alone can be shared: each query sees those.

    Args:
      page_table, seq_lens, cu_q_lens, num_seqs: of the batch; without cu_q_lens one query per row.
        Or instead of all four the `jax_paged.StepBatch` that `step` returns, which knows windows
        and trees, too.
      page_size: of the pool. Static, as are the next two.
      num_levels: the most levels, at least 2: that many − 1 splits of the rows into groups.
      max_groups: of a level; None: num_seqs // 2, which is always enough. Rows of groups beyond it
        keep their pages to themselves.
      min_rows, min_tokens, min_saved: of a group: rows, the tokens that they share, and those that
        are not read again, (rows − 1) · tokens. Rows that share less keep their pages to
        themselves.
      sliding_window, num_pinned, slot_offset, tree, tree_sizes: of the rows, as for
        `ragged_paged_attention`. A window of the layer beside a `StepBatch` whose rows have none.

    Returns:
      Up to num_levels levels; all but the last have row_groups, and the last one has what there is
      of windows and trees.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.

    jit-able; takes num_seqs² + num_seqs · pages_per_seq steps per level.

    >>> import jax.numpy as jnp
    >>> table = jnp.array([[7, 8, 1], [7, 8, 2], [5, -1, -1]])  # rows 0 and 1 share two pages
    >>> prefix, own = cascade_levels(table, jnp.array([33, 40, 3]), page_size=16)
    >>> print(prefix.page_table, prefix.seq_lens, prefix.row_groups)
    [[7 8 1]] [32] [ 0  0 -1]
    >>> print(own.page_table[:, 0], own.seq_lens)
    [1 2 5] [1 8 3]
    """
    values = (sliding_window, num_pinned, slot_offset, tree, tree_sizes)
    of_rows = {name: x for name, x in zip(OF_ROWS, values, strict=True) if x is not None}
    if isinstance(page_table, StepBatch):
        batch, given = page_table, (seq_lens, cu_q_lens, num_seqs)
        expect(all(x is None for x in given), "page_table", "a StepBatch alone", "more beside it")
        known = {name: x for name in OF_ROWS if (x := getattr(batch, name)) is not None}
        for name in of_rows:
            ok = name == "sliding_window" and name not in known
            expect(ok, name, "None beside a StepBatch that knows it", "a value")
        of_rows |= known
        page_table, seq_lens = batch.page_table, batch.seq_lens
        cu_q_lens, num_seqs = batch.cu_q_lens, batch.num_seqs
    page_table, seq_lens = as_index("page_table", page_table), as_index("seq_lens", seq_lens)
    check_shape("page_table", page_table, "num_seqs pages_per_seq", (None, None))
    check_shape("seq_lens", seq_lens, "num_seqs", page_table.shape[:1])
    if cu_q_lens is not None:
        cu_q_lens = as_index("cu_q_lens", cu_q_lens)
        check_shape("cu_q_lens", cu_q_lens, "num_seqs+1", (page_table.shape[0] + 1,))
    max_groups = page_table.shape[0] // 2 if max_groups is None else max_groups
    for name, value, least in (
        ("page_size", page_size, 1), ("num_levels", num_levels, 2), ("max_groups", max_groups, 0),
        ("min_rows", min_rows, 0), ("min_tokens", min_tokens, 0), ("min_saved", min_saved, 0),
    ):  # fmt: skip
        ok = isinstance(value, int) and value is not True and value >= least
        expect(ok, name, f"an int >= {least}", value)
    rows = page_table.shape[0]
    num_seqs = as_index("num_seqs", rows if num_seqs is None else num_seqs)
    of_rows = {name: as_index(name, x) for name, x in of_rows.items()}
    for name, x in of_rows.items():
        if name == "tree":
            check_shape(name, x, "num_seqs max_tree 2", (rows, None, 2))
        elif x.ndim > 0 or name == "tree_sizes":
            check_shape(name, x, "num_seqs", (rows,))
    least = (min_rows, min_tokens, min_saved)
    return _levels(
        page_size, num_levels, max_groups, least, page_table, seq_lens, cu_q_lens, num_seqs, of_rows
    )


# What rows read together: so many rows, tokens that they share, and tokens that are not read again.
# Measured on a CPU (bench_cascade.py) before plain decode became faster there (docs/kernels.md).
LEAST_ROWS, LEAST_TOKENS, LEAST_SAVED = 4, 512, 6000


def shared_levels(
    batch: StepBatch, page_size: int, num_levels: int, window: Any = None
) -> tuple[CascadeLevel, ...]:
    """`cascade_levels` of what rows should share; window: of a layer, if it has one."""
    return cascade_levels(
        batch, page_size=page_size, num_levels=num_levels, min_rows=LEAST_ROWS,
        min_tokens=LEAST_TOKENS, min_saved=LEAST_SAVED, sliding_window=window,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _levels(
    page_size, num_levels, max_groups, least, page_table, seq_lens, cu_q_lens, num_seqs, of_rows
):  # fmt: skip
    rows, width = page_table.shape
    slid = jnp.maximum(of_rows.get("slot_offset", jnp.int32(0)), 0)
    tokens = jnp.clip(seq_lens - slid, 0, width * page_size)  # stored
    if 0 in (max_groups, rows, width):
        return (CascadeLevel(page_table, tokens + slid, **of_rows),)
    q_lens = jnp.ones(rows, jnp.int32)
    if cu_q_lens is not None:  # a row without queries shares nothing: its tokens could be anything
        q_lens = jnp.diff(jax.lax.cummax(jnp.maximum(cu_q_lens, 0)))
    live = (jnp.arange(rows, dtype=jnp.int32) < jnp.reshape(num_seqs, ())) & (q_lens > 0)
    whole = jnp.maximum(tokens - jnp.maximum(q_lens, of_rows.get("tree_sizes", jnp.int32(0))), 0)
    pinned = jnp.maximum(of_rows.get("num_pinned", jnp.int32(0)), 0)
    window = of_rows.get("sliding_window", jnp.int32(0))
    unpinned = jnp.maximum(window - pinned, 1)
    hides = (slid > 0) | ((window > 0) & (tokens + slid > pinned + unpinned))
    whole = jnp.where(hides, jnp.minimum(whole, pinned), whole)  # what each query sees
    before = jnp.where(live, whole // page_size, 0)  # pages, at most
    levels, shared_by_row = [], jnp.zeros(rows, jnp.int32)
    for _ in range(num_levels - 1):
        level, shared = _shared_pages(page_size, max_groups, least, page_table, before)
        levels.append(level)
        column = jnp.arange(width, dtype=jnp.int32)[None] + shared[:, None]
        page_table = jnp.take_along_axis(page_table, column, 1, mode="fill", fill_value=-1)
        shared_by_row, before = shared_by_row + shared * page_size, before - shared
    if "num_pinned" in of_rows:
        still = jnp.maximum(pinned - shared_by_row, 0)
        of_rows = of_rows | {"num_pinned": still}
        if "sliding_window" in of_rows:  # which counts them
            of_rows["sliding_window"] = jnp.where(window > 0, still + unpinned, 0)
    own = CascadeLevel(page_table, tokens + slid - shared_by_row, **of_rows)
    return (*levels, own)


def _shared_pages(page_size, max_groups, least, page_table, before):
    """One level, and how many pages of each row it takes; `before`: how many it may take.

    least: rows of a group, tokens that they share, and tokens that are not read again.
    """
    rows, width = page_table.shape
    row = jnp.arange(rows, dtype=jnp.int32)
    first = page_table[:, 0]
    may = (before > 0) & (first >= 0)
    same = may[:, None] & may[None] & (first[:, None] == first[None])
    leader = jnp.argmax(same, axis=1).astype(jnp.int32)  # the first row of the group
    count = jnp.sum(same, axis=1, dtype=jnp.int32)
    equal = (page_table == page_table[leader]) & (page_table >= 0)
    equal &= jnp.arange(width, dtype=jnp.int32)[None] < jnp.minimum(before, before[leader])[:, None]
    run = jnp.sum(jnp.cumprod(equal, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    common = jnp.min(jnp.where(same, run[None], width), axis=1)  # of all rows of the group
    tokens = common * page_size
    shares = (count >= max(least[0], 2)) & (tokens >= least[1]) & ((count - 1) * tokens >= least[2])
    leads = shares & (leader == row)
    number = jnp.cumsum(leads, dtype=jnp.int32) - 1  # of the group that a row leads
    row_groups = jnp.where(shares & (number[leader] < max_groups), number[leader], -1)
    group = jnp.where(leads & (row_groups >= 0), row_groups, max_groups)  # else dropped
    leader_of = jnp.full(max_groups, rows, jnp.int32).at[group].set(row, mode="drop")
    level = CascadeLevel(
        jnp.take(page_table, leader_of, axis=0, mode="fill", fill_value=-1),
        jnp.take(tokens, leader_of, mode="fill", fill_value=0),
        row_groups,
    )
    return level, jnp.where(row_groups >= 0, common, 0)
