# SPDX-License-Identifier: Apache-2.0
"""The engine's programs for all replicas of a mesh at once.

Each replica has rows and pages of its own; a step of all is one program. Its arguments and results
are those of one replica, stacked: arrays have a leading axis of replicas, split over "dp". Pools
alone do not: their pages lie one after another along the axis of pages, because XLA would copy a
pool to take an axis in front of it off.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..decoder.partition import DP, Partition, put

STACKED = P(DP)  # an argument or result of each replica
GATHERED = "gathered"  # a result of all replicas, stacked, that every process can read


def over_replicas(
    partition: Partition, program: Callable[..., Any], takes: Sequence[Any], gives: Any
) -> Callable[..., Any]:
    """`program`, of one replica, as one of all replicas.

    Args:
      takes: for each argument its splits: a pytree of `PartitionSpec`, or one for all its leaves.
      gives: those of the result, where GATHERED may stand as well.
    """

    def local(*args):
        own = (_strip(split, x) for split, x in zip(takes, args, strict=True))
        return _stack(gives, program(*own))

    out_specs = jax.tree.map(lambda s: P() if s is GATHERED else s, gives, is_leaf=_is_split)
    return jax.shard_map(
        local, mesh=partition.mesh, in_specs=tuple(takes), out_specs=out_specs, check_vma=False
    )


def stacked(each: Sequence[Any]) -> Any:
    """The arguments of all replicas, pytrees of numpy arrays, as one."""
    return jax.tree.map(lambda *x: np.stack(x), *each)


def placed(partition: Partition, x: Any) -> Any:
    """Stacked arguments on the devices, as the program takes them."""
    sharding = NamedSharding(partition.mesh, STACKED)
    return jax.tree.map(lambda leaf: put(leaf, sharding), x)


def _strip(splits: Any, args: Any) -> Any:
    def of_leaf(split, x):
        return jax.tree.map(lambda y: y[0], x) if split == STACKED else x

    return jax.tree.map(of_leaf, splits, args, is_leaf=_is_split)


def _stack(splits: Any, results: Any) -> Any:
    def of_leaf(split, x):
        if split is GATHERED:
            return jax.tree.map(lambda y: jax.lax.all_gather(y, DP), x)
        return jax.tree.map(lambda y: y[None], x) if split == STACKED else x

    return jax.tree.map(of_leaf, splits, results, is_leaf=_is_split)


def _is_split(x: Any) -> bool:
    return isinstance(x, P) or x is GATHERED
