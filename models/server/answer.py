# SPDX-License-Identifier: Apache-2.0
"""One answer: the text, tokens and log-probabilities of a request as they come, for its client."""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from tokenizers import pre_tokenizers

from ..checkpoint.tokenizer import Tokenizer
from ..decoder.stream import TextStream
from ..serving.request import LogProbability, Request
from .errors import ApiError
from .metrics import Metrics
from .worker import News

_BEHIND = 16  # tokens of the prompt that new ones are decoded behind
_REASONS = {
    "stop_token": "stop", "stop_string": "stop", "complete": "stop", "length": "length",
}  # fmt: skip


class TokenBytes:
    """The bytes of single tokens, also of those that are part of a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {
            id for id, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }  # fmt: skip
        self._is_byte_level = '"ByteLevel"' in json.dumps(
            json.loads(tokenizer.backend.to_str())["decoder"]
        )
        self._byte_of = _bytes_of_symbols()
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """The bytes that a token adds to a text; those of its name, if it is a special one."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        name = self._tokenizer.backend.id_to_token(token)
        if name is None:
            return b""
        if token in self._special:
            return name.encode()
        if self._is_byte_level and all(symbol in self._byte_of for symbol in name):
            return bytes(self._byte_of[symbol] for symbol in name)
        if len(name) == 6 and name.startswith("<0x"):  # byte fallback
            return bytes([int(name[3:5], 16)])
        # Behind a token before it, because some tokenizers drop the first space of a text.
        alone = self._tokenizer.decode([token])
        return self._tokenizer.decode([token, token])[len(alone) :].encode()


def _bytes_of_symbols() -> dict[str, int]:
    """The byte of each symbol that a byte-level vocabulary writes it as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + place): byte for place, byte in enumerate(others)}
    assert table.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return table


def as_text(data: bytes) -> str:
    """The text of a token's bytes; "bytes:\\xe2\\x82" where they are no whole character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclasses.dataclass
class Piece:
    """What is new: text, tokens with their log-probabilities, and why it ends (None = it goes on).

    logprobs: (token, its log-probabilities, where it begins in the text).
    """

    text: str = ""
    logprobs: list[tuple[int, LogProbability | None, int]] = dataclasses.field(default_factory=list)
    reason: str | None = None

    def add(self, other: "Piece") -> None:
        """Appends what came behind it."""
        self.text += other.text
        self.logprobs += other.logprobs
        self.reason = other.reason


class Answer:
    """One of the answers of a `Reply`: what the worker's `Asked` is.

    Args:
      index: its number in the response.
      prompt, options: of `Engine.submit`.
      stops: stop strings.
      echo: text to begin with.
    """

    def __init__(
        self, reply: "Reply", index: int, prompt: Sequence[int], options: dict[str, Any],
        *, stops: Sequence[str], echo: str | None,
    ):  # fmt: skip
        self.index, self.prompt, self.options = index, prompt, options
        self.request: Request | None = None
        self.num_tokens = self.num_cached = 0
        self.reason: str | None = None
        self.detail = ""
        self.piece = Piece(text=echo or "")
        self._echo, self._reply = echo, reply
        self._stream = TextStream(reply.tokenizer.decode, list(prompt[-_BEHIND:]), stops)
        self._held: list[tuple[int, LogProbability | None, int]] = []
        # Where the text ends that is shown; and that of all tokens, stop strings or not.
        self._text_end = self._token_end = len(echo or "")
        self._plain = TextStream(reply.tokenizer.decode, list(prompt[-_BEHIND:]))
        self._last = reply.began
        self._prompt_told = False

    def take(self, news: News) -> None:
        """On the event loop: what a step brought."""
        if self.reason is not None:
            return
        self._count_times(news)
        piece = Piece(text=self._stream.push(news.tokens), reason=news.reason)
        if news.reason is not None:
            piece.text += self._stream.finish()
            self.reason, self.detail = news.reason, news.detail
        self.num_cached = news.num_cached
        if self._reply.tells_logprobs:
            self._take_logprobs(news, piece)
        self.num_tokens += len(news.tokens)
        self.piece.add(piece)
        self._reply.on_news(self, has_ended=news.reason is not None)

    def fail(self) -> None:
        """The answer ends here: what came for it cannot be shown."""
        self.reason = self.piece.reason = "failed"
        self._reply.on_news(self, has_ended=True)

    def _count_times(self, news: News) -> None:
        if news.tokens:
            now, metrics = time.perf_counter(), self._reply.metrics
            seconds = metrics.inter_token if self.num_tokens else metrics.first_token
            seconds.observe(now - self._last)
            metrics.new_tokens.inc(len(news.tokens))
            self._last = now

    def _take_logprobs(self, news: News, piece: Piece) -> None:
        """Log-probabilities come with the text of their tokens; those of a stop string never do."""
        if news.prompt_logprobs is not None and self._echo is not None and not self._prompt_told:
            self._prompt_told, begin = True, 0
            prompt = TextStream(self._reply.tokenizer.decode, [])
            for token, known in zip(self.prompt, news.prompt_logprobs, strict=True):
                piece.logprobs.append((int(token), known, begin))
                begin += len(prompt.push([int(token)]))
        for token, known in zip(news.tokens, news.logprobs, strict=True):
            self._held.append((token, known, self._token_end))
            self._token_end += len(self._plain.push([token]))
        if news.stop is not None:
            self._held.append((*news.stop, self._token_end))
        self._text_end += len(piece.text)
        everything = piece.reason is not None and piece.reason != "stop_string"
        while self._held and (everything or self._held[0][2] < self._text_end):
            piece.logprobs.append(self._held.pop(0))

    @property
    def has_failed(self) -> bool:
        """It has ended, and not as an answer does."""
        return self.reason is not None and self.reason not in _REASONS

    def new(self) -> Piece:
        """What has come since the last time."""
        piece, self.piece = self.piece, Piece()
        return piece


class Reply:
    """The answers to one HTTP request, and how its client waits for them.

    Args:
      tells_logprobs: whether log-probabilities are shown.
      began: when the request came, by time.perf_counter.
    """

    def __init__(
        self, tokenizer: Tokenizer, token_bytes: TokenBytes, metrics: Metrics, *,
        tells_logprobs: bool, began: float,
    ):  # fmt: skip
        self.tokenizer, self.token_bytes, self.metrics = tokenizer, token_bytes, metrics
        self.tells_logprobs = tells_logprobs
        self.answers: list[Answer] = []
        self.num_prompt_tokens = 0
        self._news: dict[int, Answer] = {}
        self._left, self.was_cancelled = 0, False
        self.began = began
        self._changed = asyncio.Event()

    def add(self, answers: Iterable[Answer]) -> None:
        """Waits for these answers, too."""
        for answer in answers:
            self.answers.append(answer)
            self._left += 1

    def on_news(self, answer: Answer, *, has_ended: bool) -> None:
        """An answer has something new."""
        self._news[answer.index] = answer
        self._left -= has_ended
        self._changed.set()

    @property
    def is_done(self) -> bool:
        """All answers have ended."""
        return self._left == 0

    async def pieces(self) -> AsyncIterator[list[tuple[Answer, Piece]]]:
        """What is new, whenever the client wants more and there is something.

        Raises:
          ApiError: an answer was refused, or the engine has failed.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            news, self._news = self._news, {}
            pieces = [(answer, answer.new()) for answer in news.values()]
            for answer, piece in pieces:
                self._check(answer, piece)
            if pieces:
                yield pieces
            if self.is_done and not self._news:
                return

    async def whole(self) -> list[tuple[Answer, Piece]]:
        """All answers at their ends; raises as `pieces` does."""
        total = {answer.index: Piece() for answer in self.answers}
        async for pieces in self.pieces():
            for answer, piece in pieces:
                total[answer.index].add(piece)
        return [(answer, total[answer.index]) for answer in self.answers]

    def _check(self, answer: Answer, piece: Piece) -> None:
        if piece.reason in (None, *_REASONS):
            return
        if piece.reason in ("refused", "no_token"):
            raise ApiError(400, answer.detail, code=piece.reason)
        if piece.reason == "cancelled":
            raise ApiError(503, "the server ends and has no time left for this request")
        raise ApiError(500, "the engine has failed", code="engine_failed")

    def usage(self) -> dict[str, Any]:
        """Counts of tokens; each prompt counts once."""
        new = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.num_prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": sum(a.num_cached for a in self.answers)},
        }


def finish_reason(reason: str | None) -> str | None:
    """As OpenAI calls it."""
    return None if reason is None else _REASONS[reason]
