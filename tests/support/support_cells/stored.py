# SPDX-License-Identifier: Apache-2.0
"""States whose tokens are known: a dict model beside them says what each row holds.

Token value x has K = x + layer / 2 in all dimensions and V = -K; a latent row is like its K.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_paged as jp
from jax_paged import NO_TREE, KVState
from jax_paged.layout import pool_of_v, slots_first

WINDOW, PINNED, PAGE, HEADS, DIM = 6, 2, 4, 2, 16
WIDTH = 8  # tokens of a flat batch
SIZES = {
    "num_layers": 2, "num_pages": 24, "page_size": PAGE, "num_kv_heads": HEADS, "head_dim": DIM,
    "max_seqs": 4, "pages_per_seq": 8, "dtype": "float32", "max_tree": 8,
}  # fmt: skip
GROUPS = ("full", WINDOW, "mla")
CHANGES: dict[str, dict[str, Any]] = {
    "slid rows": {"layer_kinds": (WINDOW, WINDOW)},
    "pins": {"windows": True, "layout": "NHD"},
    "8-bit": {"dtype": "int8", "layout": "vllm5d"},
    "trees": {"layout": "rpa"},
    "latent": {"layer_kinds": ("mla", "mla"), "latent_dim": DIM},
    "groups": {"layer_kinds": GROUPS, "latent_dim": DIM},
}
TREE = [-1, 0, 0, 2]  # parents: nodes 0, 2 and 3 are a path


@functools.partial(jax.jit, static_argnames="cascade")
def _append(state, rows, q_lens, parents, cascade):
    return state.append(rows, q_lens, num_tokens=WIDTH, tree_parents=parents, cascade=cascade)


def append(state: KVState, rows: Any, q_lens: Any, parents: Any = None, cascade: Any = False):
    """`state.append` of WIDTH tokens, by one program for all layouts."""
    tables = state.bare
    same = tuple(dataclasses.replace(group, layout="HND") for group in tables.groups)
    tables = dataclasses.replace(tables, groups=same)
    tables, batch, status = _append(tables, rows, q_lens, parents, cascade)
    return state.with_tables(tables), batch, status


def write_values(state: KVState, batch: Any, values: np.ndarray, implementation: Any) -> KVState:
    """Writes a step's values, with `jp.write`."""
    for layer, kind in zip(state.layers, state.layer_kinds, strict=True):
        k = np.float32(values + layer / 2)
        if kind == "mla":
            k, v = np.broadcast_to(k[:, None], (WIDTH, DIM)), None
        else:
            k = np.broadcast_to(k[:, None, None], (WIDTH, HEADS, DIM))
            v = jnp.asarray(-k)
        state = jp.write(
            jnp.asarray(k), v, state, batch, layer=layer, implementation=implementation
        )
    return state


class Known:
    """A state and what it holds: row → values. The values of an open tree are the last ones."""

    def __init__(self, feature: str, **changes: Any):
        sizes = SIZES | CHANGES.get(feature, {}) | changes
        if "layer_kinds" in sizes:
            del sizes["num_layers"]
        self.state = KVState.create(**sizes)
        self.rows: dict[int, list[float]] = {}
        self.next = 1.0
        self.slides = feature in ("pins", "slid rows", "groups")
        self.grow([0], [5])
        if feature == "pins":
            self.do("set_window", [0], WINDOW, PINNED)
        for _ in range(3 if self.slides else 0):
            self.grow([0], [5])

    def grow(
        self, rows: Sequence[int], counts: Sequence[int], parents: Sequence[int] | None = None,
        cascade: bool = False, implementation: Any = None,
    ) -> Any:  # fmt: skip
        """Appends new values to rows, as a tree where there are parents; returns the batch."""
        values, flat = np.zeros(WIDTH, "f4"), 0
        for row, count in zip(rows, counts, strict=True):
            new = (self.next + np.arange(count)).tolist()
            values[flat : flat + count] = new
            self.rows[row] = [*self.rows.get(row, []), *new]
            self.next, flat = self.next + count, flat + count
        nodes = None
        if parents is not None:
            nodes = np.array([*parents, *[NO_TREE] * (WIDTH - len(parents))], np.int32)
        filled = [*rows, *[-1] * (2 - len(rows))], [*counts, *[0] * (2 - len(counts))]
        filled = [np.array(x, np.int32) for x in filled]
        self.state, batch, status = append(self.state, *filled, nodes, cascade)
        jp.check(status[: len(rows)])
        self.state = write_values(self.state, batch, values, implementation)
        return batch

    def do(self, verb: str, *arguments: Any) -> None:
        """A verb that has to succeed."""
        self.state, status = getattr(self.state, verb)(*map(np.int32, arguments))
        jp.check(status)

    def check(self) -> None:
        """Every row holds its values: those that its next token sees, and what is left beside."""
        slid = False
        for row, values in self.rows.items():
            for layer in self.state.layers:
                held = stored_values(self.state, layer, row)
                assert set(held) >= set(seen(self.state, layer, row)), (row, layer, held)
                slid |= len(held) < len(values)
                want = {token: values[token] for token in held}
                assert list(held) == list(want)
                np.testing.assert_allclose([*held.values()], [*want.values()], rtol=1e-6)
        assert slid == self.slides


def table_of(state: KVState, layer: int) -> tuple[Any, Any, int]:
    """(group, its table, the layer's number in it)."""
    number, index = state.find(layer)
    return state.groups[number], state.groups[number].table, index


def seen(state: KVState, layer: int, row: int) -> list[int]:
    """The tokens that the row's next token sees."""
    _, table, _ = table_of(state, layer)
    length = int(table.seq_lens[row]) - int(table.tree_sizes[row])
    window, pinned = 0, 0
    if table.windows is not None:
        window, pinned = int(table.windows.window[row]), int(table.windows.num_pinned[row])
    first = length - (window - pinned) + 1 if window else 0
    return [t for t in range(length) if t < pinned or t >= first]


def stored_slots(state: KVState, layer: int, row: int) -> dict[int, tuple[int, int]]:
    """Where each token of a row lies, (page, slot), of those that have not slid away."""
    _, table, _ = table_of(state, layer)
    offset = pinned = 0
    if table.windows is not None:
        offset, pinned = int(table.windows.slot_offset[row]), int(table.windows.num_pinned[row])
    found = {}
    for token in range(int(table.seq_lens[row])):
        slot = token if token < pinned else token - offset
        if offset and token >= pinned and slot < -(-pinned // PAGE) * PAGE:
            continue
        found[token] = int(table.page_table[row, slot // PAGE]), slot % PAGE
    return found


def stored_values(state: KVState, layer: int, row: int) -> dict[int, float]:
    """The values of a row's tokens; all heads and dimensions, and K and V, have to agree."""
    group, _, index = table_of(state, layer)
    places = stored_slots(state, layer, row)
    at = tuple(np.array([*places.values()], np.int32).reshape(-1, 2).T)
    if group.is_latent:
        k = np.asarray(group.k_pages)[index][at]
    else:
        pools = (group.k_pages, pool_of_v(group.k_pages, group.v_pages, group.layout))
        k, v = (
            slots_first(np.asarray(x)[index], group.layout, pool)[at].astype("f4")
            for x, pool in zip(pools, "kv", strict=True)
        )
        if group.k_scale is not None:
            scales = (np.asarray(x)[index].swapaxes(-2, -1) for x in (group.k_scale, group.v_scale))
            k, v = (x * s[at][..., None] for x, s in zip((k, v), scales, strict=True))
        np.testing.assert_array_equal(k, -v)
        k = k.reshape(len(k), -1)
    np.testing.assert_array_equal(k, np.broadcast_to(k[:, :1], k.shape))
    return dict(zip(places, (k[:, 0] - np.float32(layer / 2)).tolist(), strict=True))
