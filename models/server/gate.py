# SPDX-License-Identifier: Apache-2.0
"""Who may ask, and the bodies that they send."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

from .errors import ApiError
from .limits import Limits
from .wire import parse

_LARGE = 64 << 10  # bytes of JSON that are parsed in a thread
_LOCAL = ("127.0.0.1", "localhost", "[::1]")


class Gate:
    """Lets requests in, or not.

    Args:
      api_key, local_only: as for `Service`.
    """

    def __init__(self, limits: Limits, *, api_key: str | None, local_only: bool):
        self._limits = limits
        self._key = None if api_key is None else api_key.encode()
        self._local_only = local_only
        self._bodies_bytes = 0  # of all that are being read

    def admit(self, request: Request, *, keyed: bool = True) -> None:
        """Raises ApiError for a client that may not ask.

        Args:
          keyed: whether this page needs the key.
        """
        if self._local_only:
            host = request.headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name.lower() not in _LOCAL:
                raise ApiError(403, "host: expected a name of this machine", code="host")
        if keyed and self._key is not None:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(key.strip().encode("latin-1", "replace"), self._key)
            if scheme.lower() != "bearer" or not is_right:
                raise ApiError(
                    401, "authorization: expected 'Bearer' and the key of this server",
                    code="invalid_api_key", headers={"www-authenticate": "Bearer"},
                )  # fmt: skip

    async def body(
        self, request: Request, in_thread: Callable[..., Awaitable[Any]]
    ) -> dict[str, Any]:
        """The JSON object of a request.

        Args:
          in_thread: where a large one is parsed.

        Raises:
          ApiError: it is too large, too slow, or no JSON object.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a form of a web page elsewhere would not be asked about
            raise ApiError(415, f"content-type: expected application/json, got {kind or 'none'}")
        most = self._limits.max_body_bytes
        length = request.headers.get("content-length", "0")
        too_large = ApiError(
            413, f"body: expected at most {most} bytes, got more", code="too_large"
        )
        if length.isdigit() and int(length) > most:
            raise too_large
        data, taken = bytearray(), 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    taken += len(chunk)
                    self._bodies_bytes += len(chunk)
                    if taken > most:
                        raise too_large
                    if self._bodies_bytes > self._limits.max_bodies_bytes:
                        raise ApiError(
                            429, "the server reads too many bodies at once",
                            code="queue_full", headers={"retry-after": "1"},
                        )  # fmt: skip
            try:
                if taken > _LARGE:
                    return await in_thread(parse, bytes(data))
                return parse(bytes(data))
            except (ValueError, RecursionError) as error:
                raise ApiError(400, str(error), code="invalid_json") from None
        except TimeoutError:
            seconds = self._limits.body_seconds
            raise ApiError(408, f"body: expected its end within {seconds:g} s") from None
        finally:
            self._bodies_bytes -= taken
