# SPDX-License-Identifier: Apache-2.0
"""Adapters in the engine: each request gets what its merged model gives."""

import jax
import numpy as np
import pytest
from adapters import make_adapter
from tiers import first_of

from jax_paged.models import Decoder, generate, merge_adapter, token_logits, with_adapter
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import noisy, small_config

CONFIG = small_config("qwen3", vocab_size=64, head_dim=8, max_position_embeddings=64)
SIZES = {"num_pages": 40, "max_seqs": 4, "page_size": 4, "max_tokens": 32}
PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9, list(range(20)), list(range(20))]
NAMES = ["a", None, "b", "c", "a", None]
DRAW = {"temperature": 0.8, "seed": 3}
KINDS = {
    "few pages, swap": {"num_pages": 13, "preemption": "swap"},
    "look-up trees": {"max_drafts": 4, "draft_branches": 2},
    "plain": {},
    "draft model": {"max_drafts": 3, "draft_model": True},
    "a window that is wide enough": {"window": 64},
}


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


@pytest.fixture(scope="module")
def adapters():
    return {name: make_adapter(CONFIG, seed) for seed, name in enumerate("abc")}


def make_engine(model, adapters, **options):
    engine = Engine(model, **SIZES | options, max_adapters=4, max_rank=4)
    for name, adapter in adapters.items():
        engine.add_adapter(name, adapter)
    return engine


def submit_all(engine, **options):
    return [
        engine.submit(prompt, max_new_tokens=9, adapter=name, draw_index=i, **DRAW | options)
        for i, (prompt, name) in enumerate(zip(PROMPTS, NAMES, strict=True))
    ]


def expected_of(model, adapters):
    """The tokens of each request, by `generate` on merged models."""
    merged = {name: merge_adapter(model, adapter) for name, adapter in adapters.items()}
    every = {
        name: generate(merged.get(name, model), PROMPTS, max_new_tokens=9, **DRAW).tokens
        for name in (None, *adapters)
    }
    return [every[name][i] for i, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def expected(model, adapters):
    return expected_of(model, adapters)


@pytest.mark.parametrize("kind", first_of(KINDS, 2))
def test_requests_with_adapters_get_what_their_merged_models_give(model, adapters, expected, kind):
    options = dict(KINDS[kind])
    if options.get("draft_model"):
        options["draft_model"] = noisy(model)
    engine = make_engine(model, adapters, **options)
    requests = submit_all(engine)
    engine.run()
    assert [request.tokens for request in requests] == expected
    assert [request.adapter and request.adapter.name for request in requests] == NAMES
    if "few" in kind:
        assert engine.num_preemptions > 0


def test_the_prefix_cache_never_shares_between_adapters(model, adapters):
    engine = make_engine(model, adapters)
    prompt = list(range(21))

    def cached(name):
        request = engine.submit(prompt, max_new_tokens=1, adapter=name)
        engine.run()
        return request.num_cached

    for name in (None, "a", "b"):
        assert cached(name) == 0
        assert cached(name) == 20
    assert [cached(name) for name in (None, "a", "b")] == [20] * 3
    engine.add_adapter("a", adapters["c"])
    assert [cached("a"), cached("a"), cached("b")] == [0, 20, 20]
    engine.remove_adapter("a")
    engine.add_adapter("a", adapters["c"])
    assert cached("a") == 0
    engine.update_weights(model)
    assert [cached("b"), cached("b")] == [0, 20]


def test_a_swapped_adapter_serves_new_requests_and_old_ones_keep_theirs(model, adapters):
    """Greedy tokens of the merged models; no program is compiled by it."""
    engine = make_engine(model, {"a": adapters["a"]})
    prompt = [1, 2, 3]
    old = engine.submit(prompt, max_new_tokens=12, adapter="a")
    waits = engine.submit([4], max_new_tokens=5, adapter="a")
    for _ in range(4):
        engine.step()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    try:
        engine.add_adapter("a", adapters["b"])
        new = engine.submit(prompt, max_new_tokens=12, adapter="a")
        engine.remove_adapter("a")
        engine.add_adapter("c", adapters["c"])
        other = engine.submit(prompt, max_new_tokens=12, adapter="c")
        engine.run()
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []
    for request, name in ((old, "a"), (new, "b"), (other, "c")):
        merged = merge_adapter(model, adapters[name])
        assert request.tokens == generate(merged, [prompt], max_new_tokens=12).tokens[0]
    merged = merge_adapter(model, adapters["a"])
    assert waits.tokens == generate(merged, [[4]], max_new_tokens=5).tokens[0]
    assert engine.adapters == ["c"]


def test_slots_that_requests_have_are_not_given_away(model, adapters):
    engine = Engine(model, **SIZES, max_adapters=2, max_rank=8)
    engine.add_adapter("a", adapters["a"])
    engine.add_adapter("b", adapters["b"])
    with pytest.raises(ValueError, match=r"^name: expected a free one of 2 slots .*, got 2 other"):
        engine.add_adapter("c", adapters["c"])
    engine.add_adapter("b", adapters["c"])  # in its own slot, as no request has it
    request = engine.submit([1], max_new_tokens=4, adapter="a")
    engine.remove_adapter("a")
    with pytest.raises(ValueError, match=r"1 other adapters and 1 that requests still have"):
        engine.add_adapter("c", adapters["c"])
    engine.run()
    assert request.tokens
    engine.add_adapter("c", adapters["c"])
    assert engine.adapters == ["b", "c"]


def test_new_weights_go_with_the_adapters_that_are_there(model, adapters):
    other = Decoder(CONFIG, random_source(CONFIG, seed=2))
    engine = make_engine(model, adapters, logprobs=0)
    running = submit_all(engine)
    for _ in range(4):
        engine.step()
    engine.update_weights(other)
    engine.run()
    assert all(len(request.tokens) == 9 for request in running)
    requests = submit_all(engine)
    engine.run()
    assert [request.tokens for request in requests] == expected_of(other, adapters)
    for request, name in zip(requests, NAMES, strict=True):
        text = [*request.prompt.tolist(), *request.tokens]
        merged = other if name is None else merge_adapter(other, adapters[name])
        every = jax.nn.log_softmax(token_logits(merged, text), axis=-1)
        places = len(request.prompt) - 1 + np.arange(9)
        told = [x.model for x in request.logprobs]
        np.testing.assert_allclose(told, every[places, request.tokens], atol=1e-4)


def test_samples_share_the_pages_of_their_prompt_and_adapter(model, adapters):
    engine = make_engine(model, adapters)
    made = engine.generate([list(range(21))], n=3, max_new_tokens=6, adapter="b", **DRAW)
    assert [request.num_cached for request in made[0]] == [0, 20, 20]
    merged = merge_adapter(model, adapters["b"])
    expected = generate(merged, [list(range(21))] * 3, max_new_tokens=6, **DRAW).tokens
    assert [request.tokens for request in made[0]] == expected


def test_wrong_names_are_told(model, adapters):
    engine = make_engine(model, adapters)
    with pytest.raises(ValueError, match=r"^adapter: expected one of \['a', 'b', 'c'\], got 'd'"):
        engine.submit([1], max_new_tokens=1, adapter="d")
    with pytest.raises(ValueError, match=r"^adapter: expected one of .*, got 'd'"):
        engine.remove_adapter("d")
    with pytest.raises(ValueError, match=r"^name: expected a text that is not empty, got ''"):
        engine.add_adapter("", adapters["a"])
    with pytest.raises(ValueError, match=r"^adapter: expected a rank of at most max_rank=8, got 9"):
        engine.add_adapter("d", make_adapter(CONFIG, 1, rank=9))
    assert engine.adapters == ["a", "b", "c"]
    plain = Engine(model, **SIZES)
    for call in (
        lambda: plain.submit([1], max_new_tokens=1, adapter="a"),
        lambda: plain.add_adapter("a", adapters["a"]),
        lambda: plain.remove_adapter("a"),
    ):
        with pytest.raises(ValueError, match=r"^adapter: expected an engine that was made for"):
            call()
    adapted = with_adapter(model, adapters["a"])
    with pytest.raises(ValueError, match=r"^max_adapters: expected None for a model with an ad"):
        Engine(adapted, **SIZES, max_adapters=1)
    for sizes in ({"max_adapters": 0}, {"max_adapters": 1, "max_rank": 65}):
        with pytest.raises(ValueError, match=r"^max_(adapters|rank): expected an integer"):
            Engine(model, **SIZES, **sizes)
