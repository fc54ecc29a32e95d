"""Attention over K and V that lie in plain arrays, row after row: no pages."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged._ffi import Implementation
from jax_paged.attention import ragged_paged_attention
from jax_paged.validation import (
    as_index,
    check_array,
    check_float,
    check_native,
    check_scale,
    check_shape,
    expect,
)


def ragged_attention(
    q: Float[Array, "tokens num_q_heads head_dim"],
    k: Float[Array, "kv_tokens num_kv_heads head_dim"],
    v: Float[Array, "kv_tokens num_kv_heads v_head_dim"],
    cu_q_lens: Int[Array, "num_seqs+1"],
    cu_kv_lens: Int[Array, "num_seqs+1"],
    num_seqs: Int[Array, "..."] | int | None = None,
    *,
    max_kv_len: int | None = None,
    sm_scale: Float[Array, ""] | float | None = None,
    sliding_window: Int[Array, ""] | int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
    sinks: Float[Array, "num_q_heads"] | None = None,
    causal: bool = True,
    return_lse: bool = False,
    num_kv_splits: int | None = None,
    split_tokens: int | None = None,
    implementation: Implementation = None,
):
    """Attends each row's queries to that row's keys, both flat: a prompt with itself, an encoder.

    Row i owns the queries cu_q_lens[i] ≤ t < cu_q_lens[i + 1] and the keys and values
    cu_kv_lens[i] ≤ j < cu_kv_lens[i + 1]. The logits and the softmax are those of
    `paged_attention`. Its queries are the last of the row's tokens: query t sees the row's keys up
    to number kv_len − q_len + (t − cu_q_lens[i]), and with causal=False all (cross attention).

    Args:
      q: [tokens, num_q_heads, head_dim], bf16, f16 or f32, the rows in order, padding at the end.
      k, v: [kv_tokens, num_kv_heads, head_dim] of q's dtype, the rows in order, padding at the end;
        v may have another head_dim. They are read where they lie, none is copied.
      cu_q_lens, cu_kv_lens: where each row starts; clamped to be monotone and within the arrays.
      num_seqs: scalar or [1]: how many rows are live; None = all. May be traced.
      max_kv_len: no row has more keys; longer ones are cut there. None: kv_tokens. Static.
        The call makes an i32[num_seqs, max_kv_len] table of places: a tight value keeps it small.
      The other arguments are those of `ragged_paged_attention`.

    Returns:
      [tokens, num_q_heads, v_head_dim] in q's dtype; with return_lse also f32[tokens, num_q_heads].
      Padding, and queries that see no key, are exactly 0 with lse −inf (with sinks: the sink, where
      the row is live). NaN in padding never reaches an output.

    Raises and derivatives: as `paged_attention`, with k and v in place of the pages.

    TVM's paged cache calls this its self-attention part.

    >>> import jax.numpy as jnp
    >>> q, k = jnp.ones((3, 2, 8)), jnp.ones((5, 1, 8))
    >>> v = jnp.arange(5.0)[:, None, None] * k
    >>> bounds = jnp.array([0, 2, 3]), jnp.array([0, 2, 5])  # row 1: one query, keys 2, 3 and 4
    >>> print(ragged_attention(q, k, v, *bounds)[:, 0, 0])
    [0.  0.5 3. ]
    """
    cu_q_lens, cu_kv_lens = as_index("cu_q_lens", cu_q_lens), as_index("cu_kv_lens", cu_kv_lens)
    check_shape("cu_q_lens", cu_q_lens, "num_seqs+1", (None,))
    expect(cu_q_lens.shape[0] >= 1, "cu_q_lens", "at least one element", 0)
    check_shape("cu_kv_lens", cu_kv_lens, "num_seqs+1", cu_q_lens.shape)
    check_float("q", q)
    check_shape("q", q, "tokens num_q_heads head_dim", (None, None, None))
    check_array("k", k)
    for name, x, sizes in (
        ("k", k, (None, None, q.shape[2])),
        ("v", v, (*k.shape[:2], None)),
    ):
        check_float(name, x, q.dtype)
        check_shape(name, x, "kv_tokens num_kv_heads head_dim", sizes)
        check_native(name, x.shape[2], implementation)
    ok = isinstance(max_kv_len, int) and max_kv_len is not True and max_kv_len >= 0
    expect(max_kv_len is None or ok, "max_kv_len", "None or an int >= 0", max_kv_len)
    expect(
        k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0 and q.shape[1] > 0,
        "q",
        f"num_q_heads to be a multiple of num_kv_heads={k.shape[1]}",
        q.shape[1],
    )
    if isinstance(sliding_window, int) and sliding_window <= 0:
        sliding_window = None
    options = {
        "num_seqs": None if num_seqs is None else as_index("num_seqs", num_seqs),
        "sm_scale": check_scale("sm_scale", q.shape[2] ** -0.5 if sm_scale is None else sm_scale),
        "sliding_window": sliding_window,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    static = {
        "soft_cap": soft_cap,
        "causal": causal,
        "return_lse": return_lse,
        "num_kv_splits": num_kv_splits,
        "split_tokens": split_tokens,
        "implementation": implementation,
    }
    max_kv_len = k.shape[0] if max_kv_len is None else min(max_kv_len, k.shape[0])
    return _attend(max_kv_len, tuple(static.items()), q, k, v, cu_q_lens, cu_kv_lens, options)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(max_kv_len, static, q, k, v, cu_q_lens, cu_kv_lens, options):
    # Each token is a page of one slot, and a row's page table counts up from its first token: so
    # the kernels read k and v in place. (A copy to longer pages first was never faster on CPU.)
    k_pages, v_pages = k[:, None], v[:, None]
    bounds = jax.lax.cummax(jnp.clip(cu_kv_lens, 0, k.shape[0]))
    page_table = bounds[:-1, None] + jnp.arange(max_kv_len, dtype=jnp.int32)[None]
    return ragged_paged_attention(
        q, k_pages, v_pages, page_table, jnp.diff(bounds), cu_q_lens, layout="NHD",
        **options, **dict(static),
    )  # fmt: skip
