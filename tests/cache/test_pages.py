# SPDX-License-Identifier: Apache-2.0
"""PageTable and its verbs, case by case; `test_state_machine` does the same at random."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_tables import assert_reset, assert_same, assert_sound, grow, held, make

from jax_paged import PageTable, Status, pages_for

OK, POOL_FULL, ROW_FULL = Status.OK, Status.POOL_FULL, Status.ROW_FULL
BAD_ROW, STALE_ROW = Status.BAD_ROW, Status.STALE_ROW
WIDE_IDS = [
    np.array([2**32, 2**32 + 1]),
    np.array([2**32 - 1, 2**31], np.uint32),
    [-(2**40), 2**40],
]


# Allocation


def test_pages_are_handed_out_from_page_zero_up():
    table, _ = make().reserve([2, 0], [9, 4])
    assert held(table, 2) == [0, 1, 2]
    assert held(table, 0) == [3]


def test_the_page_freed_last_is_taken_first():
    table = grow(make(num_pages=4), [0, 1, 2, 3], [1, 1, 1, 1])
    table, _ = table.release([1, 3])
    assert int(table.free_pages) == 2
    table, _ = table.reserve([3, 1], 1)
    assert held(table, 3) == [3]
    assert held(table, 1) == [1]


def test_releasing_rows_in_one_call_equals_one_after_the_other():
    table = grow(make(num_pages=9), [0, 1, 2], [9, 5, 8])
    table, _, _ = table.fork([0, 0], [3, -1], [8, 0])
    together, status = table.release([3, -1, 0, 2])
    assert status.tolist() == [OK] * 4
    for row in (3, 0, 2):
        table, _ = table.release([row])
    num_free = int(table.num_free)
    assert int(together.num_free) == num_free
    np.testing.assert_array_equal(
        np.asarray(together.free_stack)[:num_free], np.asarray(table.free_stack)[:num_free]
    )
    assert_sound(together)


def test_reserve_adds_to_the_length_and_counts_the_pages_already_held():
    table, _ = make(page_size=4).reserve([0], 6)
    again, status = table.reserve([0], 8)
    assert status.tolist() == [OK]
    assert_same(again, table)  # length 0: two pages already hold 8
    table = grow(table, [0], [6])
    table, _ = table.reserve([0], 3)
    assert len(held(table, 0)) == 3


def test_reserve_of_nothing_makes_a_row_live_without_a_page():
    table, status = make().reserve([1], 0)
    assert status.tolist() == [OK]
    assert table.free_rows.tolist() == [True, False, True, True]
    assert int(table.free_pages) == 8
    assert not table.is_empty


def test_a_python_int_and_an_array_reserve_the_same():
    for count in (0, 1, 4, 5):
        table = grow(make(), [0, 2], [3, 4])
        expected, want = table.reserve([2, -1, 0], np.full(3, count))
        got, status = table.reserve([2, -1, 0], count)
        assert_same((got, status), (expected, want))


def test_reserve_is_all_or_nothing_and_nobody_overtakes():
    table = make(num_pages=3)
    after, status = table.reserve([0, 1, 2, 3], [8, 8, 4, 0])
    # Row 2 would fit by itself, but row 1 comes before it. Row 3 needs no page.
    assert status.tolist() == [OK, POOL_FULL, POOL_FULL, OK]
    assert_same(after, table)
    after, status = table.reserve([0, -1, -1, 3], [8, 8, 4, 0])
    assert status.tolist() == [OK] * 4
    assert_sound(after)


def test_one_bad_row_keeps_every_verb_from_changing_anything():
    table = grow(make(), [0, 1], [5, 5])
    results = [
        table.reserve([0, 9], 4),
        table.step([0, 9], 1)[::2],
        table.release([0, 9]),
        table.fork([0, 9], [2, 3], 1)[::2],
        table.truncate([0, 9], 1)[::2],
    ]
    for after, status in results:
        assert status.tolist() == [OK, BAD_ROW]
        assert_same(after, table)


def test_row_full_when_the_table_has_no_more_columns():
    table = make(pages_per_seq=2, page_size=4)
    _, status = table.reserve([0, 1], [8, 9])
    assert status.tolist() == [OK, ROW_FULL]


def test_lengths_near_the_end_of_int32_do_not_wrap():
    table = make(num_pages=1, max_seqs=1, pages_per_seq=1, page_size=2**31 - 3)
    table = dataclasses.replace(grow(table, [0], [1]), seq_lens=jnp.full(1, 2**31 - 5, jnp.int32))
    for verb in (PageTable.reserve, PageTable.step):
        for count in (3, 2**31 - 1, 2**40):
            *_, status = verb(table, [0], count)
            assert status.tolist() == [ROW_FULL]
    after, batch, status = table.step([0], 2)
    assert status.tolist() == [BAD_ROW]  # one token in the flat batch
    after, batch, status = table.step([0], 2, num_tokens=2)
    assert status.tolist() == [OK]
    assert batch.slot_mapping.tolist() == [2**31 - 5, 2**31 - 4]
    assert after.reserve([0], 0)[1].tolist() == [OK]
    assert after.reserve([0], 1)[1].tolist() == [ROW_FULL]


def test_page_counts_near_the_end_of_the_dtype_do_not_wrap():
    assert pages_for(jnp.int32(2**31 - 1), 16) == 2**27
    assert pages_for(2**40, 16) == 2**36
    assert pages_for(jnp.array([-5, 0, 1, 16, 17], jnp.int32), 16).tolist() == [0, 0, 1, 1, 2]


def test_total_tokens_saturates():
    table = grow(make(), [0, 1], [5, 2])
    assert int(table.total_tokens) == 7
    huge = dataclasses.replace(table, seq_lens=jnp.full(4, 2**30, jnp.int32))
    assert int(huge.total_tokens) == 2**31 - 1
    huge = dataclasses.replace(table, seq_lens=jnp.full(4, 2**29 - 1, jnp.int32))
    assert int(huge.total_tokens) == 2**31 - 4


def test_peak_never_falls_until_reset():
    table = grow(make(), [0, 1], [16, 4])
    table, _ = table.release([0])
    assert int(table.peak_pages) == 5
    table = grow(table, [2], [4])
    assert int(table.peak_pages) == 5
    assert_reset(table, make())


# Bad rows


def test_a_double_release_is_reported_and_changes_nothing():
    table = grow(make(), [0, 1], [5, 5])
    table, _ = table.release([0])
    again, status = table.release([0, 1])
    assert status.tolist() == [STALE_ROW, OK]
    assert_same(again, table)
    _, status = table.release([1, 1])
    assert status.tolist() == [BAD_ROW, BAD_ROW]


@pytest.mark.parametrize("rows", [[4, -3], [0, 0], *WIDE_IDS])
def test_ids_out_of_range_or_given_twice_are_bad_rows(rows):
    table = grow(make(), [0, 1], [5, 5])
    children = np.where(np.asarray(rows) == 0, 2, np.asarray(rows))
    for *_, status in (
        table.reserve(rows, 1),
        table.step(rows, 0),
        table.release(rows),
        table.truncate(rows, 1),
        table.fork([0, 1], children, 1),
    ):
        assert status.tolist() == [BAD_ROW, BAD_ROW]


def test_negative_counts_are_bad_rows():
    table = grow(make(), [0, 1], [5, 5])
    for *_, status in (
        table.reserve([0, 1], -1),
        table.step([0, 1], np.array([-1, -(2**40)])),
        table.truncate([0, 1], -1),
        table.fork([0, 1], [2, 3], -1),
    ):
        assert status.tolist() == [BAD_ROW, BAD_ROW]


def test_rows_that_are_not_live_are_stale():
    table = grow(make(), [0], [5])
    for *_, status in (
        table.step([0, 1], 0),
        table.release([0, 1]),
        table.truncate([0, 1], 0),
        table.fork([0, 1], [2, 3], 0),
    ):
        assert status.tolist() == [OK, STALE_ROW]


def test_rows_of_minus_one_take_no_part():
    table = grow(make(), [0], [5])
    none = np.array([-1, -1])
    for after, *_, status in (
        table.reserve(none, -7),
        table.step(none, 2**40),
        table.release(none),
        table.truncate(none, -7),
        table.fork(none, [2, -1], -7),
        table.fork([0, 0], none, 99),
    ):
        assert status.tolist() == [OK, OK]
        assert_same(after, table)


# Step batch


def test_step_batch_lays_tokens_out_by_their_counts():
    table = grow(make(page_size=4), [0, 1], [3, 4])
    table, _ = table.reserve([0, 1, 2], 4)
    table, batch, status = table.step([1, -1, 2, 0, -1], [2, 1, 0, 3, 2**40], num_tokens=8)
    assert status.tolist() == [OK] * 5
    assert held(table, 0) == [0, 2]
    assert held(table, 1) == [1, 3]
    assert held(table, 2) == [4]
    assert batch.cu_q_lens.tolist() == [0, 2, 3, 3, 6, 8]
    assert batch.num_seqs.tolist() == [4]
    assert batch.seq_lens.tolist() == [6, 0, 0, 6, 0]
    assert batch.positions.tolist() == [4, 5, 0, 3, 4, 5, 0, 0]
    assert batch.slot_mapping.tolist() == [12, 13, -1, 3, 8, 9, -1, -1]
    assert [row[:2] for row in batch.page_table.tolist()] == [
        [1, 3], [-1, -1], [4, -1], [0, 2], [-1, -1],
    ]  # fmt: skip
    assert table.seq_lens.tolist() == [6, 6, 0, 0]
    assert {leaf.dtype for leaf in jax.tree.leaves(batch)} == {jnp.dtype("int32")}


def test_a_step_without_reserved_pages_is_row_full_and_all_padding():
    table = grow(make(page_size=4), [0, 1], [4, 3])
    after, batch, status = table.step([1, 0], 1)
    assert status.tolist() == [OK, ROW_FULL]
    assert_same(after, table)
    assert batch.slot_mapping.tolist() == [-1, -1]
    assert batch.positions.tolist() == [0, 0]
    assert batch.cu_q_lens.tolist() == [0, 0, 0]
    assert batch.seq_lens.tolist() == [0, 0]
    assert batch.num_seqs.tolist() == [0]
    assert np.all(np.asarray(batch.page_table) == -1)


def test_rows_that_do_not_fit_the_flat_batch_are_bad():
    table, _ = make(page_size=4).reserve([0, 1, 2, 3], 4)
    after, _, status = table.step([0, 1, 2, 3], [3, 2, 0, 1], num_tokens=4)
    assert status.tolist() == [OK, BAD_ROW, OK, BAD_ROW]
    assert_same(after, table)
    _, batch, status = table.step([0, -1, 2, -1], [3, 2, 0, 1], num_tokens=4)
    assert status.tolist() == [OK] * 4
    assert batch.slot_mapping.tolist() == [0, 1, 2, -1]
    wide = 2**31 - 2  # the second of them is past i32, the fourth past u32
    for first in (-1, 0):
        _, _, status = table.step(
            [first, -1, -1, -1, 3, 1, 2], [wide] * 4 + [1, 0, 1], num_tokens=4
        )
        full = Status.ROW_FULL if first == 0 else OK
        assert status.tolist() == [full, OK, OK, OK, BAD_ROW, OK, BAD_ROW]


# As a pytree, under jit


def test_a_table_round_trips_as_a_pytree():
    table = grow(make(), [0], [5])
    leaves, structure = jax.tree.flatten(table)
    assert len(leaves) == 12
    again = jax.tree.unflatten(structure, leaves)
    assert_same(again, table)
    assert (again.page_size, again.num_pages, again.max_seqs, again.pages_per_seq) == (4, 8, 4, 4)


def test_every_leaf_has_its_own_buffer():
    for table in (make(), make().reset(), jax.jit(make)()):
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(table)]
        assert len(set(pointers)) == len(pointers)
        jax.jit(lambda table: table.reset(), donate_argnums=0)(table)


def test_verbs_agree_under_jit():
    def run(table, rows, counts):
        table, a = table.reserve(rows, counts)
        table, batch, b = table.step(rows, counts, num_tokens=16)
        table, copies, c = table.fork(rows[:1], rows[:1] + 2, 3)
        table, cut, d = table.truncate(rows, 2)
        table, e = table.release(rows[:1])
        return table, batch, copies, cut, (a, b, c, d, e)

    operands = make(), jnp.array([0, 1], jnp.int32), jnp.array([7, 5], jnp.int32)
    assert_same(jax.jit(run)(*operands), run(*operands))


def test_a_decode_loop_is_one_program_that_stops_when_pages_run_out():
    rows = jnp.arange(2, dtype=jnp.int32)

    def step(carry):
        table, steps, _ = carry
        table, status = table.reserve(rows, 1)
        table, _, _ = table.step(rows, jnp.where(status == 0, jnp.int32(1), 0))
        return table, steps + 1, status

    @jax.jit
    def decode(table):
        status = jnp.zeros(2, jnp.int32)
        first = table, jnp.int32(0), status
        return jax.lax.while_loop(lambda carry: jnp.all(carry[2] == 0), step, first)

    table, steps, status = decode(make(num_pages=5, page_size=4))
    assert int(steps) == 9
    assert status.tolist() == [OK, POOL_FULL]
    assert table.seq_lens.tolist() == [8, 8, 0, 0]
    assert held(table, 0) == [0, 2]
    assert held(table, 1) == [1, 3]


def test_no_verb_calls_the_host_or_sorts():
    def run(table, rows):
        table, _ = table.reserve(rows, rows)
        table, batch, _ = table.step(rows, rows)
        table, copies, _ = table.fork(rows, rows, rows)
        table, cut, _ = table.truncate(rows, rows)
        return table.release(rows), batch, copies, cut

    text = str(jax.make_jaxpr(run)(make(), jnp.zeros(2, jnp.int32)))
    assert "scatter" in text
    for primitive in ("callback", " sort[", " while["):
        assert primitive not in text


def test_verbs_agree_with_64_bit_types_on():
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax_paged import KVState, PageTable, Status, pages_for
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
table = PageTable.create(8, 4, 4, 4)
rows = jnp.array([0, 1])
assert rows.dtype == jnp.int64
table, _ = table.reserve(rows, jnp.array([7, 5]))
table, batch, _ = table.step(rows, jnp.array([7, 5]), num_tokens=12)
table, copies, _ = table.fork(rows[:1], rows[:1] + 2, jnp.int64(5))
table, cut, _ = table.truncate(jnp.array([0, 2]), 2)
wide = jnp.array([2**32, 2**32 + 1])
for *_, status in (
    table.reserve(wide, 1),
    table.release(wide),
    table.truncate(jnp.array([0, 1]), wide),
):
    assert status.tolist() == [3, 3], status
assert table.reserve(rows, wide)[1].tolist() == [2, 2]
for leaf in jax.tree.leaves((table, batch, copies, cut, status, table.total_tokens)):
    assert leaf.dtype in (jnp.int32, jnp.bool_), leaf.dtype
assert table.seq_lens.tolist() == [5, 5, 3, 0]
assert table.page_table.tolist()[2][0] == 4
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Wrong calls


ROWS, COUNT = r"rows: expected shape \[N\] with N of at least 1", "num_tokens: expected"
WRONG_CALLS = [
    (
        PageTable.release,
        (jnp.zeros(2, jnp.float32),),
        "rows: expected an integer dtype, got dtype float32",
    ),
    (PageTable.release, ([True],), "rows: expected an integer dtype, got dtype bool"),
    (PageTable.release, (0,), ROWS + ", got a scalar"),
    (PageTable.release, (np.zeros(0, int),), ROWS + r", got \[0\]"),
    (PageTable.release, ([],), ROWS + r", got \[0\]"),
    (PageTable.release, ([[0]],), ROWS + r", got \[1, 1\]"),
    (PageTable.reserve, ([0, 1], 1.5), COUNT + " an integer dtype, got dtype float64"),
    (PageTable.reserve, ([0, 1], True), COUNT + " an integer dtype, got dtype bool"),
    (PageTable.reserve, ([0, 1], [1]), COUNT + r" a scalar or shape \[2\], got \[1\]"),
    (PageTable.step, ([0], [[1]]), r"q_lens: expected a scalar or shape \[1\], got \[1, 1\]"),
    (PageTable.fork, ([0, 1], [2], 1), r"child: expected shape \[N=2\], got \[1\]"),
    (PageTable.fork, ([0], [2], [1, 2]), r"length: expected a scalar or shape \[1\], got \[2\]"),
    (PageTable.truncate, ([0], None), COUNT + " an integer dtype, got dtype object"),
]


@pytest.mark.parametrize(("verb", "arguments", "message"), WRONG_CALLS)
def test_a_wrong_argument_is_named(verb, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        verb(make(), *arguments)


def test_a_wrong_size_is_named():
    with pytest.raises(ValueError, match="num_tokens: expected an integer of at least 1, got 0"):
        make().step([0], 1, num_tokens=0)
    with pytest.raises(ValueError, match="page_size: expected an integer of at least 1, got 0"):
        pages_for(3, 0)
    with pytest.raises(ValueError, match="tokens: expected an integer dtype, got dtype float"):
        pages_for(3.5, 4)


@pytest.mark.parametrize("name", ["num_pages", "max_seqs", "pages_per_seq", "page_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_create_names_a_wrong_size(name, value):
    sizes = {"num_pages": 2, "max_seqs": 2, "pages_per_seq": 2, "page_size": 2, name: value}
    with pytest.raises(ValueError, match=f"^{name}: expected an integer of at least 1, got"):
        PageTable.create(**sizes)


def test_create_refuses_sizes_whose_slots_do_not_fit_int32():
    with pytest.raises(ValueError, match=r"num_pages \* page_size: expected less than 2\*\*31 - 1"):
        make(num_pages=2**16, page_size=2**15)
    with pytest.raises(ValueError, match=r"max_seqs \* pages_per_seq: expected less than 2\*\*31"):
        make(max_seqs=2**16, pages_per_seq=2**15)
    with pytest.raises(ValueError, match=r"max_seqs \* max_tree: expected less than 2\*\*31, got"):
        PageTable.create(4, 2**16, 2, 2, max_tree=2**15)


@pytest.mark.parametrize(
    "sizes",
    [{"num_pages": 2**31 - 2}, {"pages_per_seq": 2**31 - 1}, {"max_tree": 2**31 - 1}],
    ids=str,
)
def test_create_takes_the_largest_sizes_that_fit_int32(sizes):
    ones = {"num_pages": 1, "max_seqs": 1, "pages_per_seq": 1, "page_size": 1, "max_tree": 1}
    table = jax.eval_shape(lambda: PageTable.create(**ones | sizes))  # without the memory
    assert {name: getattr(table, name) for name in sizes} == sizes
