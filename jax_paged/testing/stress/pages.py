# SPDX-License-Identifier: Apache-2.0
"""The ops that write pages, or move what they hold."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.layout import (
    LAYOUTS,
    POOLS,
    PagesShape,
    is_one_pool,
    make_shape,
    of_slots_first,
    pool_of_v,
    slots_first,
)
from jax_paged.ops.move import copy_pages, move_slots
from jax_paged.ops.ranges import gather_kv, scatter_kv
from jax_paged.ops.reference import QMAX
from jax_paged.ops.write import write_kv

from .. import qkv, writes
from ..writes import bits
from .op import DTYPES, WILD, Op, Row

WRITE = {
    "layout": LAYOUTS,
    "page_size": (5, 1, 8, 16, 64),
    "stacked": (False, True),
    "dtype": DTYPES,
    "tokens": (6, 0, 1, 70),
    "slots": ("all", "some", "doubled", "wild"),
    "layer": ("inside", "wild"),
}


def _write(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng([seed, 1])
    num_layers = 3 if row["stacked"] else None
    pools = writes.make_pools(
        row["page_size"], layout=row["layout"], num_layers=num_layers,
        dtype=jnp.dtype(row["dtype"]), num_pages=20,
    )  # fmt: skip
    tokens = writes.make_tokens(row["tokens"], jnp.dtype(row["dtype"]), row["layout"])
    num_slots = 20 * row["page_size"]
    slots = np.resize(rng.permutation(num_slots), row["tokens"])
    if row["slots"] == "some":
        slots = np.where(rng.random(slots.shape) < 0.4, -1, slots)
    elif row["slots"] == "doubled":
        slots = slots % 4
    elif row["slots"] == "wild":
        slots = np.where(rng.random(slots.shape) < 0.5, rng.choice(WILD, slots.shape), slots)
    slots = slots.astype(np.int32)
    layer = None
    if num_layers is not None:
        layer = int(rng.choice(WILD)) if row["layer"] == "wild" else int(rng.integers(num_layers))
    k_pages, v_pages = writes.on_device(pools)
    k, v = map(jnp.asarray, tokens)
    written = write_kv(
        k_pages, v_pages, k, v, jnp.asarray(slots),
        layer=None if layer is None else jnp.int32(layer), layout=row["layout"],
        implementation=implementation,
    )  # fmt: skip
    _same_pools(written, writes.expected_writes(pools, tokens, slots, layer, row["layout"]))
    return 0.0


def _same_pools(got: Any, expected: Any) -> None:
    """Bit for bit, where there is a pool of V."""
    for pool, out, pages in zip(POOLS, got, expected, strict=True):
        assert (out is None) == (pages is None), pool
        if pages is not None:
            np.testing.assert_array_equal(bits(out), bits(pages), err_msg=pool)


def _by_slot(pools: Any, layout: Any) -> list[np.ndarray]:
    """What the pools hold of K and of V: [..., page, slot, head, dim], copied."""
    k_pages, v_pages = pools
    both = k_pages, pool_of_v(k_pages, v_pages, layout)
    return [slots_first(x, layout, pool).copy() for pool, x in zip(POOLS, both, strict=True)]


QKV = {
    "dtype": DTYPES,
    "sizes": ((64, None, (5, 2)), (128, None, (32, 4)), (80, 40, (4, 4)), (24, 16, (3, 1))),
    "rotary": ("all", "part"),
    "style": ("half", "interleaved"),
    "norms": ("qk", "q", "k", ""),
    "stacked": (False, True),
    "layout": LAYOUTS,
    "kv": (None, "int8", "float8_e4m3fn", "float8_e5m2"),
    "scale": (None, "scalar", "head", "token"),
    "tokens": (7, 0, 1, 60),
    "page_size": (5, 1, 16),
    "wild": (False, True),
}


def _qkv(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng([seed, 1])
    head_dim, v_head_dim, heads = row["sizes"]
    layout, kv = row["layout"], row["kv"]
    if is_one_pool(layout):
        v_head_dim = None
    if layout == "vllm5d" and head_dim % 16:  # codes of K are stored by 16
        kv = None
    call = qkv.make_call(
        row["dtype"], head_dim, v_head_dim, heads, style=row["style"], norms=row["norms"],
        rotary_dim=head_dim if row["rotary"] == "all" else head_dim // 2,
        num_layers=3 if row["stacked"] else None, layout=layout, tokens=row["tokens"],
        page_size=row["page_size"], num_pages=15, seed=seed, kv_dtype=kv,
        scale=None if kv is None else row["scale"],
    )  # fmt: skip
    if row["wild"]:
        places = rng.random(row["tokens"])
        wild = rng.choice(WILD, (2, row["tokens"])).astype("i4")
        slots = np.where((places < 0.3) & ((wild[0] < 0) | (wild[0] > 2**15)), wild[0],
                         call.slot_mapping)  # fmt: skip
        positions = np.where(places > 0.7, wild[1], call.positions)
        call = dataclasses.replace(call, slot_mapping=slots, positions=positions)
    qkv.check_results(call, qkv.call_op(call, implementation))
    return 0.0


EIGHT_BIT = {
    "kv": ("int8", "float8_e4m3fn", "float8_e5m2"),
    "scale": (None, "scalar", "head", "token"),
    "layout": LAYOUTS,
    "dtype": DTYPES,
    "page_size": (5, 1, 16),
    "tokens": (6, 0, 40),
    "slots": ("all", "wild"),
}


def _eight_bit(row: Row, seed: int, implementation: Any) -> float:
    """Codes are x / scale to the nearest, and a token's own scale is max |x| / the largest code."""
    rng = np.random.default_rng([seed, 1])
    count, pages, heads, page = row["tokens"], 9, 2, row["page_size"]
    dtype, limit = jnp.dtype(row["kv"]), QMAX[row["kv"]]
    dims = writes.head_dims(row["layout"])
    x = [rng.standard_normal((count, heads, dim), "f4") * 3 for dim in dims]
    x = [part.astype(jnp.dtype(row["dtype"])) for part in x]
    slots = np.resize(rng.permutation(pages * page), count)
    if row["slots"] == "wild":
        slots = np.where(rng.random(count) < 0.5, rng.choice(WILD, count), slots)
    shape = {None: (), "scalar": (), "head": (heads,), "token": (pages, heads, page)}[row["scale"]]
    scales = [rng.uniform(0.01, 0.1, shape).astype("f4") for _ in POOLS]
    pools = [
        make_shape(PagesShape(None, pages, heads, page, dim), row["layout"], pool, dtype=dtype)
        for pool, dim in zip(POOLS, dims, strict=True)
    ]
    given = {} if row["scale"] is None else dict(zip(("k_scale", "v_scale"), scales, strict=True))
    k_pages, v_pages = (jnp.zeros(shape, dtype) for shape in pools)
    v_pages = None if is_one_pool(row["layout"]) else v_pages
    written = write_kv(
        k_pages, v_pages, jnp.asarray(x[0]), jnp.asarray(x[1]), jnp.asarray(slots.astype("i4")),
        layout=row["layout"], implementation=implementation,
        **{name: jnp.asarray(scale) for name, scale in given.items()},
    )  # fmt: skip
    worst = 0.0
    stored = [None if pages is None else np.asarray(pages) for pages in written[:2]]
    for i, found in enumerate(_by_slot(stored, row["layout"])):
        found = found.astype("f8").reshape(pages * page, heads, -1)
        of_slot = {int(s): t for t, s in enumerate(slots) if 0 <= s < pages * page}  # the last
        assert not found[[s for s in range(pages * page) if s not in of_slot]].any(), "elsewhere"
        for slot, token in of_slot.items():
            real = x[i][token].astype("f8")
            scale = np.float64(1) if row["scale"] is None else scales[i].astype("f8")[..., None]
            if row["scale"] == "token":
                scale = np.asarray(written[2 + i])[slot // page, :, slot % page, None].astype("f8")
                exact = np.abs(real).max(-1, keepdims=True) / limit
                np.testing.assert_allclose(scale, exact, rtol=1e-6)
            exact = np.clip(real / np.where(scale == 0, 1, scale), -limit, limit)
            step = np.ones(1)
            if row["kv"] != "int8":
                info = jnp.finfo(dtype)
                exponent = np.floor(np.log2(np.maximum(np.abs(exact), float(info.smallest_normal))))
                step = 2.0 ** (exponent - info.nmant)
            share = float(np.max(np.abs(found[slot] - exact) / (step / 2 * (1 + 1e-5)), initial=0))
            assert share <= 1, f"slot {slot}: {share:.3g} times half a step away"
            worst = max(worst, share)
    return worst


MOVE = {
    "op": ("move_slots", "copy_pages"),
    "layout": LAYOUTS,
    "dtype": DTYPES,
    "stacked": (False, True),
    "page_size": (5, 1, 16),
    "count": (6, 0, 1, 25),
    "wild": (False, True),
}


def _move(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng([seed, 1])
    num_pages, by_pages = 30, row["op"] == "copy_pages"
    pools = writes.make_pools(
        row["page_size"], layout=row["layout"], num_layers=2 if row["stacked"] else None,
        dtype=jnp.dtype(row["dtype"]), num_pages=num_pages,
    )  # fmt: skip
    most = num_pages * (1 if by_pages else row["page_size"])
    source, target = rng.integers(0, most, row["count"]), rng.permutation(most)[: row["count"]]
    target = np.resize(target, row["count"])
    if row["wild"]:
        outside = WILD[(WILD < 0) | (WILD > 2**15)]
        source, target = (
            np.where(rng.random(x.shape) < 0.3, rng.choice(outside, x.shape), x)
            for x in (source, target)
        )
    k_pages, v_pages = writes.on_device(pools)
    ids = jnp.asarray(source.astype("i4")), jnp.asarray(target.astype("i4"))
    if by_pages:
        moved = copy_pages(k_pages, v_pages, *ids)
    else:
        moved = move_slots(
            k_pages, v_pages, *ids, layout=row["layout"],
            implementation=implementation,
        )  # fmt: skip
    whole = [slice(None)] * (3 if by_pages else 2)  # what stands behind a page, or a slot
    expected = []
    for old in _by_slot(pools, row["layout"]):
        new = old.copy()
        for a, b in zip(source, target, strict=True):
            if 0 <= a < most and 0 <= b < most:
                at = [(x,) if by_pages else divmod(int(x), row["page_size"]) for x in (a, b)]
                new[(..., *at[1], *whole)] = old[(..., *at[0], *whole)]
        expected.append(new)
    k, v = expected
    _same_pools(moved, of_slots_first(k, v, row["layout"]))
    return 0.0


RANGE = {
    "op": ("gather_kv", "scatter_kv"),
    "layout": LAYOUTS,
    "dtype": DTYPES,
    "stacked": (False, True),
    "page_size": (5, 1, 16),
    "max_tokens": (11, 1, 40),
    "wild": (False, True),
}


def _range(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng([seed, 1])
    page, num_pages, rows, columns, most = row["page_size"], 30, 4, 6, row["max_tokens"]
    pools = writes.make_pools(
        page, layout=row["layout"], num_layers=2 if row["stacked"] else None,
        dtype=jnp.dtype(row["dtype"]), num_pages=num_pages,
    )  # fmt: skip
    table = rng.permutation(num_pages)[: rows * columns].reshape(rows, columns).astype("i4")
    of_rows = np.arange(rows)  # one range each, so that no two of a scatter meet
    begins = rng.integers(0, columns * page, rows)
    ends = begins + rng.integers(0, most + 3, rows)
    if row["wild"]:
        table = np.where(rng.random(table.shape) < 0.2, -1, table).astype("i4")
        of_rows, begins, ends = (
            np.where(rng.random(rows) < 0.2, rng.choice(WILD[[0, 1, 2, 8]], rows), x)
            for x in (of_rows, begins, ends)
        )
    layer = 1 if row["stacked"] else None
    whole = _by_slot(pools, row["layout"])
    views = [x if layer is None else x[layer] for x in whole]  # what is written there is in whole
    new = [rng.standard_normal((rows, most, 2, d)).astype(x.dtype)
           for d, x in zip(writes.head_dims(row["layout"]), whole, strict=True)]  # fmt: skip
    read = [np.zeros_like(x) for x in new]
    for i in range(rows):
        for j in range(most):
            token = int(begins[i]) + j
            if 0 <= of_rows[i] < rows and 0 <= token < min(int(ends[i]), columns * page):
                at = table[of_rows[i], token // page]
                if at >= 0:
                    for view, mine, found in zip(views, new, read, strict=True):
                        found[i, j] = view[at, token % page]
                        view[at, token % page] = mine[i, j]
    k_pages, v_pages = writes.on_device(pools)
    places = [jnp.asarray(x.astype("i4")) for x in (table, of_rows, begins, ends)]
    if row["op"] == "gather_kv":
        result = gather_kv(
            k_pages, v_pages, *places, max_tokens=most, layer=layer, layout=row["layout"]
        )
        for got, expected in zip(result, read, strict=True):
            np.testing.assert_array_equal(bits(got), bits(expected))
        return 0.0
    written = scatter_kv(
        k_pages, v_pages, jnp.asarray(new[0]), jnp.asarray(new[1]), *places, layer=layer,
        layout=row["layout"], implementation=implementation,
    )  # fmt: skip
    k, v = whole
    _same_pools(written, of_slots_first(k, v, row["layout"]))
    return 0.0


PAGES = {
    "write_kv": Op(WRITE, _write, weight=2),
    "write_kv to 8 bits": Op(EIGHT_BIT, _eight_bit, weight=2),
    "qkv_norm_rope_write": Op(QKV, _qkv, weight=2),
    "moved slots and pages": Op(MOVE, _move),
    "gathered and scattered ranges": Op(RANGE, _range),
}
WILD_PAGES = {
    "write_kv, wild integers": Op(
        WRITE | {"slots": ("wild",), "layer": ("wild", "inside")}, _write
    ),
    "qkv_norm_rope_write, wild integers": Op(QKV | {"wild": (True,)}, _qkv),
    "moves, wild integers": Op(MOVE | {"wild": (True,)}, _move),
    "ranges, wild integers": Op(RANGE | {"wild": (True,)}, _range),
}
