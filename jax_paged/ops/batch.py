# SPDX-License-Identifier: Apache-2.0
"""The step batch: what one forward step needs to know of its rows and tokens."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.checks import check_size, expect

# The options of attention that windows and trees of rows are.
OF_ROWS = ("sliding_window", "num_pinned", "slot_offset", "tree", "tree_sizes")


class CascadeLevel(NamedTuple):
    """One part of the history of each row of a batch; a plain tuple will do as well.

    page_table: i32[groups, pages_per_seq]; seq_lens: i32[groups]: the pages of each shared part,
      and how many tokens of them count.
    row_groups: i32[num_seqs]: which of the groups each row of the batch attends, all tokens of it;
      outside [0, groups): none. None: the groups are the rows of the batch themselves, and the last
      tokens of each are its queries, as in `ragged_paged_attention`.
    sliding_window, num_pinned, slot_offset, tree, tree_sizes: of a level without row_groups, as for
      `ragged_paged_attention`, its tokens being those of this level; else None.
    """

    page_table: Any
    seq_lens: Any
    row_groups: Any = None
    sliding_window: Any = None
    num_pinned: Any = None
    slot_offset: Any = None
    tree: Any = None
    tree_sizes: Any = None

    @property
    def of_rows(self) -> dict[str, Any]:
        """The options that a call for this level has of its own."""
        return {name: x for name in OF_ROWS if (x := getattr(self, name)) is not None}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """What a forward step needs: S rows and their T flat tokens, row after row, then padding.

    The tokens of a row of -1 are padding, too, in the row's place.
    """

    page_table: jax.Array  # i32[S, pages_per_seq]
    seq_lens: jax.Array  # i32[S], including this step's tokens; 0 for a row of -1
    cu_q_lens: jax.Array  # i32[S + 1], where each row's tokens start
    num_seqs: jax.Array  # i32[1], rows up to the last one that takes part
    slot_mapping: jax.Array  # i32[T], page * page_size + offset; -1 for padding, only for that
    positions: jax.Array  # i32[T], place of the token in its row, or in its tree; 0 for padding
    # None unless the step was given tree_parents; else what `ragged_paged_attention` takes.
    tree: jax.Array | None = None  # i32[S, max_tree, 2]
    tree_sizes: jax.Array | None = None  # i32[S], 0 for a row without a tree
    # None unless the table was made with windows; else what `ragged_paged_attention` takes.
    sliding_window: jax.Array | None = None  # i32[S], 0 for a row without a window
    num_pinned: jax.Array | None = None  # i32[S]
    slot_offset: jax.Array | None = None  # i32[S]
    # None unless `step` was asked for a cascade; else what rows share (`cascade_levels`).
    levels: tuple[CascadeLevel, ...] | None = None
    # How many tokens a row has at most, where that is known ahead: `step` was given an int.
    max_q_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    # Of a state of several groups of layers: the batches of all groups but the first. What is said
    # of rows and tokens is the same in all; pages, slots and windows are the group's own.
    more: tuple["StepBatch", ...] = ()

    @property
    def groups(self) -> tuple["StepBatch", ...]:
        """The batch of each group of the state."""
        return (dataclasses.replace(self, more=()), *self.more)


def pages_for(tokens: Any, page_size: int) -> Any:
    """Pages that hold `tokens` tokens: ceil(tokens / page_size), and 0 for a negative count.

    Args:
      tokens: an int, or an integer array of any shape, traced or not.
      page_size: tokens in a page, at least 1.

    Returns:
      An int for an int, an array of the same dtype for an array.

    Raises:
      ValueError: page_size is no integer or below 1, or tokens are no integers.

    >>> pages_for(33, 16)
    3
    """
    page_size = check_size("page_size", page_size)
    if isinstance(tokens, int | np.integer):
        return max(0, -(-int(tokens) // page_size))
    tokens = jnp.asarray(tokens)
    is_integer = jnp.issubdtype(tokens.dtype, jnp.integer)
    expect(is_integer, "tokens", "an integer dtype", f"dtype {tokens.dtype.name}")
    tokens = jnp.maximum(tokens, jnp.zeros((), tokens.dtype))
    # Not (tokens + page_size - 1) // page_size, which overflows near the end of the dtype.
    return tokens // page_size + (tokens % page_size != 0).astype(tokens.dtype)
