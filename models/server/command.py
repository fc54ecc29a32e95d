# SPDX-License-Identifier: Apache-2.0
"""`jax-paged serve`: loads a model, starts the engine, and serves until a signal ends it."""

import argparse
import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_paged._start.command_line import LOG_LEVELS, SERVE_COUNTS, model_options
from jax_paged._start.interrupt import EXIT_CODE
from jax_paged.checks import expect

from .._packages import check_installed
from ..checkpoint.peft import load_adapter
from ..checkpoint.tokenizer import MissingTokenizer
from ..checkpoint.weights import Checkpoint, open_checkpoint
from ..decoder.adapters import AdaptedModel, Adapter, Adapters
from ..decoder.generation import check_count
from ..distributed.link import joined
from ..serving.decode_engine import create_engine
from ..serving.prefiller import Prefiller, opened_prefiller
from .limits import Limits
from .memory import Estimate, estimate

_log = logging.getLogger("jax_paged.server")
_KEY = "JAX_PAGED_API_KEY"


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code: 0 after SIGTERM, 130 after SIGINT."""
    check_installed("starlette", "uvicorn", "prometheus_client", extra="serve")
    _check(options)
    start_log(options.log_level)
    key = _api_key(options)
    with _listen(options) as listener, memory_errors(options):
        _warn_of_strangers(options, key)
        with _profiled(options.profile), opened_prefiller(options.prefill) as prefill:
            return asyncio.run(_serve(_service(options, key, prefill), listener))


def route(options: argparse.Namespace) -> int:
    """Runs `jax-paged route`; returns the exit code, as `run` does."""
    check_installed("starlette", "uvicorn", "prometheus_client", "httpx2", extra="serve")
    from .router import Router

    _check_listener(options)
    start_log(options.log_level)
    key = _api_key(options)
    bounds = Limits(max_body_bytes=options.max_body_bytes, drain_seconds=options.drain_seconds)
    router = Router(
        options.to, limits=bounds, api_key=key,
        local_only=key is None and _is_loopback(options.host),
    )  # fmt: skip
    with _listen(options) as listener:
        _warn_of_strangers(options, key)
        return asyncio.run(_serve(router, listener))


def _check(options: argparse.Namespace) -> None:
    check_counts(options, SERVE_COUNTS, {"max-prompt-tokens": 1, "logprobs": 0})
    every = options.rebalance_seconds
    if every is not None:
        expect(every > 0, "rebalance-seconds", "a number above 0", every)
        can = options.redundant_experts is not None
        expect(can, "rebalance-seconds", "--redundant-experts, too", "none")
    if options.prompt_logprobs and options.logprobs is None:
        raise ValueError("prompt-logprobs: expected --logprobs, too, got none")
    _check_listener(options)
    _adapter_folders(options)


def _check_listener(options: argparse.Namespace) -> None:
    check_count("max-body-bytes", options.max_body_bytes, 1)
    if not 0 <= options.drain_seconds < 86400:
        raise ValueError(
            f"drain-seconds: expected a number from 0 to 86400, got {options.drain_seconds}"
        )
    if not 0 <= options.port < 2**16:
        raise ValueError(f"port: expected an integer from 0 to 65535, got {options.port}")


def check_counts(
    options: argparse.Namespace, counts: Sequence[tuple[str, int, int, str]],
    others: Mapping[str, int] = {},
) -> None:  # fmt: skip
    """Checks the counts of a command, and its options for memory.

    Args:
      others: the least values of further options, if they are given.
    """
    for name, _, least, _ in counts:
        check_count(name, getattr(options, name.replace("-", "_")), least)
    for name, least in {"pages": 1, **others}.items():
        value = getattr(options, name.replace("-", "_"))
        if value is not None:
            check_count(name, value, least)
    share = options.kv_memory_share
    if not 0 < share <= 1:
        raise ValueError(f"kv-memory-share: expected a number above 0 and at most 1, got {share}")


def _adapter_folders(options: argparse.Namespace) -> dict[str, str]:
    """What --adapter says: name → folder."""
    folders: dict[str, str] = {}
    for text in options.adapter:
        name, _, folder = text.partition("=")
        expect(bool(name and folder), "adapter", "NAME=FOLDER", repr(text))
        expect(name not in folders, "adapter", "one folder for each name", f"two for {name!r}")
        folders[name] = folder
    return folders


def start_log(level: str | None) -> None:
    """Messages of `jax_paged` go to stderr from this level on.

    Args:
      level: a name of `LOG_LEVELS`; None = that of JAX_PAGED_LOG, or "warning".

    Raises:
      ValueError: there is no such level.
    """
    level = level or os.environ.get("JAX_PAGED_LOG") or "warning"
    if level not in LOG_LEVELS:
        names = ", ".join(LOG_LEVELS)
        raise ValueError(f"JAX_PAGED_LOG: expected one of {names}, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name, least in (("jax_paged", level), ("uvicorn", "warning")):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(max(getattr(logging, level.upper()), getattr(logging, least.upper())))


def _api_key(options: argparse.Namespace) -> str | None:
    """From a file or the environment: arguments of a process can be seen by others."""
    name, key = _KEY, os.environ.get(_KEY)
    if options.api_key_file is not None:
        name = options.api_key_file
        key = Path(name).read_text(encoding="utf-8").strip()
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{name}: expected a key of printable ASCII characters without spaces")
    return key


def _listen(options: argparse.Namespace) -> socket.socket:
    """Before the weights are loaded: a port in use should not wait for them."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(f"host: expected an address, got {options.host!r}: {error}") from None
    family, kind, _, _, address = found[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        where = f"{options.host}:{options.port}"
        raise ValueError(f"{where} cannot be listened to: {error.strerror}") from None
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _warn_of_strangers(options: argparse.Namespace, key: str | None) -> None:
    if key is None and not _is_loopback(options.host):
        options.status.clear()
        print(
            f"jax-paged: warning: {options.host} can be reached from other machines, and anybody "
            f"may ask: set {_KEY} or --api-key-file",
            file=sys.stderr,
        )


@contextlib.contextmanager
def _profiled(folder: str | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    with jax.profiler.trace(folder):
        yield


def _service(options: argparse.Namespace, key: str | None, prefill: Prefiller | None) -> Any:
    """The model behind HTTP, ready to start."""
    from .app import Service

    checkpoint = open_checkpoint(**model_options(options))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    if isinstance(tokenizer, MissingTokenizer):
        raise ValueError(tokenizer.reason)
    served = options.served_name or checkpoint.title.partition(":")[0]
    folders = _adapter_folders(options)
    expect(served not in folders, "adapter", "another name than the model's", repr(served))
    adapters = {name: load_adapter(folder, config) for name, folder in folders.items()}
    options.status.tell(checkpoint.title)
    slots = _slots(adapters)
    sizes = estimate_for(options, checkpoint, slots, groups=options.groups)
    options.status.tell(str(sizes))
    model = checkpoint.load()
    engine = create_engine(
        model,
        prefill=prefill,
        num_pages=sizes.num_pages,
        max_seqs=options.max_seqs,
        max_tokens=max(options.max_tokens, options.max_seqs),
        prefix_cache=False if options.no_prefix_cache else None,
        groups=options.groups,
        cascade=options.cascade,
        kv_dtype=options.kv_dtype,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        processes=options.processes,
        **slots,
    )
    for name, adapter in adapters.items():
        engine.add_adapter(name, adapter)
    return Service(
        engine,
        tokenizer,
        name=served,
        stop_tokens=sorted({*config.eos_token_ids, *tokenizer.eos_ids}),
        limits=Limits(
            max_body_bytes=options.max_body_bytes,
            max_prompt_tokens=options.max_prompt_tokens,
            max_choices=options.max_choices,
            max_queue=options.max_queue,
            drain_seconds=options.drain_seconds,
        ),
        api_key=key,
        origins=options.allow_origin,
        local_only=key is None and _is_loopback(options.host),
        rebalance_seconds=options.rebalance_seconds,
    )


def estimate_for(
    options: argparse.Namespace, checkpoint: Checkpoint, slots: Mapping[str, int], *,
    groups: bool = False,
) -> Estimate:  # fmt: skip
    """What the model and its slots for adapters take, and how many pages the rest holds."""
    model: Any = checkpoint.shapes()
    if slots:
        create = functools.partial(Adapters.create, checkpoint.config, dtype=model.dtype, **slots)
        model = AdaptedModel(model, jax.eval_shape(create), None)
    return estimate(
        model, max_seqs=options.max_seqs, pages=options.pages,
        share=options.kv_memory_share, kv_dtype=options.kv_dtype, groups=groups,
        max_tokens=max(options.max_tokens, options.max_seqs),
    )  # fmt: skip


def _slots(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """The options of an engine with room for just these adapters."""
    if not adapters:
        return {}
    rank = max(adapter.rank for adapter in adapters.values())
    return {"max_adapters": len(adapters), "max_rank": max(rank, 1)}


@contextlib.contextmanager
def memory_errors(options: argparse.Namespace) -> Iterator[None]:
    """Raises a ValueError that says what to lower if the block has no memory."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise ValueError(_out_of_memory(options, error)) from None
        raise


def _out_of_memory(options: argparse.Namespace, error: BaseException) -> str:
    """What to lower, and what was asked for."""
    pages = f"--kv-memory-share (now {options.kv_memory_share:g})"
    if options.pages is not None:
        pages = f"--pages (now {options.pages})"
    return (
        f"out of memory: lower {pages}, --max-tokens (now {options.max_tokens}) or --max-seqs (now "
        f"{options.max_seqs}), or take --weight-dtype int8 or --kv-dtype fp8: {error}"
    )


async def _serve(service: Any, listener: socket.socket) -> int:
    """Serves until a signal, or until the engine fails; returns the exit code."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    signals: list[int] = []

    def note(number: int) -> None:
        if signals:  # the second one does not wait
            os._exit(EXIT_CODE if number == signal.SIGINT else 128 + number)
        signals.append(number)
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note, number)
    host, port, *_ = listener.getsockname()
    where = f"http://{joined(host, port)}"

    def tell() -> None:
        print(f"serving {service.name} at {where}", file=sys.stderr, flush=True)

    failed = await serve_until(service, listener, ended, tell)
    if failed:
        print("jax-paged: error: the engine has failed, see the log above", file=sys.stderr)
        return 1
    return EXIT_CODE if signals == [signal.SIGINT] else 0


async def serve_until(
    service: Any, listener: socket.socket, ended: asyncio.Event,
    on_ready: Callable[[], object] = lambda: None,
) -> bool:  # fmt: skip
    """Serves on a socket until `ended` is set, then drains; returns whether the engine failed."""
    import uvicorn

    failures: list[bool] = []

    def on_failure() -> None:
        failures.append(True)
        ended.set()

    service.on_failure = on_failure
    # asyncio asks for this itself, but not on sockets whose protocol is left to their type. Without
    # it a second small write waits for the client to confirm the first: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    service.start()
    config = uvicorn.Config(
        service.app, log_config=None, access_log=False, lifespan="off", server_header=False,
        limit_concurrency=service.limits.max_connections, timeout_keep_alive=20,
        timeout_graceful_shutdown=5, h11_max_incomplete_event_size=32 << 10, backlog=1024,
        ws="none", proxy_headers=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  (ours are set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            on_ready()
        waiting = asyncio.create_task(ended.wait())
        await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        _log.info("draining")
        await service.drain()
        server.should_exit = True
        await serving
    finally:
        await asyncio.get_running_loop().run_in_executor(None, service.stop)
    return bool(failures)
