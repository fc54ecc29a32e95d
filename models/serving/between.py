# SPDX-License-Identifier: Apache-2.0
"""The part of an engine that gives K and V to other engines, and takes theirs (`handover`)."""

from collections.abc import Callable, Sequence
from typing import Any

from jax_paged._start.interrupt import uninterrupted
from jax_paged.checks import expect
from jax_paged.ops.batch import pages_for

from ..decoder.generation import as_tokens
from .changes import Changes
from .handover import PrefillTicket, digest_of, facts_of, row_of
from .request import Request
from .swap import Swapper


class BetweenEngines(Changes):
    """For the `Engine` that is made of it."""

    submit: Callable[..., Request]
    config: Any
    page_size: int
    swap_pages: int
    _window: tuple[int, int] | None
    _facts_of_weights: tuple[int, dict[str, str]] = -1, {}

    def hand_out(self, request: Request) -> PrefillTicket:
        """K and V of a request, for another engine's `receive`; this one has them no longer.

        Args:
          request: one that was submitted with hand_out=True and has come to its end.

        Raises:
          ValueError: it is another one, or was handed out already.
        """
        what = "a request that has ended, of hand_out=True, once"
        expect(request.num_kept > 0, "request", what, f"one with reason={request.reason!r}")
        with uninterrupted():
            self._keep()  # the copy to host memory may still be an order
            swapper = self._swapper()
            num_tokens, request.num_kept = request.num_kept, 0
            num_pages = pages_for(num_tokens, self.page_size)
            pieces = swapper.pieces(request.replica, request.number, num_pages)
            self._runner.forget(request.number)
        adapter = None if request.adapter is None else request.adapter.name
        digest = digest_of(request.known(0, num_tokens))
        return PrefillTicket(self.facts(), num_tokens, digest, adapter, pieces)

    def receive(self, prompt: Sequence[int], ticket: PrefillTicket, **options: Any) -> Request:
        """Adds a request whose first tokens another engine has computed.

        K and V of the ticket go into the row's pages when it starts, but for pages that the prefix
        cache has. The request computes the rest of the prompt, at least one token, and gets the
        tokens that it gets without a ticket. Where `swap_pages` has no room for the ticket, the
        request computes all of the prompt, as one that has been preempted.

        Args:
          prompt, options: as for `submit`, without prompt_logprobs.
          ticket: of `hand_out`, for the first tokens of the prompt. The model of both engines must
            be the same one, however it is split over devices, and so must be page_size, kv_dtype
            and draft model. Adapters have the same names; their weights are up to the caller.

        Raises:
          ValueError: the ticket is for something else, or not whole; the message names it, and
            nothing has changed. Or as `submit`.
        """
        self._check_swaps("receive")
        told = options.get("prompt_logprobs", False)
        expect(not told, "prompt_logprobs", "False: the prompt is not computed here", told)
        tokens = as_tokens("prompt", prompt, self.config.vocab_size)
        ticket.check(self.facts(), tokens.tolist(), options.get("adapter"))
        pools = row_of(ticket, self._swapper().page_shapes, self.page_size)
        request = self.submit(prompt, **options)
        if not request.is_done and self._scheduler(request).await_pages(request, ticket.num_tokens):
            self._runner.put(request.replica, request.number, pools)
        return request

    def facts(self) -> dict[str, str]:
        """What K and V of another engine must have in common with those of this one, by name.

        Raises:
          ValueError: the engine does not swap.
        """
        self._check_swaps("facts")
        if self._facts_of_weights[0] != self.weight_version:
            shapes, of_model = self._swapper().page_shapes, self._runner.facts
            corners = self._runner.corners()
            facts = facts_of(of_model, self.params, corners, shapes, self.weight_version)
            self._facts_of_weights = self.weight_version, facts
        return self._facts_of_weights[1]

    def _check_swaps(self, what: str) -> None:
        expect(self.swap_pages > 0, what, "an engine with preemption='swap'", "one without")
        expect(self._window is None, what, "an engine without a window", self._window)

    def _swapper(self) -> Swapper:
        assert self._runner.swapper is not None
        return self._runner.swapper
