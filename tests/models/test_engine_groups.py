# SPDX-License-Identifier: Apache-2.0
"""Engines whose layers with windows free the pages that they no longer see."""

import dataclasses
import re

import numpy as np
import pytest
from adapters import make_adapter
from tiers import first_of

from jax_paged.models import Decoder, Engine, generate
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config
from jax_paged.testing import pool_sized_ops
from jax_paged.testing.stress.engine import (
    SAMPLED,
    Alone,
    assert_empty,
    differing,
    drive,
    random_requests,
)

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, 97, count).tolist() for count in (40, 3, 21, 1)]
NEW = 60  # the window of 7 tokens slides over many pages of 4
SIZES = {"num_pages": 80, "max_seqs": 3, "page_size": 4, "max_tokens": 16}
TIGHT = {"num_pages": 28}
TREES = {"max_drafts": 3, "draft_branches": 2}
WINDOW_PAGES = 7  # of a row: 6 tokens before a chunk of 16, which begin anywhere in a page


def model_of(kind, windows=None):
    config = small_config(kind, num_hidden_layers=2 if windows is None else len(windows))
    if windows is not None:
        config = dataclasses.replace(config, layer_windows=windows)
    return Decoder(config, random_source(config, 5))


@pytest.fixture(scope="module", params=first_of(["gemma3_text", "gpt_oss"], 1))
def model(request):
    return model_of(request.param)


@pytest.fixture(scope="module")
def gemma():
    return model_of("gemma3_text")


@pytest.fixture(scope="module")
def texts():
    """The tokens that `generate` gives with groups, for a model and options of sampling."""
    known = {}

    def get(model, **options):
        key = repr(model.config), tuple(options.items())
        if key not in known:
            sizes = {"max_seqs": 4, "page_size": 4, "pages_per_seq": 140, "num_pages": 400}
            state = create_state(model, **sizes, groups=True)
            known[key] = generate(model, PROMPTS, max_new_tokens=NEW, state=state, **options).tokens
        return known[key]

    return get


def served(model, options, **asked):
    """(engine, the requests of PROMPTS, done); all pages of all groups are free again."""
    engine = Engine(model, **SIZES | {"groups": True} | options)
    requests = [
        engine.submit(prompt, max_new_tokens=NEW, draw_index=i, **asked)
        for i, prompt in enumerate(PROMPTS)
    ]
    engine.run()
    engine.clear_cache()
    assert_empty(engine)
    return engine, requests


@pytest.mark.parametrize(
    "options",
    first_of([TIGHT | TREES, {}, TIGHT, {"max_drafts": 3}, {"layout": "rpa"}], 1),
    ids=["trees", "plain", "preempted", "drafts", "rpa"],
)
def test_tokens_are_those_of_generate(model, texts, options):
    for asked in ({}, SAMPLED):
        engine, requests = served(model, options, **asked)
        assert [r.tokens for r in requests] == texts(model, **asked)
        assert (engine.num_preemptions > 0) == ("num_pages" in options)
        assert engine.num_accepted > 0 or "max_drafts" not in options or asked


def test_pools_of_windows_have_what_rows_need_at_once(gemma, texts):
    engine, _ = served(gemma, {})
    (window, full), (of_window, of_full) = engine.state.groups, engine.state.peak_pages
    assert engine.state.kinds == (7, "full")
    assert window.k_pages.shape[:2] == (1, 3 * WINDOW_PAGES)
    assert window.table.page_table.shape == (3, WINDOW_PAGES)
    assert full.k_pages.shape[:2] == (1, 80)
    assert int(of_window) < 3 * 3 + 16 // 4 < 40 < int(of_full)
    # Where few tokens fit at all, windows have no more pages than they.
    engine, requests = served(gemma, {"num_pages": 25, "max_seqs": 4})
    assert [group.table.num_pages for group in engine.state.groups] == [25, 25]
    assert [r.tokens for r in requests[1:]] == texts(gemma)[1:]
    assert requests[0].tokens == texts(gemma)[0]


def test_programs_copy_no_pool(gemma):
    engine = Engine(gemma, **SIZES | {"num_pages": 2048}, groups=True)
    for program in (engine._runner.keep_program, *engine._runner.steps.values()):
        assert pool_sized_ops(program, engine.state.groups[1].k_pages) == []


@pytest.mark.parametrize(
    "windows", [(13, 5), pytest.param((13, 0, 5), marks=pytest.mark.deep)], ids=str
)
def test_windows_of_several_sizes(texts, windows):
    """Where no layer sees all tokens, the pages of the largest window are counted."""
    model = model_of("mistral", windows)
    engine, requests = served(model, {"num_pages": 28})
    assert engine.state.kinds == tuple(w or "full" for w in windows)
    assert [r.tokens for r in requests] == texts(model)
    assert (engine.num_preemptions > 0) == (0 in windows)
    counted = engine.state.groups[windows.index(0) if 0 in windows else 0]
    assert counted.table.num_pages == engine.num_pages == 28


@pytest.mark.parametrize(
    "options",
    first_of([{}, {"num_pages": 18, "preemption": "swap", "max_seqs": 4}, TREES], 2),
    ids=["plain", "swap", "trees"],
)
def test_where_all_layers_have_one_window_the_engine_is_as_with_windows_of_rows(texts, options):
    """With the prefix cache and swapping; and a row has few pages, however long it is."""
    model = model_of("mistral")
    engine = Engine(model, **SIZES | {"groups": True} | options)
    assert engine.state.groups[0].table.pages_per_seq == WINDOW_PAGES
    for _ in range(2):  # the second time from the cache
        requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        engine.run()
        assert [r.tokens for r in requests] == texts(model)
    assert engine.num_swaps[0] > 0 or "preemption" not in options
    assert requests[0].num_cached > 0 or "preemption" in options
    engine.clear_cache()
    assert_empty(engine)
    long = engine.submit([1], max_new_tokens=1000)
    engine.run()
    assert (long.reason, len(long.tokens)) == ("length", model.config.context_length - 1)


def test_a_model_without_windows_is_served_as_without_groups():
    config = small_config("qwen3")
    engine = Engine(Decoder(config, random_source(config)), **SIZES, groups=True, window=8)
    for cached in (0, 19):  # with a prefix cache
        request = engine.submit([1] * 20, max_new_tokens=2)
        engine.run()
        assert request.num_cached in (cached, 16)
    assert engine.state.kinds == ("full",)


@pytest.mark.parametrize(
    "options", first_of([{}, {"max_drafts": 3}, TREES], 1), ids=["plain", "drafts", "trees"]
)
def test_random_requests_get_what_they_get_alone(gemma, options):
    """Under random arrival, priorities, preemption and cancellation."""
    engine = Engine(
        gemma, num_pages=14, max_seqs=4, page_size=4, max_tokens=32, groups=True, **options
    )
    plan = list(random_requests(40, seed=7))
    requests = drive(engine, plan)
    assert engine.num_preemptions > 0
    assert any(request.reason == "cancelled" for request in requests)
    assert differing(gemma, plan, requests, Alone(gemma)) <= 2
    assert_empty(engine)


def numbers_of(told):
    """Log-probabilities of tokens, the likeliest ones' too, as numbers."""
    return [
        (one.model, one.drawn, *(number for _, number in one.top))
        for one in told
        if one is not None
    ]


def test_adapters_log_probabilities_and_8_bit_pages_are_those_without_groups(model):
    options = {
        "kv_dtype": "int8", "max_adapters": 1, "max_rank": 8, "logprobs": 2, "layout": "NHD",
        "prompt_logprobs": True, "cascade": True, **TIGHT,
    }  # fmt: skip
    found = []
    for groups in (False, True):
        engine = Engine(model, **SIZES | options, groups=groups, prefix_cache=False)
        engine.add_adapter("a", make_adapter(model.config, 3))
        requests = [
            engine.submit(
                prompt, max_new_tokens=NEW, draw_index=i, prompt_logprobs=i < 2,
                adapter=None if i % 2 else "a", repetition_penalty=1.2, **SAMPLED,
            )
            for i, prompt in enumerate(PROMPTS)
        ]  # fmt: skip
        engine.run()
        assert_empty(engine)
        assert engine.num_preemptions > 0
        found.append(requests)
    for without, with_groups in zip(*found, strict=True):
        assert with_groups.tokens == without.tokens
        # Programs round on their own, and an 8-bit code may then be the next one.
        for name in ("prompt_logprobs", "logprobs"):
            got, expected = (numbers_of(getattr(x, name)) for x in (with_groups, without))
            np.testing.assert_allclose(got, expected, atol=2e-3)


def test_weights_are_renewed_and_snapshots_go_on_without_groups(gemma, texts):
    engine = Engine(gemma, **SIZES, groups=True)
    requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    while len(requests[0].tokens) < 30:
        engine.step()
    engine.update_weights(gemma)  # running requests compute all anew
    snapshot = engine.snapshot()
    engine.run()
    assert [r.tokens for r in requests] == texts(gemma)
    assert_empty(engine)
    other = Engine(gemma, **SIZES)
    resumed = other.restore(snapshot)
    other.run()
    assert [r.tokens for r in resumed] == texts(gemma)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": True}, "prefix_cache: expected None or False with groups of the kinds"),
        ({"preemption": "swap"}, "preemption: expected 'recompute' with groups of the kinds [7,"),
        ({"window": 9}, "window: expected None where groups of layers have windows, got (9, 0)"),
        (
            {"max_drafts": 2, "draft_model": True},
            "draft_model: expected None where groups of layers",
        ),
    ],
)
def test_what_takes_a_single_pool_is_refused_by_name(gemma, options, message):
    if "draft_model" in options:
        options = options | {"draft_model": gemma}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Engine(gemma, **SIZES, groups=True, **options)
    engine = Engine(gemma, **SIZES, groups=True)
    with pytest.raises(ValueError, match="hand_out: expected an engine with preemption='swap'"):
        engine.submit([1], max_new_tokens=1, hand_out=True)
