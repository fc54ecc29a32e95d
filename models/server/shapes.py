# SPDX-License-Identifier: Apache-2.0
"""Answers in the shapes of OpenAI's two endpoints, whole and in pieces."""

from typing import Any

from ..serving.request import LogProbability
from .answer import Answer, Piece, TokenBytes, as_text, finish_reason


class CompletionShape:
    """/v1/completions.

    Args:
      head: id, created and model.
      top: so many of the likeliest tokens are told in each place; None = no log-probabilities.
    """

    endpoint, kind, chunk_kind = "completions", "text_completion", "text_completion"

    def __init__(self, head: dict[str, Any], token_bytes: TokenBytes, top: int | None):
        self._head, self._bytes, self._top_count = head, token_bytes, top
        self._tells = top is not None

    def begin(self, answer: Answer) -> dict[str, Any] | None:
        """What a stream begins with."""
        return None

    def chunk(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        """A piece of a stream."""
        return self._head | {"object": self.chunk_kind, "choices": [self._choice(answer, piece)]}

    def whole(self, answers: list[tuple[Answer, Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The response without a stream."""
        choices = [self._choice(answer, piece) for answer, piece in answers]
        return self._head | {"object": self.kind, "choices": choices, "usage": usage}

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last event, with counts."""
        return self._head | {"object": self.chunk_kind, "choices": [], "usage": usage}

    def _choice(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        return {
            "index": answer.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if self._tells else None,
            "finish_reason": finish_reason(piece.reason),
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        tokens, values, tops, offsets = [], [], [], []
        for token, known, begin in piece.logprobs:
            tokens.append(as_text(self._bytes(token)))
            values.append(None if known is None else _finite(known.model))
            tops.append(None if known is None else self._top(token, known))
            offsets.append(begin)
        return {
            "tokens": tokens, "token_logprobs": values, "top_logprobs": tops,
            "text_offset": offsets,
        }  # fmt: skip

    def _top(self, token: int, known: LogProbability) -> dict[str, float]:
        """The likeliest tokens, and the token itself."""
        top: dict[str, float] = {}
        for one, value in (*known.top[: self._top_count], (token, known.model)):
            top.setdefault(as_text(self._bytes(one)), _finite(value))
        return top


class ChatShape(CompletionShape):
    """/v1/chat/completions."""

    endpoint, kind, chunk_kind = "chat", "chat.completion", "chat.completion.chunk"

    def begin(self, answer: Answer) -> dict[str, Any] | None:
        """The role of an answer."""
        return self._head | {
            "object": self.chunk_kind,
            "choices": [
                {
                    "index": answer.index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
        }

    def chunk(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        """A piece of a stream."""
        choice = {
            "index": answer.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece) if self._tells else None,
            "finish_reason": finish_reason(piece.reason),
        }
        return self._head | {"object": self.chunk_kind, "choices": [choice]}

    def _choice(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece) if self._tells else None,
            "finish_reason": finish_reason(piece.reason),
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        content = []
        for token, known, _ in piece.logprobs:
            if known is not None:
                top = [self._entry(*pair) for pair in known.top[: self._top_count]]
                content.append(self._entry(token, known.model) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        data = self._bytes(token)
        return {"token": as_text(data), "logprob": _finite(value), "bytes": list(data)}


def _finite(value: float) -> float:
    """JSON has no infinity."""
    return max(value, -9999.0)
