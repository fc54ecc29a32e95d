# SPDX-License-Identifier: Apache-2.0
"""The engine: every request gets what it gets alone, whatever happens around it."""

import dataclasses
import functools
import logging
import os
import re
import signal
from collections import Counter
from itertools import chain

import jax
import numpy as np
import pytest
from small_engines import NEW, PROMPTS, submit_all
from tiers import first_of

from jax_paged.models import Decoder, generate, token_logits
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import small_config
from jax_paged.testing import pool_sized_ops
from jax_paged.testing.stress.engine import (
    SAMPLED,
    SETTINGS,
    SWAP,
    assert_empty,
    differing,
    drive,
    engine_options,
    random_requests,
)

LONG = os.environ.get("JAX_PAGED_LONG") == "1"
NUM_REQUESTS = 200 if LONG else 40
# test_draft_model and test_draft_trees have a few requests for the others
TESTED = SETTINGS if LONG else SETTINGS[:4]


def test_requests_get_what_generate_gives_each_alone(make, alone):
    engine = make()
    greedy, drawn = submit_all(engine), submit_all(engine, **SAMPLED)
    engine.run()
    for prompt, one, two in zip(PROMPTS, greedy, drawn, strict=True):
        assert one.tokens == alone(prompt)
        assert two.tokens == alone(prompt, **SAMPLED)
        assert (one.reason, two.reason) == ("length", "length")
    engine.clear_cache()
    assert_empty(engine)


def test_place_draws_as_generate_does_for_that_prompt(model, make):
    state = create_state(model, num_pages=40, max_seqs=4, pages_per_seq=16, page_size=4)
    together = generate(model, [[1, 2]] * 3, max_new_tokens=6, state=state, **SAMPLED).tokens
    engine = make()
    requests = [engine.submit([1, 2], max_new_tokens=6, draw_index=i, **SAMPLED) for i in range(3)]
    engine.run()
    assert [r.tokens for r in requests] == together
    assert len({tuple(new) for new in together}) == 3


def test_prompts_longer_than_a_step_are_fed_in_chunks_beside_decode_rows(make, alone):
    engine = make()
    first = engine.submit(PROMPTS[0], max_new_tokens=30)
    for _ in range(4):
        engine.step()
    long = engine.submit(list(range(50)), max_new_tokens=4)
    before = len(first.tokens)
    while not long.tokens:
        engine.step()
    assert len(first.tokens) > before + 1  # it went on meanwhile
    engine.run()
    assert first.tokens == alone(PROMPTS[0], 30)
    assert long.tokens == alone(range(50), 4)


def test_a_model_whose_layers_have_windows_is_served():
    slides = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    raw = {"vocab_size": 64, "head_dim": 8, "max_position_embeddings": 64}
    config = small_config("qwen3", **raw, **slides)
    model = Decoder(config, random_source(config, seed=1))
    engine = Engine(model, num_pages=40, max_seqs=2, page_size=4, max_tokens=8)
    requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS[2:]]
    engine.run()
    for prompt, request in zip(PROMPTS[2:], requests, strict=True):
        logits = token_logits(model, [*prompt, *request.tokens])
        assert request.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("options", first_of([{}, {"max_drafts": 3}], 1))
def test_a_stop_string_over_several_tokens_ends_a_request(make, alone, options):
    def letters(ids):
        return "".join(chr(0x100 + i) for i in ids)

    full = [alone(prompt) for prompt in PROMPTS]
    stop = letters(full[0][4:7])
    end = letters(full[0]).index(stop) + 3
    engine = make(**options)
    pieces = []
    first = engine.submit(
        PROMPTS[0], max_new_tokens=NEW, stop_strings=[stop], decode=letters,
        on_tokens=lambda new, reason: pieces.append((new, reason)),
    )  # fmt: skip
    others = submit_all(engine, PROMPTS[1:], stop_strings=["no such text"], decode=letters)
    engine.run()
    assert (first.tokens, first.reason) == (full[0][:end], "stop_string")
    assert list(chain(*(new for new, _ in pieces))) == first.tokens
    assert [r.tokens for r in others] == full[1:]
    engine.clear_cache()
    assert_empty(engine)


def test_a_stop_token_ends_a_request_and_is_not_kept(make, alone):
    full = alone(PROMPTS[0])
    engine = make()
    request = engine.submit(PROMPTS[0], max_new_tokens=NEW, stop_tokens=[full[5]])
    engine.run()
    assert request.tokens == full[: full.index(full[5])]
    assert request.reason == "stop_token"
    engine.clear_cache()
    assert_empty(engine)


def test_cancelling_frees_the_pages_at_any_time(make, alone):
    engine = make()
    kept = engine.submit(PROMPTS[0], max_new_tokens=NEW)
    running, waiting = submit_all(engine, [PROMPTS[2]] * 2, max_new_tokens=30)
    more = submit_all(engine, [[i] for i in range(4)])
    for _ in range(5):
        engine.step()
    assert waiting.row is not None
    assert more[-1].row is None
    for request in (running, waiting, more[-1]):
        engine.cancel(request)
        assert request.reason == "cancelled"
    tokens = list(running.tokens)
    engine.run()
    engine.cancel(kept)  # too late
    assert (kept.reason, kept.tokens) == ("length", alone(PROMPTS[0]))
    assert running.tokens == tokens == alone(PROMPTS[2], 30)[: len(tokens)]
    assert more[-1].tokens == []
    engine.clear_cache()
    assert_empty(engine)


def test_callbacks_stream_every_token_once_and_may_cancel(make, alone):
    engine = make()
    pieces, reasons = [], []

    def take(new, reason):
        pieces.append(new)
        reasons.append(reason)
        if sum(map(len, pieces)) == 5:
            engine.cancel(request)

    request = engine.submit(PROMPTS[1], max_new_tokens=NEW, on_tokens=take)
    other = engine.submit(PROMPTS[0], max_new_tokens=NEW)
    engine.run()
    assert [*chain(*pieces)] == request.tokens == alone(PROMPTS[1])[:5]
    assert len(pieces) == 6  # token by token, then the end
    assert reasons == [None] * 5 + ["cancelled"]
    assert list(engine.stream(other)) == other.tokens == alone(PROMPTS[0])


def test_ctrl_c_during_a_step_leaves_host_and_device_in_agreement(make, alone, monkeypatch):
    engine = make()
    requests = submit_all(engine, max_new_tokens=6)
    for name in ("keep_program", "steps"):
        program = getattr(engine._runner, name)

        def pressed(*args, call=program if name == "keep_program" else None):
            signal.raise_signal(signal.SIGINT)
            return call(*args)

        with monkeypatch.context() as patch:
            if name == "keep_program":
                patch.setattr(engine._runner, name, pressed)
            else:
                calls = {n: functools.partial(pressed, call=c) for n, c in program.items()}
                patch.setattr(engine._runner, name, calls)
            with pytest.raises(KeyboardInterrupt):
                engine.run()
    engine.run()
    assert [r.tokens for r in requests] == [alone(p, 6) for p in PROMPTS]
    engine.clear_cache()
    assert_empty(engine)


def test_streams_interleave(make, alone):
    engine = make()
    requests = submit_all(engine)
    streams = [engine.stream(request) for request in requests]
    heads = [[next(stream) for stream in streams] for _ in range(3)]
    assert list(zip(*heads, strict=True)) == [tuple(alone(p)[:3]) for p in PROMPTS]
    assert [list(stream) for stream in streams] == [alone(p)[3:] for p in PROMPTS]


@pytest.mark.parametrize(
    ("prompt", "new", "detail"),
    [
        ([1] * 65, 1, "65 prompt tokens, the model's context has 64"),
        ([1] * 50, 14, "50 prompt and 14 new tokens need 16 pages, a request can have 14"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_reason(make, prompt, new, detail):
    engine = make(num_pages=14)
    told = []
    request = engine.submit(prompt, max_new_tokens=new, on_tokens=lambda *all: told.append(all))
    assert (request.reason, request.detail) == ("refused", detail)
    assert told == [([], "refused")]
    assert not engine.step()


def test_the_context_ends_a_request(make, alone):
    engine = make()
    requests = submit_all(engine, [[1] * 60, [2] * 64], max_new_tokens=10)
    engine.run()
    assert [len(r.tokens) for r in requests] == [4, 0]
    assert [r.reason for r in requests] == ["length"] * 2
    assert requests[0].tokens == alone([1] * 60, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt: expected a non-empty list of token ids"),
        ({"prompt": [64]}, "prompt[0]: expected a token id in [0, vocab_size=64), got 64"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected an integer >= 0, got -1"),
        ({"temperature": -1}, "temperature: expected a finite number >= 0, got -1.0"),
        ({"stop_tokens": [99]}, "stop_tokens[0]: expected a token id in"),
        ({"draw_index": -1}, "draw_index: expected an integer >= 0, got -1"),
    ],
)
def test_bad_requests_are_named(make, options, message):
    engine = make()
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        engine.submit(**({"prompt": [1], "max_new_tokens": 1} | options))
    assert engine.is_idle


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 0}, "num_pages: expected an integer >= 1, got 0"),
        ({"max_tokens": 3}, "max_tokens: expected an integer >= 4, got 3"),
        ({"max_drafts": 2, "max_tokens": 11}, "max_tokens: expected an integer >= 12, got 11"),
        ({"max_drafts": 1, "ahead": 1}, "ahead: expected 0 with max_drafts, got 1"),
        ({"preemption": "drop"}, "preemption: expected 'recompute' or 'swap', got 'drop'"),
        ({"swap_pages": 4}, "swap_pages: expected None without swapping, got 4"),
        ({"preemption": "swap", "swap_pages": 0}, "swap_pages: expected an integer >= 1, got 0"),
    ],
)
def test_bad_sizes_are_named(model, options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Engine(model, **({"num_pages": 8, "max_seqs": 4} | options))


def test_nothing_compiles_while_serving_and_no_pool_is_copied(make, caplog):
    engine = make(**SWAP, max_drafts=0, max_tokens=8)  # products are smaller than the pool
    before = engine.num_swaps
    engine.submit([1], max_new_tokens=2)
    engine.run()  # the little that dispatching itself needs
    caplog.set_level(logging.WARNING, logger="jax")  # the command line asks for errors only
    with jax.log_compiles():
        jax.jit(lambda x: x + 2)(np.float32(1))
        assert any("ompiling" in text for text in caplog.messages)  # it would be told
        caplog.clear()
        submit_all(engine, max_new_tokens=30, **SAMPLED)
        engine.run()
        engine.clear_cache()
    assert engine.num_swaps > before
    assert not any("ompiling" in text for text in caplog.messages), caplog.messages
    pool = engine.state.k_pages
    runner = engine._runner
    programs = [runner.keep_program, *runner.steps.values(), *runner.swapper.programs]
    for program in programs:
        assert pool_sized_ops(program, pool) == []
        assert "callback" not in program.as_text()


def test_the_host_learns_tokens_one_step_late_and_asks_for_nothing_else(make):
    engine = make()
    request = engine.submit([1, 2], max_new_tokens=5)
    seen, before = [], engine.num_steps
    while engine.step():
        seen.append((engine.num_steps - before, len(request.tokens)))
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (5, 5)]


def test_a_broken_plan_is_an_error_not_a_token(make):
    engine = make()
    request = engine.submit([1, 2], max_new_tokens=5)
    engine.step()
    engine._schedulers[0].orders.releases.append(request.row)
    with pytest.raises(RuntimeError, match="a page operation failed"):
        engine.run()
    assert len(request.tokens) == 1  # from the step before
    engine._flying.clear()
    healthy = jax.numpy.zeros((), bool)
    engine._runner.device = dataclasses.replace(engine._runner.device, failed=healthy)
    engine.cancel(request)
    engine.run()
    engine.clear_cache()
    assert_empty(engine)


@pytest.mark.parametrize(("drafts", "preemption"), TESTED)
def test_random_requests_get_what_they_get_alone(model, drafter, make, alone, drafts, preemption):
    """Under random arrival, preemption, prefix sharing and cancellation."""
    engine = make(**engine_options((drafts, preemption), drafter))
    drafted, accepted = engine.num_drafted, engine.num_accepted
    found, preempted = engine.cache_counts.found, engine.num_preemptions
    swapped_out, swapped_in = engine.num_swaps
    plan = list(random_requests(NUM_REQUESTS, seed=7))
    requests = drive(engine, plan)

    reasons = Counter(request.reason for request in requests)
    assert reasons["cancelled"] > 0
    assert reasons["length"] > NUM_REQUESTS * 3 // 4
    assert engine.cache_counts.found > found
    assert engine.num_preemptions > preempted
    out, back = engine.num_swaps[0] - swapped_out, engine.num_swaps[1] - swapped_in
    assert (0 < back <= out) == (preemption == "swap")
    drafted, accepted = engine.num_drafted - drafted, engine.num_accepted - accepted
    assert (0 < accepted < drafted) == (drafts != "none")
    ties = differing(model, plan, requests, alone)
    print(
        f"{ties} of {NUM_REQUESTS} requests differ at a tie; {engine.num_preemptions - preempted} "
        f"preemptions, {out} swapped out, {back} back; {accepted} of {drafted} drafts accepted"
    )
    assert ties <= NUM_REQUESTS / 100
    engine.clear_cache()
    assert_empty(engine)
