# SPDX-License-Identifier: Apache-2.0
"""Rows of an array set in place, or copied, of any dtype: what moves pages and tokens of a pool.

XLA:CPU knows no scatter of bf16 and 8-bit floats: it would convert the whole pool to a wider dtype
and back, whatever the number of rows. There a native op copies bytes.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_paged.native import load
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import WHOLE, Split
from jax_paged.ops.fold import every, flat_rows, fold_rows

TARGET = "jax_paged.scatter_rows.v1"
COPY_TARGET = "jax_paged.copy_rows.v1"


@jax.custom_jvp
def scatter_rows(pool: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """pool[rows[i]] ← values[i], the pool's leading axes counted as one: those values[i] has not.

    rows is i32; one out of range is skipped, none may be named twice. In place where the pool is
    donated. Without native code, and on other platforms than CPU, it is XLA's scatter. Over several
    devices the axes of values but its first may be split: each device sets its part of the rows.
    """
    return _native_scatter(values.ndim - 1)(pool, rows, values)


@scatter_rows.defjvp
def _jvp(primals, tangents):
    return jax.jvp(_scatter, primals, tangents)


@functools.cache
def _native_scatter(num_of_row: int):
    def axes(pool):
        of_pool, of_row = _axes(pool.ndim, pool.ndim - num_of_row)
        return {"pool": of_pool, "rows": WHOLE, "values": f"{WHOLE} {of_row}".strip()}

    def fold(pool, rows, values):
        (rows,) = fold_rows(pool, pool.ndim - 1 - num_of_row, (rows,))
        return _native_scatter(num_of_row)(pool, rows, flat_rows(values, 2))

    return _in_place(TARGET, _scatter, axes, fold)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def copy_rows(pool: jax.Array, leading: int, target: jax.Array, source: jax.Array) -> jax.Array:
    """pool[target[i]] ← pool[source[i]], its `leading` axes counted as one; all read as they were.

    target and source are i32; a pair with a row out of range is skipped, and no row may be named
    twice in target. In place where the pool is donated. Without native code, and on other platforms
    than CPU, XLA gathers and scatters a row for each pair, skipped ones too. Over several devices
    the other axes may be split.
    """
    return _native_copy(leading)(pool, target, source)


@copy_rows.defjvp
def _jvp_of_copy(leading, primals, tangents):
    return jax.jvp(functools.partial(_copy, leading), primals, tangents)


@functools.cache
def _native_copy(leading: int):
    def axes(pool):
        return {"pool": _axes(pool.ndim, leading)[0], "target": WHOLE, "source": WHOLE}

    def fold(pool, *rows):
        return _native_copy(leading + 1)(pool, *fold_rows(pool, leading, rows))

    return _in_place(COPY_TARGET, functools.partial(_copy, leading), axes, fold, leading=leading)


def _copy(leading, pool, target, source):
    flat = flat_rows(pool, leading)
    valid = (source >= 0) & (source < flat.shape[0])
    # XLA:GPU would read rows inside of the scatter, which cannot be in place then.
    rows = jax.lax.optimization_barrier(flat[jnp.where(valid, source, 0)])
    return _scatter(pool, jnp.where(valid, target, -1), rows)


def _axes(ndim: int, leading: int) -> tuple[str, str]:
    """The names of a pool's axes, of which the leading ones are whole, and those of its rows."""
    of_row = [f"axis_{i}" for i in range(leading, ndim)]
    return " ".join([WHOLE] * leading + of_row), " ".join(of_row)


def _in_place(
    target: str, reference: Callable[..., jax.Array],
    axes: Callable[[jax.Array], dict[str, str]], fold: Callable[..., jax.Array], **attributes: int,
):  # fmt: skip
    """`reference`, which changes rows of its first operand, by the native op where there is one.

    fold: the same of operands with a batch axis in front. A pool that elements share is repeated.
    """

    @custom_vmap
    def update(pool, first, second):
        names = axes(pool)
        (out,) = ffi_call(
            target,
            (pool, first, second),
            attributes,
            split=Split(names, results=(names["pool"],), fixed=("pool",)),
            aliases={0: 0},
            implementation=None if target in load.targets("_cpu") else "reference",
            reference=lambda *operands: (reference(*operands),),
        )
        return out

    @update.def_vmap
    def _(batch, in_batched, *operands):
        pairs = zip(operands, in_batched, strict=True)
        return fold(*(every(x, is_batched, batch) for x, is_batched in pairs)), True

    return update


def in_each_layer(num_layers: int, num_rows: int, index: jax.Array) -> jax.Array:
    """[num_layers, …], which of the flat rows row `index` of each layer is."""
    return jnp.arange(num_layers, dtype=jnp.int32)[:, None] * num_rows + index[None]


def _scatter(pool, rows, values):
    flat = flat_rows(pool, pool.ndim - values.ndim + 1)
    rows = jnp.where(rows < 0, flat.shape[0], rows)
    return flat.at[rows].set(values, mode="drop").reshape(pool.shape)
