# SPDX-License-Identifier: Apache-2.0
"""Rows that share pages, and part again: fork and truncate, verbs of `PageTable`.

Both may leave a row with its end inside a page that other rows hold. The row then gets a page of
its own, into which the caller copies the shared one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_paged.cache.table import (
    STALE,
    Integers,
    PageCopies,
    T,
    all_ok,
    check_rows,
    first_status,
    hand_out,
    if_ok,
    look_up,
    per_row,
    pop,
    push,
    replace,
    stored_lens,
)
from jax_paged.cache.windows import give_window, loses_window
from jax_paged.checks import check_shape
from jax_paged.checks.status import Status, code
from jax_paged.ops.batch import pages_for


def fork(
    table: T, parent: Integers, child: Integers, length: Integers
) -> tuple[T, PageCopies, jax.Array]:
    """Starts the free row child[i] with the first length[i] tokens of row parent[i].

    Full pages are shared. For a last page that `length` fills only partly the child gets a fresh
    page, into which the caller copies the old one before the next write (a `KVState` does). A
    parent may have several children in one call. A pair with a -1 takes no part. The child has no
    sliding window; if it is given one, these tokens count as pinned.

    In a table with row_window the child shares what is left of the parent's window and slides on
    by itself.

    Args:
      parent, child: integers [N].
      length: integers [N] or a scalar, from 0 to the parent's length.

    Returns:
      (table, copies, status i32[N]). STALE_ROW: the parent is not live. UNCOMMITTED_TREE: it has a
      tree. BAD_ROW also for a child that is live, given twice, or a parent in the same call, and
      for a length out of range, which for a parent with a window ends at its pinned tokens.
      SLID_OUT, with row_window: tokens that the child's next token would see have slid away; the
      parent's whole length is always possible.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    sources, targets = check_rows("parent", parent), check_rows("child", child)
    check_shape("child", targets, "N", sources.shape)
    lengths = per_row("length", length, sources)
    return (_fork_stored if table.row_window else _fork)(table, sources, targets, lengths)


@jax.jit
def _fork(table, parent, child, length):
    max_seqs, num_pages, page_size = table.max_seqs, table.num_pages, table.page_size
    takes_part = (parent != -1) & (child != -1)
    parent, child = jnp.where(takes_part, parent, -1), jnp.where(takes_part, child, -1)
    inside = (parent >= 0) & (parent < max_seqs)
    source = jnp.where(inside, parent, 0)
    _, bad, target = look_up(child, max_seqs)
    nowhere = jnp.zeros(max_seqs, jnp.bool_)
    is_parent = nowhere.at[jnp.where(inside, parent, max_seqs)].set(True, mode="drop")
    is_child = nowhere.at[jnp.where(child >= 0, child, max_seqs)].set(True, mode="drop")
    bad |= ~inside | is_parent[target] | is_child[source] | table.is_live[target] | (length < 0)
    most, windows = table.seq_lens[source], table.windows
    if windows is not None:
        pinned = jnp.minimum(most, windows.num_pinned[source])
        most = jnp.where(windows.window[source] > 0, pinned, most)
    status = first_status(
        (takes_part & ((parent == STALE) | (child == STALE)), Status.STALE_ROW),
        (takes_part & bad, Status.BAD_ROW),
        (takes_part & ~table.is_live[source], Status.STALE_ROW),
        (takes_part & (table.tree_sizes[source] > 0), Status.UNCOMMITTED_TREE),
        (takes_part & (length > most), Status.BAD_ROW),
    )
    partial = takes_part & (length % page_size != 0)
    status, need = hand_out(status, partial.astype(jnp.int32), table.num_free)

    live = takes_part & all_ok(status)
    full = jnp.where(live, length // page_size, 0)
    fresh, num_free = pop(table.free_stack, table.num_free, need, 1)
    column = jnp.arange(table.pages_per_seq, dtype=jnp.int32)[None, :]
    old_pages = table.page_table[source]
    shared = column < full[:, None]
    copied = (column == full[:, None]) & (need > 0)[:, None]
    pages = jnp.where(shared, old_pages, jnp.where(copied, fresh, -1))
    counted = jnp.where(shared, old_pages, num_pages)
    ref_counts = table.ref_counts.at[counted].add(jnp.int32(1), mode="drop")
    index = jnp.where(live, child, max_seqs)
    if windows is not None:
        pinned = windows.num_pinned.at[index].set(length, mode="drop")
        windows = dataclasses.replace(windows, num_pinned=pinned)
    table = replace(
        table,
        page_table=table.page_table.at[index].set(pages, mode="drop"),
        seq_lens=table.seq_lens.at[index].set(length, mode="drop"),
        pages_held=table.pages_held.at[index].set(full + need, mode="drop"),
        is_live=table.is_live.at[index].set(True, mode="drop"),
        ref_counts=ref_counts.at[fresh].set(jnp.int32(1), mode="drop"),
        num_free=num_free,
        windows=windows,
    )
    src = jnp.max(jnp.where(copied, old_pages, -1), axis=1)
    return table, PageCopies(src, jnp.where(need > 0, fresh[:, 0], -1)), status


@jax.jit
def _fork_stored(table, parent, child, length):
    """`_fork` where all rows have a window and no pinned tokens; the child slid as its parent.

    What is stored of a row is forked like a row that never slid.
    """
    windows = table.windows
    takes_part = (parent != -1) & (child != -1)
    source = jnp.clip(parent, 0, table.max_seqs - 1)
    inside = takes_part & (length >= 0) & (length <= table.seq_lens[source])
    lost = inside & loses_window(table, source, length)
    offset = windows.slot_offset[source]

    stored = dataclasses.replace(table, seq_lens=table.seq_lens - windows.slot_offset, windows=None)
    forked, copies, status = _fork(stored, parent, child, jnp.where(lost, 0, length - offset))
    status = jnp.where(lost & (status == code(Status.OK)), code(Status.SLID_OUT), status)
    index = jnp.where(takes_part & all_ok(status), child, table.max_seqs)
    slot_offset = windows.slot_offset.at[index].set(offset, mode="drop")
    forked = dataclasses.replace(
        forked,
        seq_lens=forked.seq_lens + slot_offset,
        windows=dataclasses.replace(windows, slot_offset=slot_offset),
    )
    ok = all_ok(status)
    table = if_ok(ok, give_window(forked, index), table)
    return table, PageCopies(*(jnp.where(ok, x, -1) for x in copies)), status


def truncate(table: T, rows: Integers, num_tokens: Integers) -> tuple[T, PageCopies, jax.Array]:
    """Drops the last num_tokens[i] tokens of row i, and its pages wholly behind the new end.

    Reserved pages without a token go too: num_tokens = 0 trims a row to its length. A row cut to
    length 0 stays live.

    A new end inside a page that other rows hold would make the next write overwrite their tokens.
    The row then gets a fresh page, into which the caller copies the old one before the next write
    (a `KVState` does). It needs a free page for that, or POOL_FULL, unless the cut frees a
    page that it alone holds. If all holders of a page are cut inside it in one call, the last of
    them keeps it.

    Args:
      rows: integers [N].
      num_tokens: integers [N] or a scalar, tokens to drop, from 0 to the row's length.

    Returns:
      (table, copies, status i32[N]). STALE_ROW: the row is not live. UNCOMMITTED_TREE: it has a
      tree. BAD_ROW also for num_tokens out of range. SLID_OUT: the next token would see tokens that
      have slid away; back to the length at the last `reserve` is always possible.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    ids = check_rows("rows", rows)
    return _truncate(table, ids, per_row("num_tokens", num_tokens, ids))


@jax.jit
def _truncate(table, rows, num_tokens):
    max_seqs, num_pages, page_size = table.max_seqs, table.num_pages, table.page_size
    takes_part, bad, safe = look_up(rows, max_seqs)
    old_lens = table.seq_lens[safe]
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (takes_part & (bad | (num_tokens < 0)), Status.BAD_ROW),
        (takes_part & ~table.is_live[safe], Status.STALE_ROW),
        (takes_part & (table.tree_sizes[safe] > 0), Status.UNCOMMITTED_TREE),
        (takes_part & (num_tokens > old_lens), Status.BAD_ROW),
        (takes_part & loses_window(table, safe, old_lens - num_tokens), Status.SLID_OUT),
    )
    fine = takes_part & (status == code(Status.OK))
    length = jnp.where(fine, old_lens - num_tokens, 0)
    keep = pages_for(stored_lens(table, safe, length), page_size)
    pages = table.page_table[safe]
    holders = table.ref_counts[jnp.maximum(pages, 0)]
    column = jnp.arange(table.pages_per_seq, dtype=jnp.int32)[None, :]
    behind = fine[:, None] & (column >= keep[:, None]) & (pages >= 0)
    is_cut = (length % page_size != 0)[:, None] & (column == keep[:, None] - 1)  # <= 1 page a row
    shared = jnp.any(is_cut & (holders > 1), axis=1)
    # A row's need depends on that row alone, so that fewer rows in a retry never need more.
    frees_own = jnp.any(behind & (holders == 1), axis=1)
    status, _ = hand_out(status, (shared & ~frees_own).astype(jnp.int32), table.num_free)

    live = takes_part & all_ok(status)
    index = jnp.where(live, rows, max_seqs)
    behind, is_cut = behind & live[:, None], is_cut & live[:, None]
    dropped = jnp.where(behind, pages, num_pages)
    # The last of the rows cut inside a page keeps it when nobody else is left. So a source of a
    # copy is never freed here, and cannot be the target of another copy.
    cut_page = jnp.max(jnp.where(is_cut, pages, -1), axis=1)
    cut_index = jnp.where(cut_page >= 0, cut_page, num_pages)
    number = jnp.arange(rows.shape[0], dtype=jnp.int32)
    last_cut = jnp.full(num_pages, -1, jnp.int32).at[cut_index].max(number, mode="drop")
    others = table.ref_counts.at[dropped].add(jnp.int32(-1), mode="drop")
    others = others.at[cut_index].add(jnp.int32(-1), mode="drop")
    keeps = (others[cut_page] == 0) & (last_cut[cut_page] == number)
    copy = shared & live & ~keeps

    copied = is_cut & copy[:, None]
    ref_counts, free_stack, num_free = push(
        table.ref_counts, table.free_stack, table.num_free, jnp.where(copied, pages, dropped)
    )
    fresh, num_free = pop(free_stack, num_free, copy.astype(jnp.int32), 1)
    kept = jnp.where(copied, fresh, jnp.where(column < keep[:, None], pages, -1))
    windows = table.windows
    if windows is not None:
        pinned = jnp.minimum(windows.num_pinned[safe], length)  # what is left of a forked prefix
        pinned = jnp.where(windows.window[safe] > 0, windows.num_pinned[safe], pinned)
        pinned = windows.num_pinned.at[index].set(pinned, mode="drop")
        windows = dataclasses.replace(windows, num_pinned=pinned)
    table = replace(
        table,
        page_table=table.page_table.at[index].set(kept, mode="drop"),
        seq_lens=table.seq_lens.at[index].set(length, mode="drop"),
        pages_held=table.pages_held.at[index].set(keep, mode="drop"),
        ref_counts=ref_counts.at[fresh].set(jnp.int32(1), mode="drop"),
        free_stack=free_stack,
        num_free=num_free,
        windows=windows,
    )
    none = jnp.int32(-1)
    copies = PageCopies(jnp.where(copy, cut_page, none), jnp.where(copy, fresh[:, 0], none))
    return table, copies, status
