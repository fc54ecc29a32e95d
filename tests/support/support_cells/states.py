# SPDX-License-Identifier: Apache-2.0
"""What changes a state: writes, ranges, transfer, verbs, checkpoints. Against a dict model."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_paged as jp
from jax_paged import transfer
from jax_paged.ops import cascade
from jax_paged.testing.oracle import turned

from .kinds import OF_LOGITS, Cell, Meaningless, Refused, Runs, every, together
from .stored import (
    CHANGES,
    DIM,
    HEADS,
    PAGE,
    PINNED,
    TREE,
    WIDTH,
    WINDOW,
    Known,
    append,
    stored_slots,
    table_of,
)

NO_LOGITS = Meaningless("it computes no logits and no output")
NO_READ = Meaningless("it reads no prefix that rows share")
# Features that run together, by the one that names the state (`stored.CHANGES`).
RUNS = {
    "slid rows": ("windows", "slid rows", "HND"),
    "pins": ("pins", "NHD"),
    "8-bit": ("8-bit", "vllm5d"),
    "trees": ("trees", "rpa"),
    "groups": ("latent", "groups"),
}


# Writes


def implementations(feature: str) -> tuple[str, ...]:
    """The reference, too, in some runs: it compiles slowly."""
    return ("native", "reference") if feature in ("8-bit", "trees") else ("native",)


def check_write(feature: str) -> None:
    """`write` of tokens and, in a tree, of nodes, by kernels and reference."""
    for implementation in implementations(feature):
        known = Known(feature)
        known.grow([1, 0], [3, 2], implementation=implementation)
        if feature == "trees":
            known.grow([0], [4], parents=TREE, implementation=implementation)
        known.check()


def check_fused(feature: str) -> None:
    """`write_qkv` behind tokens that are there: q and K turned by the tokens' positions."""
    rng = np.random.default_rng(0)
    angles = np.outer(np.arange(40), 0.3 ** np.arange(DIM // 2))
    tables = np.float32(np.cos(angles)), np.float32(np.sin(angles))
    changes = {"layer_kinds": ("full", WINDOW)} if feature == "groups" else {}
    for implementation in implementations(feature):
        known = Known(feature, **changes)
        length, count = len(known.rows[0]), 4
        qkv = rng.standard_normal((WIDTH, 8 * DIM), "f4")
        parents, position = None, length + np.arange(count)
        if feature == "trees":
            parents = np.array([*TREE, *[jp.NO_TREE] * (WIDTH - 4)], np.int32)
            position = length + np.array([0, 1, 1, 2])
        ids = (np.array([0, -1], np.int32), np.array([count, 0], np.int32))
        state, batch, status = append(known.state, *ids, parents)
        jp.check(status[:1])
        for layer in state.layers:
            q, state = jp.write_qkv(
                jnp.asarray(qkv), state, batch, *map(jnp.asarray, tables), layer=layer,
                num_q_heads=4, implementation=implementation,
            )  # fmt: skip
        heads = qkv.astype("f8").reshape(WIDTH, 8, DIM)[:count]
        want_q, want_k = (turned(heads[:, x], position, *tables, "half") for x in (
            slice(0, 4), slice(4, 6)
        ))  # fmt: skip
        np.testing.assert_allclose(q[:count], want_q, atol=1e-5)
        tolerance = {"rtol": 0, "atol": 0.02 if feature == "8-bit" else 1e-5}
        for layer in state.layers:
            group, _, index = table_of(state, layer)
            places = stored_slots(state, layer, 0)
            k, v = tokens_at(group, index, [places[length + i] for i in range(count)])
            np.testing.assert_allclose(k, want_k, **tolerance)
            np.testing.assert_allclose(v, heads[:, 6:], **tolerance)


def tokens_at(group: Any, index: int, places: list[tuple[int, int]]) -> tuple[Any, Any]:
    """K and V at (page, slot) of a layer of a group, by `gather_kv`."""
    page, slot = np.array(places, np.int32).T
    k, v = jp.gather_kv(
        group.k_pages, group.v_pages, page[:, None], np.arange(len(page)), slot, slot + 1,
        max_tokens=1, layer=index, k_scale=group.k_scale, v_scale=group.v_scale,
        layout=group.layout,
    )  # fmt: skip
    return np.asarray(k)[:, 0], np.asarray(v)[:, 0]


# Ranges


def check_range(feature: str, *, scatters: bool) -> None:
    """`gather_kv` of a row's tokens; `scatter_kv` of other ones over the last three."""
    known = Known(feature)
    if feature == "trees":
        known.grow([0], [4], parents=TREE)
    values = np.float32(known.rows[0])
    count = len(values)
    for layer in known.state.layers:
        group, table, index = table_of(known.state, layer)
        windows = table.windows
        given: dict[str, Any] = {} if windows is None else {
            "num_pinned": windows.num_pinned, "slot_offset": windows.slot_offset
        }  # fmt: skip
        given["layer"] = index
        if not group.is_latent:
            given |= {"k_scale": group.k_scale, "v_scale": group.v_scale, "layout": group.layout}
        axes = (DIM,) if group.is_latent else (HEADS, DIM)
        if scatters:
            values[-3:] = [91.0, 92.0, 93.0]
            new = values[-3:] + np.float32(layer / 2)
            new = jnp.broadcast_to(new.reshape(1, 3, *[1] * len(axes)), (1, 3, *axes))
            pools = jp.scatter_kv(
                group.k_pages, group.v_pages, new, None if group.is_latent else -new,
                table.page_table, jnp.array([0]), jnp.array([count - 3]), jnp.array([count]),
                **given,
            )  # fmt: skip
            number = known.state.find(layer)[0]
            known.state = known.state.with_pages(number, *pools)
            continue
        k, v, exists = jp.gather_kv(
            group.k_pages, group.v_pages, table.page_table, jnp.array([0]), jnp.array([0]),
            jnp.array([count]), max_tokens=count + 2, return_exists=True, **given,
        )  # fmt: skip
        places = stored_slots(known.state, layer, 0)
        assert np.flatnonzero(exists[0]).tolist() == list(places)
        want = np.zeros((count + 2, *axes), "f4")
        for token in places:
            want[token] = values[token] + layer / 2
        np.testing.assert_allclose(k[0], want, rtol=1e-6)
        assert (v is None) == group.is_latent
        if v is not None:
            np.testing.assert_allclose(v[0], -want, rtol=1e-6)
    if scatters:
        known.rows[0][-3:] = [91.0, 92.0, 93.0]
    known.check()
    assert (len(stored_slots(known.state, 0, 0)) < count) == (feature in ("pins", "slid rows"))


# Transfer


def check_transfer(feature: str) -> None:
    """A row goes over while it grows; it and the receiver's let go of what they no longer see."""
    source, target, total = Known(feature), Known(feature), 12
    source.grow([1], [2])
    if feature == "pins":
        source.do("set_window", [1], WINDOW, PINNED)
    state, inbox = target.state, transfer.Inbox.create(target.state)
    state, inbox, ids, slots, status = transfer.prepare(state, inbox, [2], [total])
    jp.check(status)
    ticket = transfer.Ticket.create(state, ids[0], 2, 0, total, slots[0])
    has_window = feature in ("slid rows", "groups")
    assert max(ticket.begins) == (PAGE if has_window else 0)  # left of what the row will see
    sender = transfer.Sender(source.state)
    sender.mark(1, transfer.Ticket.from_bytes(ticket.to_bytes()), 2)
    while not sender.is_sent(1):
        source.grow([1], [2])
        lengths = {1: len(source.rows[1])}
        for message in sender.messages(source.state, lengths, max_tokens=4):
            state, inbox, status = transfer.deliver(state, inbox, [message])
            jp.check(status)
    target.state = state
    target.rows[2] = list(source.rows[1])
    if feature == "pins":
        target.do("set_window", [2], WINDOW, PINNED)
    for known, row in ((source, 1), (target, 2)):
        known.grow([row], [5])
        known.check()
    if source.slides:  # row 1 lets go of tokens: then it is too late to send them
        source.grow([1], [5])
        first = PAGE if has_window else PINNED
        sender.rewind(1, first)
        late = Refused(
            lambda: sender.messages(source.state, {1: total}, max_tokens=4),
            f"state: expected token {first} of row 1, got a row that it has slid out of", "",
        )  # fmt: skip
        late.check()


def receive_behind_a_tree() -> None:
    known = Known("trees")
    known.grow([0], [4], parents=TREE)
    inbox = transfer.Inbox.create(known.state)
    *_, status = transfer.prepare(known.state, inbox, [0], [3])
    jp.check(status)


# Verbs


def check_fork(feature: str) -> None:
    known = Known(feature)
    length = PINNED if feature == "pins" else len(known.rows[0])
    known.do("fork", [0], [1], [length])
    known.rows[1] = known.rows[0][:length]
    known.grow([1, 0], [3, 2])
    known.check()


def check_truncate(feature: str) -> None:
    known = Known(feature)
    known.do("truncate", [0], [3])
    del known.rows[0][-3:]
    known.grow([0], [2])
    known.check()


def check_commit(feature: str) -> None:
    known = Known(feature)
    known.grow([0], [4], parents=TREE)
    known.do("commit_tree", [0], [3])
    del known.rows[0][-3]  # node 1
    known.grow([0], [2])
    known.check()


def check_window(feature: str) -> None:
    """A row gets a window and pinned tokens, and grows until it slides."""
    changes = {"layout": "HND"} | ({} if feature == "pins" else CHANGES[feature])
    if feature == "slid rows":
        del changes["layer_kinds"]
    known = Known("pins", **changes)
    if feature == "trees":
        known.grow([0], [4], parents=TREE)
        known.do("commit_tree", [0], [3])
        del known.rows[0][-3]
    if feature == "slid rows":  # another window, and nothing is pinned
        known.grow([1], [3])
        known.do("set_window", [1], 4, 0)
        known.grow([1], [6])
    known.grow([0], [2])
    known.check()


def with_open_tree(verb: str, *arguments: Any) -> Callable[[], None]:
    def call() -> None:
        known = Known("trees")
        known.grow([0], [4], parents=TREE)
        known.do(verb, *arguments)

    return call


@contextlib.contextmanager
def few_are_shared():
    """Two rows share what is at least a page."""
    names = ("LEAST_ROWS", "LEAST_TOKENS", "LEAST_SAVED")
    before = {name: getattr(cascade, name) for name in names}
    vars(cascade).update(LEAST_ROWS=2, LEAST_TOKENS=PAGE, LEAST_SAVED=PAGE)
    try:
        yield
    finally:
        vars(cascade).update(before)


def check_shared(verb: str) -> None:
    """What rows share behind a verb is found by `step`; `attend` reads it once, or row by row."""
    with few_are_shared():
        known = Known("HND", windows=verb == "set_window")
        known.grow([0], [5])
        length = len(known.rows[0])
        known.do("fork", [0], [1], [length])
        known.rows[1] = list(known.rows[0])
        shared = length // PAGE * PAGE
        if verb == "truncate":
            known.do("truncate", [0, 1], [4, 3])
            known.rows = {0: known.rows[0][:-4], 1: known.rows[1][:-3]}
            shared = (length - 4) // PAGE * PAGE
        if verb == "commit_tree":
            known.grow([1], [4], parents=TREE)
            known.do("commit_tree", [1], [3])
            del known.rows[1][-3]
        if verb == "set_window":
            known.do("set_window", [0, 1], [WINDOW + length] * 2, [length] * 2)
        batch = known.grow([0, 1], [2, 1], cascade=True)
        known.check()
        assert int(batch.levels[0].seq_lens[0]) == shared
        q = jnp.asarray(np.random.default_rng(0).standard_normal((WIDTH, 4, DIM)), jnp.float32)
        alone = dataclasses.replace(batch, levels=None)
        for layer in known.state.layers:
            got, want = (jp.attend(q / 8, known.state, b, layer=layer) for b in (batch, alone))
            np.testing.assert_allclose(got, want, rtol=2e-5)


# Checkpoints


@functools.cache
def _restored() -> dict[str, tuple[Known, Any]]:
    """States of all features, each as it was and as orbax gave it back."""
    import orbax.checkpoint as ocp

    states = {feature: Known(feature) for feature in (*RUNS, "cascade")}
    states["trees"].grow([0], [4], parents=TREE)
    states["cascade"].do("fork", [0], [1], [5])
    states["cascade"].rows[1] = list(states["cascade"].rows[0])
    given = {feature: known.state for feature, known in states.items()}
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "states", given)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
        again = checkpointer.restore(Path(folder) / "states", shapes)
    return {feature: (known, again[feature]) for feature, known in states.items()}


def check_checkpoint(feature: str) -> None:
    """A state that was saved has the same bytes, and goes on."""
    known, again = _restored()[feature]
    assert jax.tree.structure(again) == jax.tree.structure(known.state)
    for ours, theirs in zip(*map(jax.tree.leaves, (known.state, again)), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    known.state = again
    with few_are_shared():
        if feature == "trees":
            known.do("commit_tree", [0], [3])
            del known.rows[0][-3]
        batch = known.grow([0, 2], [2, 1], cascade=feature == "cascade")
        if feature == "cascade":
            batch = known.grow([0, 1], [1, 1], cascade=True)
            assert int(batch.levels[0].seq_lens[0]) == PAGE
    known.check()


# States of several groups, read


def check_groups(op: str) -> None:
    """`attend` on a state of groups: each layer as the states of one kind have it."""
    with few_are_shared():
        known = Known("groups")
        length = len(known.rows[0])
        if op == "cascade":
            known.do("fork", [0], [1], [length])
            known.rows[1] = list(known.rows[0])
            batch = known.grow([0, 1], [1, 1], cascade=True)
            assert int(batch.levels[0].seq_lens[0]) == length // PAGE * PAGE
        else:
            batch = known.grow([0, 1], [2, 3])
    rng, kinds = np.random.default_rng(0), known.state.layer_kinds
    q = rng.standard_normal((WIDTH, 4, DIM)).astype("f4") / 16
    for layer, kind in zip(known.state.layers, kinds, strict=True):
        if (kind == "mla") != (op == "mla"):
            continue
        options = {"sm_scale": 0.3, "v_head_dim": DIM // 2} if kind == "mla" else {"sm_scale": 0.3}
        out = np.asarray(jp.attend(jnp.asarray(q), known.state, batch, layer=layer, **options))
        token = 0
        for row, count in zip((0, 1), np.diff(batch.cu_q_lens), strict=True):
            stored = np.float64(known.rows[row]) + layer / 2
            for position in range(len(stored) - count, len(stored)):
                first = max(position - kind + 1, 0) if isinstance(kind, int) else 0
                x = stored[first : position + 1]
                logits = 0.3 * q[token].astype("f8").sum(-1)[:, None] * x
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                mean = (weights * x).sum(-1) / weights.sum(-1)
                want = np.broadcast_to(mean[:, None], out[token].shape)
                np.testing.assert_allclose(out[token], want if kind == "mla" else -want, rtol=2e-5)
                token += 1


OWN_PROJECTIONS = "latent rows come of other projections and norms; `write` takes them"


def fused_latent() -> None:
    known = Known("latent")
    batch = known.grow([1], [1])
    qkv, table = jnp.zeros((WIDTH, 8 * DIM)), jnp.zeros((40, DIM // 2))
    jp.write_qkv(qkv, known.state, batch, table, table, layer=0, num_q_heads=4)


def rows() -> dict[str, dict[str, Cell]]:
    """The rows of everything that writes or moves what is stored."""
    no_logits = every(("fp8 output", *OF_LOGITS), NO_LOGITS)
    reads = {**no_logits, "cascade": NO_READ}
    open_tree = "an open tree is guesses: `commit_tree` keeps a path of them, or none"

    def row(check: Callable[[str], None], *left_out: str, **more: Any) -> dict[str, Cell]:
        return {**reads, **together(check, RUNS | more, *left_out)}

    return {
        "`write_kv`, `write`": row(check_write),
        "`qkv_norm_rope_write`, `write_qkv`": {
            **row(check_fused, "latent"),
            "inline RoPE": Meaningless("it turns K before it is stored, the other way"),
            "latent": Refused(fused_latent, "layer: expected one with K and V", OWN_PROJECTIONS),
        },
        "`gather_kv`": row(partial(check_range, scatters=False)),
        "`scatter_kv`": row(partial(check_range, scatters=True)),
        "`transfer`": {
            **row(check_transfer, "trees"),
            "trees": Refused(receive_behind_a_tree, "UNCOMMITTED_TREE", open_tree),
        },
        "`fork`": {
            **row(check_fork, "trees"),
            "trees": Refused(with_open_tree("fork", [0], [1], [5]), "UNCOMMITTED_TREE", open_tree),
            "cascade": Runs(partial(check_shared, "fork")),
        },
        "`truncate`": {
            **row(check_truncate, "trees"),
            "trees": Refused(with_open_tree("truncate", [0], [1]), "UNCOMMITTED_TREE", open_tree),
            "cascade": Runs(partial(check_shared, "truncate")),
        },
        "`commit_tree`": {
            **row(check_commit),
            "cascade": Runs(partial(check_shared, "commit_tree")),
        },
        "`set_window`": {
            **row(check_window, "groups", latent=("latent",)),
            "cascade": Runs(partial(check_shared, "set_window")),
            "groups": Refused(
                lambda: Known("groups", windows=True).do("set_window", [0], WINDOW, PINNED),
                "set_window: expected a state of one group of layers",
                "a layer's own window and that of a row would have to be applied both",
            ),
        },
        "checkpoint": {
            **no_logits,
            **together(check_checkpoint, RUNS | {"cascade": ("cascade",)}),
        },
    }
