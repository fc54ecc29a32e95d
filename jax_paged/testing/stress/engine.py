# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine under preemption, swapping, drafts and cancellation: each as if alone."""

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_paged.models import Decoder, generate, token_logits
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving.engine import Engine
from jax_paged.models.serving.request import Request
from jax_paged.models.testing import noisy, small_config

from .report import Report, Stop

SAMPLED = {"temperature": 1.5, "top_k": 20, "seed": 3}
SWAP = {"num_pages": 14, "preemption": "swap", "swap_pages": 40}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"max_drafts": 0},
    "look-up": {"max_drafts": 3},
    "look-up trees": {"max_drafts": 3, "draft_branches": 2},
    "model": {"max_drafts": 3, "draft_model": True},
    "model trees": {"max_drafts": 3, "draft_model": True, "draft_branches": 2},
}
SETTINGS = [(drafts, preemption) for drafts in DRAFTS for preemption in ("recompute", "swap")]
SIZES = {"num_pages": 14, "max_seqs": 4, "page_size": 4, "max_tokens": 32}
ROUND = 300  # requests between two checks
TIE = 1e-4  # top-2 gap of logits below which rounding may choose


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, and the step in which it comes."""

    step: int
    prompt: list[int]
    new: int
    options: dict[str, Any]
    chance: np.ndarray  # f64[2]: whether it goes first, and whether and when it is cancelled


def small_decoder() -> Decoder:
    """A decoder whose steps are quick."""
    config = small_config("qwen3", vocab_size=64, head_dim=8, max_position_embeddings=64)
    return Decoder(config, random_source(config, seed=1))


def random_requests(count: int, seed: int) -> Iterator[Arrival]:
    """Prompts that share prefixes, with options and a step to arrive at."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, 64, n).tolist() for n in (8, 13, 20)]
    step = 0
    for _ in range(count):
        step += int(rng.poisson(2.0))
        kind = int(rng.integers(0, 4))
        prompt = prefixes[kind][:] if kind < 3 else []
        prompt += rng.integers(0, 64, int(rng.integers(1, 13))).tolist()
        options = [{}, {}, {"temperature": 0.8}, SAMPLED][int(rng.integers(0, 4))]
        if options:
            options = options | {"seed": int(rng.integers(0, 1000))}
        yield Arrival(step, prompt, int(rng.integers(1, 21)), options, rng.random(2))


def drive(engine: Engine, plan: Sequence[Arrival]) -> list[Request]:
    """Submits each request in its step, and cancels some; returns them when all have ended."""
    requests, to_cancel, steps = [], [], 0
    while len(requests) < len(plan) or not engine.is_idle:
        while len(requests) < len(plan) and plan[len(requests)].step <= steps:
            new = plan[len(requests)]
            requests.append(
                engine.submit(
                    new.prompt,
                    max_new_tokens=new.new,
                    priority=int(new.chance[0] < 0.2),
                    **new.options,
                )
            )
            if new.chance[1] < 0.15:
                to_cancel.append((steps + int(100 * new.chance[1]), requests[-1]))
        for when, request in to_cancel:
            if when == steps:
                engine.cancel(request)
        engine.step()
        steps += 1
    engine.run()
    return requests


def differing(
    model: Decoder, plan: Sequence[Arrival], requests: Sequence[Request],
    alone: Callable[..., list[int]],
) -> int:  # fmt: skip
    """How many requests differ from what they get alone, at a tie; AssertionError elsewhere."""
    ties = 0
    for request, new in zip(requests, plan, strict=True):
        expected = alone(new.prompt, new.new, **new.options)
        if request.reason == "cancelled":
            expected = expected[: len(request.tokens)]
        if request.tokens != expected:
            assert_tie(model, new.prompt, expected, request.tokens)
            ties += 1
    return ties


def assert_tie(model: Decoder, prompt, expected, got) -> None:
    """The first difference is where the lone run's two best logits are as good as equal."""
    assert len(got) == len(expected)
    place = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
    logits = np.sort(token_logits(model, [*prompt, *expected[:place]])[-1])
    assert logits[-1] - logits[-2] < TIE, (expected, got, place)


def assert_empty(engine: Engine) -> None:
    """Every page is free, and the host counts as the device does."""
    assert engine.is_idle
    for group in engine.state.groups:
        table = jax.device_get(group.table)
        assert not table.is_live.any()
        assert not table.ref_counts.any()
        assert int(table.num_free) == table.num_pages
    assert engine.num_free_pages == engine.num_pages
    assert engine.num_free_swap_pages == engine.swap_pages


class Alone:
    """The tokens of a request on its own, by `generate`; memoised."""

    def __init__(self, model: Decoder):
        self._model, self._known = model, {}

    def __call__(self, prompt: Sequence[int], max_new_tokens: int, **options) -> list[int]:
        key = (tuple(prompt), max_new_tokens, tuple(sorted(options.items())))
        if key not in self._known:
            state = create_state(
                self._model, num_pages=16, max_seqs=1, pages_per_seq=16, page_size=4
            )
            self._known[key] = generate(
                self._model, [list(prompt)], max_new_tokens=max_new_tokens, state=state, **options
            ).tokens[0]
        return self._known[key]


def engine_options(setting: tuple[str, str], drafter: Decoder) -> Mapping[str, Any]:
    """The options of an engine for one of SETTINGS."""
    drafts, preemption = setting
    options = SIZES | DRAFTS[drafts] | (SWAP if preemption == "swap" else {})
    if options.get("draft_model"):
        options["draft_model"] = drafter
    return options


def run(report: Report, stop: Stop, seed: int) -> None:
    """Rounds of requests through one engine for each setting; memory must stay as it is."""
    model = small_decoder()
    drafter = noisy(model)
    alone = Alone(model)
    engines: dict[tuple[str, str], Engine] = {}
    memory: dict[str, list[int]] = {}
    number = 0
    while not (stop.is_due() or report.is_hopeless):
        setting = SETTINGS[number % len(SETTINGS)]
        if setting not in engines:
            engines[setting] = Engine(model, **engine_options(setting, drafter))
        # Few plans, so that most requests are known already, and time is spent in the engine.
        of_plan = 7 * seed + number // len(SETTINGS) % 7
        _round(report, engines[setting], setting, model, alone, of_plan)
        stop.done += ROUND
        number += 1
        gc.collect()
        if number % len(SETTINGS) == 0:
            memory.setdefault("resident_bytes", []).append(resident_bytes())
            memory.setdefault("arrays", []).append(len(jax.live_arrays()))
    for name, seen in memory.items():
        # The first rounds of each plan compile, and learn what requests give alone.
        steady = seen[len(seen) // 2 :]
        if len(steady) > 1:
            text = f"{steady[0]:,} halfway and {steady[-1]:,} at the end"
            report.notes.append(f"engine, {name}: {text}, after {stop.done:,} requests")


def _round(report, engine, setting, model, alone, of_plan) -> None:
    plan = list(random_requests(ROUND, seed=of_plan))
    options = dict(zip(("drafts", "preemption"), setting, strict=True))
    try:
        ties = differing(model, plan, drive(engine, plan), alone)
        engine.clear_cache()
        assert_empty(engine)
    except AssertionError as error:
        report.fail(f"engine {options}, random_requests({ROUND}, seed={of_plan}): {error}")
        return
    report.add("engine", options, cases=ROUND)
    report.count("engine", "differ at a tie of two logits", ties)


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
