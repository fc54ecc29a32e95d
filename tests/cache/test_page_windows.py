# SPDX-License-Identifier: Apache-2.0
"""Rows with sliding windows, case by case; `test_state_machine` slides at random."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_tables import assert_reset, assert_same, assert_sound, grow, held

from jax_paged import KVState, PageTable, Status, pages_for

OK, POOL_FULL, ROW_FULL = Status.OK, Status.POOL_FULL, Status.ROW_FULL
BAD_ROW, STALE_ROW, SLID_OUT = Status.BAD_ROW, Status.STALE_ROW, Status.SLID_OUT
WIDE = 2**31 - 1


def make(num_pages=12, max_seqs=4, pages_per_seq=5, page_size=4) -> PageTable:
    return PageTable.create(num_pages, max_seqs, pages_per_seq, page_size, windows=True)


def windowed(table: PageTable, row: int, window: int, num_pinned: int, tokens: int) -> PageTable:
    """A row that has got its window before its tokens, which come one by one."""
    table, _ = table.reserve([row], 0)
    table, status = table.set_window([row], window, num_pinned)
    assert status.tolist() == [OK]
    for _ in range(tokens):
        table = grow(table, [row], [1])
    return table


def offset_of(table: PageTable, row: int) -> int:
    assert table.windows is not None
    return int(table.windows.slot_offset[row])


def test_a_row_holds_no_more_than_its_pins_its_window_and_a_page():
    table = windowed(make(), 0, window=9, num_pinned=3, tokens=0)
    for tokens in range(1, 60):
        table = grow(table, [0], [1])
        first_seen = tokens - 1 - (9 - 3) + 1  # by the token that has come last
        gone = max(0, first_seen - 4) // 4  # behind the page of the pinned tokens
        assert (len(held(table, 0)), offset_of(table, 0)) == (pages_for(tokens, 4) - gone,
                                                              4 * gone)  # fmt: skip
        assert len(held(table, 0)) <= 1 + 3
    assert table.seq_lens.tolist() == [59, 0, 0, 0]
    assert_sound(dataclasses.replace(table, seq_lens=table.seq_lens - offset_of(table, 0)))


def test_slots_go_on_behind_the_gap_and_positions_count_it():
    table = windowed(make(), 0, window=5, num_pinned=1, tokens=11)
    table, status = table.reserve([0, 1], [2, 1])
    table, batch, status = table.step([1, 0, -1], [1, 2, 0], num_tokens=4)
    assert status.tolist() == [OK] * 3
    assert batch.positions.tolist() == [0, 11, 12, 0]
    pinned, last, new = held(table, 0)
    assert batch.slot_mapping.tolist() == [held(table, 1)[0] * 4, last * 4 + 3, new * 4, -1]
    assert batch.seq_lens.tolist() == [1, 13, 0]
    assert batch.sliding_window.tolist() == [0, 5, 0]
    assert batch.num_pinned.tolist() == [0, 1, 0]
    assert batch.slot_offset.tolist() == [0, 4, 0]
    assert batch.page_table[1].tolist() == [pinned, last, new, -1, -1]


def test_a_chunk_longer_than_the_window_keeps_what_its_first_token_sees():
    table = windowed(make(), 0, window=6, num_pinned=0, tokens=10)
    before = held(table, 0)
    table = grow(table, [0], [12])
    # Token 10 sees tokens 5 and on: page 0 alone has gone, though token 21 sees 16 and on.
    assert offset_of(table, 0) == 4
    assert set(before[-2:]) < set(held(table, 0))
    table, _ = table.reserve([0], 1)
    assert offset_of(table, 0) == 16


def test_a_full_pool_lives_on_the_pages_that_slide_away():
    table = windowed(make(num_pages=2), 0, window=5, num_pinned=0, tokens=8)
    first, second = held(table, 0)
    assert int(table.free_pages) == 0
    table, status = table.reserve([0], 4)
    assert status.tolist() == [OK]
    assert held(table, 0) == [second, first]
    table, _, _ = table.step([0], 4, num_tokens=4)
    # Row 0 brings a page, which is for it and those behind it.
    _, status = table.reserve([1, 0], [1, 1])
    assert status.tolist() == [POOL_FULL, OK]
    after, status = table.reserve([0, 1], [0, 1])
    assert status.tolist() == [OK, OK]
    assert int(after.free_pages) == 0
    _, status = table.reserve([0, 1], [1, 1])
    assert status.tolist() == [OK, POOL_FULL]


def test_pages_per_seq_bounds_what_is_stored():
    table = windowed(make(pages_per_seq=3), 0, window=4, num_pinned=0, tokens=24)
    after, status = table.reserve([0], 9)
    assert status.tolist() == [ROW_FULL]
    assert_same(after, table)
    _, status = table.reserve([0], 8)
    assert status.tolist() == [OK]


def test_pages_that_others_hold_are_let_go_and_not_freed():
    table = grow(make(), [0], [12])
    shared = held(table, 0)
    table, page_ids, _ = table.hold([0, 0], [0, 1])
    table, _, _ = table.fork([0], [1], 4)
    table, status = table.set_window([0], 2, 0)
    assert status.tolist() == [OK]
    table, status = table.reserve([0], 1)
    assert status.tolist() == [OK]
    assert (offset_of(table, 0), held(table, 1)) == (8, shared[:1])
    assert table.ref_counts[np.array(shared)].tolist() == [2, 1, 1]
    assert int(table.free_pages) == 12 - 4
    table, status = table.unhold(page_ids)
    assert int(table.free_pages) == 12 - 3


def test_hold_counts_columns_by_tokens():
    table = windowed(make(), 0, window=9, num_pinned=5, tokens=21)
    pinned, partly_pinned, *rest = held(table, 0)
    assert offset_of(table, 0) == 8  # pages 2 and 3
    expected = {0: pinned, 1: partly_pinned, 4: rest[0]}
    for column in range(7):
        _, page_ids, status = table.hold([0], [column])
        want = OK if column in expected else SLID_OUT if column < 5 else BAD_ROW
        assert (page_ids.tolist(), status.tolist()) == ([expected.get(column, -1)], [want])


@pytest.mark.parametrize(
    ("row", "window", "num_pinned", "status"),
    [
        (0, 4, 3, OK),
        (0, WIDE, 0, OK),
        (0, 2**40, 2**39, BAD_ROW),  # both are clamped
        (0, 4, 4, BAD_ROW),
        (0, 0, 0, BAD_ROW),
        (0, 4, -1, BAD_ROW),
        (-1, 0, 0, OK),
        (1, 4, 0, BAD_ROW),  # it has a window
        (2, 3, 0, BAD_ROW),  # forked with three tokens
        (2, 4, 0, OK),
        (3, 4, 0, STALE_ROW),
        (4, 4, 0, BAD_ROW),
    ],
)
def test_a_window_is_checked(row, window, num_pinned, status):
    table = grow(windowed(make(), 1, 4, 0, tokens=0), [0], [5])
    table, _, _ = table.fork([0], [2], 3)
    after, got = table.set_window(np.array([row]), np.array([window]), num_pinned)
    assert got.tolist() == [status]
    if status != OK or row == -1:
        assert_same(after, table)


def test_a_forked_prefix_is_pinned_as_far_as_it_is_left():
    table = grow(make(), [0], [9])
    table, _, _ = table.fork([0, 0], [1, 2], [6, 6])
    table, _, _ = table.truncate([2], 4)
    table = grow(table, [2], [4])
    table, status = table.set_window([1, 2], [10, 10], [2, 3])
    assert status.tolist() == [OK, OK]
    assert table.windows.num_pinned.tolist() == [0, 6, 3, 0]
    table, _ = table.release([1, 2])
    assert not any(x.any() for x in jax.tree.leaves(table.windows))


def test_a_row_with_a_window_is_forked_within_its_pinned_tokens():
    table = windowed(make(), 0, window=8, num_pinned=6, tokens=30)
    table, copies, status = table.fork([0, 0], [1, 2], [6, 4])
    assert status.tolist() == [OK, OK]
    assert copies.src.tolist() == [held(table, 0)[1], -1]
    assert held(table, 1)[0] == held(table, 2)[0] == held(table, 0)[0]
    assert table.windows.window.tolist() == [8, 0, 0, 0]
    after, _, status = table.fork([0], [3], 7)
    assert status.tolist() == [BAD_ROW]
    assert_same(after, table)
    short = windowed(make(), 0, window=8, num_pinned=6, tokens=3)
    assert short.fork([0], [1], 4)[2].tolist() == [BAD_ROW]


def test_a_cut_leaves_the_next_token_its_window():
    table = windowed(make(), 0, window=9, num_pinned=2, tokens=20)
    table, _ = table.reserve([0], 4)
    table, _, _ = table.step([0], 4, num_tokens=4)
    # The first token that is left is 12: the next one sees from p - 6 on.
    assert offset_of(table, 0) == 8
    for tokens, expected in ((4, OK), (6, OK), (7, SLID_OUT), (24, SLID_OUT), (25, BAD_ROW)):
        after, _, status = table.truncate([0], np.array([tokens]))
        assert status.tolist() == [expected]
        if expected != OK:
            assert_same(after, table)
    table, _, _ = table.truncate([0], 6)
    assert (int(table.seq_lens[0]), len(held(table, 0))) == (18, 1 + 2)
    early = windowed(make(), 0, window=9, num_pinned=2, tokens=8)
    assert early.truncate([0], 8)[2].tolist() == [OK]


def test_a_tree_keeps_the_window_of_its_roots():
    table = windowed(make(), 0, window=4, num_pinned=0, tokens=12)
    for _ in range(2):
        table, _ = table.reserve([0], 3)
        table, _, status = table.step([0], [3], num_tokens=3, tree_parents=[-1, 0, 0])
        assert status.tolist() == [OK]
    assert (offset_of(table, 0), int(table.tree_sizes[0])) == (8, 6)  # token 12 sees 9 and on
    table, moves, _ = table.commit_tree([0], [5])
    first, new = held(table, 0)[1], held(table, 0)[2]
    assert moves.src[moves.src >= 0].tolist() == [new * 4 + 1]
    assert moves.dst[moves.dst >= 0].tolist() == [first * 4 + 1]
    assert table.seq_lens.tolist() == [14, 0, 0, 0]


def test_a_tree_begins_behind_the_pinned_tokens():
    table = windowed(make(), 0, window=6, num_pinned=3, tokens=2)
    table, _ = table.reserve([0], 4)
    tree = {"num_tokens": 2, "tree_parents": [-1, -1]}
    after, _, status = table.step([0], [2], **tree)
    assert status.tolist() == [BAD_ROW]
    assert_same(after, table)
    table, _, _ = table.step([0], [1])
    assert table.step([0], [2], **tree)[2].tolist() == [OK]


def test_lengths_near_the_end_of_int32_do_not_wrap():
    table = windowed(make(page_size=1, pages_per_seq=4), 0, window=3, num_pinned=1, tokens=5)
    windows = dataclasses.replace(table.windows, slot_offset=jnp.full(4, 2**31 - 7, jnp.int32))
    far = table.seq_lens + jnp.int32(2**31 - 7) - table.windows.slot_offset
    table = dataclasses.replace(table, seq_lens=far, windows=windows)
    assert int(far[0]) == 2**31 - 4
    for count, expected in ((2, OK), (3, ROW_FULL), (WIDE, ROW_FULL)):
        after, status = table.reserve([0], np.array([count]))
        assert status.tolist() == [expected]
    after, _ = table.reserve([0], 2)
    assert after.step([0], 3, num_tokens=3)[2].tolist() == [ROW_FULL]
    after, batch, status = after.step([0], 2, num_tokens=2)
    assert batch.positions.tolist() == [2**31 - 4, 2**31 - 3]


def test_set_window_needs_a_table_with_windows():
    plain = PageTable.create(8, 2, 4, 4)
    assert plain.windows is None
    assert plain.step([0], 0)[1].slot_offset is None
    message = "^table: expected one made with windows=True, got one without windows$"
    with pytest.raises(ValueError, match=message):
        plain.set_window([0], 4, 0)
    with pytest.raises(ValueError, match="windows: expected a bool, got 1"):
        PageTable.create(8, 2, 4, 4, windows=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 0), "rows: expected shape [N] with N of at least 1, got a scalar"),
        (([0], [4, 5], 0), "window: expected a scalar or shape [1], got [2]"),
        (([0], 4.0, 0), "window: expected an integer dtype, got dtype float64"),
        (([0], 4, [0, 0]), "num_pinned: expected a scalar or shape [1], got [2]"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make().set_window(*arguments)


def test_windows_neither_call_the_host_nor_loop():
    def run(table, rows):
        table, status = table.set_window(rows, rows, rows)
        table, _ = table.reserve(rows, rows)
        table, batch, _ = table.step(rows, rows)
        table, copies, _ = table.truncate(rows, rows)
        return table.hold(rows, rows), batch, copies, status

    text = str(jax.make_jaxpr(run)(make(), jnp.zeros(2, jnp.int32)))
    for primitive in ("callback", " sort[", " while["):
        assert primitive not in text


def test_the_state_has_the_verb_and_reset_keeps_the_windows_off():
    kv = KVState.create(
        num_layers=1, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, max_seqs=2,
        pages_per_seq=2, dtype="float32", windows=True,
    )  # fmt: skip
    kv, _ = kv.reserve([0, 1], 4)
    kv, status = kv.set_window([0, 1], [4, 3], [1, 0])
    assert status.tolist() == [OK, OK]
    assert kv.table.windows.window.tolist() == [4, 3]
    assert_reset(kv.table, PageTable.create(4, 2, 2, 4, windows=True))
