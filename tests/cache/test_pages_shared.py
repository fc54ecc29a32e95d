# SPDX-License-Identifier: Apache-2.0
"""Fork and truncate: pages that several rows share, case by case."""

import pytest
from page_tables import assert_same, assert_sound, grow, held, make

from jax_paged import PageTable, Status

OK, POOL_FULL, ROW_FULL = Status.OK, Status.POOL_FULL, Status.ROW_FULL
BAD_ROW, STALE_ROW = Status.BAD_ROW, Status.STALE_ROW


# Fork


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_fork_at_every_length_shares_full_pages_and_copies_the_last_partial_one(page_size):
    start = grow(make(num_pages=8, pages_per_seq=3, page_size=page_size), [0], [3 * page_size - 1])
    start, _ = start.reserve([0], 1)
    parent = held(start, 0)
    for length in range(3 * page_size):
        table, copies, status = start.fork([0, 0], [2, 1], length)
        assert status.tolist() == [OK, OK]
        assert_sound(table)
        assert table.seq_lens.tolist() == [3 * page_size - 1, length, length, 0]
        full, partial = length // page_size, length % page_size > 0
        for child, fresh in ((2, 3), (1, 4)):
            assert held(table, child) == parent[:full] + [fresh] * partial
        source = [parent[full]] * 2 if partial else [-1, -1]
        assert copies.src.tolist() == source
        assert copies.dst.tolist() == ([3, 4] if partial else [-1, -1])
        assert held(table, 0) == parent
        assert int(table.free_pages) == 5 - 2 * partial


def test_fork_statuses():
    table = grow(make(num_pages=4, max_seqs=6), [0, 1], [6, 6])

    def statuses(parent, child, length):
        after, copies, status = table.fork(parent, child, length)
        if any(status.tolist()):
            assert_same(after, table)
            assert copies.src.tolist() == copies.dst.tolist() == [-1] * len(parent)
        return status.tolist()

    assert statuses([0, 0], [2, 3], [4, 0]) == [OK, OK]
    assert statuses([0, 1], [2, 3], [7, 6]) == [BAD_ROW, POOL_FULL]  # longer than the parent
    assert statuses([0, 0], [1, 2], 4) == [BAD_ROW, OK]  # the child is live
    assert statuses([0, 2], [2, 3], 0) == [BAD_ROW, BAD_ROW]  # row 2 is child and parent
    assert statuses([2, 0], [2, 3], 0) == [BAD_ROW, OK]  # its own child
    assert statuses([3, 0], [4, 5], 4) == [STALE_ROW, OK]
    assert statuses([0, 1, 0], [2, 3, 4], [5, 4, 1]) == [POOL_FULL, OK, POOL_FULL]
    assert statuses([0, 1], [2, 6], 4) == [OK, BAD_ROW]
    assert statuses([-3, 6], [2, 3], 4) == [BAD_ROW, BAD_ROW]


def test_the_last_holder_frees_a_shared_page():
    table = grow(make(), [0], [8])
    table, _, _ = table.fork([0, 0], [1, 2], 8)
    assert table.ref_counts.tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    table, _ = table.release([0])
    assert int(table.free_pages) == 6
    assert held(table, 1) == [0, 1]
    table, status = table.release([2, 1])
    assert status.tolist() == [OK, OK]
    assert int(table.free_pages) == 8
    assert table.is_empty
    assert_sound(table)


# Truncate


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_truncate_frees_what_lies_wholly_behind_the_new_end(page_size):
    tokens = 3 * page_size
    start = grow(make(pages_per_seq=3, page_size=page_size), [1], [tokens])
    for drop in range(tokens + 1):
        table, copies, status = start.truncate([1], drop)
        assert status.tolist() == [OK]
        assert copies.src.tolist() == [-1]
        assert table.seq_lens.tolist() == [0, tokens - drop, 0, 0]
        assert held(table, 1) == held(start, 1)[: -(-(tokens - drop) // page_size)]
        assert table.is_live.tolist() == [False, True, False, False]
        assert_sound(table)
    _, _, status = start.truncate([1], tokens + 1)
    assert status.tolist() == [BAD_ROW]


def test_truncate_of_nothing_gives_reserved_pages_back():
    table = grow(make(), [0], [5])
    reserved, _ = table.reserve([0], 11)
    assert len(held(reserved, 0)) == 4
    trimmed, _, _ = reserved.truncate([0], 0)
    assert held(trimmed, 0) == held(table, 0)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_cut_inside_a_shared_page_gets_a_copy_of_it(page_size):
    tokens = 2 * page_size
    start = grow(make(pages_per_seq=3, page_size=page_size), [0], [tokens])
    start, _, _ = start.fork([0], [1], tokens)
    for drop in range(tokens + 1):
        table, copies, status = start.truncate([0], drop)
        assert status.tolist() == [OK]
        assert_sound(table)
        assert held(table, 1) == [0, 1]
        keep, inside = divmod(tokens - drop, page_size)
        if inside:
            assert held(table, 0) == [*held(start, 0)[:keep], 2]
            assert (copies.src.tolist(), copies.dst.tolist()) == ([keep], [2])
        else:
            assert held(table, 0) == held(start, 0)[:keep]
            assert copies.src.tolist() == [-1]
        # The next tokens of both rows go to different slots.
        table, _ = table.reserve([0, 1], 1)
        _, batch, _ = table.step([0, 1], 1)
        assert len(set(batch.slot_mapping.tolist())) == 2


def shared_and_full() -> PageTable:
    """Rows 0, 1, 2 share pages 0 and 1, row 3 holds the rest."""
    table = grow(make(num_pages=4), [0], [8])
    table, _, _ = table.fork([0, 0], [1, 2], 8)
    return grow(table, [3], [8])


def test_a_cut_inside_a_shared_page_needs_a_free_page():
    table = shared_and_full()
    after, copies, status = table.truncate([0, 3, 1], [1, 1, 4])
    assert status.tolist() == [POOL_FULL, OK, OK]
    assert copies.src.tolist() == [-1, -1, -1]
    assert_same(after, table)


def test_a_row_that_frees_its_own_page_needs_no_other():
    table = grow(make(num_pages=3), [0], [8])
    table, _, _ = table.fork([0], [1], 8)
    table = grow(table, [1], [4])
    table, copies, status = table.truncate([1], 5)
    assert status.tolist() == [OK]
    assert held(table, 1) == [0, 2]
    assert (copies.src.tolist(), copies.dst.tolist()) == ([1], [2])
    assert_sound(table)


def test_the_last_of_the_rows_cut_inside_a_page_keeps_it():
    table = grow(make(), [0], [8])
    table, _, _ = table.fork([0, 0], [1, 2], 8)
    table, copies, status = table.truncate([2, 0, 1], [1, 2, 3])
    assert status.tolist() == [OK] * 3
    assert copies.src.tolist() == [1, 1, -1]
    assert copies.dst.tolist() == [2, 3, -1]
    assert [held(table, row) for row in (0, 1, 2)] == [[0, 3], [0, 1], [0, 2]]
    assert_sound(table)


def test_a_page_that_all_others_drop_in_the_same_call_is_not_copied():
    table = grow(make(), [0], [8])
    table, _, _ = table.fork([0, 0], [1, 2], 8)
    table, copies, status = table.truncate([1, 0, 2], [4, 1, 8])
    assert status.tolist() == [OK] * 3
    assert copies.src.tolist() == [-1] * 3
    assert [held(table, row) for row in (0, 1, 2)] == [[0, 1], [0], []]
    assert_sound(table)
