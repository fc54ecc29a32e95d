"""Attention over paged K and V: one query per row, or ragged batches of prefill and decode rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_paged import _ffi, reference
from jax_paged._ffi import Implementation
from jax_paged.layout import Layout, is_stacked, kv_heads_axis, pages_shape
from jax_paged.reference import head_scale
from jax_paged.rope import Rope
from jax_paged.sharding import HeadAxes
from jax_paged.validation import (
    AttentionOperands,
    AttentionSpec,
    as_out_dtype,
    as_rope,
    check_attention,
    is_per_token,
)

TARGET = "jax_paged.attention.v1"
NUM_REQUIRED = AttentionOperands._fields.index("sliding_window")  # operands that are always there


def paged_attention(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    page_table: Int[Array, "num_seqs pages_per_seq"],
    seq_lens: Int[Array, "num_seqs"],
    *,
    layer: Int[Array, ""] | int | None = None,
    sm_scale: Float[Array, ""] | float | None = None,
    sliding_window: Int[Array, "..."] | int | None = None,
    num_pinned: Int[Array, "..."] | int | None = None,
    slot_offset: Int[Array, "..."] | int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
    sinks: Float[Array, "num_q_heads"] | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
    out_dtype: DTypeLike | None = None,
    out_scale: Float[Array, ""] | float | None = None,
    rope: Rope | tuple[Any, ...] | None = None,
    return_lse: bool = False,
    num_kv_splits: int | None = None,
    split_tokens: int | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
):
    """Attends one query per row to that row's pages: the decode step.

    out[i, h] = Σ_j softmax_j(logit[i, j, h]) · v[i, j, h // group] over the seq_lens[i] tokens j
    that page_table[i] names, with group = num_q_heads / num_kv_heads and

      logit[i, j, h] = cap(sm_scale · q[i, h] · k[i, j, h // group]) + alibi_slopes[h] · (j − p)
      cap(x) = soft_cap · tanh(x / soft_cap)

    where p is the query's position, seq_lens[i] − 1. Tokens that a mask hides take no part.

    Args:
      q: [num_seqs, num_q_heads, head_dim], bf16, f16 or f32; sums are f32.
      k_pages, v_pages: [num_pages, num_kv_heads, page_size, head_dim] ("HND") or
        [num_pages, page_size, num_kv_heads, head_dim] ("NHD") or the K and V of "vllm5d" (see
        `jax_paged.layout`), optionally with a leading num_layers axis (then give `layer`). Same
        dtype as q, or f8e4m3fn, f8e5m2 or int8; v may have another head_dim.
      page_table: page ids in token order. An id outside [0, num_pages), e.g. −1, is never read: its
        tokens are left out.
      seq_lens: KV length of each row, this step's token included. 0: the row's output is exactly 0
        and its lse −inf. Lengths are clamped to [0, pages_per_seq · page_size].
      layer: which layer of stacked pages; may be traced. With a traced one out of range the output
        is 0; one that the host knows is a ValueError.
      sm_scale: factor on the logits, default head_dim ** −0.5; may be traced.
      sliding_window: how many tokens a query sees, itself included: keys j > p − sliding_window.
        None or ≤ 0: all. A scalar, or [num_seqs] for one of each row. May be traced. Pages wholly
        left of a row's window are not read.
      num_pinned: tokens at the front of each row that its window never hides (attention sinks, Xiao
        et al. 2023). The window counts them: a query sees keys j < num_pinned and keys
        j > p − (sliding_window − num_pinned), at least itself. A scalar or [num_seqs].
      slot_offset: for rows that slid, whose table lists the pages of the pinned tokens and then
        those of the window: stored slot s holds token s where s < num_pinned, else token s +
        slot_offset. seq_lens keeps counting all tokens, so a row stores seq_lens − slot_offset of
        them. A scalar or [num_seqs]; None or 0: never slid.
      soft_cap: bound on the scaled logits, > 0; None: none.
      alibi_slopes: [num_q_heads], bf16, f16 or f32: ALiBi, a slope per token of distance.
      sinks: [num_q_heads], bf16, f16 or f32: one more logit per head, without a value: it enters
        the denominator only. A row that sees no key gives 0 with lse = the sink.
      k_scale, v_scale: what 8-bit K and V are multiplied with; None: 1. A scalar, [num_kv_heads],
        or [num_pages, num_kv_heads, page_size] (one per token and head, as `write_kv` returns
        them); for stacked pages each with a leading num_layers axis, or a scalar.
      out_dtype: float8_e4m3fn or float8_e5m2: the output as fp8, out / out_scale from f32 to the
        nearest, clamped to ±448 or ±57344; NaN stays NaN. None: q's dtype.
      out_scale: f32 scalar, with an out_dtype only; None: 1. May be traced.
      rope: (cos, sin, style), tables as `rope_tables` makes them: rotary embedding inside
        attention, for pages that hold K before it. q and k are turned in f32 by the positions at
        which they stand now (in a tree, by depth). Positions beyond the tables are masked: a query
        there has output 0. None: q and k are used as they are.
      return_lse: also return log Σ_j exp(logit_j), sink included, natural logarithm.
      num_kv_splits: partitions that each row's KV is cut into; None = chosen from the work at hand,
        1 = not cut.
      split_tokens: cut at fixed multiples of this many tokens instead, so that the bits of a row do
        not depend on the rest of the batch.
      implementation: None = native on CPU and CUDA, reference elsewhere; "native"; "reference".

    Returns:
      [num_seqs, num_q_heads, v_head_dim] in q's dtype or out_dtype; with return_lse also
      f32[num_seqs, num_q_heads]. NaN in unused pages or slots never reaches it.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: the native kernels do not take this head_dim.
      Pages do not tell how they were written: k_scale, v_scale, slot_offset or layout left out
      where the state has them give wrong numbers. `check_values(state=…)` finds it.

    Differentiable in q, k_pages, v_pages, sm_scale, alibi_slopes and sinks by reverse mode (the
    backward pass is the reference). vmap runs one call after another; the batch axis of the op
    itself is the fast one.

    Split KV after Flash-Decoding (Dao et al. 2023) and vLLM's paged attention v2; windows as in
    Longformer (Beltagy et al. 2020), soft caps as in Gemma 2, ALiBi after Press et al. 2022, sinks
    as in gpt-oss.

    >>> import jax.numpy as jnp
    >>> pages = jnp.ones((2, 1, 4, 8))  # two pages of four tokens, one KV head
    >>> q, table = jnp.ones((1, 2, 8)), jnp.array([[1, -1]])
    >>> print(paged_attention(q, pages, 3 * pages, table, jnp.array([3]))[0, :, 0])
    [3. 3.]
    """
    rope = as_rope(rope, k_pages, layout)
    spec = AttentionSpec(
        layout, True, num_kv_splits, split_tokens, soft_cap, one_query_per_row=True,
        implementation=implementation, out_dtype=as_out_dtype(out_dtype),
        rope_style=None if rope is None else rope.style,
    )  # fmt: skip
    operands = check_attention(
        q, k_pages, v_pages, page_table, seq_lens, None, None, spec, layer=layer,
        sm_scale=sm_scale, sliding_window=sliding_window, num_pinned=num_pinned,
        slot_offset=slot_offset, alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale,
        v_scale=v_scale, out_scale=out_scale, rope=rope,
    )  # fmt: skip
    out, lse = _attention(spec, *operands)
    return (out, lse) if return_lse else out


def ragged_paged_attention(
    q: Float[Array, "tokens num_q_heads head_dim"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    page_table: Int[Array, "num_seqs pages_per_seq"],
    seq_lens: Int[Array, "num_seqs"],
    cu_q_lens: Int[Array, "num_seqs+1"],
    num_seqs: Int[Array, "..."] | int | None = None,
    *,
    layer: Int[Array, ""] | int | None = None,
    sm_scale: Float[Array, ""] | float | None = None,
    sliding_window: Int[Array, "..."] | int | None = None,
    num_pinned: Int[Array, "..."] | int | None = None,
    slot_offset: Int[Array, "..."] | int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
    sinks: Float[Array, "num_q_heads"] | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
    tree: Int[Array, "num_seqs max_tree 2"] | None = None,
    tree_sizes: Int[Array, "num_seqs"] | None = None,
    out_dtype: DTypeLike | None = None,
    out_scale: Float[Array, ""] | float | None = None,
    rope: Rope | tuple[Any, ...] | None = None,
    causal: bool = True,
    return_lse: bool = False,
    num_kv_splits: int | None = None,
    split_tokens: int | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
):
    """Attends each row's new tokens to that row's pages: prefill chunks and decode in one call.

    Row i owns the queries cu_q_lens[i] ≤ t < cu_q_lens[i + 1]. Its last query stands at position
    seq_lens[i] − 1, so query t of q_len = cu_q_lens[i + 1] − cu_q_lens[i] sees the keys at
    positions up to seq_lens[i] − q_len + (t − cu_q_lens[i]); with causal=False it sees them all.
    The K and V of the new tokens must be in the pages already (`write_kv`).

    Args:
      q: [tokens, num_q_heads, head_dim], the rows' new tokens in row order, padding at the end.
      cu_q_lens: start of each row's tokens; clamped to be monotone and within [0, tokens].
      num_seqs: scalar or [1]: how many rows are live; None = all. May be traced.
      tree: [num_seqs, max_tree, 2]: token trees, as `jax_paged.tree_intervals` makes them from
        parent pointers: node i of row r is stored token seq_lens[r] − tree_sizes[r] + i, and its
        subtree takes the places tree[r, i, 0] ≤ place < tree[r, i, 1] in depth-first order, the
        first being its own. A query in the tree sees all tokens before the tree, its ancestors and
        itself: the nodes j ≤ i with tree[r, j, 0] ≤ tree[r, i, 0] < tree[r, j, 1]. Several trees in
        one row (a forest) do not see each other. A node stands at position seq_lens[r] −
        tree_sizes[r] + the number of its ancestors, for windows and ALiBi; a window's pages are
        skipped by the position of the tree's roots. Queries stored before the tree are plain ones.
        A row whose tree is a chain has the bits that it has without a tree.
      tree_sizes: [num_seqs]: nodes of each row's tree, its last stored tokens; 0 = no tree. Clamped
        to [0, min(max_tree, seq_lens)], intervals to [0, tree_sizes]: wild values give some mask.
      causal: whether a query is kept from later keys. With causal=False a window has no right edge,
        and ALiBi counts later keys upwards: slope · (key − query) as before.
      The other arguments are those of `paged_attention`.

    Returns:
      [tokens, num_q_heads, v_head_dim] in q's dtype or out_dtype; with return_lse also f32[tokens,
      num_q_heads]. Tokens of no live row (padding) are exactly 0 with lse −inf.

    Raises and derivatives: as `paged_attention`. ValueError also for a tree with causal=False or
    without tree_sizes.

    The contract is that of JAX's TPU ragged paged attention; rows with few queries run as decode,
    the others as prefill, told apart on the device. Tree intervals after TVM's paged KV cache.

    >>> import jax.numpy as jnp
    >>> pages = jnp.ones((2, 1, 4, 8))
    >>> q, table = jnp.ones((3, 2, 8)), jnp.array([[1, 0], [0, -1]])
    >>> out = ragged_paged_attention(  # row 0: two new tokens of five; row 1: one; no padding
    ...     q, pages, 3 * pages, table, jnp.array([5, 1]), jnp.array([0, 2, 3]))
    >>> print(out.shape, out[2, 0, 0])
    (3, 2, 8) 3.0
    """
    rope = as_rope(rope, k_pages, layout)
    spec = AttentionSpec(
        layout, causal, num_kv_splits, split_tokens, soft_cap, one_query_per_row=False,
        implementation=implementation, out_dtype=as_out_dtype(out_dtype),
        rope_style=None if rope is None else rope.style,
    )  # fmt: skip
    operands = check_attention(
        q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, num_seqs, spec, layer=layer,
        sm_scale=sm_scale, sliding_window=sliding_window, num_pinned=num_pinned,
        slot_offset=slot_offset, alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale,
        v_scale=v_scale, out_scale=out_scale, rope=rope, tree=tree, tree_sizes=tree_sizes,
    )  # fmt: skip
    out, lse = _attention(spec, *operands)
    return (out, lse) if return_lse else out


def _with_layers(scale: jax.Array | None, pages: jax.Array) -> jax.Array | None:
    """A scale of one layer's heads as the public ops take it: stacked like the pages."""
    if scale is None or scale.ndim != 1 or pages.ndim != 5:  # 8-bit pages are HND or NHD
        return scale
    return jnp.broadcast_to(scale[None], (pages.shape[0], *scale.shape))


def _reference(spec: AttentionSpec, *operands):
    given = (None if x is None or not x.size else x for x in operands[NUM_REQUIRED:])
    x = AttentionOperands(*operands[:NUM_REQUIRED], *given)
    options = {
        "layer": x.layer if is_stacked(x.k_pages, spec.layout) else None,
        "sm_scale": x.sm_scale,
        "sliding_window": x.sliding_window,
        "num_pinned": x.num_pinned,
        "slot_offset": x.slot_offset,
        "soft_cap": spec.soft_cap,
        "alibi_slopes": x.alibi_slopes,
        "sinks": x.sinks,
        "k_scale": _with_layers(x.k_scale, x.k_pages),
        "v_scale": _with_layers(x.v_scale, x.v_pages),
        "out_dtype": spec.out_dtype,
        "out_scale": x.out_scale,
        "rope": None if x.cos is None else (x.cos, x.sin, spec.rope_style),
        "return_lse": True,
        "layout": spec.layout,
    }
    rows = x.q, x.k_pages, x.v_pages, x.page_table, x.seq_lens
    if spec.one_query_per_row:
        out, lse = reference.paged_attention(*rows, **options)
    else:
        out, lse = reference.ragged_paged_attention(
            *rows, x.cu_q_lens, x.num_seqs, causal=spec.causal, tree=x.tree,
            tree_sizes=x.tree_sizes, **options,
        )  # fmt: skip
    return out, lse


def _cuda_workspace_words(
    *,
    max_seqs: int,
    num_kv_heads: int,
    group_size: int,
    v_head_dim: int,
    capacity: int,
    num_kv_splits: int = 0,
    split_tokens: int = 0,
    max_tree: int = 0,
) -> int:
    """What the CUDA kernels work in, in 4-byte words: WorkspaceWords of ffi/cuda/attention/args.h.

    Automatic splits (both 0) leave at most two partial results per worker, whatever the batch and
    the context; fixed splits leave one for each split of each decode row of `capacity` tokens.
    """
    tile_rows, tile_tokens, max_workers = 16, 64, 384
    slots = 2 * max_workers
    if split_tokens or num_kv_splits:
        splits = num_kv_splits
        if split_tokens:
            splits = -(-capacity // (-(-split_tokens // tile_tokens) * tile_tokens))
        uncut = isinstance(splits, int) and splits <= 1
        slots = 0 if uncut else max_seqs * num_kv_heads * -(-group_size // tile_rows) * splits
    tree_words = max_seqs * (max_tree + 1) if max_tree else 0
    return slots * (tile_rows * (v_head_dim + 2) + 1) + (max_seqs + 1) * 13 + 5 + tree_words


def _head_axes(
    layout: Layout, k_pages: jax.Array, v_pages: jax.Array, **given: jax.Array
) -> HeadAxes:
    """Which axis of each operand counts KV heads, or query heads."""

    def of_scale(scale):  # [num_kv_heads], or [..., num_pages, num_kv_heads, page_size]
        return None if not scale.size else max(scale.ndim - 2, 0)

    axes = dict.fromkeys(AttentionOperands._fields) | {
        "q": 1,
        "k_pages": kv_heads_axis(k_pages, layout, "k"),
        "v_pages": kv_heads_axis(v_pages, layout, "v"),
        "alibi_slopes": 0 if given["alibi_slopes"].size else None,
        "sinks": 0 if given["sinks"].size else None,
        "k_scale": of_scale(given["k_scale"]),
        "v_scale": of_scale(given["v_scale"]),
    }
    return HeadAxes(axes, results=(1, 1))


_FLOAT_OPTIONS = {"alibi_slopes", "sinks", "k_scale", "v_scale", "cos", "sin", "out_scale"}


def _as_given(name: str, x: jax.Array | None) -> jax.Array:
    """An operand as the FFI target takes it: options that are off are empty."""
    if x is None:
        return jnp.zeros(0, jnp.float32 if name in _FLOAT_OPTIONS else jnp.int32)
    return x.reshape(1) if name in ("sliding_window", "out_scale") and not x.ndim else x


def _call(spec: AttentionSpec, *operands):
    options = AttentionOperands._fields[NUM_REQUIRED:]
    given = dict(zip(options, map(_as_given, options, operands[NUM_REQUIRED:]), strict=True))
    arrays = [*operands[:NUM_REQUIRED], *given.values()]
    q, _, v_pages, page_table, *_ = operands
    pages = pages_shape(v_pages, spec.layout, "v")
    splits = {"num_kv_splits": spec.num_kv_splits or 0, "split_tokens": spec.split_tokens or 0}
    words = _cuda_workspace_words(
        max_seqs=page_table.shape[0],
        num_kv_heads=pages.num_kv_heads,
        group_size=q.shape[1] // pages.num_kv_heads,
        v_head_dim=pages.head_dim,
        capacity=page_table.shape[1] * pages.page_size,
        max_tree=given["tree"].shape[1] if given["tree"].size else 0,
        **splits,
    )
    return tuple(
        _ffi.ffi_call(
            TARGET,
            arrays,
            {
                "layout": spec.layout,
                "causal": spec.causal,
                **splits,
                "soft_cap": np.float32(spec.soft_cap or 0),
                "rope_interleaved": spec.rope_style == "interleaved",
            },
            heads=_head_axes(spec.layout, *operands[1:3], **given),
            cuda_workspace_words=words,
            implementation=spec.implementation,
            reference=functools.partial(_reference, spec),
        )
    )


@functools.cache
def _batched(spec: AttentionSpec):
    """`_call` that vmap runs one call after another."""
    return sequential_vmap(functools.partial(_call, spec))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(spec: AttentionSpec, *operands):
    return _batched(spec)(*operands)


def _forward(spec: AttentionSpec, *operands):
    return _batched(spec)(*operands), operands


def _backward(spec: AttentionSpec, operands, cotangents):
    _, pullback = jax.vjp(functools.partial(_reference, spec), *operands)
    return pullback(cotangents)


_differentiable.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=0)
def _attention(spec: AttentionSpec, *operands):
    x = AttentionOperands(*operands)
    heads = pages_shape(x.k_pages, spec.layout).num_kv_heads

    def of_layer(scale):
        if scale is None or is_per_token(scale, x.k_pages):
            return scale
        return head_scale(scale, x.layer, heads, x.k_pages)

    x = x._replace(k_scale=of_layer(x.k_scale), v_scale=of_layer(x.v_scale))
    return _differentiable(spec, *x)
