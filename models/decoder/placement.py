# SPDX-License-Identifier: Apache-2.0
"""Where the experts of a layer lie: each device has some slots, and each slot has an expert.

Without redundant slots there is a slot for each expert; with some, busy experts lie in several
slots, and their tokens are shared out among these. Which expert is where is an array of the model,
not part of its program: experts move while an engine runs, and nothing is compiled again.
"""

import functools
import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_paged.ops.int4 import Int4Weight

if TYPE_CHECKING:
    from .partition import Partition

PLACES = "places"  # the leaf of a layer with experts: i32[experts, most slots of one], -1 = none


def first_slots(num_experts: int, num_slots: int) -> np.ndarray:
    """i32[num_slots], the expert of each slot, as long as nothing is known of their loads."""
    return np.arange(num_slots, dtype=np.int32) % num_experts


def as_places(slots: np.ndarray, num_experts: int) -> np.ndarray:
    """i32[num_experts, slots that one can have]: the slots of each expert, then -1."""
    most = len(slots) - num_experts + 1
    places = np.full((num_experts, most), -1, np.int32)
    have = np.zeros(num_experts, np.int32)
    for slot, expert in enumerate(slots):
        places[expert, have[expert]] = slot
        have[expert] += 1
    return places


def as_slots(places: np.ndarray, num_slots: int) -> np.ndarray:
    """i32[num_slots], the expert of each slot, of `as_places`."""
    slots = np.full(num_slots, -1, np.int32)
    expert, _ = np.nonzero(places >= 0)
    slots[places[places >= 0]] = expert
    return slots


def chosen_slots(places: jax.Array, x: jax.Array, experts: jax.Array) -> jax.Array:
    """i32[tokens, k]: a slot of each of the experts; -1 stays.

    Which one of several is drawn by the bits of the token's first value in x, [tokens, hidden]. So
    the tokens of an expert are spread over its slots, and where one goes does not depend on those
    beside it.
    """
    own = places[jnp.maximum(experts, 0)]
    slot = own[..., 0]
    if places.shape[1] > 1:
        bits = jax.lax.bitcast_convert_type(x[:, 0].astype(jnp.float32), jnp.uint32)
        drawn = (bits * jnp.uint32(2654435761) >> jnp.uint32(16)).astype(jnp.int32)
        count = jnp.sum(own >= 0, axis=-1, dtype=jnp.int32)
        number = drawn[:, None] % count
        slot = jnp.take_along_axis(own, number[..., None], axis=-1)[..., 0]
    return jnp.where(experts >= 0, slot, jnp.int32(-1))


def balanced_slots(loads: np.ndarray, num_slots: int, num_devices: int) -> np.ndarray:
    """i32[num_slots], an expert for each slot, so that devices have like loads.

    The free slots go, one after another, to the expert with the largest load per slot. Then, from
    the largest to the smallest, each goes to the device with the least load that has room, and that
    does not have the expert yet where there is such a one (longest processing time first, Graham
    1969).

    Args:
      loads: [experts], tokens that each has had.
      num_slots: at least one for each expert, and a multiple of num_devices.
    """
    loads = np.asarray(loads, np.float64)
    count = np.ones(len(loads), np.int64)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(loads)):
        _, expert = heap[0]
        count[expert] += 1
        heapq.heapreplace(heap, (-loads[expert] / count[expert], expert))
    shares = [(loads[e] / count[e], e) for e in range(len(loads)) for _ in range(count[e])]
    room = num_slots // num_devices
    own: list[list[int]] = [[] for _ in range(num_devices)]
    total = np.zeros(num_devices)
    for share, expert in sorted(shares, key=lambda pair: (-pair[0], pair[1])):
        free = [d for d in range(num_devices) if len(own[d]) < room]
        device = min(free, key=lambda d: (expert in own[d], total[d], len(own[d])))
        own[device].append(expert)
        total[device] += share
    return np.array([expert for experts in own for expert in sorted(experts)], np.int32)


def device_loads(loads: np.ndarray, slots: np.ndarray, num_devices: int) -> np.ndarray:
    """[num_devices], the tokens that each has of those of all experts."""
    loads = np.asarray(loads, np.float64)
    shares = loads / np.maximum(np.bincount(slots, minlength=len(loads)), 1)
    return shares[slots].reshape(num_devices, -1).sum(axis=1)


class Balance(NamedTuple):
    """What `Engine.rebalance` has done.

    before, after: the load of the busiest device over that of the mean one, of all layers together
      on average: 1 = even. `after` is that of the same tokens with the experts where they are now.
    moved: slots whose expert is another one now, of all layers.
    """

    before: float
    after: float
    moved: int


def moved(x: jax.Array, sources: Any, mesh: Mesh, axes: Sequence[str]) -> jax.Array:
    """[len(sources), …], split along its first axis: in slot i what slot sources[i] of x had.

    Devices pass on one of their slots at a time, so that little memory is needed beside the two.
    """
    return _mover(mesh, tuple(axes), len(sources))(x, jnp.asarray(sources, jnp.int32))


@functools.cache
def _mover(mesh: Mesh, axes: tuple[str, ...], num_slots: int) -> Any:
    num_devices = np.prod([mesh.shape[name] for name in axes], dtype=int)
    own = num_slots // int(num_devices)

    def local(x, sources):
        me = jax.lax.axis_index(axes).astype(jnp.int32)
        wanted = jax.lax.dynamic_slice_in_dim(sources, me * jnp.int32(own), own)
        bits = x.view(jnp.uint8) if x.dtype.itemsize == 1 else x

        def pass_on(i, out):
            every = jax.lax.all_gather(bits[i], axes)
            here = (wanted % len(x) == i).reshape(own, *(1,) * (x.ndim - 1))
            return jnp.where(here, every[wanted // len(x)], out)

        out = jnp.zeros((own, *x.shape[1:]), bits.dtype)
        out = jax.lax.fori_loop(0, len(x), pass_on, out)
        return out.view(x.dtype)

    split = P(axes)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(split, P()), out_specs=split, check_vma=False)
    )


class ExpertLayers:
    """The experts of a decoder's params, layer by layer.

    Args:
      params: as `split_model` gives them.
      partition: that of the decoder, with num_slots.
    """

    def __init__(self, params: Any, partition: "Partition"):
        self._partition = partition
        paths, self._tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_int4)
        self._leaves = [x for _, x in paths]
        self._places: dict[int, int] = {}  # of a layer, the number of its leaf
        self._stacks: dict[int, list[int]] = {}  # those with an axis of slots
        split = P(partition.expert_axes)
        for leaf, (path, x) in enumerate(paths):
            names = [getattr(key, "key", None) for key in path]
            if PLACES in names:
                self._places[_layer_of(names)] = leaf
            elif "mlp" in names and partition.spec(name_of(path), len(x.shape)) == split:
                self._stacks.setdefault(_layer_of(names), []).append(leaf)

    def slots(self, layer: int) -> np.ndarray:
        """i32[num_slots], the expert of each slot."""
        return as_slots(np.asarray(self._leaves[self._places[layer]]), self._num_slots)

    @property
    def _num_slots(self) -> int:
        assert self._partition.num_slots is not None
        return self._partition.num_slots

    def balanced(self, loads: np.ndarray) -> tuple[dict[int, np.ndarray], Balance]:
        """(the slots of layers that should change, what that would do); loads [layers, experts].

        A layer stays as it is where other slots would not make its busiest device faster.
        """
        num_devices = self._partition.num_expert_devices
        wanted, moved, peaks = {}, 0, np.zeros(2)
        for layer in self._places:
            old = self.slots(layer)
            new = balanced_slots(loads[layer], self._num_slots, num_devices)
            before, after = (device_loads(loads[layer], x, num_devices).max() for x in (old, new))
            if after < before:
                wanted[layer] = new
                moved += int((old != new).sum())
            peaks += before, min(before, after)
        mean = loads[list(self._places)].sum() / num_devices
        before, after = (peaks / mean if mean else np.ones(2)).tolist()
        return wanted, Balance(before, after, moved)

    def move(self, layer: int, slots: np.ndarray) -> None:
        """Puts the experts of a layer into other slots; it is done when this returns."""
        partition, old = self._partition, self.slots(layer)
        sources = _sources(old, slots, partition.num_expert_devices)
        leaves = self._stacks[layer]
        mesh, axes = partition.mesh, partition.expert_axes
        new = [
            jax.tree.map(lambda x: moved(x, sources, mesh, axes), self._leaves[leaf])
            for leaf in leaves
        ]
        jax.block_until_ready(new)
        for leaf, x in zip(leaves, new, strict=True):
            self._leaves[leaf] = x
        place = self._places[layer]
        self._leaves[place] = partition.places(slots, self._leaves[place].shape[0])

    def params(self) -> Any:
        """All of them, as they are now."""
        return jax.tree.unflatten(self._tree, self._leaves)


def _sources(old: np.ndarray, new: np.ndarray, num_devices: int) -> np.ndarray:
    """i32[slots]: for each of the new slots one of the old ones with its expert, near if any is."""
    device = np.arange(len(new)) // (len(new) // num_devices)
    found = np.zeros(len(new), np.int32)
    for slot, expert in enumerate(new):
        have = np.flatnonzero(old == expert)
        found[slot] = min(have, key=lambda s: (s != slot, device[s] != device[slot], s))
    return found


def _layer_of(names: Sequence[Any]) -> int:
    """The number behind "layers"."""
    return int(names[names.index("layers") + 1])


def is_int4(x: Any) -> bool:
    """Whether a node of a pytree is a weight of 4 bits, whose leaves lie as it does."""
    return isinstance(x, Int4Weight)


def name_of(path: Sequence[Any]) -> str:
    """The last name in the path of a leaf."""
    names = (key.key for key in reversed(path) if isinstance(getattr(key, "key", None), str))
    return next(names, "")
