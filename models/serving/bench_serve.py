# SPDX-License-Identifier: Apache-2.0
"""`jax-paged bench-serve`: replays a trace of requests on the engine and tells how it went."""

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jax_paged._start.command_line import COUNTS, model_options
from jax_paged.ops.batch import pages_for

from ..checkpoint.weights import load_checkpoint, open_checkpoint
from ..decoder.generation import PAGE_SIZE, check_count
from ..decoder.protocol import Model, ModelConfig
from .engine import Engine
from .request import Request


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    seconds: float  # after the start
    prompt: list[int]
    new_tokens: int


def make_trace(
    *, vocab_size: int, context_length: int, requests: int, rate: float, prefixes: int,
    prefix_tokens: int, prompt_tokens: int, new_tokens: int, repeat: int = 1, seed: int = 0,
) -> list[Arrival]:  # fmt: skip
    """A trace of random token ids: exponential gaps, prompts of geometric length.

    Args:
      rate: requests per second; 0 = all at once.
      repeat: how often a prompt's own part is repeated, for text that copies.
      context_length: prompts are cut so that their new tokens fit.
    """
    rng = np.random.default_rng(seed)
    shared = [rng.integers(0, vocab_size, prefix_tokens).tolist() for _ in range(prefixes)]
    most = context_length - new_tokens
    trace, seconds = [], 0.0
    for _ in range(requests):
        start = shared[int(rng.integers(0, prefixes))] if prefixes else []
        rest = rng.integers(0, vocab_size, int(rng.geometric(1 / prompt_tokens))).tolist()
        trace.append(Arrival(seconds, [*start, *rest * repeat][:most], new_tokens))
        seconds += float(rng.exponential(1 / rate)) if rate > 0 else 0.0
    return trace


@dataclasses.dataclass
class Replay:
    """What was seen: per request the times of its tokens, per step the load."""

    arrivals: list[float]
    token_times: list[list[float]]
    requests: list[Request]
    steps: list[tuple[float, int, int]]  # seconds, running requests, pages in use
    seconds: float

    def summary(self) -> dict[str, Any]:
        """The figures, times in milliseconds; medians and 90th percentiles."""
        served = [(a, t) for a, t in zip(self.arrivals, self.token_times, strict=True) if t]
        first = [times[0] - arrival for arrival, times in served]
        gaps = [gap for _, times in served for gap in np.diff(times).tolist()]
        total = sum(len(times) for _, times in served)
        return {
            "requests": len(self.requests),
            "refused": sum(r.reason == "refused" for r in self.requests),
            "prompt_tokens": sum(len(r.prompt) for r in self.requests),
            "new_tokens": total,
            "seconds": self.seconds,
            "new_tokens_per_s": total / self.seconds,
            "first_token_ms": percentiles(first),
            "inter_token_ms": percentiles(gaps),
            "peak_pages": max((pages for _, _, pages in self.steps), default=0),
        }


def percentiles(seconds: list[float]) -> dict[str, float | None]:
    if not seconds:
        return {"p50": None, "p90": None}
    p50, p90 = np.percentile(seconds, [50, 90]) * 1e3
    return {"p50": float(p50), "p90": float(p90)}


def replay(
    engine: Engine, trace: list[Arrival], *,
    clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep,
) -> Replay:  # fmt: skip
    """Submits each request when its time has come, and steps the engine until all are done."""
    begin = clock()
    requests: list[Request] = []
    times: list[list[float]] = [[] for _ in trace]
    steps = []
    while len(requests) < len(trace) or not engine.is_idle:
        now = clock() - begin
        while len(requests) < len(trace) and trace[len(requests)].seconds <= now:
            arrival, seen = trace[len(requests)], times[len(requests)]

            def take(new, reason, seen=seen):
                seen.extend([clock() - begin] * len(new))

            requests.append(
                engine.submit(arrival.prompt, max_new_tokens=arrival.new_tokens, on_tokens=take)
            )
        if engine.is_idle:
            if len(requests) < len(trace):
                sleep(max(trace[len(requests)].seconds - (clock() - begin), 0.0))
        else:
            engine.step()
            used = engine.num_pages - engine.num_free_pages
            steps.append((clock() - begin, engine.num_running, used))
    engine.run()
    seconds = clock() - begin
    return Replay([a.seconds for a in trace], times, requests, steps, seconds)


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for an option that is out of range, before weights are loaded."""
    values = vars(options)
    counts = {name.replace("-", "_"): least for name, _, least, _ in COUNTS} | {"repeat": 1}
    for name, least in counts.items():
        check_count(name.replace("_", "-"), values[name], least)
    if not 0 <= options.rate < float("inf"):
        raise ValueError(f"rate: expected a finite number >= 0, got {options.rate}")
    for name, value in (("pages", options.pages), ("swap-pages", options.swap_pages)):
        if value is not None:
            check_count(name, value, 1)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: matplotlib is not installed: pip install 'jax_paged[plot]'")
    if options.one_by_one:
        options.max_seqs, options.no_prefix_cache = 1, True


def trace_of(options: argparse.Namespace, config: ModelConfig) -> list[Arrival]:
    """The trace that the options describe, of a model's tokens.

    Raises:
      ValueError: the new tokens leave no room in the context.
    """
    if options.new_tokens >= config.context_length:
        most = config.context_length - 1
        raise ValueError(f"new-tokens: expected at most {most}, got {options.new_tokens}")
    names = (
        "requests", "rate", "prefixes", "prefix_tokens", "prompt_tokens", "new_tokens", "repeat",
        "seed",
    )  # fmt: skip
    return make_trace(
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        **{name: getattr(options, name) for name in names},
    )


def num_pages(options: argparse.Namespace, trace: list[Arrival]) -> int:
    """As asked for, or enough for max_seqs requests of the trace."""
    needs = sorted(pages_for(len(a.prompt) + a.new_tokens, PAGE_SIZE) for a in trace)
    return options.pages or sum(needs[-options.max_seqs :])


def make_engine(
    options: argparse.Namespace, model: Model, drafter: Model | None, trace: list[Arrival]
) -> Engine:
    """The engine that the options describe."""
    return Engine(
        model,
        num_pages=num_pages(options, trace),
        max_seqs=options.max_seqs,
        max_tokens=max(options.max_tokens, options.max_seqs * (1 + options.drafts)),
        prefix_cache=False if options.no_prefix_cache else None,
        groups=options.groups,
        cascade=options.cascade,
        max_drafts=options.drafts,
        draft_branches=options.draft_branches,
        draft_model=drafter,
        draft_rule=options.draft_rule,
        kv_dtype=options.kv_dtype,
        preemption="recompute" if options.swap_pages is None else "swap",
        swap_pages=options.swap_pages,
        processes=options.processes,
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    check(options)
    given = model_options(options)
    checkpoint = open_checkpoint(**given)
    trace = trace_of(options, checkpoint.config)
    options.status.tell(checkpoint.title)
    model = checkpoint.load()
    drafter = None
    if options.draft_model is not None:
        drafter, _, _ = load_checkpoint(**given | {"path": options.draft_model, "base": None})
    engine = make_engine(options, model, drafter, trace)
    seen = replay(engine, trace)
    _tell_refused(seen.requests)
    figures = seen.summary() | {
        "num_pages": engine.num_pages,
        "hit_rate": engine.cache_counts.hit_rate,
        "steps": engine.num_steps,
        "preemptions": engine.num_preemptions,
        "swaps": engine.num_swaps[1],
        "kv_dtype": engine.state.groups[0].k_pages.dtype.name,
        "drafted": engine.num_drafted,
        "accepted": engine.num_accepted,
        "compile_s": engine.compile_seconds,
    }
    print(json.dumps(figures) if options.json else _text(figures), flush=True)
    if options.plot is not None:
        plot(seen, engine.num_pages, Path(options.plot))
    return 0


def _tell_refused(requests: list[Request]) -> None:
    """Says on stderr how many requests were refused, and why the first one was.

    Raises:
      ValueError: all of them were, so there are no figures.
    """
    refused = [request for request in requests if request.reason == "refused"]
    if len(refused) == len(requests):
        raise ValueError(f"all {len(requests)} requests were refused: {refused[0].detail}")
    if refused:
        count = f"{len(refused)} of {len(requests)} requests were refused"
        print(f"{count}, the first one: {refused[0].detail}", file=sys.stderr)


def _text(figures: dict[str, Any]) -> str:
    def times(name):
        p50, p90 = figures[name]["p50"], figures[name]["p90"]
        return "none" if p50 is None else f"{p50:.1f} ms (p90 {p90:.1f} ms)"

    f = figures
    lines = [
        f"requests: {f['requests']} in {f['seconds']:.2f} s, {f['refused']} refused",
        f"throughput: {f['new_tokens_per_s']:.1f} new tokens/s "
        f"({f['new_tokens']} new, {f['prompt_tokens']} prompt tokens, {f['steps']} steps)",
        f"time to first token: {times('first_token_ms')}",
        f"inter-token latency: {times('inter_token_ms')}",
        f"pages: {f['peak_pages']} of {f['num_pages']} at most ({f['kv_dtype']}), "
        f"{f['preemptions']} preemptions, {f['swaps']} swapped in",
        f"prefix cache: {100 * f['hit_rate']:.1f} % of prompt tokens found",
    ]
    if f["drafted"]:
        lines.append(f"drafts: {f['accepted']} of {f['drafted']} accepted")
    return "\n".join([*lines, f"compile: {f['compile_s']:.1f} s"])


def plot(seen: Replay, num_pages: int, path: Path) -> None:
    """Draws running requests and pages in use over time into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    seconds = [step[0] for step in seen.steps]
    above.step(seconds, [step[1] for step in seen.steps], where="post")
    above.set_ylabel("running requests")
    below.step(seconds, [step[2] for step in seen.steps], where="post")
    below.axhline(num_pages, linestyle=":", color="gray")
    below.set_ylabel("pages in use")
    below.set_xlabel("seconds")
    figure.savefig(path)
