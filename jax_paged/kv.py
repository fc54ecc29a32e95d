"""Writes to the pages: new tokens into their slots, whole pages onto others.

These ops donate the pages they are given and update them in place. Called eagerly, the arrays
passed in are gone afterwards: use the returned ones. Inside a jitted function the update is in
place when that function itself donates the pages; else XLA copies the pool once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from jax_paged import _ffi, reference
from jax_paged._ffi import Implementation
from jax_paged.layout import Layout, kv_heads_axis
from jax_paged.sharding import HeadAxes
from jax_paged.validation import as_index, check_pages, check_shape, check_write

TARGET = "jax_paged.write_kv.v1"


def write_kv(
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    k: Float[Array, "tokens num_kv_heads head_dim"],
    v: Float[Array, "tokens num_kv_heads v_head_dim"],
    slot_mapping: Int[Array, "tokens"],
    *,
    layer: Int[Array, ""] | int | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes each token's K and V into its page slot; returns the updated pages.

    Args:
      k_pages, v_pages: [num_pages, num_kv_heads, page_size, head_dim] ("HND") or [num_pages,
        page_size, num_kv_heads, head_dim] ("NHD"), optionally with a leading num_layers axis; bf16,
        f16 or f32. Donated: updated in place.
      k, v: [tokens, num_kv_heads, head_dim], bf16, f16 or f32; cast to the pages' dtype, round to
        nearest even.
      slot_mapping: page · page_size + offset of each token. Negative or out of range: the token is
        skipped. Of several tokens for one slot the last one wins, whole.
      layer: which layer of stacked pages; may be traced. Out of range: nothing is written.
      implementation: None = native on CPU and CUDA, reference elsewhere; "native"; "reference".

    Returns:
      (k_pages, v_pages). Every later reader must use these, not the arrays passed in.

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
    slot_mapping, index = check_write(
        k_pages, v_pages, k, v, slot_mapping, layer, layout, implementation
    )
    return _write_kv(layout, implementation, k_pages, v_pages, k, v, slot_mapping, index)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _write_kv(layout, implementation, k_pages, v_pages, k, v, slot_mapping, layer):
    k, v = k.astype(k_pages.dtype), v.astype(v_pages.dtype)
    operands = (k_pages, v_pages, k, v, slot_mapping, layer)
    if implementation == "reference":
        return _write_reference(layout, *operands)
    return _write_native(layout, implementation)(*operands)


def _write_reference(layout, k_pages, v_pages, k, v, slot_mapping, layer):
    layer = layer if k_pages.ndim == 5 else None
    return reference.write_kv(k_pages, v_pages, k, v, slot_mapping, layer=layer, layout=layout)


def _head_axes(pages, layout: Layout) -> HeadAxes:
    axis = kv_heads_axis(pages, layout)
    of_operands = {"k_pages": axis, "v_pages": axis, "k": 1, "v": 1}
    return HeadAxes(of_operands | {"slot_mapping": None, "layer": None}, results=(axis, axis))


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
                heads=_head_axes(operands[0], layout),
                aliases={0: 0, 1: 1},
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
