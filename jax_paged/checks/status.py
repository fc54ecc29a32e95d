# SPDX-License-Identifier: Apache-2.0
"""The statuses of verbs, and `jax_paged.check`: one that is not OK becomes an error."""

import enum

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import ArrayLike

from jax_paged.checks import expect


class Status(enum.IntEnum):
    """What a verb reports for each row."""

    OK = 0
    POOL_FULL = 1  # not enough free pages for this row and those before it
    # More tokens than a row can have (reserve), or than it has reserved, or than its tree can have
    # (step).
    ROW_FULL = 2
    BAD_ROW = 3  # an id out of range or given twice, or what makes no sense for the row
    STALE_ROW = 4  # the row is not live, or its handle is of an earlier sequence
    UNCOMMITTED_TREE = 5  # the row has a tree, which `commit_tree` must settle first
    GAP = 6  # tokens before these have not come (transfer.receive)
    SLID_OUT = 7  # tokens that the call needs have left the row's window, and are gone


_MEANING = {
    Status.POOL_FULL: "no free page is left in the pool",
    Status.ROW_FULL: "more tokens than a row, its reservation or its tree can have",
    Status.BAD_ROW: "an id out of range or given twice, or an argument that does not fit the row",
    Status.STALE_ROW: "the row is not live, or its handle is of an earlier sequence",
    Status.UNCOMMITTED_TREE: "the row has a tree, which commit_tree must settle first",
    Status.GAP: "tokens before these have not come",
    Status.SLID_OUT: "tokens that the call needs have left the row's window",
}


def code(status: Status) -> jax.Array:
    """A status as an i32 scalar."""
    return jnp.int32(int(status))


def check(status: ArrayLike, rows: ArrayLike | None = None) -> None:
    """Raises an error where the status of a row is not `Status.OK`.

    Outside of `jit` it waits for the status. Under `jit` a program cannot raise: there the call
    costs nothing and does nothing, unless the program is run through
    `jax.experimental.checkify.checkify`, whose error then says the same of the first such row.

    Args:
      status: integers [N] or a scalar, as the verbs return it.
      rows: integers [N], ids to name rows by; None = their place in `status`.

    Raises:
      ValueError: a row is not OK; the text names all such rows. Or rows and status differ in shape.

    >>> import jax_paged as jp
    >>> table = jp.PageTable.create(2, 4, pages_per_seq=8, page_size=16)
    >>> table, status = table.reserve([0, 1], 20)
    >>> jp.check(status)
    Traceback (most recent call last):
    ValueError: status: expected OK, got POOL_FULL for row 1 (no free page is left in the pool)
    """
    values = jnp.ravel(jnp.asarray(status))
    names = jnp.arange(values.size) if rows is None else jnp.ravel(jnp.asarray(rows))
    expect(names.shape == values.shape, "rows", f"shape {list(values.shape)}", list(names.shape))
    if isinstance(values, jax.core.Tracer) or isinstance(names, jax.core.Tracer):
        _check_traced(values, names)
        return
    found = np.asarray(values)
    parts = []
    for kind in sorted(set(found[found != Status.OK].tolist())):
        where = ", ".join(map(str, np.asarray(names)[found == kind]))
        label = f"row {where}" if "," not in where else f"rows {where}"
        if kind in _MEANING:
            parts.append(f"{Status(kind).name} for {label} ({_MEANING[Status(kind)]})")
        else:
            parts.append(f"{kind}, which is no status, for {label}")
    if parts:
        raise ValueError(f"status: expected OK, got {'; '.join(parts)}")


def _check_traced(values: jax.Array, names: jax.Array) -> None:
    for kind, meaning in _MEANING.items():
        if values.size:
            is_kind = values == int(kind)
            checkify.debug_check(
                ~jnp.any(is_kind),
                f"status: expected OK, got {kind.name} for row {{row}} ({meaning})",
                row=names[jnp.argmax(is_kind)],
            )
