# SPDX-License-Identifier: Apache-2.0
"""`jax-paged supervise`: starts the processes of a job on this host, and all again if one dies.

A job ends as a whole: who loses a process ends with a code of its own, or dies. Then all that are
left here are killed and waited for before the next start, so that none of them meets a new one,
holds its ports or writes its files. Each start of a job of this host alone has a port and a key of
its own, too. Nothing is imported here that takes memory: this process stays while others work.
"""

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .interrupt import EXIT_CODE

END_S = 20.0  # for processes whose job has lost one; they need 15 at most
GOOD_S = 600.0  # a start that lasts so long was a good one
MOST_DELAY_S = 30.0
BAD_INPUT = 2
_COMMANDS = ("generate", "eval", "bench-serve", "serve")  # those that a job can run
_PARENT, _KEY, _KEY_FILE = "JAX_PAGED_SUPERVISOR", "JAX_PAGED_KEY", "JAX_PAGED_KEY_FILE"
_GPUS = "CUDA_VISIBLE_DEVICES"
_PR_SET_PDEATHSIG = 1  # of Linux

Start = tuple[Sequence[str], Mapping[str, str]]  # arguments and environment of a process


class _End(NamedTuple):
    """How a process has ended that did not end well."""

    index: int
    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"process {self.index} has ended with exit code {self.code}"
        names = {one.value: one.name for one in signal.Signals}
        return f"process {self.index} was killed by {names.get(-self.code, -self.code)}"


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    rest = options.rest[options.rest[:1] == ["--"] :]
    for name, value, least in (("processes", options.processes_here, 1),
                               ("restarts", options.restarts, 0)):  # fmt: skip
        if value < least:
            return _fail(f"{name}: expected an integer >= {least}, got {value}")
    if not rest or rest[0] not in _COMMANDS:
        got = rest[0] if rest else "none"
        return _fail(f"command: expected one of {', '.join(_COMMANDS)}, got {got}")
    count = options.processes_here
    if count > 1 and any(x.startswith("--coordinator") for x in rest):
        return _fail("processes: expected 1 where --coordinator says who is who, got more")
    command = [sys.executable, "-P", "-m", "jax_paged", *rest]
    return keep_running(lambda: starts(command, count), restarts=options.restarts)


def starts(command: Sequence[str], count: int) -> list[Start]:
    """The processes of the next start: one as it is, or several that find each other here."""
    environment = dict(os.environ)
    if count == 1:
        return [(command, environment)]
    with socket.create_server(("127.0.0.1", 0)) as free:  # none of an earlier start knows this port
        where = f"127.0.0.1:{free.getsockname()[1]}"
    environment.pop(_KEY_FILE, None)
    environment[_KEY] = secrets.token_hex(32)  # nor this key
    job = ["--coordinator", where, "--num-processes", str(count), "--process-id"]
    return [
        ([*command, *job, str(i)], environment | _gpus_of(i, count, environment))
        for i in range(count)
    ]


def _gpus_of(index: int, count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """A process's share of the GPUs that CUDA_VISIBLE_DEVICES names, if it does."""
    names = [name for name in environment.get(_GPUS, "").split(",") if name]
    share = len(names) // count
    return {_GPUS: ",".join(names[index * share : (index + 1) * share])} if share else {}


def keep_running(
    start: Callable[[], Sequence[Start]], *, restarts: int, first_delay: float = 1.0
) -> int:
    """Starts processes until all of them end well.

    All are ended and started again when one ends otherwise, unless it says that its input is bad or
    this process was told to end. SIGINT and SIGTERM go to the first one, a second one kills all.

    Args:
      start: the processes of the next start.
      restarts: so many in a row; one that has lasted for ten minutes begins a new row.
      first_delay: seconds before the second start; the next ones are twice as long each, up to 30.

    Returns:
      0, or the exit code of the process that has ended first, as a shell counts.
    """
    in_row = 0
    with _Signals() as signals:
        while True:
            begin = time.monotonic()
            end = _run_once(start(), signals)
            if end is None:
                return 0
            code = end.code if end.code >= 0 else 128 - end.code
            if signals.seen or code in (BAD_INPUT, EXIT_CODE):
                return code
            in_row = 1 if time.monotonic() - begin > GOOD_S else in_row + 1
            if in_row > restarts:
                _say(f"error: {end}, after {restarts} restarts")
                return code
            delay = min(first_delay * 2 ** (in_row - 1), MOST_DELAY_S)
            _say(f"{end}; restart {in_row} of {restarts} in {delay:g} s")
            signals.wait(delay)
            if signals.seen:
                return code


def _run_once(start: Sequence[Start], signals: "_Signals") -> _End | None:
    """Runs processes until all have ended; why they did, or None if all did so well."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_process(*one)) for one in start]
        _say(f"started as process {' '.join(str(process.pid) for process in processes)}")
        until, is_told = float("inf"), False
        while any(p.poll() is None for p in processes) and time.monotonic() < until:
            if until == float("inf") and _bad_end(processes) is not None:
                until = time.monotonic() + END_S
            if signals.seen and not is_told:
                is_told = True
                processes[0].send_signal(signals.seen[0])
            if len(signals.seen) > 1:
                break
            time.sleep(0.05)
        if signals.seen:  # the others have only lost the first one
            code = processes[0].poll()
            return _End(0, -signal.SIGKILL if code is None else code) if code != 0 else None
        return _bad_end(processes)  # before those that are left are killed


def _bad_end(processes: Sequence[subprocess.Popen]) -> _End | None:
    """Of those that have ended badly: one that was killed, else one that did not lose another."""
    ends = [_End(i, p.returncode) for i, p in enumerate(processes) if p.poll()]
    return min(ends, key=lambda end: (end.code >= 0, end.code), default=None)


@contextlib.contextmanager
def _process(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator:
    """A process that does not live longer than the block, nor than this process."""
    own = {**environment, _PARENT: str(os.getpid())}
    # A terminal's Ctrl-C is for this process, which tells the first one.
    with subprocess.Popen(
        arguments, env=own, stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def end_with_supervisor() -> None:
    """Has this process killed when the one that watches it ends, however that happens."""
    parent = os.environ.pop(_PARENT, None)  # not for processes of this one
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(128 + signal.SIGKILL)


class _Signals:
    """SIGINT and SIGTERM during a block, which are only noted."""

    def __init__(self):
        self.seen: list[int] = []

    def __enter__(self) -> "_Signals":
        self._before = {n: signal.signal(n, self._take) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: object) -> None:
        self.seen.append(number)

    def wait(self, seconds: float) -> None:
        """Sleeps, up to the first of these signals."""
        end = time.monotonic() + seconds
        while not self.seen and time.monotonic() < end:
            time.sleep(0.05)


def _say(text: str) -> None:
    print(f"jax-paged: {text}", file=sys.stderr, flush=True)


def _fail(text: str) -> int:
    _say(f"error: {text}")
    return BAD_INPUT
