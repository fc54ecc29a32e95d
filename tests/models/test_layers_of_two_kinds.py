# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, gpt-oss and Mistral in all that runs a model, and with pages that windows free."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from adapters import make_adapter
from in_all_that_runs import SERVED, assert_likely, assert_served
from tiers import first_of

from jax_paged.models import (
    Decoder,
    generate,
    merge_adapter,
    score,
    split_model,
    token_logits,
    with_adapter,
)
from jax_paged.models.decoder import generation
from jax_paged.models.decoder.generation import compile_for, create_state
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, decode, prefill_within
from jax_paged.models.testing import small_config
from jax_paged.testing import pool_sized_ops

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, 97, count).tolist() for count in (40, 3, 21, 1)]
NEW, CHUNK = 14, 16
# A row of a layer with a window of 7: pages of 4 for that and a chunk of 16, and one more.
SIZES = {"page_size": 4, "max_seqs": 4, "groups": True}
PAGES = {"full": 48, 7: 28}
PER_SEQ = {"full": 16, 7: 7}


@pytest.fixture(scope="module", params=first_of(["gpt_oss", "gemma3_text", "mistral"], 1))
def model(request):
    config = small_config(request.param)
    return Decoder(config, random_source(config, 5))


@pytest.fixture(scope="module")
def expected(model):
    return generate(model, PROMPTS, max_new_tokens=NEW).tokens


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_CHUNK", CHUNK)


def state_of(model, num_pages=PAGES, **changes):
    return create_state(
        model, **SIZES | {"num_pages": num_pages, "pages_per_seq": PER_SEQ}, **changes
    )


def assert_all_free(state):
    assert bool(state.is_empty)
    for group in state.groups:
        assert int(group.table.free_pages) == group.table.num_pages


def test_tokens_are_the_argmax_of_a_full_prefill(model, expected):
    for prompt, new in zip(PROMPTS, expected, strict=True):
        logits = token_logits(model, prompt + new)
        assert new == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("kv_dtype", first_of(["auto", "int8"], 1))
def test_generate_frees_the_pages_behind_windows(model, expected, kv_dtype):
    if kv_dtype != "auto":
        expected = generate(model, PROMPTS, max_new_tokens=NEW, kv_dtype=kv_dtype).tokens
    state = state_of(model, kv_dtype=kv_dtype)
    assert set(state.kinds) == set(model.config.layer_windows) - {0} | (
        {"full"} if 0 in model.config.layer_windows else set()
    )
    result = generate(model, PROMPTS, max_new_tokens=NEW, state=state)
    assert result.tokens == expected
    assert_all_free(result.state)
    # The longest prompt alone fills 10 pages, and with its new tokens 14.
    peaks = dict(zip(result.state.kinds, np.ravel(result.state.peak_pages).tolist(), strict=True))
    assert peaks[7] <= 3 * len(PROMPTS) + CHUNK // 4
    assert peaks.get("full", 99) > 20
    again = generate(model, PROMPTS[1:], max_new_tokens=NEW, state=result.state)
    assert again.tokens == expected[1:]


def test_rows_without_pages_stop_alone_and_give_all_back(model, expected):
    """Six pages for windows: one row has its chunk, and what the others lack stops them."""
    state = state_of(model, {"full": 48, 7: 6})
    result = generate(model, PROMPTS, max_new_tokens=NEW, state=state, chunk=4)
    assert "pool_full" in result.stop_reasons
    assert "length" in result.stop_reasons
    for new, all_new, reason in zip(result.tokens, expected, result.stop_reasons, strict=True):
        assert new == all_new[: len(new)]
        assert reason != "length" or len(new) == NEW
    assert_all_free(result.state)


@pytest.mark.deep
def test_a_chunk_beyond_a_row_of_a_window_stops_the_row(model, expected):
    state = create_state(model, **SIZES, num_pages=48, pages_per_seq={"full": 16, 7: 4})
    result = generate(model, [*PROMPTS[:2], PROMPTS[3]], max_new_tokens=NEW, state=state)
    assert result.stop_reasons == ["row_full", "length", "length"]
    assert result.tokens == [[], expected[1], expected[3]]
    assert_all_free(result.state)


@pytest.mark.deep
def test_programs_are_compiled_ahead_and_copy_no_pool():
    config = small_config("gemma3_text")
    model = Decoder(config, random_source(config))

    def create():
        return create_state(model, num_pages=2048, max_seqs=4, pages_per_seq=64, groups=True)

    assert compile_for(model, PROMPTS[1:2], max_new_tokens=NEW, create=create) > 0
    (graph, params), state = split_model(model), create()
    rows, tokens = np.arange(4, dtype=np.int32), np.zeros(64, np.int32)
    progress = Progress(*(jnp.zeros(4, jnp.int32),) * 3)
    loop = decode.lower(
        graph, params, state, progress, rows, rows, rows, Sampler.create(), jnp.int32(3), chunk=4
    ).compile()
    chunk = prefill_within.lower(graph, params, state, rows, rows, tokens).compile()
    for program in (loop, chunk):
        assert pool_sized_ops(program, state.groups[0].k_pages) == []


def test_a_state_of_other_kinds_is_refused():
    config = small_config("gpt_oss", sliding_window=9)
    model, other = (Decoder(c, random_source(c)) for c in (small_config("gpt_oss"), config))
    state = create_state(other, num_pages=8, max_seqs=4, pages_per_seq=8, groups=True)
    text = "state: expected one whose layers are all 'full', or of the kinds (7, 'full') as the mod"
    with pytest.raises(ValueError, match=re.escape(text)):
        generate(model, PROMPTS, max_new_tokens=2, state=state)
    config = small_config("gpt_oss", head_dim=32)
    state = state_of(Decoder(config, random_source(config)))
    text = "state.groups[0].k_pages: expected float32[1, 28, 2, 4, 16], as the model has them"
    with pytest.raises(ValueError, match=re.escape(text)):
        generate(model, PROMPTS, max_new_tokens=2, state=state)


@pytest.mark.parametrize("options", first_of(SERVED.values(), 1), ids=SERVED)
def test_the_engine_gives_the_tokens_of_generate(model, expected, options):
    assert_served(model, PROMPTS, expected, NEW, options)


def test_likelihoods_are_those_of_the_logits(model):
    text = PROMPTS[0]
    told = assert_likely(model, text)
    np.testing.assert_allclose(np.asarray(score(model, text))[-len(told) :], told, atol=1e-4)


def test_an_adapter_adds_what_it_adds_to_the_weights(model):
    adapter = make_adapter(model.config, 3)
    merged, added = merge_adapter(model, adapter), with_adapter(model, adapter)
    want, got = (token_logits(one, PROMPTS[0]) for one in (merged, added))
    np.testing.assert_allclose(got, want, atol=2e-4)
    assert np.abs(got - token_logits(model, PROMPTS[0])).max() > 0.1


@pytest.mark.parametrize(("weight_dtype", "loss"), [("int8", 0.05), ("fp8", 0.2)])
def test_8_bit_weights_change_the_logits_by_their_rounding_alone(model, weight_dtype, loss):
    source = random_source(model.config, 5)
    rounded = Decoder(model.config, source, weight_dtype=weight_dtype)
    assert rounded.layers[0].attention.qkv[...].dtype.itemsize == 1
    want, got = (token_logits(one, PROMPTS[0]) for one in (model, rounded))
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < loss
