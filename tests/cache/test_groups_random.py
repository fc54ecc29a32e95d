# SPDX-License-Identifier: Apache-2.0
"""A random walk over KVState, beside a page table of its own for each kind, contents included."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_groups import assert_holds, write_values
from page_tables import assert_same, assert_sound

from jax_paged import NO_TREE, KVState, PageTable, Status

WINDOW, PAGE_SIZE, ROWS, BATCH, TOKENS, MAX_TREE = 5, 3, 5, 3, 14, 4
KINDS = ("full", WINDOW)  # which take trees
NUM_PAGES = {"full": 17, WINDOW: 9, "mla": 16}
PAGES_PER_SEQ = {"full": 7, WINDOW: 4, "mla": 7}
STEPS = 250


def reserve_alone(table, rows, counts):
    """`PageTable.reserve`, and a window for rows that become live where the table has windows."""
    new, status = table.reserve(rows, counts)
    if table.windows is not None:
        is_new = (rows >= 0) & (rows < ROWS) & ~table.is_live[jnp.clip(rows, 0, ROWS - 1)]
        new, _ = new.set_window(jnp.where(is_new, rows, -1), WINDOW, 0)
    return new, status


def without_row_window(table):
    """Where rows have the windows that `reserve_alone` gave them."""
    return dataclasses.replace(table, row_window=0)


def step(kv, rows, q_lens, parents=None):
    return kv.step(rows, q_lens, num_tokens=TOKENS, tree_parents=parents)


def program(function):
    """One compiled program per kind of arguments; lists become i32 arrays."""
    compiled = jax.jit(function)
    return lambda state, *lists: compiled(state, *(np.asarray(x, np.int32) for x in lists))


ALONE = {
    "reserve": program(reserve_alone),
    "step": program(step),
    "release": program(PageTable.release),
    "fork": program(PageTable.fork),
    "truncate": program(PageTable.truncate),
    "commit": program(PageTable.commit_tree),
}
TOGETHER = {
    "reserve": program(KVState.reserve),
    "step": program(step),
    "release": program(KVState.release),
    "fork": program(KVState.fork),
    "truncate": program(KVState.truncate),
    "commit": program(KVState.commit_tree),
}
_write = jax.jit(write_values)


def fork_of_window(table, status, parents, children, lengths):
    """What a group with a window says to forks to which an unlimited pool would say `status`."""
    left, found = int(table.num_free), []
    for given, parent, child, length in zip(status, parents, children, lengths, strict=True):
        offset = int(table.windows.slot_offset[parent]) if 0 <= parent < ROWS else 0
        if given == Status.OK and -1 not in (parent, child):
            if offset > 0 and length - WINDOW + 1 < offset:
                given = Status.SLID_OUT
            elif length % PAGE_SIZE:
                left -= 1
                given = Status.OK if left >= 0 else Status.POOL_FULL
        found.append(int(given))
    return found


class Walk:
    def __init__(self, seed, kinds):
        self.rng, self.kinds = np.random.default_rng(seed), kinds
        self.kv = KVState.create(
            layer_kinds=kinds, num_pages=NUM_PAGES, pages_per_seq=PAGES_PER_SEQ,
            page_size=PAGE_SIZE, max_seqs=ROWS, num_kv_heads=2, head_dim=8, latent_dim=16,
            dtype="float32", max_tree=MAX_TREE,
        )  # fmt: skip
        self.tables = [
            PageTable.create(
                NUM_PAGES[kind], ROWS, PAGES_PER_SEQ[kind], PAGE_SIZE, max_tree=MAX_TREE,
                windows=kind == WINDOW,
            )
            for kind in kinds
        ]  # fmt: skip
        self.texts: dict[int, list[float]] = {}
        self.trees: dict[int, list[int]] = {}  # parents
        self.next_value = 1.0
        self.outcomes = Counter()
        self.forks = self.forks_of_slid = 0  # pairs; those whose parent had slid

    def rows(self, among):
        """Three row ids, mostly different ones of `among`, now and then -1 or a wrong one."""
        among = list(self.rng.permutation(sorted(among)))
        picks = [among.pop() if among else -1 for _ in range(BATCH)]
        if self.rng.random() < 0.1:
            picks[self.rng.integers(BATCH)] = int(self.rng.choice([-2, ROWS, 0, 1]))
        return [int(x) for x in picks]

    def do(self, name, *lists):
        """Does a verb on the groups and on each table alone; returns what it gives if all is OK."""
        kv, *extra, status = TOGETHER[name](self.kv, *lists)
        answers = [ALONE[name](table, *lists) for table in self.tables]
        each = [np.asarray(answer[-1]).tolist() for answer in answers]
        if name == "fork":
            anyway = [x if x != Status.POOL_FULL else Status.OK for x in each[0]]
            each[1] = fork_of_window(self.tables[1], anyway, *lists)
        expected = [next((x for x in told if x), 0) for told in zip(*each, strict=True)]
        assert np.asarray(status).tolist() == expected, (name, lists, each)
        self.outcomes.update((name, Status(x)) for x in expected)
        if not any(expected):
            self.tables = [answer[0] for answer in answers]
            if name == "fork":  # which no other table does with a window
                self.tables[1] = without_row_window(kv.groups[1].table)
        for group, table in zip(kv.groups, self.tables, strict=True):
            assert_same(without_row_window(group.table), table)
        self.kv = kv
        if any(expected):
            return None
        return extra or [None]

    def check(self):
        for table in self.tables:
            gone = 0 if table.windows is None else table.windows.slot_offset
            assert_sound(dataclasses.replace(table, seq_lens=table.seq_lens - gone))
        for row, text in self.texts.items():
            assert_holds(self.kv, row, text, num_nodes=len(self.trees[row]))

    def settled(self):
        return {row for row, tree in self.trees.items() if not tree}

    def free(self):
        return set(range(ROWS)) - set(self.texts)

    def reserve(self, rows, counts):
        if self.do("reserve", rows, counts):
            for row in {*rows} - {-1} - {*self.texts}:
                self.texts[row], self.trees[row] = [], []

    def step(self, rows, counts, parents):
        values = np.arange(self.next_value, self.next_value + TOKENS, dtype=np.float32)
        self.next_value += TOKENS
        if extra := self.do("step", rows, counts, *([parents] if self.kinds == KINDS else [])):
            self.kv = _write(self.kv, *extra, values)
            begin = 0
            for row, count in zip(rows, counts, strict=True):
                if row != -1:
                    self.texts[row] += values[begin : begin + count].tolist()
                    nodes = parents[begin : begin + count]
                    self.trees[row] += [x for x in nodes if x != NO_TREE]
                begin += count

    def grow(self):
        new = self.free() if self.rng.random() < 0.2 or not self.texts else set()
        rows = self.rows(self.settled() | new)
        counts = self.rng.integers(0, 7, BATCH).tolist()
        if self.rng.random() < 0.9:
            self.reserve(rows, counts)
        if self.rng.random() < 0.9:
            self.step(rows, counts, [NO_TREE] * TOKENS)

    def grow_trees(self):
        rows = self.rows(self.texts)
        counts = self.rng.integers(1, 3, BATCH).tolist()
        self.reserve(rows, counts)
        parents = [NO_TREE] * TOKENS
        place = 0
        for row, count in zip(rows, counts, strict=True):
            for node in range(count):
                parents[place] = int(self.rng.integers(-1, len(self.trees.get(row, [])) + node))
                place += 1
        self.step(rows, counts, parents)

    def commit(self):
        rows = self.rows({row for row, tree in self.trees.items() if tree})
        leaves = [int(self.rng.integers(-1, len(self.trees.get(row, [])) or 1)) for row in rows]
        if self.do("commit", rows, leaves):
            for row, leaf in zip(rows, leaves, strict=True):
                if row != -1:
                    path, tree = [], self.trees[row]
                    while leaf != -1:
                        path, leaf = [leaf, *path], tree[leaf]
                    root = len(self.texts[row]) - len(tree)
                    self.texts[row][root:] = [self.texts[row][root + node] for node in path]
                    self.trees[row] = []

    def release(self):
        rows = self.rows(set(list(self.texts)[:2]))
        if self.do("release", rows):
            for row in {*rows} - {-1}:
                del self.texts[row], self.trees[row]

    def fork(self):
        parents, children = self.rows(self.settled()), self.rows(self.free())
        sizes = [len(self.texts.get(row, [])) for row in parents]
        lengths = [max(0, n - int(self.rng.choice([0, 0, 1, n // 2]))) for n in sizes]
        if self.do("fork", parents, children, lengths):
            for parent, child, length in zip(parents, children, lengths, strict=True):
                if -1 not in (parent, child):
                    self.forks += 1
                    self.forks_of_slid += bool(self.tables[1].windows.slot_offset[child])
                    self.texts[child], self.trees[child] = self.texts[parent][:length], []

    def truncate(self):
        with_trees = self.kinds == KINDS and self.rng.random() < 0.15  # which it refuses
        rows = self.rows(self.texts if with_trees else self.settled())
        counts = [
            min(len(self.texts.get(row, [])), int(self.rng.choice([0, 1, 2, 4]))) for row in rows
        ]
        if self.do("truncate", rows, counts):
            for row, count in zip(rows, counts, strict=True):
                if row != -1:
                    del self.texts[row][len(self.texts[row]) - count :]


@pytest.mark.parametrize(
    "kinds", [KINDS, pytest.param((*KINDS, "mla"), marks=pytest.mark.deep)], ids=str
)
def test_groups_do_what_their_tables_do_alone_and_keep_their_tokens(kinds):
    walk, trees = Walk(0, kinds), kinds == KINDS
    actions = [walk.grow] * 8 + [walk.truncate]
    actions += [walk.grow_trees, walk.commit] if trees else [walk.truncate]
    actions += [walk.fork] * 4 + [walk.release] * 2
    for _ in range(2 * STEPS if trees else STEPS):
        actions[walk.rng.integers(len(actions))]()
        walk.check()
    told = {status for _, status in walk.outcomes}
    assert told >= {*Status} - {Status.GAP} - (set() if trees else {Status.UNCOMMITTED_TREE})
    assert walk.forks > walk.forks_of_slid > 2, (walk.forks, walk.forks_of_slid)
    for name in ALONE.keys() - (set() if trees else {"commit"}):
        assert walk.outcomes[name, Status.OK] > 2 * BATCH, name
