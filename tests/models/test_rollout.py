# SPDX-License-Identifier: Apache-2.0
"""What rollouts need of the engine: log-probabilities, samples of a prompt, new weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

from jax_paged.models import Decoder, generate, token_logits
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.protocol import split_model
from jax_paged.models.decoder.sample import RowSamplers
from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import noisy, small_config

CONFIG = small_config("qwen3", vocab_size=64, head_dim=8, max_position_embeddings=64)
SIZES = {"num_pages": 40, "max_seqs": 4, "page_size": 4, "max_tokens": 32}
PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9]
OPTIONS = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.2, "top_k": 5, "top_p": 0.8}]
DRAFTS = {
    "draft trees, rejection": {
        "max_drafts": 4, "draft_model": True, "draft_branches": 2, "draft_rule": "rejection",
    },
    "no drafts": {},
    "look-up": {"max_drafts": 3},
    "look-up trees": {"max_drafts": 4, "draft_branches": 2},
    "draft model": {"max_drafts": 3, "draft_model": True},
    "draft model, rejection": {"max_drafts": 3, "draft_model": True, "draft_rule": "rejection"},
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


def expected_of(model, request):
    """Of each new token in one pass: (under the model, under what was drawn from), and all."""
    text = [*request.prompt.tolist(), *request.tokens]
    logits = token_logits(model, text)[len(request.prompt) - 1 : -1]
    of = request.sampling
    samplers = RowSamplers(
        seed=np.uint32([0]), draw_index=np.int32([0]), temperature=np.float32([of.temperature]),
        top_k=np.int32([of.top_k or 0]), top_p=np.float32([1.0 if of.top_p is None else of.top_p]),
        min_p=np.float32([0]),
    )  # fmt: skip
    each = np.arange(len(logits)), np.asarray(request.tokens)
    every = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    drawn = np.log(np.asarray(samplers.probabilities(logits))[each])
    return every[each], drawn, every


@pytest.mark.parametrize("drafts", first_of(DRAFTS, 1))
def test_log_probabilities_are_those_of_one_pass(model, drafts):
    """f32 sums in another order: 1e-4 of logits of a few units."""
    options = dict(DRAFTS[drafts])
    if options.get("draft_model"):
        options["draft_model"] = noisy(model)
    engine = Engine(model, **SIZES, **options, logprobs=2)
    requests = [
        engine.submit(prompt, max_new_tokens=9, **sampling)
        for prompt, sampling in zip(PROMPTS, [*OPTIONS, OPTIONS[0]], strict=True)
    ]
    engine.run()
    for request in requests:
        model_own, drawn, every = expected_of(model, request)
        assert len(request.logprobs) == len(request.tokens) == 9
        np.testing.assert_allclose([x.model for x in request.logprobs], model_own, atol=1e-4)
        np.testing.assert_allclose([x.drawn for x in request.logprobs], drawn, atol=2e-4)
        for told, row in zip(request.logprobs, every, strict=True):
            ids, values = zip(*told.top, strict=True)
            assert list(ids) == np.argsort(-row, kind="stable")[:2].tolist()
            np.testing.assert_allclose(values, row[list(ids)], atol=1e-4)


def test_without_them_nothing_is_told_and_the_tokens_are_the_same(model):
    plain, told = Engine(model, **SIZES), Engine(model, **SIZES, logprobs=0)
    requests = []
    for engine in (plain, told):
        of = [engine.submit(p, max_new_tokens=9, **OPTIONS[1]) for p in PROMPTS]
        engine.run()
        requests.append(of)
    for one, other in zip(*requests, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == []
        assert [x.top for x in other.logprobs] == [()] * 9


def test_a_token_that_stops_is_told_apart(model):
    engine = Engine(model, **SIZES, logprobs=0, prefix_cache=False)  # both round alike
    first = engine.submit([1, 2, 3], max_new_tokens=6)
    engine.run()
    stop = first.tokens[3]
    again = engine.submit([1, 2, 3], max_new_tokens=6, stop_tokens=[stop])
    engine.run()
    assert again.reason == "stop_token"
    kept = first.tokens.index(stop)
    assert again.tokens == first.tokens[:kept]
    assert again.logprobs == first.logprobs[:kept]
    assert again.stop == (stop, first.logprobs[kept])
    assert first.stop is None


@pytest.mark.parametrize("logprobs", [-1, 65, 1.5])
def test_wrong_counts_are_told(model, logprobs):
    with pytest.raises(ValueError, match=r"^logprobs: expected"):
        Engine(model, **SIZES, logprobs=logprobs)


def changed(model, seed=2):
    return Decoder(CONFIG, random_source(CONFIG, seed=seed))


@pytest.mark.parametrize("drafts", ["no drafts", "look-up"])
def test_new_weights_give_what_the_new_model_gives(model, drafts):
    """Twice, so that copies go into copies; and nothing is compiled again."""
    engine = Engine(model, **SIZES, **DRAFTS[drafts])
    others = [changed(model, seed) for seed in (2, 3)]
    before = dict(engine._runner.steps)
    for version, other in enumerate(others, start=1):
        engine.generate(PROMPTS, max_new_tokens=5)  # fills the cache
        engine.update_weights(other)
        assert engine.weight_version == version
        assert engine.num_free_pages == engine.num_pages, "no page of the old weights is kept"
        made = engine.generate(PROMPTS, max_new_tokens=7, **OPTIONS[1])
        expected = generate(other, PROMPTS, max_new_tokens=7, **OPTIONS[1]).tokens
        assert [request.tokens for (request,) in made] == expected
        assert [request.num_cached for (request,) in made] == [0] * len(PROMPTS)
    assert engine._runner.steps == before
    assert generate(model, [[1, 2]], max_new_tokens=2).tokens[0], "the caller's weights live on"


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_running_requests_compute_anew_or_keep_what_they_have(model, preemption):
    other = changed(model)
    for running in ("recompute", "keep"):
        engine = Engine(model, **SIZES, preemption=preemption, logprobs=0)
        requests = [engine.submit(prompt, max_new_tokens=12) for prompt in PROMPTS]
        for _ in range(5):
            engine.step()
        engine.update_weights(other, running=running)
        counts = [len(request.tokens) for request in requests]
        assert max(counts) > 0
        engine.run()
        for request, count in zip(requests, counts, strict=True):
            assert len(request.tokens) == 12
            logits = token_logits(other, [*request.prompt.tolist(), *request.tokens])
            every = np.asarray(jax.nn.log_softmax(logits, axis=-1))
            places = len(request.prompt) - 1 + np.arange(count, 12)
            expected = every[places, request.tokens[count:]]
            got = [told.model for told in request.logprobs[count:]]
            if running == "recompute":
                np.testing.assert_allclose(got, expected, atol=1e-4)
            elif count > 0:
                assert np.abs(np.float32(got) - expected).max() > 1e-3
        # What was kept of old keys and values is not in the cache.
        after = engine.generate(PROMPTS, max_new_tokens=6)
        expected = generate(other, PROMPTS, max_new_tokens=6).tokens
        assert [request.tokens for (request,) in after] == expected


def test_weights_by_a_mapping_and_without_a_copy(model):
    other = changed(model)
    _, params = split_model(other)
    named = {"all": jax.tree.map(lambda x: 2 * x, params)}
    for copy in (True, False):
        engine = Engine(model, **SIZES)
        engine.update_weights(
            named, mapping=lambda x: jax.tree.map(lambda y: y / 2, x["all"]), copy=copy
        )
        made = engine.generate(PROMPTS, max_new_tokens=4)
        expected = generate(other, PROMPTS, max_new_tokens=4).tokens
        assert [request.tokens for (request,) in made] == expected


def test_weights_that_do_not_fit_are_named(model):
    engine = Engine(model, **SIZES)
    _, params = split_model(model)
    leaves, tree = jax.tree.flatten(params)
    wrong = jax.tree.unflatten(tree, [leaves[0][:-1], *leaves[1:]])
    with pytest.raises(ValueError, match=r"^weights at .*: expected float32\[.*\], got float32\["):
        engine.update_weights(wrong)
    with pytest.raises(ValueError, match=r"^weights: expected an array at .*, got none"):
        engine.update_weights({})
    with pytest.raises(ValueError, match=r"^running: expected"):
        engine.update_weights(params, running="stop")
    assert engine.weight_version == 0
    engine.generate([[1, 2]], max_new_tokens=2)


def test_samples_share_the_pages_of_their_prompt(model):
    engine = Engine(model, **SIZES, logprobs=0)
    told = []
    prompts = [list(range(21)), [5, 6]]
    made = engine.generate(
        prompts, n=3, max_new_tokens=6, on_tokens=lambda *x: told.append(x), **OPTIONS[1]
    )
    expected = generate(
        model, [p for p in prompts for _ in range(3)], max_new_tokens=6, **OPTIONS[1]
    ).tokens
    assert [request.tokens for of_prompt in made for request in of_prompt] == expected
    assert [request.num_cached for request in made[0]] == [0, 20, 20]
    assert len({tuple(request.tokens) for request in made[0]}) == 3
    for i, of_prompt in enumerate(made):
        for j, request in enumerate(of_prompt):
            mine = [(new, reason) for a, b, new, reason in told if (a, b) == (i, j)]
            assert [token for new, _ in mine for token in new] == request.tokens
            assert mine[-1][1] == "length"
    engine.clear_cache()
    assert engine.num_free_pages == engine.num_pages


def test_a_wrong_option_leaves_nothing_behind(model):
    engine = Engine(model, **SIZES)
    with pytest.raises(ValueError, match=r"^prompt\[0\]: expected"):
        engine.generate([[1, 2], [99]], max_new_tokens=3)
    with pytest.raises(ValueError, match=r"^n: expected"):
        engine.generate([[1, 2]], n=0, max_new_tokens=3)
    engine.run()
    assert engine.is_idle
    engine.clear_cache()
    assert engine.num_free_pages == engine.num_pages


def test_new_weights_compile_nothing_after_the_first_two(model):
    """The first are copied, the second into those copies: both programs are there then."""
    engine = Engine(model, **SIZES)
    for seed in (2, 3):
        engine.update_weights(changed(model, seed))
        engine.generate(PROMPTS, max_new_tokens=3)
    compiled, listens = [], [False]

    def listen(name, *_, **__):
        if listens[0] and "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)  # jax 0.7 lets none go again
    others = [changed(model, seed) for seed in (4, 5)]
    listens[0] = True
    try:
        for other in others:
            engine.update_weights(other)
            engine.generate(PROMPTS, max_new_tokens=3)
        assert compiled == []
        jax.jit(lambda x: x + 3)(jnp.ones(3)).block_until_ready()
        assert compiled, "the listener hears of a program"
    finally:
        listens[0] = False
