# SPDX-License-Identifier: Apache-2.0
"""What sequences in a cache live through, against a dense oracle in float64 without pages.

The scenarios are those of TVM's tests of its paged cache, told in our verbs: prefill and decode,
remove, fork at every position, chains of forks, pop, sliding windows and forks under them, token
trees, layers with windows of their own. Each forward runs in one jit, with RoPE, in f32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

import jax_paged as jp
from jax_paged import NO_TREE, KVState, Status
from jax_paged.ops.rope import inverse_frequencies, rope_tables

NUM_LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
ROWS, TOKENS = 4, 48  # of a forward
FREQUENCIES = inverse_frequencies(DIM, 1e4)

pytestmark = pytest.mark.parametrize("implementation", first_of(["native", "reference"], 1))


def _turned(x, positions):
    cos, sin = (part[:, None] for part in rope_tables(positions, FREQUENCIES))
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


@functools.partial(jax.jit, static_argnames=("windows", "implementation"), donate_argnums=0)
def _forward(kv, rows, q_lens, qkv, parents, *, windows, implementation):
    """All layers of one step: (state, out [layers, T, heads, dim], bool[]: nothing failed)."""
    kv, reserved = kv.reserve(rows, q_lens)
    kv, step, status = kv.step(rows, q_lens, num_tokens=TOKENS, tree_parents=parents)
    k_pages, v_pages, outs = kv.k_pages, kv.v_pages, []
    for layer in range(NUM_LAYERS):
        q, k, v = jnp.split(qkv[layer], [HEADS, HEADS + KV_HEADS], axis=1)
        q, k = _turned(q, step.positions), _turned(k, step.positions)
        k_pages, v_pages = jp.write_kv(
            k_pages, v_pages, k, v, step.slot_mapping, layer=layer, implementation=implementation
        )
        options = {"sliding_window": windows and windows[layer]}
        if step.slot_offset is not None:
            options = {
                "sliding_window": step.sliding_window,
                "num_pinned": step.num_pinned,
                "slot_offset": step.slot_offset,
            }
        out = jp.ragged_paged_attention(
            q, k_pages, v_pages, step.page_table, step.seq_lens, step.cu_q_lens, step.num_seqs,
            layer=layer, tree=step.tree, tree_sizes=step.tree_sizes,
            implementation=implementation, **options,
        )  # fmt: skip
        outs.append(out)
    kv = kv.replace(k_pages=k_pages, v_pages=v_pages)
    return kv, jnp.stack(outs), jnp.all(reserved == 0) & jnp.all(status == 0)


@dataclasses.dataclass
class Sequence:
    """The oracle's row: K and V of each token it ever had, [layers, kv_heads, dim], unturned."""

    tokens: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)  # of the last tokens: its tree
    window: int = 0
    pinned: int = 0

    @property
    def root(self) -> int:
        return len(self.tokens) - len(self.parents)

    def path(self, node: int) -> list[int]:
        return [] if node == -1 else [*self.path(self.parents[node]), node]

    def seen_by(self, index: int, layer_window: int | None) -> list[tuple[int, int]]:
        """(index, position) of the tokens that the token sees; the last one is itself."""
        if index < self.root:
            seen = [(i, i) for i in range(index + 1)]
        else:
            path = self.path(index - self.root)
            seen = [(i, i) for i in range(self.root)]
            seen += [(self.root + node, self.root + depth) for depth, node in enumerate(path)]
        query = seen[-1][1]
        if self.window:
            first = query - (self.window - self.pinned) + 1
            return [(i, p) for i, p in seen if p < self.pinned or p >= first]
        first = query - layer_window + 1 if layer_window else 0
        return [(i, p) for i, p in seen if p >= first]


def _turn(x: np.ndarray, position: int) -> np.ndarray:
    """RoPE in float64: pairs (i, i + dim / 2) of [..., dim] as complex numbers."""
    low, high = np.split(x.astype(np.float64), 2, axis=-1)
    turned = (low + 1j * high) * np.exp(1j * position * FREQUENCIES)
    return np.concatenate([turned.real, turned.imag], axis=-1)


class Cache:
    """A KVState and its oracle; every forward is compared."""

    def __init__(self, implementation, *, page_size=4, num_pages=144, max_seqs=12,
                 pages_per_seq=48, windows=False, layer_windows=None):  # fmt: skip
        self.kv = KVState.create(
            num_layers=NUM_LAYERS, num_pages=num_pages, page_size=page_size,
            num_kv_heads=KV_HEADS, head_dim=DIM, max_seqs=max_seqs, pages_per_seq=pages_per_seq,
            dtype="float32", max_tree=8, windows=windows,
        )  # fmt: skip
        # What nobody has written must never count.
        nan = jnp.full_like(self.kv.k_pages, jnp.nan)
        self.kv = self.kv.replace(k_pages=nan, v_pages=jnp.copy(nan))
        self.layer_windows = layer_windows
        self.run = functools.partial(_forward, windows=layer_windows, implementation=implementation)
        self.rows: dict[int, Sequence] = {}
        self.rng = np.random.default_rng(0)

    def step(self, q_lens: dict[int, int], trees: dict[int, list[int]] | None = None):
        """New tokens for some rows; trees: the parents of the tokens of a row, for nodes."""
        rows, counts = list(q_lens), list(q_lens.values())
        qkv = self.rng.standard_normal((NUM_LAYERS, TOKENS, HEADS + 2 * KV_HEADS, DIM), np.float32)
        parents = None
        if trees is not None:
            nested = [trees.get(row, [NO_TREE] * count) for row, count in q_lens.items()]
            flat = [parent for mine in nested for parent in mine]
            parents = np.array(flat + [NO_TREE] * (TOKENS - len(flat)))
        padding = [-1] * (ROWS - len(rows))
        self.kv, out, fine = self.run(
            self.kv, np.array(rows + padding), np.array(counts + padding), qkv, parents
        )
        assert fine
        token = 0
        for row, count in q_lens.items():
            sequence = self.rows.setdefault(row, Sequence())
            for i in range(count):
                k, v = qkv[:, token + i, HEADS:-KV_HEADS], qkv[:, token + i, -KV_HEADS:]
                sequence.tokens.append((k, v))
            sequence.parents += (trees or {}).get(row, [])
            for i in range(count):
                index = len(sequence.tokens) - count + i
                want = self.attend(sequence, index, qkv[:, token + i, :HEADS])
                np.testing.assert_allclose(out[:, token + i], want, atol=1e-4, rtol=1e-4)
            token += count

    def attend(self, sequence: Sequence, index: int, q: np.ndarray) -> np.ndarray:
        """Dense attention in float64 of one token: q and the result [layers, heads, dim]."""
        out = np.empty(q.shape)
        for layer in range(NUM_LAYERS):
            window = self.layer_windows[layer] if self.layer_windows else None
            seen = sequence.seen_by(index, window)
            query = _turn(q[layer], seen[-1][1])
            k = np.stack([_turn(sequence.tokens[i][0][layer], p) for i, p in seen])
            v = np.stack([sequence.tokens[i][1][layer] for i, _ in seen]).astype(np.float64)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                logits = k[:, kv_head] @ query[head] / np.sqrt(DIM)
                weights = np.exp(logits - logits.max())
                out[layer, head] = weights @ v[:, kv_head] / weights.sum()
        return out

    def fork(self, parent: int, children: list[int], lengths: list[int]) -> None:
        self.kv, status = self.kv.fork([parent] * len(children), children, lengths)
        assert status.tolist() == [Status.OK] * len(children)
        for child, length in zip(children, lengths, strict=True):
            tokens = self.rows[parent].tokens[:length]
            self.rows[child] = Sequence(tokens, pinned=length)

    def pop(self, counts: dict[int, int]) -> None:
        self.kv, status = self.kv.truncate(list(counts), list(counts.values()))
        assert status.tolist() == [Status.OK] * len(counts)
        for row, count in counts.items():
            del self.rows[row].tokens[len(self.rows[row].tokens) - count :]

    def remove(self, rows: list[int]) -> None:
        self.kv, status = self.kv.release(rows)
        assert status.tolist() == [Status.OK] * len(rows)
        for row in rows:
            del self.rows[row]

    def set_window(self, row: int, window: int, num_pinned: int) -> None:
        if row not in self.rows:
            self.kv, _ = self.kv.reserve([row], 0)
            self.rows[row] = Sequence()
        self.kv, status = self.kv.set_window([row], window, num_pinned)
        assert status.tolist() == [Status.OK]
        sequence = self.rows[row]
        sequence.window, sequence.pinned = window, max(num_pinned, sequence.pinned)

    def commit(self, leaves: dict[int, int]) -> None:
        self.kv, status = self.kv.commit_tree(list(leaves), list(leaves.values()))
        assert status.tolist() == [Status.OK] * len(leaves)
        for row, leaf in leaves.items():
            sequence = self.rows[row]
            kept = [sequence.tokens[sequence.root + node] for node in sequence.path(leaf)]
            sequence.tokens = sequence.tokens[: sequence.root] + kept
            sequence.parents = []

    def pages_of(self, row: int) -> int:
        return int(self.kv.table.pages_held[row])

    def is_empty(self) -> bool:
        return int(self.kv.table.free_pages) == self.kv.table.num_pages


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefill_and_decode(implementation, page_size):
    cache = Cache(implementation, page_size=page_size)
    cache.step({0: 7, 1: 16, 3: 1})
    cache.step({2: 33, 0: 1})
    cache.step({5: 8, 1: 15, 3: 4, 0: 1})
    for _ in range(5):
        cache.step({row: 1 for row in (3, 0, 2, 1)})
    cache.step({5: 1, 4: 30})


def test_removed_rows_make_room_and_leave_the_others_alone(implementation):
    cache = Cache(implementation, num_pages=12)
    cache.step({0: 12, 1: 12, 2: 12})
    for gone, new in ((1, 7), (0, 8), (7, 1)):
        cache.remove([gone])
        cache.step({new: 11, 2: 1})
        cache.step({new: 1})
        cache.pop({2: 1})
    cache.remove([8, 2, 1])
    assert cache.is_empty()


def test_a_row_forks_at_every_position(implementation):
    cache = Cache(implementation)
    cache.step({0: 13})
    for first in range(0, 14, 3):
        lengths = [min(first + i, 13) for i in range(3)]
        cache.fork(0, [1, 2, 3], lengths)
        cache.step({1: 1, 0: 2, 2: 5, 3: 3})
        cache.step({3: 1, 2: 1, 1: 1, 0: 1})
        cache.remove([2, 1, 3])
        cache.pop({0: 3})
    cache.remove([0])
    assert cache.is_empty()


def test_forks_of_forks_to_any_depth(implementation):
    cache = Cache(implementation)
    cache.step({0: 5})
    for child in range(1, 12):
        # At a page's edge, in the middle of the last page, and before what the parent brought.
        length = len(cache.rows[child - 1].tokens)
        cache.fork(child - 1, [child], [(length // 4 * 4, length, length - 2)[child % 3]])
        cache.step({child: 3, child - 1: 1})
    for first in (8, 4, 0):
        cache.step({first + i: 1 + i for i in range(4)})
    cache.remove([0, 5, 10])
    cache.step({11: 2, 9: 1, 1: 4})


def test_popped_tokens_are_forgotten_also_where_they_were_shared(implementation):
    cache = Cache(implementation)
    cache.step({0: 14, 1: 9})
    cache.fork(0, [2, 3], [14, 12])
    for counts in ({0: 1, 2: 5}, {3: 4, 1: 9}, {2: 2, 0: 9}, {0: 4, 3: 1}):
        cache.pop(counts)
        cache.step({row: 1 + row for row in counts})
    cache.step({row: 6 for row in range(4)})


WINDOWS = [(5, 0), (8, 3), (9, 4), (13, 8)]  # (window, pinned tokens), one per row


@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_slide_by_windows_of_their_own(implementation, page_size):
    cache = Cache(implementation, page_size=page_size, windows=True)
    for row, (window, pinned) in enumerate(WINDOWS[:3]):
        cache.set_window(row, window, pinned)
    for q_lens in ((3, 1, 2, 6), (9, 12, 1, 4), (1, 1, 30, 5), (17, 2, 2, 1)):
        cache.step(dict(enumerate(q_lens)))
    cache.set_window(3, *WINDOWS[3])  # only now: it has been whole up to here
    for _ in range(12):
        cache.step({row: 1 for row in range(4)})
    cache.step({0: 24, 3: 24})
    for row, (window, pinned) in enumerate(WINDOWS):
        cache.step({row: 1})
        # The pinned part, the window of the last token, and pages that both have begun.
        most = -(-pinned // page_size) + -(-(window - pinned) // page_size) + 1
        assert cache.pages_of(row) <= most


def test_windows_and_forks(implementation):
    cache = Cache(implementation, windows=True)
    cache.set_window(0, 12, 7)
    cache.step({0: 23})
    cache.fork(0, [1, 2, 3], [7, 4, 2])  # within the pinned tokens, also at a page's edge
    cache.step({3: 9, 1: 10, 0: 2, 2: 1})
    cache.set_window(1, 9, 0)  # its seven forked tokens are pinned
    cache.set_window(2, 8, 5)
    for _ in range(3):
        cache.step({0: 3, 1: 5, 2: 4, 3: 1})
    cache.fork(3, [4], [11])  # a row without a window forks anywhere
    cache.set_window(3, 4, 0)
    cache.step({3: 7, 4: 1})
    cache.step({3: 1, 4: 8, 1: 1})
    cache.remove([0, 3])
    cache.step({1: 5, 2: 5, 4: 5})
    cache.remove([1, 2, 4])
    assert cache.is_empty()


def test_a_pool_of_a_window_serves_a_row_of_any_length(implementation):
    cache = Cache(implementation, num_pages=5, windows=True)
    cache.set_window(0, 9, 2)
    for _ in range(12):
        cache.step({0: 5})
    cache.pop({0: 3})
    cache.step({0: 4})


FOREST = [-1, 0, 0, -1, 2, 2, 3]


def test_trees_are_grown_committed_and_dropped(implementation):
    cache = Cache(implementation)
    cache.step({0: 6, 1: 3, 2: 4}, {})
    cache.step({0: 7, 1: 4, 3: 2, 2: 3}, {0: FOREST, 1: [-1, 0, 1, 2], 2: [-1, -1, -1]})
    cache.step({1: 2, 2: 3}, {1: [3, 1], 2: [1, 3, 0]})  # before they are committed
    cache.commit({0: 5, 2: 4, 1: -1})
    cache.step({2: 1, 0: 2, 1: 5, 3: 1})
    cache.step({0: 2, 3: 7}, {0: [-1, 0], 3: FOREST})
    cache.commit({3: 6})
    cache.commit({0: 1})
    cache.step({0: 1, 3: 1})


def test_trees_in_rows_with_windows(implementation):
    cache = Cache(implementation, windows=True)
    cache.set_window(0, 7, 2)
    cache.set_window(1, 6, 0)
    cache.step({0: 15, 1: 11, 2: 5}, {})
    for leaves in ({0: 4, 1: 2}, {1: 6, 0: -1}, {0: 1, 1: 5}):
        cache.step({1: 7, 0: 7, 2: 1}, {0: FOREST, 1: FOREST})
        cache.commit(leaves)
        cache.step({0: 2, 1: 1, 2: 1})


def test_layers_have_windows_of_their_own(implementation):
    cache = Cache(implementation, layer_windows=(5, None))
    cache.step({0: 20, 1: 3})
    cache.fork(0, [2], [9])
    for _ in range(3):
        cache.step({2: 4, 0: 1, 1: 3})
    cache.pop({0: 13})
    cache.step({0: 2, 2: 1}, {0: [-1, -1]})
    cache.commit({0: 1})
    cache.step({0: 6})
