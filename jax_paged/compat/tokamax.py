# SPDX-License-Identifier: Apache-2.0
"""The signature of tokamax.ops.batched_ragged_paged_attention, of tokamax 0.0.17."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_paged.checks import OUT_DTYPES, check_array, check_choice, check_shape, expect
from jax_paged.checks import is_eight_bit as is_eight_bit_pool
from jax_paged.compat.common import as_i32, attend, check_mask_value, check_pool
from jax_paged.ops.cascade import rows_of_tokens
from jax_paged.ops.write import write_kv

__all__ = ("batched_ragged_paged_attention", "ragged_paged_attention")


def batched_ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    decode_block_sizes: Any = None,
    prefill_block_sizes: Any = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
    out_dtype: Any = None,
    use_causal_mask: bool = True,
    skip_kv_update: bool = False,
    kv_layout: str = "HEAD_ALONG_SUBLANE",
    decode_query_size: int = 1,
    cp_group_size: int | None = None,
    cp_rank: jax.Array | None = None,
    attention_scope: str = "FULL",
    return_lse: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Writes the new tokens' K and V to the cache, and attends their queries: tokamax's op.

    The cache is one pool of layout "rpa", which is written and read where it lies: by the native
    kernels on CPU and CUDA, by the reference elsewhere.

    Args:
      queries: [tokens, num_q_heads, head_dim], bf16, f16 or f32.
      keys, values: [tokens, num_kv_heads, head_dim], any dtype that the cache may have: cast to its
        dtype to nearest even, clamped where that is 8-bit. Scales play no part in it.
      kv_cache: [pages, page_size, 2 * num_kv_heads, width], K of head h in row 2 h, V in row
        2 h + 1, with zeros behind head_dim where width is more; or the same as [pages, page_size,
        2 * num_kv_heads / packing, packing, width]. queries' dtype, f8e4m3fn, f8e5m2 or int8.
        Donated: updated in place. Attention costs what head_dim = width costs.
      kv_lens: i32[max_num_seqs], the new tokens included.
      page_indices: i32[max_num_seqs * pages_per_seq], row after row.
      cu_q_lens: i32[max_num_seqs + 1], where each row's tokens start.
      distribution: i32[3], of which the last is the number of rows; the others are no matter.
      sm_scale: 1.0, not head_dim ** −0.5.
      sliding_window: how many tokens a query sees, itself included.
      soft_cap: logits become soft_cap · tanh(logit / soft_cap), > 0.
      mask_value: keys that are masked are left out, so it has no effect.
      k_scale, v_scale: stored · scale = real, as in tokamax's TPU kernel. (Its reference divides.)
      decode_block_sizes, prefill_block_sizes, vmem_limit_bytes, decode_query_size: how the TPU
        kernel works. No effect.
      out_dtype: queries' dtype, f8e4m3fn or f8e5m2; None: queries' dtype.
      use_causal_mask: False: queries see later keys, too.
      skip_kv_update: keys and values are in the cache already, and it is returned as it is.
      return_lse: also return the natural logarithm of the sum of exp(logit).
      implementation: None, "native" or "reference": ours.

    Returns:
      (out [tokens, num_q_heads, head_dim], kv_cache), and with return_lse also f32[tokens,
      num_q_heads]. Tokens of no row are 0 with lse −inf.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: q_scale, chunk_prefill_size, debug_mode, cp_group_size or cp_rank is
        given, another kv_layout, attention_scope, out_dtype or implementation, a mask_value above
        −1e30, or a width that our kernels lack.

    >>> import jax.numpy as jnp
    >>> from jax_paged.compat.tokamax import batched_ragged_paged_attention
    >>> cache, k = jnp.zeros((2, 4, 2, 8)), jnp.ones((1, 1, 8))  # one row, with its first token
    >>> out, cache = batched_ragged_paged_attention(
    ...     jnp.ones((1, 2, 8)), k, 3 * k, cache, jnp.array([1]), jnp.array([1]),
    ...     jnp.array([0, 1]), jnp.array([1, 1, 1]))
    >>> print(out[0, :, 0], cache[1, 0, :, 0])
    [3. 3.] [1. 3.]
    """
    for name, value, only in (
        ("q_scale", q_scale, None),
        ("chunk_prefill_size", chunk_prefill_size, None),
        ("debug_mode", debug_mode, False),
        ("cp_group_size", cp_group_size, None),
        ("cp_rank", cp_rank, None),
    ):
        if value is not only:
            raise NotImplementedError(f"{name}: expected {only}, got {value!r}")
    for name, value, only in (
        ("kv_layout", kv_layout, "HEAD_ALONG_SUBLANE"),
        ("attention_scope", attention_scope, "FULL"),
    ):
        if str(value).upper() != only:  # tokamax's enums are strings, too
            raise NotImplementedError(f"{name}: expected {only}, got {value!r}")
    if implementation not in (None, "native", "reference"):
        raise NotImplementedError(
            f"implementation: expected None, 'native' or 'reference', got {implementation!r}"
        )
    check_array("queries", queries)
    if out_dtype is not None and jnp.dtype(out_dtype) not in (queries.dtype, *OUT_DTYPES):
        raise NotImplementedError(
            f"out_dtype: expected {queries.dtype.name} of queries or fp8, got {out_dtype}"
        )
    check_mask_value(mask_value)
    window = sliding_window is None or sliding_window > 0
    expect(window, "sliding_window", "None or an int > 0", sliding_window)
    _check_arrays(
        queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution
    )  # fmt: skip
    out, kv_cache, lse = _attend(
        queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, sm_scale,
        sliding_window=sliding_window, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale,
        out_dtype=None if out_dtype in (None, queries.dtype) else jnp.dtype(out_dtype),
        causal=use_causal_mask, writes=not skip_kv_update, implementation=implementation,
    )  # fmt: skip
    return (out, kv_cache, lse) if return_lse else (out, kv_cache)


ragged_paged_attention = batched_ragged_paged_attention


def _as_pool(kv_cache: Any) -> Any:
    """A cache with packed rows as [pages, page_size, 2·heads, width]."""
    if kv_cache.ndim != 5:
        return kv_cache
    return kv_cache.reshape(*kv_cache.shape[:2], -1, kv_cache.shape[4])


def _check_arrays(
    queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution
) -> None:
    check_array("kv_cache", kv_cache)
    pool = jax.eval_shape(_as_pool, kv_cache)
    check_pool("kv_cache", pool, "queries", queries)
    tokens, num_q_heads, head_dim = queries.shape
    num_kv_heads = pool.shape[2] // 2
    expect(head_dim <= pool.shape[3], "kv_cache", f"rows of head_dim={head_dim} or more",
           pool.shape[3])  # fmt: skip
    for name, x in (("keys", keys), ("values", values)):
        sizes = (tokens, num_kv_heads, head_dim)
        check_shape(name, x, "tokens num_kv_heads head_dim", sizes)
        is_integer = not jnp.issubdtype(x.dtype, jnp.floating)
        if is_integer or pool.dtype == jnp.int8:  # a cast would cut off what stands behind the dot
            check_choice(f"{name} dtype", x.dtype.name, (pool.dtype.name,))
    expect(num_q_heads % max(num_kv_heads, 1) == 0, "queries",
           f"num_q_heads to be a multiple of num_kv_heads={num_kv_heads}", num_q_heads)  # fmt: skip
    as_i32("kv_lens", kv_lens, "max_num_seqs", (None,))
    rows = kv_lens.shape[0]
    as_i32("page_indices", page_indices, "max_num_seqs·pages_per_seq", (None,))
    expect(page_indices.shape[0] % max(rows, 1) == 0, "page_indices",
           f"as many for each of {rows} rows", page_indices.shape[0])  # fmt: skip
    as_i32("cu_q_lens", cu_q_lens, "max_num_seqs+1", (rows + 1,))
    as_i32("distribution", distribution, "3", (3,))


@functools.partial(
    jax.jit,
    static_argnames=(
        "sliding_window", "soft_cap", "k_scale", "v_scale", "out_dtype", "causal", "writes",
        "implementation",
    ),
    donate_argnames=("kv_cache",),
)  # fmt: skip
def _attend(
    queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, sm_scale, *,
    k_scale, v_scale, writes, implementation, **options,
):  # fmt: skip
    pool, rows = _as_pool(kv_cache), kv_lens.shape[0]
    page_table = page_indices.reshape(rows, page_indices.shape[0] // max(rows, 1))
    num_seqs = distribution[2:]
    padding = ((0, 0), (0, 0), (0, pool.shape[3] - queries.shape[2]))
    if writes:
        dtype = jnp.float32 if is_eight_bit_pool(pool) else pool.dtype
        slots = _slots(pool, queries.shape[0], page_table, kv_lens, cu_q_lens, num_seqs)
        k, v = (jnp.pad(x.astype(dtype), padding) for x in (keys, values))
        pool, _ = write_kv(
            pool, None, k, v, slots, layout="rpa", implementation=implementation
        )  # fmt: skip
    out, lse = attend(
        jnp.pad(queries, padding), pool, page_table, kv_lens, cu_q_lens, num_seqs,
        sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True,
        implementation=implementation, **options,
    )  # fmt: skip
    return out[..., : queries.shape[2]], pool.reshape(kv_cache.shape), lse


def _slots(pool, num_tokens, page_table, kv_lens, cu_q_lens, num_seqs) -> jax.Array:
    """The slot of each new token, i32[tokens]; −1 for padding and where there is no page."""
    num_pages, page_size = pool.shape[:2]
    rows, width = page_table.shape
    if 0 in (rows, width, num_tokens):
        return jnp.full(num_tokens, -1, jnp.int32)
    row, to_end = rows_of_tokens(num_tokens, cu_q_lens)
    exists = (row >= 0) & (row < jnp.minimum(num_seqs[0], rows))
    row = jnp.clip(row, 0, rows - 1)
    position = kv_lens[row] - to_end
    exists &= (position >= 0) & (position < width * page_size)
    position = jnp.where(exists, position, 0)
    page = page_table[row, position // page_size]
    exists &= (page >= 0) & (page < num_pages)
    return jnp.where(exists, jnp.where(exists, page, 0) * page_size + position % page_size, -1)
