"""Writes to the pages: new tokens into their slots, tokens and whole pages onto others.

These ops donate the pages they are given and update them in place. Called eagerly, the arrays
passed in are gone afterwards: use the returned ones. Inside a jitted function the update is in
place when that function itself donates the pages; else XLA copies the pool once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from jax_paged import _ffi, reference
from jax_paged._ffi import Implementation
from jax_paged._put_rows import flat_rows, in_each_layer, put_rows
from jax_paged.layout import POOLS, Layout, is_stacked, kv_heads_axis, pages_shape
from jax_paged.rope import RopeStyle
from jax_paged.sharding import HeadAxes
from jax_paged.validation import (
    QkvSpec,
    as_index,
    check_array,
    check_choice,
    check_kv_scale,
    check_pages,
    check_qkv,
    check_shape,
    check_write,
    expect,
    is_eight_bit,
    is_per_token,
)

TARGET = "jax_paged.write_kv.v1"
QKV_TARGET = "jax_paged.qkv_norm_rope_write.v1"
_KV_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
    "int8": "int8",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float": "float32",
    "float32": "float32",
}


def write_kv(
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    k: Float[Array, "tokens num_kv_heads head_dim"],
    v: Float[Array, "tokens num_kv_heads v_head_dim"],
    slot_mapping: Int[Array, "tokens"],
    *,
    layer: Int[Array, ""] | int | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
) -> tuple[jax.Array, ...]:
    """Writes each token's K and V into its page slot; returns the updated pages.

    Args:
      k_pages, v_pages: [num_pages, num_kv_heads, page_size, head_dim] ("HND") or [num_pages,
        page_size, num_kv_heads, head_dim] ("NHD") or the K and V of "vllm5d" (see
        `jax_paged.layout`), optionally with a leading num_layers axis; bf16,
        f16, f32, f8e4m3fn, f8e5m2 or int8 (not vllm5d). Donated: updated in place.
      k, v: [tokens, num_kv_heads, head_dim], bf16, f16 or f32; cast to the pages' dtype, round to
        nearest even. Into 8-bit pages goes k / k_scale, clamped to ±448 (e4m3), ±57344 (e5m2) or
        ±127 (int8); NaN stays NaN (in int8: 0).
      slot_mapping: page · page_size + offset of each token. Negative or out of range: the token is
        skipped. Of several tokens for one slot the last one wins, whole.
      layer: which layer of stacked pages; may be traced. With a traced one out of range nothing is
        written; one that the host knows is a ValueError.
      k_scale, v_scale: of 8-bit pages: stored × scale = real; None: 1. A scalar or [num_kv_heads],
        for stacked pages also with a leading num_layers axis: a scale to use. Or [num_pages,
        num_kv_heads, page_size], stacked with num_layers in front: pools of scales, one per token
        and head; they are computed, max |k| / the largest stored value, and written. Then both are
        such pools, and donated.
      implementation: None = native on CPU and CUDA, reference elsewhere; "native"; "reference".

    Returns:
      (k_pages, v_pages), and with scales per token also (k_scale, v_scale). Every later reader must
      use these, not the arrays passed in.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: under vmap and differentiation (implementation="reference" offers both).

    The contract is that of vLLM's reshape_and_cache (slot −1 skips).

    >>> import jax.numpy as jnp
    >>> k_pages, v_pages = jnp.zeros((2, 1, 4, 8)), jnp.zeros((2, 1, 4, 8))
    >>> k = jnp.ones((2, 1, 8))
    >>> k_pages, v_pages = write_kv(k_pages, v_pages, k, 2 * k, jnp.array([5, -1]))
    >>> print(k_pages[1, 0, :, 0], float(v_pages.sum()))
    [0. 1. 0. 0.] 16.0
    """
    slot_mapping, index, k_scale, v_scale = check_write(
        k_pages, v_pages, k, v, slot_mapping, layer, k_scale, v_scale, layout, implementation
    )
    scales, pools = (k_scale, v_scale), None
    if is_per_token(k_scale, k_pages):
        scales, pools = None, scales
    operands = (k_pages, v_pages, pools, scales, k, v, slot_mapping, index)
    return _write_kv(layout, implementation, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3, 4))
def _write_kv(
    layout, implementation, k_pages, v_pages, scale_pools, scales, k, v, slot_mapping, layer
):
    """Quantises k and v where the pages are 8-bit, and writes them and their scales."""
    k_scale, v_scale = scales if scale_pools is None else scale_pools
    k, v, k_tokens, v_tokens = reference.quantised(k_pages, v_pages, k, v, layer, k_scale, v_scale)
    operands = (k_pages, v_pages, k, v, slot_mapping, layer)
    if implementation == "reference":
        written = _write_reference(layout, *operands)
    else:
        written = _write_native(layout, implementation)(*operands)
    if scale_pools is None:
        return written
    layer = layer if k_pages.ndim == 5 else None
    scales = reference.write_scales(k_scale, v_scale, k_tokens, v_tokens, slot_mapping, layer)
    return (*written, *scales)


def _write_reference(layout, k_pages, v_pages, k, v, slot_mapping, layer):
    layer = layer if is_stacked(k_pages, layout) else None
    return reference.scatter_tokens(k_pages, v_pages, k, v, slot_mapping, layer, layout)


def kv_dtype(name: str, model_dtype: Any = None) -> jnp.dtype:
    """The dtype of K and V pages by its usual name.

    Args:
      name: "auto" (model_dtype), "fp8" or "fp8_e4m3", "fp8_e5m2", "int8", "bf16" or "bfloat16",
        "fp16", "half" or "float16", "fp32", "float" or "float32".
      model_dtype: what "auto" stands for.

    Raises:
      ValueError: the name is none of these, or "auto" comes without model_dtype.

    The names are those of vLLM's --kv-cache-dtype.

    >>> print(kv_dtype("fp8"), kv_dtype("auto", "bfloat16"))
    float8_e4m3fn bfloat16
    """
    check_choice("name", name, ("auto", *_KV_DTYPES))
    if name == "auto":
        expect(model_dtype is not None, "model_dtype", "a dtype for 'auto'", None)
        return jnp.dtype(model_dtype)
    return jnp.dtype(_KV_DTYPES[name])


def _head_axes(k_pages, v_pages, layout: Layout) -> HeadAxes:
    of_pools = (kv_heads_axis(k_pages, layout, "k"), kv_heads_axis(v_pages, layout, "v"))
    of_operands = {"k_pages": of_pools[0], "v_pages": of_pools[1], "k": 1, "v": 1}
    return HeadAxes(of_operands | {"slot_mapping": None, "layer": None}, results=of_pools)


@functools.cache
def _write_native(layout: Layout, implementation: Implementation):
    """The native write for one layout."""

    def call(*operands):
        return tuple(
            _ffi.ffi_call(
                TARGET,
                operands,
                {"layout": layout},
                heads=_head_axes(operands[0], operands[1], layout),
                aliases={0: 0, 1: 1},
                implementation=implementation,
                reference=functools.partial(_write_reference, layout),
            )
        )

    return _refusing_transforms("write_kv", call)


def _refusing_transforms(op: str, native: Callable[..., tuple[jax.Array, ...]]):
    """A native write that refuses the transforms that would copy the pool."""
    call = custom_vmap(native)

    @call.def_vmap
    def refuse_vmap(axis_size, in_batched, *operands):
        raise NotImplementedError(
            f"{op}: vmap would copy the pages for each batch element; put the tokens of all "
            "elements into one call, or use implementation='reference'"
        )

    @jax.custom_jvp
    def write(*operands):
        return call(*operands)

    @write.defjvp
    def refuse_jvp(primals, tangents):
        raise NotImplementedError(f"{op}: not differentiable; implementation='reference' is")

    return write


def qkv_norm_rope_write(
    qkv: Float[Array, "tokens width"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
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
) -> tuple[jax.Array, ...]:
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
        head, which are computed and written. Those pools are donated.
      implementation: None = native on CPU and CUDA, reference elsewhere; "native"; "reference".

    Returns:
      (q [tokens, num_q_heads, head_dim] in qkv's dtype, k_pages, v_pages), and with scales per
      token also (k_scale, v_scale).

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: under vmap and differentiation, or for a head_dim or rotary_dim that the
        native kernels lack (implementation="reference" offers all).

    With 8-bit pages the write is native, as in `write_kv`, and what comes before it is XLA's.

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
    operands = (qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, q_norm, k_norm, index)
    if is_eight_bit(k_pages):
        scales, pools = given, None
        if is_per_token(given[0], k_pages):
            scales, pools = None, given
        return _qkv_eight_bit(spec, k_pages, v_pages, pools, scales, operands[:1] + operands[3:])
    return _qkv(spec, *operands)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def _qkv_eight_bit(spec: QkvSpec, k_pages, v_pages, scale_pools, scales, operands):
    qkv, positions, slot_mapping, cos, sin, q_norm, k_norm, layer = operands
    q, k, v, slots = reference.qkv_heads(
        qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, q_norm=q_norm, k_norm=k_norm,
        eps=spec.eps, num_q_heads=spec.num_q_heads, style=spec.style, layout=spec.layout,
    )  # fmt: skip
    written = (k_pages, v_pages, scale_pools, scales, k, v, slots, layer)
    return q, *_write_kv(spec.layout, spec.implementation, *written)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _qkv(spec: QkvSpec, qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, *rest):
    *norms, layer = rest
    same = all(norm is None or norm.dtype == qkv.dtype for norm in norms)
    dtype = qkv.dtype if same else jnp.float32
    weights = (np.zeros(0, dtype) if norm is None else norm.astype(dtype) for norm in norms)
    operands = (qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, *weights, layer)
    if spec.implementation == "reference":
        return _qkv_reference(spec, *operands)
    return _qkv_native(spec)(*operands)


def _qkv_head_axes(spec: QkvSpec, k_pages, v_pages) -> HeadAxes:
    k_shape, v_shape = (
        pages_shape(x, spec.layout, pool) for x, pool in zip((k_pages, v_pages), POOLS, strict=True)
    )
    kinds = (
        spec.num_q_heads * k_shape.head_dim,
        k_shape.num_kv_heads * k_shape.head_dim,
        v_shape.num_kv_heads * v_shape.head_dim,
    )  # columns of qkv

    def take_own(operands, index, count):
        qkv, *rest = operands
        begins = (0, kinds[0], kinds[0] + kinds[1])
        own = [
            jax.lax.dynamic_slice_in_dim(qkv, begin + index * (width // count), width // count, 1)
            for begin, width in zip(begins, kinds, strict=True)
        ]
        return jnp.concatenate(own, axis=1), *rest

    of_pools = (
        kv_heads_axis(k_pages, spec.layout, "k"), kv_heads_axis(v_pages, spec.layout, "v")
    )  # fmt: skip
    of_operands = {"qkv": None, "k_pages": of_pools[0], "v_pages": of_pools[1]} | dict.fromkeys(
        ("positions", "slot_mapping", "cos", "sin", "q_norm", "k_norm", "layer")
    )
    return HeadAxes(of_operands, (1, *of_pools), take_own)


def _local_spec(spec: QkvSpec, qkv, k_pages, v_pages) -> QkvSpec:
    """The spec for these operands, which may be those of one device of several."""
    k_shape = pages_shape(k_pages, spec.layout, "k")
    v_shape = pages_shape(v_pages, spec.layout, "v")
    rest = k_shape.num_kv_heads * (k_shape.head_dim + v_shape.head_dim)
    return dataclasses.replace(spec, num_q_heads=(qkv.shape[1] - rest) // k_shape.head_dim)


def _qkv_reference(spec: QkvSpec, *operands):
    *operands, q_norm, k_norm, layer = operands
    spec = _local_spec(spec, *operands[:3])
    return reference.qkv_norm_rope_write(
        *operands,
        q_norm=q_norm if q_norm.size else None,
        k_norm=k_norm if k_norm.size else None,
        eps=spec.eps,
        num_q_heads=spec.num_q_heads,
        style=spec.style,
        layer=layer if is_stacked(operands[1], spec.layout) else None,
        layout=spec.layout,
    )


@functools.cache
def _qkv_native(spec: QkvSpec):
    """The native op for one set of static options."""

    def call(*operands):
        attributes = {"eps": np.float32(spec.eps), "style": spec.style, "layout": spec.layout}
        return tuple(
            _ffi.ffi_call(
                QKV_TARGET,
                operands,
                attributes,
                heads=_qkv_head_axes(spec, *operands[1:3]),
                aliases={1: 1, 2: 2},
                implementation=spec.implementation,
                reference=functools.partial(_qkv_reference, spec),
            )
        )

    return _refusing_transforms("qkv_norm_rope_write", call)


def copy_pages(
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    src_pages: Int[Array, "n"],
    dst_pages: Int[Array, "n"],
    *,
    stacked: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Copies whole pages, dst_pages[i] ← src_pages[i], in every layer; returns the updated pages.

    Args:
      k_pages, v_pages: pages in any layout. Donated: updated in place.
      src_pages, dst_pages: page ids. A pair with an id outside [0, num_pages) is skipped. No page
        may be named twice in dst_pages; a page that is both read and written is read as it was.
      stacked: whether the pages carry a leading num_layers axis.

    Raises:
      ValueError: shapes disagree.

    >>> import jax.numpy as jnp
    >>> k_pages, v_pages = jnp.arange(3.0).reshape(3, 1, 1, 1), jnp.zeros((3, 1, 1, 1))
    >>> k_pages, _ = copy_pages(k_pages, v_pages, jnp.array([2, -1]), jnp.array([0, 1]))
    >>> print(k_pages.ravel())
    [2. 1. 2.]
    """
    check_array("k_pages", k_pages)
    check_array("v_pages", v_pages)
    # A page is a page in every layout: HND stands for NHD too, and only K of "vllm5d" has its rank.
    layout = "vllm5d" if len(k_pages.shape) == len(v_pages.shape) + 1 else "HND"
    check_pages(k_pages, v_pages, layout, 0 if stacked else None)
    src_pages, dst_pages = as_index("src_pages", src_pages), as_index("dst_pages", dst_pages)
    check_shape("src_pages", src_pages, "n", (None,))
    check_shape("dst_pages", dst_pages, "n", src_pages.shape)
    return copy_rows(1 + stacked, (k_pages, v_pages), src_pages, dst_pages)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy_rows(leading, pools, src, dst):
    """`copy_pages` in any pools, of rows that stand behind so many leading axes.

    1 or, with a num_layers axis in front, 2: pages, of K and V or of scales per token. 3: tokens,
    where a page has its tokens first.
    """

    num_layers = pools[0].shape[0] if leading > 1 else 1
    num_rows = math.prod(pools[0].shape[:leading]) // max(num_layers, 1)
    valid = (src >= 0) & (src < num_rows) & (dst >= 0) & (dst < num_rows)
    source = in_each_layer(num_layers, num_rows, jnp.where(valid, src, 0)).ravel()
    target = jnp.where(valid[None], in_each_layer(num_layers, num_rows, dst), -1).ravel()
    return tuple(put_rows(pool, target, flat_rows(pool, leading)[source]) for pool in pools)


def move_slots(
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    src_slots: Int[Array, "n"],
    dst_slots: Int[Array, "n"],
    *,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    stacked: bool = False,
    layout: Layout = "HND",
    implementation: Implementation = None,
) -> tuple[jax.Array, ...]:
    """Copies tokens, slot dst_slots[i] ← slot src_slots[i], in every layer; returns the pages.

    Args:
      k_pages, v_pages: pages as for `write_kv`. Donated: updated in place.
      src_slots, dst_slots: page · page_size + offset. A pair with a slot out of range, e.g. −1, is
        skipped. All are read before one is written; of several tokens for one slot the last wins.
      k_scale, v_scale: pools of scales per token and head, as for `write_kv`: copied along, donated
        and returned behind the pages. None for other scales, which do not belong to slots.
      stacked: whether the pages carry a leading num_layers axis.
      implementation: as for `write_kv`.

    Raises:
      ValueError: shapes disagree, or scales are not per token.
      NotImplementedError: as `write_kv`.

    >>> import jax.numpy as jnp
    >>> k_pages, v_pages = jnp.arange(6.0).reshape(3, 1, 2, 1), jnp.zeros((3, 1, 2, 1))
    >>> k_pages, _ = move_slots(k_pages, v_pages, jnp.array([5, -1, 1]), jnp.array([1, 3, 0]))
    >>> print(k_pages.ravel())
    [1. 5. 2. 3. 4. 5.]
    """
    check_choice("implementation", implementation, (None, "native", "reference"))
    shapes = check_pages(k_pages, v_pages, layout, 0 if stacked else None)
    scales = tuple(
        check_kv_scale(name, scale, pages, shape)
        for name, scale, pages, shape in zip(
            ("k_scale", "v_scale"), (k_scale, v_scale), (k_pages, v_pages), shapes, strict=True
        )
    )
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        expect(
            is_per_token(scale, k_pages) == any(x is not None for x in scales),
            name,
            "a scale per token, or None twice",
            "None" if scale is None else f"rank {scale.ndim}",
        )
    src_slots, dst_slots = as_index("src_slots", src_slots), as_index("dst_slots", dst_slots)
    check_shape("src_slots", src_slots, "n", (None,))
    check_shape("dst_slots", dst_slots, "n", src_slots.shape)
    scales = None if scales[0] is None else scales
    return _move_slots(layout, implementation, k_pages, v_pages, scales, src_slots, dst_slots)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3, 4))
def _move_slots(layout, implementation, k_pages, v_pages, scales, src_slots, dst_slots):
    shape = pages_shape(k_pages, layout)
    num_slots = shape.num_pages * shape.page_size
    inside = [(slots >= 0) & (slots < num_slots) for slots in (src_slots, dst_slots)]
    source = jnp.where(inside[0], src_slots, 0)
    target = jnp.where(inside[0] & inside[1], dst_slots, -1)
    if implementation == "reference":
        write = functools.partial(_write_reference, layout)
    else:
        write = _write_native(layout, implementation)

    def move_in(write, k_pages, v_pages, layer, layout):
        k, v = (
            reference.read_tokens(pages, source, layer, layout, pool)
            for pages, pool in zip((k_pages, v_pages), POOLS, strict=True)
        )
        return tuple(write(k_pages, v_pages, k, v, target, layer))

    def move(layer, pools):  # a layer at a time, so that what is on the move stays small
        k_pages, v_pages, *scales = pools
        moved = move_in(write, k_pages, v_pages, layer, layout)
        if scales:  # like pages with a head_dim of 1
            k_scale, v_scale = (x[..., None] for x in scales)
            write_scales = functools.partial(_write_reference, "HND")
            wide = move_in(write_scales, k_scale, v_scale, layer, "HND")
            moved += tuple(x[..., 0] for x in wide)
        return moved

    pools = (k_pages, v_pages, *(scales or ()))
    if shape.num_layers is None:
        return move(jnp.int32(0), pools)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(shape.num_layers), move, pools)
