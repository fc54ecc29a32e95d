# SPDX-License-Identifier: Apache-2.0
"""An engine whose prompts another process prefills, as long as that process is there.

    engine = DecodeEngine(model, num_pages=512, prefill=Prefiller("127.0.0.1:8100", read_key()))

It is an engine as all others, with the same tokens. A new request waits in its place while its K
and V are on their way, and those behind it may start. If they do not come, the request computes its
prompt here.
"""

import bisect
import contextlib
import logging
import queue
from collections.abc import Sequence
from typing import Any

from ..decoder.protocol import Model
from ..distributed.transfer import Channel
from .engine import Engine
from .handover import PrefillTicket, row_of
from .prefiller import News, Prefiller
from .request import Request

_log = logging.getLogger("jax_paged.prefill")
_WAIT_S = 0.02  # most time of a step that has nothing to do


class DecodeEngine(Engine):
    """An `Engine` that lets another process prefill.

    What goes there: the prompts of requests of which the prefix cache lacks a page and at least
    half, but those with an adapter, and those that ask for log-probabilities of the prompt. A
    request is asked for when host memory (`swap_pages`) has room for its pages.

    Args:
      model, options: as for `Engine`; it swaps, and has no window.
      prefill: the other process, for this engine alone. Its model, page_size, kv_dtype and draft
        model are those of this one; how it is split over devices may differ.

    Raises:
      ValueError: as `Engine`, or the other process has something else; the message names it.
    """

    def __init__(self, model: Model, *, prefill: Prefiller, **options: Any):
        super().__init__(model, **{"preemption": "swap", **options})
        self._check_swaps("prefill")
        self._prefiller = prefill
        self._unasked: list[Request] = []  # in their order
        self._awaited: dict[int, tuple[Request, Channel]] = {}  # by number
        self.num_received = 0  # requests that another process has prefilled
        prefill.start(self.facts(), self._swapper().page_shapes, self.page_size)

    def submit(self, prompt: Sequence[int], **options: Any) -> Request:
        """As `Engine.submit`."""
        request = super().submit(prompt, **options)
        if not request.is_done and self._should_ask(request):
            request.is_awaited = True
            bisect.insort(self._unasked, request, key=lambda r: r.order)
        return request

    def step(self) -> bool:
        """As `Engine.step`; waits a moment if there is nothing to do but to wait."""
        self._ask()
        self._take_news(wait=False)
        before, flying = self.num_steps, len(self._flying)
        goes_on = super().step()
        if goes_on and not flying and self.num_steps == before and self._awaited:
            self._take_news(wait=True)
        return goes_on

    def cancel(self, request: Request) -> None:
        """As `Engine.cancel`."""
        super().cancel(request)
        if request.number in self._awaited:
            self._prefiller.cancel(self._awaited[request.number][1], request.number)

    def _should_ask(self, request: Request) -> bool:
        if request.tells_prompt or request.adapter is not None:
            return False
        if self._prefiller.channel is None or self._prefiller.facts != self.facts():
            return False  # it is gone, or has the weights of before
        scheduler, rest = self._scheduler(request), request.num_known - 1
        cached = scheduler.num_cached(request)
        is_worth_it = rest - cached >= max(self.page_size, cached)
        return is_worth_it and scheduler.swap_need(rest) <= self.swap_pages

    def _ask(self) -> None:
        """Asks for what host memory has room for, in the order of the requests."""
        while self._unasked:
            request = self._unasked[0]
            if request.is_done or request.swapped:  # or `receive` had a ticket for it
                request.is_awaited = False
            else:
                tokens = request.known(0, request.num_known - 1)
                if not self._scheduler(request).await_pages(request, len(tokens)):
                    return
                channel = self._prefiller.ask(request, tokens)
                if channel is None:
                    self._scheduler(request).give_up(request)
                else:
                    self._awaited[request.number] = request, channel
            del self._unasked[0]

    def _take_news(self, wait: bool) -> None:
        """Takes what has come; waits a moment for it, or not at all."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._take_one(self._prefiller.news.get(timeout=_WAIT_S if wait else 0))
                wait = False

    def _take_one(self, news: News) -> None:
        if news.number is not None:
            numbers = [news.number]
        else:
            numbers = [n for n, (_, channel) in self._awaited.items() if channel is news.channel]
        for number in numbers:
            request, _ = self._awaited.pop(number, (None, None))
            if request is None or request.is_done:
                continue
            why = news.why
            if news.ticket is not None and request.swapped:
                why = self._admit(request, news.ticket)
            if news.ticket is None or why:
                level = logging.INFO if news.number is None else logging.WARNING  # one line of all
                _log.log(level, "request %d computes its prompt here: %s", number, why)
                self._scheduler(request).give_up(request)
            request.is_awaited = False

    def _admit(self, request: Request, ticket: PrefillTicket) -> str:
        """Takes the K and V of a request that waits for them; returns what is wrong, if so."""
        try:
            ticket.check(self.facts(), request.known(0, request.num_known), None)
            pools = row_of(ticket, self._swapper().page_shapes, self.page_size)
        except ValueError as error:
            return str(error)
        self._runner.put(request.replica, request.number, pools)
        self.num_received += 1
        return ""


def create_engine(model: Model, *, prefill: Prefiller | None = None, **options: Any) -> Engine:
    """An engine, one that decodes where there is a prefiller."""
    if prefill is None:
        return Engine(model, **options)
    return DecodeEngine(model, prefill=prefill, **options)
