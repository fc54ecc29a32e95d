# SPDX-License-Identifier: Apache-2.0
"""K and V on their way between devices, and between processes of jax.distributed on loopback.

They run in processes of their own (this file as a script), because the number of devices is fixed
when JAX starts.
"""

import dataclasses
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from children import on_devices
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from transfers import CHUNK, append, assert_same, make, open_row, tokens_of

from jax_paged import Status
from jax_paged.cache.transfer import Inbox, Message, Sender, Ticket, deliver

TIMEOUT_S = 120


def between_devices():
    """From one device to another, then from two that share the heads to two others."""
    for devices in ([0], [1]), ([0, 1], [2, 3]):
        source, target = append(make(), 1, 6, seed=1), make()
        placed = []
        for state, numbers in zip((source, target), devices, strict=True):
            mesh = Mesh(np.array(jax.devices())[numbers], ("heads",), axis_types=(AxisType.Auto,))
            pool, whole = (NamedSharding(mesh, P(*x)) for x in ((None, None, "heads"), ()))
            shardings = jax.tree.map(lambda x, w=whole, p=pool: p if x.ndim == 5 else w, state)
            placed.append((jax.device_put(state, shardings), whole))
        (source, _), (target, there) = placed
        inbox = jax.device_put(Inbox.create(target), there)
        target, inbox, ticket = open_row(target, inbox, 2, 8)
        assert ticket.geometry.tensor_degree == len(devices[0])
        sender = Sender(source)
        sender.mark(1, ticket, 6)
        (message,) = sender.messages(source, {1: 6}, max_tokens=CHUNK)
        arrays = message.payload._replace(
            k=jax.device_put(message.payload.k, there), v=jax.device_put(message.payload.v, there)
        )
        message = dataclasses.replace(message, payload=arrays)
        target, inbox, status = deliver(target, inbox, [message])
        assert status.tolist() == [Status.OK]
        assert target.k_pages.devices() == {jax.devices()[i] for i in devices[1]}
        assert_same(tokens_of(target, 2), tokens_of(source, 1))
    text = "^tensor_degree: expected 2, as the receiver has it, got 1$"
    with pytest.raises(ValueError, match=text):
        Sender(make()).mark(1, ticket, 0)


def test_from_device_to_device():
    run_children([[between_devices.__name__]], num_devices=4)


def between_processes(rank: str, port: str):
    """Process 0 prefills and sends; process 1 receives. Bytes go through a collective."""
    limit = 1 << 15
    jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    mesh = Mesh(np.array(jax.devices()), ("process",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("process"))

    def shift(x):
        return jax.lax.ppermute(x, "process", [(0, 1), (1, 0)])

    exchange = jax.jit(
        jax.shard_map(shift, mesh=mesh, in_specs=P("process"), out_specs=P("process"))
    )

    def swap(data: bytes) -> bytes:
        framed = len(data).to_bytes(4, "little") + data
        mine = np.frombuffer(framed.ljust(limit, b"\0"), np.uint8)[None]
        (device,) = jax.local_devices()
        mine = jax.device_put(mine, SingleDeviceSharding(device))
        both = jax.make_array_from_single_device_arrays((2, limit), split, [mine])
        (shard,) = exchange(both).addressable_shards
        theirs = np.asarray(shard.data)[0].tobytes()
        return theirs[4 : 4 + int.from_bytes(theirs[:4], "little")]

    source = append(make(), 1, 6, seed=1)  # process 1 has the same numbers, to compare with
    if rank == "0":
        sender = Sender(source)
        sender.mark(1, Ticket.from_bytes(swap(b"")), 6)
        for length in (6, 8):
            source = append(source, 1, length - 6, seed=2) if length > 6 else source
            (message,) = sender.messages(source, {1: length}, max_tokens=CHUNK)
            swap(message.to_bytes())
            assert swap(b"") == b"\x00"  # the status that came back
    else:
        target, inbox, ticket = open_row(make(), Inbox.create(make()), 2, 8)
        swap(ticket.to_bytes())
        for _ in range(2):
            message = Message.from_bytes(swap(b""))
            target, inbox, status = deliver(target, inbox, [message])
            swap(bytes(status.tolist()))
        assert_same(tokens_of(target, 2), tokens_of(append(source, 1, 2, seed=2), 1))
    jax.distributed.shutdown()


def test_from_process_to_process():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    run_children([[between_processes.__name__, rank, port] for rank in "01"], num_devices=1)


def run_children(calls, num_devices):
    env = on_devices(num_devices)
    env["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # one would read what the other is writing
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", __file__, *call],
            env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for call in calls
    ]  # fmt: skip
    try:
        errors = [child.communicate(timeout=TIMEOUT_S)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * len(calls), "\n".join(errors)[-4000:]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    {f.__name__: f for f in (between_devices, between_processes)}[sys.argv[1]](*sys.argv[2:])
