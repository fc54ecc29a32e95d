# SPDX-License-Identifier: Apache-2.0
"""Bytes from and to clients: bodies that are bounded in size, depth and time; server-sent events.

A response is streamed as fast as its client reads. Text that comes meanwhile is one longer piece
later, so a slow reader costs no more memory than its text, and nobody waits for it.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

MAX_DEPTH = 64
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def as_json(value: Any) -> bytes:
    """UTF-8 JSON; what is no text of Unicode becomes "?"."""
    return _encode(value).encode("utf-8", errors="replace")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"


END = b"data: [DONE]\n\n"


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
      ValueError: it is no JSON object, is nested deeper than MAX_DEPTH, or has a number or a text
        that is none.
    """
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(data) > MAX_DEPTH:
        raise ValueError(f"body: expected at most {MAX_DEPTH} levels of nesting, got more")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"body: expected UTF-8, got another byte at {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"body: expected JSON, got {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise ValueError(f"body: expected a JSON object, got {_kind(value)}")
    if _SURROGATE.search(data):
        try:
            _encode(value).encode()
        except UnicodeEncodeError:
            raise ValueError("body: expected Unicode, got half of a surrogate pair") from None
    return value


def _depth(data: bytes) -> int:
    depth = deepest = 0
    for byte in _STRING.sub(b"", data):
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def _no_number(name: str) -> Any:
    raise ValueError(f"body: expected JSON, got the number {name}")


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


class EventStream(Response):
    """Server-sent events, as fast as the client reads them.

    Args:
      pieces: what to send; closed at the end, however it comes.
      on_end: called with "done", or with "disconnected" when the client has gone, or with "stalled"
        when it has not read for `stall_seconds`; its connection is cut then.
    """

    media_type = "text/event-stream"

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], on_end: Callable[[str], None],
        stall_seconds: float,
    ):  # fmt: skip
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._pieces, self._on_end, self._stall = pieces, on_end, stall_seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends everything."""
        watch = asyncio.create_task(_watch(receive, lambda: self._on_end("disconnected")))
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        try:
            await send(start)
            async for piece in self._pieces:
                async with asyncio.timeout(self._stall):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            async with asyncio.timeout(self._stall):
                await send({"type": "http.response.body", "body": b""})
            self._on_end("done")
        except TimeoutError:
            self._on_end("stalled")
            scope[CUT]()
            await asyncio.sleep(0.05)  # the server hears of it
        finally:
            watch.cancel()
            self._on_end("disconnected")  # if nothing else has ended it
            await self._pieces.aclose()


CUT = "jax_paged.cut"  # in the scope: what cuts the connection, whatever its buffer holds


def with_cut(app: ASGIApp) -> ASGIApp:
    """The app with `CUT` in its scopes."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        # uvicorn gives a method of what holds the connection.
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        cut = getattr(transport, "abort", lambda: None)
        await app(scope | {CUT: cut}, receive, send)

    return wrapped


async def _watch(receive: Any, on_gone: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()


async def unless_gone(receive: Any, work: Any, on_gone: Callable[[], object]) -> Any:
    """The result of a coroutine; while it runs, on_gone() is called if the client goes."""
    watch = asyncio.create_task(_watch(receive, on_gone))
    try:
        return await work
    finally:
        watch.cancel()


def once(function: Callable[[str], object]) -> Callable[[str], None]:
    """The function, but only its first call does anything."""
    called: list[str] = []

    def call(text: str) -> None:
        if not called:
            called.append(text)
            function(text)

    return call
