"""Handles of rows: a row that was released is not taken for the sequence that comes after."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_tables import assert_same, grow, make

from jax_paged import pages
from jax_paged.cache.pages import STALE, PageTable, Status

OK, STALE_ROW = Status.OK, Status.STALE_ROW


def test_a_handle_is_good_until_its_row_is_released():
    table = grow(make(), [0, 2], [5, 1])
    first = pages.handles(table, [2, 0, -1])
    table, _, _ = pages.truncate(table, [2], 1)
    table, _, _ = pages.fork(table, [0], [1], 3)
    assert pages.rows_of(table, first).tolist() == [2, 0, -1]
    table, _ = pages.release(table, [2])
    assert pages.rows_of(table, first).tolist() == [STALE, 0, -1]
    table = grow(table, [2], [3])
    assert pages.rows_of(table, first).tolist() == [STALE, 0, -1]
    again = pages.handles(table, [2, 0])
    assert pages.rows_of(table, again).tolist() == [2, 0]
    assert again[1] == first[1]


def test_every_verb_reports_a_stale_handle_and_changes_nothing():
    table = PageTable.create(8, 4, 4, 4, windows=True)
    table = grow(table, [0, 1], [5, 5])
    table, page_ids, _ = pages.hold(table, [0], [0])
    held = pages.handles(table, [0, 1])
    table, _ = pages.release(table, [1])
    table = grow(table, [1], [9])
    rows = pages.rows_of(table, held)
    assert rows.tolist() == [0, STALE]
    for after, *_, status in (
        pages.reserve(table, rows, 1),
        pages.step_batch(table, rows, [0, -1]),
        pages.release(table, rows),
        pages.truncate(table, rows, [0, 99]),
        pages.fork(table, rows, [2, 3], [5, -1]),
        pages.set_window(table, rows, 4, 0),
        pages.hold(table, rows, [0, -1]),
    ):
        assert status.tolist() == [OK, STALE_ROW]
        assert_same(after, table)
    for after, *_, status in (
        pages.commit_tree(table, rows[1:], 0),
        pages.adopt(table, rows[1:], page_ids[None]),
        pages.fork(table, [0], rows[1:], 5),
    ):
        assert status.tolist() == [STALE_ROW]
        assert_same(after, table)


def test_a_handle_of_a_free_row_is_for_its_next_sequence():
    table = make()
    handle = pages.handles(table, [3])
    table, status = pages.reserve(table, pages.rows_of(table, handle), 4)
    assert status.tolist() == [OK]
    table, status = pages.release(table, pages.rows_of(table, handle))
    assert status.tolist() == [OK]
    _, status = pages.reserve(table, pages.rows_of(table, handle), 4)
    assert status.tolist() == [STALE_ROW]


def test_what_is_no_row_and_no_handle_is_stale():
    table = make()
    assert pages.handles(table, [4, -2, -7, 2**40]).tolist() == [STALE] * 4
    wild = np.array([-2, -7, 2**31 - 1, 4, 2**40, -(2**40)])
    assert pages.rows_of(table, wild).tolist() == [STALE] * 6


def test_reset_makes_the_handles_of_live_rows_stale():
    table = grow(make(), [1], [5])
    held = pages.handles(table, [0, 1])
    table = pages.reset(table)
    assert pages.rows_of(table, held).tolist() == [0, STALE]


@pytest.mark.parametrize("max_seqs", [1, 3, 1000])
def test_generations_wrap_before_handles_do(max_seqs):
    table = PageTable.create(4, max_seqs, 4, 4)
    last = (2**31 - 1) // max_seqs - 1
    table = dataclasses.replace(table, generations=jnp.full(max_seqs, last, jnp.int32))
    row = max_seqs - 1
    table, _ = pages.reserve(table, [row], 1)
    handle = pages.handles(table, [row])
    assert pages.rows_of(table, handle).tolist() == [row]
    table, _ = pages.release(table, [row])
    assert int(table.generations[row]) == 0
    assert pages.rows_of(table, handle).tolist() == [STALE]


def test_handles_work_in_one_program_with_the_verbs():
    @jax.jit
    def run(table):
        held = pages.handles(table, [0, 1])
        table, first = pages.release(table, pages.rows_of(table, held))
        table, second = pages.release(table, pages.rows_of(table, held))
        return first, second

    first, second = run(grow(make(), [0, 1], [5, 5]))
    assert (first.tolist(), second.tolist()) == ([OK, OK], [STALE_ROW, STALE_ROW])


@pytest.mark.parametrize("verb", [pages.handles, pages.rows_of])
def test_what_is_no_table_is_named(verb):
    with pytest.raises(ValueError, match=r"^table: expected a PageTable, got a str"):
        verb("a table", [0])
