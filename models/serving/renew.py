# SPDX-License-Identifier: Apache-2.0
"""New weights for a running engine: checked, and put into the place of the old ones."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_paged.checks import expect

from ..decoder.protocol import Graph, split_model


def checked_weights(weights: Any, graph: Graph, params: Any) -> Any:
    """The arrays of `weights`, a model or a pytree of arrays, as the params of the same structure.

    Raises:
      ValueError: a leaf is missing, too much, or of another shape or dtype; it is named.
    """
    if hasattr(weights, "config"):
        other, weights = split_model(weights, "weights")
        expect(other == graph, "weights", "a model like the engine's", "one of another structure")
    known, given = (jax.tree_util.tree_leaves_with_path(x) for x in (params, weights))
    wanted, got = (dict((jax.tree_util.keystr(at), x) for at, x in y) for y in (known, given))
    for name in wanted:
        expect(name in got, "weights", f"an array at {name}", "none")
    for name, x in got.items():
        expect(name in wanted, "weights", f"{len(wanted)} arrays", f"another one at {name}")
        mine, theirs = (f"{jnp.result_type(y).name}{list(jnp.shape(y))}" for y in (wanted[name], x))
        expect(mine == theirs, f"weights at {name}", mine, theirs)
    same = jax.tree.structure(weights) == jax.tree.structure(params)
    leaves = jax.tree.leaves(weights) if same else [got[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def renewed(old: Any, new: Any, *, copy: bool, may_write: bool) -> Any:
    """Params with the values of `new` that lie where those of `old` do.

    Args:
      copy: whether they are arrays of their own.
      may_write: whether they may be in the memory of `old`, which is gone then.
    """
    new = jax.tree.map(_where, new, old)
    if not copy:
        return new
    return copied_into(old, new) if may_write else _copied(new)


def _where(x: Any, like: jax.Array) -> jax.Array:
    is_there = isinstance(x, jax.Array) and x.sharding == like.sharding
    return x if is_there else jax.device_put(x, like.sharding)


@jax.jit
def _copied(new: Any) -> Any:
    return jax.tree.map(jnp.copy, new)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def copied_into(old: Any, new: Any) -> Any:
    """Copies of `new` in the memory of `old`, which is gone then."""
    del old
    return jax.tree.map(jnp.copy, new)
