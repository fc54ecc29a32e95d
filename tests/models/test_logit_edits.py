# SPDX-License-Identifier: Apache-2.0
"""Biases, bans, penalties and min_p of requests; log-probabilities of prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

from jax_paged.models import Decoder, generate, token_logits
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.serving.engine import Engine
from jax_paged.models.serving.logit_edits import (
    EditOptions,
    LogitEdits,
    TokenMemory,
    everything,
    memory_of,
    unpacked,
    ways,
)
from jax_paged.models.testing import noisy, small_config

CONFIG = small_config("qwen3", vocab_size=70, head_dim=8, max_position_embeddings=64)
SIZES = {"num_pages": 60, "max_seqs": 4, "page_size": 4, "max_tokens": 32}
PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9]
NEW = (6, 0, 15, 12)  # tokens, where prompts are told of
EDITS = {
    "bias": {"logit_bias": {3: 2.5, 17: -4.0, 40: 1.0}},
    "bans": {"banned_tokens": range(20, 60), "logit_bias": {5: float("-inf")}},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "all": {
        "logit_bias": {3: 1.0}, "banned_tokens": [9], "repetition_penalty": 0.8,
        "presence_penalty": -0.5, "frequency_penalty": 1.1,
    },
}  # fmt: skip
DRAFTS = {
    "no drafts": {},
    "look-up trees": {"max_drafts": 4, "draft_branches": 2},
    "look-up": {"max_drafts": 3},
    "draft model": {"max_drafts": 3, "draft_model": True},
    "draft trees": {"max_drafts": 4, "draft_model": True, "draft_branches": 2},
}


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


def edited(logits, prompt, new, options):
    """The definition, a token at a time."""
    out = np.array(logits, np.float64)
    for token, bias in options.get("logit_bias", {}).items():
        out[token] += bias
    out[list(options.get("banned_tokens", []))] = -np.inf
    for token in range(len(out)):
        if token in prompt or token in new:
            rate = options.get("repetition_penalty", 1.0)
            out[token] = out[token] / rate if out[token] > 0 else out[token] * rate
        count = list(new).count(token)
        out[token] -= options.get("frequency_penalty", 0.0) * count
        out[token] -= options.get("presence_penalty", 0.0) * (count > 0)
    return out


def greedy(model, prompt, count, options):
    """What a loop over `score` gives."""
    new = []
    for _ in range(count):
        logits = token_logits(model, [*prompt, *new])[-1]
        new.append(int(np.argmax(edited(logits, prompt, new, options))))
    return new


@pytest.mark.parametrize("name", EDITS)
def test_edited_requests_get_what_a_plain_loop_gets(model, name):
    """Beside requests that edit nothing, which get what they get alone."""
    engine = Engine(model, **SIZES, logprobs=0)
    plain = engine.submit(PROMPTS[0], max_new_tokens=8, temperature=0.9, seed=4)
    requests = [engine.submit(p, max_new_tokens=8, **EDITS[name]) for p in PROMPTS]
    engine.run()
    alone = generate(model, [PROMPTS[0]], max_new_tokens=8, temperature=0.9, seed=4).tokens[0]
    assert plain.tokens == alone
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.tokens == greedy(model, prompt, 8, EDITS[name])
        told = token_logits(model, [*prompt, *request.tokens])[len(prompt) - 1 : -1]
        own = np.asarray(jax.nn.log_softmax(told, axis=-1))[np.arange(8), request.tokens]
        np.testing.assert_allclose([x.model for x in request.logprobs], own, atol=1e-4)


@pytest.mark.parametrize("drafts", first_of(DRAFTS, 2))
def test_drafts_do_not_change_edited_tokens(model, drafts):
    options = dict(DRAFTS[drafts])
    if options.get("draft_model"):
        options["draft_model"] = noisy(model)
    engine = Engine(model, **SIZES, **options)
    wanted = Engine(model, **SIZES)
    sampling = {"temperature": 0.8, "seed": 3, "min_p": 0.02}
    for given in ({}, sampling):
        made = [
            [e.submit(p, max_new_tokens=14, **given, **EDITS["all"]) for p in PROMPTS]
            for e in (engine, wanted)
        ]
        engine.run()
        wanted.run()
        for one, other in zip(*made, strict=True):
            assert one.tokens == other.tokens
    if drafts != "no drafts":
        assert engine.num_accepted > 0


def test_log_probabilities_are_of_what_was_drawn_from(model):
    engine = Engine(model, **SIZES, logprobs=0)
    request = engine.submit(
        PROMPTS[2], max_new_tokens=6, temperature=0.7, seed=2, min_p=0.05, **EDITS["all"]
    )
    engine.run()
    for i, told in enumerate(request.logprobs):
        new = request.tokens[:i]
        logits = token_logits(model, [*PROMPTS[2], *new])[-1]
        logits = edited(logits, PROMPTS[2], new, EDITS["all"]) / 0.7
        weights = np.exp(logits - logits.max())
        weights[weights < 0.05] = 0
        expected = np.log(weights[request.tokens[i]] / weights.sum())
        assert told.drawn == pytest.approx(expected, abs=2e-4)


def test_a_preempted_request_remembers(model):
    few = SIZES | {"num_pages": 14}
    engine, wanted = Engine(model, **few), Engine(model, **SIZES)
    for e in (engine, wanted):
        e.made = [e.submit(p, max_new_tokens=20, **EDITS["all"]) for p in PROMPTS]
        e.run()
    assert engine.num_preemptions > 0
    assert [r.tokens for r in engine.made] == [r.tokens for r in wanted.made]


def test_rows_that_edit_nothing_keep_their_bits():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((6, 70)), jnp.float32)
    edits = LogitEdits.create(3, everything(3, 70))
    edits.active[1] = True
    edits.presence[:] = 3.0
    memory = TokenMemory.create(3, 70)
    out, stuck = edits(logits, memory, jnp.full((3, 2, 2), -1, jnp.int32))
    assert np.array_equal(np.asarray(out)[[0, 1, 4, 5]], np.asarray(logits)[[0, 1, 4, 5]])
    assert not stuck.any()


def test_tokens_of_drafts_count_for_those_behind_them():
    """A chain of 3 and a tree whose nodes 1 and 2 are siblings."""
    tokens = jnp.asarray([[4, 5, 5], [4, 6, 7]], jnp.int32)
    chain = np.asarray(ways(tokens, None))
    assert chain[0].tolist() == [[-1, -1, -1], [-1, 5, -1], [-1, 5, 5]]
    tree = np.asarray(ways(tokens, jnp.asarray([[-1, 0, 1], [-1, 0, 0]], jnp.int32)))
    assert tree[0].tolist() == chain[0].tolist()
    assert tree[1].tolist() == [[-1, -1, -1], [-1, 6, -1], [-1, -1, 7]]
    options = EditOptions(frequency=1.0)
    edits = LogitEdits.create(2, everything(2, 8))
    edits.active[:], edits.frequency[:] = True, options.frequency
    seen, bias = memory_of(options, 8, np.int32([1]), [5])
    memory = TokenMemory.create(2, 8).begin(jnp.int32(0), seen, bias)
    out, _ = edits(jnp.zeros((6, 8), jnp.float32), memory, jnp.asarray(tree))
    assert np.asarray(out)[:3, 5].tolist() == [-1, -2, -3]
    assert np.asarray(out)[5].tolist() == [0, 0, 0, 0, 0, 0, 0, -1]


def test_a_row_without_a_token_ends_and_says_so(model):
    """A mask and bans that leave nothing, which no single option may ask for."""

    class Never:
        eos_tokens, is_complete, error = frozenset(), False, ""

        def start(self, vocab_size):
            return self

        def allow(self, mask):
            mask[:] = 0
            mask[0] = 1 << 3  # token 3 alone

        def advance(self, token):
            pass

    engine = Engine(model, **SIZES)
    request = engine.submit([1, 2], max_new_tokens=5, constraint=Never(), banned_tokens=[3])
    other = engine.submit([1, 2], max_new_tokens=5)
    engine.run()
    assert (request.tokens, request.reason) == ([], "no_token")
    assert request.detail == "no token is left to draw from"
    assert other.tokens == generate(model, [[1, 2]], max_new_tokens=5).tokens[0]
    engine.clear_cache()
    assert engine.num_free_pages == engine.num_pages


def test_masks_are_read_bit_by_bit():
    mask = np.zeros((1, 3), np.uint32)
    mask[0, 0], mask[0, 2] = 1 | 1 << 31, 1 << 5
    assert np.flatnonzero(unpacked(jnp.asarray(mask), 70)[0]).tolist() == [0, 31, 69]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {70: 1.0}}, r"^logit_bias\[0\]: expected a token id in \[0, vocab_size=70"),
        ({"logit_bias": {3: float("nan")}}, r"^logit_bias\[3\]: expected a number below inf, got"),
        ({"logit_bias": [3]}, r"^logit_bias: expected a dict from token ids to numbers, got"),
        ({"banned_tokens": range(70)}, r"^banned_tokens: expected at least one token that is not"),
        ({"repetition_penalty": 0}, r"^repetition_penalty: expected None or a number in \[0.01"),
        ({"presence_penalty": "x"}, r"^presence_penalty: expected None or a number in \[-100"),
        ({"frequency_penalty": 1e9}, r"^frequency_penalty: expected None or a number in \[-100"),
        ({"min_p": 1.5}, r"^min_p: expected None or a number in \[0, 1\], got 1.5"),
        ({"prompt_logprobs": True}, r"^prompt_logprobs: expected False, or an engine with"),
    ],
)
def test_wrong_options_are_named(model, options, message):
    engine = Engine(model, **SIZES)
    with pytest.raises(ValueError, match=message):
        engine.submit([1, 2], max_new_tokens=2, **options)


def test_min_p_drops_what_is_less_likely():
    logits = np.log(np.array([[0.05, 0.4, 0.1, 0.25, 0.2]], "f4"))
    for min_p, kept in ((0.2, [1, 2, 3, 4]), (0.3, [1, 3, 4]), (0.55, [1, 3]), (1.0, [1])):
        left = Sampler.create(temperature=1.0, min_p=min_p).cut(logits)
        assert np.flatnonzero(np.isfinite(left[0])).tolist() == kept
    # Of what is left, top_p keeps 0.4 / 0.65 = 0.62 and more.
    for top_p, kept in ((0.61, [1]), (0.62, [1, 3])):
        left = Sampler.create(temperature=1.0, min_p=0.55, top_p=top_p).cut(logits)
        assert np.flatnonzero(np.isfinite(left[0])).tolist() == kept


def test_the_engine_draws_with_min_p_as_generate_does(model):
    options = {"temperature": 1.5, "min_p": 0.1, "seed": 8}
    made = Engine(model, **SIZES).generate(PROMPTS, max_new_tokens=9, **options)
    expected = generate(model, PROMPTS, max_new_tokens=9, **options).tokens
    assert [request.tokens for (request,) in made] == expected
    free = generate(model, PROMPTS, max_new_tokens=9, temperature=1.5, seed=8).tokens
    assert free != expected


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_log_probabilities_of_prompts_are_those_of_score(model, preemption):
    """In chunks, beside others, behind a warm cache, and in a pool that preempts."""
    sizes = SIZES | {"num_pages": 16, "max_tokens": 9, "preemption": preemption}
    engine = Engine(model, **sizes, logprobs=2, prompt_logprobs=True)
    engine.generate([PROMPTS[2]], max_new_tokens=1)
    requests = [
        engine.submit(prompt, max_new_tokens=new, prompt_logprobs=asks)
        for prompt, new, asks in zip(PROMPTS, NEW, (True, True, True, False), strict=True)
    ]
    short = engine.submit([3, 4, 5, 6], max_new_tokens=0, prompt_logprobs=True)
    engine.run()
    assert [len(r.tokens) for r in requests] == [6, 0, 15, 12]
    assert [(len(r.tokens), r.reason) for r in (requests[1], short)] == [(0, "length")] * 2
    assert requests[3].prompt_logprobs == []
    for request in (*requests[:3], short):
        prompt = request.prompt
        every = np.asarray(jax.nn.log_softmax(token_logits(model, prompt.tolist()), axis=-1))
        told = request.prompt_logprobs
        assert len(told) == len(prompt)
        assert told[0] is None
        for i, one in enumerate(told[1:]):
            assert one.model == pytest.approx(every[i, prompt[i + 1]], abs=1e-4)
            assert [t for t, _ in one.top] == np.argsort(-every[i], kind="stable")[:2].tolist()
    expected = generate(model, PROMPTS, max_new_tokens=15).tokens
    for request, tokens in zip(requests, expected, strict=True):
        assert request.tokens == tokens[: len(request.tokens)]
    engine.clear_cache()
    assert engine.num_free_pages == engine.num_pages
