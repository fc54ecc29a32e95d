# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in the command line: exit code 130, at whatever moment it comes.

As an exception it may come in the middle of an import, or where C++ calls Python back and loses it.
It may also leave one of XLA's compiling threads behind, which crashes as soon as Python has taken
the device away. So while there is nothing to keep, Ctrl-C ends the process on the spot.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

EXIT_CODE = 130  # as a shell counts: 128 + SIGINT

_cleanups: list[Callable[[], object]] = []


def leave(*_: object) -> None:
    """Ends the process at once: the handler of SIGINT while there is nothing to keep."""
    if os.isatty(2):
        os.write(2, b"\r\033[K")  # the line that says what goes on
    leave_with(EXIT_CODE)


def leave_with(code: int) -> NoReturn:
    """Ends the process at once, from whatever thread."""
    for clean in _cleanups:
        clean()
    os._exit(code)


def leave_at_ctrl_c() -> None:
    """Installs `leave`, unless Ctrl-C is ignored or somebody has a handler for it already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


@contextlib.contextmanager
def before_leaving(clean: Callable[[], object]) -> Iterator[None]:
    """Has `leave` call clean() during the block."""
    _cleanups.append(clean)
    try:
        yield
    finally:
        _cleanups.remove(clean)


def note_ctrl_c() -> Callable[[], bool]:
    """In place of `leave`, notes the first Ctrl-C; the next one leaves.

    Returns:
      A function that tells whether there was one. Always False where `leave` was not installed.
    """
    pressed = []

    def note(*_: object) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, leave)

    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, note)
    return lambda: bool(pressed)


def raise_at_ctrl_c() -> None:
    """In place of `leave`, raises KeyboardInterrupt as Python does."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back to the end of the block.

    An exception between a call that donates the state and the assignment of its result would lose
    the state. Outside the main thread there is nothing to hold back, nor where Ctrl-C raises
    nothing but ends the process.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or handler is leave:
        yield
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda *event: pressed.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        handler(*pressed[0])


def _is_command() -> bool:
    """Whether this process is `jax-paged` or `python -m jax_paged`."""
    if sys.argv[:1] == ["-m"]:  # Python looks for the module that it will run
        name = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]
        return name.removeprefix("-m") == "jax_paged"
    return os.path.basename(sys.argv[0] if sys.argv else "") == "jax-paged"


if _is_command():  # the package imports jax, which takes a second
    leave_at_ctrl_c()
    gc.disable()  # collecting what imports leave takes another 0.3 s; main() turns it on
