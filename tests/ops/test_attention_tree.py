# SPDX-License-Identifier: Apache-2.0
"""Token trees in `ragged_paged_attention`, against float64 softmax over each node's ancestors."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of
from tree_batches import MAX_TREE, build

from jax_paged import explain, ragged_paged_attention
from jax_paged.layout import POOLS, slots_first
from jax_paged.native import load
from jax_paged.testing import (
    Batch,
    Case,
    ancestors,
    assert_attention_close,
    dense_oracle,
    make_batch,
)
from jax_paged.testing.options import random_parents, trees_of

SMALL = Case("small", 8, 2, 64, page_size=16)
pytestmark = pytest.mark.cuda  # more of it: tests/kernels/test_cuda_emulated_tree.py
kernels = pytest.mark.parametrize("implementation", ["native", "emulated"])


def attend(batch: Batch, options: dict[str, Any], **more):
    arguments, defaults = batch.ragged()
    given = {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}
    return ragged_paged_attention(*arguments, **(defaults | given | more), return_lse=True)


@pytest.mark.parametrize("seed", first_of(range(80), 20))
def test_native_matches_float64(seed):
    batch, options, split = build(seed)
    out, lse = attend(batch, options, **split, implementation="native")
    assert_attention_close(out, lse, *dense_oracle(batch, **options))


@pytest.mark.parametrize("seed", first_of(range(0, 80, 8), 2))
def test_reference_matches_float64(seed):
    batch, options, _ = build(seed)
    out, lse = attend(batch, options, implementation="reference")
    assert_attention_close(out, lse, *dense_oracle(batch, **options))


def small_batch(seed: int = 3, q_lens=(5, 30, 3), seq_lens=(90, 100, 40), sizes=(9, 40, 0)):
    """Rows with trees of those sizes, no tree for 0, as (batch, options, parents)."""
    rng = np.random.default_rng(seed)
    parents = [random_parents(rng, size, "forest") for size in sizes]
    batch = make_batch(SMALL, jnp.float32, list(q_lens), list(seq_lens), seed=seed)
    return batch, trees_of(parents), parents


@kernels
@pytest.mark.parametrize("extra", [{}, {"sliding_window": 40}, {"soft_cap": 2.0}])
@pytest.mark.parametrize("q_lens", [(1, 3, 2), (6, 30, 40)], ids=["decode", "prefill"])
def test_chains_have_the_bits_of_rows_without_a_tree(q_lens, extra, implementation):
    rng = np.random.default_rng(0)
    batch = make_batch(SMALL, jnp.float32, list(q_lens), [90, 100, 50], seed=1)
    slopes = {"alibi_slopes": np.float32(rng.uniform(0, 0.3, 8))} if extra else {}
    chains = trees_of([random_parents(rng, n, "chain") for n in (9, 0, 40)])
    plain = attend(batch, extra | slopes, implementation=implementation)
    for given in (chains, chains | {"tree_sizes": np.zeros(3, np.int32)}):
        got = attend(batch, extra | slopes | given, implementation=implementation)
        for a, b in zip(got, plain, strict=True):
            np.testing.assert_array_equal(a, b)
    same = attend(batch, extra | slopes | chains, implementation="reference")
    for a, b in zip(same, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@kernels
def test_a_tree_in_one_row_leaves_the_bits_of_the_others(implementation):
    batch, options, parents = small_batch(sizes=(9, 40, 20))
    chain = trees_of([parents[0], parents[1], np.arange(20) - 1])  # the last row is a chain
    call: dict[str, Any] = {"split_tokens": 64, "implementation": implementation}
    both = [attend(batch, given, **call) for given in (options, chain)]
    plain = attend(batch, {}, **call)
    np.testing.assert_array_equal(both[0][0][:35], both[1][0][:35])
    np.testing.assert_array_equal(both[1][0][35:], plain[0][35:])
    assert not np.array_equal(both[0][0][35:], plain[0][35:])
    assert not np.array_equal(both[0][0][:35], plain[0][:35])


def test_nodes_that_a_query_does_not_see_may_be_nan(implementation):
    batch, options, parents = small_batch(q_lens=(1, 1, 3))
    expected = attend(batch, options)
    k_pages, v_pages = batch.k_pages.copy(), batch.v_pages.copy()
    hidden = 0
    for row in (0, 1):
        size = len(parents[row])
        sees = ancestors(options["tree"][row, :size])[-1]
        for node in np.flatnonzero(~sees):
            token = batch.seq_lens[row] - size + node
            page = batch.page_table[row, token // 16]
            for pages, pool in zip((k_pages, v_pages), POOLS, strict=True):
                slots_first(pages, "HND", pool)[page, token % 16] = np.nan
            hidden += 1
    assert hidden > 20
    changed = dataclasses.replace(batch, k_pages=k_pages, v_pages=v_pages)
    out, lse = attend(changed, options, implementation=implementation)
    np.testing.assert_allclose(out, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5)


@pytest.mark.parametrize("q_lens", [(2, 2, 3), (40, 30, 20)], ids=["decode", "prefill"])
def test_a_nan_sibling_reaches_only_the_nodes_that_see_it(q_lens):
    """The nodes of a comb: each sees the spine, and the teeth only themselves."""
    node = np.arange(40)
    comb = np.where(node % 2 == 0, node - 2, node - 1)
    comb[0] = -1
    batch = make_batch(SMALL, jnp.float32, list(q_lens), [90, 100, 60], seed=5)
    options = trees_of([comb, comb, comb])
    expected = attend(batch, options, implementation="native")[0]
    tooth = 37
    for row in range(3):
        token = batch.seq_lens[row] - 40 + tooth
        for pages in (batch.k_pages, batch.v_pages):
            pages[batch.page_table[row, token // 16], :, token % 16] = np.nan
    out = np.asarray(attend(batch, options, implementation="native")[0])
    sees = np.concatenate([np.arange(40)[-n:] == tooth for n in q_lens])
    np.testing.assert_array_equal(np.isnan(out).all((1, 2)), sees)
    np.testing.assert_allclose(out[~sees], expected[~sees], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_wild_intervals_and_sizes_give_some_mask(seed, implementation):
    rng = np.random.default_rng(seed)
    batch, _, _ = small_batch(seed)
    wild = np.array([-(2**31), -1, 0, 1, 3, 5, 8, 39, 2**31 - 1])
    sizes = np.array([-(2**31), 2**31 - 1, -1, 0, 1, 3, 70, 100, 7])
    options: dict[str, Any] = {
        "tree": rng.choice(wild, (3, MAX_TREE, 2)).astype("i4"),
        "tree_sizes": rng.choice(sizes, 3).astype("i4"),
        "alibi_slopes": np.float32(rng.uniform(0, 0.2, 8)),
        "sliding_window": 50,
    }
    result = attend(batch, options, implementation=implementation)
    assert_attention_close(*result, *dense_oracle(batch, **options))


@kernels
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_head_dims(head_dim, implementation):
    rng = np.random.default_rng(head_dim)
    parents = [random_parents(rng, size, "forest") for size in (40, 0, 12, 3)]
    case = Case("tree", 8, 2, head_dim, page_size=(16, 5)[head_dim % 3 % 2])
    batch = make_batch(case, jnp.bfloat16, [33, 1, 5, 3], [210, 40, 64, 3], num_tokens=44)
    options = trees_of(parents) | {"sliding_window": 30, "alibi_slopes": np.full(8, 0.125, "f4")}
    result = attend(batch, options, implementation=implementation)
    assert_attention_close(*result, *dense_oracle(batch, **options))


@pytest.mark.cuda(deep=True)
def test_queries_stored_before_the_tree_are_plain(implementation):
    batch, options, _ = small_batch(q_lens=(15, 60, 3))
    out, lse = attend(batch, options, implementation=implementation)
    assert_attention_close(out, lse, *dense_oracle(batch, **options))
    plain, _ = attend(batch, {}, implementation=implementation)
    np.testing.assert_allclose(out[:6], plain[:6], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out[15:35], plain[15:35], rtol=1e-6, atol=1e-6)


def test_a_window_counts_depth_and_skips_pages_left_of_the_roots(implementation):
    batch, options, _ = small_batch(q_lens=(40, 30, 3), seq_lens=(290, 300, 40), sizes=(40, 40, 0))
    options |= {"sliding_window": 33}
    k_pages, v_pages = batch.k_pages.copy(), batch.v_pages.copy()
    for row in (0, 1):
        pages = (batch.seq_lens[row] - 40 - 33 + 1) // 16
        for pool in (k_pages, v_pages):
            pool[batch.page_table[row, :pages]] = np.nan
    batch = dataclasses.replace(batch, k_pages=k_pages, v_pages=v_pages)
    out, lse = attend(batch, options, implementation=implementation)
    assert_attention_close(out, lse, *dense_oracle(batch, **options))


def test_one_forward_equals_several():
    """The nodes of a tree asked for all at once, or a few at a time as the tree grows."""
    rng = np.random.default_rng(2)
    parents = random_parents(rng, 24, "tree")
    batch = make_batch(SMALL, jnp.float32, [24], [60], seed=4)
    whole, _ = attend(batch, trees_of([parents]))
    for ends in ([24], [1, 5, 6, 24], list(range(1, 25))):
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            part = dataclasses.replace(
                batch, q=batch.q[begin:end], seq_lens=np.array([36 + end], np.int32),
                cu_q_lens=np.array([0, end - begin], np.int32),
            )  # fmt: skip
            out, _ = attend(part, trees_of([parents[:end]]))
            np.testing.assert_allclose(out, whole[begin:end], rtol=1e-5, atol=1e-5)


@pytest.mark.cuda(deep=True)
def test_gradients_are_those_of_the_reference(implementation):
    batch, options, _ = small_batch(q_lens=(3, 4, 2), seq_lens=(20, 30, 9), sizes=(6, 9, 0))
    arguments, defaults = batch.ragged()
    given = {name: jnp.asarray(x) for name, x in options.items()}

    def loss(q, k_pages, v_pages):
        out = ragged_paged_attention(
            q, k_pages, v_pages, *arguments[3:], **defaults, **given, implementation=implementation
        )
        return jnp.sum(jnp.sin(out))

    gradients = jax.grad(loss, argnums=(0, 1, 2))(*arguments[:3])
    step = 1e-2
    rng = np.random.default_rng(0)
    clean = [jnp.where(jnp.isnan(x), 0, x) for x in arguments[:3]]
    for i, gradient in enumerate(gradients):
        assert np.isfinite(gradient).all()
        direction = jnp.asarray(rng.standard_normal(gradient.shape, "f4"))
        moved = [
            [x + s * step * direction if i == j else x for j, x in enumerate(clean)]
            for s in (1, -1)
        ]
        expected = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        np.testing.assert_allclose(jnp.sum(gradient * direction), expected, rtol=0.02, atol=0.02)


def test_vmap_over_trees_equals_the_loop():
    batch, options, _ = small_batch()
    sizes = jnp.stack([jnp.asarray(options["tree_sizes"]), jnp.zeros(3, jnp.int32)])

    def call(sizes):
        return attend(batch, options | {"tree_sizes": sizes})[0]

    batched = jax.vmap(call)(sizes)
    for i in range(2):
        np.testing.assert_array_equal(batched[i], call(sizes[i]))


TREE, SIZES = np.zeros((3, 8, 2), np.int32), np.zeros(3, np.int32)
WRONG = [
    ({"tree": TREE}, "tree_sizes: expected an array where tree is one, and only there, got None"),
    ({"tree_sizes": SIZES}, "tree_sizes: expected an array where tree is one, and only there"),
    ({"tree": TREE[:2], "tree_sizes": SIZES}, "tree: expected shape [num_seqs=3, max_tree, 2], "),
    ({"tree": TREE[:, :0], "tree_sizes": SIZES}, "tree: expected max_tree >= 1, got 0"),
    ({"tree": TREE, "tree_sizes": SIZES[:2]}, "tree_sizes: expected shape [num_seqs=3], got [2]"),
    ({"tree": np.float32(TREE), "tree_sizes": SIZES}, "tree: expected an integer dtype"),
    ({"tree": TREE, "tree_sizes": SIZES, "causal": False}, "tree: expected None with causal=False"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_wrong_tree_is_told_in_one_line(options, message):
    batch, _, _ = small_batch()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        attend(batch, options)


def test_trees_lower_to_the_cuda_kernels(monkeypatch):
    batch, options, _ = small_batch()
    jax.clear_caches()
    monkeypatch.setattr(load, "targets", lambda _: ("jax_paged.attention.v1",))  # as if built
    traced = jax.jit(lambda: attend(batch, options)[0]).trace()
    assert "jax_paged.attention.v1" in traced.lower(lowering_platforms=("cuda",)).as_text()
    monkeypatch.undo()
    jax.clear_caches()


def test_explain_takes_trees():
    batch, options, _ = small_batch()
    arguments, defaults = batch.ragged()
    plan = explain("ragged_paged_attention", *arguments, **defaults, **options)
    assert plan["implementation"] == "native"
    assert plan["kernels"] == ["prefill", "prefill", "decode"]
