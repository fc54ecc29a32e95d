# SPDX-License-Identifier: Apache-2.0
"""Page tables for the tests: how they are made, and what must hold of each."""

import dataclasses

import jax
import numpy as np

from jax_paged import PageTable, Status


def make(num_pages=8, max_seqs=4, pages_per_seq=4, page_size=4) -> PageTable:
    return PageTable.create(num_pages, max_seqs, pages_per_seq, page_size)


def grow(table: PageTable, rows, q_lens) -> PageTable:
    """Rows with that many more tokens; always the same shapes, since each shape compiles anew."""
    padding = [-1] * (4 - len(rows))
    rows, q_lens = [*rows, *padding], [*q_lens, *padding]
    table, status = table.reserve(rows, q_lens)
    assert status.tolist() == [Status.OK] * 4
    table, _, status = table.step(rows, q_lens, num_tokens=64)
    assert status.tolist() == [Status.OK] * 4
    return table


def held(table: PageTable, row: int) -> list[int]:
    return [page for page in np.asarray(table.page_table)[row].tolist() if page >= 0]


def assert_same(a, b) -> None:
    """Equal leaf by leaf, dtypes and static fields included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def assert_reset(table: PageTable, fresh: PageTable) -> None:
    """Reset gives a fresh table, but for the generations of rows that were live."""
    again = table.reset()
    went = again.generations - table.generations
    np.testing.assert_array_equal(went, table.is_live)
    assert_same(dataclasses.replace(again, generations=fresh.generations), fresh)


def assert_sound(table: PageTable) -> None:
    num_free = int(table.num_free)
    free = np.asarray(table.free_stack)[:num_free].tolist()
    ids = np.asarray(table.page_table).ravel()
    counts = np.bincount(ids[ids >= 0], minlength=table.num_pages)
    np.testing.assert_array_equal(table.ref_counts, counts)
    assert sorted(free) == np.flatnonzero(counts == 0).tolist()
    for row in range(table.max_seqs):
        for page in held(table, row)[int(np.asarray(table.seq_lens)[row]) // table.page_size :]:
            assert counts[page] == 1, "the next write of this row reaches a shared page"
