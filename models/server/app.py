# SPDX-License-Identifier: Apache-2.0
"""The routes: who may ask, how much, and what becomes of a request from its bytes to its answer."""

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from jax_paged.checks import expect

from ..checkpoint.tokenizer import Tokenizer
from ..serving.engine import Engine
from . import parameters, prompts
from .answer import Answer, Reply, TokenBytes
from .errors import HANDLERS, ApiError, bad
from .gate import Gate
from .limits import Limits
from .metrics import Metrics
from .shapes import ChatShape, CompletionShape
from .wire import END, EventStream, as_json, event, once, unless_gone, with_cut
from .worker import Worker

_log = logging.getLogger("jax_paged.server")
_PAGE = {"/": "index.html", "/chat.css": "chat.css", "/chat.js": "chat.js"}
_SAFE = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Service:
    """A model behind the API of OpenAI.

    Args:
      engine: stepped by a thread of the service alone, from `start` to `stop`. Its adapters are
        models of their own to clients.
      tokenizer: of the model.
      name: of the model, in /v1/models.
      stop_tokens: ids that end an answer.
      limits: what clients may ask for.
      api_key: clients must send it, as `Authorization: Bearer …`; None = nobody must.
      origins: of web pages elsewhere that may ask (CORS).
      local_only: answer only to names of this machine, so that no web page elsewhere gets in by a
        name of its own for 127.0.0.1.
      on_failure: called when the engine cannot go on.
      rebalance_seconds: as for `Worker`.

    Raises:
      ValueError: an adapter has the name of the model.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        name: str,
        stop_tokens: Sequence[int],
        limits: Limits | None = None,
        api_key: str | None = None,
        origins: Sequence[str] = (),
        local_only: bool = True,
        on_failure: Callable[[], object] = lambda: None,
        rebalance_seconds: float | None = None,
    ):
        expect(name not in engine.adapters, "name", f"none of {engine.adapters}", repr(name))
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.limits = Limits() if limits is None else limits
        self.metrics = Metrics(engine)
        self.is_draining = False
        self.num_active = 0  # answers that were let in and have not ended
        self._stops, self._max_seqs = list(stop_tokens), engine.state.max_seqs
        self.on_failure, self._rebalance_seconds = on_failure, rebalance_seconds
        self._gate = Gate(self.limits, api_key=api_key, local_only=local_only)
        self._token_bytes = TokenBytes(tokenizer)
        self._threads = ThreadPoolExecutor(2, "prompts")
        self._created = int(time.time())
        # A request's tokens are within the context and the pool.
        pool = engine.num_pages * engine.page_size
        self._most_tokens = min(engine.config.context_length, pool)
        self._running: set[Reply] = set()
        self._worker: Worker | None = None
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
            *(Route(path, self._page) for path in _PAGE),
        ]
        middleware = []
        if origins:
            middleware.append(
                Middleware(
                    CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"],
                    allow_headers=["authorization", "content-type"],
                )
            )  # fmt: skip
        self.app = with_cut(
            Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
        )

    # From start to end

    def start(self) -> None:
        """Starts the engine's thread; called on the event loop."""
        loop = asyncio.get_running_loop()
        self._worker = Worker(self.engine, loop, self._failed, self._rebalance_seconds)
        self._worker.start()

    async def drain(self) -> None:
        """Refuses new requests, waits for running ones within `drain_seconds`, cancels the rest."""
        self.is_draining = True
        end = time.monotonic() + self.limits.drain_seconds
        while self.num_active and time.monotonic() < end and not self._failure:
            await asyncio.sleep(0.05)
        for reply in list(self._running):
            self._cancel(reply)
        end = time.monotonic() + 5.0
        while self.num_active and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """Ends the threads."""
        if self._worker is not None:
            self._worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _failure(self) -> str:
        return self._worker.failure if self._worker is not None else ""

    def _failed(self, _: str) -> None:
        self.is_draining = True
        self.on_failure()

    # What is let in

    def _check_open(self) -> None:
        if self._failure:
            raise ApiError(503, "the engine has failed, and the server ends", code="engine_failed")
        if self.is_draining:
            raise ApiError(
                503, "the server ends", code="draining",
                headers={"retry-after": "10", "connection": "close"},
            )  # fmt: skip

    def _check_queue(self, count: int) -> None:
        most = self._max_seqs + self.limits.max_queue
        if self.num_active + count > most:
            raise ApiError(
                429, f"the server has {self.num_active} answers to give, at most {most}",
                code="queue_full", headers={"retry-after": "1"},
            )  # fmt: skip

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # The endpoints

    async def _completions(self, request: Request) -> Response:
        return await self._answered(request, "completions", self._ask_completions)

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, "chat", self._ask_chat)

    async def _answered(self, request: Request, endpoint: str, ask: Callable[..., Any]) -> Response:
        request.state.began = time.perf_counter()
        try:
            self._gate.admit(request)
            self._check_open()
            self._check_queue(1)
            return await ask(request, await self._gate.body(request, self._in_thread))
        except ClientDisconnect:
            self.metrics.requests.labels(endpoint, "disconnected").inc()
            return Response(status_code=499)
        except ApiError as error:
            if not getattr(request.state, "is_counted", False):
                self.metrics.requests.labels(endpoint, f"error_{error.status}").inc()
            raise

    async def _ask_completions(self, request: Request, body: dict[str, Any]) -> Response:
        values = parameters.read(parameters.COMPLETIONS, body)
        top = values["logprobs"]
        self._check_top("logprobs", top)
        prompt_logprobs = values["echo"] and top is not None
        if prompt_logprobs and not self.engine.prompt_logprobs:
            raise bad("echo", "echo: with logprobs it needs --prompt-logprobs of the server")
        self._check_model(values)
        given, vocab_size = prompts.all_prompts(values["prompt"]), self.engine.config.vocab_size
        self._check_choices(len(given) * values["n"])
        ids = await self._prepared(prompts.completion_prompts, given, self.tokenizer, vocab_size)
        options = await self._options(values)
        if prompt_logprobs:
            options["prompt_logprobs"] = True
        for one in ids:
            self._check_length("prompt", one, values["max_tokens"])
        options["max_new_tokens"] = values["max_tokens"]
        echo = [self.tokenizer.decode(one) for one in ids] if values["echo"] else None
        return await self._serve(request, CompletionShape, ids, options, values, top, echo)

    async def _ask_chat(self, request: Request, body: dict[str, Any]) -> Response:
        values = parameters.read(parameters.CHAT, body)
        if values["top_logprobs"] is not None and not values["logprobs"]:
            raise bad("top_logprobs", "top_logprobs: expected none without logprobs")
        top = (values["top_logprobs"] or 0) if values["logprobs"] else None
        self._check_top("top_logprobs", top)
        self._check_model(values)
        self._check_choices(values["n"])
        if None not in (values["max_tokens"], values["max_completion_tokens"]):
            raise bad("max_tokens", "max_tokens: expected none beside max_completion_tokens")
        prompt = await self._prepared(prompts.chat_prompt, values, self.tokenizer, self.limits)
        options = await self._options(values)
        most = values["max_completion_tokens"] or values["max_tokens"]
        self._check_length("messages", prompt, 1)
        room = self._most_tokens - len(prompt)
        options["max_new_tokens"] = min(most or room, room)
        return await self._serve(request, ChatShape, [prompt], options, values, top, None)

    def _check_top(self, name: str, top: int | None) -> None:
        have = self.engine.logprobs
        if top is not None and (have is None or top > have):
            can = "none: this server was started without --logprobs"
            can = can if have is None else f"at most {have}, which --logprobs of this server says"
            raise bad(name, f"{name}: expected {can}, got {top}")

    @property
    def _names(self) -> list[str]:
        """Of the model, and then of its adapters."""
        return [self.name, *self.engine.adapters]

    def _check_model(self, values: dict[str, Any]) -> None:
        names = self._names
        if values["model"] not in (None, *names):
            raise ApiError(
                404, f"model: expected one of {names}, got {parameters.short(values['model'])}",
                param="model", code="model_not_found",
            )  # fmt: skip

    def _check_length(self, name: str, prompt: Sequence[int], new_tokens: int) -> None:
        have = self._most_tokens
        if len(prompt) + new_tokens > have:
            counts = f"{len(prompt)} of the prompt and {new_tokens} new ones"
            message = f"{name}: expected at most {have} tokens in all, got {counts}"
            raise bad(name, message, "context_length_exceeded")
        most = self.limits.max_prompt_tokens
        if most is not None and len(prompt) > most:
            message = f"{name}: expected at most {most} tokens, got {len(prompt)}"
            raise bad(name, message, "context_length_exceeded")

    async def _prepared(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of work that strangers' input may make slow, within a bound."""
        try:
            async with asyncio.timeout(2 * self.limits.prepare_seconds):
                return await self._in_thread(work, *arguments)
        except TimeoutError:
            raise bad(None, "the request takes too long to prepare", "too_slow") from None
        except ValueError as error:
            raise bad(None, str(error)) from None

    async def _options(self, values: dict[str, Any]) -> dict[str, Any]:
        """Of `Engine.submit`, but for the number of new tokens."""
        options = parameters.sampling(values, self.engine.config.vocab_size)
        options.setdefault("seed", secrets.randbits(32))
        if values["model"] not in (None, self.name):
            options["adapter"] = values["model"]
        stops = set(values["stop_token_ids"] or ())
        options["stop_tokens"] = sorted(stops if values["ignore_eos"] else {*stops, *self._stops})
        if strings := parameters.stop_strings(values):
            options |= {"stop_strings": strings, "decode": self.tokenizer.decode}
        form = values["response_format"]
        if form is not None and form["type"] != "text":
            options["constraint"] = await self._prepared(
                prompts.constraint, form, self.tokenizer, self.limits
            )
        return options

    def _check_choices(self, count: int) -> None:
        if count > (most := self.limits.max_choices):
            raise bad("n", f"n: expected at most {most} answers in all, got {count}")

    async def _serve(
        self, request: Request, shape_of: type[CompletionShape],
        ids: list[list[int]], options: dict[str, Any], values: dict[str, Any], top: int | None,
        echo: list[str] | None,
    ) -> Response:  # fmt: skip
        """Submits all answers, and gives them as they come or when they are whole."""
        n, stops = values["n"], parameters.stop_strings(values)
        self._check_open()
        self._check_queue(n * len(ids))
        name = "chatcmpl" if shape_of is ChatShape else "cmpl"
        head = {"id": f"{name}-{secrets.token_hex(12)}", "created": int(time.time()),
                "model": values["model"] or self.name}  # fmt: skip
        shape = shape_of(head, self._token_bytes, top)
        reply = Reply(
            self.tokenizer, self._token_bytes, self.metrics, tells_logprobs=top is not None,
            began=request.state.began,
        )  # fmt: skip
        assert self._worker is not None
        reply.num_prompt_tokens = sum(map(len, ids))
        self.metrics.prompt_tokens.inc(reply.num_prompt_tokens)
        for place, prompt in enumerate(ids):
            answers = [
                Answer(
                    reply, place * n + sample, prompt, options | {"draw_index": place * n + sample},
                    stops=stops, echo=None if echo is None else echo[place],
                )
                for sample in range(n)
            ]  # fmt: skip
            reply.add(answers)
            self._worker.submit(answers)
        self.num_active += len(reply.answers)
        self._running.add(reply)
        request.state.is_counted = True
        left = once(functools.partial(self._left, reply, shape.endpoint))
        cancel = functools.partial(self._cancel, reply)
        pieces = reply.pieces()
        try:
            if not values["stream"]:
                whole = await unless_gone(request.receive, reply.whole(), cancel)
                left("done")
                body = as_json(shape.whole(whole, reply.usage()))
                return Response(body, media_type="application/json")
            first = await unless_gone(request.receive, anext(pieces), cancel)
        except ApiError as error:
            left("disconnected" if reply.was_cancelled else f"error_{error.status}")
            raise
        except BaseException:
            left("disconnected")
            raise
        wants_usage = bool((values["stream_options"] or {}).get("include_usage"))
        events = self._events(reply, shape, first, pieces, wants_usage)
        return EventStream(events, left, self.limits.stall_seconds)

    async def _events(
        self, reply: Reply, shape: CompletionShape, first: Any, pieces: AsyncIterator[Any],
        wants_usage: bool,
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        try:
            begun: set[int] = set()
            news = first
            while True:
                data = bytearray()
                for answer, piece in news:
                    if answer.index not in begun:
                        begun.add(answer.index)
                        if (opening := shape.begin(answer)) is not None:
                            data += event(opening)
                    if piece.text or piece.logprobs or piece.reason is not None:
                        data += event(shape.chunk(answer, piece))
                if data:
                    yield bytes(data)
                try:
                    news = await anext(pieces)
                except StopAsyncIteration:
                    break
            if wants_usage:
                yield event(shape.usage(reply.usage()))
        except ApiError as error:
            yield event(error.body())
        yield END

    def _cancel(self, reply: Reply) -> None:
        assert self._worker is not None
        if not reply.is_done:
            reply.was_cancelled = True
            self._worker.cancel(reply.answers)

    def _left(self, reply: Reply, endpoint: str, outcome: str) -> None:
        """Nobody waits for a reply any more: it has been sent, or its client has gone."""
        self._cancel(reply)
        self._running.discard(reply)
        self.num_active -= len(reply.answers)
        if outcome == "done" and any(answer.has_failed for answer in reply.answers):
            outcome = "failed"  # within a stream
        self.metrics.requests.labels(endpoint, outcome).inc()
        seconds = time.perf_counter() - reply.began
        counts = f"{reply.num_prompt_tokens} + {sum(a.num_tokens for a in reply.answers)} tokens"
        _log.info("%s: %s, %s, %.3f s", endpoint, outcome, counts, seconds)

    # The rest

    async def _models(self, request: Request) -> Response:
        self._gate.admit(request)
        entries = [
            {
                "id": name, "object": "model", "created": self._created, "owned_by": "jax_paged",
                "parent": None if name == self.name else self.name,
                "max_model_len": self._most_tokens,
            }
            for name in self._names
        ]  # fmt: skip
        return Response(as_json({"object": "list", "data": entries}), media_type="application/json")

    async def _health(self, request: Request) -> Response:
        self._gate.admit(request, keyed=False)
        status = "failed" if self._failure else "draining" if self.is_draining else "ok"
        body = as_json({"status": status})
        return Response(body, 200 if status == "ok" else 503, media_type="application/json")

    async def _show_metrics(self, request: Request) -> Response:
        self._gate.admit(request)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _page(self, request: Request) -> Response:
        self._gate.admit(request, keyed=False)
        path = Path(__file__).parent / "page" / _PAGE[request.url.path]
        return FileResponse(path, headers=_SAFE)
