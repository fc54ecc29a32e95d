# SPDX-License-Identifier: Apache-2.0
"""From the projections of a layer to its pages: norm, rotary embedding and the write in one call.

The pages are donated, as `write_kv` does.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_paged.checks import (
    ROPE_STYLES,
    Implementation,
    RopeStyle,
    as_index,
    check_choice,
    check_float,
    check_implementation,
    check_layer,
    check_native,
    check_pages,
    check_shape,
    expect,
    is_eight_bit,
    is_per_token,
)
from jax_paged.layout import (
    Layout,
    PagesShape,
    is_one_pool,
    is_stacked,
    pages_shape,
    pool_of_v,
)
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import KV_HEADS, PAGES, WHOLE, Split, at_heads, pools_at_heads
from jax_paged.ops import reference
from jax_paged.ops.fold import write_of_each
from jax_paged.ops.write import (
    check_written_scales,
    cuda_workspace_words,
    refusing_gradients,
)

TARGET = "jax_paged.qkv_norm_rope_write.v2"


@dataclasses.dataclass(frozen=True)
class QkvSpec:
    """The static part of a qkv_norm_rope_write call."""

    num_q_heads: int
    eps: float
    style: RopeStyle
    layout: Layout
    implementation: Implementation


def qkv_norm_rope_write(
    qkv: Float[Array, "tokens width"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    positions: Int[Array, "tokens"],
    slot_mapping: Int[Array, "tokens"],
    cos: Float[Array, "max_positions half"],
    sin: Float[Array, "max_positions half"],
    *,
    q_norm: Float[Array, "head_dim"] | None = None,
    k_norm: Float[Array, "head_dim"] | None = None,
    eps: float = 1e-6,
    num_q_heads: int,
    rotary_dim: int | None = None,
    style: RopeStyle = "half",
    layer: Int[Array, ""] | int | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
) -> tuple[Any, ...]:
    """What stands between the q, k, v projection and attention, in one pass over `qkv`.

    Splits each token's row into heads of q, k and v; normalises those of q and k,
    x / √(mean(x²) + eps) · weight; turns them by the token's position (RoPE); writes K and V into
    the token's page slot and returns q. All in f32, rounded once.

    Args:
      qkv: [tokens, (num_q_heads + num_kv_heads) · head_dim + num_kv_heads · v_head_dim], bf16, f16
        or f32: the heads of q, then of k, then of v.
      k_pages, v_pages: as for `write_kv`, of qkv's dtype or 8-bit. Donated: updated in place.
      positions: row of cos and sin for each token. Outside [0, max_positions): the token's q is 0
        and its K and V are not written.
      slot_mapping: as for `write_kv`: negative or out of range, K and V are skipped (q is not); of
        several tokens for one slot the last one that is written wins, whole.
      cos, sin: f32[max_positions, rotary_dim / 2], one row per position; or one row per token
        (`rope_tables(positions, …)`), with positions = 0, 1, 2, ….
      q_norm, k_norm: RMSNorm weights of q and k heads, any float dtype. None: not normalised.
      eps: of the norms; static.
      num_q_heads: static.
      rotary_dim: how many dimensions of a head turn, even; the others stay. None: head_dim.
      style: "half" turns dimension i with i + rotary_dim / 2 (NeoX, Llama, Qwen), "interleaved"
        2 i with 2 i + 1 (GPT-J).
      layer: which layer of stacked pages; may be traced. With a traced one out of range nothing is
        written; one that the host knows is a ValueError.
      k_scale, v_scale: of 8-bit pages, as for `write_kv`: given, or pools of scales per token and
        head, which are computed and written. Those pools are donated. K and V are quantized from
        f32.
      implementation: None = native on CPU and CUDA, reference elsewhere; "native"; "reference".

    Returns:
      (q [tokens, num_q_heads, head_dim] in qkv's dtype, k_pages, v_pages), and with scales per
      token also (k_scale, v_scale).

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: under differentiation, under vmap where elements share a pool, or for a
        head_dim or rotary_dim that the native kernels lack (implementation="reference" offers all).
        Other vmap is that of `write_kv`.

    >>> import jax.numpy as jnp
    >>> k_pages, v_pages = jnp.zeros((2, 1, 4, 8)), jnp.zeros((2, 1, 4, 8))
    >>> cos, sin = jnp.zeros((9, 4)), jnp.ones((9, 4))  # a quarter turn: (a, b) → (−b, a)
    >>> q, k_pages, v_pages = qkv_norm_rope_write(
    ...     jnp.arange(24.0)[None], k_pages, v_pages, jnp.array([7]), jnp.array([5]), cos, sin,
    ...     num_q_heads=1)
    >>> print(q[0, 0])
    [-4. -5. -6. -7.  0.  1.  2.  3.]
    >>> print(v_pages[1, 0, 1])
    [16. 17. 18. 19. 20. 21. 22. 23.]
    """
    spec = QkvSpec(num_q_heads, eps, style, layout, implementation)
    positions, slot_mapping, index, *given = check_qkv(
        qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, q_norm, k_norm, rotary_dim,
        layer, k_scale, v_scale, spec,
    )  # fmt: skip
    scales, pools = given, None
    if is_per_token(given[0]):
        scales, pools = None, given
    rest = (positions, slot_mapping, cos, sin, q_norm, k_norm, index)
    return _qkv(spec, qkv, k_pages, v_pages, pools, scales, *rest)


class _Operands(NamedTuple):
    """The operands of the target, in order."""

    qkv: Any
    k_pages: Any
    v_pages: Any  # [0]: None
    k_scale: Any  # [num_kv_heads] of the layer, or a pool; [0]: None
    v_scale: Any
    positions: Any
    slot_mapping: Any
    cos: Any
    sin: Any
    q_norm: Any  # [0]: None
    k_norm: Any
    layer: Any

    def given(self) -> dict[str, Any]:
        """By name, those that are not None."""
        optional = ("v_pages", "k_scale", "v_scale", "q_norm", "k_norm")
        named = self._asdict()
        return {name: x for name, x in named.items() if name not in optional or x.shape != (0,)}

    def is_pool(self, name: str) -> bool:
        return getattr(self, name).ndim >= 3


# Those after q have the shape of the operand of that name where it is a pool, else [0].
_RESULTS = ("q", "k_pages", "v_pages", "k_scale", "v_scale")


def _none(dtype: Any) -> np.ndarray:
    return np.zeros(0, dtype)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3, 4))
def _qkv(spec: QkvSpec, qkv, k_pages, v_pages, scale_pools, scales, *rest):
    *rest, q_norm, k_norm, layer = rest
    norms = (q_norm, k_norm)
    same = all(norm is None or norm.dtype == qkv.dtype for norm in norms)
    dtype = qkv.dtype if same else jnp.float32
    weights = (_none(dtype) if norm is None else norm.astype(dtype) for norm in norms)
    of_layer = layer if is_stacked(k_pages, spec.layout) else None
    num_kv_heads = pages_shape(k_pages, spec.layout).num_kv_heads
    given = (
        _none(np.float32) if x is None else reference.scale_of_layer(x, of_layer, num_kv_heads)
        for x in (scales if scale_pools is None else scale_pools)
    )
    v_pool = _none(k_pages.dtype) if is_one_pool(spec.layout) else v_pages
    operands = (qkv, k_pages, v_pool, *given, *rest, *weights, layer)
    run = functools.partial(_qkv_reference, spec)
    if spec.implementation != "reference":
        run = _qkv_native(spec)
    q, k_pages, v_pool, *pools = run(*operands)
    v_pages = None if is_one_pool(spec.layout) else v_pool
    return q, k_pages, v_pages, *(() if scale_pools is None else pools)


def _shapes(spec: QkvSpec, x: _Operands) -> tuple[PagesShape, PagesShape]:
    """Of the pools of K and V."""
    v_pool = pool_of_v(x.k_pages, x.v_pages, spec.layout)
    return pages_shape(x.k_pages, spec.layout, "k"), pages_shape(v_pool, spec.layout, "v")


def _qkv_split(spec: QkvSpec, x: _Operands) -> Split:
    k_shape, v_shape = _shapes(spec, x)
    kinds = (
        spec.num_q_heads * k_shape.head_dim,
        k_shape.num_kv_heads * k_shape.head_dim,
        v_shape.num_kv_heads * v_shape.head_dim,
    )  # columns of qkv

    def arrange(operands, places):
        if KV_HEADS not in places:
            return operands
        qkv, *rest = operands
        index, count = places[KV_HEADS]
        begins = (0, kinds[0], kinds[0] + kinds[1])
        own = [
            jax.lax.dynamic_slice_in_dim(qkv, begin + index * (width // count), width // count, 1)
            for begin, width in zip(begins, kinds, strict=True)
        ]
        return jnp.concatenate(own, axis=1), *rest

    given = x.given()
    axes = {name: at_heads(array, None) for name, array in x._asdict().items()}
    axes |= pools_at_heads(given, spec.layout)
    axes |= {
        name: at_heads(given[name], given[name].ndim - 2 if x.is_pool(name) else 0)
        for name in ("k_scale", "v_scale")
        if name in given
    }
    pools = (axes[name] if x.is_pool(name) else WHOLE for name in _RESULTS[1:])
    return Split(axes, (f"- {KV_HEADS} -", *pools), fixed=PAGES, arrange=arrange)


def _qkv_reference(spec: QkvSpec, *operands):
    operands = _Operands(*operands)
    x = _Operands(**dict.fromkeys(_Operands._fields) | operands.given())
    k_shape, v_shape = _shapes(spec, x)
    # On one device of several, its own heads of q.
    kv_width = k_shape.num_kv_heads * (k_shape.head_dim + v_shape.head_dim)
    num_q_heads = (x.qkv.shape[1] - kv_width) // k_shape.head_dim
    q, k, v, slots = reference.qkv_heads(
        x.qkv, x.k_pages, x.v_pages, x.positions, x.slot_mapping, x.cos, x.sin, q_norm=x.q_norm,
        k_norm=x.k_norm, eps=spec.eps, num_q_heads=num_q_heads, style=spec.style,
        layout=spec.layout,
    )  # fmt: skip
    layer = x.layer if is_stacked(x.k_pages, spec.layout) else None
    pools = (x.k_pages, x.v_pages, x.k_scale, x.v_scale)
    written = (q, *reference.write_to_layer(pools, k, v, slots, layer, spec.layout))
    found = dict(zip(_RESULTS, written, strict=False))
    return tuple(
        getattr(operands, name)[:0] if found.get(name) is None else found[name] for name in _RESULTS
    )


@functools.cache
def _qkv_native(spec: QkvSpec):
    """The native op for one set of static options."""

    def call(*operands):
        x = _Operands(*operands)
        return tuple(
            ffi_call(
                TARGET,
                x,
                {"eps": np.float32(spec.eps), "style": spec.style, "layout": spec.layout},
                split=_qkv_split(spec, x),
                aliases={i: i for i, name in enumerate(_RESULTS) if i and x.is_pool(name)},
                cuda_workspace_words=cuda_workspace_words(x.slot_mapping.shape[0]),
                implementation=spec.implementation,
                reference=functools.partial(_qkv_reference, spec),
            )
        )

    op = "qkv_norm_rope_write"
    each = write_of_each(op, call, spec.layout, _Operands._fields, _RESULTS)
    return refusing_gradients(op, each)


def check_qkv(
    qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, q_norm, k_norm, rotary_dim, layer,
    k_scale, v_scale, spec,
) -> tuple[Any, ...]:  # fmt: skip
    """Checks a qkv_norm_rope_write call.

    Returns positions, slot_mapping and layer as i32, and the scales as f32 or None.
    """
    check_implementation(spec.implementation)
    check_choice("style", spec.style, ROPE_STYLES)
    k_shape, v_shape = check_pages(k_pages, v_pages, spec.layout, layer)
    head_dim = k_shape.head_dim
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    for name, value in (("num_q_heads", spec.num_q_heads), ("rotary_dim", rotary_dim)):
        whole = isinstance(value, int) and value is not True
        expect(whole and value >= 1, name, "an int >= 1", value)
    expect(
        rotary_dim % 2 == 0 and rotary_dim <= head_dim,
        "rotary_dim",
        f"an even number up to head_dim={head_dim}",
        rotary_dim,
    )
    known = isinstance(spec.eps, (int, float)) and math.isfinite(spec.eps)
    expect(known and spec.eps >= 0, "eps", "a finite number >= 0", spec.eps)
    check_float("qkv", qkv)
    width = (spec.num_q_heads + k_shape.num_kv_heads) * head_dim
    width += v_shape.num_kv_heads * v_shape.head_dim
    check_shape(
        "qkv", qkv, "tokens (num_q_heads+num_kv_heads)·head_dim+num_kv_heads·v_head_dim",
        (None, width),
    )  # fmt: skip
    if not is_eight_bit(k_pages):
        check_float("k_pages", k_pages, qkv.dtype)
    positions = as_index("positions", positions)
    slot_mapping = as_index("slot_mapping", slot_mapping)
    for name, x in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_shape(name, x, "tokens", (qkv.shape[0],))
    for name, x in (("cos", cos), ("sin", sin)):
        check_float(name, x, jnp.dtype("float32"))
        check_shape(name, x, "max_positions rotary_dim/2", (None, rotary_dim // 2))
    check_shape("sin", sin, "max_positions rotary_dim/2", cos.shape)
    expect(cos.shape[0] >= 1, "cos", "max_positions >= 1", 0)
    for name, x in (("q_norm", q_norm), ("k_norm", k_norm)):
        if x is not None:
            check_float(name, x)
            check_shape(name, x, "head_dim", (head_dim,))
    for name, shape in (("k_pages", k_shape), ("v_pages", v_shape)):
        check_native(name, shape.head_dim, spec.implementation)
    if spec.implementation != "reference" and spec.style == "half" and rotary_dim % 4:
        raise NotImplementedError(
            "rotary_dim: native kernels take a multiple of 4 with style='half', "
            f"got {rotary_dim}; implementation='reference' takes any even number"
        )
    layer = check_layer(layer, k_shape.num_layers)
    v_pages = pool_of_v(k_pages, v_pages, spec.layout)
    scales = check_written_scales(k_scale, v_scale, k_pages, v_pages, k_shape, v_shape)
    return positions, slot_mapping, layer, *scales
