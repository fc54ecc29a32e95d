# SPDX-License-Identifier: Apache-2.0
"""Calls of `qkv_norm_rope_write`, and what each gives in float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.layout import (
    POOLS,
    PagesShape,
    make_shape,
    of_slots_first,
    pages_shape,
    pool_of_v,
    slots_first,
)
from jax_paged.ops.qkv import qkv_norm_rope_write
from jax_paged.ops.reference import QMAX

# Of one rounding to nearest, relative to the number; f32 has none of its own.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
# Of 8-bit floats: bits behind the leading one, and the power of two of the smallest normal number.
FRACTION_BITS = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}
F32_NOISE = 2e-6  # of sums and products in f32, relative to the largest number of a head


@dataclasses.dataclass(frozen=True)
class Call:
    """The operands of one call, as numpy arrays."""

    qkv: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray | None
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
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None

    @property
    def per_token(self) -> bool:
        return self.k_scale is not None and self.k_scale.ndim >= 3


def make_call(
    dtype="float32", head_dim=64, v_head_dim=None, heads=(5, 2), *, rotary_dim=None, style="half",
    norms="qk", norm_dtype=None, num_layers=None, layer=1, layout: Any = "HND", tokens=7,
    page_size=5, num_pages=6, max_positions=11, kv_dtype=None, scale=None, seed=0,
):  # fmt: skip
    """A random call; the pages hold random numbers and NaN, the slots are all different.

    kv_dtype: of 8-bit pages. scale: None, "scalar", "layer", "head", or "token": pools of NaN.
    """
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    shape = PagesShape(num_layers, num_pages, heads[1], page_size, head_dim)

    def stored(dim):
        sizes = make_shape(shape._replace(head_dim=dim), "NHD")
        if kv_dtype is not None:
            codes = rng.integers(0, 256, sizes, np.uint8)
            is_nan = np.isnan(codes.view(jnp.dtype(kv_dtype)).astype("f4"))
            return np.where(is_nan, np.uint8(0x7F), codes).view(jnp.dtype(kv_dtype))  # XLA's NaN
        values = rng.standard_normal(sizes, "f4")
        return np.where(rng.random(sizes) < 0.1, np.nan, values).astype(dtype)

    def drawn_scale():
        layers = () if num_layers is None else (num_layers,)
        if scale == "token":
            return np.full((*layers, num_pages, heads[1], page_size), np.nan, np.float32)
        sizes = {"scalar": (), "layer": layers, "head": (*layers, heads[1])}
        return None if scale is None else rng.uniform(0.01, 0.05, sizes[scale]).astype("f4")

    def weight(name):
        drawn = rng.uniform(-2, 2, head_dim).astype(dtype if norm_dtype is None else norm_dtype)
        return drawn if name in norms else None

    half = (head_dim if rotary_dim is None else rotary_dim) // 2
    angles = rng.uniform(0, 7, (max_positions, half))
    width = sum(heads) * head_dim + heads[1] * v_head_dim
    k_pages, v_pages = of_slots_first(stored(head_dim), stored(v_head_dim), layout)
    return Call(
        qkv=rng.standard_normal((tokens, width), "f4").astype(dtype),
        k_pages=np.ascontiguousarray(k_pages),
        v_pages=None if v_pages is None else np.ascontiguousarray(v_pages),
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
        k_scale=drawn_scale(),
        v_scale=drawn_scale(),
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


def scales_of_heads(call, pool):
    """What K or V is divided by, float64[num_kv_heads]."""
    scale = {"k": call.k_scale, "v": call.v_scale}[pool]
    if scale is not None and call.layer is not None and scale.ndim:
        scale = scale[np.clip(call.layer, 0, len(scale) - 1)]
    heads = pages_shape(call.k_pages, call.layout).num_kv_heads
    return np.broadcast_to(1.0 if scale is None else scale, heads).astype("f8")


def assert_codes(got, exact, scale, name):
    """got [heads, dim] are the codes next to exact / scale [heads], but for the noise of f32."""
    dtype, got = jnp.dtype(got.dtype).name, got.astype("f8")
    with np.errstate(invalid="ignore"):
        exact = np.clip(exact / np.where(scale == 0, 1, scale)[:, None], -QMAX[dtype], QMAX[dtype])
    peak = np.nan_to_num(np.abs(exact)).max(-1, keepdims=True)
    if dtype == "int8":
        exact, half = np.nan_to_num(exact), 0.5
    else:
        bits, smallest = FRACTION_BITS[dtype]
        power = np.frexp(np.nan_to_num(exact))[1] - 1
        half = 2.0 ** (np.maximum(power, smallest) - bits - 1)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact), err_msg=name)
    error = np.nan_to_num(np.abs(got - exact))
    worst = np.unravel_index(np.argmax(error - half), exact.shape)
    assert (error <= half + F32_NOISE * peak).all(), (
        f"{name}{worst}: {got[worst]}, exact {exact[worst]}"
    )


def call_op(call: Call, implementation: Any) -> list[np.ndarray | None]:
    """What the op returns."""
    operands: dict[str, Any] = {"v_pages": None}
    operands |= {
        field.name: jnp.array(getattr(call, field.name))
        for field in dataclasses.fields(call)
        if isinstance(getattr(call, field.name), np.ndarray)
    }
    results = qkv_norm_rope_write(
        **operands, eps=call.eps, num_q_heads=call.num_q_heads, style=call.style,
        rotary_dim=2 * call.cos.shape[1], layout=call.layout, implementation=implementation,
        layer=None if call.layer is None else jnp.int32(call.layer),
    )  # fmt: skip
    return [None if x is None else np.array(x) for x in results]


def check_results(call, results):
    """Compares q, the slots that are written, and all other bytes of the pools."""
    q, k_pages, v_pages, *scales = results
    exact_q, written = oracle(call)
    assert q.dtype == call.qkv.dtype
    assert_rounded(q, exact_q, "q")
    no_position = (call.positions < 0) | (call.positions >= len(call.cos))
    np.testing.assert_array_equal(q[no_position], np.zeros((), q.dtype))
    old_scales = (call.k_scale, call.v_scale) if call.per_token else ()
    assert len(scales) == len(old_scales)
    new, old = (
        _by_slot(*pools, call.layout, own)
        for pools, own in (((k_pages, v_pages), scales),
                           ((call.k_pages, call.v_pages), old_scales))
    )  # fmt: skip
    layer = () if call.layer is None else (call.layer,)
    has_layer = call.layer is None or 0 <= call.layer < len(k_pages)
    for (page, offset), exact in written.items() if has_layer else ():
        at = (*layer, page, offset)
        for pool, x in zip(POOLS, exact, strict=True):
            name = f"{pool} at page {page}, offset {offset}: "
            got = new[f"{pool}_pages"][at]
            if got.dtype.name in QMAX:
                scale = scales_of_heads(call, pool) if not call.per_token else None
                if scale is None:
                    scale = new[f"{pool}_scale"][at].astype("f8")
                    largest = np.abs(x).max(-1) / QMAX[got.dtype.name]
                    np.testing.assert_allclose(scale, largest, rtol=F32_NOISE, err_msg=name)
                assert_codes(got, x, scale, name)
            elif pool == "k":
                assert_rounded(got, x, name)
            else:
                np.testing.assert_array_equal(got.astype("f8"), x)
        for name, x in new.items():
            x[at] = old[name][at]
    for name, x in new.items():
        np.testing.assert_array_equal(
            x.view(np.uint8), old[name].view(np.uint8), err_msg=f"{name} elsewhere"
        )


def _by_slot(k_pages, v_pages, layout, scales) -> dict[str, np.ndarray]:
    """Copies of pools and of their scales, if any, as [..., page, slot, head, ...]."""
    pools = (k_pages, pool_of_v(k_pages, v_pages, layout))
    copies = {
        f"{pool}_pages": slots_first(x, layout, pool).copy()
        for pool, x in zip(POOLS, pools, strict=True)
    }
    return copies | {
        f"{pool}_scale": x.swapaxes(-1, -2).copy() for pool, x in zip(POOLS, scales, strict=False)
    }
