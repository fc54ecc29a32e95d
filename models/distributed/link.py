# SPDX-License-Identifier: Apache-2.0
"""Authenticated frames over one TCP connection between two processes of a job.

Both know a key. Who connects sends its number and a nonce; the other side answers with a nonce of
its own and proves with both that it knows the key; then the first one proves it, too. From key and
nonces each direction gets a key of its own, so that nothing of another connection is ever valid.

    frame = length (u32) · HMAC-SHA256(number of the frame · length · payload) · payload

Frames are counted and their numbers are not sent: one that is forged, repeated, left out, late
or out of turn has the wrong HMAC. It ends the connection, and nobody looks at its payload. Nothing
is encrypted.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from pathlib import Path

from jax_paged.checks import expect

MAX_FRAME_BYTES = 1 << 30
LEAST_KEY_BYTES = 16
KEY, KEY_FILE = "JAX_PAGED_KEY", "JAX_PAGED_KEY_FILE"
_PROTOCOL = b"jax_paged link 1"
_NONCE_BYTES = 32
_TAG_BYTES = hashlib.sha256().digest_size
_NUMBER, _LENGTH = struct.Struct(">Q"), struct.Struct(">I")


class LinkError(Exception):
    """The other side has closed the connection, or a frame is not one of the other side's."""


def read_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """The key of the job: what the file JAX_PAGED_KEY_FILE holds, else JAX_PAGED_KEY.

    Raises:
      ValueError: there is none, or it has fewer than 16 bytes.
    """
    if KEY_FILE in environment:
        name, key = environment[KEY_FILE], Path(environment[KEY_FILE]).read_bytes().strip()
    else:
        name, key = KEY, environment.get(KEY, "").encode()
    text = f"a key of at least {LEAST_KEY_BYTES} bytes ({KEY_FILE} or {KEY}), the same in all"
    got = f"{len(key)} bytes" if key else "none"
    expect(len(key) >= LEAST_KEY_BYTES, name, f"{text} processes", got)
    return key


def host_and_port(name: str, address: str, *, least: int = 1) -> tuple[str, int]:
    """Of HOST:PORT, or [HOST]:PORT, with a port from `least` on.

    Raises:
      ValueError: the address is none; it is called `name`.
    """
    host, _, port = address.rpartition(":")
    ok = bool(host) and port.isdecimal() and least <= int(port) < 2**16
    expect(ok, name, "HOST:PORT", repr(address))
    return host.removeprefix("[").removesuffix("]"), int(port)


def joined(host: str, port: int) -> str:
    """HOST:PORT, as `host_and_port` takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Link:
    """One side of a connection; `connect` and `accept` make it. Sending is safe in any thread."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes):
        self._socket = sock
        self._keys = send_key, receive_key
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()

    def send(self, *parts: bytes | memoryview, patience: float | None = None) -> None:
        """Sends one frame with these parts one after another as its payload.

        Args:
          patience: of the last frame of a link: seconds to wait for another thread, and for the
            other side. None = those of the link.

        Raises:
          ValueError: the frame is longer than the other side would take.
          LinkError: the other side takes nothing.
        """
        views = [memoryview(part).cast("B") for part in parts]
        length = sum(view.nbytes for view in views)
        expect(length <= MAX_FRAME_BYTES, "frame", f"at most {MAX_FRAME_BYTES} bytes", length)
        if not self._sending.acquire(timeout=-1 if patience is None else patience):
            raise LinkError("another thread is sending")
        try:
            if patience is not None:
                self._socket.settimeout(patience)
            head = _LENGTH.pack(length)
            tag = _frame_tag(self._keys[0], self._num_sent, head, *views)
            self._num_sent += 1
            for view in (memoryview(head + tag), *views):
                _send_all(self._socket, view)
        finally:
            self._sending.release()

    def receive(self) -> bytearray:
        """The payload of the next frame.

        Raises:
          LinkError: there is none, or it is not what the other side has sent next.
        """
        head = _read(self._socket, _LENGTH.size)
        tag = _read(self._socket, _TAG_BYTES)
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME_BYTES:
            raise LinkError(f"a frame of {length} bytes came; at most {MAX_FRAME_BYTES} are taken")
        payload = _read(self._socket, length)
        want = _frame_tag(self._keys[1], self._num_received, head, payload)
        if not hmac.compare_digest(want, tag):
            raise LinkError(f"frame {self._num_received} is not authentic, or not the next one")
        self._num_received += 1
        return payload

    def close(self) -> None:
        """Ends the connection; who waits for a frame of it gets a LinkError."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(sock: socket.socket, key: bytes, number: int, *, silence: float) -> Link:
    """The link of process `number` over a connection that it has opened.

    Args:
      silence: seconds without a byte after which the other side counts as gone.

    Raises:
      LinkError: the other side does not know the key, or says nothing.
    """
    sock.settimeout(silence)
    hello = _PROTOCOL + _LENGTH.pack(number) + secrets.token_bytes(_NONCE_BYTES)
    _send_all(sock, memoryview(hello))
    nonce, proof = _read(sock, _NONCE_BYTES), _read(sock, _TAG_BYTES)
    both = hello + bytes(nonce)
    if not hmac.compare_digest(_tag(key, b"answer", both), proof):
        raise LinkError("the other side does not know the key")
    _send_all(sock, memoryview(_tag(key, b"confirm", both)))
    _send_at_once(sock)
    return Link(sock, _tag(key, b"up", both), _tag(key, b"down", both))


def accept(sock: socket.socket, key: bytes, *, silence: float) -> tuple[Link, int]:
    """The link over a connection that another process has opened, and its number.

    Raises:
      LinkError: as `connect`.
    """
    sock.settimeout(silence)
    hello = _read(sock, len(_PROTOCOL) + _LENGTH.size + _NONCE_BYTES)
    if not hello.startswith(_PROTOCOL):
        raise LinkError("the other side speaks another protocol")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    both = bytes(hello) + nonce
    _send_all(sock, memoryview(nonce + _tag(key, b"answer", both)))
    if not hmac.compare_digest(_tag(key, b"confirm", both), _read(sock, _TAG_BYTES)):
        raise LinkError("the other side does not know the key")
    _send_at_once(sock)
    (number,) = _LENGTH.unpack_from(hello, len(_PROTOCOL))
    return Link(sock, _tag(key, b"down", both), _tag(key, b"up", both)), number


def _tag(key: bytes, label: bytes, text: bytes) -> bytes:
    return hmac.digest(key, label + b"\0" + text, "sha256")


def _frame_tag(key: bytes, number: int, *parts: bytes | bytearray | memoryview) -> bytes:
    made = hmac.new(key, _NUMBER.pack(number), "sha256")
    for part in parts:
        made.update(part)
    return made.digest()


def _send_at_once(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send_all(sock: socket.socket, view: memoryview) -> None:
    """As `sendall`, whose timeout would be one for all bytes together."""
    try:
        while view:
            view = view[sock.send(view) :]
    except TimeoutError:
        raise LinkError("it takes no more") from None
    except OSError as error:
        raise LinkError(f"its connection is closed ({error.strerror})") from None


def _read(sock: socket.socket, count: int) -> bytearray:
    """Just so many bytes."""
    data = bytearray(count)
    view = memoryview(data)
    try:
        while view:
            got = sock.recv_into(view)
            if not got:
                raise LinkError("its connection is closed")
            view = view[got:]
    except TimeoutError:
        raise LinkError(f"nothing was heard of it for {sock.gettimeout():g} s") from None
    except OSError as error:
        raise LinkError(f"its connection is closed ({error.strerror})") from None
    return data
