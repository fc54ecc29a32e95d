# SPDX-License-Identifier: Apache-2.0
"""Pages of preempted requests in host memory: the programs that copy them out and back in.

A row is copied in chunks of a fixed number of pages, so that one program serves rows of any length.
Out: a gather of the chunk's pages in all layers, then a copy to page-locked host memory that nobody
waits for. In: a copy to the device, whose pages are then put in place. Stored values travel as they
are, 8-bit ones with their scales per token, and a draft model's with them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_paged.cache.page_table import PageTable
from jax_paged.cache.state import KVState
from jax_paged.checks import is_per_token
from jax_paged.ops.scatter_rows import flat_rows, in_each_layer, scatter_rows

from ..decoder.executables import compiled
from .handover import Piece
from .replicas import STACKED
from .step import EngineState

if TYPE_CHECKING:
    from .runner import ModelRunner

MOST_CHUNK_PAGES = 8

# k, v and scales per token: [num_layers, chunk_pages, …]; over a mesh, in host memory, for each a
# dict of what devices have of it.
Chunk = tuple[Any, ...]


def chunk_pages(pages_per_seq: int) -> int:
    """Pages of a chunk."""
    return min(MOST_CHUNK_PAGES, pages_per_seq)


def _pools(state: KVState | None) -> tuple[Any, ...]:
    """All that lies by layer and page."""
    if state is None:
        return ()
    per_token = is_per_token(state.k_scale)
    scales = (state.k_scale, state.v_scale) if per_token else ()
    pools = (state.k_pages, state.v_pages, *scales)
    return tuple(pool for pool in pools if pool is not None)  # latent rows are one pool


def _pages(table: PageTable, row, first, count: int) -> tuple[jax.Array, jax.Array]:
    """The pages in columns first … of a row, 0 where there is none; and whether there is one."""
    column = first + jnp.arange(count, dtype=jnp.int32)
    page = table.page_table[row, jnp.minimum(column, table.pages_per_seq - 1)]
    exists = (column < table.pages_per_seq) & (page >= 0)
    return jnp.where(exists, page, 0), exists


def _places(pool: jax.Array, page: jax.Array) -> jax.Array:
    """Where pages lie in a flat pool: [num_layers, pages]."""
    num_layers, num_pages = pool.shape[:2]
    return in_each_layer(num_layers, num_pages, page)


@functools.partial(jax.jit, static_argnames="count")
def copy_out(device: EngineState, row: jax.Array, first: jax.Array, *, count: int) -> Chunk:
    """The pages in columns first … first + count − 1 of a row, of both models."""
    page, _ = _pages(device.state.table, row, first, count)
    pools = (*_pools(device.state), *_pools(device.drafter))
    return tuple(flat_rows(pool, 2)[_places(pool, page)] for pool in pools)


@functools.partial(jax.jit, donate_argnames="device")
def copy_in(
    device: EngineState, row: jax.Array, first: jax.Array, begin: jax.Array, chunk: Chunk
) -> EngineState:
    """Sets the pages of a row that `copy_out` gave, but for columns before `begin`."""
    count = chunk[0].shape[1]
    page, exists = _pages(device.state.table, row, first, count)
    exists &= first + jnp.arange(count, dtype=jnp.int32) >= begin

    def put(pool, stored):
        places = jnp.where(exists[None], _places(pool, page), -1).ravel()
        return scatter_rows(pool, places, flat_rows(stored, 2))

    own, drafters = _pools(device.state), _pools(device.drafter)
    pools = tuple(put(*pair) for pair in zip((*own, *drafters), chunk, strict=True))
    drafter = device.drafter
    if drafter is not None:
        drafter = drafter.with_pages(0, *pools[len(own) :])
    state = device.state.with_pages(0, *pools[: len(own)])
    return dataclasses.replace(device, state=state, drafter=drafter)


class Swapper:
    """Copies rows of an engine's state to host memory and back, with programs compiled ahead.

    Over a mesh the programs run on all replicas; only what a row's own devices have is copied. What
    is copied out lies here under a number.

    Args:
      runner: the engine's, with the state; a copy back changes that.
    """

    def __init__(self, runner: "ModelRunner"):
        self._runner, splits = runner, runner.splits
        self._chunks: dict[int, list[Chunk]] = {}
        self._count = chunk_pages(runner.table.pages_per_seq)
        pools = (*_pools(runner.device.state), *_pools(runner.device.drafter))
        self._shardings = [x.sharding for x in pools]
        num_own = len(_pools(runner.device.state))
        self._of = [runner.partitions[i >= num_own] for i in range(len(pools))]
        self._copies = [1 if one is None else one.kv_copies for one in self._of]
        self._shapes = tuple(
            jax.ShapeDtypeStruct(
                (x.shape[0], self._count * runner.num_replicas, *x.shape[2:]), x.dtype,
                sharding=None if splits is None else x.sharding,
            )
            for x in pools
        )  # fmt: skip
        chunk = tuple(getattr(sharding, "spec", None) for sharding in self._shardings)
        row, first = self._of_row(0, 0, 0), np.int32(0)
        self._out = runner.compiled(
            copy_out, runner.device, row, first, takes=(splits, STACKED, P()), gives=chunk,
            count=self._count,
        )  # fmt: skip
        self._in = runner.compiled(
            copy_in, runner.device, row, first, row, self._shapes,
            takes=(splits, STACKED, P(), STACKED, chunk), gives=splits,
        )  # fmt: skip
        # Where no device of this process has all layers of a page, or another process has some.
        self._gather: Any = None
        own, is_here = runner.partition, self._shardings[0].is_fully_addressable
        if own is not None and (own.pp > 1 or not is_here):
            whole = NamedSharding(own.mesh, P())
            self._gather = compiled(jax.jit(_same, out_shardings=whole), self._shapes)

    @property
    def programs(self) -> tuple[Any, Any]:
        """Out and in, compiled."""
        return self._out, self._in

    @property
    def page_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of a page in each pool, with all heads of the model: [num_layers, heads, …]."""
        shapes = []
        for x, copies, of in zip(self._shapes, self._copies, self._of, strict=True):
            num_layers = x.shape[0] if of is None else of.model_layers
            shape = num_layers, x.shape[2] // copies, *x.shape[3:]
            shapes.append(jax.ShapeDtypeStruct(shape, x.dtype))
        return shapes

    def out(self, replica: int, row: int, num_pages: int, number: int) -> None:
        """Starts to copy the first pages of a row; they may be freed at once."""
        rows = self._of_row(replica, row, 0)
        self._chunks[number] = [
            self._to_host(replica, self._out(self._runner.device, rows, np.int32(first)))
            for first in range(0, num_pages, self._count)
        ]

    def back(self, replica: int, row: int, begin: int, number: int) -> None:
        """Starts to copy what lies under a number into a row, but for columns before `begin`."""
        chunks, rows = self._chunks[number], self._of_row(replica, row, 0)
        begins = self._of_row(replica, begin, self._runner.table.pages_per_seq)
        for i in range(begin // self._count, len(chunks)):
            chunk, first = self._to_device(replica, chunks[i]), np.int32(i * self._count)
            self._runner.device = self._in(self._runner.device, rows, first, begins, chunk)

    def pieces(self, replica: int, number: int, num_pages: int) -> list[Piece]:
        """What lies under a number, without what is behind so many pages; waits for the copies.

        Of heads that several devices have, it is that of one of them.
        """
        found: dict[tuple[int, int, int], Piece] = {}
        for i, chunk in enumerate(self._chunks[number]):
            page = i * self._count
            if self._gather is not None:
                chunk = self._whole(replica, self._runner.gather(replica, number, i))
            for pool, x in enumerate(chunk):
                shards = x.items() if isinstance(x, dict) else [(None, x)]
                for device, values in shards:
                    first = 0 if device is None else self._places_of(pool)[device][2].start or 0
                    head = first // self._copies[pool]
                    own = np.asarray(values)[:, : num_pages - page]
                    found.setdefault((pool, page, head), Piece(pool, page, head, own))
        return [*found.values()]

    def gather(self, replica: int, number: int, i: int) -> Chunk:
        """Chunk i of what lies under a number, whole on each device of all processes."""
        return self._gather(self._to_device(replica, self._chunks[number][i]))

    def _whole(self, replica: int, gathered: Chunk) -> list[np.ndarray]:
        """A gathered chunk's pages of a replica: of each pool [num_layers, pages, heads, …]."""
        pages = slice(replica * self._count, (replica + 1) * self._count)
        of_pools = zip(gathered, self.page_shapes, self._copies, strict=True)
        return [np.asarray(x)[: like.shape[0], pages, ::copies] for x, like, copies in of_pools]

    def chunks_of(self, pools: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """All pages of a row, of each pool [num_layers, pages, heads, …], as `put` takes them."""
        for first in range(0, pools[0].shape[1], self._count):
            yield [x[:, first : first + self._count] for x in pools]

    def put(self, replica: int, number: int, *pools: np.ndarray) -> None:
        """Takes the next chunk of pages of a row, as if it were copied out.

        Args:
          pools: of each pool, with all heads of the model. They stay as they are from now on.
        """
        pairs = zip(pools, self._copies, strict=True)
        chunk = [np.repeat(x, copies, axis=2) if copies > 1 else x for x, copies in pairs]
        for i, x in enumerate(chunk):
            lacks = self._shapes[i].shape[0] - x.shape[0], self._count - x.shape[1]
            if any(lacks):
                chunk[i] = np.pad(x, [(0, n) for n in (*lacks, *[0] * (x.ndim - 2))])
        self._chunks.setdefault(number, []).append(self._in_host(replica, chunk))

    def forget(self, number: int) -> None:
        """Gives up what lies under a number, if anything has come there."""
        self._chunks.pop(number, None)

    def _of_row(self, replica: int, value: int, others: int) -> Any:
        """An argument for a row of one replica, with another value for the other replicas."""
        each = [np.int32(others)] * self._runner.num_replicas
        each[replica] = np.int32(value)
        return self._runner.of_all(each)

    def _places_of(self, pool: int) -> Mapping[Any, Any]:
        """The layers, pages, heads, … that devices have in a pool."""
        like = self._shapes[pool]
        return like.sharding.devices_indices_map(like.shape)

    def _in_host(self, replica: int, chunk: Sequence[np.ndarray]) -> Chunk:
        """A chunk of arrays with all layers and heads, for the devices of a replica."""
        if self._runner.partition is None:
            return jax.device_put(tuple(chunk), self._shardings[0].with_memory_kind("pinned_host"))
        here = self._devices_of(replica) & self._shapes[0].sharding.addressable_devices
        shards: list[dict[Any, Any]] = []
        for pool, x in enumerate(chunk):
            places = self._places_of(pool)
            parts = {device: x[places[device][0], :, places[device][2]] for device in here}
            shards.append(
                {
                    device: jax.device_put(
                        np.ascontiguousarray(part),
                        SingleDeviceSharding(device, memory_kind="pinned_host"),
                    )
                    for device, part in parts.items()
                }
            )
        return tuple(shards)

    def _devices_of(self, replica: int) -> set[Any]:
        assert self._runner.partition is not None
        return set(self._runner.partition.mesh.devices[..., replica, :].flat)

    def _to_host(self, replica: int, chunk: Chunk) -> Chunk:
        if self._runner.partition is None:
            return jax.device_put(chunk, chunk[0].sharding.with_memory_kind("pinned_host"))
        own = self._devices_of(replica)
        return tuple(
            {
                shard.device: jax.device_put(
                    shard.data, shard.data.sharding.with_memory_kind("pinned_host")
                )
                for shard in x.addressable_shards
                if shard.device in own
            }
            for x in chunk
        )

    def _to_device(self, replica: int, chunk: Chunk) -> Chunk:
        if self._runner.partition is None:
            return jax.device_put(chunk, self._shardings[0])
        whole = []
        for like, shards in zip(self._shapes, chunk, strict=True):
            nothing = np.zeros(like.sharding.shard_shape(like.shape), like.dtype)
            arrays = [
                jax.device_put(shards.get(device, nothing), _memory_of(device))
                for device in like.sharding.addressable_devices
            ]
            whole.append(
                jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)
            )
        return tuple(whole)


def _same(chunk: Chunk) -> Chunk:
    return chunk


def _memory_of(device: Any) -> SingleDeviceSharding:
    """Of several processes, one that names a device alone gets host memory in its place."""
    return SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
