# SPDX-License-Identifier: Apache-2.0
"""Windows of rows with pinned tokens: a row that slid gives what it gave before it slid."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pinned_batches import PAGE, PINNED, Q_LENS, SEQ_LENS, SMALL, WINDOW, slid, small_batch

from jax_paged import explain
from jax_paged.layout import LAYOUTS, from_slots_first, slots_first
from jax_paged.testing import (
    WILD_PAGE,
    assert_attention_close,
    dense_oracle,
    make_batch,
)
from jax_paged.testing.options import attend, trees_of

pytestmark = pytest.mark.cuda
SLOPES = np.float32(2.0 ** -np.linspace(1, 8, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_slid_gives_what_it_gave_before(layout, implementation):
    batch = small_batch(layout=layout)
    options = {"sliding_window": WINDOW, "num_pinned": PINNED, "alibi_slopes": SLOPES}
    expected = dense_oracle(batch, **options)
    assert_attention_close(*attend(batch, options, implementation=implementation), *expected)
    moved, offsets = slid(batch)
    assert offsets.max() > 100
    assert (offsets == 0).any()
    got = attend(moved, options | {"slot_offset": offsets}, implementation=implementation)
    assert_attention_close(*got, *expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_node_of_a_tree_among_pinned_tokens_is_pinned_by_its_slot(dtype, implementation):
    """Its window goes by depth, and a slot behind the pinned ones may have less than they."""
    batch = make_batch(SMALL, jnp.dtype(dtype), [12, 6], [47, 60], num_tokens=18, seed=5)
    parents = np.maximum(np.arange(12) // 2 - 1, -1), np.arange(6) // 3 - 1
    options = trees_of(parents, max_tree=16)
    options |= {"sliding_window": np.int32([44, 42]), "num_pinned": np.int32([40, 40])}
    expected = dense_oracle(batch, **options)
    assert_attention_close(*attend(batch, options, implementation=implementation), *expected)


def test_what_is_neither_pinned_nor_in_the_window_is_not_read(implementation):
    batch = small_batch()
    options = {"sliding_window": WINDOW, "num_pinned": PINNED}
    expected = dense_oracle(batch, **options)
    table = batch.page_table.copy()
    k_pages, v_pages = (slots_first(x, "HND", p).copy() for x, p in
                        ((batch.k_pages, "k"), (batch.v_pages, "v")))  # fmt: skip
    hidden = np.zeros(k_pages.shape[:2], bool)
    for row, (q_len, seq_len) in enumerate(zip(Q_LENS, SEQ_LENS, strict=True)):
        first = seq_len - q_len - (WINDOW[row] - PINNED[row]) + 1
        for token in range(PINNED[row], first):
            hidden[batch.page_table[row, token // PAGE], token % PAGE] = True
        columns = np.arange(-(-int(PINNED[row]) // PAGE), max(first, 0) // PAGE)
        table[row, columns] = np.resize([-1, WILD_PAGE], len(columns))
    for pages in (k_pages, v_pages):
        pages[hidden] = np.nan
    changed = dataclasses.replace(
        batch,
        page_table=table,
        k_pages=np.ascontiguousarray(from_slots_first(k_pages, "HND", "k")),
        v_pages=np.ascontiguousarray(from_slots_first(v_pages, "HND", "v")),
    )
    assert_attention_close(*attend(changed, options, implementation=implementation), *expected)


def test_windows_may_be_traced_and_differ_by_row(implementation):
    batch = small_batch()

    @jax.jit
    def run(window, pinned):
        options = {"sliding_window": window, "num_pinned": pinned}
        return attend(batch, options, implementation=implementation)

    for window in (WINDOW, WINDOW * 0, WINDOW + 50):
        got = run(jnp.asarray(window), jnp.asarray(PINNED))
        expected = dense_oracle(batch, sliding_window=window, num_pinned=PINNED)
        assert_attention_close(*got, *expected)


def test_wild_windows_read_nothing_outside(implementation):
    wild = np.int32([2**31 - 1, -(2**31), -1, 0, 7])
    rng = np.random.default_rng(0)
    batch = small_batch()
    for _ in range(4):
        given = {x: rng.permutation(wild) for x in ("sliding_window", "num_pinned", "slot_offset")}
        expected = dense_oracle(batch, **given)
        assert_attention_close(*attend(batch, given, implementation=implementation), *expected)


def test_the_plan_counts_pinned_tokens_and_the_window():
    batch = make_batch(SMALL, jnp.dtype("float32"), [1], [4000], seed=1)
    arguments, options = batch.ragged()
    plan = functools.partial(explain, "ragged_paged_attention", *arguments, **options)
    splits = plan(split_tokens=100, sliding_window=350, num_pinned=np.int32([150]))["kv_splits"]
    assert splits == [2 + 2], "150 pinned tokens, and 200 of the window"
