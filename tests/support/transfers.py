# SPDX-License-Identifier: Apache-2.0
"""States with known contents, for the tests of transfers."""

import functools
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from jax_paged import KVState, Status, transfer, write
from jax_paged.cache.transfer import Geometry, Message, Payload, Ticket
from jax_paged.layout import pages_shape, pool_of_v

SIZES = {
    "num_layers": 3, "num_pages": 24, "page_size": 4, "num_kv_heads": 2, "head_dim": 8,
    "max_seqs": 4, "pages_per_seq": 6, "dtype": "float32",
}  # fmt: skip
CHUNK = 8
COUNT = 32  # tokens of a flat batch


def make(**changes) -> KVState:
    sizes = SIZES | changes
    if "layer_kinds" in changes:
        del sizes["num_layers"]
    return KVState.create(**sizes)


@functools.partial(jax.jit, donate_argnums=0)
def _fill(state, rows, q_lens, k, v):
    state, batch, status = state.append(rows, q_lens, num_tokens=COUNT)
    for layer in state.layers:
        state = write(k[layer], v[layer], state, batch, layer=layer)
    return state, status


def append(state: KVState, row: int, count: int, seed: int) -> KVState:
    """Adds random tokens to a row, the same to states whose pages alone differ."""
    rng = np.random.default_rng(seed)
    k, v = [], []
    for layer in state.layers:
        group = state.groups[state.find(layer)[0]]
        if group.is_latent:
            k.append(rng.standard_normal((COUNT, group.k_pages.shape[-1]), "f4"))
            v.append(None)
            continue
        v_pages = pool_of_v(group.k_pages, group.v_pages, group.layout)
        size = (COUNT, 2, pages_shape(v_pages, group.layout, "v").head_dim)
        k.append(rng.standard_normal(size, "f4"))
        v.append(rng.standard_normal(size, "f4"))
    state, statuses = _fill(state, np.array([row]), np.array([count]), k, v)
    assert not statuses.any()
    return state


def what_arrives(
    rng: np.random.Generator, sent: Iterable[Message], under_way: list[bytes], most: int
) -> Iterator[Message]:
    """Up to `most` messages of a bad line: some are lost, come twice, late or out of turn.

    under_way: what was sent before; keeps some of what has not been lost.
    """
    for message in sent:
        if rng.random() < 0.6:
            under_way += [message.to_bytes()] * int(rng.integers(1, 3))
    rng.shuffle(under_way)
    arriving = under_way[: int(rng.integers(0, most + 1))]
    under_way[:] = under_way[int(rng.integers(0, 3)) :][-12:]
    return map(Message.from_bytes, arriving)


def tokens_of(
    state: KVState, row: int, end: int | None = None, *, begin: int = 0, group: int = 0
) -> Payload:
    """What a group stores of a row's tokens, on the host; 0 where they have slid away."""
    end = int(state.groups[0].table.seq_lens[row]) if end is None else end
    whole = transfer.read(state, [row], [begin], [end], max_tokens=64, group=group)
    return Payload(*(None if x is None else np.asarray(x)[:, 0, : end - begin] for x in whole))


def assert_same_row(
    target: KVState, its: int, source: KVState, mine: int, length: int | None = None
) -> None:
    """Every group of both holds the same for what the row's next token sees."""
    for number, kind in enumerate(target.kinds):
        end = int(target.groups[number].table.seq_lens[its])
        assert length is None or end == length
        begin = max(0, end - kind + 1) if isinstance(kind, int) else 0
        assert_same(*(
            tokens_of(state, row, end, begin=begin, group=number)
            for state, row in ((target, its), (source, mine))
        ))  # fmt: skip


def assert_same(mine: Payload, theirs: Payload) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a.astype("f4"), b.astype("f4"))


def open_row(state, inbox, row, count, **degrees):
    begin = int(state.groups[0].table.seq_lens[row])
    state, inbox, ids, slots, status = transfer.prepare(state, inbox, [row], [count])
    assert status.tolist() == [Status.OK]
    geometry = Geometry.create(state, **degrees)
    return (
        state,
        inbox,
        Ticket.create(state, ids[0], row, begin, count, slots[0], geometry=geometry),
    )
