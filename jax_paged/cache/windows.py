# SPDX-License-Identifier: Apache-2.0
"""Rows whose old tokens slide away: set_window, a verb of `PageTable`, and what `reserve` frees.

A row with a window keeps its first num_pinned tokens, and of the others those that its next query
still sees. `reserve` lets go of the pages in between and closes the gap: later pages move to lower
columns of the page table, and `slot_offset`, always a multiple of page_size, says by how many
tokens. So of the row's stored slots, counted through its columns, slot s holds token s if
s < num_pinned, else token s + slot_offset. The slots from num_pinned to the end of its page then
stand for tokens that are gone, which no query sees any more.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_paged.cache.table import (
    STALE,
    Integers,
    T,
    Table,
    Windows,
    all_ok,
    check_rows,
    first_status,
    look_up,
    per_row,
    push,
    replace,
)
from jax_paged.cache.trees import token_owners
from jax_paged.checks import INT32_MAX, expect
from jax_paged.checks.status import Status
from jax_paged.ops.batch import StepBatch, pages_for


def set_window(
    table: T, rows: Integers, window: Integers, num_pinned: Integers
) -> tuple[T, jax.Array]:
    """Gives live rows a sliding window: from now on a query of row i sees window[i] tokens at most.

    With n = num_pinned[i], the query at position p sees the tokens up to p that are below n or
    above p − (window[i] − n): the window counts the pinned tokens. Tokens are gone, and their pages
    free, when a `reserve` finds that the first token to be appended does not see them. Hence a
    chunk longer than the window has a whole window for each of its tokens.

    The tokens with which a row was forked count as pinned: n is never below their number. The row
    then holds at most the pages of its pinned tokens, of a window and of a chunk, but its length
    grows on: pages_per_seq bounds the former. For a long prompt reserve 0 tokens, set the window,
    and bring the prompt in chunks.

    Args:
      rows: integers [N].
      window: integers [N] or a scalar, tokens that a query sees, itself included.
      num_pinned: integers [N] or a scalar, first tokens of the row that stay; 0 ≤ n < window[i].

    Returns:
      (table, status i32[N]). STALE_ROW: the row is not live. BAD_ROW also for a row that has a
      window already, and where num_pinned or the forked length is not below the window.

    Raises:
      ValueError: a shape or dtype is wrong, or the table was made without windows=True, or with a
        window for every row.

    The verb is TVM's EnableSlidingWindowForSeq, its sinks the pinned tokens.

    >>> from jax_paged import PageTable
    >>> table = PageTable.create(8, 1, pages_per_seq=4, page_size=2, windows=True)
    >>> table, _ = table.reserve([0], 7)
    >>> table, _ = table.set_window([0], 4, 1)
    >>> table, _, _ = table.step([0], 7, num_tokens=7)
    >>> print(table.page_table)
    [[0 1 2 3]]
    >>> table, _ = table.reserve([0], 1)  # token 7 will see 0, 5, 6 and 7
    >>> print(table.page_table, table.windows.slot_offset, table.num_free)
    [[ 0  2  3 -1]] [2] 5
    """
    expect(table.windows is not None, "table", "one made with windows=True", "one without windows")
    expect(not table.row_window, "table", "one without row_window", f"one with {table.row_window}")
    ids = check_rows("rows", rows)
    sizes, pinned = per_row("window", window, ids), per_row("num_pinned", num_pinned, ids)
    return _set_window(table, table.windows, ids, sizes, pinned)


@jax.jit
def _set_window(table, windows, rows, window, num_pinned):
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    all_pinned = jnp.maximum(num_pinned, windows.num_pinned[safe])
    wrong = (num_pinned < 0) | (all_pinned >= window) | (windows.window[safe] > 0)
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (bad, Status.BAD_ROW),
        (takes_part & ~table.is_live[safe], Status.STALE_ROW),
        (takes_part & wrong, Status.BAD_ROW),
    )
    index = jnp.where(takes_part & all_ok(status), rows, table.max_seqs)
    windows = dataclasses.replace(
        windows,
        window=windows.window.at[index].set(window, mode="drop"),
        num_pinned=windows.num_pinned.at[index].set(all_pinned, mode="drop"),
    )
    return replace(table, num_free=table.num_free, windows=windows), status


class PinnedApart(NamedTuple):
    """A step as two: what its queries see of windows, and of pinned tokens."""

    window: StepBatch  # as the step's, without pinned tokens
    pinned: StepBatch  # a row per token of the step: the pinned ones that its window leaves out
    positions: jax.Array  # i32[T], where the query stands among its pinned tokens and its window


def pinned_apart(batch: StepBatch) -> PinnedApart:
    """Splits a step so that rows with windows may grow for ever: positions within the cache.

    A model knows no distances beyond its context, but pinned tokens get as far away as the row is
    long. StreamingLLM (Xiao et al. 2023) counts positions within the cache instead: with a window W
    and n pinned tokens, these stand at 0 … n − 1, the query at min(p, W − 1), and the window's
    tokens right before it. RoPE depends on distances alone, so in the window nothing changes. Only
    the query that meets pinned tokens has to stand at min(p, W − 1). Hence two calls:

      attend(q at p, the window) merged with attend(q at min(p, W − 1), the pinned tokens)

    K stays as it was written, at p: nothing is turned again when pages slide, and what a token
    gives depends neither on page_size nor on when pages slid.

    Args:
      batch: of `step`, of a state with windows=True.

    Returns:
      window: for `attend` of q as `write_qkv` with `batch` gives it.
      pinned: for `write_qkv` with `positions`, which writes nothing then, and for `attend` of the q
        that this gives. Both with return_lse; `merge_attention_states` makes one of them.

    Raises:
      ValueError: the batch has no windows.

    >>> import jax.numpy as jnp
    >>> from jax_paged import PageTable
    >>> table = PageTable.create(8, 1, pages_per_seq=8, page_size=2, windows=True)
    >>> table, _ = table.reserve([0], 7)
    >>> table, _ = table.set_window([0], 4, 1)
    >>> table, batch, _ = table.step([0], 7, num_tokens=7)
    >>> window, pinned, positions = pinned_apart(batch)
    >>> print(window.sliding_window, pinned.seq_lens, positions)
    [3] [0 0 0 1 1 1 1] [0 1 2 3 3 3 3]
    """
    expect(batch.sliding_window is not None, "batch", "one of rows with windows", "one without")
    assert batch.sliding_window is not None
    assert batch.num_pinned is not None
    size = batch.positions.shape[0]
    has_window = batch.sliding_window > 0
    shown = jnp.where(has_window, batch.sliding_window - batch.num_pinned, 0)
    window = dataclasses.replace(
        batch, sliding_window=shown, num_pinned=jnp.zeros_like(shown), levels=None
    )
    owner, _ = token_owners(batch.cu_q_lens[1:], size)
    left_out = jnp.clip(batch.positions - shown[owner] + 1, 0, batch.num_pinned[owner])
    takes_part = has_window[owner] & (batch.slot_mapping >= 0)
    zeros = jnp.zeros(size, jnp.int32)
    pinned = StepBatch(
        page_table=batch.page_table[owner],
        seq_lens=jnp.where(takes_part, left_out, 0),
        cu_q_lens=jnp.arange(size + 1, dtype=jnp.int32),
        num_seqs=jnp.full(1, size, jnp.int32),
        slot_mapping=zeros - 1,
        positions=zeros,
        sliding_window=zeros,
        num_pinned=zeros,
        slot_offset=zeros,
        max_q_len=1,
    )
    last = jnp.where(takes_part, batch.sliding_window[owner] - 1, batch.positions)
    return PinnedApart(window, pinned, jnp.minimum(batch.positions, last))


def give_window(table: T, index: jax.Array) -> T:
    """Gives rows that came to life the table's row_window; `index` is max_seqs to leave one out."""
    if not table.row_window or table.windows is None:
        return table
    window = table.windows.window.at[index].set(jnp.int32(table.row_window), mode="drop")
    return dataclasses.replace(table, windows=dataclasses.replace(table.windows, window=window))


class Slides(NamedTuple):
    """What rows are about to let go: `count` pages from column `first` on."""

    first: jax.Array  # i32[N], pages of pinned tokens
    count: jax.Array  # i32[N], 0 where nothing slides
    num_freed: jax.Array  # i32[N], those of them that nobody else holds


def find_slides(table: Table, windows: Windows, rows: jax.Array) -> Slides:
    """The pages of rows (safe ids) left of the window of the next token, or of a tree's roots."""
    next_token = table.seq_lens[rows] - table.tree_sizes[rows]
    first = _pinned_pages(table, windows, rows)
    # Not below -2**31: the window is at most 2**31 - 1.
    begin = next_token - (windows.window[rows] - windows.num_pinned[rows]) + 1
    slid = begin - (first * table.page_size + windows.slot_offset[rows])
    count = jnp.where(windows.window[rows] > 0, jnp.maximum(slid, 0) // table.page_size, 0)
    column = jnp.arange(table.pages_per_seq, dtype=jnp.int32)[None]
    goes = (column >= first[:, None]) & (column < (first + count)[:, None])
    alone = goes & (table.ref_counts[jnp.maximum(table.page_table[rows], 0)] == 1)
    return Slides(first, count, jnp.sum(alone, axis=1, dtype=jnp.int32))


def never_seen(table: Table, rows: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """How many of the first num_tokens[i] of rows (safe ids) need no place: i32[N], in whole pages.

    They are left of the window of the next token: so of a row that has none yet and gets them at
    once. At least one token stays; where some are pinned, all do.
    """
    windows = table.windows
    if windows is None:
        return jnp.zeros(rows.shape, jnp.int32)
    window = jnp.where(table.is_live[rows], windows.window[rows], table.row_window)
    is_new = (table.seq_lens[rows] == 0) & (windows.num_pinned[rows] == 0) & (window > 0)
    is_new &= (num_tokens > 0) & (num_tokens < INT32_MAX)  # what a row can have
    begin = jnp.minimum(num_tokens - window, num_tokens - 2) + 1
    return jnp.where(is_new, jnp.maximum(begin, 0) // table.page_size * table.page_size, 0)


def slide(table: T, windows: Windows, rows: jax.Array, index: jax.Array, slides: Slides) -> T:
    """Lets go of pages and closes the gap; `index` is rows, or max_seqs to leave a row alone."""
    pages = table.page_table[rows]
    column = jnp.arange(table.pages_per_seq, dtype=jnp.int32)[None]
    first, count = slides.first[:, None], slides.count[:, None]
    goes = (index < table.max_seqs)[:, None] & (column >= first) & (column < first + count)
    ref_counts, free_stack, num_free = push(
        table.ref_counts, table.free_stack, table.num_free, jnp.where(goes, pages, table.num_pages)
    )
    source = jnp.where(column < first, column, column + count)
    moved = jnp.take_along_axis(pages, jnp.minimum(source, table.pages_per_seq - 1), axis=1)
    kept = jnp.where(source < table.pages_per_seq, moved, -1)
    offset = windows.slot_offset.at[index].add(slides.count * table.page_size, mode="drop")
    return replace(
        table,
        page_table=table.page_table.at[index].set(kept, mode="drop"),
        pages_held=table.pages_held.at[index].add(-slides.count, mode="drop"),
        ref_counts=ref_counts,
        free_stack=free_stack,
        num_free=num_free,
        windows=dataclasses.replace(windows, slot_offset=offset),
    )


def loses_window(table: Table, rows: jax.Array, length: jax.Array) -> jax.Array:
    """bool[N]: the token behind `length` tokens of the row would see tokens that are gone."""
    windows = table.windows
    if windows is None:
        return jnp.zeros(rows.shape, jnp.bool_)
    edge = _pinned_pages(table, windows, rows) * table.page_size + windows.slot_offset[rows]
    begin = length - (windows.window[rows] - windows.num_pinned[rows]) + 1
    return (windows.slot_offset[rows] > 0) & (begin < edge)


def column_of(table: Table, rows: jax.Array, page_number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the page of tokens page_number * page_size and on of a row is, and whether it is gone.

    A page with pinned tokens keeps all that it has.
    """
    windows = table.windows
    if windows is None:
        return page_number, jnp.zeros(rows.shape, jnp.bool_)
    first = _pinned_pages(table, windows, rows)
    num_gone = windows.slot_offset[rows] // table.page_size
    behind = page_number >= first
    gone = behind & (page_number < first + num_gone)
    return jnp.where(behind, page_number - num_gone, page_number), gone


def _pinned_pages(table: Table, windows: Windows, rows: jax.Array) -> jax.Array:
    """Columns of each row that hold pinned tokens, as far as it has got."""
    pinned = jnp.minimum(windows.num_pinned[rows], table.seq_lens[rows])
    return pages_for(pinned, table.page_size)
