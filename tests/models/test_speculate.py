# SPDX-License-Identifier: Apache-2.0
"""Drafts by n-gram look-up, and that they change the number of steps and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_paged.models import Decoder, generate, token_logits
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving.engine import Engine
from jax_paged.models.serving.logit_edits import everything
from jax_paged.models.serving.speculate import look_up, look_up_tree, walk_tree
from jax_paged.models.serving.step import EngineState, StepPlan, step
from jax_paged.models.testing import small_config

CONFIG = small_config("qwen3", vocab_size=16, head_dim=8, max_position_embeddings=64)


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3]),
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, [6]),  # the last place
        ([3, 2, 5, 9, 2, 7, 3, 2], 1, [5]),  # two tokens that agree before one
        ([1, 1, 1], 3, [1]),
        ([1, 2, 3], 3, []),
        ([4], 3, []),
        ([5, 5], 0, []),
    ],
)
def test_look_up_finds_what_followed_the_longest_end(tokens, most, expected):
    assert look_up(tokens, most) == expected


def test_look_up_agrees_with_a_plain_search():
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = rng.integers(0, 4, int(rng.integers(1, 30))).tolist()
        expected = []
        for size in (3, 2, 1):
            starts = [i for i in range(len(text) - size) if text[i : i + size] == text[-size:]]
            if starts and not expected:
                expected = text[starts[-1] + size :][:5]
        assert look_up(text, 5) == expected


@pytest.fixture(scope="module")
def one_step(model):
    """Feeds a row a token and drafts, once per seed; gives what it drew and the row's length."""
    graph, params = nnx.split(model)
    rows, prompt, most = 4, [1, 2], 3

    def run(drafts, seeds, temperature, made=0):
        out, lens = [], []
        for start in range(0, len(seeds), rows):
            some = seeds[start : start + rows]
            state = create_state(model, num_pages=32, max_seqs=rows, pages_per_seq=8, page_size=4)
            size = model.config.vocab_size
            plan = StepPlan.create(rows, 32, everything(rows, size))
            fed = [*prompt, *drafts]
            for row, seed in enumerate(some):
                plan.tokens[row * len(fed) : (row + 1) * len(fed)] = fed
                plan.q_lens[row], plan.num_drafts[row] = len(fed), len(drafts)
                plan.draws[row], plan.made[row] = True, made
                plan.samplers.seed[row] = seed
                plan.samplers.temperature[row] = temperature
            device = EngineState.create(state, size)
            device, drawn = step(graph, params, device, plan.packed(), max_drafts=most)
            out += [
                [t for t in new if t >= 0] for new in np.asarray(drawn.tokens)[: len(some)].tolist()
            ]
            lens += np.asarray(device.state.table.seq_lens)[: len(some)].tolist()
            assert not bool(device.failed)
        return out, lens

    return run


def test_greedy_drafts_are_kept_up_to_the_first_that_differs(model, one_step):
    state = create_state(model, num_pages=8, max_seqs=1, pages_per_seq=8, page_size=4)
    right = generate(model, [[1, 2]], max_new_tokens=4, state=state).tokens[0]
    for kept in range(4):
        drafts = right[:3]
        if kept < 3:
            drafts[kept] = (drafts[kept] + 1) % 16
        (new,), (length,) = one_step(drafts, [0], 0.0)
        assert new == right[: kept + 1]
        assert length == 2 + kept  # the drafts that were wrong are cut off again


def test_a_draft_is_kept_as_often_as_the_model_would_draw_it(model, one_step):
    """The distribution of the first token is the model's, whatever is drafted."""
    seeds = list(range(2000))
    plain, _ = one_step([], seeds, 1.0)
    counts = np.bincount([new[0] for new in plain], minlength=16)
    likely = int(counts.argmax())
    logits = token_logits(model, [1, 2])[-1]
    expected = np.asarray(jax.nn.softmax(jnp.asarray(logits))) * len(seeds)
    for draft in (likely, int(counts.argmin())):
        drafted, lens = one_step([draft], seeds, 1.0)
        first = np.bincount([new[0] for new in drafted], minlength=16)
        # 15 degrees of freedom: chi² beyond 45 has a chance below 1e-4.
        assert ((first - expected) ** 2 / expected).sum() < 45
        kept = [len(new) == 2 for new in drafted]
        assert kept == [new[0] == draft for new in drafted]
        assert lens == [3 if k else 2 for k in kept]


def test_draws_do_not_depend_on_the_drafts(one_step):
    seeds = list(range(40))
    plain, _ = one_step([], seeds, 1.0)
    for drafts in ([3], [3, 3, 3], [9, 1]):
        drafted, _ = one_step(drafts, seeds, 1.0)
        assert [new[0] for new in drafted] == [new[0] for new in plain]


def test_text_that_repeats_takes_fewer_steps_and_is_the_same(model):
    prompt, new = [3, 1, 4, 1, 5] * 4, 40
    steps, tokens = [], []
    for max_drafts in (0, 3):
        engine = Engine(
            model, num_pages=32, max_seqs=2, page_size=4, max_tokens=32, max_drafts=max_drafts
        )
        greedy = engine.submit(prompt, max_new_tokens=new)
        drawn = engine.submit(prompt, max_new_tokens=new, temperature=0.3, seed=2)
        engine.run()
        steps.append(engine.num_steps)
        tokens.append((greedy.tokens, drawn.tokens))
        engine.clear_cache()
        assert engine.num_free_pages == int(engine.state.table.num_free) == 32
    assert tokens[0] == tokens[1]
    assert steps[1] < steps[0]
    assert 0 < engine.num_accepted <= engine.num_drafted


def test_a_tree_holds_the_continuations_of_the_last_places_and_no_others():
    rng = np.random.default_rng(1)
    branched = 0
    for _ in range(200):
        text = rng.integers(0, 4, int(rng.integers(1, 30))).tolist()
        most, branches = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        ids, parents = look_up_tree(text, most, branches)
        assert len(ids) == len(parents) <= most
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
        assert len(set(zip(parents, ids, strict=True))) == len(ids)  # siblings differ
        starts = [
            i + size
            for size in (3, 2, 1)
            for i in range(len(text) - size - 1, -1, -1)
            if len(text) > size and text[i : i + size] == text[-size:]
        ]
        starts = list(dict.fromkeys(starts))[:branches]
        depth = -(-most // branches)
        wanted = {
            tuple(text[i:e]) for i in starts for e in range(i + 1, min(i + depth, len(text)) + 1)
        }
        paths = []
        for node, token in enumerate(ids):
            before = paths[parents[node]] if parents[node] >= 0 else ()
            paths.append((*before, token))
        assert set(paths) <= wanted
        assert set(paths) == wanted or len(ids) == most
        branched += len(set(parents)) < len(parents)
    assert branched > 20


def test_look_up_tree_with_one_branch_is_look_up():
    text = [1, 2, 3, 4, 1, 2, 3]
    assert look_up_tree(text, 3, 1) == (look_up(text, 3), [-1, 0, 1])


def test_a_walk_goes_as_far_as_a_child_is_the_draw():
    tokens = jnp.asarray([[9, 1, 2, 3, 4, 7]] * 4, jnp.int32)
    parents = jnp.asarray([[-1, 0, 0, 2, 3, 0]] * 4, jnp.int32)
    drawn = jnp.asarray(
        [[2, 0, 3, 4, 5, 0], [1, 6, 0, 0, 0, 0], [8, 1, 1, 1, 1, 1], [7, 0, 0, 0, 0, 0]], jnp.int32
    )
    leaf, new, kept = walk_tree(drawn, tokens, parents, jnp.asarray([6, 6, 6, 5], jnp.int32))
    assert leaf.tolist() == [4, 1, 0, 0]  # the last row has no node 5
    assert kept.tolist() == [3, 1, 0, 0]
    assert [row[: n + 1] for row, n in zip(new.tolist(), kept.tolist(), strict=True)] == [
        [2, 3, 4, 5], [1, 6], [8], [7],
    ]  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_trees_change_the_number_of_steps_and_nothing_else(model, kv_dtype):
    """In a tight pool, with preemption: greedy and drawn, beside rows without drafts."""
    prompts, new = [[3, 1, 4, 1, 5] * 3, [2, 7, 2, 8, 2], [9] * 6, [4]], 30
    sizes = {"num_pages": 20, "max_seqs": 3, "page_size": 4, "max_tokens": 24}
    tokens, steps = [], []
    for options in ({}, {"max_drafts": 6, "draft_branches": 3}):
        engine = Engine(model, kv_dtype=kv_dtype, **sizes, **options)
        requests = [engine.submit(p, max_new_tokens=new) for p in prompts]
        requests += [engine.submit(p, max_new_tokens=new, temperature=0.4, seed=2) for p in prompts]
        engine.run()
        tokens.append([r.tokens for r in requests])
        steps.append(engine.num_steps)
        engine.clear_cache()
        assert engine.num_free_pages == int(engine.state.table.num_free) == 20
    assert engine.num_preemptions > 0
    assert tokens[0] == tokens[1]
    assert steps[1] < steps[0]
    assert 0 < engine.num_accepted < engine.num_drafted


def test_trees_need_drafts(model):
    with pytest.raises(ValueError, match=r"^draft_branches: expected 1 without drafts, got 2"):
        Engine(model, num_pages=8, max_seqs=2, draft_branches=2)
