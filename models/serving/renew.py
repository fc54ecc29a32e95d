# SPDX-License-Identifier: Apache-2.0
"""New weights for a running engine: checked, and put into the place of the old ones."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_paged import PackedWeight
from jax_paged.checks import expect
from jax_paged.ops.packing import pack

from ..decoder.model import Decoder
from ..decoder.protocol import Graph, split_model

_PANELS = ".panels"  # what the names of packed weights end with


def checked_weights(weights: Any, graph: Graph, params: Any) -> Any:
    """The arrays of `weights`, a model or a pytree of arrays, as the params of the same structure.

    Arrays for weights that the params have packed are packed, and so is the head that a tied model
    has of the embedding.

    Raises:
      ValueError: a leaf is missing, too much, or of another shape or dtype; it is named.
    """
    known = jax.tree_util.tree_leaves_with_path(params)
    wanted = {jax.tree_util.keystr(at): x for at, x in known}
    if hasattr(weights, "config"):
        if isinstance(weights, Decoder) and any(name.endswith(_PANELS) for name in wanted):
            weights = weights.packed()
        other, weights = split_model(weights, "weights")
        expect(other == graph, "weights", "a model like the engine's", "one of another structure")
    given = jax.tree_util.tree_leaves_with_path(weights)
    got = _with_panels({jax.tree_util.keystr(at): x for at, x in given}, wanted)
    for name in wanted:
        expect(name in got, "weights", f"an array at {name}", "none")
    for name, x in got.items():
        expect(name in wanted, "weights", f"{len(wanted)} arrays", f"another one at {name}")
        _check_kind(name, wanted[name], x)
    same = jax.tree.structure(weights) == jax.tree.structure(params)
    leaves = jax.tree.leaves(weights) if same else [got[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _check_kind(name: str, wanted: Any, got: Any) -> None:
    mine, theirs = (f"{jnp.result_type(x).name}{list(jnp.shape(x))}" for x in (wanted, got))
    expect(mine == theirs, f"weights at {name}", mine, theirs)


def _with_panels(got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The leaves by name; where panels are wanted, those of an array, and of a tied head."""
    found = dict(got)
    for name, panels in wanted.items():
        plain = name.removesuffix(_PANELS)
        if name in got or plain == name:
            continue
        x = found.pop(plain, got.get(plain.replace("['head']", "['embedding']")))
        if x is not None:
            like = PackedWeight(panels)
            _check_kind(plain, jax.ShapeDtypeStruct(like.shape, like.dtype), x)
            found[name] = pack(x)
    return found


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
