"""Text out of token ids as they come, one whole character at a time."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no whole character


class TextStream:
    """The text that new tokens add to a prompt, piece by piece.

    A character may be split over several tokens: what a decoder shows as U+FFFD at the end of the
    text is held back until it is whole, or until `finish`. Tokens are decoded behind the ones
    before them, because some tokenizers drop the first space of a text.

    Args:
      decode: token ids to text.
      prompt: the ids before the new ones.

    >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), list(b"caf"))
    >>> [stream.push([0xC3]), stream.push([0xA9]), stream.push([0xC3]), stream.finish()]
    ['', 'é', '', '�']
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]):
        self._decode = decode
        self._ids = list(prompt)  # from a character boundary on
        self._boundary = len(self._ids)  # the last character boundary within them
        self._told = len(decode(self._ids))  # characters of their text that are known to the caller

    def push(self, ids: Sequence[int]) -> str:
        """Takes new ids; returns the text that is certain by now and was not returned before."""
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

    def finish(self) -> str:
        """The rest, with U+FFFD for what never became whole."""
        return self._decode(self._ids)[self._told :]

    def _forget(self) -> None:
        """Drops ids that no longer matter: the text up to here ends with a whole character."""
        recent = self._ids[self._boundary :]
        self._ids, self._boundary = recent, len(recent)
        self._told = len(self._decode(recent))
