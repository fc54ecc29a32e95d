# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) over pages that hold one compressed row per token."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_paged.checks import (
    Implementation,
    as_index,
    as_scale_of,
    check_array,
    check_float,
    check_implementation,
    check_kv_dtype,
    check_layer,
    check_shape,
    expect,
)
from jax_paged.layout import PagesShape
from jax_paged.ops.attention import attend_checked, check_batch
from jax_paged.ops.options import Arrays, Call, Static, documented, read_options
from jax_paged.ops.reference import QMAX, last_of_equal, layer_scale, quantize
from jax_paged.ops.scatter_rows import scatter_rows

MAX_LATENT_DIM = 576  # of the native kernels: 512 latent + 64 rope
_PAGES = "[num_pages, page_size, latent + rope]"


@documented
def mla_paged_attention(
    q: Float[Array, "tokens num_q_heads latent_rope"],
    kv_pages: Float[Array, "..."],
    page_table: Int[Array, "num_seqs pages_per_seq"],
    seq_lens: Int[Array, "num_seqs"],
    cu_q_lens: Int[Array, "num_seqs+1"],
    num_seqs: Int[Array, "..."] | int | None = None,
    *,
    sm_scale: Float[Array, ""] | float,
    v_head_dim: int,
    layer: Int[Array, ""] | int | None = None,
    sliding_window: Int[Array, "..."] | int | None = None,
    num_pinned: Int[Array, "..."] | int | None = None,
    slot_offset: Int[Array, "..."] | int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
    sinks: Float[Array, "num_q_heads"] | None = None,
    kv_scale: Float[Array, "..."] | float | None = None,
    tree: Int[Array, "num_seqs max_tree 2"] | None = None,
    tree_sizes: Int[Array, "num_seqs"] | None = None,
    out_dtype: DTypeLike | None = None,
    out_scale: Float[Array, ""] | float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    num_kv_splits: int | None = None,
    split_tokens: int | None = None,
    implementation: Implementation = None,
):
    """Attends absorbed queries to latent rows: MLA with its up-projections moved to q and out.

    A page holds for each token one row c ‖ r, its latent vector and its rotated key part, which all
    heads share. With keys W_UK[h] c and values W_UV[h] c of head h,

      q_nope[h] · W_UK[h] c + q_rope[h] · r = (W_UK[h]ᵀ q_nope[h] ‖ q_rope[h]) · (c ‖ r)

    so q is the absorbed query, and the softmax-weighted sum of c, times W_UV[h], is the head's
    output. This op gives that sum: out[t, h] = Σ_j softmax_j(sm_scale · q[t, h] · kv[j]) ·
    kv[j, :v_head_dim]. Each row is read once for all heads; nothing of the pool is copied.

    Args:
      q: [tokens, num_q_heads, latent + rope], bf16, f16 or f32: absorbed; rows in order, padding at
        the end. Any number of heads (128 in DeepSeek-V3).
      kv_pages: [num_pages, page_size, latent + rope] of q's dtype, or f8e4m3fn, f8e5m2 or int8;
        optionally with a leading num_layers axis (then give `layer`).
      page_table, seq_lens, cu_q_lens, num_seqs, return_lse: as for `ragged_paged_attention`.
      sm_scale: required: it goes by the head_dim before the absorption, e.g. (128 + 64) ** −0.5.
        May be traced.
      kv_scale: what 8-bit rows are multiplied with; None: 1. A scalar, or [num_layers] for stacked
        pages.
      v_head_dim: the latent size, at most latent + rope; the first entries of a row. Static.
      {options}

    Returns:
      [tokens, num_q_heads, v_head_dim] in q's dtype or out_dtype; with return_lse also f32[tokens,
      num_q_heads]. Padding is exactly 0 with lse −inf; NaN in unused slots never reaches it.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: the native kernels take rows and v_head_dim of multiples of 8 up to 576.

    Differentiable as `ragged_paged_attention` is (the backward pass is the reference).
    vmap runs one call after another. Over devices q may be split by heads; the pool stays whole.

    After DeepSeek-V2 (2024), section 2.1; the absorbed form is that of its inference code. On CUDA
    bf16 and f16 run on tensor cores, with windows; docs/support.md lists what runs on the SIMT
    kernel: right rather than fast.

    >>> import jax.numpy as jnp
    >>> kv_pages = jnp.arange(4.0)[None, :, None] * jnp.ones((1, 4, 16))
    >>> q, table = jnp.zeros((1, 2, 16)), jnp.array([[0]])
    >>> out = mla_paged_attention(
    ...     q, kv_pages, table, jnp.array([3]), jnp.array([0, 1]), sm_scale=1.0, v_head_dim=8)
    >>> print(out.shape, out[0, 0, 0])
    (1, 2, 8) 1.0
    """
    given = locals()
    return attend_checked(*check_call(given), return_lse)


def check_latent_pages(kv_pages: Any, layer: Any) -> jax.Array:
    """Checks a pool of latent rows; returns layer as i32."""
    check_array("kv_pages", kv_pages)
    rank = len(kv_pages.shape)
    expect(
        rank in (3, 4), "kv_pages", f"{_PAGES}, or with a leading num_layers", list(kv_pages.shape)
    )
    expect(
        (rank == 4) == (layer is not None),
        "layer",
        "an i32 scalar for stacked pages, None for pages without a layer axis",
        f"{'None' if layer is None else 'a value'} for kv_pages of rank {rank}",
    )
    expect(kv_pages.shape[-2] >= 1, "kv_pages", "page_size >= 1", kv_pages.shape[-2])
    check_kv_dtype("kv_pages", kv_pages)
    return check_layer(layer, kv_pages.shape[0] if rank == 4 else None)


def check_latent_scale(kv_scale: Any, kv_pages: jax.Array) -> jax.Array | None:
    """Checks a scale of 8-bit latent rows; returns it as f32, a scalar or [num_layers]."""
    if kv_scale is None:
        return None
    kv_scale = as_scale_of(kv_pages, "kv_scale", kv_scale)
    layers = kv_pages.shape[:-3]
    expect(
        kv_scale.shape in ((), layers),
        "kv_scale",
        "a scalar" + (f" or [num_layers={layers[0]}]" if layers else ""),
        list(kv_scale.shape),
    )
    return kv_scale


def check_call(given: Mapping[str, Any]) -> tuple[Static, Arrays]:
    """Checks a call: as attention with one KV head, whose V is the front of each row of K."""
    implementation, v_head_dim = given["implementation"], given["v_head_dim"]
    q, kv_pages = given["q"], given["kv_pages"]
    check_implementation(implementation)
    check_latent_pages(kv_pages, given["layer"])
    width, native = kv_pages.shape[-1], implementation != "reference"
    check_float("q", q)
    check_shape("q", q, "tokens num_q_heads latent+rope", (None, None, width))
    expect(q.shape[1] >= 1, "q", "at least one head", 0)
    check_kv_dtype("kv_pages", kv_pages, q.dtype)
    rows = check_batch(given)
    whole = isinstance(v_head_dim, int) and v_head_dim is not True and v_head_dim >= 1
    expect(whole, "v_head_dim", "an int >= 1", v_head_dim)
    expect(v_head_dim <= width, "v_head_dim", f"at most latent+rope={width}", v_head_dim)
    for name, value in (("kv_pages", width), ("v_head_dim", v_head_dim)):
        if native and (value % 8 or not 8 <= value <= MAX_LATENT_DIM):
            raise NotImplementedError(
                f"{name}: native kernels take a multiple of 8 up to {MAX_LATENT_DIM}, got {value}; "
                "implementation='reference' takes any"
            )
    *layers, num_pages, page_size, _ = kv_pages.shape
    shape = PagesShape(layers[0] if layers else None, num_pages, 1, page_size, width)
    call = Call(
        q, kv_pages, kv_pages, shape, shape._replace(head_dim=v_head_dim),
        rows["seq_lens"].shape[0], given,
    )  # fmt: skip
    static, arrays = read_options(call)
    static["v_head_dim"] = v_head_dim
    kv_scale = check_latent_scale(given["kv_scale"], kv_pages)
    scales = {} if kv_scale is None else {"k_scale": kv_scale}
    return tuple(static.items()), {"q": q, "kv_pages": kv_pages} | rows | arrays | scales


def write_mla_kv(
    kv_pages: Float[Array, "..."],
    kv: Float[Array, "tokens latent_rope"],
    slot_mapping: Int[Array, "tokens"],
    *,
    layer: Int[Array, ""] | int | None = None,
    kv_scale: Float[Array, "..."] | float | None = None,
) -> jax.Array:
    """Writes each token's latent row into its page slot; returns the updated pages.

    Args:
      kv_pages: [num_pages, page_size, latent + rope], bf16, f16, f32 or 8-bit, optionally with a
        leading num_layers axis (then give `layer`). Donated: updated in place, as `write_kv` does.
      kv: [tokens, latent + rope], bf16, f16 or f32: c ‖ r; cast to the pages' dtype, round to
        nearest even; 8-bit: divided by kv_scale and clamped, as `write_kv` does.
      kv_scale: of 8-bit pages, as for `mla_paged_attention`.
      slot_mapping: page · page_size + offset of each token. Negative or out of range: the token is
        skipped. Of several tokens for one slot the last one wins, whole.
      layer: which layer of stacked pages; may be traced. With a traced one out of range nothing is
        written; one that the host knows is a ValueError.

    Raises:
      ValueError: an argument's shape or dtype is wrong.

    Differentiable. vmap over pages, [batch, …], runs once for all elements, in place; where
    elements share a pool, each gets a copy.

    >>> import jax.numpy as jnp
    >>> kv_pages = write_mla_kv(jnp.zeros((2, 4, 8)), jnp.ones((2, 8)), jnp.array([5, -1]))
    >>> print(kv_pages[1, :, 0], float(kv_pages.sum()))
    [0. 1. 0. 0.] 8.0
    """
    index = check_latent_pages(kv_pages, layer)
    slot_mapping = as_index("slot_mapping", slot_mapping)
    check_shape("slot_mapping", slot_mapping, "tokens", (None,))
    check_float("kv", kv)
    check_shape("kv", kv, "tokens latent+rope", (slot_mapping.shape[0], kv_pages.shape[-1]))
    return _write(kv_pages, kv, slot_mapping, index, check_latent_scale(kv_scale, kv_pages))


@functools.partial(jax.jit, donate_argnums=0)
def _write(kv_pages, kv, slot_mapping, layer, kv_scale):
    num_slots = kv_pages.shape[-3] * kv_pages.shape[-2]
    num_layers = kv_pages.shape[0] if kv_pages.ndim == 4 else 1
    if kv_pages.dtype.name in QMAX:
        scale = jnp.ones((), jnp.float32) if kv_scale is None else kv_scale
        kv = quantize(kv, layer_scale(scale, layer), kv_pages.dtype)
    order, slot = last_of_equal(slot_mapping, num_slots)
    exists = (slot < num_slots) & (layer >= 0) & (layer < num_layers)
    rows = jnp.where(exists, layer * num_slots + slot, -1)
    return scatter_rows(kv_pages, rows, kv[order].astype(kv_pages.dtype))
