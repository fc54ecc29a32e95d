# SPDX-License-Identifier: Apache-2.0
"""Scores, logits and perplexity: chunks and windows change only the context that a token sees."""

import dataclasses
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

from jax_paged.models import Decoder, evaluate, score, token_logits
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.evaluation.perplexity import plan_pieces
from jax_paged.models.testing import small_config

CONFIG = small_config("llama", vocab_size=64, head_dim=8, max_position_embeddings=32)
TEXT = np.random.default_rng(0).integers(0, 64, 32).tolist()
LONG = np.random.default_rng(1).integers(0, 64, 77).tolist()


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


def losses(logits: np.ndarray, targets) -> np.ndarray:
    """−log softmax(logits)[target] in float64."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    picked = np.take_along_axis(logits, np.asarray(targets)[:, None], -1)[:, 0]
    return np.log(np.exp(logits).sum(-1)) - picked


def test_chunked_logits_equal_those_of_one_pass(model):
    whole = token_logits(model, TEXT)
    assert whole.shape == (32, 64)
    assert whole.dtype == np.float32
    for chunk in (7, 8, 31):
        np.testing.assert_allclose(token_logits(model, TEXT, chunk=chunk), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [512, 5])
def test_scores_are_log_probabilities_of_the_logits(model, chunk):
    log_p = score(model, TEXT, chunk=chunk)
    assert (log_p.shape, log_p.dtype) == ((31,), np.float32)
    expected = -losses(token_logits(model, TEXT)[:-1], TEXT[1:])
    np.testing.assert_allclose(log_p, expected, rtol=0, atol=1e-5)
    assert score(model, TEXT[:1], chunk=chunk).shape == (0,)


def test_logits_see_no_later_token(model):
    changed = [*TEXT[:20], *LONG[:12]]
    np.testing.assert_allclose(
        token_logits(model, changed)[:20], token_logits(model, TEXT)[:20], rtol=0, atol=1e-5
    )


def test_perplexity_is_that_of_the_scored_logits(model):
    expected = losses(token_logits(model, TEXT)[:-1], TEXT[1:]).mean()
    for chunk in (512, 5):
        result = evaluate(model, TEXT, chunk=chunk)
        assert result["nll"] == pytest.approx(expected, abs=1e-5)
        assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
        assert (result["tokens"], result["predicted"]) == (32, 31)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(model):
    blank = Decoder(CONFIG, random_source(CONFIG, seed=1))
    blank.head[...] = jnp.zeros_like(blank.head[...])
    assert evaluate(blank, LONG)["perplexity"] == pytest.approx(64, rel=1e-5)


def test_a_long_text_is_scored_in_pieces_that_each_predict_new_tokens(model):
    told = []
    result = evaluate(model, LONG, context=16, stride=6, chunk=5, on_progress=told.append)
    total = 0.0
    for position in range(1, len(LONG)):
        piece = next(p for p in plan_pieces(len(LONG), 16, 6) if position <= p.stop)
        logits = token_logits(model, LONG[piece.start : piece.stop])
        each = losses(logits, LONG[piece.start + 1 : piece.stop + 1])
        total += each[position - 1 - piece.start]
    assert result["nll"] == pytest.approx(total / 76, abs=1e-5)
    assert sum(told) == result["predicted"] == 76
    assert (result["context"], result["stride"]) == (16, 6)


@pytest.mark.parametrize(
    ("num_tokens", "context", "stride"),
    [(2, 1, 1), (9, 8, 4), (100, 8, 1), (100, 8, 8), (77, 16, 6), (33, 32, 16), (5, 100, 50)],
)
def test_pieces_predict_each_token_once_with_enough_context(num_tokens, context, stride):
    pieces = list(plan_pieces(num_tokens, context, stride))
    predicted = [t + 1 for p in pieces for t in range(p.first, p.stop)]
    assert predicted == list(range(1, num_tokens))
    for piece in pieces:
        assert 0 <= piece.start <= piece.first < piece.stop
        assert piece.stop - piece.start <= context
        assert piece.start == 0 or piece.first + 1 - piece.start > context - stride


@pytest.mark.parametrize("chunk", first_of([5, 512], 1))
def test_a_window_is_that_of_a_model_whose_layers_have_it(model, chunk):
    raw = {"vocab_size": 64, "head_dim": 8, "max_position_embeddings": 32}
    slides = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    configs = [small_config("qwen3", **raw), small_config("qwen3", **raw, **slides)]
    whole, windowed = (Decoder(config, random_source(config, seed=1)) for config in configs)
    options = {"context": 20, "stride": 9, "chunk": chunk}
    result = evaluate(whole, LONG, window=6, **options)
    assert result["nll"] == pytest.approx(evaluate(windowed, LONG, **options)["nll"], abs=1e-5)
    assert abs(result["nll"] - evaluate(whole, LONG, **options)["nll"]) > 1e-3
    assert (result["window"], result["num_pinned"]) == (6, 0)


def test_pinned_tokens_are_seen_by_all_and_the_others_by_none(model):
    """With a window of the pinned tokens and itself, a token between them matters to nobody."""

    def total(changes, **options):
        text = [changes.get(i, token) for i, token in enumerate(TEXT)]
        return 31 * evaluate(model, text, **options)["nll"]

    for options, adds_up in (({"window": 4, "num_pinned": 3}, True), ({}, False)):
        none, one, two, both = (
            total(changes, **options) for changes in ({}, {8: 1}, {20: 2}, {8: 1, 20: 2})
        )
        assert (abs(both - one - two + none) < 1e-4) == adds_up
    pinned = [total({1: token}, window=4, num_pinned=3) for token in (1, 2)]
    free = [total({1: token}, window=1) for token in (1, 2)]
    assert abs(pinned[0] - pinned[1] - free[0] + free[1]) > 1e-3


def test_perplexity_of_impossible_tokens_is_infinite_and_no_error(model):
    sure = Decoder(CONFIG, random_source(CONFIG, seed=1))
    sure.head[...] = sure.head[...] * jnp.float32(1e6)
    result = evaluate(sure, TEXT)
    assert result["perplexity"] == math.inf
    assert result["nll"] > 700


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "tokens: expected a non-empty list of token ids, got shape [0]"),
        ([5], {}, "tokens: expected at least 2 tokens, one to predict, got 1"),
        ([5, 64], {}, "tokens[1]: expected a token id in [0, vocab_size=64), got 64"),
        (TEXT, {"chunk": 0}, "chunk: expected an integer >= 1, got 0"),
        (TEXT, {"context": 0}, "context: expected an integer >= 1, got 0"),
        (TEXT, {"context": 33}, "context: expected at most context_length=32, got 33"),
        (TEXT, {"context": 8, "stride": 9}, "stride: expected at most context=8, got 9"),
        (TEXT, {"stride": 0}, "stride: expected an integer >= 1, got 0"),
        (TEXT, {"num_pinned": 2}, "num_pinned: expected 0 without a window, got 2"),
        (TEXT, {"window": 2, "num_pinned": 2}, "window: expected an integer >= 3, got 2"),
    ],
)
def test_bad_calls_of_evaluate_are_refused(model, tokens, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        evaluate(model, tokens, **options)


@pytest.mark.parametrize("function", [score, token_logits])
def test_a_text_beyond_the_context_cannot_be_scored_at_once(model, function):
    with pytest.raises(ValueError, match=r"context_length=32 tokens, got 77$"):
        function(model, LONG)


def test_weights_in_bf16_evaluate_close_to_f32():
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    exact = evaluate(Decoder(config, random_source(config)), TEXT)["nll"]
    rounded = evaluate(Decoder(config, random_source(config, dtype=jnp.bfloat16)), TEXT)["nll"]
    assert rounded == pytest.approx(exact, rel=0.02)
    assert rounded != exact
