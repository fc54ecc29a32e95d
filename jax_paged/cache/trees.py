# SPDX-License-Identifier: Apache-2.0
"""Token trees in the page table: how a step grows them, and commit_tree, verbs of `PageTable`.

The nodes of a row's tree are its last tokens, in the order in which they came. Until the tree is
committed the row takes nodes of it and nothing else; `truncate` and `fork` report UNCOMMITTED_TREE,
and `hold` leaves the tree's pages alone, so that all its slots are the row's own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_paged.cache.table import (
    STALE,
    Integers,
    SlotMoves,
    T,
    Table,
    all_ok,
    check_rows,
    first_status,
    look_up,
    per_row,
    replace,
    stored_lens,
)
from jax_paged.checks.status import Status
from jax_paged.ops.trees import intervals_of

NO_TREE = -2  # parent of a token that is no node of a tree


class NewNodes(NamedTuple):
    """What the tree_parents of a step say of its rows, which have not been checked yet."""

    grows: jax.Array  # bool[S], the row's tokens are nodes
    bad: jax.Array  # bool[S], some are and some are not, or a parent is none


def read_parents(
    table: Table, rows: jax.Array, takes_part: jax.Array, ends: jax.Array,
    tree_parents: jax.Array,
) -> NewNodes:  # fmt: skip
    """Checks the parents of a step's tokens; rows are safe ids, ends those of `token_ends`."""
    owner, index = token_owners(ends, tree_parents.shape[0])
    node = table.tree_sizes[rows][owner] + index
    in_batch = takes_part[owner] & (index < jnp.diff(ends, prepend=0)[owner])
    is_node = in_batch & (tree_parents != NO_TREE)
    is_bad = is_node & ((tree_parents < -1) | (tree_parents >= node))

    def in_row(flags):
        return jnp.zeros(rows.shape[0], jnp.bool_).at[owner].max(flags)

    grows = in_row(is_node)
    return NewNodes(grows, in_row(is_bad) | (grows & in_row(in_batch & ~is_node)))


def token_ends(q_lens: jax.Array, size: int) -> jax.Array:
    """Where the tokens of each row end in a flat batch of `size`; size + 1 for all beyond it."""
    ends = jnp.cumsum(jnp.clip(q_lens, 0, size + 1), dtype=jnp.int32)
    # A sum that does not fit i32 first turns negative, which as u32 is large, and stays so.
    return jnp.minimum(jax.lax.cummax(ends.astype(jnp.uint32)), size + 1).astype(jnp.int32)


def token_owners(ends: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Of each of `size` flat tokens: its row, and which of the row's tokens it is.

    For padding at the end the latter is not below the row's q_len.
    """
    number = jnp.arange(ends.shape[0], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    # Each row marks its first token, and the mark carries on.
    first_token = jnp.where(ends > starts, starts, size)
    marks = jnp.zeros(size, jnp.int32).at[first_token].set(number, mode="drop")
    owner = jax.lax.cummax(marks)
    return owner, jnp.arange(size, dtype=jnp.int32) - starts[owner]


def commit_tree(table: T, rows: Integers, leaves: Integers) -> tuple[T, SlotMoves, jax.Array]:
    """Keeps one path of each row's tree, from a root to the node leaves[i], and drops the rest.

    The row's length becomes the length before the tree plus the nodes of the path, which the caller
    moves to the slots behind the length before the tree (a `KVState` does). The row takes
    plain tokens again. Its pages stay reserved; `truncate` by 0 trims them.

    Args:
      rows: integers [N]; any rows with a tree, in any order.
      leaves: integers [N] or a scalar: a node of each tree, a leaf or not; -1 accepts none.

    Returns:
      (table, moves, status i32[N]). moves: [N * max_tree] slots, -1 where nothing moves; all -1 if
      any row fails. STALE_ROW: the row is not live. BAD_ROW also for a row without an uncommitted
      tree, so for a second commit, and for a leaf that is no node of the tree.

    Raises:
      ValueError: a shape or dtype is wrong.

    The verb is TVM's CommitAcceptedTokenTreeNodes.

    >>> from jax_paged import PageTable
    >>> table = PageTable.create(num_pages=4, max_seqs=2, pages_per_seq=2, page_size=8)
    >>> table, _ = table.reserve([0], 8)
    >>> table, _, _ = table.step([0], [3], num_tokens=4)
    >>> table, batch, _ = table.step([0], [4], num_tokens=4, tree_parents=[-1, 0, 0, 2])
    >>> print(batch.positions, batch.tree_sizes)
    [3 4 4 5] [4]
    >>> table, moves, _ = table.commit_tree([0], [3])  # nodes 0, 2 and 3
    >>> print(table.seq_lens, moves.src[moves.src >= 0], moves.dst[moves.dst >= 0])
    [6 0] [5 6] [4 5]
    """
    ids = check_rows("rows", rows)
    return _commit_tree(table, ids, per_row("leaves", leaves, ids))


@jax.jit
def _commit_tree(table, rows, leaves):
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    sizes = table.tree_sizes[safe]
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (takes_part & bad, Status.BAD_ROW),
        (takes_part & ~table.is_live[safe], Status.STALE_ROW),
        (takes_part & ((sizes == 0) | (leaves < -1) | (leaves >= sizes)), Status.BAD_ROW),
    )
    live = takes_part & all_ok(status)
    accepts = live & (leaves >= 0)
    leaf = jnp.where(accepts, leaves, 0)[:, None]
    tree, depths = intervals_of(table.tree_parents[safe], jnp.where(live, sizes, 0))
    first, end = tree[..., 0], tree[..., 1]
    place = jnp.take_along_axis(first, leaf, axis=1)
    on_path = accepts[:, None] & (first <= place) & (place < end)

    root = table.seq_lens[safe] - sizes
    node = jnp.arange(table.max_tree, dtype=jnp.int32)[None]
    moves = on_path & (depths != node)

    begin = stored_lens(table, safe, root)

    def slots(nodes):
        token = jnp.where(moves, begin[:, None] + nodes, 0)
        page = jnp.take_along_axis(table.page_table[safe], token // table.page_size, axis=1)
        slot = page * table.page_size + token % table.page_size
        return jnp.where(moves, slot, -1).reshape(-1)

    index = jnp.where(live, rows, table.max_seqs)
    length = root + jnp.sum(on_path, axis=1, dtype=jnp.int32)
    committed = replace(
        table,
        seq_lens=table.seq_lens.at[index].set(length, mode="drop"),
        tree_sizes=table.tree_sizes.at[index].set(jnp.int32(0), mode="drop"),
        num_free=table.num_free,
    )
    return committed, SlotMoves(slots(node), slots(depths)), status
