# SPDX-License-Identifier: Apache-2.0
"""The thread that steps the engine. Nobody else touches the engine while it runs.

Orders go in through a queue. What a step brought comes out in one call on the event loop, so the
loop is woken once per step, however many requests run, and it never waits for the engine.
"""

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..serving.engine import Engine
from ..serving.request import Request

_log = logging.getLogger("jax_paged.server")


class News(NamedTuple):
    """What a step brought to one answer; the engine thread makes it, the event loop reads it."""

    tokens: list[int]
    logprobs: list[Any]
    reason: str | None
    detail: str
    num_cached: int = 0
    prompt_logprobs: list[Any] | None = None
    stop: tuple[int, Any] | None = None


class Asked(Protocol):
    """An answer as the worker sees it."""

    prompt: Sequence[int]
    options: dict[str, Any]
    request: Request | None

    def take(self, news: News) -> None:
        """Called on the event loop, with what a step brought."""
        ...

    def fail(self) -> None:
        """Called there when `take` has raised."""
        ...


class Worker:
    """Steps an engine in a thread of its own.

    Args:
      engine: used by this thread alone, between `start` and `stop`.
      loop: where `Asked.take` is called.
      on_failure: called on the loop when a step has raised; the engine cannot go on then.
      rebalance_seconds: how often experts move (`Engine.rebalance`), while there is work; None =
        never.
    """

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, on_failure: Callable[[str], None],
        rebalance_seconds: float | None = None,
    ):  # fmt: skip
        self.engine, self.failure = engine, ""
        self._rebalance_seconds, self._rebalanced = rebalance_seconds, time.monotonic()
        self._loop, self._on_failure = loop, on_failure
        self._orders: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._news: list[tuple[Asked, News]] = []
        self._asked: set[Asked] = set()  # that have not ended
        self._dropped: set[Asked] = set()  # cancelled before they began
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Cancels what is left and ends the thread; waits for the step at hand."""
        self._orders.put(self._end)
        self._thread.join()

    def submit(self, answers: Sequence[Asked]) -> None:
        """Gives the engine the answers of one prompt: the others wait for the pages of the first.

        They start when the first has its first token, and find its full pages in the prefix cache.
        """
        self._orders.put(functools.partial(self._submit, list(answers)))

    def cancel(self, answers: Sequence[Asked]) -> None:
        """Ends answers; those that are done stay as they are."""
        self._orders.put(functools.partial(self._cancel, list(answers)))

    # In the thread

    def _run(self) -> None:
        try:
            goes_on = False
            while self._take_orders(wait=not goes_on):
                goes_on = self.engine.step()
                self._flush()
                self._rebalance()
            self._cancel(list(self._asked))
            while self.engine.step():
                pass
            self._flush()
        except Exception as error:
            _log.exception("the engine has failed")
            self.failure = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            for answer in list(self._asked):
                self._put(answer, News([], [], "failed", self.failure))
            self._flush()
            self._call(self._on_failure, self.failure)
            while self._take_orders(wait=True):
                pass

    def _rebalance(self) -> None:
        """Moves experts if it is time."""
        every = self._rebalance_seconds
        if every is not None and time.monotonic() - self._rebalanced >= every:
            _log.info("experts: %s", self.engine.rebalance())
            self._rebalanced = time.monotonic()

    def _take_orders(self, wait: bool) -> bool:
        """Carries out what was ordered; waits for an order if there is nothing else to do."""
        if wait:
            self._orders.get()()
        while not self._orders.empty():
            self._orders.get()()
        self._flush()
        return not self._is_over

    def _end(self) -> None:
        self._is_over = True

    def _submit(self, answers: list[Asked]) -> None:
        self._asked.update(answers)
        first, *others = answers

        def take(new: list[int], reason: str | None) -> None:
            if first.request is None:  # it has ended within `submit`
                return
            self._tell(first, first.request, new, reason)
            while others:
                self._submit([others.pop(0)])

        if self.failure or first in self._dropped:
            reason = "failed" if self.failure else "cancelled"
            self._put(first, News([], [], reason, self.failure))
        else:
            try:
                request = self.engine.submit(first.prompt, on_tokens=take, **first.options)
            except (ValueError, NotImplementedError) as error:
                self._put(first, News([], [], "refused", str(error)))
            except Exception as error:  # the engine is as it was
                _log.exception("the engine did not take a request")
                self._put(first, News([], [], "failed", str(error)))
            else:
                first.request = request
                if not request.is_done:
                    return  # the others follow its first token
                self._tell(first, request, request.tokens, request.reason)
        while others:
            self._submit([others.pop(0)])

    def _tell(self, answer: Asked, request: Request, new: list[int], reason: str | None) -> None:
        begin = len(request.tokens) - len(new)
        prompt_logprobs = None
        if answer.options.get("prompt_logprobs"):
            prompt_logprobs = request.prompt_logprobs
        self._put(
            answer,
            News(
                new, request.logprobs[begin:], reason, request.detail, request.num_cached,
                prompt_logprobs, request.stop,
            ),
        )  # fmt: skip

    def _cancel(self, answers: list[Asked]) -> None:
        for answer in answers:
            if answer.request is not None:
                self.engine.cancel(answer.request)
            elif answer in self._asked:  # waits for the first of its prompt
                self._dropped.add(answer)

    def _put(self, answer: Asked, news: News) -> None:
        if news.reason is not None:
            self._asked.discard(answer)
            self._dropped.discard(answer)
        self._news.append((answer, news))

    def _flush(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self._call(_deliver, news)

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _deliver(news: list[tuple[Asked, News]]) -> None:
    for answer, its_news in news:
        try:
            answer.take(its_news)
        except Exception:  # one answer's trouble is not the others'
            _log.exception("an answer cannot be shown")
            answer.fail()
