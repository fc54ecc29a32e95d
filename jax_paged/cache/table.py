# SPDX-License-Identifier: Apache-2.0
"""The arrays of a page table, and the primitives that its verbs are made of."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.checks import INT32_MAX, as_index, expect
from jax_paged.checks.status import Status, code

STALE = -2  # for a row that was released since somebody took its handle: always STALE_ROW

Integers = jax.Array | np.ndarray | np.integer | int | Sequence[int]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Windows:
    """The sliding windows of rows, see `set_window`."""

    window: jax.Array  # i32[max_seqs], tokens that a query sees, pinned ones included; 0 = all
    # i32[max_seqs], first tokens of the row that never slide. Without a window: those with which it
    # was forked.
    num_pinned: jax.Array
    # i32[max_seqs], tokens that are gone, in whole pages: stored slot s of the row holds token s if
    # s < num_pinned, else token s + slot_offset.
    slot_offset: jax.Array


@dataclass(frozen=True)
class Table:
    """The arrays of a `PageTable`, whose verbs are in the files that import this one."""

    page_table: jax.Array  # i32[max_seqs, pages_per_seq], page ids in order, -1 = unused
    seq_lens: jax.Array  # i32[max_seqs], tokens in the row, with those that slid out of its window
    pages_held: jax.Array  # i32[max_seqs], pages of the row, enough for the tokens that it stores
    is_live: jax.Array  # bool[max_seqs], False = the row is free
    generations: (
        jax.Array
    )  # i32[max_seqs], how often the row was released, modulo what fits `handles`
    ref_counts: jax.Array  # i32[num_pages], rows that hold the page, and its holds
    hold_counts: jax.Array  # i32[num_pages], the references that `hold` took, rows aside
    free_stack: jax.Array  # i32[num_pages], the first num_free entries are free pages, top last
    num_free: jax.Array  # i32[]
    peak_pages: jax.Array  # i32[], most pages held after any verb
    tree_sizes: jax.Array  # i32[max_seqs], nodes of the row's uncommitted tree, its last tokens
    tree_parents: jax.Array  # i32[max_seqs, max_tree], their parents in the tree, -1 = root
    page_size: int = field(metadata={"static": True})
    windows: Windows | None = None  # None: no row can have a sliding window
    # The window that every row has from its first token on; 0: a row gets one from `set_window`.
    row_window: int = field(metadata={"static": True}, default=0)

    @property
    def max_seqs(self) -> int:
        return self.page_table.shape[0]

    @property
    def pages_per_seq(self) -> int:
        return self.page_table.shape[1]

    @property
    def num_pages(self) -> int:
        return self.ref_counts.shape[0]

    @property
    def max_tree(self) -> int:
        return self.tree_parents.shape[1]

    @property
    def row_capacity(self) -> int:
        """Most tokens that one row can store, however many pages are free."""
        return min(self.pages_per_seq * self.page_size, INT32_MAX - 1)


T = TypeVar("T", bound=Table)


class PageCopies(NamedTuple):
    """Whole pages to copy in every layer, -1 = none. No page is both a source and a target."""

    src: jax.Array  # i32[N]
    dst: jax.Array  # i32[N]


class SlotMoves(NamedTuple):
    """Tokens to move in every layer, -1 = none; all are read before one is written."""

    src: jax.Array  # i32[N], page * page_size + offset
    dst: jax.Array  # i32[N]


def check_rows(name: str, value: Integers) -> jax.Array:
    """`value` as i32[N], N at least 1, or a ValueError that names it."""
    rows = as_index(name, value)
    ok = rows.ndim == 1 and rows.shape[0] > 0
    got = list(rows.shape) if rows.ndim else "a scalar"
    expect(ok, name, "shape [N] with N of at least 1", got)
    return rows


def per_row(name: str, value: Integers, rows: jax.Array) -> jax.Array:
    """`value`, a scalar or one per row, as an array of the shape of `rows`."""
    counts = as_index(name, value)
    ok = counts.shape in ((), rows.shape)
    expect(ok, name, f"a scalar or shape {list(rows.shape)}", list(counts.shape))
    return jnp.broadcast_to(counts, rows.shape)


def replace(table: T, *, num_free: jax.Array, **changes: Any) -> T:
    """`table` with some leaves changed and the peak brought up to date."""
    peak = jnp.maximum(table.peak_pages, table.num_pages - num_free)
    return dataclasses.replace(table, num_free=num_free, peak_pages=peak, **changes)


def stored_lens(table: Table, rows: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """How many of the first `seq_lens` tokens of rows (safe ids) are stored: not slid away."""
    return seq_lens if table.windows is None else seq_lens - table.windows.slot_offset[rows]


# In what follows `max_seqs` as a row index and `num_pages` as a page id mean "none": every scatter
# has mode="drop", and -1 would wrap around.


def all_ok(status: jax.Array) -> jax.Array:
    """bool[]: no row failed."""
    return jnp.all(status == code(Status.OK))


def if_ok(ok: jax.Array, new: T, old: T) -> T:
    """`new` where ok, a bool[], holds, else `old`."""
    return jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, old)


def first_status(*cases: tuple[jax.Array, Status]) -> jax.Array:
    """Per row the status of the first condition that holds, else OK."""
    conditions = [condition for condition, _ in cases]
    return jnp.select(conditions, [code(status) for _, status in cases], code(Status.OK))


def look_up(rows: jax.Array, max_seqs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each of `rows`: does it take part, is its id bad, and an id safe to index with."""
    takes_part = rows != -1
    inside = (rows >= 0) & (rows < max_seqs)
    index = jnp.where(inside, rows, max_seqs)
    times = jnp.zeros(max_seqs, jnp.int32).at[index].add(jnp.int32(1), mode="drop")
    safe = jnp.where(inside, rows, 0)
    return takes_part, takes_part & (~inside | (times[safe] > 1)), safe


def hand_out(
    status: jax.Array, need: jax.Array, num_free: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Promises need[i] pages to row i, in order, if its status is OK; a negative need brings pages.

    Returns the status with POOL_FULL filled in, and the need, all 0 if any row failed.
    """
    need = jnp.where(status == code(Status.OK), need, 0)
    short = (need > 0) & (jnp.cumsum(need, dtype=jnp.int32) > num_free)
    too_late = jnp.cumsum(short, dtype=jnp.int32) > 0  # what a later row brings helps nobody here
    status = jnp.where((need > 0) & too_late, code(Status.POOL_FULL), status)
    return status, jnp.where(all_ok(status), need, 0)


def pop(
    free_stack: jax.Array, num_free: jax.Array, need: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """Takes need[i] <= width free pages for row i: (ids [N, width], number of free pages left)."""
    num_pages = free_stack.shape[0]
    end = jnp.cumsum(need, dtype=jnp.int32)
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    entry_of = num_free - 1 - (end - need)[:, None] - column
    pages = free_stack[jnp.clip(entry_of, 0, num_pages - 1)]
    return jnp.where(column < need[:, None], pages, num_pages), num_free - end[-1]


def push(
    ref_counts: jax.Array, free_stack: jax.Array, num_free: jax.Array, pages: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lets go of `pages`, in order; each is freed where its last reference goes.

    Returns the new ref_counts, free_stack and num_free.
    """
    num_pages = ref_counts.shape[0]
    pages = pages.reshape(-1)
    ref_counts = ref_counts.at[pages].add(jnp.int32(-1), mode="drop")
    entry = jnp.arange(pages.shape[0], dtype=jnp.int32)
    last_entry = jnp.full(num_pages, -1, jnp.int32).at[pages].max(entry, mode="drop")
    safe = jnp.minimum(pages, num_pages - 1)
    freed = (pages < num_pages) & (ref_counts[safe] == 0) & (last_entry[safe] == entry)
    end = jnp.cumsum(freed, dtype=jnp.int32)
    top = jnp.where(freed, num_free + end - 1, num_pages)
    return ref_counts, free_stack.at[top].set(pages, mode="drop"), num_free + end[-1]
