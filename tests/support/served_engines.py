# SPDX-License-Identifier: Apache-2.0
"""Engines of one device and of a mesh that serve the same requests. Not a test."""

import numpy as np
from adapters import make_adapter

from jax_paged.models import Decoder, Engine, generate, make_mesh, score
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config

SEED = 3
CONFIGS = {
    "experts": small_config(num_experts=8, vocab_size=96),
    "dense": small_config("qwen2", intermediate_size=64, vocab_size=64),
    "fused, tied": small_config("phi3", intermediate_size=64, tie_word_embeddings=True),
    "post-norms": small_config("gemma3_text", intermediate_size=64, vocab_size=96),
    "sinks": small_config("gpt_oss", num_local_experts=8, vocab_size=96),
}
RNG = np.random.default_rng(SEED)
BEGINNING = RNG.integers(0, 60, 20).tolist()
PROMPTS = [BEGINNING + RNG.integers(0, 60, n).tolist() for n in (1, 9, 30, 4, 17, 2)] + [[7]]

SIZES = {"num_pages": 24, "max_seqs": 3, "page_size": 4, "max_tokens": 16}
ENGINES = {
    "plain": {},
    "swap": {"num_pages": 14, "preemption": "swap", "kv_dtype": "int8"},
    "look-up trees": {"max_drafts": 3, "draft_branches": 2, "logprobs": 2},
    "draft model": {"max_drafts": 2, "draft_model": "one device"},
    "draft model on the mesh": {"max_drafts": 2, "draft_model": "mesh", "draft_branches": 2},
    "window": {"window": 12, "num_pinned": 2},
    "adapters": {"max_adapters": 2, "max_rank": 8},
    "prompt log-probabilities": {"logprobs": 0, "prompt_logprobs": True},
    "much at once": {
        "num_pages": 16, "preemption": "swap", "max_drafts": 3, "logprobs": 1,
        "max_adapters": 2, "max_rank": 8,
    },
    "sinks": {"max_drafts": 2, "logprobs": 1},
    "post-norms": {"num_pages": 14, "preemption": "swap"},
    "groups": {"num_pages": 20, "groups": True},
}  # fmt: skip


def both(config, seed=SEED, mesh=None, **options):
    """A model on one device and on a mesh."""
    source = random_source(config, seed=seed)
    mesh = make_mesh(config, **options.pop("sizes", {})) if mesh is None else mesh
    return Decoder(config, source, **options), Decoder(config, source, mesh=mesh, **options)


def models_of(kind, **sizes):
    """For one device and for a mesh: the model of an engine, and its draft model or None."""
    name = "experts" if kind in ("plain", "swap", "window") else "dense"
    config = CONFIGS[kind if kind in CONFIGS else {"groups": "post-norms"}.get(kind, name)]
    models, drafters = both(config, sizes=sizes), (None, None)
    if "draft_model" in ENGINES[kind]:
        if kind == "draft model on the mesh":  # whose experts all replicas share
            config = small_config(num_experts=8, vocab_size=config.vocab_size)
        own, on_mesh = both(config, seed=SEED + 1, sizes=sizes)
        drafters = own, on_mesh if ENGINES[kind]["draft_model"] == "mesh" else own
    return list(zip(models, drafters, strict=True))


def serve(kind, model, draft_model, **options):
    """An engine of that kind that has served PROMPTS, and its requests."""
    options = SIZES | ENGINES[kind] | {"draft_model": draft_model} | options
    engine = Engine(model, **options)
    asked = {"max_new_tokens": 9, "temperature": 0.7, "seed": 1}
    each = [{} for _ in PROMPTS]
    if "max_adapters" in options:
        for i, name in enumerate("ab"):
            engine.add_adapter(name, make_adapter(model.config, i))
        each = [{"adapter": "ab"[i % 2]} if i % 3 else {} for i in range(len(PROMPTS))]
    if kind == "plain":
        each[1], each[2] = {"repetition_penalty": 1.5}, {"banned_tokens": [1, 2, 3]}
    asked |= {"prompt_logprobs": True} if "prompt_logprobs" in options else {}
    requests = [
        engine.submit(prompt, draw_index=i, **asked, **own)
        for i, (prompt, own) in enumerate(zip(PROMPTS, each, strict=True))
    ]
    engine.run()
    engine.clear_cache()
    assert engine.num_free_pages == engine.num_pages
    swaps = kind == "swap" or (kind == "much at once" and engine.num_replicas == 1)
    assert engine.num_swaps[0] > 0 or not swaps
    return engine, requests


def tickets(prefiller, prompts, **options):
    """Of all tokens of each prompt but the last one."""
    options |= {"max_new_tokens": 0, "hand_out": True}
    requests = [prefiller.submit(prompt[:-1], **options) for prompt in prompts]
    prefiller.run()
    assert [r.tokens for r in requests] == [[]] * len(prompts)
    return [prefiller.hand_out(request) for request in requests]


def hand_over(giver, taker, prompts, **asked):
    """The tokens that one engine gives to prompts of which the other has computed K and V."""
    given = zip(prompts, tickets(giver, prompts), strict=True)
    requests = [
        taker.receive(prompt, ticket, draw_index=i, **asked)
        for i, (prompt, ticket) in enumerate(given)
    ]
    taker.run()
    return [request.tokens for request in requests]


def assert_same_answers(one, many):
    """Of a model on one device and on a mesh, to greedy and drawn generation and to a score."""
    stages = many.partition.pp
    for sampling in ({}, {"temperature": 0.8, "seed": 5}):
        want, got = (generate(x, PROMPTS, max_new_tokens=12, **sampling) for x in (one, many))
        assert got.tokens == want.tokens
        assert got.stop_reasons == want.stop_reasons
        assert len(got.busy) == (stages if stages > 1 else 0), got.busy
        assert want.busy == ()
    want, got = (score(model, PROMPTS[2]) for model in (one, many))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def assert_same(got, want):
    """The same tokens, and log-probabilities to rounding."""
    assert [r.tokens for r in got] == [r.tokens for r in want]
    for ours, theirs in zip(got, want, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(ours, name), getattr(theirs, name), strict=True)
            assert all(a is b or abs(a.model - b.model) < 1e-5 for a, b in pairs)
