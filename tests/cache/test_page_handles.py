# SPDX-License-Identifier: Apache-2.0
"""Handles of rows: a row that was released is not taken for the sequence that comes after."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_tables import assert_same, grow, make

from jax_paged import STALE, PageTable, Status

OK, STALE_ROW = Status.OK, Status.STALE_ROW


def test_a_handle_is_good_until_its_row_is_released():
    table = grow(make(), [0, 2], [5, 1])
    first = table.handles([2, 0, -1])
    table, _, _ = table.truncate([2], 1)
    table, _, _ = table.fork([0], [1], 3)
    assert table.rows_of(first).tolist() == [2, 0, -1]
    table, _ = table.release([2])
    assert table.rows_of(first).tolist() == [STALE, 0, -1]
    table = grow(table, [2], [3])
    assert table.rows_of(first).tolist() == [STALE, 0, -1]
    again = table.handles([2, 0])
    assert table.rows_of(again).tolist() == [2, 0]
    assert again[1] == first[1]


def test_every_verb_reports_a_stale_handle_and_changes_nothing():
    table = PageTable.create(8, 4, 4, 4, windows=True)
    table = grow(table, [0, 1], [5, 5])
    table, page_ids, _ = table.hold([0], [0])
    held = table.handles([0, 1])
    table, _ = table.release([1])
    table = grow(table, [1], [9])
    rows = table.rows_of(held)
    assert rows.tolist() == [0, STALE]
    for after, *_, status in (
        table.reserve(rows, 1),
        table.step(rows, [0, -1]),
        table.release(rows),
        table.truncate(rows, [0, 99]),
        table.fork(rows, [2, 3], [5, -1]),
        table.set_window(rows, 4, 0),
        table.hold(rows, [0, -1]),
    ):
        assert status.tolist() == [OK, STALE_ROW]
        assert_same(after, table)
    for after, *_, status in (
        table.commit_tree(rows[1:], 0),
        table.adopt(rows[1:], page_ids[None]),
        table.fork([0], rows[1:], 5),
    ):
        assert status.tolist() == [STALE_ROW]
        assert_same(after, table)


def test_a_handle_of_a_free_row_is_for_its_next_sequence():
    table = make()
    handle = table.handles([3])
    table, status = table.reserve(table.rows_of(handle), 4)
    assert status.tolist() == [OK]
    table, status = table.release(table.rows_of(handle))
    assert status.tolist() == [OK]
    _, status = table.reserve(table.rows_of(handle), 4)
    assert status.tolist() == [STALE_ROW]


def test_what_is_no_row_and_no_handle_is_stale():
    table = make()
    assert table.handles([4, -2, -7, 2**40]).tolist() == [STALE] * 4
    wild = np.array([-2, -7, 2**31 - 1, 4, 2**40, -(2**40)])
    assert table.rows_of(wild).tolist() == [STALE] * 6


def test_reset_makes_the_handles_of_live_rows_stale():
    table = grow(make(), [1], [5])
    held = table.handles([0, 1])
    table = table.reset()
    assert table.rows_of(held).tolist() == [0, STALE]


@pytest.mark.parametrize("max_seqs", [1, 3, 1000])
def test_generations_wrap_before_handles_do(max_seqs):
    table = PageTable.create(4, max_seqs, 4, 4)
    last = (2**31 - 1) // max_seqs - 1
    table = dataclasses.replace(table, generations=jnp.full(max_seqs, last, jnp.int32))
    row = max_seqs - 1
    table, _ = table.reserve([row], 1)
    handle = table.handles([row])
    assert table.rows_of(handle).tolist() == [row]
    table, _ = table.release([row])
    assert int(table.generations[row]) == 0
    assert table.rows_of(handle).tolist() == [STALE]


def test_handles_work_in_one_program_with_the_verbs():
    @jax.jit
    def run(table):
        held = table.handles([0, 1])
        table, first = table.release(table.rows_of(held))
        table, second = table.release(table.rows_of(held))
        return first, second

    first, second = run(grow(make(), [0, 1], [5, 5]))
    assert (first.tolist(), second.tolist()) == ([OK, OK], [STALE_ROW, STALE_ROW])
