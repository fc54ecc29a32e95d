# SPDX-License-Identifier: Apache-2.0
"""Experts over many devices: a token goes to those devices alone that have an expert of its own.

With all tokens everywhere (`Partition.over_experts`) a replica receives the tokens of all others,
whatever it has to do with them. Of N devices, a token with k experts needs about
N (1 − (1 − 1/N)^k): of 64 devices and 8 experts an eighth. So where the bytes that this spares are
worth its further collectives (`is_cheaper`), tokens are exchanged. Nothing is dropped: a buffer has
room for every token of every replica, and only what is in it travels.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# What `is_cheaper` assumes of a cluster; benchmarks/plan_sharding.py has more of it.
_HOST_DEVICES = 8
_NETWORK_SLOWER = 9  # than the links inside a host, per device
# Three collectives more, of 30 µs each between hosts, in bytes that links of 360 GB/s carry then.
_FURTHER_BYTES = 32e6


def is_cheaper(*, tp: int, dp: int, devices: int, tokens: int, k: int, token_bytes: int) -> bool:
    """Whether a layer's exchange of tokens between hosts takes less time than their gathering.

    Inside of one host the answer is no: links are fast there, and XLA's ragged all-to-all is not.

    Args:
      tp, dp: of the mesh.
      devices: that experts are split over.
      tokens: of each replica.
      k: experts of a token.
      token_bytes: that go to a device and come back from it for one token.
    """
    members = max(_HOST_DEVICES // tp, 1)  # of a ring over "dp", in a host
    if dp <= members:
        return False
    gathered = dp * tokens * token_bytes
    needed = gathered * (1 - (1 - 1 / devices) ** k)
    # A ring leaves a host once, by the network cards of all its members.
    gather = gathered * max(1.0, _NETWORK_SLOWER / members)
    exchange = needed * max(1.0, _NETWORK_SLOWER * (dp - members) / (dp - 1))
    return exchange + _FURTHER_BYTES < gather


class _Route(NamedTuple):
    """Who sends how many rows to whom along an axis, in buffers without gaps; all i32[devices]."""

    send_sizes: jax.Array
    send_starts: jax.Array  # in the buffer of this device
    recv_sizes: jax.Array
    recv_starts: jax.Array  # in the buffer that this device receives into
    there: jax.Array  # where what this device sends begins, in the buffer of each other
    back: jax.Array  # where what this device received began, in the buffer of each other

    @staticmethod
    def create(send_sizes: jax.Array, axis: str) -> "_Route":
        every = jax.lax.all_gather(send_sizes, axis)  # [from, to]
        me = jax.lax.axis_index(axis)
        starts, arrivals = _before(every, 1), _before(every, 0)
        return _Route(
            send_sizes, starts[me], every[:, me], arrivals[:, me], arrivals[me], starts[:, me]
        )

    def reversed(self) -> "_Route":
        """That of the results, to where the rows came from."""
        send_sizes, send_starts, recv_sizes, recv_starts, there, back = self
        return _Route(recv_sizes, recv_starts, send_sizes, send_starts, back, there)


def _before(sizes: jax.Array, axis: int) -> jax.Array:
    """For each size the sum of those before it."""
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


def exchanged(
    run: Callable[..., jax.Array], x: jax.Array, experts: jax.Array, weights: jax.Array,
    owners: jax.Array, first: jax.Array, axis: str,
) -> jax.Array:  # fmt: skip
    """f32[t, hidden]: run(x, experts, weights) by the devices along an axis, each for its experts.

    Inside of `jax.shard_map`.

    Args:
      run: `moe_experts` with the experts of a device, by their ids there; a token of id −1 costs
        nothing.
      x: [t, hidden], the tokens of this device.
      experts, weights: [t, k].
      owners: i32[t, k], which device along the axis has the expert; −1 = none.
      first: the first expert of this device, of all.
    """
    num_tokens, k = experts.shape
    devices = jax.lax.axis_size(axis)
    device = jnp.arange(devices, dtype=jnp.int32)[None, None]
    goes = jnp.any(owners[:, :, None] == device, axis=1)
    route = _Route.create(jnp.sum(goes, axis=0, dtype=jnp.int32), axis)
    # By device, then by token; what goes nowhere lies outside.
    size = devices * num_tokens
    place = route.send_starts[None] + _before(goes.astype(jnp.int32), 0)
    token = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], goes.shape)
    tokens = jnp.full(size, num_tokens, jnp.int32)
    tokens = tokens.at[jnp.where(goes, place, size)].set(token, mode="drop")

    def sent(rows, filling):
        rows = jnp.take(rows, tokens, axis=0, mode="clip")
        return ragged(rows, jnp.full_like(rows, filling), route, axis)

    bits = jax.lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
    names = sent(jnp.concatenate([experts, bits], axis=1), -1)
    ids, weights = names[:, :k], jax.lax.bitcast_convert_type(names[:, k:], jnp.float32)
    is_row = jnp.arange(size, dtype=jnp.int32) < jnp.sum(route.recv_sizes, dtype=jnp.int32)
    ids = jnp.where(is_row[:, None] & (ids >= 0), ids - first, jnp.int32(-1))
    out = run(sent(x, 0), ids, jnp.where(is_row[:, None], weights, jnp.float32(0)))
    parts = ragged(out, jnp.zeros_like(out), route.reversed(), axis)
    return jnp.zeros(x.shape, jnp.float32).at[tokens].add(parts, mode="drop")


def ragged(rows: jax.Array, into: jax.Array, route: _Route, axis: str) -> jax.Array:
    """`into` with the rows that the devices send; the rest of it stays.

    XLA has no ragged all-to-all on a CPU: there, each device sends as many rows as there may be.
    """
    return jax.lax.platform_dependent(
        rows,
        into,
        route,
        cpu=functools.partial(_padded, axis),
        default=functools.partial(_ragged, axis),
    )


def _ragged(axis, rows, into, route):
    return jax.lax.ragged_all_to_all(
        rows, into, route.send_starts, route.send_sizes, route.there, route.recv_sizes,
        axis_name=axis,
    )  # fmt: skip


def _padded(axis, rows, into, route):
    devices = jax.lax.axis_size(axis)
    column = jnp.arange(len(rows) // devices, dtype=jnp.int32)[None]
    padded = rows[jnp.clip(route.send_starts[:, None] + column, 0, len(rows) - 1)]
    came = jax.lax.all_to_all(padded, axis, 0, 0, tiled=True)
    is_row = column < route.recv_sizes[:, None]
    places = jnp.where(is_row, route.recv_starts[:, None] + column, len(into))
    return into.at[places].set(came, mode="drop")
