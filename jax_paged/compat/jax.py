# SPDX-License-Identifier: Apache-2.0
"""The signature of jax.experimental.pallas.ops.tpu.ragged_paged_attention, of jax 0.10 and on."""

import functools

import jax
import jax.numpy as jnp

from jax_paged.checks import expect
from jax_paged.compat.common import as_i32, attend, check_mask_value, check_pool

__all__ = ("ragged_paged_attention",)

_MASK_VALUE = -0.7 * float(jnp.finfo(jnp.dtype("float32")).max)


@functools.partial(
    jax.jit,
    static_argnames=(
        "sliding_window", "soft_cap", "mask_value", "k_scale", "v_scale", "num_kv_pages_per_block",
        "num_queries_per_block", "vmem_limit_bytes",
    ),
)  # fmt: skip
def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = _MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """Attends each row's new tokens to that row's pages, with the signature of JAX's TPU kernel.

    It reads the pages where they lie (layout "rpa"): the native kernels on CPU and CUDA, the
    reference elsewhere.

    Args:
      q: [max_num_batched_tokens, num_q_heads, head_dim], bf16, f16 or f32.
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim]: K of head h in row 2 h, V
        in row 2 h + 1; q's dtype, f8e4m3fn, f8e5m2 or int8. It holds the new tokens already.
      kv_lens: i32[max_num_seqs], the new tokens included.
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1], where each row's queries start.
      num_seqs: i32[1]. Of kv_lens, page_indices and cu_q_lens only what belongs to so many rows
        counts.
      sm_scale: 1.0, not head_dim ** −0.5.
      sliding_window: how many tokens a query sees, itself included.
      soft_cap: logits become soft_cap · tanh(logit / soft_cap), > 0.
      mask_value: keys that are masked are left out, so it has no effect.
      k_scale, v_scale: stored · scale = real. Here k · k_scale and v · v_scale are not rounded to
        q's dtype.
      num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: how the TPU kernel works. No
        effect.

    Returns:
      [max_num_batched_tokens, num_q_heads, head_dim]. Tokens of no row are 0.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: a mask_value above −1e30, or a head_dim that our kernels lack.

    >>> import jax.numpy as jnp
    >>> from jax_paged.compat.jax import ragged_paged_attention
    >>> k = jnp.ones((2, 4, 1, 8))  # two pages of four tokens, one KV head
    >>> pages = jnp.concatenate([k, 3 * k], axis=2)
    >>> out = ragged_paged_attention(
    ...     jnp.ones((3, 2, 8)), pages, jnp.array([5, 1]), jnp.array([[1, 0], [0, 0]]),
    ...     jnp.array([0, 2, 3]), jnp.array([2]), sm_scale=8**-0.5)
    >>> print(out[:, 0, 0])
    [3. 3. 3.]
    """
    check_pool("kv_pages", kv_pages, "q", q)
    num_kv_heads, head_dim = kv_pages.shape[2] // 2, kv_pages.shape[3]
    expect(q.shape[2] == head_dim, "q", f"head_dim={head_dim} of kv_pages", q.shape[2])
    expect(
        q.shape[1] % max(num_kv_heads, 1) == 0,
        "q", f"num_q_heads to be a multiple of num_kv_heads={num_kv_heads}", q.shape[1],
    )  # fmt: skip
    as_i32("kv_lens", kv_lens, "max_num_seqs", (None,))
    rows = kv_lens.shape[0]
    as_i32("page_indices", page_indices, "max_num_seqs pages_per_seq", (rows, None))
    as_i32("cu_q_lens", cu_q_lens, "max_num_seqs+1", (rows + 1,))
    as_i32("num_seqs", num_seqs, "1", (1,))
    window = sliding_window is None or sliding_window > 0
    expect(window, "sliding_window", "None or an int > 0", sliding_window)
    for name, value in (
        ("num_kv_pages_per_block", num_kv_pages_per_block),
        ("num_queries_per_block", num_queries_per_block),
        ("vmem_limit_bytes", vmem_limit_bytes),
    ):
        expect(value is None or value > 0, name, "None or an int > 0", value)
    check_mask_value(mask_value)
    return attend(
        q, kv_pages, page_indices, kv_lens, cu_q_lens, num_seqs, sm_scale=sm_scale,
        k_scale=k_scale, v_scale=v_scale, sliding_window=sliding_window, soft_cap=soft_cap,
    )  # fmt: skip
