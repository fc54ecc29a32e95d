# SPDX-License-Identifier: Apache-2.0
"""The processes of a job: orders from the first one to the others, and the end of all together.

    with start_processes("10.0.0.1:1234", num_processes=2, process_id=rank) as processes:
        model, config, tokenizer = load_checkpoint(path, mesh=make_mesh)
        if processes.is_first:
            engine = Engine(model, num_pages=512, processes=processes)
            …
        else:
            follow(processes, model)

Each process has a link to the first one. Each side says something every second. A process whose
link is silent for ten seconds, is closed or carries something wrong is gone: then all end, with one
line each and the exit code EXIT_LOST, whatever their main threads wait for.
"""

import atexit
import contextlib
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from jax_paged._start.interrupt import leave_with
from jax_paged.checks import expect

from .link import Link, LinkError, accept, connect, host_and_port, read_key
from .orders import Order, decode, encode

EXIT_LOST = 75  # as sysexits.h has it (EX_TEMPFAIL): another start may go well
SILENCE_S = 10.0
BEAT_S = 1.0
_JOIN_S = 30.0
_ORDER, _HERE, _END, _STOP = b"o", b"h", b"e", b"s"  # the first byte of a frame; a beat is empty
_ADDRESS_BYTES = 256


class Processes:
    """The processes of a job, seen from one of them. `start_processes` makes it.

    index: of this process; 0 is the first one.
    count: of all.

    Args:
      links: by the index of the process at the other end; the first process has one to each other.
    """

    def __init__(self, index: int, count: int, links: Mapping[int, Link]):
        self.index, self.count, self._links = index, count, links
        self.owner: object = None  # whose orders they are
        self.has_failed = False
        self._num_sent = 0
        self._inbox: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._here = {other: threading.Semaphore(0) for other in links}
        self._is_over = threading.Event()
        self._leaving = threading.Lock()
        self._listeners = [
            threading.Thread(target=self._listen, args=pair, daemon=True) for pair in links.items()
        ]
        for thread in (*self._listeners, threading.Thread(target=self._beat, daemon=True)):
            thread.start()

    @property
    def is_first(self) -> bool:
        """Whether this process gives the orders."""
        return self.index == 0

    def send(self, order: Order) -> None:
        """Tells all others what to do; they do it in the order of the calls. Of the first one."""
        message = encode(order, self._num_sent)
        self._num_sent += 1
        for other, link in self._links.items():
            try:
                link.send(_ORDER, *message)
            except LinkError as error:
                self.stop(_gone(other, error))

    def receive(self) -> Order | None:
        """The next order; waits for it. None: the first process is done. Of the others."""
        order = self._inbox.get()
        if order is None:
            self._inbox.put(None)  # for who asks again
        return order

    def share(self, values: Sequence[Any], arrays: Sequence[Any]) -> tuple[list, list[np.ndarray]]:
        """Values, of JSON, and arrays of the first process, in all.

        Each process calls it at the same place of its program; what the others give is not used.
        """
        order: Order | None = Order("share", values, [np.asarray(x) for x in arrays])
        if self.is_first:
            self.send(order)
        else:
            order = self.receive()
            got = "the end" if order is None else order.name
            expect(got == "share", "process 0", "an order to share", got)
            assert order is not None
        return list(order.values), list(order.arrays)

    def meet(self) -> None:
        """The first process waits until each of the others has called it as often as it has itself.

        For what takes them different times, as compiling does: whoever is ahead would wait for them
        in a collective, and gloo fails when that takes 30 seconds.
        """
        if self.is_first:
            for here in self._here.values():
                here.acquire()
        else:
            self._tell(_HERE)

    def close(self) -> None:
        """Waits until all processes are here, and lets them go. The first one says so first."""
        if self.is_first:
            self._tell(_END)
        else:
            order = self.receive()
            expect(order is None, "process 0", "no more orders", order and order.name)
            self._tell(_END)
        for thread in self._listeners:
            thread.join()
        self._is_over.set()
        for link in self._links.values():
            link.close()

    def stop(self, reason: str) -> NoReturn:
        """Ends all processes: this one now, with a line on stderr and the exit code EXIT_LOST."""
        self._leaving.acquire()  # the first reason counts; nobody comes behind it
        self._tell(_STOP, reason.encode(), patience=BEAT_S)
        print(f"jax-paged: error: {reason}", file=sys.stderr, flush=True)
        leave_with(EXIT_LOST)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, RuntimeError):  # what a collective does when a process is gone
            time.sleep(SILENCE_S + BEAT_S)  # the listener of that process then ends this one
        self._leaving.acquire()
        reason = f"process {self.index} has failed: {error!r:.500}"
        self._tell(_STOP, reason.encode(), patience=BEAT_S)
        self.has_failed = True
        atexit.register(leave_failed, 1)  # before JAX, which would wait for the others

    # Threads

    def _tell(self, *parts: bytes, patience: float | None = None) -> None:
        """To all that still listen."""
        for link in self._links.values():
            with contextlib.suppress(LinkError):
                link.send(*parts, patience=patience)

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            self._tell()

    def _listen(self, other: int, link: Link) -> None:
        """Takes what another process sends, up to its end."""
        expected = 0
        try:
            while True:
                frame = link.receive()
                kind, rest = bytes(frame[:1]), memoryview(frame)[1:]
                if kind == _END:
                    self._inbox.put(None)
                    return
                if kind == _STOP:
                    self.stop(bytes(rest).decode(errors="replace"))
                if kind == _HERE:
                    self._here[other].release()
                elif kind == _ORDER:
                    order, number = decode(rest)
                    if number != expected or self.is_first:
                        wanted = "no order" if self.is_first else f"order {expected}"
                        self.stop(
                            f"process {self.index} expected {wanted}, got {number} ({order.name})"
                        )
                    expected += 1
                    self._inbox.put(order)
                elif kind:
                    raise ValueError(f"frame: expected an order or the end, got {kind!r}")
        except LinkError as error:
            self.stop(_gone(other, error))
        except ValueError as error:
            self.stop(f"process {self.index} cannot read what process {other} has sent: {error}")


def leave_failed(code: int) -> NoReturn:
    """Ends this process after its own error."""
    sys.stdout.flush()
    sys.stderr.flush()
    leave_with(code)


def _gone(other: int, error: LinkError) -> str:
    return f"process {other} is gone: {error}"


def start_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Processes:
    """Makes this process one of a job, before anything else uses JAX.

    Starts `jax.distributed`, so that JAX sees the devices of all processes, and a link from each
    process to the first one. The links are authenticated by a key that all processes have: at least
    16 bytes, in the file that JAX_PAGED_KEY_FILE names or in JAX_PAGED_KEY.

    Args:
      coordinator: host and port where the first process listens for the others of JAX.
      num_processes: of the job.
      process_id: of this process, from 0.
      all three: None = as JAX finds out itself, under Slurm, Open MPI and others
        (`jax.distributed.initialize`).

    Returns:
      A context. At its end each process waits for all others; an error in one ends all.

    Raises:
      ValueError: there is no key, an argument is out of range, or JAX cannot find it out.
      ConnectionError: a process has another key, does not come, or ends meanwhile. The exit code is
        EXIT_LOST then.
    """
    key = read_key()
    host = None if coordinator is None else host_and_port("coordinator", coordinator)[0]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
        index, count = jax.process_index(), jax.process_count()
        return Processes(index, count, _links(index, count, key, host))
    except (LinkError, OSError, jax.errors.JaxRuntimeError) as error:
        atexit.register(leave_failed, EXIT_LOST)
        what = "this process" if process_id is None else f"process {process_id}"
        raise ConnectionError(f"{what} found no job: {error}") from None


def _links(index: int, count: int, key: bytes, host: str | None) -> dict[int, Link]:
    """Those between the first process and the others. JAX tells them where it listens.

    Args:
      host: where this process finds the first one; None = the first one tells that, too.
    """
    from jax.experimental import multihost_utils  # not for who needs none of this

    def of_first(address: str) -> str:
        told = np.frombuffer(address.encode().ljust(_ADDRESS_BYTES, b"\0"), np.uint8)
        told = np.asarray(multihost_utils.broadcast_one_to_all(told), np.uint8)
        return told.tobytes().rstrip(b"\0").decode()

    if index == 0:
        host = host or socket.gethostname()
        with _listen_at(host) as listener:
            of_first(f"{listener.getsockname()[1]} {host}")
            return dict(_accepted(listener, count, key))
    port, _, told = of_first("").partition(" ")
    sock = socket.create_connection((host or told, int(port)), timeout=_JOIN_S)
    return {0: connect(sock, key, index, silence=SILENCE_S)}


def _listen_at(host: str) -> socket.socket:
    """On a free port: of this machine alone if it names itself so, else of all its addresses."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    is_here = host == "localhost" or host.startswith("127.") or host == "::1"
    return socket.create_server((host if is_here else "", 0), family=family)


def _accepted(listener: socket.socket, count: int, key: bytes) -> Iterator[tuple[int, Link]]:
    """A link to each other process; who else connects is turned away."""
    missing, end = set(range(1, count)), time.monotonic() + _JOIN_S
    while missing:
        left = end - time.monotonic()
        if left <= 0:
            raise LinkError(f"expected all within {_JOIN_S:g} s, got none of {sorted(missing)}")
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError, LinkError), contextlib.ExitStack() as unless:
            sock = unless.enter_context(listener.accept()[0])
            link, other = accept(sock, key, silence=SILENCE_S)
            if other in missing:
                unless.pop_all()
                missing.remove(other)
                yield other, link
