# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt another engine has computed: they get what one engine alone gives them."""

import dataclasses

import jax
import numpy as np
import pytest
from served_engines import CONFIGS, PROMPTS, SEED, both

from jax_paged.models import Decoder, Engine
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving.handover import Piece

SIZES = {"num_pages": 32, "max_seqs": 3, "page_size": 4, "max_tokens": 16, "preemption": "swap"}
SIZES |= {"swap_pages": 64}
ASKED = {"max_new_tokens": 9, "temperature": 0.7, "seed": 1}


@pytest.fixture(scope="module")
def model():
    config = CONFIGS["dense"]
    return Decoder(config, random_source(config, seed=SEED))


@pytest.fixture(scope="module")
def prefiller(model):
    return Engine(model, **SIZES)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, **SIZES)


def tickets(prefiller, prompts, **options):
    """Of all tokens of each prompt but the last one."""
    options |= {"max_new_tokens": 0, "hand_out": True}
    requests = [prefiller.submit(prompt[:-1], **options) for prompt in prompts]
    prefiller.run()
    assert [r.tokens for r in requests] == [[]] * len(prompts)
    return [prefiller.hand_out(request) for request in requests]


def assert_all_free(*engines):
    for engine in engines:
        assert engine.is_idle
        engine.clear_cache()
        assert engine.num_free_pages == engine.num_pages
        assert engine.num_free_swap_pages == engine.swap_pages * engine.num_replicas
        assert engine._runner.swapper._chunks == {}


def served(engine, prompts, asked, tickets=None):
    """The requests of some prompts, each with its own options, with and without tickets."""
    requests = []
    for i, (prompt, own) in enumerate(zip(prompts, asked, strict=True)):
        options = ASKED | {"draw_index": i} | own
        if tickets is None:
            requests.append(engine.submit(prompt, **options))
        else:
            requests.append(engine.receive(prompt, tickets[i], **options))
    engine.run()
    return requests


def compare(prefiller, engine, prompts, asked=None):
    """Serves prompts with tickets and without; all computed one token of each prompt alone."""
    asked = [{}] * len(prompts) if asked is None else asked
    want = served(engine, prompts, asked)
    engine.clear_cache()
    handed = tickets(prefiller, prompts)
    fed, swaps = engine.num_fed, engine.num_swaps
    got = served(engine, prompts, asked, handed)
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert [r.reason for r in got] == [r.reason for r in want]
    assert engine.num_swaps[1] - swaps[1] > 0
    for ours, theirs in zip(got, want, strict=True):
        assert len(ours.logprobs) == len(theirs.logprobs)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a[:2], b[:2], rtol=1e-5, atol=1e-6)
    assert_all_free(prefiller, engine)
    return got, engine.num_fed - fed


def text_of(ids):
    return "".join(chr(33 + token) for token in ids)


def test_a_received_request_gets_the_tokens_of_one_engine(prefiller, engine):
    prompts = PROMPTS[:5]
    asked = [
        {"temperature": 0.0},
        {},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.4},
        {"logit_bias": {3: 2.0}, "banned_tokens": [1, 2]},
        {"priority": 1, "top_k": 5},
    ]
    got, fed = compare(prefiller, engine, prompts, asked)
    assert fed <= sum(1 + len(r.tokens) for r in got)  # nothing of a prompt but its last token


def test_a_stop_string_ends_it(prefiller, engine):
    (alone,) = served(engine, PROMPTS[:1], [{}])
    stop = text_of(alone.tokens[3:5])
    asked = [{"stop_strings": [stop], "decode": text_of}]
    (got,), _ = compare(prefiller, engine, PROMPTS[:1], asked)
    assert got.reason == "stop_string"
    assert len(got.tokens) <= 5


def test_pages_that_the_cache_has_are_shared(prefiller, engine):
    served(engine, [PROMPTS[2][:21]], [{"max_new_tokens": 1}])
    want = served(engine, PROMPTS[2:3], [{}])
    engine.clear_cache()
    served(engine, [PROMPTS[2][:21]], [{"max_new_tokens": 1}])
    (got,) = served(engine, PROMPTS[2:3], [{}], tickets(prefiller, PROMPTS[2:3]))
    assert got.tokens == want[0].tokens
    assert got.num_cached == 20
    assert_all_free(prefiller, engine)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_stored_values_travel_with_their_scales(model, kv_dtype):
    pair = [Engine(model, **SIZES, kv_dtype=kv_dtype, logprobs=1) for _ in range(2)]
    prompts = PROMPTS[1:4]
    want = [pair[1].submit(p, draw_index=i, **ASKED) for i, p in enumerate(prompts)]
    pair[1].run()
    pair[1].clear_cache()
    handed = tickets(pair[0], prompts)
    state = pair[1].state
    got = served(pair[1], prompts, [{}] * 3, handed)
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert {x.values.dtype for x in handed[0].pieces} >= {state.k_pages.dtype}
    assert_all_free(*pair)
