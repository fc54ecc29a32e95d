# SPDX-License-Identifier: Apache-2.0
"""States with known contents, for the tests of transfers."""

import functools

import jax
import numpy as np

from jax_paged import KVState, Status, transfer, write
from jax_paged.cache.transfer import Geometry, Payload, Ticket
from jax_paged.layout import pages_shape, pool_of_v

SIZES = {
    "num_layers": 3, "num_pages": 24, "page_size": 4, "num_kv_heads": 2, "head_dim": 8,
    "max_seqs": 4, "pages_per_seq": 6, "dtype": "float32",
}  # fmt: skip
CHUNK = 8


def make(**changes) -> KVState:
    return KVState.create(**(SIZES | changes))


@functools.partial(jax.jit, donate_argnums=0)
def _fill(state, rows, q_lens, k, v):
    state, batch, status = state.append(rows, q_lens, num_tokens=k.shape[1])
    for layer in state.layers:
        state = write(k[layer], v[layer], state, batch, layer=layer)
    return state, status


def append(state: KVState, row: int, count: int, seed: int) -> KVState:
    """Adds random tokens to a row."""
    rng = np.random.default_rng(seed)
    v_pages = pool_of_v(state.k_pages, state.v_pages, state.layout)
    head_dim = pages_shape(v_pages, state.layout, "v").head_dim
    size = (state.k_pages.shape[0], 32, 2, head_dim)
    k, v = (rng.standard_normal(size, "f4") for _ in "kv")
    state, statuses = _fill(state, np.array([row]), np.array([count]), k, v)
    assert not statuses.any()
    return state


def tokens_of(state: KVState, row: int, end: int | None = None) -> Payload:
    """All that is stored of a row, on the host."""
    end = int(state.table.seq_lens[row]) if end is None else end
    whole = transfer.read(state, [row], [0], [end], max_tokens=24)
    return Payload(*(None if x is None else np.asarray(x)[:, 0, :end] for x in whole))


def assert_same(mine: Payload, theirs: Payload) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a.astype("f4"), b.astype("f4"))


def open_row(state, inbox, row, count, **degrees):
    begin = int(state.table.seq_lens[row])
    state, inbox, ids, slots, status = transfer.prepare(state, inbox, [row], [count])
    assert status.tolist() == [Status.OK]
    geometry = Geometry.create(state, **degrees)
    return (
        state,
        inbox,
        Ticket.create(state, ids[0], row, begin, count, slots[0], geometry=geometry),
    )
