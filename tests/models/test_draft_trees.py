# SPDX-License-Identifier: Apache-2.0
"""Token trees from a draft model: what it proposes, and that they change no token."""

import itertools
import re

import jax
import numpy as np
import pytest
from flax import nnx
from in_place import assert_no_pool_is_copied, gathers_in_place

from jax_paged.models import Decoder, generate, token_logits
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.sample import RowSamplers
from jax_paged.models.serving.engine import Engine
from jax_paged.models.serving.speculate import RULES, Drafts, draft_tree, propose, reject
from jax_paged.models.testing import noisy, small_config

VOCAB, DRAFTS, BRANCHES = 16, 5, 2
CONFIG = small_config(
    "qwen3", vocab_size=VOCAB, head_dim=8, max_position_embeddings=64, num_hidden_layers=1
)
SIZES = {
    "max_seqs": 3, "page_size": 4, "max_tokens": 18, "max_drafts": DRAFTS,
    "draft_branches": BRANCHES,
}  # fmt: skip
SAMPLED = {"temperature": 1.2, "top_k": 9, "seed": 3}
PROMPTS = [[0] * 9, list(range(12)) * 2, [3] * 9 + [1], [2]]  # one is longer than a step
BOTH, NEW = [{}, SAMPLED], 25


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


@pytest.fixture(scope="module")
def drafter(model):
    """The model with noise on its head: the model's likeliest token is often its second."""
    return noisy(model)


@pytest.fixture(scope="module")
def engine(model, drafter):
    """A tight pool: requests are preempted and swapped, pages are shared."""
    return Engine(
        model, draft_model=drafter, num_pages=14, preemption="swap", swap_pages=40, **SIZES
    )


def serve(engine, options):
    """The tokens of all prompts under each of the options; every page is free then."""
    requests = [
        engine.submit(prompt, max_new_tokens=NEW, draw_index=draw_index, **each)
        for each in options
        for draw_index, prompt in enumerate(PROMPTS)
    ]
    engine.run()
    engine.clear_cache()
    assert engine.num_free_pages == int(engine.state.table.num_free) == engine.num_pages
    return [r.tokens for r in requests]


def alone(model, options, kv_dtype="auto"):
    """What `serve` should give."""
    state, tokens = None, []
    for each in options:
        state = state or create_state(
            model, num_pages=64, max_seqs=4, pages_per_seq=16, page_size=4, kv_dtype=kv_dtype
        )
        made = generate(model, PROMPTS, max_new_tokens=NEW, state=state, **each)
        tokens, state = [*tokens, *made.tokens], made.state
    return tokens


@pytest.fixture(scope="module")
def expected(model):
    return alone(model, BOTH)


def test_the_shape_is_the_best_of_all_that_have_the_first_tokens():
    for most, branches in itertools.product(range(1, 9), range(1, 5)):
        if branches > most:
            continue
        nodes, parents = draft_tree(most, branches)
        depths, ranks = np.nonzero(nodes < most)
        places = list(zip(depths.tolist(), ranks.tolist(), strict=True))
        assert nodes[depths, ranks].tolist() == list(range(most))
        above = [places.index((d - 1, r)) if d else -1 for d, r in places]
        assert parents == above
        lengths = np.bincount(ranks, minlength=branches)

        def worth(lengths):
            return sum(2.0 ** -(rank + d) for rank, n in enumerate(lengths) for d in range(n))

        others = itertools.product(range(1, most + 1), repeat=branches)
        assert worth(lengths) == max(worth(other) for other in others if sum(other) == most)
        assert (np.diff(lengths) <= 0).all()


def test_rejection_in_trees_gives_the_models_distribution():
    """Many rows, p and q that depend on the token before: chi² of the first three tokens."""
    rows, size, rng = 60_000, 5, np.random.default_rng(4)
    p = rng.dirichlet(np.ones(size), size + 1).astype("f4")  # behind each token; the first is last
    q = rng.dirichlet(np.ones(size), size + 1).astype("f4")
    p[size, 2] = 0
    p[size] /= p[size].sum()  # never drawn, though q may propose it
    nodes, parents = draft_tree(DRAFTS, BRANCHES)
    assert nodes.tolist() == [[0, 1], [2, 3], [4, 5]]
    noise = rng.gumbel(size=(rows, DRAFTS, size))
    tokens = np.zeros((rows, DRAFTS), np.int32)
    given = np.zeros((rows, DRAFTS, size), "f4")
    for node, parent in enumerate(parents):
        before = tokens[:, parent] if parent >= 0 else np.full(rows, size)
        given[:, node] = q[before]
        if node == 1:  # without the first, and with its noise
            given[np.arange(rows), 1, tokens[:, 0]] = 0
            given[:, 1] /= given[:, 1].sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            order = np.log(given[:, node]) + noise[:, 0 if node == 1 else node]
        tokens[:, node] = order.argmax(axis=1)
    columns = np.concatenate([np.full((rows, 1), size), tokens], axis=1)
    drawn = (rng.gumbel(size=(rows, DRAFTS + 1, size)) + np.log(p + 1e-30)[columns]).argmax(axis=2)
    num_drafts = np.full(rows, DRAFTS, np.int32)
    num_drafts[:1000] = np.arange(1000) % (DRAFTS + 1)
    samplers = RowSamplers(
        seed=np.arange(rows, dtype=np.uint32), draw_index=np.zeros(rows, np.int32),
        temperature=np.ones(rows, np.float32), top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
    )  # fmt: skip
    leaf, new, kept = jax.device_get(
        jax.jit(reject, static_argnames="branches")(
            p[columns], drawn.astype(np.int32), Drafts(tokens, given), num_drafts,
            np.zeros(rows, np.int32), samplers, branches=BRANCHES,
        )
    )  # fmt: skip
    assert (leaf <= num_drafts).all()
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    np.testing.assert_array_equal(kept, np.asarray(depths)[leaf])
    drafted = leaf > 0
    row = np.arange(rows)
    np.testing.assert_array_equal(
        new[row, np.maximum(kept - 1, 0)][drafted], tokens[row, leaf - 1][drafted]
    )
    before = np.full(rows, size)
    for place in range(3):
        reached = kept >= place  # and the token was chosen whatever comes behind it
        for token in range(size + 1):
            some = reached & (before == token)
            if some.sum() > 500:
                counts, live = np.bincount(new[some, place], minlength=size), p[token] > 0
                assert not counts[~live].any()
                expected = p[token][live] * some.sum()
                # 4 degrees of freedom: beyond 30 has a chance below 1e-5.
                assert ((counts[live] - expected) ** 2 / expected).sum() < 30, (place, token)
        before = np.where(reached, new[:, place], -1)
    full = num_drafts == DRAFTS
    assert {0, 1, 2, 3} == set(kept.tolist())
    # More than any rule could keep of the first one alone.
    assert (kept[full] > 0).mean() > np.minimum(p[size], q[size]).sum() + 0.05


@pytest.mark.parametrize("rule", RULES)
def test_a_tree_is_what_the_draft_model_draws_along_each_branch(drafter, rule):
    """Greedy, drawn, cut; rows with fewer drafts, with none, and the table as it was."""
    most, first = 7, np.array([1, 4, 7, 9], np.int32)  # so both branches are long
    num_drafts, made = np.array([7, 3, 6, 0], np.int32), np.array([0, 3, 8, 1], np.int32)
    samplers = RowSamplers(
        seed=np.arange(4, dtype=np.uint32), draw_index=np.zeros(4, np.int32),
        temperature=np.array([0, 1, 1.5, 1], np.float32), top_k=np.array([0, 0, 6, 0], np.int32),
        top_p=np.ones(4, np.float32),
        min_p=np.zeros(4, np.float32),
    )  # fmt: skip
    graph, params = nnx.split(drafter)
    state = create_state(
        drafter, num_pages=16, max_seqs=4, pages_per_seq=4, page_size=4, max_tree=most + 1
    )
    table, _ = state.table.reserve(np.arange(4, dtype=np.int32), 1 + num_drafts)
    before = jax.device_get(table)
    make = jax.jit(propose, static_argnames=("graph", "max_drafts", "branches", "rule"))
    state = state.replace(table=table)
    state, drafts, failed = make(
        graph, params, state, first, num_drafts, made, samplers, max_drafts=most,
        branches=BRANCHES, rule=rule,
    )  # fmt: skip
    assert not failed
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.table))
    _, parents = draft_tree(most, BRANCHES)
    ranked = jax.jit(RowSamplers.ranked, static_argnums=3)
    weigh = jax.jit(RowSamplers.probabilities)
    tokens, chances = jax.device_get((drafts.tokens, drafts.probabilities))
    for row in range(3):
        own = jax.tree.map(lambda x, row=row: x[row : row + 1], samplers)
        paths: list[list[int]] = []
        for node, parent in enumerate(parents[: num_drafts[row]]):
            path, token = paths[parent] if parent >= 0 else [], int(tokens[row, node])
            padded = [first[row], *path, *[0] * (8 - len(path))]  # one size for all
            logits = token_logits(drafter, padded)[None, len(path)]
            at, rank = made[row : row + 1] + len(path), node if parent < 0 else 0
            if rule == "same_noise" or row == 0:
                assert token == ranked(own, logits, at, BRANCHES)[0, rank], (row, node)
            if rule == "rejection":
                q = np.array(weigh(own, logits))[0]
                if row == 0:
                    q = np.eye(VOCAB)[token]  # certain
                elif rank == 1:
                    q[tokens[row, 0]] = 0
                np.testing.assert_allclose(chances[row, node], q / q.sum(), rtol=1e-4, atol=1e-6)
                assert chances[row, node, token] > 0
            paths.append([*path, token])
        assert len({*map(tuple, paths)}) == len(paths)


@pytest.mark.deep
def test_no_token_changes_under_preemption_and_beside_prefills(engine, expected):
    swaps = engine.num_swaps
    assert serve(engine, BOTH) == expected
    assert engine.num_preemptions > 0
    assert engine.num_swaps > swaps
    assert 0 < engine.num_accepted < engine.num_drafted


def test_a_second_branch_finds_what_is_only_second_likely(engine, model, drafter, expected):
    """In the same number of drafts."""
    chains = Engine(
        model, draft_model=drafter, num_pages=14, preemption="swap", swap_pages=40,
        **SIZES | {"draft_branches": 1},
    )  # fmt: skip
    counts = []
    for each in (chains, engine):
        start, steps = each.num_accepted, each.num_steps
        assert serve(each, BOTH) == expected
        counts.append((each.num_accepted - start, each.num_steps - steps))
    assert counts[1][0] > counts[0][0]
    assert counts[1][1] < counts[0][1]


@pytest.mark.deep
def test_of_a_draft_model_that_is_the_model_the_first_branch_is_always_right(model):
    """With 8-bit pages, whose scales move as K and V do; and after recomputation."""
    sizes = SIZES | {"kv_dtype": "int8"}
    engine = Engine(model, draft_model=model, num_pages=14, **sizes)
    assert serve(engine, [{}]) == alone(model, [{}], "int8")
    assert engine.num_preemptions > 0
    start = engine.num_accepted
    engine.submit(PROMPTS[0], max_new_tokens=NEW)
    engine.run()
    nodes, _ = draft_tree(DRAFTS, BRANCHES)
    left, accepted = NEW - 1, 0
    while left:
        kept = int((nodes[:, 0] < min(DRAFTS, left - 1)).sum())
        left, accepted = left - kept - 1, accepted + kept
    assert engine.num_accepted - start == accepted


@gathers_in_place
def test_no_pool_is_copied(engine):
    assert_no_pool_is_copied(engine)


def test_more_branches_than_drafts_are_refused(model):
    message = re.escape("draft_branches: expected at most max_drafts=5, got 6")
    with pytest.raises(ValueError, match="^" + message):
        Engine(model, draft_model=model, num_pages=14, **SIZES | {"draft_branches": 6})
