# SPDX-License-Identifier: Apache-2.0
"""`jax-paged bench-serve --http`: the trace of bench-serve, sent to a server.

The load is open: a request is sent when its time has come, whether earlier ones have ended or not.
The server is started here as a process of its own, and beside its figures stand those of the engine
alone, which replays the same trace in this process: what HTTP costs is the processor time between.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from jax_paged._start.command_line import model_options

from .._packages import check_installed
from ..checkpoint.weights import open_checkpoint
from ..serving import bench_serve
from ..serving.bench_serve import Arrival, percentiles

_REFUSED = ("draft_model", "swap_pages", "plot")


@dataclasses.dataclass
class Sent:
    """What a client saw of a request, in seconds after the start."""

    arrival: float
    status: int = 0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    bench_serve.check(options)
    for name in _REFUSED:
        if getattr(options, name) is not None:
            raise ValueError(f"--http: expected no --{name.replace('_', '-')}")
    if options.drafts:
        raise ValueError("--http: expected no --drafts")
    checkpoint = open_checkpoint(**model_options(options))
    trace = bench_serve.trace_of(options, checkpoint.config)
    options.status.clear()
    if options.http:
        figures = measure(options.http.rstrip("/"), trace)
    else:
        check_installed("starlette", "uvicorn", "prometheus_client", extra="serve")
        with _server(options, trace) as url:
            figures = measure(url, trace)
        figures |= _engine_alone(options, checkpoint.load(), trace)
        ratio = figures["cpu_ms_per_token"] / figures["engine_cpu_ms_per_token"]
        figures["cpu_ratio"] = ratio
    print(json.dumps(figures) if options.json else _text(figures), flush=True)
    return 0


@contextlib.contextmanager
def _server(options: argparse.Namespace, trace: list[Arrival]) -> Iterator[str]:
    """A server with the engine of these options, and its URL."""
    model = model_options(options) | {n: getattr(options, n) for n in ("tp", "dp", "pp")}
    model.pop("mesh", None)
    given = {
        "port": 0, "max_seqs": options.max_seqs, "kv_dtype": options.kv_dtype,
        "max_tokens": max(options.max_tokens, options.max_seqs), "max_queue": len(trace),
        "pages": bench_serve.num_pages(options, trace), "model": model.pop("path"), **model,
        "log_level": "warning",  # nobody reads on what it says
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "jax_paged", "serve"]
    for name, value in given.items():
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    for name in ("no-prefix-cache", "cascade", "groups"):
        command += [f"--{name}"] if getattr(options, name.replace("-", "_")) else []
    command += [] if options.program_cache else ["--no-program-cache"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        try:
            url, said = "", []
            while not url:
                line = child.stderr.readline()
                if not line:
                    raise ValueError(f"the server did not start: {' '.join(said[-3:])}")
                said.append(line.strip())
                if match := re.fullmatch(r"serving .* at (http://\S+)", line.strip()):
                    url = match[1]
            yield url
        finally:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(60)
            child.kill()


def measure(url: str, trace: list[Arrival]) -> dict[str, Any]:
    """Sends a trace to a server; returns what its clients saw, and what its processor did.

    Raises:
      ValueError: the server cannot be reached, or no request was answered.
    """
    cpu, _ = _counters(url)
    begin = time.perf_counter()
    sent = asyncio.run(_send_all(url, trace, begin))
    seconds = time.perf_counter() - begin
    after, hit_rate = _counters(url)
    served = [one for one in sent if one.status == 200 and one.tokens]
    if not served:
        raise ValueError(f"{url}: no request was answered, the first with status {sent[0].status}")
    total = sum(one.tokens for one in served)
    gaps = [(one.last - one.first) / (one.tokens - 1) for one in served if one.tokens > 1]
    return {
        "requests": len(sent),
        "refused": len(sent) - len(served),
        "prompt_tokens": sum(len(arrival.prompt) for arrival in trace),
        "new_tokens": total,
        "seconds": seconds,
        "new_tokens_per_s": total / seconds,
        "first_token_ms": percentiles([one.first - one.arrival for one in served]),
        "inter_token_ms": percentiles(gaps),  # the mean of each request
        "hit_rate": hit_rate,
        "cpu_ms_per_token": 1e3 * (after - cpu) / total,
    }


async def _send_all(url: str, trace: list[Arrival], begin: float) -> list[Sent]:
    async def one(arrival: Arrival) -> Sent:
        await asyncio.sleep(max(arrival.seconds - (time.perf_counter() - begin), 0.0))
        sent = Sent(arrival.seconds)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _send(url, arrival, sent, begin)
        return sent

    return list(await asyncio.gather(*map(one, trace)))


async def _send(url: str, arrival: Arrival, sent: Sent, begin: float) -> None:
    """One request; HTTP/1.0, so that the body of the response ends with the connection."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    body = json.dumps(
        {
            "prompt": arrival.prompt, "max_tokens": arrival.new_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    key = os.environ.get("JAX_PAGED_API_KEY")
    headers = [
        f"POST {parts.path}/v1/completions HTTP/1.0", f"host: {parts.netloc}",
        "content-type: application/json", f"content-length: {len(body)}",
        *([f"authorization: Bearer {key}"] if key else []),
    ]  # fmt: skip
    reader, writer = await asyncio.open_connection(host, parts.port or 80, limit=2**20)
    try:
        writer.write("\r\n".join([*headers, "", ""]).encode() + body)
        sent.status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter() - begin
            event = json.loads(line[len(b"data: ") :])
            if event.get("choices"):
                sent.first, sent.last = sent.first or now, now
            elif event.get("usage"):
                sent.tokens = event["usage"]["completion_tokens"]
    finally:
        writer.close()


def _counters(url: str) -> tuple[float, float]:
    """(seconds of processor time of the server, hit rate of its prefix cache)."""
    key = os.environ.get("JAX_PAGED_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"{url}: {error}") from None
    found = [
        re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        for name in ("process_cpu_seconds_total", "jax_paged_cache_hit_rate")
    ]
    if None in found:
        raise ValueError(f"{url}: expected the metrics of jax-paged serve, got others")
    cpu, hit_rate = (float(match[1]) for match in found if match is not None)
    return cpu, hit_rate


def _engine_alone(options: argparse.Namespace, model: Any, trace: list[Arrival]) -> dict[str, Any]:
    """The same trace on the engine in this process."""
    engine = bench_serve.make_engine(options, model, None, trace)
    begin = time.process_time()
    figures = bench_serve.replay(engine, trace).summary()
    cpu = time.process_time() - begin
    return {
        "engine_new_tokens_per_s": figures["new_tokens_per_s"],
        "engine_cpu_ms_per_token": 1e3 * cpu / figures["new_tokens"],
    }


def _text(figures: dict[str, Any]) -> str:
    def times(name: str) -> str:
        p50, p90 = figures[name]["p50"], figures[name]["p90"]
        return "none" if p50 is None else f"{p50:.1f} ms (p90 {p90:.1f} ms)"

    f = figures
    lines = [
        f"requests: {f['requests']} in {f['seconds']:.2f} s, {f['refused']} refused",
        f"throughput: {f['new_tokens_per_s']:.1f} new tokens/s "
        f"({f['new_tokens']} new, {f['prompt_tokens']} prompt tokens)",
        f"time to first token: {times('first_token_ms')}",
        f"inter-token latency, mean of each request: {times('inter_token_ms')}",
        f"prefix cache: {100 * f['hit_rate']:.1f} % of prompt tokens found",
        f"processor time of the server: {f['cpu_ms_per_token']:.2f} ms per new token",
    ]
    if "cpu_ratio" in f:
        lines.append(
            f"the engine alone: {f['engine_cpu_ms_per_token']:.2f} ms, "
            f"{f['engine_new_tokens_per_s']:.1f} new tokens/s; "
            f"the server takes {f['cpu_ratio']:.3f} times its processor time"
        )
    return "\n".join(lines)
