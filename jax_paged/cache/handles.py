# SPDX-License-Identifier: Apache-2.0
"""Handles of rows, which know when their row was released: verbs of `PageTable`.

A row id may come back with another sequence. A handle holds the row's generation too, which every
release of the row raises: so it goes stale for good, and `rows_of` gives STALE for it, an id that
every verb reports as STALE_ROW. The verbs themselves take row ids alone, so a step pays for no
check that it does not ask for.
"""

import jax
import jax.numpy as jnp

from jax_paged.cache.table import STALE, Integers, Table, check_rows
from jax_paged.checks import INT32_MAX


def handles(table: Table, rows: Integers) -> jax.Array:
    """Handles of rows for `rows_of`, good until the row is released.

    That of a free row is good for its next sequence.

    Args:
      rows: integers [N].

    Returns:
      i32[N], -1 for a row of -1, and STALE (-2) for what is no row.

    Raises:
      ValueError: a shape or dtype is wrong.

    >>> from jax_paged import PageTable
    >>> table = PageTable.create(num_pages=4, max_seqs=2, pages_per_seq=4, page_size=16)
    >>> table, _ = table.reserve([1], 20)
    >>> held = table.handles([1])
    >>> table, status = table.release(table.rows_of(held))
    >>> table, _ = table.reserve([1], 20)  # somebody else's
    >>> table, again = table.release(table.rows_of(held))
    >>> print(status, table.rows_of(held), again)
    [0] [-2] [4]
    """
    return _handles(table, check_rows("rows", rows))


@jax.jit
def _handles(table, rows):
    inside = (rows >= 0) & (rows < table.max_seqs)
    generation = table.generations[jnp.where(inside, rows, 0)]
    none = jnp.where(rows == -1, -1, STALE)
    return jnp.where(inside, generation * table.max_seqs + rows, none)


def rows_of(table: Table, handles: Integers) -> jax.Array:
    """The rows of handles, for the verbs; STALE (-2) where the row has been released since.

    Args:
      handles: integers [N], of this table. The row of -1 is -1.

    Returns:
      i32[N].

    Raises:
      ValueError: a shape or dtype is wrong.

    A generation comes back after 2**31 / max_seqs releases of the row.
    """
    return _rows_of(table, check_rows("handles", handles))


@jax.jit
def _rows_of(table, handles):
    row = jnp.maximum(handles, 0) % table.max_seqs
    is_good = (handles >= 0) & (table.generations[row] == handles // table.max_seqs)
    return jnp.where(is_good, row, jnp.where(handles == -1, -1, STALE))


def next_generation(generation: jax.Array, max_seqs: int) -> jax.Array:
    """The generation after a release, so small that every handle fits i32."""
    return (generation + 1) % (INT32_MAX // max_seqs)
