# SPDX-License-Identifier: Apache-2.0
"""The part of an engine that steps: a plan on the host, a program on the device, what it drew."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from jax_paged._start.interrupt import uninterrupted

from .counts import EngineCounts
from .request import LogProbability, Request
from .scheduler import Feed, Scheduler
from .speculate import look_up, look_up_tree
from .step import FAILED, Drawn, LogProbabilities


class Stepping(EngineCounts):
    """For the `Engine` that is made of it."""

    ahead: int
    max_drafts: int
    num_steps: int
    num_fed: int
    num_drafted: int
    num_accepted: int
    _has_drafter: bool
    _draft_parents: list[int]
    _branches: int
    _flying: deque[tuple[Drawn, list[list[Feed]]]]
    _untold: deque[Request]

    @property
    def is_idle(self) -> bool:
        """No request waits or runs."""
        return not any(one.waiting or one.running for one in self._schedulers)

    def step(self) -> bool:
        """Dispatches one step and reads back what is due; False if there was nothing to do."""
        with uninterrupted():  # or host and device would no longer agree
            draft = self._draft if self.max_drafts else None
            feeds = [one.plan(draft, self.max_drafts) for one in self._schedulers]
            self._keep()
            if any(feeds):
                self._dispatch(feeds)
            due = len(self._flying) - (self._ahead if any(feeds) else 0)
            for _ in range(due):
                self._read_back()
        while self._untold:
            self._untold.popleft().tell()
        return any(feeds) or due > 0 or not self.is_idle

    @property
    def _ahead(self) -> int:
        """Steps that may be on their way: none where what may come depends on what has come."""
        running = chain.from_iterable(one.running for one in self._schedulers)
        waits = any(request.matcher is not None for request in running)
        return 0 if waits else self.ahead

    def run(self) -> None:
        """Steps until every request is done."""
        while self.step():
            pass

    def stream(self, request: Request) -> Iterator[int]:
        """The new tokens of a request as they come; steps the engine, so the others go on too."""
        told = 0
        while True:
            while told < len(request.tokens):  # others may step the engine between two tokens
                yield request.tokens[told]
                told += 1
            if request.is_done:
                return
            self.step()

    def _scheduler(self, request: Request) -> Scheduler:
        """That of the request's replica."""
        return self._schedulers[request.replica]

    def _draft(self, request: Request, most: int) -> tuple[list[int], list[int]]:
        if self._has_drafter:
            return [0] * most, self._draft_parents[:most]  # the device will tell which tokens
        text = request.known(0, request.num_known)
        if self._branches > 1:
            return look_up_tree(text, most, self._branches)
        return look_up(text, most), []

    def _keep(self) -> None:
        """Sends the schedulers' orders to the device."""
        self._runner.keep([one.take_orders() for one in self._schedulers])

    def _dispatch(self, feeds: list[list[Feed]]) -> None:
        for own in feeds:
            own.sort(key=lambda feed: feed.row)
        drawn = self._runner.run(feeds)
        for scheduler, own in zip(self._schedulers, feeds, strict=True):
            scheduler.dispatched(own)
        self._flying.append((drawn, feeds))
        self.num_steps += 1
        self.num_fed += sum(feed.num_tokens for own in feeds for feed in own)

    def _read_back(self) -> None:
        """Takes the tokens of the oldest step on its way; waits for it."""
        flying, feeds = self._flying.popleft()
        each = self._runner.read(flying)
        if any((drawn.tokens == FAILED).any() for drawn in each):
            raise RuntimeError("engine: a page operation failed that the host had planned")
        for drawn, own in zip(each, feeds, strict=True):
            if drawn.prompt is not None:
                self._take_prompts(own, drawn.prompt)
            for feed in own:
                if feed.draws:
                    self._take(feed, drawn)

    def _take_prompts(self, feeds: list[Feed], told: LogProbabilities) -> None:
        """Takes the log-probabilities of prompts that a step has fed."""
        end = 0
        for feed in feeds:
            request, start, end = feed.request, end, end + feed.num_tokens
            if request.tells_prompt:
                count = min(feed.count, len(request.prompt) - 1 - feed.begin)
                for i in range(max(count, 0)):
                    known = _log_probability(told, start + i)
                    request.prompt_logprobs[feed.begin + i + 1] = known

    def _take(self, feed: Feed, drawn: Drawn) -> None:
        request = feed.request
        request.in_flight -= 1
        if request.is_done:
            return
        new = [int(token) for token in drawn.tokens[feed.row] if token >= 0]
        if feed.drafts:
            wrong = len(feed.drafts) + 1 - len(new)
            self.num_drafted += len(feed.drafts)
            self.num_accepted += len(new) - 1
            if wrong:
                self._scheduler(request).cut(request, wrong)
        told = []
        if drawn.logprobs is not None:
            told = [_log_probability(drawn.logprobs, (feed.row, i)) for i in range(len(new))]
        request.take(new, told)
        self._untold.append(request)
        self._scheduler(request).offer(request)
        if request.is_done:
            self._scheduler(request).remove(request)


def _log_probability(told: LogProbabilities, at: Any) -> LogProbability:
    """What was told of the token in one place."""
    model, drawn, ids, values = (np.asarray(x)[at].tolist() for x in told)
    return LogProbability(model, drawn, tuple(zip(ids, values, strict=True)))
