# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of many pairs are those of one pair at a time, whatever they share."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

from jax_paged.models import Decoder, loglikelihoods, rolling_loglikelihoods, score, token_logits
from jax_paged.models.decoder.log_sum_exp import log_sum_exp
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.evaluation.likelihoods import rolling_windows
from jax_paged.models.evaluation.shared_texts import Orders, Schedule, in_sizes, share_texts
from jax_paged.models.testing import small_config

CONTEXT = 40
CONFIG = small_config("llama", vocab_size=64, head_dim=8, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def alone(model, context, continuation):
    """(sum of log p in float64, is greedy) of one pair."""
    context = context[-(CONTEXT + 1 - len(continuation)) :]
    fed = [*context, *continuation][:-1]
    logits = token_logits(model, fed)[len(context) - 1 :].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = log_p[np.arange(len(continuation)), continuation]
    return each.sum(), bool((logits.argmax(-1) == continuation).all())


def greedy(model, context, count):
    text = list(context)
    for _ in range(count):
        text.append(int(token_logits(model, text)[-1].argmax()))
    return text[len(context) :]


@pytest.fixture(scope="module")
def pairs(model):
    """Contexts of one token to far too many, alone and shared, behind the same examples or none."""
    rng = np.random.default_rng(0)
    examples, found = tokens(1, 11), []
    for i in range(14):
        context = (examples if i % 2 else []) + tokens(100 + i, int(rng.integers(1, 18)))
        for j in range(int(rng.integers(1, 5))):
            found.append((context, tokens(1000 + 10 * i + j, int(rng.choice([1, 1, 2, 3, 9])))))
        found.append((context, greedy(model, context, 1 + i % 3)))
    for count in (1, 2, CONTEXT):  # cut on the left: each has another context then
        found.append((tokens(7, 90), tokens(8 + count, count)))
    found += [(tokens(9, 5), tokens(10, CONTEXT)), found[0], ([3], [4]), ([3], [4, 5])]
    found += [(found[2][0], [token]) for token in range(64)]  # more targets than logits
    return [found[i] for i in rng.permutation(len(found))]


@pytest.fixture(scope="module")
def expected(model, pairs):
    return [alone(model, *pair) for pair in pairs]


@pytest.mark.every
@pytest.mark.parametrize(
    "options",
    first_of(
        [
            {"chunk": 7, "max_seqs": 3, "num_pages": 5},
            {"chunk": 8, "max_seqs": 1},
            {"chunk": 32, "max_seqs": 16},
            {"chunk": 16, "max_seqs": 16, "num_pages": 3},
        ],
        2,
    ),
    ids=["few rows and pages", "one row", "default pool", "pages of one text"],
)
def test_pairs_together_have_what_each_has_alone(model, pairs, expected, options):
    """f32 sums in another order: 1e-5 relative."""
    got = loglikelihoods(model, pairs, **options)
    np.testing.assert_allclose([x.log_p for x in got], [x[0] for x in expected], rtol=1e-5, atol=0)
    assert [x.is_greedy for x in got] == [x[1] for x in expected]
    assert 10 < sum(x[1] for x in expected) < len(pairs) - 10


def test_a_smaller_context_is_that_of_cut_pairs(model, pairs):
    short = [pair for pair in pairs if len(pair[1]) <= 8]
    got = loglikelihoods(model, short, context=8, chunk=16, max_seqs=16)
    cut = [(before[-(9 - len(after)) :], after) for before, after in short]
    want = [alone(model, *pair)[0] for pair in cut]
    np.testing.assert_allclose([x.log_p for x in got], want, rtol=1e-5, atol=0)


def fed_tokens(pairs, **sizes) -> int:
    """How many tokens a schedule feeds; it may not feed more than a step has."""
    arrays = [tuple(np.array(part, np.int32) for part in pair) for pair in pairs]
    sizes = {"num_pages": 1000, "page_size": 16, "max_seqs": 64, "max_tokens": 32} | sizes
    total = 0
    for orders in Schedule(share_texts(arrays), **sizes):
        counts = [end - begin for _, _, begin, end in orders.feeds]
        assert 0 < sum(counts) <= sizes["max_tokens"]
        assert min(counts) > 0
        total += sum(counts)
    return total


def test_steps_have_the_sizes_that_cost_least():
    """Nothing is lost or fed twice, and releases and forks come first."""
    arrays = [(np.array(tokens(i, 46), np.int32), np.array([1], np.int32)) for i in range(3)]
    texts = share_texts(arrays)
    feeds = [(text, row, 0, 46) for row, text in enumerate(texts)]
    parts = list(in_sizes(Orders([7], [(0, 1, 5)], feeds), [32, 128, 512]))
    assert [(part.releases, part.forks) for part in parts] == [([7], [(0, 1, 5)]), ([], [])]
    assert [[feed[1:] for feed in part.feeds] for part in parts] == [
        [(0, 0, 46), (1, 0, 46), (2, 0, 36)], [(2, 36, 46)],
    ]  # fmt: skip
    for count, sizes in {10: [32], 60: [128], 239: [128, 128], 300: [512], 512: [512]}.items():
        (part, *rest) = in_sizes(Orders([], [], [(texts[0], 0, 0, count)]), [32, 128, 512])
        assert [len(rest) + 1, part.feeds[0][3]] == [len(sizes), min(count, sizes[0])], count


def test_what_pairs_share_is_fed_once():
    context = tokens(0, 50)
    assert fed_tokens([(context, [token]) for token in range(64)]) == 50
    endings = [[token, *tokens(token, 4)] for token in range(9)]
    assert fed_tokens([(context, ending) for ending in endings]) == 50 + 9 * 4
    asked = [[*context, i, *tokens(i, 9)] for i in range(20)]
    questions = [(question, [token]) for question in asked for token in (1, 2, 3)]
    assert fed_tokens(questions) == 50 + 20 * 10
    # In a pool of six pages three questions fit at once, or one and the others' beginning.
    assert fed_tokens(questions, num_pages=6) == 50 + 20 * 10


def test_rows_in_the_way_are_computed_again():
    """A text and the one that waits to fork from it do not fit into three pages together."""
    context = tokens(0, 40)
    pairs = [(context, [1, *tokens(1, 8)]), (context, [2, *tokens(2, 8)])]
    assert fed_tokens(pairs, num_pages=4) == 48 + 8
    assert fed_tokens(pairs, num_pages=3) == 48 + 48


def test_rolling_predicts_each_token_once_in_windows(model):
    texts = [tokens(i, count) for i, count in enumerate([0, 1, 2, 40, 41, 79, 80, 81, 123])]
    got = rolling_loglikelihoods(model, texts, prefix_token=5, chunk=32, max_seqs=16)
    assert len(got) == len(texts)
    assert got[0] == 0.0
    for text, log_p in zip(texts, got, strict=True):
        windows = [*rolling_windows(np.array(text, np.int32), 5, CONTEXT)]
        assert [token for _, after in windows for token in after] == text
        want = sum(alone(model, before.tolist(), after.tolist())[0] for before, after in windows)
        assert log_p == pytest.approx(want, rel=1e-5)
    assert got[3] == pytest.approx(
        float(score(model, [5, *texts[3][:-1]]).sum())
        + alone(model, [5, *texts[3][:-1]], texts[3][-1:])[0],
        rel=1e-5,
    )


@pytest.mark.every
@pytest.mark.parametrize("context", [1, 2, 7, 40])
def test_rolling_windows_are_those_of_lm_eval(context):
    reason = "lm_eval is not installed: pip install 'jax_paged[lm-eval]'"
    utils = pytest.importorskip("lm_eval.utils", reason=reason)
    for count in (0, 1, 6, 7, 8, 39, 40, 41, 100):
        text = tokens(count, count)
        theirs = [
            utils.make_disjoint_window(window)
            for window in utils.get_rolling_token_windows(
                token_list=text, prefix_token=99, max_seq_len=context, context_len=1
            )
        ]
        ours = rolling_windows(np.array(text, np.int32), 99, context)
        assert [(before.tolist(), after.tolist()) for before, after in ours] == theirs


def test_no_pairs_have_no_likelihoods(model):
    assert loglikelihoods(model, []) == []
    assert rolling_loglikelihoods(model, [], prefix_token=0) == []


@pytest.mark.every
@pytest.mark.parametrize(
    ("pair", "options", "message"),
    [
        (([], [1]), {}, "pairs[0] context: expected a non-empty list of token ids, got shape [0]"),
        (
            ([1], []), {},
            "pairs[0] continuation: expected a non-empty list of token ids, got shape [0]",
        ),
        (
            ([1], [64]), {},
            "pairs[0] continuation[0]: expected a token id in [0, vocab_size=64), got 64",
        ),
        (
            ([1], [2] * 41), {},
            "pairs[0] continuation: expected at most context=40 tokens, got 41",
        ),
        (([1], [2]), {"context": 41}, "context: expected at most context_length=40, got 41"),
        (([1], [2]), {"chunk": 0}, "chunk: expected an integer >= 1, got 0"),
        (([1], [2]), {"max_seqs": 0}, "max_seqs: expected an integer >= 1, got 0"),
        (
            ([1] * 20, [2]), {"num_pages": 1},
            "num_pages: expected at least 2, for the longest pair, got 1",
        ),
    ],
)  # fmt: skip
def test_bad_calls_are_refused(model, pair, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loglikelihoods(model, [pair], **options)
    if "context" in options:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            rolling_loglikelihoods(model, [[1]], prefix_token=0, **options)


def test_a_prefix_beyond_the_vocabulary_is_refused(model):
    with pytest.raises(ValueError, match=r"^prefix_token\[0\]: expected a token id in"):
        rolling_loglikelihoods(model, [[1]], prefix_token=64)


@pytest.mark.parametrize("vocab_size", [1, 7, 4096, 4097, 9000])
def test_the_logarithm_of_a_sum_of_exponentials(vocab_size):
    logits = 30 * np.random.default_rng(0).standard_normal((5, vocab_size))
    logits[1] = 1000  # exp of which is infinite
    logits[2, 0] = -np.inf if vocab_size > 1 else 0
    logits[3, -1] = logits[3].max()  # of two that are as large the first is the likeliest
    wide = logits.astype(np.float32).astype(np.float64)
    largest = wide.max(axis=-1)
    want = largest + np.log(np.exp(wide - largest[:, None]).sum(axis=-1))
    total, likeliest = jax.jit(log_sum_exp)(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(total, want, rtol=2e-6)
    np.testing.assert_array_equal(likeliest, wide.argmax(axis=-1))
