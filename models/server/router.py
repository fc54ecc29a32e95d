# SPDX-License-Identifier: Apache-2.0
"""Several servers of one model behind one address: a request outlives the server that has it.

A request goes to the replica whose prefix cache should have its beginning. When that replica dies,
the request goes to another one. Its tokens are the same there, because they depend on the request
alone: one without a seed gets one here. Of a stream, what the client has had is left out.
"""

import asyncio
import functools
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import httpx2
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jax_paged.checks import expect

from .errors import HANDLERS, ApiError
from .gate import Gate
from .limits import Limits
from .replica import Replica, pick, prefix_key
from .retold import DifferentTextError, Retold
from .wire import END, EventStream, as_json, event, once, unless_gone, with_cut

_log = logging.getLogger("jax_paged.server")
MOST_LOSSES = 3  # replicas that a request may have lost: it may be what ends them
_BUSY = (429, 500, 502, 503, 504)  # another replica may do better
_KEPT = ("content-type", "retry-after", "www-authenticate")
_LOST = (httpx2.TransportError, httpx2.StreamError, TimeoutError, json.JSONDecodeError)
_PAGES = ("/v1/models", "/", "/chat.css", "/chat.js")  # any replica has them


class _Asked:
    """A request, and the replicas that it cannot go to."""

    def __init__(self, request: Request, body: dict[str, Any]):
        if body.get("seed") is None:
            body = body | {"seed": secrets.randbits(32)}
        self.path, self.content, self.key = request.url.path, as_json(body), prefix_key(body)
        self.headers = _headers_to(request) | {"content-type": "application/json"}
        self.but: set[Replica] = set()
        self.num_lost = 0


class Router:
    """The API of OpenAI in front of replicas that have it, each a `jax-paged serve`.

    What it has of a server is what `serve_until` asks for.

    Args:
      urls: of the replicas, one at least.
      limits: those of sizes and times; replicas have their own.
      api_key, local_only: as for `Service`. Replicas get the key that the client has sent.
    """

    on_failure: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self, urls: Sequence[str], *, limits: Limits | None = None, api_key: str | None = None,
        local_only: bool = True,
    ):  # fmt: skip
        urls = [_checked_url(url) for url in urls]
        expect(0 < len(urls) == len(set(urls)), "to", "different URLs, at least one", urls)
        self.name = f"{len(urls)} replicas"
        self.replicas = [Replica(url) for url in urls]
        self.limits = Limits() if limits is None else limits
        self.is_draining, self.num_active = False, 0
        self._gate = Gate(self.limits, api_key=api_key, local_only=local_only)
        self._metrics()
        routes = [
            *(
                Route(f"/v1/{path}", self._ask, methods=["POST"])
                for path in ("completions", "chat/completions")
            ),
            *(Route(path, self._page) for path in _PAGES),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
        ]
        self.app = with_cut(Starlette(routes=routes, exception_handlers=HANDLERS))

    def _metrics(self) -> None:
        self._registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self._registry}
        name = "jax_paged_router"
        self._requests = Counter(f"{name}_requests", "Requests, by their end.", ["end"], **made)
        self.lost = Counter(f"{name}_lost", "Requests that a replica has lost.", **made)
        ready = Gauge(f"{name}_ready", "Whether a replica takes requests.", ["url"], **made)
        opened = Gauge(f"{name}_open", "Requests that a replica has.", ["url"], **made)
        for one in self.replicas:
            ready.labels(one.url).set_function(functools.partial(getattr, one, "is_ready"))
            opened.labels(one.url).set_function(functools.partial(getattr, one, "num_open"))

    # From start to end

    def start(self) -> None:
        """Begins to watch the replicas; called on the event loop."""
        connections = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
        times = httpx2.Timeout(None, connect=2.0)
        self._client = httpx2.AsyncClient(limits=connections, timeout=times, trust_env=False)
        self._watches = [asyncio.create_task(one.watch(self._client)) for one in self.replicas]

    async def drain(self) -> None:
        """Refuses new requests, and waits for running ones within `drain_seconds`."""
        self.is_draining = True
        end = time.monotonic() + self.limits.drain_seconds
        while self.num_active and time.monotonic() < end:
            await asyncio.sleep(0.05)
        for task in self._watches:
            task.cancel()
        await self._client.aclose()

    def stop(self) -> None:
        """Nothing is left to end."""

    # Requests

    async def _ask(self, request: Request) -> Response:
        self._gate.admit(request)
        if self.is_draining:
            raise ApiError(503, "the router ends", code="draining", headers={"retry-after": "10"})
        body = await self._gate.body(request, asyncio.to_thread)
        asked = _Asked(request, body)
        self.num_active += 1
        left = once(self._left)
        try:
            pieces = self._events(asked) if body.get("stream") is True else None
            work = self._whole(asked) if pieces is None else anext(pieces)
            first = await _unless_gone(request, work)
        except ClientDisconnect:
            left("disconnected")
            return Response(status_code=499)
        except ApiError as error:
            left(f"error_{error.status}")
            raise
        except BaseException:
            left("disconnected")
            raise
        if isinstance(first, Response):
            left("done" if first.status_code == 200 else f"error_{first.status_code}")
            return first
        assert pieces is not None
        return EventStream(_joined(first, pieces, left), left, self.limits.stall_seconds)

    def _left(self, end: str) -> None:
        self.num_active -= 1
        self._requests.labels(end).inc()

    async def _begun(self, asked: _Asked) -> tuple[Replica, httpx2.Response]:
        """The response of a replica that takes the request, and counts as one that has it.

        Raises:
          ApiError: there is none.
        """
        refusal = ApiError(503, "no replica is ready", headers={"retry-after": "1"})
        for one in self.replicas:
            await one.is_known.wait()  # when the router has just begun
        while True:
            replica = pick(self.replicas, asked.key, asked.but)
            if replica is None:
                raise refusal
            replica.num_open += 1
            is_begun = False
            try:
                async with replica.waiting():
                    response = await self._client.send(
                        self._client.build_request(
                            "POST", replica.url + asked.path, content=asked.content,
                            headers=asked.headers,
                        ),
                        stream=True,
                    )  # fmt: skip
                    if response.status_code not in _BUSY:
                        is_begun = True
                        return replica, response
                    refusal = _as_error(response, await response.aread())
                asked.but.add(replica)
                if response.status_code == 503:
                    replica.set_ready(False, "it refuses requests")
            except _LOST as error:
                self._note_loss(asked, replica, error)
            finally:
                replica.num_open -= not is_begun

    def _note_loss(self, asked: _Asked, replica: Replica, error: Exception) -> None:
        """A replica has died, or its engine has, with the request."""
        replica.set_ready(False, repr(error))
        self.lost.inc()
        asked.but = {replica}  # those that had no room may have some now
        asked.num_lost += 1
        if asked.num_lost == MOST_LOSSES:
            raise ApiError(502, f"{MOST_LOSSES} replicas have died with this request")

    async def _whole(self, asked: _Asked) -> Response:
        """The response to a request that is no stream."""
        while True:
            replica, response = await self._begun(asked)
            try:
                async with replica.waiting():
                    return await _passed_on(response)
            except _LOST as error:
                self._note_loss(asked, replica, error)
            finally:
                replica.num_open -= 1
                await response.aclose()

    async def _events(self, asked: _Asked) -> AsyncGenerator[bytes, None]:
        """The events of a stream.

        Raises:
          ApiError: it is refused, or cannot go on.
        """
        retold = Retold()
        while True:
            replica, response = await self._begun(asked)
            try:
                if response.status_code != 200:
                    async with replica.waiting():
                        raise _as_error(response, await response.aread())
                told = _data(response)
                while True:
                    async with replica.waiting():
                        data = await anext(told, None)
                    if data is None:
                        raise httpx2.RemoteProtocolError("a stream has no end")
                    if data == b"[DONE]":
                        yield END
                        return
                    if (new := retold.new(_checked(json.loads(data)))) is not None:
                        yield event(new)
            except _LOST as error:
                self._note_loss(asked, replica, error)
            except DifferentTextError as error:
                raise ApiError(502, str(error), code="different_text") from None
            finally:
                replica.num_open -= 1
                await response.aclose()
            retold.begin_again()

    # The rest

    async def _page(self, request: Request) -> Response:
        """What any replica has; where it asks for a key, the replica does."""
        for replica in self.replicas:
            if replica.is_ready:
                try:
                    async with replica.waiting():
                        return await _passed_on(
                            await self._client.get(
                                replica.url + request.url.path, headers=_headers_to(request)
                            )
                        )
                except _LOST as error:
                    replica.set_ready(False, repr(error))
        raise ApiError(503, "no replica is ready", headers={"retry-after": "1"})

    async def _health(self, request: Request) -> Response:
        self._gate.admit(request, keyed=False)
        count = 0 if self.is_draining else sum(one.is_ready for one in self.replicas)
        status = "draining" if self.is_draining else "ok" if count else "no replica is ready"
        body = as_json({"status": status, "ready": count, "replicas": len(self.replicas)})
        return Response(body, 200 if count else 503, media_type="application/json")

    async def _show_metrics(self, request: Request) -> Response:
        self._gate.admit(request)
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")


def _checked_url(url: str) -> str:
    try:
        parsed = httpx2.URL(url)
        ok = parsed.scheme in ("http", "https") and bool(parsed.host) and not parsed.query
    except httpx2.InvalidURL:
        ok = False
    expect(ok, "to", "the URL of a server, such as http://10.0.0.1:8000", repr(url))
    return url.rstrip("/")


def _headers_to(request: Request) -> dict[str, str]:
    """What a replica has to know of the headers of a request."""
    key = request.headers.get("authorization")
    return {} if key is None else {"authorization": key}


async def _passed_on(response: httpx2.Response) -> Response:
    """A response of a replica, for the client."""
    headers = {name: response.headers[name] for name in _KEPT if name in response.headers}
    return Response(await response.aread(), response.status_code, headers)


def _as_error(response: httpx2.Response, data: bytes) -> ApiError:
    """What a replica that does not take a request has said."""
    status = response.status_code
    headers = {"retry-after": "1"} if status in _BUSY else {}
    try:
        told = json.loads(data)["error"]
        return ApiError(
            status, told["message"], param=told["param"], code=told["code"], headers=headers
        )
    except (ValueError, KeyError, TypeError):
        return ApiError(status, f"a replica answers with status {status}", headers=headers)


def _checked(told: dict[str, Any]) -> dict[str, Any]:
    """An event that is no error.

    Raises:
      RemoteProtocolError: the replica cannot go on.
      ApiError: the request cannot.
    """
    if (error := told.get("error")) is None:
        return told
    if error["type"] == "server_error":
        raise httpx2.RemoteProtocolError(error["message"])
    raise ApiError(400, error["message"], param=error["param"], code=error["code"])


async def _data(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events, which have one line each here."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *whole, rest = (rest + chunk).split(b"\n\n")
        for one in whole:
            yield one.removeprefix(b"data: ")


async def _joined(
    first: bytes, pieces: AsyncGenerator[bytes, None], on_failure: Callable[[str], None]
) -> AsyncGenerator[bytes, None]:
    """A stream whose first piece has come; an error is its last event."""
    yield first
    try:
        async for piece in pieces:
            yield piece
    except ApiError as error:
        on_failure("failed")
        yield event(error.body()) + END
    finally:
        await pieces.aclose()


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of some work, which is cancelled if the client goes.

    Raises:
      ClientDisconnect: it has gone.
    """
    task = asyncio.ensure_future(work)
    try:
        return await unless_gone(request.receive, task, task.cancel)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        raise ClientDisconnect from None
