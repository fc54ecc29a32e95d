# SPDX-License-Identifier: Apache-2.0
"""hold, unhold and adopt: pages that outlive their rows, case by case and at random."""

import os
import re
from collections import Counter

import jax
import numpy as np
import pytest
from page_tables import assert_reset, assert_same

from jax_paged import KVState, PageTable, Status

OK, BAD_ROW, STALE_ROW = Status.OK, Status.BAD_ROW, Status.STALE_ROW
NUM_OPERATIONS = 20_000 if os.environ.get("JAX_PAGED_LONG") == "1" else 1_500
WIDE = 2**40
NONE = np.zeros(0, np.int32)


def grown(lengths, *, num_pages=8, page_size=4) -> PageTable:
    """A table whose row i has lengths[i] tokens."""
    table = PageTable.create(num_pages, 4, 4, page_size)
    rows = list(range(len(lengths)))
    table, _ = table.reserve(rows, lengths)
    table, _, status = table.step(rows, lengths, num_tokens=64)
    assert not status.any()
    return table


def test_a_held_page_stays_when_its_row_goes_and_serves_another_row():
    table = grown([9])
    table, page_ids, status = table.hold([0, 0], [1, 0])
    assert (page_ids.tolist(), status.tolist()) == ([1, 0], [OK, OK])
    table, _ = table.release([0])
    assert int(table.free_pages) == 6
    assert bool(table.is_empty)
    table, status = table.adopt([3, 2], [[0, 1], [0, -1]])
    assert status.tolist() == [OK, OK]
    assert table.seq_lens.tolist() == [0, 0, 4, 8]
    assert table.page_table[3].tolist() == [0, 1, -1, -1]
    assert table.ref_counts[:2].tolist() == [3, 2]
    table, _ = table.unhold([0, 1])
    table, _ = table.release([2, 3])
    assert int(table.free_pages) == 8


def test_a_page_is_held_as_often_as_it_was_asked_for():
    table = grown([4])
    table, page_ids, status = table.hold([0, -1, 0], [0, 7, 0])
    assert (page_ids.tolist(), status.tolist()) == ([0, -1, 0], [OK] * 3)
    table, _ = table.release([0])
    before = table
    table, status = table.unhold([0, 0, 0])
    assert status.tolist() == [BAD_ROW] * 3
    assert_same(table, before)
    table, status = table.unhold([0, -1, 0])
    assert status.tolist() == [OK] * 3
    assert int(table.free_pages) == 8


@pytest.mark.parametrize(
    ("row", "column", "status"),
    [
        (0, 2, BAD_ROW),  # its last page is not full
        (0, 3, BAD_ROW),
        (0, -1, BAD_ROW),
        (0, WIDE, BAD_ROW),
        (1, 0, BAD_ROW),  # reserved only
        (2, 0, STALE_ROW),
        (4, 0, BAD_ROW),
        (-2, 0, STALE_ROW),
        (-3, 0, BAD_ROW),
        (WIDE, 0, BAD_ROW),
    ],
)
def test_only_full_pages_of_live_rows_are_held(row, column, status):
    table = grown([9, 0])
    table, _ = table.reserve([1], 4)
    after, page_ids, got = table.hold([0, row], [0, column])
    assert got.tolist() == [OK, status]
    assert page_ids.tolist() == [-1, -1]
    assert_same(after, table)


@pytest.mark.parametrize("page", [0, 2, 8, -2, WIDE, -WIDE])
def test_a_page_that_is_not_on_hold_is_not_given_back(page):
    table = grown([9])  # page 0 is in a row only, page 2 is not full
    table, _, _ = table.hold([0], [1])
    after, status = table.unhold([1, page])
    assert status.tolist() == [OK, BAD_ROW]
    assert_same(after, table)


@pytest.mark.parametrize(
    ("row", "page_ids"),
    [
        (0, [0, 1]),  # live
        (1, [0, 2]),  # not on hold
        (1, [0, 0]),
        (1, [-1, 0]),
        (1, [0, 8]),
        (1, [0, WIDE]),
        (1, [-2, -1]),
        (3, [0, 1]),  # given twice
        (4, [0, 1]),
        (-3, [0, 1]),
    ],
)
def test_adopt_refuses_what_would_share_a_page_that_may_be_written(row, page_ids):
    table = grown([12])
    table, _, _ = table.hold([0, 0], [0, 1])
    after, status = table.adopt([3, row], np.array([[0, 1], page_ids]))
    assert status.tolist() == [BAD_ROW if row == 3 else OK, BAD_ROW]
    assert_same(after, table)


def test_adopting_nothing_starts_an_empty_row():
    table, status = grown([4]).adopt([2], [[-1, -1]])
    assert status.tolist() == [OK]
    assert table.is_live.tolist() == [True, False, True, False]
    assert int(table.free_pages) == 7


def test_cutting_a_row_inside_a_held_page_copies_it():
    table = grown([8])
    table, _, _ = table.hold([0], [0])
    table, copies, status = table.truncate([0], 5)
    assert status.tolist() == [OK]
    assert (copies.src.tolist(), copies.dst.tolist()) == ([0], [1])  # page 1 had just been freed
    assert table.ref_counts[:2].tolist() == [1, 1]


def test_reset_drops_the_holds():
    table = grown([8])
    table, _, _ = table.hold([0], [0])
    assert_reset(table, PageTable.create(8, 4, 4, 4))


def test_the_state_has_the_same_verbs_and_keeps_its_pages():
    kv = KVState.create(
        num_layers=1, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, max_seqs=2,
        pages_per_seq=2, dtype="float32",
    )  # fmt: skip
    k_pages = kv.k_pages
    kv, _, _ = kv.append([0], 8, num_tokens=8)
    kv, page_ids, _ = kv.hold([0, 0], [0, 1])
    kv, _ = kv.release([0])
    kv, status = kv.adopt([1], page_ids[None, :])
    kv, other = kv.unhold(page_ids)
    assert (status.tolist(), other.tolist()) == ([OK], [OK, OK])
    assert kv.table.seq_lens.tolist() == [0, 8]
    assert kv.table.hold_counts.tolist() == [0] * 4
    assert kv.k_pages is k_pages


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.hold([0], [0, 1]), "columns: expected shape [N=1], got [2]"),
        (
            lambda t: t.hold(NONE, NONE),
            "rows: expected shape [N] with N of at least 1, got [0]",
        ),
        (lambda t: t.unhold([0.5]), "page_ids: expected an integer dtype, got"),
        (
            lambda t: t.adopt([0], [0]),
            "page_ids: expected shape [N, M] with 1 <= M <= pages_per_seq=4, got [1]",
        ),
        (
            lambda t: t.adopt([0], [[0] * 5]),
            "page_ids: expected shape [N, M] with 1 <= M <= pages_per_seq=4, got [1, 5]",
        ),
        (lambda t: t.adopt([0], [[0], [1]]), "page_ids: expected shape [N=1, M], got"),
    ],
)
def test_wrong_shapes_and_dtypes_are_named(call, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call(grown([4]))


class Shadow:
    """A plain model: tokens of rows and of pages on hold, and the contents of the pool."""

    def __init__(self, table: PageTable):
        self.table, self.size = table, table.page_size
        self.rows: dict[int, list[int]] = {}
        self.holds: list[tuple[int, tuple[int, ...]]] = []  # (page id, its tokens) per hold
        self.pool = np.full((table.num_pages, self.size), -1)
        self.next_token = 0

    def length_of(self, row: int) -> int:
        return len(self.rows.get(row, []))

    def copy(self, copies) -> None:
        for src, dst in zip(copies.src.tolist(), copies.dst.tolist(), strict=True):
            if dst >= 0:
                self.pool[dst] = self.pool[src]

    def append(self, row: int, count: int) -> bool:
        table, status = self.table.reserve([row], np.array([count]))
        if not status.any():
            table, batch, status = table.step([row], np.array([count]), num_tokens=9)
            assert status.tolist() == [OK]
            tokens = [self.next_token + i for i in range(count)]
            for slot, token in zip(batch.slot_mapping.tolist(), tokens, strict=False):
                self.pool.ravel()[slot] = token
            self.next_token += count
            self.rows.setdefault(row, []).extend(tokens)
        self.table = table
        return not status.any()

    def check(self) -> None:
        table = jax.device_get(self.table)
        held = Counter(table.page_table[table.page_table >= 0].tolist())
        holds = Counter(page for page, _ in self.holds)
        both = held + holds
        assert table.ref_counts.tolist() == [both[p] for p in range(table.num_pages)]
        assert table.hold_counts.tolist() == [holds[p] for p in range(table.num_pages)]
        free = table.free_stack[: int(table.num_free)].tolist()
        assert sorted([*free, *both]) == list(range(table.num_pages))
        assert np.flatnonzero(table.is_live).tolist() == sorted(self.rows)
        for row, tokens in self.rows.items():
            ids = table.page_table[row]
            assert self.pool[ids].ravel()[: len(tokens)].tolist() == tokens
            assert table.seq_lens[row] == len(tokens)
            for page in ids[len(tokens) // self.size :]:
                assert page < 0 or both[page] == 1, "the next write reaches a shared page"
        for page, tokens in self.holds:
            assert self.pool[page].tolist() == list(tokens)


def test_held_pages_keep_their_tokens_whatever_happens_to_the_rows():
    rng = np.random.default_rng(5)
    seen = Counter()
    shadow = Shadow(PageTable.create(11, 5, 4, 3))
    size = shadow.size
    for _ in range(NUM_OPERATIONS):
        live = sorted(shadow.rows)
        free = [row for row in range(5) if row not in shadow.rows]
        row = max(rng.permutation(live)[:2].tolist(), key=shadow.length_of) if live else -1
        length = shadow.length_of(row)
        verb = rng.choice(["append"] * 3 + ["release", "fork", "truncate", "hold", "hold",
                           "unhold", "adopt", "adopt"])  # fmt: skip
        before, fine = shadow.table, True
        if verb == "append":
            target = row if live and (not free or rng.random() < 0.7) else free[0]
            fine = shadow.append(target, int(rng.integers(0, 8)))
        elif verb == "release" and live:
            shadow.table, _ = shadow.table.release([row])
            del shadow.rows[row]
        elif verb == "fork" and live and free:
            part = int(rng.integers(0, length + 2))
            shadow.table, copies, status = shadow.table.fork([row], [free[0]], part)
            shadow.copy(copies)
            fine = not status.any()
            if fine:
                shadow.rows[free[0]] = shadow.rows[row][:part]
        elif verb == "truncate" and live:
            cut = np.array([int(rng.integers(0, length + 1))])
            shadow.table, copies, status = shadow.table.truncate([row], cut)
            shadow.copy(copies)
            fine = not status.any()
            if fine:
                del shadow.rows[row][length - int(cut[0]) :]
            seen["copied"] += int((np.asarray(copies.dst) >= 0).sum())
        elif verb == "hold" and live:
            columns = rng.integers(0, length // size + 1, 2)
            fine = bool((columns < length // size).all())
            shadow.table, ids, status = shadow.table.hold([row, row], columns)
            assert status.tolist() == [OK if c < length // size else BAD_ROW for c in columns]
            for page, column in zip(ids.tolist(), columns, strict=True):
                if fine:
                    tokens = shadow.rows[row][column * size : (column + 1) * size]
                    shadow.holds.append((page, tuple(tokens)))
        elif verb == "unhold":
            count = int(rng.integers(0, len(shadow.holds) + 1))
            gone = [shadow.holds.pop() for _ in range(min(count, 3))]
            ids = [page for page, _ in gone] + [-1] * (3 - len(gone))
            shadow.table, status = shadow.table.unhold(ids)
            assert not status.any()
        elif verb == "adopt" and free:
            known = dict(shadow.holds)
            chosen = rng.permutation(sorted(known))[: int(rng.integers(0, 4))].tolist()
            wrong = rng.random() < 0.2
            ids = [*chosen, int(rng.integers(0, 11))] if wrong else chosen
            fine = set(ids) <= set(known) and len(set(ids)) == len(ids)
            ids = np.array([ids + [-1] * (4 - len(ids))])
            shadow.table, status = shadow.table.adopt([free[0]], ids)
            assert status.tolist() == [OK if fine else BAD_ROW]
            if fine:
                shadow.rows[free[0]] = [t for p in ids[0] if p >= 0 for t in known[p]]
        else:
            continue
        if not fine:
            assert_same(shadow.table, before)
        seen[str(verb), fine] += 1
        shadow.check()
    for verb in ("append", "fork", "hold", "adopt"):
        assert seen[verb, True] > NUM_OPERATIONS // 100, seen
        assert seen[verb, False] > 0, seen
    assert seen["copied"] > NUM_OPERATIONS // 100, seen
