# SPDX-License-Identifier: Apache-2.0
"""The page table: which row holds which pages, and the verbs that change it.

A verb is a method that returns a new table, together with a status per row. It works eagerly, under
`jax.jit` and inside `lax.while_loop`, and never talks to the host. Rules for all of them:

- A row id of -1 takes no part. One of -2 is STALE_ROW: `rows_of` gives it for a handle whose row
  was released since. Any other id outside [0, max_seqs), or an id given twice, is BAD_ROW; so is a
  negative count.
- All or nothing: if any row fails, the table comes back unchanged. The status of every other row
  says what it would have got. Free pages are handed out in the order of `rows`, and no row that
  needs one overtakes a row that got POOL_FULL. So the call that keeps only the OK rows, with the
  others set to -1, succeeds.
- Pages are freed in the order of `rows`, as if one row came after the other. Free pages are a
  stack: the page freed last is taken first, and a new table hands out page 0, then 1, and so on.
- Integers of any width are taken. What does not fit i32 is clamped, so it never turns into a valid
  id.

Rows share a page only where every holder has it filled to the end: `fork`, `truncate` and `hold`
see to it (`PageCopies`). The slots at and behind a row's length are its own, so no write reaches a
shared page.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_paged.cache import grow, holds, share, trees, windows
from jax_paged.cache import handles as row_handles
from jax_paged.cache.table import Table, Windows
from jax_paged.checks import INT32_MAX, check_size, expect


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTable(Table):
    """Which row holds which pages, for those who bring pools of their own; else see `KVState`."""

    reserve = grow.reserve
    step = grow.step
    append = grow.append
    release = grow.release
    fork = share.fork
    truncate = share.truncate
    commit_tree = trees.commit_tree
    set_window = windows.set_window
    hold = holds.hold
    unhold = holds.unhold
    adopt = holds.adopt
    handles = row_handles.handles
    rows_of = row_handles.rows_of

    @staticmethod
    def create(
        num_pages: int, max_seqs: int, pages_per_seq: int, page_size: int, *, max_tree: int = 256,
        windows: bool = False, row_window: int | None = None,
    ) -> "PageTable":  # fmt: skip
        """An empty table: every row and every page is free.

        Args:
          num_pages: pages in the pool; num_pages * page_size must stay below 2**31 - 1.
          max_seqs: rows; max_seqs * pages_per_seq must stay below 2**31.
          pages_per_seq: most pages of one row.
          page_size: tokens in a page, any number from 1 up.
          max_tree: most nodes of a token tree; max_seqs * max_tree must stay below 2**31.
          windows: whether rows can have a sliding window (`set_window`).
          row_window: a window that every row has from its start, without pinned tokens.

        Raises:
          ValueError: a size is no integer, below 1 or too large, or windows is no bool.

        >>> from jax_paged import PageTable
        >>> table = PageTable.create(num_pages=8, max_seqs=2, pages_per_seq=4, page_size=16)
        >>> table, status = table.reserve([0, 1], 20)
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
        row_window = 0 if row_window is None else check_size("row_window", row_window)
        sizes = (num_pages, max_seqs, pages_per_seq, page_size, max_tree)
        return _empty(*sizes, windows or row_window > 0, row_window)

    def reset(self) -> "PageTable":
        """The table as `create` made it: all rows and pages free, the peak 0.

        Handles of rows that were live go stale.
        """
        sizes = (self.num_pages, self.max_seqs, self.pages_per_seq, self.page_size, self.max_tree)
        empty = _empty(*sizes, self.windows is not None, self.row_window)
        later = row_handles.next_generation(self.generations, self.max_seqs)
        generations = jnp.where(self.is_live, later, self.generations)
        return dataclasses.replace(empty, generations=generations)

    @property
    def free_rows(self) -> jax.Array:
        """bool[max_seqs]: the rows that are not live."""
        return ~self.is_live

    @property
    def free_pages(self) -> jax.Array:
        """i32[]: how many pages no row holds and are not on hold."""
        return self.num_free

    @property
    def total_tokens(self) -> jax.Array:
        """i32[]: the sum of all lengths, a shared token counted in each row; at most 2**31 - 1."""
        exact = jnp.sum(self.seq_lens.astype(jnp.uint32), dtype=jnp.uint32)  # modulo 2**32
        estimate = jnp.sum(self.seq_lens.astype(jnp.float32))
        most = jnp.uint32(INT32_MAX)
        clamped = jnp.where(estimate < jnp.float32(3e9), jnp.minimum(exact, most), most)
        return clamped.astype(jnp.int32)

    @property
    def is_empty(self) -> jax.Array:
        """bool[]: no row is live."""
        return ~jnp.any(self.is_live)


@functools.partial(jax.jit, static_argnums=range(7))
def _empty(
    num_pages: int, max_seqs: int, pages_per_seq: int, page_size: int, max_tree: int,
    windows: bool, row_window: int,
) -> PageTable:  # fmt: skip
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
        row_window=row_window,
    )
