# SPDX-License-Identifier: Apache-2.0
"""append, which is reserve and step in one, and tables whose rows all have a window."""

import jax
import numpy as np
import pytest
from page_tables import assert_same, make

from jax_paged import KVState, PageTable, Status

OK, POOL_FULL, ROW_FULL, BAD_ROW = Status.OK, Status.POOL_FULL, Status.ROW_FULL, Status.BAD_ROW


@pytest.mark.parametrize("q_lens", [1, [1, 3, 2], [4, 0, 9]], ids=str)
@pytest.mark.parametrize("rows", [[0, 1, 2], [3, -1, 0]], ids=str)
def test_append_is_reserve_and_step(rows, q_lens):
    table, status = make().reserve(rows, q_lens)
    assert status.tolist() == [OK] * 3
    expected = table.step(rows, q_lens, num_tokens=16)
    assert_same(make().append(rows, q_lens, num_tokens=16), expected)
    assert_same(jax.jit(lambda t: t.append(rows, q_lens, num_tokens=16))(make()), expected)


@pytest.mark.parametrize(
    ("q_lens", "options", "expected"),
    [
        ([16, 16, 1], {}, [OK, OK, POOL_FULL]),  # reserve refuses
        ([1, 17, 1], {}, [OK, ROW_FULL, OK]),
        ([1, -1, 1], {}, [OK, BAD_ROW, OK]),
        ([5, 5, 1], {}, [OK, OK, BAD_ROW]),  # step refuses: ten tokens fit into the batch
        ([1, 2, 1], {"tree_parents": [-1, -1, 7, -1, *[-2] * 6]}, [OK, BAD_ROW, OK]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["table", "state", "groups"])
def test_if_any_row_fails_nothing_has_changed(kind, q_lens, options, expected):
    sizes = {"num_pages": 8, "max_seqs": 4, "pages_per_seq": 4, "page_size": 4}
    pools = {"num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    if kind == "table":
        before = PageTable.create(**sizes)
    elif kind == "state":
        before = KVState.create(num_layers=1, **sizes, **pools)
    else:
        before = KVState.create(layer_kinds=["full", 9], **sizes, **pools)
    after, batch, status = before.append([0, 1, 2], q_lens, num_tokens=10, **options)
    assert status.tolist() == expected
    assert_same(after, before)
    for own in batch.groups:
        assert own.num_seqs.tolist() == [0]
        assert own.slot_mapping.tolist() == [-1] * 10


# Tables whose rows all have a window


def windowed(tokens: int, **changes) -> PageTable:
    """Row 0 has this many tokens, which came in fours."""
    sizes = {"num_pages": 8, "max_seqs": 4, "pages_per_seq": 4, "page_size": 2, "row_window": 3}
    table = PageTable.create(**sizes | changes)
    for begin in range(0, tokens, 4):
        table, _, status = table.append([0], [min(4, tokens - begin)], num_tokens=4)
        assert status.tolist() == [OK]
    return table


def test_every_row_has_the_window_and_slides():
    table, batch, _ = windowed(11).append([0, 2], 1)
    assert table.windows.window.tolist() == [3, 0, 3, 0]
    assert batch.sliding_window.tolist() == [3, 3]
    assert batch.slot_offset.tolist() == [8, 0]  # token 11 sees 9 and on
    assert table.seq_lens.tolist() == [12, 0, 1, 0]
    table, _ = table.release([0])
    assert table.windows.window.tolist() == [0, 0, 3, 0]


def test_a_row_of_adopted_pages_has_it_too():
    table, page_ids, _ = windowed(4).hold([0, 0], [0, 1])
    table, status = table.adopt([1], page_ids[None])
    assert status.tolist() == [OK]
    assert table.windows.window.tolist() == [3, 3, 0, 0]
    table, batch, _ = table.append([1], 1)
    assert (batch.slot_offset.tolist(), batch.positions.tolist()) == ([2], [4])


def test_a_child_slides_as_its_parent_did():
    table, copies, status = windowed(11).fork([0], [3], 11)
    assert status.tolist() == [OK]
    assert table.windows.slot_offset.tolist() == [6, 0, 0, 6]
    assert table.windows.window.tolist() == [3, 0, 0, 3]
    assert copies.src.tolist() == [int(table.page_table[0, 2])]
    assert copies.dst.tolist() == [int(table.page_table[3, 2])]


def test_forks_change_nothing_where_one_needs_what_has_slid_away():
    before = windowed(11)
    after, copies, status = before.fork([0, 0], [1, 2], [11, 5])
    assert status.tolist() == [OK, Status.SLID_OUT]
    assert_same(after, before)
    np.testing.assert_array_equal(copies, -1)


def test_no_row_of_it_gets_another_window():
    with pytest.raises(ValueError, match=r"^table: expected one without row_window, got one with"):
        windowed(2).set_window([0], 2, 0)
    with pytest.raises(ValueError, match=r"^row_window: expected an integer of at least 1, got 0"):
        windowed(0, row_window=0)


@pytest.mark.parametrize("verb", ["hold", "adopt", "unhold", "set_window"])
def test_a_verb_of_one_group_names_the_groups(verb):
    state = KVState.create(
        layer_kinds=["full", 9], num_pages=4, page_size=4, max_seqs=2, pages_per_seq=2,
        num_kv_heads=1, head_dim=8, dtype="float32",
    )  # fmt: skip
    arguments = {"hold": ([0], [0]), "adopt": ([0], [[0]]), "unhold": ([0],),
                 "set_window": ([0], 3, 0)}  # fmt: skip
    message = rf"^{verb}: expected a state of one group of layers, got one of \('full', 9\)$"
    with pytest.raises(NotImplementedError, match=message):
        getattr(state, verb)(*arguments[verb])
    with pytest.raises(AttributeError, match="expected one of a single group of layers"):
        _ = state.k_pages
