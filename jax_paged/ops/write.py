# SPDX-License-Identifier: Apache-2.0
"""Writes to the pages: new tokens into their slots.

These ops donate the pages they are given and update them in place. Called eagerly, the arrays
passed in are gone afterwards: use the returned ones. Inside a jitted function the update is in
place when that function itself donates the pages; else XLA copies the pool once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.checks import (
    Implementation,
    as_index,
    check_choice,
    check_float,
    check_implementation,
    check_kv_scale,
    check_layer,
    check_pages,
    check_shape,
    expect,
    is_per_token,
    other_layout,
    shape_text,
)
from jax_paged.layout import Layout, is_one_pool, is_stacked, pool_of_v
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import PAGES, WHOLE, Split, at_heads, pools_at_heads
from jax_paged.ops import reference
from jax_paged.ops.fold import write_of_each

TARGET = "jax_paged.write_kv.v1"
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
    v_pages: Float[Array, "..."] | None,
    k: Float[Array, "tokens num_kv_heads head_dim"],
    v: Float[Array, "tokens num_kv_heads v_head_dim"],
    slot_mapping: Int[Array, "tokens"],
    *,
    layer: Int[Array, ""] | int | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
) -> tuple[Any, ...]:
    """Writes each token's K and V into its page slot; returns the updated pages.

    Args:
      k_pages, v_pages: [num_pages, num_kv_heads, page_size, head_dim] ("HND") or [num_pages,
        page_size, num_kv_heads, head_dim] ("NHD") or the K and V of "vllm5d", or the one pool of
        "rpa" and None (see `jax_paged.layout`), optionally with a leading num_layers axis; bf16,
        f16, f32, f8e4m3fn, f8e5m2 or int8. Donated: updated in place.
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
      (k_pages, v_pages), of layout "rpa" (k_pages, None), and with scales per token also (k_scale,
      v_scale). Every later reader must use these, not the arrays passed in.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: under differentiation, and under vmap where elements share a pool
        (implementation="reference" offers both).

    vmap over pages, [batch, …], runs one call after another, in place; layer-stacked pages are
    copied.

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
    if is_per_token(k_scale):
        scales, pools = None, scales
    operands = (k_pages, v_pages, pools, scales, k, v, slot_mapping, index)
    return _write_kv(layout, implementation, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3, 4))
def _write_kv(
    layout, implementation, k_pages, v_pages, scale_pools, scales, k, v, slot_mapping, layer
):
    """Quantizes k and v where the pages are 8-bit, and writes them and their scales."""
    of_layer = layer if is_stacked(k_pages, layout) else None
    k_scale, v_scale = (
        reference.scale_of_layer(scale, of_layer, k.shape[1])
        for scale in (scales if scale_pools is None else scale_pools)
    )
    v_pool = pool_of_v(k_pages, v_pages, layout)
    k, v, k_tokens, v_tokens = reference.quantized(k_pages, v_pool, k, v, k_scale, v_scale)
    operands = (k_pages, v_pages, k, v, slot_mapping, layer)
    if implementation == "reference":
        written = reference_write(layout, *operands)
    else:
        written = native_write(layout, implementation)(*operands)
    if scale_pools is None:
        return written
    scales = reference.write_scales(k_scale, v_scale, k_tokens, v_tokens, slot_mapping, of_layer)
    return (*written, *scales)


def reference_write(layout, k_pages, v_pages, k, v, slot_mapping, layer):
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


def _split(layout: Layout, k_pages, v_pages, k, v, *_) -> Split:
    if is_one_pool(layout):
        pools = pools_at_heads({"k_pages": k_pages}, layout) | {"v_pages": WHOLE}
    else:
        pools = pools_at_heads({"k_pages": k_pages, "v_pages": v_pages}, layout)
    axes = pools | {"k": at_heads(k, 1), "v": at_heads(v, 1), "slot_mapping": "-", "layer": ""}
    return Split(axes, results=tuple(pools.values()), fixed=PAGES)


@functools.cache
def native_write(layout: Layout, implementation: Implementation):
    """The native write for one layout."""

    def call(k_pages, v_pages, *rest) -> tuple[Any, ...]:
        if is_one_pool(layout):
            # Nothing, which varies over the mesh axes that the pool varies over. XLA would copy a
            # pool that is read beside its new value.
            v_pages = rest[0][:0].max((1, 2), initial=0).astype(k_pages.dtype)
        operands = (k_pages, v_pages, *rest)
        k_pages, v_pages = ffi_call(
            TARGET,
            operands,
            {"layout": layout},
            split=_split(layout, *operands),
            aliases={0: 0, 1: 1},
            cuda_workspace_words=cuda_workspace_words(operands[4].shape[0]),
            implementation=implementation,
            reference=in_place_of_native,
        )
        return k_pages, None if is_one_pool(layout) else v_pages

    def in_place_of_native(k_pages, v_pages, *rest):
        if not is_one_pool(layout):
            return reference_write(layout, k_pages, v_pages, *rest)
        return reference_write(layout, k_pages, None, *rest)[0], v_pages

    pools = ("k_pages", "v_pages")
    names = (*pools, "k", "v", "slot_mapping", "layer")
    return refusing_gradients("write_kv", write_of_each("write_kv", call, layout, names, pools))


def cuda_workspace_words(tokens: int) -> int:
    """What the CUDA kernels of a write work in: SlotTableWords of ffi/cuda/written_tokens.h.

    A table of the slots that are written: a power of two, at least 2 · tokens and 2.
    """
    return 1 << (max(2 * tokens, 2) - 1).bit_length()


def refusing_gradients(op: str, call: Callable[..., tuple[jax.Array, ...]]):
    """A native write that says who can differentiate it."""

    @jax.custom_jvp
    def write(*operands):
        return call(*operands)

    @write.defjvp
    def refuse_jvp(primals, tangents):
        raise NotImplementedError(f"{op}: not differentiable; implementation='reference' is")

    return write


def check_write(
    k_pages, v_pages, k, v, slot_mapping, layer, k_scale, v_scale, layout, implementation
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Checks a page write; returns slot_mapping and layer as i32, the scales as f32 or None."""
    check_implementation(implementation)
    k_shape, v_shape = check_pages(k_pages, v_pages, layout, layer)
    slot_mapping = as_index("slot_mapping", slot_mapping)
    check_shape("slot_mapping", slot_mapping, "tokens", (None,))
    for name, x, shape in (("k", k, k_shape), ("v", v, v_shape)):
        check_float(name, x)
        sizes = (slot_mapping.shape[0], shape.num_kv_heads, shape.head_dim)
        other = other_layout(k_pages, layout, lambda heads, x=x: x.shape[1:2] == (heads,))
        check_shape(name, x, "tokens num_kv_heads head_dim", sizes, hint=other)
    layer = check_layer(layer, k_shape.num_layers)
    v_pages = pool_of_v(k_pages, v_pages, layout)
    scales = check_written_scales(k_scale, v_scale, k_pages, v_pages, k_shape, v_shape)
    return slot_mapping, layer, *scales


def check_written_scales(
    k_scale, v_scale, k_pages, v_pages, k_shape, v_shape
) -> tuple[jax.Array | None, jax.Array | None]:
    """Checks the scales of a page write; returns them as f32, or None."""
    k_scale = check_kv_scale("k_scale", k_scale, k_pages, k_shape)
    v_scale = check_kv_scale("v_scale", v_scale, v_pages, v_shape)
    expect(
        is_per_token(k_scale) == is_per_token(v_scale),
        "v_scale",
        "a scale per token where k_scale is one, and only there",
        "None" if v_scale is None else f"shape {shape_text(v_scale.shape)}",
    )
    return k_scale, v_scale
