# SPDX-License-Identifier: Apache-2.0
"""A server behind a router: whether it can be asked, and which of several should be."""

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

_log = logging.getLogger("jax_paged.server")
CHECK_S, ANSWER_S = 1.0, 5.0  # between two checks, and for the answer to one
SILENCE_S = 10.0  # without any answer: the replica is lost, and what was sent to it, too
_MORE_THAN_FAIR = 1.25  # of its share of open requests a replica takes by prefix


class Replica:
    """One server.

    is_ready: whether it takes requests, as far as is known.
    num_open: requests that it has and that have not ended.
    """

    def __init__(self, url: str):
        self.url, self.is_ready, self.num_open = url, False, 0
        self.is_known = asyncio.Event()  # set when it has been checked
        self._heard = time.monotonic()
        self._waiting: set[asyncio.Timeout] = set()

    async def watch(self, client: "httpx2.AsyncClient") -> None:
        """Checks its health each second, for ever."""
        import httpx2

        while True:
            try:
                answer = await client.get(f"{self.url}/health", timeout=ANSWER_S)
                self.set_ready(answer.status_code == 200, f"status {answer.status_code}")
                self._heard = time.monotonic()
            except (httpx2.HTTPError, ValueError) as error:
                self.set_ready(False, repr(error))
                if time.monotonic() - self._heard > SILENCE_S:
                    for limit in self._waiting:
                        limit.reschedule(asyncio.get_running_loop().time())
            self.is_known.set()
            await asyncio.sleep(CHECK_S)

    def set_ready(self, is_ready: bool, why: str) -> None:
        """Notes whether it takes requests."""
        if is_ready != self.is_ready:
            what = "is ready" if is_ready else f"is not ready: {why}"
            _log.warning("replica %s %s", self.url, what)
        self.is_ready = is_ready

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Raises TimeoutError in the block if the replica is lost meanwhile."""
        async with asyncio.timeout(None) as limit:
            self._waiting.add(limit)
            try:
                yield
            finally:
                self._waiting.discard(limit)


def pick(replicas: Sequence[Replica], key: bytes, but: Collection[Replica]) -> Replica | None:
    """The replica for a request: of those that are ready, the one where its prefix should be.

    That is the first in an order that a hash of key and URL makes for each key (rendezvous hashing,
    Thaler and Ravishankar, 1998): when a replica dies, only its own keys move. One that has more
    than 1.25 times its share of open requests is passed over (consistent hashing with bounded
    loads, Mirrokni, Thorup and Zadimoghaddam, 2018).

    Args:
      key: what the requests that begin alike have in common.
      but: replicas that have been tried.
    """
    ready = [one for one in replicas if one.is_ready and one not in but]
    if not ready:
        return None
    total = 1 + sum(one.num_open for one in ready)
    most = math.ceil(_MORE_THAN_FAIR * total / len(ready))
    ordered = sorted(ready, key=lambda one: hashlib.sha256(key + one.url.encode()).digest())
    return next(one for one in ordered if one.num_open < most)


def prefix_key(body: dict[str, Any], length: int = 512) -> bytes:
    """What requests with the same model and the same beginning of their prompt have in common."""
    prompt = body.get("messages", body.get("prompt"))
    return repr((body.get("model"), repr(prompt)[:length])).encode("utf-8", "replace")
