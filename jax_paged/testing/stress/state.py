# SPDX-License-Identifier: Apache-2.0
"""Random verbs on a `KVState`, side by side with a plain Python model, contents included.

After each operation the page table must equal that of the model (`page_model`), entry by entry, and
so must the statuses and every token read back through the page table; and no slot may be written
that lies in a page of several rows. Hypothesis draws the operations, and shrinks what fails.
"""

import functools
from collections import Counter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from jax_paged.cache.layers import write
from jax_paged.cache.state import KVState
from jax_paged.cache.trees import NO_TREE
from jax_paged.checks.status import Status
from jax_paged.layout import POOLS, pool_of_v, slots_first

from ..oracle import ancestors
from .page_model import Config, Model, Row
from .report import Report, Stop

STEPS = 50  # of a run of the machine; a step is one operation or more
BATCH = 3  # rows in a call
WIDE = 2**31 - 1


CONFIGS = [
    Config(num_pages=9, max_seqs=5, pages_per_seq=6, page_size=1, layout="HND"),
    Config(num_pages=5, max_seqs=5, pages_per_seq=3, page_size=2, layout="rpa"),
    Config(num_pages=9, max_seqs=6, pages_per_seq=4, page_size=5, layout="NHD"),
    Config(num_pages=7, max_seqs=6, pages_per_seq=3, page_size=16, layout="HND"),
    Config(num_pages=9, max_seqs=5, pages_per_seq=6, page_size=1, layout="NHD", windows=True),
    Config(num_pages=8, max_seqs=5, pages_per_seq=4, page_size=3, layout="HND", windows=True),
    Config(num_pages=12, max_seqs=6, pages_per_seq=5, page_size=4, layout="HND", windows=True),
]


# One compiled program per verb and configuration, with the state donated.
_reserve = jax.jit(KVState.reserve, donate_argnums=0)
_reserve_one = jax.jit(lambda kv, rows: kv.reserve(rows, 1), donate_argnums=0)
_release = jax.jit(KVState.release, donate_argnums=0)
_fork = jax.jit(KVState.fork, donate_argnums=0)
_truncate = jax.jit(KVState.truncate, donate_argnums=0)
_commit = jax.jit(KVState.commit_tree, donate_argnums=0)
_set_window = jax.jit(KVState.set_window, donate_argnums=0)
_reset = jax.jit(KVState.reset, donate_argnums=0)


@functools.partial(jax.jit, static_argnames="size", donate_argnums=0)
def _step(kv, rows, q_lens, values, parents, size):
    """A step that writes values[t] as K and -values[t] as V of token t, layers told apart."""
    kv, batch, status = kv.step(rows, q_lens, num_tokens=size, tree_parents=parents)
    for layer in kv.layers:
        k = jnp.full((size, 1, 1), layer / 2, jnp.float32) + values[:, None, None]
        kv = write(k, -k, kv, batch, layer=layer, implementation="reference")
    return kv, batch, status


@jax.jit
def _observe(kv):
    """All that the checks look at, in one transfer; pools as [layer, page, slot]."""
    table = kv.table
    both = kv.k_pages, pool_of_v(kv.k_pages, kv.v_pages, kv.layout)
    pools = [
        slots_first(x, kv.layout, pool)[..., 0, 0] for x, pool in zip(both, POOLS, strict=True)
    ]
    queries = {
        "free_rows": table.free_rows,
        "num_free": table.free_pages,
        "peak": table.peak_pages,
        "total": table.total_tokens,
        "empty": table.is_empty,
    }
    return table, pools, queries


def _wide(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


ACTIONS = [
    "append", "append", "commit", "commit", "drain", "fork", "fork", "grow", "grow", "grow",
    "release", "reserve", "reserve_one", "step", "truncate", "truncate_shared", "truncate_shared",
    "set_window", "set_window", "slide", "slide",
]  # fmt: skip
picks = st.lists(st.integers(0, 31), min_size=BATCH, max_size=BATCH)
amounts = st.lists(st.integers(0, 63), min_size=BATCH, max_size=BATCH)


class PagesMachine(RuleBasedStateMachine):
    operations: ClassVar[int] = 0
    copies: ClassVar[int] = 0  # pages that truncate had to copy
    moves: ClassVar[int] = 0  # rows in which commit_tree had to move tokens
    slides: ClassVar[int] = 0  # pages that slid away
    moves_behind_gap: ClassVar[int] = 0  # rows in which commit_tree did, behind such pages
    outcomes: ClassVar[Counter] = Counter()  # of (verb, status)

    @initialize(config=st.sampled_from(CONFIGS))
    def create(self, config):
        self.config = config
        self.model = Model(config)
        self.next_value = 1
        self.kv = KVState.create(
            num_layers=2,
            num_pages=config.num_pages,
            page_size=config.page_size,
            num_kv_heads=1,
            head_dim=1,
            max_seqs=config.max_seqs,
            pages_per_seq=config.pages_per_seq,
            dtype="float32",
            layout=config.layout,
            max_tree=config.max_tree,
            windows=config.windows,
        )

    def choose(self, picks: list[int], among: list[int]) -> list[int]:
        """Row ids: mostly different ones of `among`, else -1, any row, a duplicate or a wild id."""
        among, rows = list(among), []
        for pick in picks:
            if pick == 31:
                rows.append(rows[-1] if rows else self.config.max_seqs)
            elif pick == 30:
                wild = [-2, -WIDE - 1, self.config.max_seqs, WIDE, 0]
                rows.append(wild[self.next_value % len(wild)])
            elif pick in (28, 29):
                rows.append(self.next_value % self.config.max_seqs)
            elif pick > 26 or not among:
                rows.append(-1)
            else:
                rows.append(among.pop(pick % len(among)))
        return rows

    def free_rows(self) -> list[int]:
        return [row for row in range(self.config.max_seqs) if row not in self.model.rows]

    def rows_with_tree(self) -> list[int]:
        return sorted(row for row, has in self.model.rows.items() if has.tree)

    def settled_rows(self) -> list[int]:
        """The live rows without a tree."""
        return sorted(row for row, has in self.model.rows.items() if not has.tree)

    def growable_rows(self) -> list[int]:
        """The live rows without a tree and one free row, if there is one."""
        return self.settled_rows() + self.free_rows()[:1]

    def length_of(self, row: int) -> int:
        return len(self.model.rows[row].tokens) if row in self.model.rows else 0

    def part_of(self, row: int, amount: int) -> int:
        """A number up to the row's length, often all of it, now and then one outside."""
        length = self.length_of(row)
        if amount > 40:
            return {63: length + 1, 62: -1, 61: WIDE}.get(amount, length)
        return amount % (length + 1)

    def agree(self, name: str, status, expected: list[Status]) -> bool:
        """Compares everything; True if the operation took effect."""
        type(self).operations += 1
        status = np.asarray(status).tolist()
        assert status == [int(s) for s in expected], (name, status, expected)
        self.outcomes.update((name, Status(s)) for s in status)
        self.check()
        return not any(status)

    def check(self):
        config, model = self.config, self.model
        table, (k_pool, v_pool), queries = jax.device_get(_observe(self.kv))

        # The table by itself.
        held = [p for p in table.page_table.ravel().tolist() if p >= 0]
        num_free = int(table.num_free)
        free = table.free_stack[:num_free].tolist()
        assert len(set(free)) == num_free
        assert not set(free) & set(held)
        assert len(set(held)) + num_free == config.num_pages
        counts = Counter(held)
        assert table.ref_counts.tolist() == [counts[p] for p in range(config.num_pages)]
        assert table.pages_held.tolist() == (table.page_table >= 0).sum(axis=1).tolist()

        # The table against the model.
        assert table.generations.tolist() == model.releases
        assert free == model.free
        assert table.is_live.tolist() == [r in model.rows for r in range(config.max_seqs)]
        for r in range(config.max_seqs):
            row = model.rows.get(r, Row())
            unused = [-1] * (config.pages_per_seq - len(row.pages))
            assert table.page_table[r].tolist() == row.pages + unused
            assert table.seq_lens[r] == len(row.tokens)
            assert table.tree_sizes[r] == len(row.tree)
            assert table.tree_parents[r, : len(row.tree)].tolist() == row.tree
            # Whatever may be written next is in no other row.
            for page, start in zip(row.pages, row.starts, strict=True):
                assert start + config.page_size <= row.root or table.ref_counts[page] == 1
            if config.windows:
                self.check_window(table.windows, r, row)
        assert queries["free_rows"].tolist() == (~table.is_live).tolist()
        assert queries["num_free"] == num_free
        assert queries["peak"] == model.peak
        assert queries["total"] == sum(len(row.tokens) for row in model.rows.values())
        assert queries["empty"] == (not model.rows)

        # Every token, through the page table.
        for r, row in model.rows.items():
            ids = table.page_table[r, : len(row.pages)]
            offsets = np.arange(config.page_size)
            places = np.asarray(row.starts, int)[:, None] + offsets[None, :]
            written = places < len(row.tokens)
            tokens = np.asarray(row.tokens, np.float32)[places[written]]
            for layer in range(2):
                want = tokens + np.float32(layer / 2)
                np.testing.assert_array_equal(k_pool[layer, ids][written], want)
                np.testing.assert_array_equal(v_pool[layer, ids][written], -want)

    def check_window(self, windows, r: int, row: Row):
        found = [x[r] for x in (windows.window, windows.num_pinned, windows.slot_offset)]
        assert found == [row.window, row.pinned, row.gone]
        # The slots of the row hold the tokens that they should: all that a next query may see.
        visible = set(range(max(0, row.begin(row.root) if row.window else 0), len(row.tokens)))
        visible |= set(range(min(row.pinned, len(row.tokens))))
        slots = range(len(row.pages) * self.config.page_size)
        tokens = [slot if slot < row.pinned else slot + row.gone for slot in slots]
        assert visible <= set(tokens)
        for slot, token in zip(slots, tokens, strict=True):
            if token in visible:
                column, offset = divmod(slot, self.config.page_size)
                assert token == row.starts[column] + offset

    @rule(action=st.sampled_from(ACTIONS), picks=picks, children=picks, amounts=amounts)
    def act(self, action, picks, children, amounts):
        # One rule for all, since hypothesis switches rules off at random: few runs had them all.
        if action == "fork":
            self.fork(picks, children, amounts)
        elif action in ("reserve_one", "release"):
            getattr(self, action)(picks)
        elif action == "grow":
            self.grow(picks, children, amounts)
        elif action == "drain":
            self.drain(picks[0])
        elif action in ("set_window", "slide"):
            getattr(self, action)(picks, children, amounts)
        else:
            getattr(self, action)(picks, amounts)

    def reserve(self, picks, amounts):
        rows = self.choose(picks, self.growable_rows())
        room = self.config.pages_per_seq * self.config.page_size
        special = {63: WIDE, 62: -1, 61: room, 60: room + 1}
        small = 2 * self.config.page_size + 1
        self.do_reserve(rows, [special.get(amount, amount % small) for amount in amounts])

    def do_reserve(self, rows, counts):
        self.kv, status = _reserve(self.kv, _wide(rows), _wide(counts))
        gone = sum(has.gone for has in self.model.rows.values())
        expected = self.model.reserve(rows, counts)
        gone = sum(has.gone for has in self.model.rows.values()) - gone
        type(self).slides += gone // self.config.page_size
        if not self.agree("reserve", status, expected):
            self.retry(expected, rows, lambda rows: self.do_reserve(rows, counts))

    def reserve_one(self, picks):
        rows = self.choose(picks, sorted(self.model.rows))
        self.kv, status = _reserve_one(self.kv, _wide(rows))
        self.agree("reserve_one", status, self.model.reserve(rows, [1] * BATCH))

    def drain(self, pick):
        """Takes the free pages, as far as one row may."""
        row = self.choose([min(pick, 26)], self.growable_rows())[0]
        has = self.model.rows.get(row, Row())
        new = min(len(self.model.free), self.config.pages_per_seq - len(has.pages))
        self.do_reserve([row, -1, -1], [self.model.room(has) + new * self.config.page_size, 0, 0])

    def step(self, picks, amounts):
        rows = self.choose(picks, self.settled_rows())
        q_lens = []
        for row, amount in zip(rows, amounts, strict=True):
            has = self.model.rows.get(row, Row())
            room = self.model.room(has)
            special = {63: WIDE, 62: -1, 61: room + 1, 60: room}
            q_lens.append(special.get(amount, amount % (room + 1)))
        self.do_step(rows, q_lens)

    def append(self, picks, amounts):
        rows = self.choose(picks, self.growable_rows())
        counts = [1 + amount % self.config.page_size for amount in amounts]
        self.do_reserve(rows, counts)
        self.do_step(rows, counts)

    def grow(self, picks, kinds, amounts):
        """New nodes for trees, old and new, next to rows that take plain tokens."""
        self.do_grow(
            self.choose(picks, self.rows_with_tree() + self.growable_rows()), kinds, amounts
        )

    def do_grow(self, rows, kinds, amounts):
        counts = [1 + amount % 3 for amount in amounts]
        parents = []
        for row, count, kind in zip(rows, counts, kinds, strict=True):
            has = self.model.rows.get(row, Row())
            nodes = range(len(has.tree), len(has.tree) + count)
            if kind < 4:
                found = [node - 1 for node in nodes]
            elif kind > 26 or (kind > 20 and not has.tree):
                found = [NO_TREE] * count
            else:
                found = [(kind * 7 + node * 5) % (node + 1) - 1 for node in nodes]
            if kind in (24, 25):
                found[-1] = {24: nodes[-1], 25: NO_TREE}[kind]
            parents.append(found)
        self.do_reserve(rows, counts)
        self.do_step(rows, counts, parents)

    def do_step(self, rows, q_lens, parents=None):
        """A step; parents: of each row's tokens, None where no row has a tree."""
        size = self.config.batch_tokens
        values = [float(self.next_value + i) for i in range(size)]
        self.next_value += size
        starts = [self.length_of(row) for row in rows]
        roots = [self.model.rows[row].root if row in self.model.rows else 0 for row in rows]
        flat = None
        if parents is not None:
            flat = [parent for mine in parents for parent in mine]
            flat = (flat + [NO_TREE, WIDE] * size)[:size]
        self.kv, batch, status = _step(
            self.kv, _wide(rows), _wide(q_lens), np.asarray(values, np.float32),
            None if flat is None else _wide(flat), size,
        )  # fmt: skip
        expected = self.model.step(rows, q_lens, values, flat)
        went_well = self.agree("grow" if parents else "step", status, expected)
        rows_done = rows if went_well else [-1] * BATCH
        self.check_batch(batch, rows_done, q_lens if went_well else [0] * BATCH, starts)
        if parents is not None:
            self.check_trees(batch, rows_done, roots, q_lens)
        if not went_well:
            self.retry(expected, rows, lambda rows: self.do_step(rows, q_lens, parents))

    def check_trees(self, batch, rows, roots, q_lens):
        assert batch.tree.shape == (BATCH, self.config.max_tree, 2)
        for i, row in enumerate(rows):
            has = self.model.rows[row] if row != -1 else Row()
            size = len(has.tree)
            assert batch.tree_sizes[i] == size
            paths = [has.path(node) for node in range(size)]
            sees = [[j in path for j in range(size)] for path in paths]
            assert ancestors(batch.tree[i, :size]).tolist() == sees
            if size:
                begin = int(batch.cu_q_lens[i])
                depths = [len(path) - 1 for path in paths][-q_lens[i] :]
                got = batch.positions[begin : begin + q_lens[i]].tolist()
                assert got == [roots[i] + depth for depth in depths]

    def set_window(self, picks, kinds, amounts):
        """Windows for rows that have none, now and then for another."""
        if not self.config.windows:
            return self.append(picks, amounts)
        among = [row for row, has in self.model.rows.items() if not has.window]
        rows = self.choose(picks, among + (self.free_rows()[:1] if picks[0] % 3 == 0 else []))
        windows = [1 + amount % (2 * self.config.page_size + 2) for amount in amounts]
        pinned = [
            {31: WIDE, 30: -1, 29: window}.get(kind, kind % window)
            for kind, window in zip(kinds, windows, strict=True)
        ]
        windows = [WIDE if amount == 63 else w for amount, w in zip(amounts, windows, strict=True)]
        return self.do_set_window(rows, windows, pinned)

    def do_set_window(self, rows, windows, pinned):
        self.kv, status = _set_window(self.kv, _wide(rows), _wide(windows), _wide(pinned))
        expected = self.model.set_window(rows, windows, pinned)
        if not self.agree("set_window", status, expected):
            self.retry(expected, rows, lambda rows: self.do_set_window(rows, windows, pinned))

    def slide(self, picks, kinds, amounts):
        """A page more for rows with a window, and a tree behind it."""
        windowed = [row for row in self.settled_rows() if self.model.rows[row].window]
        if not windowed:
            return self.set_window(picks, kinds, amounts)
        rows = self.choose(picks, windowed)
        self.do_reserve(rows, [self.config.page_size] * BATCH)
        self.do_step(rows, [self.config.page_size] * BATCH)
        self.do_grow(rows, [5] * BATCH, [2] * BATCH)  # three roots each
        self.commit(picks, amounts)

    def commit(self, picks, amounts):
        rows = self.choose(picks, self.rows_with_tree())
        leaves = []
        for row, amount in zip(rows, amounts, strict=True):
            size = len(self.model.rows[row].tree) if row in self.model.rows else 0
            special = {63: size, 62: -2, 61: WIDE}
            leaves.append(special.get(amount, amount % (size + 1) - 1))
        self.do_commit(rows, leaves)

    def do_commit(self, rows, leaves):
        self.kv, status = _commit(self.kv, _wide(rows), _wide(leaves))
        before = {row: list(has.tokens) for row, has in self.model.rows.items()}
        expected = self.model.commit(rows, leaves)
        for row, has in self.model.rows.items():
            moved = has.tokens != before[row][: len(has.tokens)]
            type(self).moves += moved
            type(self).moves_behind_gap += moved and has.gone > 0
        if not self.agree("commit", status, expected):
            self.retry(expected, rows, lambda rows: self.do_commit(rows, leaves))

    def check_batch(self, batch, rows, q_lens, starts):
        config = self.config
        batch = jax.device_get(batch)
        table, slots, positions, cu_q_lens = [], [], [], [0]
        for row, q_len, start in zip(rows, q_lens, starts, strict=True):
            has = self.model.rows[row] if row != -1 else Row()
            table.append(has.pages + [-1] * (config.pages_per_seq - len(has.pages)))
            if row == -1:  # its tokens keep their places
                places = min(max(0, q_len), config.batch_tokens - len(slots))
                slots += [-1] * places
                positions += [0] * places
                cu_q_lens.append(len(slots))
                continue
            for position in range(start, start + q_len):
                page = has.page_of(position)
                assert self.model.holders(page) == 1
                slots.append(page * config.page_size + position % config.page_size)
                positions.append(position)
            if has.tree:  # by depth: check_trees
                where = slice(len(positions) - q_len, len(positions))
                positions[where] = batch.positions[where].tolist()
            cu_q_lens.append(len(slots))
        windows = (batch.sliding_window, batch.num_pinned, batch.slot_offset)
        if config.windows:
            live = [self.model.rows[row] if row != -1 else Row() for row in rows]
            want = [(has.window, has.pinned, has.gone) for has in live]
            assert np.stack(windows, axis=1).tolist() == [list(row) for row in want]
        else:
            assert windows == (None, None, None)
        padding = config.batch_tokens - len(slots)
        assert batch.page_table.tolist() == table
        assert batch.seq_lens.tolist() == [self.length_of(row) for row in rows]
        assert batch.cu_q_lens.tolist() == cu_q_lens
        last = max((i for i in range(BATCH) if rows[i] != -1), default=-1)
        assert batch.num_seqs.tolist() == [last + 1]
        assert batch.slot_mapping.tolist() == slots + [-1] * padding
        assert batch.positions.tolist() == positions + [0] * padding

    def release(self, picks):
        if len(self.model.rows) == self.config.max_seqs and sum(picks) % 8 == 0:
            return self.reset()
        # Half the time one row only, so that the table stays filled.
        rows = self.choose(picks, sorted(self.model.rows))
        self.do_release(rows if picks[0] % 2 else [*rows[:1], -1, -1])

    def do_release(self, rows):
        self.kv, status = _release(self.kv, _wide(rows))
        expected = self.model.release(rows)
        if not self.agree("release", status, expected):
            self.retry(expected, rows, self.do_release)

    def fork(self, parents, children, amounts):
        live = self.settled_rows()
        long = [row for row in live if self.length_of(row) >= self.config.page_size]
        # The parents may repeat; now and then one is not live.
        among = [long or live if pick < 24 else [pick % self.config.max_seqs] for pick in parents]
        parent = [self.choose([pick], rows)[0] for pick, rows in zip(parents, among, strict=True)]
        child = self.choose(children, self.free_rows())
        lengths = []
        for p, amount in zip(parent, amounts, strict=True):
            has = self.model.rows.get(p, Row())
            pinned = amount % (self.model.most_to_fork(has) + 1)
            lengths.append(pinned if has.window and amount < 58 else self.part_of(p, amount))
        self.do_fork(parent, child, lengths)

    def do_fork(self, parent, child, lengths):
        self.kv, status = _fork(self.kv, _wide(parent), _wide(child), _wide(lengths))
        expected = self.model.fork(parent, child, lengths)
        if not self.agree("fork", status, expected):
            self.retry(expected, child, lambda child: self.do_fork(parent, child, lengths))

    def truncate(self, picks, amounts):
        open_rows = self.rows_with_tree() if amounts[0] % 16 == 0 else []  # which it refuses
        rows = self.choose(picks, self.settled_rows() + open_rows)
        counts = []
        for row, amount in zip(rows, amounts, strict=True):
            most = min(self.length_of(row), self.config.page_size + 1)
            counts.append(amount % (most + 1) if amount % 4 else self.part_of(row, amount))
        self.do_truncate(rows, counts)

    def sharing_rows(self) -> list[int]:
        rows = self.model.rows.items()
        sharing = (r for r, row in rows if row.pages and self.model.holders(row.pages[0]) > 1)
        return sorted(r for r in sharing if not self.model.rows[r].tree)

    def truncate_shared(self, picks, amounts):
        """Cuts rows inside a page that they share."""
        among = self.sharing_rows() if self.config.page_size > 1 else []
        rows = self.choose([min(pick, 27) for pick in picks], among)
        counts = []
        for row, amount in zip(rows, amounts, strict=True):
            held = self.model.rows[row].pages if row != -1 else []
            shared = sum(self.model.holders(page) > 1 for page in held)
            inside = 1 + amount % max(1, self.config.page_size - 1)
            gone = self.model.rows[row].gone if row != -1 else 0
            tokens = gone + shared * self.config.page_size - inside
            counts.append(self.length_of(row) - tokens)
        self.do_truncate(rows, counts)

    def do_truncate(self, rows, counts):
        self.kv, status = _truncate(self.kv, _wide(rows), _wide(counts))
        before = {row: list(has.pages) for row, has in self.model.rows.items()}
        expected = self.model.truncate(rows, counts)
        for row, has in self.model.rows.items():
            type(self).copies += has.pages != before[row][: len(has.pages)]
        if not self.agree("truncate", status, expected):
            self.retry(expected, rows, lambda rows: self.do_truncate(rows, counts))

    def reset(self):
        self.kv = _reset(self.kv)
        self.model.reset()
        self.agree("reset", [0], [Status.OK])

    def retry(self, statuses, rows, call):
        """The same call with the failed rows left out must go through."""
        rest = [r if s == Status.OK else -1 for r, s in zip(rows, statuses, strict=True)]
        if any(row != -1 for row in rest):
            before = self.outcomes.copy()
            call(rest)
            gained = self.outcomes - before
            assert all(status == Status.OK for _, status in gained), (statuses, rest, gained)


def run(report: Report, stop: Stop, first_seed: int) -> None:
    """Runs the machine with one seed after another."""
    number = first_seed
    while not (stop.is_due() or report.is_hopeless):
        before = PagesMachine.operations
        try:
            run_machine(PagesMachine, num_operations=1500, seed_number=number)
        except AssertionError as error:  # hypothesis has printed the shortest way to it
            report.fail(f"state, seed {number}: {error}")
        done = PagesMachine.operations - before
        report.add("state", {}, cases=done)
        stop.done += done
        number += 1
    for (verb, status), count in sorted(PagesMachine.outcomes.items()):
        report.count("state", f"{verb} {status.name}", count)


def run_machine(machine, *, num_operations: int, seed_number: int | None) -> None:
    """Runs a state machine for about that many operations; without a seed the same ones always."""
    options = settings(
        max_examples=num_operations // 75,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=seed_number is None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    factory = machine if seed_number is None else seed(seed_number)(machine)
    run_state_machine_as_test(factory, settings=options)
