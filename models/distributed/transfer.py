# SPDX-License-Identifier: Apache-2.0
"""Orders and arrays between two processes that are no job: each may end, and the other one goes on.

A channel is an authenticated link over which both sides say something every second. What the arrays
of an order go by is chosen by the side that sends them:

- "frames": in the order's own frame, authenticated as all else.
- "transfer": jax.experimental.transfer, from the host memory of one process to that of the other.
  The order has a random number of 63 bits, under which they are pulled once; so whoever pulls has
  read the authenticated order. Nothing else of it is authenticated, and whoever reaches its ports
  can end the processes (SECURITY.md). Each side has a server for each channel, which ends with it,
  on the address that the channel has.

A pull of an array that is split over devices fails in jax 0.10.2 ("Async transfer object was
deleted"), so there is one for what each device has. `pull(timeout=…)` ends nothing there: who waits
for what nobody gives would wait for ever, so `Channel.pull` looks at the clock itself.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_paged._start.command_line import PAYLOADS
from jax_paged.checks import check_choice

from .link import Link, LinkError, accept, connect, host_and_port, joined
from .orders import Order, decode, encode
from .processes import BEAT_S, SILENCE_S

_PULL_S = SILENCE_S  # for arrays that the other side gives


class Channel:
    """One side of a connection between two processes; `open_channel` and `answer` make it.

    Args:
      sock: of the link.
    """

    def __init__(self, link: Link, sock: socket.socket):
        self._link = link
        self.host, self.other_host = sock.getsockname()[0], sock.getpeername()[0]
        self._is_over = threading.Event()
        self._server: Any = None  # of jax.experimental.transfer
        self._connection: Any = None
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, order: Order) -> None:
        """Sends an order, with its arrays.

        Raises:
          LinkError: the other side is gone.
        """
        self._link.send(*encode(order, 0))

    def receive(self) -> Order:
        """The next order; waits for it.

        Raises:
          LinkError: the other side is gone.
          ValueError: it has sent something that is no order.
        """
        while not (frame := self._link.receive()):
            pass  # a beat
        return decode(frame)[0]

    def close(self) -> None:
        """Ends the connection; who waits for an order gets a LinkError."""
        self._is_over.set()
        self._link.close()
        self._server = self._connection = None  # with all that was not pulled

    def _beat(self) -> None:
        with contextlib.suppress(LinkError):
            while not self._is_over.wait(BEAT_S):
                self._link.send()

    # Arrays beside orders

    def offer(self) -> int:
        """Starts to serve arrays by jax.experimental.transfer; returns the port.

        Raises:
          ValueError: JAX has no CPU device here.
        """
        self._server = _transfer_server(self.host)
        return int(self._server.address().rpartition(":")[2])

    def connect_to(self, port: int) -> None:
        """Pulls arrays from such a port of the other side from now on.

        Raises:
          ValueError: as `offer`.
        """
        self._server = _transfer_server(self.host)
        self._connection = self._server.connect(joined(self.other_host, port))

    def give(self, arrays: Sequence[np.ndarray]) -> int:
        """Lets the other side pull arrays once, under a number."""
        number = secrets.randbits(63)
        server = self._server
        if server is None:
            raise LinkError("its connection is closed")
        server.await_pull(number, [jax.device_put(x, _host_device()) for x in arrays])
        return number

    def pull(self, number: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
        """The arrays of these shapes that the other side gives under a number.

        Raises:
          LinkError: they do not come.
        """
        place = jax.sharding.SingleDeviceSharding(_host_device())
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in shapes]
        end, connection = time.monotonic() + _PULL_S, self._connection
        if connection is None:
            raise LinkError("its connection is closed")
        try:
            arrays = connection.pull(number, placed)
            while not all(x.is_ready() for x in arrays):  # `pull` has no timeout that holds
                if time.monotonic() > end or self._is_over.is_set():
                    raise LinkError(f"arrays that it gives did not come within {_PULL_S:g} s")
                time.sleep(1e-3)
            return [np.asarray(x) for x in arrays]
        except jax.errors.JaxRuntimeError as error:
            raise LinkError(f"arrays that it gives did not come: {error}") from None


def open_channel(address: str, key: bytes) -> Channel:
    """A channel to who listens at HOST:PORT.

    Raises:
      ValueError: the address is none.
      OSError, LinkError: nobody listens there, or who does has another key.
    """
    host, port = host_and_port("prefill", address)
    sock = socket.create_connection((host, port), timeout=SILENCE_S)
    try:
        return Channel(connect(sock, key, 0, silence=SILENCE_S), sock)
    except BaseException:
        sock.close()
        raise


def answer(sock: socket.socket, key: bytes) -> Channel:
    """A channel to who has connected.

    Raises:
      LinkError: the other side does not know the key; the connection is closed.
    """
    try:
        return Channel(accept(sock, key, silence=SILENCE_S)[0], sock)
    except BaseException:
        sock.close()
        raise


def check_payloads(payloads: str) -> None:
    """Checks the name of a way, and that this process has it.

    Raises:
      ValueError: it is not known, or JAX has no CPU device here.
    """
    check_choice("payloads", payloads, PAYLOADS)
    if payloads == "transfer":
        _host_device()


def _host_device() -> Any:
    """The device whose memory is that of the host."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        what = "'frames' where JAX has no CPU device (JAX_PLATFORMS)"
        raise ValueError(f"payloads: expected {what}, got 'transfer': {error}") from None


def _transfer_server(host: str) -> Any:
    from jax.experimental import transfer  # not for who needs none of this

    address = joined(host, 0)
    return transfer.start_transfer_server(_host_device().client, address, [address])


def listen(address: str) -> socket.socket:
    """Listens at HOST:PORT, and nowhere else.

    Raises:
      ValueError: the address is none, or cannot be listened to.
    """
    host, port = host_and_port("listen", address, least=0)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"listen: {address} cannot be listened to: {error}") from None
