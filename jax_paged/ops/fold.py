# SPDX-License-Identifier: Apache-2.0
"""What vmap makes of ops that change pools in place: the pools of a batch are one larger pool."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_paged.checks import INT32_MAX
from jax_paged.layout import Layout, pages_rank


def every(x: jax.Array, is_batched: bool, batch: int) -> jax.Array:
    """x with the batch axis in front."""
    return x if is_batched else jnp.broadcast_to(x, (batch, *x.shape))


def flat_rows(pool: jax.Array, leading: int) -> jax.Array:
    """The pool with so many leading axes as one."""
    return pool.reshape(math.prod(pool.shape[:leading]), *pool.shape[leading:])


def write_of_each(
    op: str,
    native: Callable[..., Any],
    layout: Layout,
    operands: Sequence[str],
    results: Sequence[str],
) -> Callable[..., Any]:
    """A native write of tokens that vmap runs for one element after another, each with own pages.

    Elements are layers of one pool, which a loop carries. One call for all tokens would need the
    batch as pages, and XLA copies a pool that is reshaped before it is updated in place.

    operands, results: their names; the last results may be left out. A result that has the name of
      an operand is a pool, unless that is none: None, or a scale that is given.
    """
    call = custom_vmap(native)

    @call.def_vmap
    def each(batch, in_batched, *given):
        x, is_batched = (dict(zip(operands, y, strict=True)) for y in (given, in_batched))
        pools = {
            name: x[name]
            for name in results
            if (have := x.get(name)) is not None and have.ndim - is_batched[name] >= 3
        }
        for name in pools:
            if not is_batched[name]:
                raise NotImplementedError(
                    f"{op}: vmap: {name}: expected a pool for each element, got one, which all "
                    "would write; put the tokens of all elements into one call, or use "
                    "implementation='reference'"
                )
        stacked = x["k_pages"].ndim == pages_rank(layout, "k") + 2
        num_layers = x["k_pages"].shape[1] if stacked else 1
        flat = {name: flat_rows(pool, 2) if stacked else pool for name, pool in pools.items()}
        own = {name: x[name] for name in operands if is_batched[name] and name not in pools}

        def write_one(pages, element):
            index, own = element
            now = x | pages | own
            layer = now["layer"]
            has_layer = (layer >= 0) & (layer < num_layers)
            now["layer"] = jnp.where(has_layer, index * num_layers + layer, -1)
            out = dict(zip(results, call(*(now[name] for name in operands)), strict=False))
            return {name: out.pop(name) for name in pages}, out

        written, rest = jax.lax.scan(write_one, flat, (jnp.arange(batch, dtype=jnp.int32), own))
        found = rest | {name: x.reshape(pools[name].shape) for name, x in written.items()}
        out = tuple(found[name] for name in results if name in found)
        return out, tuple(None if y is None else True for y in out)

    return call


def fold_rows(pool: jax.Array, leading: int, indices: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """[batch, n] rows of each element's pool, whose leading axes count as one, as rows of all.

    One out of range becomes −1, which ops skip: none lands in the pool of another element.
    """
    batch, size = pool.shape[0], math.prod(pool.shape[1 : 1 + leading])
    if batch * size > INT32_MAX:
        raise NotImplementedError(
            "vmap: the pools of all elements must have fewer than 2^31 places, "
            f"got {batch} of {size}"
        )
    begins = jnp.arange(batch, dtype=jnp.int32)[:, None] * size
    return tuple(
        jnp.where((index >= 0) & (index < size), begins + index, -1).reshape(-1)
        for index in indices
    )
