# SPDX-License-Identifier: Apache-2.0
"""The first values of a model's weights, which tell one checkpoint from another."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..decoder.partition import Partition

_COUNT = 4
_LAYER = re.compile(r"(?<=layers'\]\[)\d+(?=\])")


def corners_of(params: Any, partition: Partition | None) -> dict[str, np.ndarray]:
    """The first values of each array as f32, by its name in a model that no mesh splits.

    However an array is split over the devices of a stage, the first one has them. Where there are
    several stages, all processes call it: the first devices of the stages tell the others.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    if partition is None or partition.pp == 1:
        firsts = [x.addressable_data(0) if isinstance(x, jax.Array) else x for _, x in leaves]
        values = jax.device_get([_corner(x) for x in firsts])
        return {name: np.asarray(x) for name, x in zip(names, values, strict=True)}

    def of_stages(params):
        own = jnp.stack([_corner(x) for x in jax.tree.leaves(params)])
        return jax.lax.all_gather(own, partition.mesh.axis_names)

    program = jax.shard_map(
        of_stages, mesh=partition.mesh, in_specs=(partition.specs(params),), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    each = np.asarray(jax.jit(program)(params)).reshape(partition.pp, -1, len(names), _COUNT)[:, 0]
    found = {}
    for name, of_stage in zip(names, each.swapaxes(0, 1), strict=True):
        layer = _LAYER.search(name)
        if layer is None:  # all stages have it
            found[name] = of_stage[0]
            continue
        for stage, values in enumerate(of_stage):
            number = int(layer[0]) + stage * partition.num_layers
            if number < partition.model_layers:
                found[_LAYER.sub(str(number), name)] = values
    return found


def _corner(x: Any) -> Any:
    """The first values of an array, [_COUNT]."""
    few = jnp.ravel(x[(0,) * (x.ndim - 1)] if x.ndim else x)[:_COUNT].astype(jnp.float32)
    return jnp.pad(few, (0, _COUNT - few.size))
