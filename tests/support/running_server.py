# SPDX-License-Identifier: Apache-2.0
"""A server of a small random model in a thread of this process, on loopback. Not a test."""

import asyncio
import contextlib
import functools
import json
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from tiny_checkpoint import byte_tokenizer

from jax_paged.models import Decoder, Engine
from jax_paged.models.checkpoint.tokenizer import Tokenizer
from jax_paged.models.decoder.executables import Executables, kept_in
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.server.app import Service
from jax_paged.models.server.command import serve_until
from jax_paged.models.server.router import Router
from jax_paged.models.testing import small_config

CONFIG = small_config("llama", vocab_size=257, max_position_embeddings=512, eos_token_id=256)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | map(attribute='function.name') | join(',') }}]{% endif %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


FOLDER = tempfile.TemporaryDirectory(prefix="programs_of_servers_")
PROGRAMS = Executables(Path(FOLDER.name), on_unreadable=lambda: None)


@functools.cache
def byte_model() -> Decoder:
    """Its tokens are the 256 bytes and <eos>."""
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


def byte_engine(**changes) -> Engine:
    """An engine of `byte_model`; those with the same sizes share their programs."""
    sizes = {
        "num_pages": 512, "max_seqs": 8, "max_tokens": 64, "logprobs": 5, "prompt_logprobs": True,
        "progress": False,
    }  # fmt: skip
    with kept_in(PROGRAMS):
        return Engine(byte_model(), **(sizes | changes))


def tokenizer() -> Tokenizer:
    """Its tokens are the 256 bytes and <eos>."""
    return Tokenizer(
        byte_tokenizer(), eos_ids=[256], chat_template=TEMPLATE, named_tokens={"eos_token": "<eos>"}
    )


class Running:
    """A service, or that of an engine, or a router, on a port of its own; `end` drains it."""

    def __init__(self, served: Engine | Service | Router, *, send_buffer=None, **options):
        if isinstance(served, Engine):
            options = {"name": "tiny", "stop_tokens": [256]} | options
            served = Service(served, tokenizer(), **options)
        self.service, self.engine = served, getattr(served, "engine", None)
        self._listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer is not None:  # connections have what their listener has
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready, self._loop, self._ended = threading.Event(), None, None
        self.failed = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        assert self._ready.wait(30)

    async def _run(self):
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self.failed = await serve_until(self.service, self._listener, self._ended, self._ready.set)

    def begin_to_end(self):
        """Starts to drain."""
        self._loop.call_soon_threadsafe(self._ended.set)

    def end(self):
        """Drains and ends the server; the engine may be used again then."""
        if self.thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended itself
                self.begin_to_end()
        self.thread.join(60)
        self._listener.close()
        assert not self.thread.is_alive()

    def post(self, path, body, headers=(), timeout=60):
        """(status, JSON, headers) of a POST; a body that is no bytes is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", **dict(headers)}
        return ask(urllib.request.Request(self.url + path, data, given), timeout)

    def get(self, path, headers=()):
        """(status, JSON or text, headers) of a GET."""
        return ask(urllib.request.Request(self.url + path, headers=dict(headers)), 60)

    def wait_until_idle(self, seconds=20.0):
        """Until no answer is owed and no request is in the engine."""
        end = time.monotonic() + seconds
        while self.service.num_active or not self.engine.is_idle:
            assert time.monotonic() < end, self.service.num_active
            time.sleep(0.01)


def ask(request, timeout):
    """(status, JSON or text, headers)."""
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return read(response)
    except urllib.error.HTTPError as error:
        with error:
            return read(error)


def read(response):
    data = response.read()
    with contextlib.suppress(ValueError):
        data = json.loads(data)
    return response.status, data, response.headers
