# SPDX-License-Identifier: Apache-2.0
"""Drafts by a draft model: both rules leave the distribution alone, one even the tokens."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import assert_no_pool_is_copied, gathers_in_place
from tiers import first_of

from jax_paged.models import Decoder, generate, token_logits
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.sample import RowSamplers, Sampler
from jax_paged.models.serving.engine import Engine
from jax_paged.models.serving.speculate import RULES, Drafts, reject
from jax_paged.models.testing import small_config

VOCAB = 16
CONFIG = small_config("qwen3", vocab_size=VOCAB, head_dim=8, max_position_embeddings=64)
SMALLER = small_config(
    "qwen3", vocab_size=VOCAB, head_dim=16, max_position_embeddings=64, num_hidden_layers=1
)
SIZES = {"num_pages": 40, "max_seqs": 4, "page_size": 4, "max_tokens": 16, "max_drafts": 3}
SAMPLED = {"temperature": 1.2, "top_k": 9, "seed": 3}
KINDS = [pytest.param(x) for x in (("same_noise", 1), ("rejection", 1), ("rejection", 2))]


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


@pytest.fixture(scope="module")
def drafter():
    return Decoder(SMALLER, random_source(SMALLER, seed=2))


@pytest.fixture(scope="module", params=first_of(KINDS, 1))
def engine(request, model, drafter):
    """A tight pool: requests are preempted and swapped, pages are shared."""
    rule, branches = request.param
    return Engine(
        model, draft_model=drafter, draft_rule=rule, draft_branches=branches, preemption="swap",
        swap_pages=40, **SIZES | {"num_pages": 14},
    )  # fmt: skip


def samplers(rows, **changes):
    options = {
        "seed": np.arange(rows, dtype=np.uint32), "draw_index": np.zeros(rows, np.int32),
        "temperature": np.ones(rows, np.float32), "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
    }  # fmt: skip
    return RowSamplers(**options | changes)


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.3}, {"top_k": 3}, {"top_p": 0.6}])
def test_probabilities_are_what_a_sampler_draws_from(options):
    logits = np.random.default_rng(0).standard_normal((5, 12), "f4")
    left = Sampler.create(**{"temperature": 1.0} | options).cut(jnp.asarray(logits))
    expected = np.asarray(jax.nn.softmax(left, axis=-1))
    dtypes = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32}
    rows = {name: np.full(5, value, dtypes[name]) for name, value in options.items()}
    mine = samplers(5, **rows).probabilities(jnp.asarray(logits))
    np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-7)
    token = expected.argmin(axis=1).astype(np.int32)  # one that is cut off, where any is
    with np.errstate(divide="ignore"):
        wanted = np.log(np.take_along_axis(expected, token[:, None], axis=1)[:, 0])
    told = samplers(5, **rows).log_probability(jnp.asarray(logits), jnp.asarray(token))
    np.testing.assert_allclose(told, wanted, rtol=1e-5)


def test_greedy_probabilities_are_all_on_the_first_of_the_largest():
    logits = jnp.asarray([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]])
    mine = samplers(2, temperature=np.float32([0, 0])).probabilities(logits)
    assert mine.tolist() == [[0, 1, 0], [1, 0, 0]]
    greedy = samplers(2, temperature=np.float32([0, 0]))
    told = greedy.log_probability(logits, jnp.asarray([1, 2], jnp.int32))
    assert told.tolist() == [0, -np.inf]


def test_rejection_gives_the_models_distribution_whatever_the_drafts_are_from():
    """Many rows with the same p and q, drafts drawn from q: chi² of the first two tokens."""
    rows, rng = 60_000, np.random.default_rng(4)
    p = rng.dirichlet(np.ones(8), 3).astype("f4")
    q = rng.dirichlet(np.ones(8), 2).astype("f4")
    p[0, 2] = 0
    p[0] /= p[0].sum()  # never drawn, though q may propose it
    wide = [x.astype("f8") for x in q]
    drafts = np.stack([rng.choice(8, rows, p=x / x.sum()) for x in wide], axis=1)
    some = Drafts(jnp.asarray(drafts, jnp.int32), jnp.asarray(np.broadcast_to(q, (rows, 2, 8))))
    zeros, twos = jnp.zeros(rows, jnp.int32), jnp.full(rows, 2, jnp.int32)
    whole = jnp.asarray(np.broadcast_to(p, (rows, 3, 8)))
    drawn = jnp.full((rows, 3), 7, jnp.int32)
    leaf, new, kept = jax.jit(reject)(whole, drawn, some, twos, zeros, samplers(rows))
    new, kept = np.asarray(new), np.asarray(kept)
    assert leaf.tolist() == kept.tolist()
    first, second = new[:, 0], new[:, 1]
    np.testing.assert_array_equal(first[kept > 0], drafts[kept > 0, 0])
    np.testing.assert_array_equal(second[kept > 1], drafts[kept > 1, 1])
    assert (new[kept == 2, 2] == 7).all()
    counts = np.bincount(first, minlength=8)
    assert counts[2] == 0
    live = p[0] > 0
    # 6 and 7 degrees of freedom: beyond 35 has a chance below 1e-4.
    assert chi_square(counts[live], p[0][live] * rows) < 35
    more = kept > 0
    assert kept.mean() > 0.5
    assert chi_square(np.bincount(second[more], minlength=8), p[1] * more.sum()) < 35
    # The most that any rule can keep.
    assert abs(more.mean() - np.minimum(p[0], q[0]).sum()) < 0.01
    _, new, none = jax.jit(reject)(whole, drawn, some, zeros, zeros, samplers(rows))
    assert not none.any()
    assert (new[:, 0] == 7).all()


def lone(model, prompt, new, **options):
    return generate(model, [prompt], max_new_tokens=new, **options).tokens[0]


def test_greedy_requests_get_what_they_get_alone(engine, model):
    prompts = [[i] * 9 for i in range(4)] + [[3] * 9 + [1]]
    before = engine.num_swaps
    requests = [engine.submit(p, max_new_tokens=25) for p in prompts]
    engine.run()
    assert [r.tokens for r in requests] == [lone(model, p, 25) for p in prompts]
    assert engine.num_swaps > before
    assert 0 < engine.num_accepted < engine.num_drafted
    engine.clear_cache()
    assert engine.num_free_pages == int(engine.state.table.num_free) == 14


@pytest.mark.parametrize("engine", [("same_noise", 1)], indirect=True)
def test_with_the_same_noise_drawn_requests_get_what_they_get_alone(engine, model):
    prompts = [[i] * 9 for i in range(4)] + [[3] * 9 + [1]]
    requests = [engine.submit(p, max_new_tokens=25, **SAMPLED) for p in prompts]
    engine.run()
    assert [r.tokens for r in requests] == [lone(model, p, 25, **SAMPLED) for p in prompts]


@pytest.mark.deep
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_model_that_is_the_model_is_always_right(model, rule):
    engine = Engine(
        model, draft_model=model, draft_rule=rule, **SIZES | {"max_seqs": 2, "max_tokens": 8}
    )
    greedy = engine.submit([1, 2, 3], max_new_tokens=17)
    drawn = engine.submit([1, 2, 3], max_new_tokens=17, **SAMPLED)
    engine.run()
    assert greedy.tokens == lone(model, [1, 2, 3], 17)
    assert len(drawn.tokens) == 17
    assert engine.num_accepted == engine.num_drafted == 24  # 1, then 4 times 3 + 1, for each
    assert engine.num_steps == 5


@pytest.mark.deep
def test_drawn_tokens_have_the_models_distribution(engine, model):
    """The second and third new token, drafted ones: chi² of each against the exact marginal."""
    count, options = 1500, {"temperature": 1.0, "top_k": 5}
    drafted = engine.num_drafted
    requests = [engine.submit([4], max_new_tokens=4, seed=i, **options) for i in range(count)]
    engine.run()
    assert engine.num_drafted > drafted + 2 * count
    tokens = np.array([r.tokens for r in requests])

    def next_tokens(text):
        cut = samplers(1, top_k=np.full(1, 5, np.int32))
        return np.asarray(
            cut.probabilities(jnp.asarray(token_logits(model, text)[-1:])), np.float64
        )[0]

    chances = {(): 1.0}
    for place in range(3):
        longer, exact = {}, np.zeros(VOCAB)
        for text, chance in chances.items():
            after = chance * next_tokens([4, *text])
            exact += after
            longer |= {(*text, i): after[i] for i in np.flatnonzero(after)}
        chances = longer
        counts, live = np.bincount(tokens[:, place], minlength=VOCAB), exact > 0.003
        assert not counts[exact == 0].any()
        # At most 15 degrees of freedom: beyond 45 has a chance below 1e-4.
        assert chi_square(counts[live], exact[live] * count) < 45


@gathers_in_place
def test_no_pool_is_copied(engine):
    assert_no_pool_is_copied(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_drafts": 0}, "max_drafts: expected at least 1 with a draft model, got 0"),
        ({"draft_rule": "luck"}, "draft_rule: expected 'same_noise' or 'rejection', got 'luck'"),
        ({"vocab_size": 32}, "draft_model: expected a vocab_size of 16, got 32"),
    ],
)
def test_what_does_not_fit_is_named(model, options, message):
    config = small_config("qwen3", vocab_size=options.pop("vocab_size", VOCAB), head_dim=8)
    small = Decoder(config, random_source(config, seed=2))
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Engine(model, draft_model=small, **SIZES | options)
