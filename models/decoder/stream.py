# SPDX-License-Identifier: Apache-2.0
"""Text out of token ids as they come, one whole character at a time, up to a stop string."""

from collections.abc import Callable, Sequence

from jax_paged.checks import expect

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no whole character


class TextStream:
    """The text that new tokens add to a prompt, piece by piece.

    A character may be split over several tokens: what a decoder shows as U+FFFD at the end of the
    text is held back until it is whole, or until `finish`. Tokens are decoded behind the ones
    before them, because some tokenizers drop the first space of a text.

    The text ends before the first stop string, wherever its tokens begin and end: the one that is
    complete first. What may be the start of one is held back. `stopped` tells whether one came.

    Args:
      decode: token ids to text.
      prompt: the ids before the new ones; stop strings in it do not count.
      stop_strings: none of them empty.

    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), list(b"caf"))
    >>> [stream.push([0xC3]), stream.push([0xA9]), stream.push([0xC3]), stream.finish()]
    ['', 'é', '', '�']
    >>> stream = TextStream(lambda ids: bytes(ids).decode(), b"", stop_strings=["END"])
    >>> [stream.push(b"an E"), stream.push(b"N"), stream.push(b"TEN"), stream.push(b"D."),
    ...  stream.stopped]
    ['an ', '', 'ENT', '', True]
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], stop_strings: Sequence[str] = ()):
        self.stopped = False
        self.stop_strings, self._held = stop_strings, ""
        self._decode = decode
        self._ids = list(prompt)  # from a character boundary on
        self._boundary = len(self._ids)  # the last character boundary within them
        self._told = len(decode(self._ids))  # characters of their text that are known to the caller

    def push(self, ids: Sequence[int]) -> str:
        """Takes new ids; returns the text that is certain by now and was not returned before."""
        return self._up_to_stop(self._whole(ids))

    def is_stopped_by(self, token: int) -> bool:
        """Takes a new id; tells whether a stop string has come."""
        self.push([token])
        return self.stopped

    def finish(self) -> str:
        """The rest, with U+FFFD for what never became whole."""
        text = self._up_to_stop(self._decode(self._ids)[self._told :])
        held, self._held = self._held, ""
        return text + held

    def _up_to_stop(self, piece: str) -> str:
        """The text that is not held back any longer when this piece has come."""
        if self.stopped:
            return ""
        text = self._held + piece
        places = [(text.find(stop), len(stop)) for stop in self.stop_strings]
        found = [(begin + size, begin) for begin, size in places if begin >= 0]
        if found:
            self.stopped, self._held = True, ""
            _, begin = min(found)  # complete first
            return text[:begin]
        size = max((_start_at_end(text, stop) for stop in self.stop_strings), default=0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]

    def _whole(self, ids: Sequence[int]) -> str:
        """The new text in whole characters."""
        if not ids:
            return ""
        self._ids.extend(ids)
        text = self._decode(self._ids)
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._told :]
        self._told += len(piece)
        if piece and certain == text:
            self._forget()
        return piece

    def _forget(self) -> None:
        """Drops ids that no longer matter: the text up to here ends with a whole character."""
        recent = self._ids[self._boundary :]
        self._ids, self._boundary = recent, len(recent)
        self._told = len(self._decode(recent))


def _start_at_end(text: str, stop: str) -> int:
    """How many characters at the end of a text are the start of the stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def as_searches(
    prompts: Sequence[Sequence[int]], stop_strings: Sequence[str], decode: Decode | None
) -> list[TextStream | None]:
    """What looks for stop strings behind each prompt; None where there are none to look for."""
    ok = not isinstance(stop_strings, str) and all(isinstance(s, str) and s for s in stop_strings)
    expect(ok, "stop_strings", "a list of texts that are not empty", repr(stop_strings))
    if not stop_strings:
        return [None] * len(prompts)
    expect(decode is not None, "decode", "a function from token ids to text", decode)
    assert decode is not None
    return [TextStream(decode, [int(t) for t in p], stop_strings) for p in prompts]
