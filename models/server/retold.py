# SPDX-License-Identifier: Apache-2.0
"""A stream that another server begins anew: what its client has not had yet."""

import dataclasses
from typing import Any


class DifferentTextError(Exception):
    """The stream that begins anew does not begin with what the client has."""


@dataclasses.dataclass
class _Had:
    """What a client has of one answer, and how much of that the present stream has told."""

    text: str = ""
    num_logprobs: int = 0
    has_begun: bool = False
    has_ended: bool = False
    place: int = 0  # in the text
    logprob_place: int = 0


class Retold:
    """What a client has had of the events of /v1/completions or /v1/chat/completions.

    Pieces of a stream are cut wherever tokens come, so they are other ones each time; what counts
    is the text of each answer, and the number of its log-probabilities.
    """

    def __init__(self):
        self._head: dict[str, Any] = {}  # of the first stream
        self._answers: dict[int, _Had] = {}
        self._has_usage = self._is_again = False

    def begin_again(self) -> None:
        """The events from now on are those of a new stream."""
        self._is_again = True
        for had in self._answers.values():
            had.place = had.logprob_place = 0

    def new(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """What the client has not had of an event; None = nothing.

        Raises:
          DifferentTextError: what it has had is something else.
        """
        self._head = self._head or {name: event.get(name) for name in ("id", "created")}
        if not event["choices"]:
            is_old, self._has_usage = self._has_usage, True
            return None if is_old else event | self._head
        choices = [self._new_of(choice) for choice in event["choices"]]
        if not self._is_again:
            return event
        choices = [choice for choice in choices if choice is not None]
        return event | self._head | {"choices": choices} if choices else None

    def _new_of(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        had = self._answers.setdefault(choice["index"], _Had())
        is_chat = "delta" in choice
        text = (choice["delta"].get("content") if is_chat else choice["text"]) or ""
        known = had.text[had.place : had.place + len(text)]
        if not text.startswith(known) or (had.has_ended and len(text) > len(known)):
            raise DifferentTextError("the same request has got another text from another replica")
        had.place += len(text)
        text = text[len(known) :]
        had.text += text
        logprobs, count = _behind(choice.get("logprobs"), had.num_logprobs - had.logprob_place)
        had.logprob_place += _count(choice.get("logprobs"))
        had.num_logprobs = max(had.num_logprobs, had.logprob_place)
        begins, ends = not had.has_begun, choice["finish_reason"] is not None
        had.has_begun = True
        if not (text or count or begins or (ends and not had.has_ended)):
            return None
        had.has_ended |= ends
        new = {"delta": _delta(choice["delta"], text, begins)} if is_chat else {"text": text}
        return choice | new | {"logprobs": logprobs}


def _delta(delta: dict[str, Any], text: str, begins: bool) -> dict[str, Any]:
    return delta if begins else {"content": text} if text else {}


def _count(logprobs: dict[str, Any] | None) -> int:
    """Tokens whose log-probabilities these are."""
    if logprobs is None:
        return 0
    return len(logprobs["content" if "content" in logprobs else "tokens"] or ())


def _behind(logprobs: dict[str, Any] | None, had: int) -> tuple[dict[str, Any] | None, int]:
    """Those behind the first `had` tokens, and of how many tokens they are."""
    if logprobs is None:
        return None, 0
    had = min(max(had, 0), _count(logprobs))
    cut = {name: x[had:] if isinstance(x, list) else x for name, x in logprobs.items()}
    return cut, _count(cut)
