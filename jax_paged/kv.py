"""Writes to the pages: new tokens into their slots, whole pages onto others.

These ops donate the pages they are given and update them in place. Called eagerly, the arrays
passed in are gone afterwards: use the returned ones. Inside a jitted function the update is in
place when that function itself donates the pages; else XLA copies the pool once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from jax_paged import _ffi, reference
from jax_paged._ffi import Implementation
from jax_paged.layout import Layout
from jax_paged.validation import (
    as_index,
    check_choice,
    check_pages,
    check_shape,
    check_write,
    cuda_lacks,
    expect,
    is_per_token,
)

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
        page_size, num_kv_heads, head_dim] ("NHD"), optionally with a leading num_layers axis; bf16,
        f16, f32, f8e4m3fn, f8e5m2 or int8. Donated: updated in place.
      k, v: [tokens, num_kv_heads, head_dim], bf16, f16 or f32; cast to the pages' dtype, round to
        nearest even. Into 8-bit pages goes k / k_scale, clamped to ±448 (e4m3), ±57344 (e5m2) or
        ±127 (int8); NaN stays NaN (in int8: 0).
      slot_mapping: page · page_size + offset of each token. Negative or out of range: the token is
        skipped. Of several tokens for one slot the last one wins, whole.
      layer: which layer of stacked pages; may be traced. Out of range: nothing is written.
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
      NotImplementedError: under vmap and differentiation (implementation="reference" offers both);
        8-bit pages at lowering for CUDA.

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
    layer = layer if k_pages.ndim == 5 else None
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


@functools.cache
def _write_native(layout: Layout, implementation: Implementation):
    """The native write for one layout, refusing the transforms that would copy the pool."""

    @custom_vmap
    def call(*operands):
        return tuple(
            _ffi.ffi_call(
                TARGET,
                operands,
                {"layout": layout},
                aliases={0: 0, 1: 1},
                cuda_lacks=cuda_lacks(TARGET, {"k_pages": operands[0]}),
                implementation=implementation,
                reference=functools.partial(_write_reference, layout),
            )
        )

    @call.def_vmap
    def refuse_vmap(axis_size, in_batched, *operands):
        raise NotImplementedError(
            "write_kv: vmap would copy the pages for each batch element; put the tokens of all "
            "elements into one call, or use implementation='reference'"
        )

    @jax.custom_jvp
    def write(*operands):
        return call(*operands)

    @write.defjvp
    def refuse_jvp(primals, tangents):
        raise NotImplementedError("write_kv: not differentiable; implementation='reference' is")

    return write


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
    check_pages(k_pages, v_pages, "HND", 0 if stacked else None)
    src_pages, dst_pages = as_index("src_pages", src_pages), as_index("dst_pages", dst_pages)
    check_shape("src_pages", src_pages, "n", (None,))
    check_shape("dst_pages", dst_pages, "n", src_pages.shape)
    return _copy_pages(k_pages, v_pages, src_pages, dst_pages)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _copy_pages(k_pages, v_pages, src_pages, dst_pages):
    num_pages = k_pages.shape[-4]
    num_layers = k_pages.shape[0] if k_pages.ndim == 5 else 1
    valid = (src_pages >= 0) & (src_pages < num_pages) & (dst_pages >= 0) & (dst_pages < num_pages)
    # Layer and page as one leading axis: older XLA transposes the pool to scatter into the second.
    first = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * num_pages
    source = first + jnp.where(valid, src_pages, 0)[None]
    target = jnp.where(valid[None], first + dst_pages[None], num_layers * num_pages)  # else dropped

    def copy(pages):
        flat = pages.reshape(num_layers * num_pages, *pages.shape[-3:])
        return flat.at[target].set(flat[source], mode="drop").reshape(pages.shape)

    return copy(k_pages), copy(v_pages)
