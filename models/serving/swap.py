# SPDX-License-Identifier: Apache-2.0
"""Pages of preempted requests in host memory: the programs that copy them out and back in.

A row is copied in chunks of a fixed number of pages, so that one program serves rows of any length.
Out: a gather of the chunk's pages in all layers, then a copy to page-locked host memory that nobody
waits for. In: a copy to the device, whose pages are then put in place. Stored values travel as they
are, 8-bit ones with their scales per token, and a draft model's with them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.cache.page_table import PageTable
from jax_paged.cache.state import KVState
from jax_paged.checks import is_per_token
from jax_paged.ops.scatter_rows import flat_rows, in_each_layer, scatter_rows

from ..decoder.executables import compiled
from .step import EngineState

MOST_CHUNK_PAGES = 8

Chunk = tuple[Any, ...]  # k, v and scales per token: [num_layers, chunk_pages, …]


def chunk_pages(pages_per_seq: int) -> int:
    """Pages of a chunk."""
    return min(MOST_CHUNK_PAGES, pages_per_seq)


def _pools(state: KVState | None) -> tuple[Any, ...]:
    """All that lies by layer and page."""
    if state is None:
        return ()
    per_token = is_per_token(state.k_scale)
    scales = (state.k_scale, state.v_scale) if per_token else ()
    return (state.k_pages, state.v_pages, *scales)


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
    """Copies rows of an `EngineState` to host memory and back, with programs compiled ahead.

    Args:
      device: what the programs are compiled for.
      pages_per_seq: of its page table.
    """

    def __init__(self, device: EngineState, pages_per_seq: int):
        self._count = chunk_pages(pages_per_seq)
        zero = np.int32(0)
        self._out = compiled(copy_out, device, zero, zero, count=self._count)
        shapes = jax.eval_shape(functools.partial(copy_out, count=self._count), device, zero, zero)
        self._in = compiled(copy_in, device, zero, zero, zero, shapes)

    @property
    def programs(self) -> tuple[Any, Any]:
        """Out and in, compiled."""
        return self._out, self._in

    def out(self, device: EngineState, row: int, num_pages: int) -> list[Chunk]:
        """Starts to copy the first pages of a row; they may be freed at once."""
        chunks = []
        for first in range(0, num_pages, self._count):
            chunk = self._out(device, np.int32(row), np.int32(first))
            there = chunk[0].sharding.with_memory_kind("pinned_host")
            chunks.append(jax.device_put(chunk, there))
        return chunks

    def back(self, device: EngineState, row: int, begin: int, chunks: list[Chunk]) -> EngineState:
        """Starts to copy chunks into the pages of a row, but for columns before `begin`."""
        here = device.state.k_pages.sharding
        for number in range(begin // self._count, len(chunks)):
            chunk, first = jax.device_put(chunks[number], here), number * self._count
            device = self._in(device, np.int32(row), np.int32(first), np.int32(begin), chunk)
        return device
