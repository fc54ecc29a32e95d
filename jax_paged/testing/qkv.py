# SPDX-License-Identifier: Apache-2.0
"""Calls of `qkv_norm_rope_write`, and what each gives in float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.layout import (
    POOLS,
    PagesShape,
    from_slots_first,
    make_shape,
    pages_shape,
    slots_first,
)
from jax_paged.ops.qkv import qkv_norm_rope_write

# Of one rounding to nearest, relative to the number; f32 has none of its own.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
F32_NOISE = 2e-6  # of sums and products in f32, relative to the largest number of a head


@dataclasses.dataclass(frozen=True)
class Call:
    """The operands of one call, as numpy arrays."""

    qkv: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    num_q_heads: int
    style: Any
    layer: int | None
    layout: Any
    eps: float = 1e-5


def make_call(
    dtype="float32", head_dim=64, v_head_dim=None, heads=(5, 2), *, rotary_dim=None, style="half",
    norms="qk", norm_dtype=None, num_layers=None, layer=1, layout: Any = "HND", tokens=7,
    page_size=5, num_pages=6, max_positions=11, seed=0,
):  # fmt: skip
    """A random call; the pages hold random numbers and NaN, the slots are all different."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    shape = PagesShape(num_layers, num_pages, heads[1], page_size, head_dim)

    def pages(pool, dim):
        values = rng.standard_normal(make_shape(shape._replace(head_dim=dim), "NHD"), "f4")
        values = np.where(rng.random(values.shape) < 0.1, np.nan, values).astype(dtype)
        return np.ascontiguousarray(from_slots_first(values, layout, pool))

    def weight(name):
        drawn = rng.uniform(-2, 2, head_dim).astype(dtype if norm_dtype is None else norm_dtype)
        return drawn if name in norms else None

    half = (head_dim if rotary_dim is None else rotary_dim) // 2
    angles = rng.uniform(0, 7, (max_positions, half))
    width = sum(heads) * head_dim + heads[1] * v_head_dim
    return Call(
        qkv=rng.standard_normal((tokens, width), "f4").astype(dtype),
        k_pages=pages("k", head_dim),
        v_pages=pages("v", v_head_dim),
        positions=rng.integers(0, max_positions, tokens, np.int32),
        slot_mapping=rng.permutation(max(num_pages * page_size, tokens))[:tokens].astype("i4"),
        cos=np.cos(angles).astype("f4"),
        sin=np.sin(angles).astype("f4"),
        q_norm=weight("q"),
        k_norm=weight("k"),
        num_q_heads=heads[0],
        style=style,
        layer=None if num_layers is None else layer,
        layout=layout,
    )


def oracle(call):
    """In float64: q, and for each slot that is written its page, offset, K and V."""
    shape, heads = pages_shape(call.k_pages, call.layout), call.num_q_heads
    head_dim, kv_heads, page_size = shape.head_dim, shape.num_kv_heads, shape.page_size
    num_slots = shape.num_pages * page_size
    half = call.cos.shape[1]
    pairs = np.arange(half)
    first, second = (pairs, pairs + half) if call.style == "half" else (2 * pairs, 2 * pairs + 1)

    def norm_and_turn(x, weight, position):
        if weight is not None:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + call.eps) * weight.astype("f8")
        a, b, x = x[:, first], x[:, second], x.copy()
        cos, sin = call.cos[position].astype("f8"), call.sin[position].astype("f8")
        x[:, first], x[:, second] = a * cos - b * sin, b * cos + a * sin
        return x

    q, written = np.zeros((len(call.qkv), heads, head_dim)), {}
    for token, (row, position, slot) in enumerate(
        zip(call.qkv.astype("f8"), call.positions, call.slot_mapping, strict=True)
    ):
        if not 0 <= position < len(call.cos):
            continue
        q_part, k_part, v_part = np.split(
            row, [heads * head_dim, (heads + kv_heads) * head_dim]
        )  # fmt: skip
        q[token] = norm_and_turn(q_part.reshape(heads, -1), call.q_norm, position)
        if 0 <= slot < num_slots:
            k = norm_and_turn(k_part.reshape(kv_heads, -1), call.k_norm, position)
            written[divmod(int(slot), page_size)] = (k, v_part.reshape(kv_heads, -1))
    return q, written


def assert_rounded(got, exact, name):
    """One rounding of the exact numbers to got's dtype, and the noise of f32 before it."""
    got, dtype = got.astype("f8"), jnp.dtype(got.dtype).name
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact), err_msg=name)
    if got.size == 0:
        return
    peak = np.nan_to_num(np.abs(exact)).max(-1, keepdims=True)
    error = np.nan_to_num(np.abs(got - exact))
    excess = error - ROUNDING[dtype] * np.abs(np.nan_to_num(exact)) - F32_NOISE * peak
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, f"{name}{worst}: {got[worst]}, exact {exact[worst]}"


def call_op(call: Call, implementation: Any) -> list[np.ndarray]:
    """(q, k_pages, v_pages) of a call."""
    operands = {
        field.name: jnp.array(getattr(call, field.name))
        for field in dataclasses.fields(call)
        if isinstance(getattr(call, field.name), np.ndarray)
    }
    results = qkv_norm_rope_write(
        **operands, eps=call.eps, num_q_heads=call.num_q_heads, style=call.style,
        rotary_dim=2 * call.cos.shape[1], layout=call.layout, implementation=implementation,
        layer=None if call.layer is None else jnp.int32(call.layer),
    )  # fmt: skip
    return [np.array(x) for x in results]


def check_results(call, results):
    """Compares q, the slots that are written, and all other bytes of the pools."""
    q, k_pages, v_pages = results
    exact_q, written = oracle(call)
    assert q.dtype == call.qkv.dtype
    assert_rounded(q, exact_q, "q")
    no_position = (call.positions < 0) | (call.positions >= len(call.cos))
    np.testing.assert_array_equal(q[no_position], np.zeros((), q.dtype))
    new, old = (
        [slots_first(x, call.layout, pool).copy() for x, pool in zip(pools, POOLS, strict=True)]
        for pools in ((k_pages, v_pages), (call.k_pages, call.v_pages))
    )
    layer = () if call.layer is None else (call.layer,)
    has_layer = call.layer is None or 0 <= call.layer < len(k_pages)
    for (page, offset), (k, v) in written.items() if has_layer else ():
        at = (*layer, page, offset)
        assert_rounded(new[0][at], k, f"k at page {page}, offset {offset}: ")
        np.testing.assert_array_equal(new[1][at].astype("f8"), v)
        for to, source in zip(new, old, strict=True):
            to[at] = source[at]
    for name, got, before in zip(POOLS, new, old, strict=True):
        np.testing.assert_array_equal(
            got.view(np.uint8), before.view(np.uint8), err_msg=f"{name}_pages elsewhere"
        )
