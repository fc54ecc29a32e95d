# SPDX-License-Identifier: Apache-2.0
"""A process that prefills for engines in other processes (`DecodeEngine`), one or several.

An engine asks for the K and V of tokens. It gets a ticket and then pieces: for each chunk of pages
one message of each device that has some of it. Or it is refused, with the reason. Either is the end
of what it has asked for. Whoever has the key may ask, as much as its own host memory has room for.
"""

import contextlib
import functools
import itertools
import logging
import operator
import queue
import socket
import threading
import time
from typing import Any

import numpy as np

from jax_paged.checks import expect

from ..distributed.link import LinkError
from ..distributed.orders import Order
from ..distributed.transfer import Channel, answer, check_payloads
from .engine import Engine
from .handover import PrefillTicket
from .request import Request

_log = logging.getLogger("jax_paged.prefill")
_MOST_PEERS = 64  # connections at once


class _Peer:
    """An engine that asks. A thread sends what it gets; another one hears what it wants."""

    def __init__(self, channel: Channel, payloads: str):
        self.channel, self._payloads = channel, payloads
        self.running: dict[int, Request] = {}  # by the numbers that it gave them
        self.outbox: queue.SimpleQueue[tuple[int, PrefillTicket | str] | None] = queue.SimpleQueue()

    def greet(self, facts: dict[str, str]) -> None:
        """Tells what this process is."""
        port = self.channel.offer() if self._payloads == "transfer" else 0
        self.channel.send(Order("facts", [facts, port]))

    def write(self) -> None:
        """Sends what is in the outbox, to the end of the connection."""
        try:
            while (sent := self.outbox.get()) is not None:
                self._send(*sent)
        except LinkError as error:
            _log.info("a connection takes no more: %s", error)
        finally:
            self.channel.close()

    def _send(self, number: int, what: PrefillTicket | str) -> None:
        if isinstance(what, str):
            self.channel.send(Order("refused", [number, what]))
            return
        told = [number, dict(what.facts), what.num_tokens, what.digest]
        self.channel.send(Order("ticket", told))
        of_device = operator.attrgetter("page", "head")
        for _, group in itertools.groupby(sorted(what.pieces, key=of_device), of_device):
            pieces = list(group)
            described = [[*p[:3], p.values.dtype.name, list(p.values.shape)] for p in pieces]
            arrays = [p.values for p in pieces]
            if self._payloads == "transfer":
                key = self.channel.give(arrays)
                self.channel.send(Order("pieces", [number, described, key]))
            else:
                self.channel.send(Order("pieces", [number, described, 0], arrays))


class PrefillService:
    """Prefills for whoever connects and has the key.

    It accepts connections at once; who has connected waits for `run`.

    Args:
      listener: a socket that listens; the end of `run` closes it.
      key: that the others have (`read_key`).
      payloads: what K and V go by: "frames" (over the connection, authenticated) or "transfer"
        (jax.experimental.transfer, on ports of its own, which know no key: see SECURITY.md).

    Raises:
      ValueError: there is no such way.
    """

    def __init__(self, listener: socket.socket, key: bytes, *, payloads: str = "frames"):
        check_payloads(payloads)
        self._listener, self._key, self._payloads = listener, key, payloads
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._peers: set[_Peer] = set()
        self._is_ready, self._is_over = threading.Event(), False
        threading.Thread(target=self._accept, daemon=True).start()

    def run(self, engine: Engine) -> None:
        """Serves until `stop`, by steps of an engine that swaps.

        Raises:
          ValueError: the engine does not swap.
        """
        self._engine, self._facts = engine, engine.facts()
        self._is_ready.set()
        goes_on = False
        try:
            while True:
                while not (goes_on and self._orders.empty()):
                    order = self._orders.get()
                    if order is None:
                        return
                    order()
                    goes_on = True
                goes_on = engine.step()
                for peer in self._peers:
                    self._hand_out(peer)
        finally:
            self._is_over = True
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # or who accepts would not see its end
            self._listener.close()
            for peer in list(self._peers):
                self._leave(peer)

    def stop(self) -> None:
        """Ends `run`, from whatever thread or signal."""
        self._orders.put(None)

    # In the thread of the engine

    def _join(self, peer: _Peer) -> None:
        self._peers.add(peer)

    def _leave(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        for request in peer.running.values():
            self._engine.cancel(request)
        peer.running.clear()
        peer.outbox.put(None)
        peer.channel.close()

    def _take(self, peer: _Peer, order: Order) -> None:
        """Does what a peer has asked for."""
        number, *rest = order.values
        if order.name == "cancel":
            if number in peer.running:  # else it has its end already
                self._engine.cancel(peer.running[number])
            return
        try:
            expect(number not in peer.running, "number", "one that is not in use", number)
            (priority,), (tokens,) = rest, order.arrays
            ok = type(priority) is int and tokens.dtype == np.int32 and tokens.ndim == 1
            expect(ok, "order", "a priority and i32[tokens]", [priority, tokens.dtype.name])
            request = self._engine.submit(
                tokens.tolist(), max_new_tokens=0, hand_out=True, priority=priority
            )
        except ValueError as error:
            peer.outbox.put((number, str(error)))
        else:
            peer.running[number] = request

    def _hand_out(self, peer: _Peer) -> None:
        """Gives a peer the requests of it that have ended."""
        for number, request in list(peer.running.items()):
            if request.is_done:
                del peer.running[number]
                if request.num_kept:
                    _log.info("prefilled %d tokens", request.num_kept)
                    peer.outbox.put((number, self._engine.hand_out(request)))
                else:
                    peer.outbox.put((number, request.detail or str(request.reason)))

    # In other threads

    def _accept(self) -> None:
        slots = threading.Semaphore(_MOST_PEERS)
        while True:
            slots.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._is_over or self._listener.fileno() < 0:
                    return
                _log.warning("a connection was not accepted: %s", error)
                slots.release()
                time.sleep(0.1)  # too many files are open, perhaps
                continue
            threading.Thread(target=self._serve, args=(sock, slots), daemon=True).start()

    def _serve(self, sock: socket.socket, slots: threading.Semaphore) -> None:
        """Hears what the other side of a connection wants, to its end."""
        peer = None
        try:
            channel = answer(sock, self._key)
            peer = _Peer(channel, self._payloads)
            self._is_ready.wait()
            peer.greet(self._facts)
            self._orders.put(functools.partial(self._join, peer))
            threading.Thread(target=peer.write, daemon=True).start()
            while True:
                order = channel.receive()
                known = order.name in ("prefill", "cancel") and order.values
                ok = bool(known) and type(order.values[0]) is int
                expect(ok, "order", "'prefill' or 'cancel' of a number", repr(order.name))
                self._orders.put(functools.partial(self._take, peer, order))
        except (LinkError, ValueError, OSError) as error:
            _log.info("a connection has ended: %s", error)
        finally:
            slots.release()
            if peer is not None:
                self._orders.put(functools.partial(self._leave, peer))
