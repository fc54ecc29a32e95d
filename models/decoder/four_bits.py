# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits of a decoder: as the checkpoint has them, or rounded, and over a mesh.

A device gets whole panels of 16 outputs, and whole groups of the depth. What a checkpoint stores
in 4 bits is read whole by each process, put in the order of the devices, and then split.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged import Int4Weight, quantize_int4
from jax_paged.checks import expect
from jax_paged.ops.int4 import CENTER
from jax_paged.ops.packing import PANEL

from .parameters import TensorSource
from .partition import Partition, put


def stored(
    source: TensorSource, names: Sequence[str], leaf: str, partition: Partition | None, *,
    axis: int = 0, order: np.ndarray | None = None, slots: np.ndarray | None = None,
) -> Int4Weight | None:  # fmt: skip
    """Joined tensors that a source has in 4 bits; None: it has not.

    Args:
      leaf: their name in a decoder.
      axis, order, slots: as for `Partition.read`.

    Raises:
      ValueError: a device would get a part of a panel or of a group.
    """
    of_source: Any = getattr(source, "int4", None)
    if of_source is None:
        return None
    first = of_source(*names)
    if first is None or partition is None:
        return first
    parts = [_arranged(names[0], first, order, slots)]
    for own in partition.of_later_stages(leaf, names):
        if own is None:  # a layer of zeros
            parts.append(jax.tree.map(_zeros, parts[0]))
            continue
        part = of_source(*own)
        if part is None:
            part = rounded(source(*own, axis=axis, dtype=jnp.float32))
        parts.append(_arranged(own[0], part, order, slots))
    whole = _joined(parts)
    return jax.tree.map(put, whole, _places(leaf, names[0], whole, partition))


def rounded(
    value: Any, leaf: str = "", name: str = "", partition: Partition | None = None
) -> Int4Weight:
    """An array rounded to 4 bits, or the shapes of that; over a mesh it lies as its leaf does.

    Args:
      name: of the tensor in the checkpoint.

    Raises:
      ValueError: as for `stored`.
    """
    is_shapes = isinstance(value, jax.ShapeDtypeStruct)
    shapes = jax.eval_shape(quantize_int4, value)
    if partition is None:
        return shapes if is_shapes else quantize_int4(value)
    places = _places(leaf, name, shapes, partition)
    if is_shapes:
        return jax.tree.map(put, shapes, places)
    return jax.jit(quantize_int4, out_shardings=places)(value)


def _places(leaf: str, name: str, weight: Int4Weight, partition: Partition) -> Int4Weight:
    """The shardings of a weight, whose every device gets whole panels and groups."""
    place: Any = partition.sharding(leaf, weight.ndim)
    whole, own = weight.shape[-2:], place.shard_shape(weight.shape)[-2:]
    for size, part, unit in zip(whole, own, (PANEL, weight.group), strict=True):
        what = f"parts of multiples of {PANEL} rows and {weight.group} columns, for 4 bits"
        expect(part == size or part % unit == 0, name, what, f"{size} split as {part}")
    return Int4Weight(place, place)


def _arranged(
    name: str, weight: Int4Weight, order: np.ndarray | None, slots: np.ndarray | None
) -> Int4Weight:
    """With the rows of a matrix in another order, or experts in their slots."""
    which = slots
    if order is not None:
        which = order[::PANEL] // PANEL
        rows = (PANEL * which[:, None] + np.arange(PANEL)).ravel()
        ok = np.array_equal(rows, order)
        expect(ok, name, f"heads and parts of multiples of {PANEL} rows, for 4 bits", "others")
    if which is None:
        return weight
    return _evaluated(lambda x: jax.tree.map(lambda leaf: leaf[which], x), weight)


def _joined(parts: list[Int4Weight]) -> Int4Weight:
    """One behind the other along the first axis, which stages share."""
    if len(parts) == 1:
        return parts[0]
    dtype = max((part.scales.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    alike = functools.partial(_as, any(part.has_offsets for part in parts), dtype)
    return _evaluated(
        lambda parts: jax.tree.map(lambda *x: jnp.concatenate(x), *map(alike, parts)), parts
    )


def _as(has_offsets: bool, dtype: Any, weight: Int4Weight) -> Int4Weight:
    """The same weight with scales of a dtype, and perhaps with offsets that say what it lacked."""
    scales = weight.scales.astype(dtype)
    if has_offsets and not weight.has_offsets:
        scales = jnp.stack([scales, -CENTER * scales], axis=-2)
    return Int4Weight(weight.codes, scales)


def _evaluated(function: Any, argument: Any) -> Any:
    """function(argument), or the shapes of that."""
    leaves = jax.tree.leaves(argument)
    is_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    return jax.eval_shape(function, argument) if is_shapes else function(argument)


def _zeros(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.zeros(x.shape, x.dtype)
