# SPDX-License-Identifier: Apache-2.0
"""A request to the engine: what is asked for, and what has become of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..decoder.stream import TextStream
from .adapters import AdapterVersion
from .logit_edits import EditOptions
from .structured import Matcher

OnTokens = Callable[[list[int], str | None], None]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens: the options of `Sampler.create`, and its draw_index.

    draw_index: `generate` draws the tokens of prompts[i] with draw_index i.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    draw_index: int = 0


class LogProbability(NamedTuple):
    """Natural logarithms of the probabilities of one new token.

    model: under the model's own distribution, the softmax of its logits.
    drawn: under the one that it was drawn from: after biases, penalties, a constraint, temperature
      and what else the request asked for. 0 for a greedy token.
    top: the likeliest tokens in its place, with their `model` ones; the likeliest first.
    """

    model: float
    drawn: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(eq=False)
class Request:
    """One request. `Engine.submit` makes it; read tokens, reason, detail and the counters.

    tokens: the new ids so far, without the stop token.
    logprobs: of each of them, where the engine tells log-probabilities.
    stop: the stop token that has ended it, and what is known of that, as in logprobs; or None.
    prompt_logprobs: of each token of the prompt, where the request asks for them: None for the
      first one, behind which there is nothing, and for those that are not computed yet.
    reason: None while it goes on, else "stop_token", "stop_string" (the last tokens hold it),
      "complete" (the constraint is met, and nothing can follow), "length" (max_new_tokens reached,
      or the model's context used up), "no_token" (every token is banned or not allowed by the
      constraint), "cancelled" or "refused".
    detail: why it was refused, or why there is no token.
    adapter: the version of the adapter that it runs with (name, number), or None.
    """

    prompt: np.ndarray  # i32[n]
    limit: int  # most new tokens
    stop_tokens: frozenset[int]
    search: TextStream | None  # for stop strings
    sampling: Sampling
    priority: int
    number: int  # in the order of arrival
    on_tokens: OnTokens | None = None
    edits: EditOptions = dataclasses.field(default_factory=EditOptions)
    matcher: Matcher | None = None  # of a constraint
    tells_prompt: bool = False  # whether log-probabilities of the prompt are asked for
    prompt_logprobs: list[LogProbability | None] = dataclasses.field(default_factory=list)
    adapter: AdapterVersion | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[LogProbability] = dataclasses.field(default_factory=list)
    stop: tuple[int, LogProbability | None] | None = None
    reason: str | None = None
    detail: str = ""
    num_preemptions: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache when it first started

    # The engine's own. In a row of its replica it has `fed` tokens on the device, in pages that are
    # those of cache entries, or its own where `columns` has -1.
    replica: int = 0
    row: int | None = None
    fed: int = 0
    in_flight: int = 0  # steps that draw for it and that have not been read back
    columns: list[int] = dataclasses.field(default_factory=list)
    digests: list[bytes] = dataclasses.field(default_factory=list)
    num_told: int = 0  # new tokens that on_tokens has had
    end_told: bool = False
    num_offered: int = 0  # full pages that the cache has been told of
    slid: int = 0  # pages of its row that have slid away
    adopted: list[int] = dataclasses.field(default_factory=list)  # cache entries, until it is fed
    is_stale: bool = False  # its pages hold K and V of earlier weights
    swapped: int = 0  # preempted by swap: how many of its first tokens are in host memory
    swapped_slid: int = 0  # and how many pages had slid away
    hands_out: bool = False  # whether its K and V go to host memory at its end
    num_kept: int = 0  # then: of how many tokens they are there, for `hand_out`
    is_awaited: bool = False  # its K and V are on their way from another engine

    @property
    def is_done(self) -> bool:
        """No more tokens will come."""
        return self.reason is not None

    @property
    def salt(self) -> str:
        """What its pages depend on beside model and tokens."""
        return self.adapter.salt if self.adapter else ""

    @property
    def order(self) -> tuple[int, int]:
        """What sorts requests: higher priority first, then earlier arrival."""
        return -self.priority, self.number

    @property
    def num_known(self) -> int:
        """Tokens that the host knows: prompt and new ones."""
        return len(self.prompt) + len(self.tokens)

    @property
    def num_to_feed(self) -> int:
        """Tokens that exist, here or on the device, and that its row has not seen."""
        return self.num_known + self.in_flight - self.fed

    @property
    def num_left(self) -> int:
        """Draws that may still be asked for.

        One that only asks of its prompt, or for K and V, drops its draw.
        """
        least = int(self.tells_prompt or self.hands_out)
        return max(self.limit, least) - len(self.tokens) - self.in_flight

    @property
    def is_told_of_prompt(self) -> bool:
        """Whether what it feeds next tells of tokens of its prompt."""
        return self.tells_prompt and self.fed < len(self.prompt) - 1

    def known(self, begin: int, end: int) -> list[int]:
        """Known tokens begin … end − 1."""
        size = len(self.prompt)
        new = self.tokens[max(begin - size, 0) : max(end - size, 0)]
        return [*self.prompt[begin:end].tolist(), *new]

    def take(self, new: Sequence[int], logprobs: Sequence[LogProbability] = ()) -> None:
        """Appends drawn tokens and what is known of them, up to the end of the request."""
        kept = []
        for token in new:
            if self.limit == 0:
                self.reason = "length"
                break
            if token in self.stop_tokens:
                self.reason = "stop_token"
                self.stop = token, logprobs[len(kept)] if logprobs else None
                break
            kept.append(token)
            if self.matcher is not None:
                self.matcher.advance(token)
            if self.search is not None and self.search.is_stopped_by(token):
                self.reason = "stop_string"
                break
            if self.matcher is not None and self.matcher.is_complete:
                self.reason = "complete"
                break
            if len(self.tokens) + len(kept) == self.limit:
                self.reason = "length"
                break
        if not new:
            self.reason, self.detail = "no_token", "no token is left to draw from"
            if self.matcher is not None and self.matcher.error:
                self.detail = f"constraint: {self.matcher.error}"
        self.tokens.extend(kept)
        self.logprobs.extend(logprobs[: len(kept)])

    def tell(self) -> None:
        """Streams what has not been streamed: new tokens, and the reason at the end."""
        new = self.tokens[self.num_told :]
        if self.on_tokens is not None and (new or (self.is_done and not self.end_told)):
            self.num_told, self.end_told = len(self.tokens), self.is_done
            self.on_tokens(new, self.reason)
