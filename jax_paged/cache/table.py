"""The page table as a pytree, and the primitives that the verbs in `pages` are made of."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.checks import INT32_MAX, as_index, check_size, expect, kind_text
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """Which row holds which pages. Make one with `create`, change it with the verbs of `pages`."""

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

    @staticmethod
    def create(
        num_pages: int, max_seqs: int, pages_per_seq: int, page_size: int, *, max_tree: int = 256,
        windows: bool = False,
    ) -> "PageTable":  # fmt: skip
        """An empty table: every row and every page is free.

        Args:
          num_pages: pages in the pool; num_pages * page_size must stay below 2**31 - 1.
          max_seqs: rows; max_seqs * pages_per_seq must stay below 2**31.
          pages_per_seq: most pages of one row.
          page_size: tokens in a page, any number from 1 up.
          max_tree: most nodes of a token tree; max_seqs * max_tree must stay below 2**31.
          windows: whether rows can have a sliding window (`set_window`).

        Raises:
          ValueError: a size is no integer, below 1 or too large, or windows is no bool.

        >>> from jax_paged.cache.pages import PageTable, reserve
        >>> table = PageTable.create(num_pages=8, max_seqs=2, pages_per_seq=4, page_size=16)
        >>> table, status = reserve(table, [0, 1], 20)
        >>> print(table.page_table, status)
        [[ 0  1 -1 -1]
         [ 2  3 -1 -1]] [0 0]
        """
        num_pages = check_size("num_pages", num_pages)
        max_seqs = check_size("max_seqs", max_seqs)
        pages_per_seq = check_size("pages_per_seq", pages_per_seq)
        page_size = check_size("page_size", page_size)
        max_tree = check_size("max_tree", max_tree)
        slots, entries = num_pages * page_size, max_seqs * pages_per_seq
        expect(slots < INT32_MAX, "num_pages * page_size", "less than 2**31 - 1", slots)
        expect(entries <= INT32_MAX, "max_seqs * pages_per_seq", "less than 2**31", entries)
        nodes = max_seqs * max_tree
        expect(nodes <= INT32_MAX, "max_seqs * max_tree", "less than 2**31", nodes)
        expect(isinstance(windows, bool), "windows", "a bool", repr(windows))
        return make_table(num_pages, max_seqs, pages_per_seq, page_size, max_tree, windows)


class PageCopies(NamedTuple):
    """Whole pages to copy in every layer, -1 = none. No page is both a source and a target."""

    src: jax.Array  # i32[N]
    dst: jax.Array  # i32[N]


class SlotMoves(NamedTuple):
    """Tokens to move in every layer, -1 = none; all are read before one is written."""

    src: jax.Array  # i32[N], page * page_size + offset
    dst: jax.Array  # i32[N]


_VERBS_OF = {"PageTable": "pages", "KVState": "state", "KVGroups": "groups"}


def check_kind(name: str, value: Any, kind: type) -> None:
    """A ValueError unless `value` is of this kind of state, which says where the verbs are."""
    if not isinstance(value, kind):
        got = type(value).__name__
        there = f", whose verbs are in jax_paged.{_VERBS_OF[got]}" if got in _VERBS_OF else ""
        expect(False, name, f"a {kind.__name__}", kind_text(value) + there)


def check_table(table: Any) -> None:
    check_kind("table", table, PageTable)


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


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def make_table(
    num_pages: int, max_seqs: int, pages_per_seq: int, page_size: int, max_tree: int, windows: bool
) -> PageTable:
    """`PageTable.create` on checked sizes."""
    off = [jnp.zeros(max_seqs, jnp.int32) for _ in dataclasses.fields(Windows) if windows]
    return PageTable(
        page_table=jnp.full((max_seqs, pages_per_seq), -1, jnp.int32),
        seq_lens=jnp.zeros(max_seqs, jnp.int32),
        pages_held=jnp.zeros(max_seqs, jnp.int32),
        is_live=jnp.zeros(max_seqs, jnp.bool_),
        generations=jnp.zeros(max_seqs, jnp.int32),
        ref_counts=jnp.zeros(num_pages, jnp.int32),
        hold_counts=jnp.zeros(num_pages, jnp.int32),
        free_stack=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.full((), num_pages, jnp.int32),
        peak_pages=jnp.zeros((), jnp.int32),
        tree_sizes=jnp.zeros(max_seqs, jnp.int32),
        tree_parents=jnp.zeros((max_seqs, max_tree), jnp.int32),
        page_size=page_size,
        windows=Windows(*off) if windows else None,
    )


def replace(table: PageTable, *, num_free: jax.Array, **changes: Any) -> PageTable:
    """`table` with some leaves changed and the peak brought up to date."""
    peak = jnp.maximum(table.peak_pages, table.num_pages - num_free)
    return dataclasses.replace(table, num_free=num_free, peak_pages=peak, **changes)


def stored_lens(table: PageTable, rows: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """How many of the first `seq_lens` tokens of rows (safe ids) are stored: not slid away."""
    return seq_lens if table.windows is None else seq_lens - table.windows.slot_offset[rows]


# In what follows `max_seqs` as a row index and `num_pages` as a page id mean "none": every scatter
# has mode="drop", and -1 would wrap around.


def all_ok(status: jax.Array) -> jax.Array:
    """bool[]: no row failed."""
    return jnp.all(status == code(Status.OK))


def first_status(*cases: tuple[jax.Array, Status]) -> jax.Array:
    """Per row the status of the first condition that holds, else OK."""
    conditions = [condition for condition, _ in cases]
    return jnp.select(conditions, [code(status) for _, status in cases], code(Status.OK))


def look_up(rows: jax.Array, max_seqs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each of `rows`: does it take part, is its id bad, and an id safe to index with."""
    takes_part = rows != -1
    inside = (rows >= 0) & (rows < max_seqs)
    place = jnp.where(inside, rows, max_seqs)
    times = jnp.zeros(max_seqs, jnp.int32).at[place].add(jnp.int32(1), mode="drop")
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
    place = num_free - 1 - (end - need)[:, None] - column
    pages = free_stack[jnp.clip(place, 0, num_pages - 1)]
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
    place = jnp.where(freed, num_free + end - 1, num_pages)
    return ref_counts, free_stack.at[place].set(pages, mode="drop"), num_free + end[-1]
