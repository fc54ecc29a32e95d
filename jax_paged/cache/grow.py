# SPDX-License-Identifier: Apache-2.0
"""Rows that grow and end: reserve, step, append and release, verbs of `PageTable`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.cache.handles import next_generation
from jax_paged.cache.table import (
    STALE,
    Integers,
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
from jax_paged.cache.trees import read_parents, token_ends, token_owners
from jax_paged.cache.windows import find_slides, give_window, slide
from jax_paged.checks import INT32_MAX, as_index, check_shape, check_size, expect
from jax_paged.checks.status import Status, code
from jax_paged.ops.batch import StepBatch, pages_for
from jax_paged.ops.cascade import shared_levels
from jax_paged.ops.trees import intervals_of


def reserve(table: T, rows: Integers, num_tokens: Integers) -> tuple[T, jax.Array]:
    """Makes room for num_tokens[i] more tokens in row i; its length stays as it is.

    Afterwards the row holds at least pages_for(seq_len + num_tokens) pages; those that it held
    before count. A free row becomes live, with length 0. A Python int up to page_size makes the
    call cheaper: for a decode step use reserve(table, rows, 1).

    A row with a sliding window first lets go of the pages that its next token does not see. They
    serve this row and those behind it in the same call, except pages that other rows held too.

    Args:
      rows: integers [N].
      num_tokens: integers [N] or a scalar, tokens beyond the present length.

    Returns:
      (table, status i32[N]). ROW_FULL: the row would need more than pages_per_seq pages, or have
      2**31 - 1 tokens.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    ids = check_rows("rows", rows)
    counts = per_row("num_tokens", num_tokens, ids)
    at_most_one_page = isinstance(num_tokens, int | np.integer) and num_tokens <= table.page_size
    return _reserve(table, ids, counts, 1 if at_most_one_page else table.pages_per_seq)


@functools.partial(jax.jit, static_argnames="max_new")
def _reserve(table, rows, num_tokens, max_new):
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    seq_lens, held = table.seq_lens[safe], table.pages_held[safe]
    stored, slides, windows = stored_lens(table, safe, seq_lens), None, table.windows
    if windows is not None:
        slides = find_slides(table, windows, safe)
        held = held - slides.count
        stored = stored - slides.count * table.page_size
    too_many = (num_tokens > table.row_capacity - stored) | (num_tokens >= INT32_MAX - seq_lens)
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (takes_part & (bad | (num_tokens < 0)), Status.BAD_ROW),
        (takes_part & too_many, Status.ROW_FULL),
    )
    fine = takes_part & (status == code(Status.OK))
    target = pages_for(stored + jnp.where(fine, num_tokens, 0), table.page_size)
    need = jnp.where(fine, jnp.maximum(target - held, 0), 0)
    # As in truncate, what a row takes from the others depends on that row alone.
    from_pool = need if slides is None else need - jnp.where(fine, slides.num_freed, 0)
    status, _ = hand_out(status, from_pool, table.num_free)

    live = takes_part & all_ok(status)
    need = jnp.where(live, need, 0)
    index = jnp.where(live, rows, table.max_seqs)
    if windows is not None and slides is not None:
        table = slide(table, windows, safe, index, slides)
    fresh, num_free = pop(table.free_stack, table.num_free, need, max_new)
    row = jnp.where(fresh < table.num_pages, index[:, None], table.max_seqs)
    column = held[:, None] + jnp.arange(max_new, dtype=jnp.int32)[None, :]
    table = replace(
        table,
        page_table=table.page_table.at[row, column].set(fresh, mode="drop"),
        pages_held=table.pages_held.at[index].add(need, mode="drop"),
        is_live=table.is_live.at[index].set(True, mode="drop"),
        ref_counts=table.ref_counts.at[fresh].set(jnp.int32(1), mode="drop"),
        num_free=num_free,
    )
    return give_window(table, index), status


def step(
    table: T, rows: Integers, q_lens: Integers, *, num_tokens: int | None = None,
    tree_parents: Integers | None = None, cascade: bool | int = False,
) -> tuple[T, StepBatch, jax.Array]:  # fmt: skip
    """Appends q_lens[i] tokens to row i and tells where they go; once per step, after `reserve`.

    The flat batch holds q_lens[0] tokens of rows[0], then q_lens[1] of rows[1], and so on, then
    padding. A row of -1 keeps the places of its tokens: they are padding that counts to the row. So
    where a token lies depends on q_lens alone, and with one token per row token i is rows[i]'s,
    whichever rows take part.

    The batch of a table with windows also has `sliding_window`, `num_pinned` and `slot_offset`, for
    `ragged_paged_attention`. Lengths and positions count the tokens that have slid away, slots do
    not.

    Args:
      rows: integers [S].
      q_lens: integers [S] or a scalar, new tokens per row; for a row of -1, places to keep free.
      num_tokens: T, the static size of the flat batch; None = S.
      tree_parents: integers [T]: the tokens are nodes of token trees. A row's nodes are numbered as
        they come, over several steps until `commit_tree`; the parent of a node is an earlier one,
        or -1 for a root. A row whose parents are all NO_TREE (-2) takes plain tokens. A node's
        position is the row's length before the tree plus the number of its ancestors. The batch
        then has `tree` and `tree_sizes`, to be passed to `ragged_paged_attention`.
      cascade: whether the batch also tells what rows share (`levels`, by `cascade_levels`), by
        fork or because they adopted the same pages; `attend` then reads that once for all of them.
        An int: the most levels, at least 2; True = 2. Where fewer than 4 rows share, or fewer than
        512 tokens, each row is read for itself, which is faster.

    Returns:
      (table, batch, status i32[S]). ROW_FULL: the row has not reserved enough pages, or its tree
      would have more than max_tree nodes. UNCOMMITTED_TREE: plain tokens for a row with a tree.
      BAD_ROW also for a row whose tokens do not all fit into the T of the batch, that mixes nodes
      and plain tokens, has a wrong parent, or a window and a tree before all its pinned tokens. If
      any row fails, the batch is all padding: num_seqs 0, slots -1.

    Raises:
      ValueError: a shape or dtype is wrong, num_tokens is no integer of at least 1, or cascade none
        of at least 2.
    """
    ids = check_rows("rows", rows)
    size = ids.shape[0] if num_tokens is None else check_size("num_tokens", num_tokens)
    if tree_parents is not None:
        tree_parents = as_index("tree_parents", tree_parents)
        check_shape("tree_parents", tree_parents, "num_tokens", (size,))
    table, batch, status = _step(table, ids, per_row("q_lens", q_lens, ids), tree_parents, size)
    if isinstance(q_lens, int):
        batch = dataclasses.replace(batch, max_q_len=max(q_lens, 1))
    if cascade is not False:
        num_levels = 2 if cascade is True else cascade
        ok = isinstance(num_levels, int) and num_levels >= 2
        expect(ok, "cascade", "a bool or an int >= 2", repr(cascade))
        levels = shared_levels(batch, table.page_size, num_levels)
        batch = dataclasses.replace(batch, levels=levels)
    return table, batch, status


@functools.partial(jax.jit, static_argnames="size")
def _step(table, rows, q_lens, tree_parents, size):
    page_size = table.page_size
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    old_lens, old_nodes = table.seq_lens[safe], table.tree_sizes[safe]
    ends = token_ends(q_lens, size)
    grows = wrong = overgrown = jnp.zeros((), jnp.bool_)
    if tree_parents is not None:
        grows, wrong = read_parents(table, safe, takes_part, ends, tree_parents)
        overgrown = grows & (q_lens > table.max_tree - old_nodes)
        if table.windows is not None:
            # Attention tells pinned tokens by their slots, which in a tree are not their positions.
            has_window = table.windows.window[safe] > 0
            wrong |= grows & has_window & (old_lens - old_nodes < table.windows.num_pinned[safe])
    stored = stored_lens(table, safe, old_lens)
    too_long = q_lens > table.pages_held[safe] * page_size - stored
    too_long |= q_lens >= INT32_MAX - old_lens
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (takes_part & (bad | (q_lens < 0)), Status.BAD_ROW),
        (takes_part & ~table.is_live[safe], Status.STALE_ROW),
        (takes_part & wrong, Status.BAD_ROW),
        (takes_part & (q_lens > 0) & (old_nodes > 0) & ~grows, Status.UNCOMMITTED_TREE),
        (takes_part & (too_long | overgrown), Status.ROW_FULL),
        (takes_part & (q_lens > 0) & (ends > size), Status.BAD_ROW),
    )
    live = takes_part & all_ok(status)
    q_lens = jnp.where(live, q_lens, 0)
    seq_lens = jnp.where(live, old_lens + q_lens, 0)
    pages = jnp.where(live[:, None], table.page_table[safe], -1)
    ends = jnp.where(all_ok(status), jnp.minimum(ends, size), 0)
    owner, number_in_row = token_owners(ends, size)
    in_batch = number_in_row < q_lens[owner]
    numbers = jnp.where(in_batch, old_lens[owner] + number_in_row, 0)
    in_row = jnp.where(in_batch, stored[owner] + number_in_row, 0)
    slots = pages[owner, in_row // page_size] * page_size + in_row % page_size

    index = jnp.where(live, rows, table.max_seqs)
    positions, tree, tree_sizes, grown = numbers, None, None, {}
    if tree_parents is not None:
        node = old_nodes[owner] + number_in_row
        row = jnp.where(in_batch & grows[owner], index[owner], table.max_seqs)
        tree_sizes = jnp.where(live, old_nodes + jnp.where(grows, q_lens, 0), 0)
        grown = {
            "tree_parents": table.tree_parents.at[row, node].set(tree_parents, mode="drop"),
            "tree_sizes": table.tree_sizes.at[index].set(tree_sizes, mode="drop"),
        }
        tree, depths = intervals_of(grown["tree_parents"][safe], tree_sizes)
        depth = depths[owner, jnp.minimum(node, table.max_tree - 1)]
        in_tree = (old_lens - old_nodes)[owner] + depth
        positions = jnp.where(in_batch & grows[owner], in_tree, numbers)

    number = jnp.arange(rows.shape[0], dtype=jnp.int32)
    windows = jax.tree.map(lambda x: jnp.where(live, x[safe], 0), table.windows)
    given = {} if windows is None else {
        "sliding_window": windows.window,
        "num_pinned": windows.num_pinned,
        "slot_offset": windows.slot_offset,
    }  # fmt: skip
    batch = StepBatch(
        page_table=pages,
        seq_lens=seq_lens,
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        num_seqs=jnp.max(jnp.where(live, number + 1, 0), keepdims=True),
        slot_mapping=jnp.where(in_batch, slots, -1),
        positions=positions,
        tree=tree,
        tree_sizes=tree_sizes,
        **given,
    )
    new_lens = table.seq_lens.at[index].set(seq_lens, mode="drop")
    return replace(table, seq_lens=new_lens, num_free=table.num_free, **grown), batch, status


def append(
    table: T, rows: Integers, q_lens: Integers, *, num_tokens: int | None = None,
    tree_parents: Integers | None = None, cascade: bool | int = False,
) -> tuple[T, StepBatch, jax.Array]:  # fmt: skip
    """Makes room for q_lens[i] tokens of row i and appends them: `reserve` and `step` in one.

    Args and errors: as for `step`, which also tells what the batch is.

    Returns:
      (table, batch, status i32[S]): a row's status is that of `reserve`, or if that is OK for all
      rows, that of `step`. If any row fails, nothing has changed, no page either.

    >>> from jax_paged import PageTable
    >>> table = PageTable.create(num_pages=8, max_seqs=2, pages_per_seq=4, page_size=16)
    >>> table, batch, status = table.append([0, 1], [1, 3], num_tokens=4)
    >>> print(batch.slot_mapping, batch.seq_lens, status)
    [ 0 16 17 18] [1 3] [0 0]
    """
    reserved, status = reserve(table, rows, q_lens)
    ids = jnp.where(all_ok(status), check_rows("rows", rows), -1)
    appended, batch, of_step = step(
        reserved, ids, q_lens, num_tokens=num_tokens, tree_parents=tree_parents, cascade=cascade
    )
    status = jnp.where(all_ok(status), of_step, status)
    return if_ok(all_ok(status), appended, table), batch, status


def release(table: T, rows: Integers) -> tuple[T, jax.Array]:
    """Frees rows; a page is free again when the last row that holds it has let go.

    Args:
      rows: integers [N].

    Returns:
      (table, status i32[N]). STALE_ROW: the row is free already.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    return _release(table, check_rows("rows", rows))


@jax.jit
def _release(table, rows):
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (bad, Status.BAD_ROW),
        (takes_part & ~table.is_live[safe], Status.STALE_ROW),
    )
    live = takes_part & all_ok(status)
    index = jnp.where(live, rows, table.max_seqs)
    pages = table.page_table[safe]
    dropped = jnp.where(live[:, None] & (pages >= 0), pages, table.num_pages)
    ref_counts, free_stack, num_free = push(
        table.ref_counts, table.free_stack, table.num_free, dropped
    )
    table = replace(
        table,
        page_table=table.page_table.at[index].set(jnp.int32(-1), mode="drop"),
        seq_lens=table.seq_lens.at[index].set(jnp.int32(0), mode="drop"),
        pages_held=table.pages_held.at[index].set(jnp.int32(0), mode="drop"),
        is_live=table.is_live.at[index].set(False, mode="drop"),
        generations=table.generations.at[index].set(
            next_generation(table.generations[safe], table.max_seqs), mode="drop"
        ),
        ref_counts=ref_counts,
        free_stack=free_stack,
        num_free=num_free,
        tree_sizes=table.tree_sizes.at[index].set(jnp.int32(0), mode="drop"),
        windows=jax.tree.map(lambda x: x.at[index].set(jnp.int32(0), mode="drop"), table.windows),
    )
    return table, status
