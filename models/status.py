# SPDX-License-Identifier: Apache-2.0
"""A line on stderr that says what goes on, where stderr is a terminal."""

import sys


class Status:
    """The line; each `say` takes the place of the one before."""

    def __init__(self):
        self._shown = True  # what the start of the program has said

    def say(self, text: str) -> None:
        """Shows the text until the next call."""
        self._write(text)
        self._shown = True

    def tell(self, text: str) -> None:
        """Prints a line that stays, on any stderr."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the line away, before something else is printed."""
        if self._shown:
            self._write("")
        self._shown = False

    def _write(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
