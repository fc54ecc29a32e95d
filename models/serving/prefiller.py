# SPDX-License-Identifier: Apache-2.0
"""A process that prefills, as an engine in another process sees it.

A thread listens, and keeps the connection: what comes are news for the thread of the engine. Each
request that was asked for has one end: its pages have arrived, or it is said that they will not, or
the connection is lost. What makes no sense ends the connection, as a lost one.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_paged.checks import expect
from jax_paged.ops.batch import pages_for

from ..distributed.link import LinkError, read_key
from ..distributed.orders import Order
from ..distributed.transfer import Channel, open_channel
from .handover import ArrivingRow, Piece, PrefillTicket, check_alike
from .request import Request

_log = logging.getLogger("jax_paged.prefill")
_AGAIN_S = 5.0  # between two attempts to connect


class News(NamedTuple):
    """What has come of a request: a ticket, or why there is none. number None: of all."""

    channel: Channel
    number: int | None
    ticket: PrefillTicket | None
    why: str = ""


class _Asked:
    """A row on its way, as the thread that listens sees it."""

    def __init__(self, row: ArrivingRow, most_tokens: int):
        self.row, self.most_tokens = row, most_tokens
        self.ticket: PrefillTicket | None = None


class Prefiller:
    """A process that prefills (`jax-paged prefill`), seen from an engine.

    It connects when it is made, and again whenever the connection was lost.

    Args:
      address: HOST:PORT where it listens.
      key: that both processes have (`read_key`).

    Raises:
      ValueError: nobody listens there, or it has another key.
    """

    def __init__(self, address: str, key: bytes):
        self.address, self._key = address, key
        self.channel: Channel | None = self._open()
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._asked: dict[int, _Asked] = {}
        self.facts: Mapping[str, str] = {}  # of both sides
        self._is_over = threading.Event()

    def start(
        self, facts: Mapping[str, str], shapes: Sequence[jax.ShapeDtypeStruct], page_size: int
    ) -> None:
        """Starts to listen, for an engine with these facts, shapes of pages and page_size.

        Raises:
          ValueError: the other process has another model or other pages; the message says which.
        """
        expect(not self.facts, "prefill", "one that no other engine has", self.address)
        self.facts, self._shapes, self._page_size = facts, shapes, page_size
        try:
            assert self.channel is not None
            self._greet(self.channel)
        except (LinkError, OSError) as error:
            raise ValueError(f"prefill: {self.address} is gone: {error}") from None
        threading.Thread(target=self._listen, name="prefill", daemon=True).start()

    def ask(self, request: Request, tokens: Sequence[int]) -> Channel | None:
        """Asks for K and V of tokens of a request; news come under its number. None: it is gone."""
        channel = self.channel
        if channel is None:
            return None
        num_pages = pages_for(len(tokens), self._page_size)
        self._asked[request.number] = _Asked(ArrivingRow(self._shapes, num_pages), len(tokens))
        order = Order("prefill", [request.number, request.priority], [np.asarray(tokens, np.int32)])
        try:
            channel.send(order)
        except LinkError:  # the thread that listens will say why
            self._asked.pop(request.number, None)
            return None
        return channel

    def cancel(self, channel: Channel, number: int) -> None:
        """Needs the pages of a request no more."""
        with contextlib.suppress(LinkError):  # then nobody computes them either
            channel.send(Order("cancel", [number]))

    def close(self) -> None:
        """Ends the connection for good."""
        self._is_over.set()
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()

    # In a thread

    def _open(self) -> Channel:
        try:
            return open_channel(self.address, self._key)
        except (OSError, LinkError) as error:
            raise ValueError(f"prefill: {self.address} does not answer: {error}") from None

    def _greet(self, channel: Channel) -> None:
        """Takes what the other process is; raises ValueError if it is the wrong one."""
        order = channel.receive()
        expect(order.name == "facts", "prefill", "its facts first", repr(order.name))
        facts, port = _values(order, dict, int)
        check_alike(self.facts, facts, "prefill: ", "the model here")
        if port:
            channel.connect_to(port)

    def _listen(self) -> None:
        channel = self.channel
        while channel is not None:
            why = ""
            try:
                while True:
                    self._take(channel, channel.receive())
            except Exception as error:  # whatever it is, requests go on without the other process
                why = str(error)
            self.channel = None
            channel.close()
            self._asked = {}
            self.news.put(News(channel, None, None, why))
            if not self._is_over.is_set():
                _log.warning("the prefill process at %s is gone: %s", self.address, why)
            channel = self._opened_again()

    def _opened_again(self) -> Channel | None:
        """The next connection; None: there will be none."""
        said = ""
        while not self._is_over.wait(_AGAIN_S):
            channel = None
            try:
                channel = self._open()
                self._greet(channel)
            except Exception as error:  # as in `_listen`
                if channel is not None:
                    channel.close()
                if str(error) != said:
                    said = str(error)
                    _log.info("%s", said)
                continue
            self.channel = channel
            if self._is_over.is_set():  # `close` may not have seen it
                break
            _log.warning("the prefill process at %s is back", self.address)
            return channel
        self.close()
        return None

    def _take(self, channel: Channel, order: Order) -> None:
        """Takes an order of the other process.

        Raises:
          ValueError: it makes no sense; the message names what is wrong.
        """
        ok = bool(order.values) and type(order.values[0]) is int
        expect(ok, f"prefill: {order.name}", "the number of a request", order.values[:1])
        number = order.values[0]
        asked = self._asked.get(number)
        expect(asked is not None, f"prefill: {order.name}", "a request that waits for it", number)
        assert asked is not None
        if order.name == "refused":
            _, why = _values(order, int, str)
            self._end(channel, number, None, why)
        elif order.name == "ticket":
            _, facts, num_tokens, digest = _values(order, int, dict, int, str)
            expect(asked.ticket is None, "prefill: ticket", "one of a request", "a second one")
            most = asked.most_tokens
            expect(num_tokens == most, "prefill: num_tokens", f"{most}, as asked", num_tokens)
            asked.ticket = PrefillTicket(facts, num_tokens, digest)
        elif order.name == "pieces":
            self._take_pieces(channel, asked, order)
            if asked.row.is_whole:
                expect(asked.ticket is not None, "prefill: pieces", "a ticket before them", "none")
                self._end(channel, number, asked.ticket)
        else:
            expect(False, "prefill", "a ticket, pieces or a refusal", repr(order.name))

    def _take_pieces(self, channel: Channel, asked: _Asked, order: Order) -> None:
        _, described, key = _values(order, int, list, int)
        shapes: list[jax.ShapeDtypeStruct] = []
        places: list[tuple[int, int, int]] = []
        for one in described:
            ok = isinstance(one, list) and len(one) == 5 and isinstance(one[4], list)
            ok = ok and all(type(n) is int for n in (*one[:3], *one[4]))
            expect(ok, "prefill: piece", "[pool, page, head, dtype, shape]", one)
            pool, page, head, dtype, shape = one
            known = {x.dtype.name: x.dtype for x in self._shapes}
            expect(dtype in known, "piece.dtype", " or ".join(sorted(known)), dtype)
            asked.row.check(pool, page, head, shape, known[dtype])
            shapes.append(jax.ShapeDtypeStruct(shape, known[dtype]))
            places.append((pool, page, head))
        arrays = channel.pull(key, shapes) if key else order.arrays
        expect(len(arrays) == len(places), "prefill: pieces", f"{len(places)} arrays", len(arrays))
        for place, values in zip(places, arrays, strict=True):
            asked.row.take(Piece(*place, values))

    def _end(
        self, channel: Channel, number: int, ticket: PrefillTicket | None, why: str = ""
    ) -> None:
        asked = self._asked.pop(number)
        if ticket is not None:
            pieces = [Piece(i, 0, 0, pool) for i, pool in enumerate(asked.row.pools)]
            ticket = PrefillTicket(ticket.facts, ticket.num_tokens, ticket.digest, None, pieces)
        self.news.put(News(channel, number, ticket, why))


def _values(order: Order, *types: type) -> Sequence[Any]:
    """The values of an order, of these types."""
    ok = tuple(map(type, order.values)) == types
    names = ", ".join(one.__name__ for one in types)
    expect(ok, f"prefill: {order.name}", f"values of types {names}", order.values)
    return order.values


@contextlib.contextmanager
def opened_prefiller(address: str | None) -> Iterator[Prefiller | None]:
    """The one at HOST:PORT, with the key of the environment; None where there is no address."""
    if address is None:
        yield None
        return
    prefiller = Prefiller(address, read_key())
    try:
        yield prefiller
    finally:
        prefiller.close()
