# SPDX-License-Identifier: Apache-2.0
"""Pages that outlive their rows: hold, unhold and adopt, verbs of `PageTable`.

A prefix cache takes a reference on a full page of a row (`hold`), starts later rows with it
(`adopt`), and gives the reference back when it needs the room (`unhold`). Only full pages can be
held, so what is shared is never written: truncating a row into such a page copies it first. The
rules are those of `PageTable`: a status per entry, all or nothing, -1 takes no part.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_paged.cache.table import (
    STALE,
    Integers,
    T,
    all_ok,
    check_rows,
    first_status,
    look_up,
    push,
    replace,
)
from jax_paged.cache.windows import column_of, give_window
from jax_paged.checks import as_index, check_shape, expect
from jax_paged.checks.status import Status


def hold(table: T, rows: Integers, columns: Integers) -> tuple[T, jax.Array, jax.Array]:
    """Takes a reference on page columns[i] of row rows[i], which stays when the row lets go.

    A page may be held many times, also by one call; each hold wants its own `unhold`.

    Args:
      rows, columns: integers [N]; a row may come several times. The page of column c has the row's
        tokens from c * page_size on, whether or not earlier ones have slid away.

    Returns:
      (table, page_ids i32[N], status i32[N]). page_ids: what to pass to `unhold` and `adopt`; -1
      where the row is -1, and everywhere if any entry fails. STALE_ROW: the row is not live.
      BAD_ROW also for a page that the row has not filled to its end, uncommitted trees left out.
      SLID_OUT: the page has left the row's window.

    Raises:
      ValueError: a shape or dtype is wrong.

    >>> from jax_paged import PageTable
    >>> table = PageTable.create(num_pages=4, max_seqs=2, pages_per_seq=4, page_size=16)
    >>> table, _ = table.reserve([0], 20)
    >>> table, _, _ = table.step([0], 20, num_tokens=32)
    >>> table, page_ids, status = table.hold([0, 0], [0, 1])
    >>> print(page_ids, status)  # the second page is not full
    [-1 -1] [0 3]
    >>> table, page_ids, _ = table.hold([0], [0])
    >>> table, _ = table.release([0])
    >>> table, status = table.adopt([1], page_ids[None, :])
    >>> print(table.seq_lens, table.num_free, status)
    [ 0 16] 3 [0]
    """
    ids = check_rows("rows", rows)
    numbers = check_rows("columns", columns)
    check_shape("columns", numbers, "N", ids.shape)
    return _hold(table, ids, numbers)


@jax.jit
def _hold(table, rows, columns):
    takes_part = rows != -1
    inside = (rows >= 0) & (rows < table.max_seqs)
    safe = jnp.where(inside, rows, 0)
    full = (table.seq_lens - table.tree_sizes)[safe] // table.page_size
    stored_at, gone = column_of(table, safe, columns)
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (takes_part & (~inside | (columns < 0)), Status.BAD_ROW),
        (takes_part & ~table.is_live[safe], Status.STALE_ROW),
        (takes_part & (columns >= full), Status.BAD_ROW),
        (takes_part & gone, Status.SLID_OUT),
    )
    live = takes_part & all_ok(status)
    page_ids = table.page_table[safe, jnp.clip(stored_at, 0, table.pages_per_seq - 1)]
    index = jnp.where(live, page_ids, table.num_pages)
    table = replace(
        table,
        ref_counts=table.ref_counts.at[index].add(jnp.int32(1), mode="drop"),
        hold_counts=table.hold_counts.at[index].add(jnp.int32(1), mode="drop"),
        num_free=table.num_free,
    )
    return table, jnp.where(live, page_ids, -1), status


def unhold(table: T, page_ids: Integers) -> tuple[T, jax.Array]:
    """Gives back a reference per page; a page that nobody holds any more is free again.

    Args:
      page_ids: integers [N]; a page may come as often as it is held.

    Returns:
      (table, status i32[N]). BAD_ROW: the id is out of range, or the page is not held, or not as
      often as it is given.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    return _unhold(table, check_rows("page_ids", page_ids))


@jax.jit
def _unhold(table, page_ids):
    num_pages = table.num_pages
    takes_part = page_ids != -1
    inside = (page_ids >= 0) & (page_ids < num_pages)
    safe = jnp.where(inside, page_ids, 0)
    index = jnp.where(inside, page_ids, num_pages)
    times = jnp.zeros(num_pages, jnp.int32).at[index].add(jnp.int32(1), mode="drop")
    held = inside & (times[safe] <= table.hold_counts[safe])
    status = first_status((takes_part & ~held, Status.BAD_ROW))
    dropped = jnp.where(takes_part & all_ok(status), index, num_pages)
    ref_counts, free_stack, num_free = push(
        table.ref_counts, table.free_stack, table.num_free, dropped
    )
    table = replace(
        table,
        ref_counts=ref_counts,
        hold_counts=table.hold_counts.at[dropped].add(jnp.int32(-1), mode="drop"),
        free_stack=free_stack,
        num_free=num_free,
    )
    return table, status


def adopt(table: T, rows: Integers, page_ids: Any) -> tuple[T, jax.Array]:
    """Starts the free row rows[i] with the pages page_ids[i], shared, all of them full.

    Args:
      rows: integers [N].
      page_ids: integers [N, M] with M ≤ pages_per_seq: pages on hold, in order, then -1. A row's
        length becomes its number of pages times page_size, 0 included.

    Returns:
      (table, status i32[N]). BAD_ROW also for a row that is live, and for a page that is out of
      range, not on hold, twice in the row or behind a -1.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    ids = check_rows("rows", rows)
    shared = as_index("page_ids", page_ids)
    ok = shared.ndim == 2 and 1 <= shared.shape[1] <= table.pages_per_seq
    text = f"shape [N, M] with 1 <= M <= pages_per_seq={table.pages_per_seq}"
    expect(ok, "page_ids", text, list(shared.shape))
    check_shape("page_ids", shared, "N M", (ids.shape[0], None))
    return _adopt(table, ids, shared)


@jax.jit
def _adopt(table, rows, page_ids):
    num_pages, width = table.num_pages, page_ids.shape[1]
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    given = page_ids != -1
    inside = (page_ids >= 0) & (page_ids < num_pages)
    on_hold = inside & (table.hold_counts[jnp.where(inside, page_ids, 0)] > 0)
    ordered = jnp.sort(page_ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)
    gap = given[:, 1:] & ~given[:, :-1]
    wrong = jnp.any(given & ~on_hold, axis=1) | jnp.any(twice | gap, axis=1)
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (takes_part & (bad | table.is_live[safe] | wrong), Status.BAD_ROW),
    )

    live = takes_part & all_ok(status)
    index = jnp.where(live, rows, table.max_seqs)
    count = jnp.sum(given, axis=1, dtype=jnp.int32)
    unused = jnp.full((rows.shape[0], table.pages_per_seq - width), -1, jnp.int32)
    adopted = jnp.where(live[:, None] & given, page_ids, num_pages)
    table = replace(
        table,
        page_table=table.page_table.at[index].set(
            jnp.concatenate([page_ids, unused], axis=1), mode="drop"
        ),
        seq_lens=table.seq_lens.at[index].set(count * table.page_size, mode="drop"),
        pages_held=table.pages_held.at[index].set(count, mode="drop"),
        is_live=table.is_live.at[index].set(True, mode="drop"),
        ref_counts=table.ref_counts.at[adopted].add(jnp.int32(1), mode="drop"),
        num_free=table.num_free,
    )
    return give_window(table, index), status
