# SPDX-License-Identifier: Apache-2.0
"""Cascade attention: what many rows share is read once for all of them.

A level is a set of rows of K and V, and says which of them each row of the batch attends. All the
queries of a shared row are one row of a ragged call, so its pages are read once for the group; the
levels' results are merged by their log-sum-exp.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
from jax_paged.layout import Layout, pages_shape
from jax_paged.ops.attention import paged_attention, ragged_paged_attention
from jax_paged.ops.batch import StepBatch
from jax_paged.ops.merge import merge_attention_states
from jax_paged.ops.options import documented


class CascadeLevel(NamedTuple):
    """One part of the history of each row of a batch; a plain triple will do as well.

    page_table: i32[groups, pages_per_seq]; seq_lens: i32[groups]: the pages of each shared part,
      and how many tokens of them count.
    row_groups: i32[num_seqs]: which of the groups each row of the batch attends, all tokens of it;
      outside [0, groups): none. None: the groups are the rows of the batch themselves, and the last
      tokens of each are its queries, as in `ragged_paged_attention`.
    """

    page_table: Any
    seq_lens: Any
    row_groups: Any = None


@documented
def cascade_attention(
    q: Float[Array, "tokens num_q_heads head_dim"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
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
      levels: `CascadeLevel`s (page_table, seq_lens, row_groups), at least one, any number. No key
        may be in two levels of one row. A level with row_groups is seen whole by every query of its
        rows: it must hold no token of this step, in a causal call.
      cu_q_lens, num_seqs: as for `ragged_paged_attention`; None: one query per row, all live.
      causal: of the levels without row_groups.
      {options}
      return_lse: as for `paged_attention`.
      alibi_slopes: as for `paged_attention`, the distances being those in the rows that hold all
        their levels; the last level must be one without row_groups.
      sinks: counted once, in the last level without row_groups, which must be there.
      There is no sliding_window: it begins at another token for each row that shares them.

    Returns:
      [tokens, num_q_heads, v_head_dim] in q's dtype; with return_lse also f32[tokens, num_q_heads].
      Padding is exactly 0 with lse −inf.

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
    batch_rows = q.shape[0]
    if cu_q_lens is None and num_seqs is not None:
        cu_q_lens = as_index("cu_q_lens", np.arange(batch_rows + 1))
    if cu_q_lens is not None:
        cu_q_lens = as_index("cu_q_lens", cu_q_lens)
        check_shape("cu_q_lens", cu_q_lens, "num_seqs+1", (None,))
        expect(cu_q_lens.shape[0] >= 1, "cu_q_lens", "at least one element", 0)
        batch_rows = cu_q_lens.shape[0] - 1
    levels = _check_levels(levels, batch_rows)
    k_shape, _ = check_pages(k_pages, v_pages, layout, layer)
    expect(
        sinks is None or any(level.row_groups is None for level in levels),
        "sinks",
        "a level without row_groups, to count them in",
        "none",
    )
    expect(
        alibi_slopes is None or levels[-1].row_groups is None,
        "alibi_slopes",
        "a last level without row_groups, whose last tokens are the queries",
        "one with them",
    )
    if num_seqs is not None:
        num_seqs = as_index("num_seqs", num_seqs)
    options = {
        "alibi_slopes": alibi_slopes,
        "layer": None if layer is None else check_layer(layer, k_shape.num_layers),
        "sm_scale": check_scale("sm_scale", q.shape[-1] ** -0.5 if sm_scale is None else sm_scale),
        "k_scale": np.float32(k_scale) if isinstance(k_scale, float) else k_scale,
        "v_scale": np.float32(v_scale) if isinstance(v_scale, float) else v_scale,
    }
    static = {
        "soft_cap": soft_cap,
        "num_kv_splits": num_kv_splits,
        "split_tokens": split_tokens,
        "layout": layout,
        "implementation": implementation,
    }
    out, lse = _cascade(
        causal, tuple(static.items()), q, k_pages, v_pages, levels, cu_q_lens, num_seqs, sinks,
        options,
    )  # fmt: skip
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
        checked.append(CascadeLevel(table, seq_lens, groups))
    return tuple(checked)


def group_queries(num_tokens, level: CascadeLevel, cu_q_lens, num_seqs):
    """Puts the queries of each group side by side: (order i32[tokens], cu_q_lens i32[groups + 1]).

    Query order[t] is the t-th; those of no group come last, past the end of cu_q_lens.
    """
    num_groups, batch_rows = level.page_table.shape[0], level.row_groups.shape[0]
    row, _ = _rows_of(num_tokens, cu_q_lens)
    live = (row >= 0) & (row < batch_rows)
    if cu_q_lens is not None and num_seqs is not None:
        live &= row < jnp.reshape(num_seqs, ())
    group = jnp.take(level.row_groups, row, mode="fill", fill_value=-1)
    in_group = live & (group >= 0) & (group < num_groups)
    group = jnp.where(in_group, group, num_groups)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    edges = jnp.arange(num_groups + 1, dtype=jnp.int32)
    return order, jnp.searchsorted(group[order], edges).astype(jnp.int32)


def _rows_of(num_tokens, cu_q_lens):
    """Of each token: its row, and how many tokens the row has from it on; padding has any."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if cu_q_lens is None:
        return token, jnp.ones(num_tokens, jnp.int32)
    bounds = jax.lax.cummax(jnp.clip(jnp.asarray(cu_q_lens), 0, num_tokens))
    row = jnp.searchsorted(bounds, token, side="right").astype(jnp.int32) - 1
    return row, jnp.take(bounds, row + 1, mode="clip") - token


def _row_lengths(level: CascadeLevel, page_size):
    """How many tokens of a level each row of the batch has."""
    lengths = jnp.clip(level.seq_lens, 0, level.page_table.shape[1] * page_size)
    if level.row_groups is None:
        return lengths
    group = jnp.where(level.row_groups >= 0, level.row_groups, level.seq_lens.shape[0])
    return jnp.take(lengths, group, mode="fill", fill_value=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _cascade(causal, static, q, k_pages, v_pages, levels, cu_q_lens, num_seqs, sinks, options):
    options = {**options, **dict(static), "return_lse": True}
    own = [i for i, level in enumerate(levels) if level.row_groups is None]
    row, to_end = _rows_of(q.shape[0], cu_q_lens)
    merged = None
    for i, level in enumerate(levels):
        to_end_of_call = to_end
        pages = (k_pages, v_pages, level.page_table, level.seq_lens)
        if level.row_groups is not None:
            order, bounds = group_queries(q.shape[0], level, cu_q_lens, num_seqs)
            part = ragged_paged_attention(q[order], *pages, bounds, causal=False, **options)
            back = jnp.zeros_like(order).at[order].set(jnp.arange(q.shape[0], dtype=jnp.int32))
            part = tuple(x[back] for x in part)
            group = jnp.searchsorted(bounds, back, side="right").astype(jnp.int32)
            to_end_of_call = jnp.take(bounds, group, mode="clip") - back
        else:
            given = sinks if i == own[-1] else None
            if cu_q_lens is None:
                part = paged_attention(q, *pages, sinks=given, **options)
            else:
                part = ragged_paged_attention(
                    q, *pages, cu_q_lens, num_seqs, causal=causal, sinks=given, **options
                )
        slopes, later = options["alibi_slopes"], levels[i + 1 :]
        if slopes is not None and later:
            # The call counts a query's distances from another place, by as much for all its keys:
            # its weights are right, and its lse is off by that place times the slope.
            page_size = pages_shape(k_pages, options["layout"]).page_size
            after = functools.reduce(jnp.add, (_row_lengths(x, page_size) for x in later))
            off = to_end - to_end_of_call - jnp.take(after, row, mode="clip")
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
) -> tuple[CascadeLevel, ...]:
    """Levels for `cascade_attention` from pages that rows share: once per step, for all layers.

    Rows whose first page is the same form a group; the group's part is the longest run of whole
    pages that all its rows begin with, short of each row's queries. What is left of the rows is the
    next level's input; the last level holds the rest of each row. A row that shares nothing is in
    no group, and a batch where none does costs a few empty launches.

    Args:
      page_table, seq_lens, cu_q_lens, num_seqs: of the batch; without cu_q_lens one query per row.
        Or instead of all four the `jax_paged.StepBatch` that `step` returns.
      page_size: of the pool. Static, as are the next two.
      num_levels: the most levels, at least 2: that many − 1 splits of the rows into groups.
      max_groups: of a level; None: num_seqs // 2, which is always enough. Rows of groups beyond it
        keep their pages to themselves.

    Returns:
      Up to num_levels levels; all but the last have row_groups.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: the step batch has trees, or windows of its rows. Arrays do not tell: for
        rows with a window or a tree the levels are wrong.

    jit-able; takes num_seqs² + num_seqs · pages_per_seq steps per level.

    >>> import jax.numpy as jnp
    >>> table = jnp.array([[7, 8, 1], [7, 8, 2], [5, -1, -1]])  # rows 0 and 1 share two pages
    >>> prefix, own = cascade_levels(table, jnp.array([33, 40, 3]), page_size=16)
    >>> print(prefix.page_table, prefix.seq_lens, prefix.row_groups)
    [[7 8 1]] [32] [ 0  0 -1]
    >>> print(own.page_table[:, 0], own.seq_lens)
    [1 2 5] [1 8 3]
    """
    if isinstance(page_table, StepBatch):
        batch, given = page_table, (seq_lens, cu_q_lens, num_seqs)
        expect(all(x is None for x in given), "page_table", "a StepBatch alone", "more beside it")
        for name, what in (("tree", "without trees"), ("sliding_window", "without windows")):
            if getattr(batch, name) is not None:
                raise NotImplementedError(
                    f"page_table: cascade_levels takes a StepBatch {what}, got one with `{name}`"
                )
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
    ):  # fmt: skip
        ok = isinstance(value, int) and value is not True and value >= least
        expect(ok, name, f"an int >= {least}", value)
    num_seqs = as_index("num_seqs", page_table.shape[0] if num_seqs is None else num_seqs)
    return _levels(page_size, num_levels, max_groups, page_table, seq_lens, cu_q_lens, num_seqs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _levels(page_size, num_levels, max_groups, page_table, seq_lens, cu_q_lens, num_seqs):
    rows, width = page_table.shape
    tokens = jnp.clip(seq_lens, 0, width * page_size)
    if 0 in (max_groups, rows, width):
        return (CascadeLevel(page_table, tokens),)
    q_lens = jnp.ones(rows, jnp.int32)
    if cu_q_lens is not None:  # a row without queries shares nothing: its tokens could be anything
        q_lens = jnp.diff(jax.lax.cummax(jnp.maximum(cu_q_lens, 0)))
    live = (jnp.arange(rows, dtype=jnp.int32) < jnp.reshape(num_seqs, ())) & (q_lens > 0)
    before = jnp.where(live, jnp.maximum(tokens - q_lens, 0) // page_size, 0)  # pages, at most
    levels = []
    for _ in range(num_levels - 1):
        level, shared = _shared_pages(page_size, max_groups, page_table, before)
        levels.append(level)
        column = jnp.arange(width, dtype=jnp.int32)[None] + shared[:, None]
        page_table = jnp.take_along_axis(page_table, column, 1, mode="fill", fill_value=-1)
        tokens, before = tokens - shared * page_size, before - shared
    return (*levels, CascadeLevel(page_table, tokens))


def _shared_pages(page_size, max_groups, page_table, before):
    """One level, and how many pages of each row it takes; `before`: how many it may take."""
    rows, width = page_table.shape
    row = jnp.arange(rows, dtype=jnp.int32)
    first = page_table[:, 0]
    may = (before > 0) & (first >= 0)
    same = may[:, None] & may[None] & (first[:, None] == first[None])
    leader = jnp.argmax(same, axis=1).astype(jnp.int32)  # the first row of the group
    shares = jnp.sum(same, axis=1, dtype=jnp.int32) > 1
    equal = (page_table == page_table[leader]) & (page_table >= 0)
    equal &= jnp.arange(width, dtype=jnp.int32)[None] < jnp.minimum(before, before[leader])[:, None]
    run = jnp.sum(jnp.cumprod(equal, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    common = jnp.min(jnp.where(same, run[None], width), axis=1)  # of all rows of the group
    leads = shares & (leader == row)
    number = jnp.cumsum(leads, dtype=jnp.int32) - 1  # of the group that a row leads
    row_groups = jnp.where(shares & (number[leader] < max_groups), number[leader], -1)
    group = jnp.where(leads & (row_groups >= 0), row_groups, max_groups)  # else dropped
    leader_of = jnp.full(max_groups, rows, jnp.int32).at[group].set(row, mode="drop")
    level = CascadeLevel(
        jnp.take(page_table, leader_of, axis=0, mode="fill", fill_value=-1),
        jnp.take(common * page_size, leader_of, mode="fill", fill_value=0),
        row_groups,
    )
    return level, jnp.where(row_groups >= 0, common, 0)
