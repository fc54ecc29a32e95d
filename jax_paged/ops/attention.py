# SPDX-License-Identifier: Apache-2.0
"""Attention over K and V in pages, or in plain arrays: single queries, and ragged batches of rows.

Every form is one call of the FFI target: the arguments of a public function are checked
(`check_call`) and become a static part and operands by name (options.py), for the native kernels
and the reference alike.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_paged.checks import (
    Implementation,
    as_index,
    check_array,
    check_float,
    check_implementation,
    check_kv_dtype,
    check_native,
    check_pages,
    check_scale,
    check_shape,
    expect,
    is_per_token,
    other_layout,
)
from jax_paged.layout import Layout, PagesShape, is_stacked, pages_shape, pool_of_v
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import KV_HEADS, PAGES, Split, at_heads, pools_at_heads
from jax_paged.ops import options, reference
from jax_paged.ops.options import Arrays, Call, Static, check_out_dtype, documented
from jax_paged.ops.plan import AttentionPlan, facts_of, plan_words, words_of
from jax_paged.ops.reference import layer_scale, scale_of_layer
from jax_paged.ops.rope import Rope

TARGET = "jax_paged.attention.v1"
# The operands that describe the rows of a batch.
ROWS = ("page_table", "seq_lens", "cu_q_lens", "num_seqs")


class LayerOptions(TypedDict, total=False):
    """The options of `ragged_paged_attention` that no page state knows."""

    sm_scale: Float[Array, ""] | float | None
    sliding_window: Int[Array, "..."] | int | None
    soft_cap: float | None
    alibi_slopes: Float[Array, "num_q_heads"] | None
    sinks: Float[Array, "num_q_heads"] | None
    out_dtype: DTypeLike | None
    out_scale: Float[Array, ""] | float | None
    rope: Rope | tuple[Any, ...] | None
    causal: bool
    return_lse: bool
    num_kv_splits: int | None
    split_tokens: int | None
    plan: AttentionPlan | None
    implementation: Implementation


@documented
def paged_attention(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
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
    tree: Int[Array, "num_seqs max_tree 2"] | None = None,
    tree_sizes: Int[Array, "num_seqs"] | None = None,
    out_dtype: DTypeLike | None = None,
    out_scale: Float[Array, ""] | float | None = None,
    rope: Rope | tuple[Any, ...] | None = None,
    return_lse: bool = False,
    num_kv_splits: int | None = None,
    split_tokens: int | None = None,
    plan: AttentionPlan | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
):
    """Attends one query per row to that row's pages: the decode step.

    out[i, h] = Σ_j softmax_j(logit[i, j, h]) · v[i, j, h // group] over the seq_lens[i] tokens j
    that page_table[i] names, with group = num_q_heads / num_kv_heads and

      logit[i, j, h] = cap(sm_scale · q[i, h] · k[i, j, h // group]) + alibi_slopes[h] · (j − p)
      cap(x) = soft_cap · tanh(x / soft_cap)

    where p is the query's position, seq_lens[i] − 1, or in a tree that of its node. Tokens that a
    mask hides take no part.

    Args:
      q: [num_seqs, num_q_heads, head_dim], bf16, f16 or f32; sums are f32.
      k_pages, v_pages: [num_pages, num_kv_heads, page_size, head_dim] ("HND") or
        [num_pages, page_size, num_kv_heads, head_dim] ("NHD") or the K and V of "vllm5d", or the
        one pool of "rpa" and None (see `jax_paged.layout`), optionally with a leading num_layers
        axis (then give `layer`). Same dtype as q, or f8e4m3fn, f8e5m2 or int8; v may have another
        head_dim.
      page_table: page ids in token order. An id outside [0, num_pages), e.g. −1, is never read: its
        tokens are left out.
      seq_lens: KV length of each row, this step's token included. 0: the row's output is exactly 0
        and its lse −inf. Lengths are clamped to [0, pages_per_seq · page_size].
      {options}
      return_lse: also return log Σ_j exp(logit_j), sink included, natural logarithm.

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
    given = locals()
    return attend_checked(*check_call(given), return_lse)


@documented
def ragged_paged_attention(
    q: Float[Array, "tokens num_q_heads head_dim"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
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
    max_q_len: int | None = None,
    plan: AttentionPlan | None = None,
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
      k_pages, v_pages, page_table, seq_lens, return_lse: as for `paged_attention`.
      cu_q_lens: start of each row's tokens; clamped to be monotone and within [0, tokens].
      num_seqs: scalar or [1]: how many rows are live; None = all. May be traced.
      {options}

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
    given = locals()
    return attend_checked(*check_call(given), return_lse)


@documented
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
    sliding_window: Int[Array, "..."] | int | None = None,
    num_pinned: Int[Array, "..."] | int | None = None,
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
    implementation: Implementation = None,
):
    """Attends each row's queries to that row's keys, both flat: a prompt with itself, an encoder.

    Row i owns the queries cu_q_lens[i] ≤ t < cu_q_lens[i + 1] and the keys and values
    cu_kv_lens[i] ≤ j < cu_kv_lens[i + 1]. The logits and the softmax are those of
    `paged_attention`. Its queries are the last of the row's tokens: query t sees the row's keys up
    to number kv_len − q_len + (t − cu_q_lens[i]), and with causal=False all (cross attention).

    Args:
      q: [tokens, num_q_heads, head_dim], bf16, f16 or f32, the rows in order, padding at the end.
      k, v: [kv_tokens, num_kv_heads, head_dim] of q's dtype or 8-bit, the rows in order, padding at
        the end; v may have another head_dim. They are read where they lie, none is copied.
      cu_q_lens, cu_kv_lens: where each row starts; clamped to be monotone and within the arrays.
      num_seqs: scalar or [1]: how many rows are live; None = all. May be traced.
      max_kv_len: no row has more keys; longer ones are cut there. None: kv_tokens. Static.
      {options}
      k_scale: what 8-bit k is multiplied with; None: 1. A scalar, [num_kv_heads], or [kv_tokens,
        num_kv_heads, 1].
      return_lse: as for `paged_attention`.

    Returns:
      [tokens, num_q_heads, v_head_dim] in q's dtype or out_dtype; with return_lse also f32[tokens,
      num_q_heads]. Padding, and queries that see no key, are exactly 0 with lse −inf (with sinks:
      the sink, where the row is live). NaN in padding never reaches an output.

    Raises and derivatives: as `ragged_paged_attention`, with k and v in place of the pages.

    TVM's paged cache calls this its self-attention part, with the new tokens' tree if they are one.

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
        check_kv_dtype(name, x, q.dtype)
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
    traced = {
        "num_seqs": None if num_seqs is None else as_index("num_seqs", num_seqs),
        "sm_scale": check_scale("sm_scale", q.shape[2] ** -0.5 if sm_scale is None else sm_scale),
        "sliding_window": sliding_window,
        "num_pinned": num_pinned,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "k_scale": np.float32(k_scale) if isinstance(k_scale, float) else k_scale,
        "v_scale": np.float32(v_scale) if isinstance(v_scale, float) else v_scale,
        "tree": tree,
        "tree_sizes": tree_sizes,
        "out_scale": np.float32(out_scale) if isinstance(out_scale, float) else out_scale,
        "rope": rope[:2] if isinstance(rope, tuple) else rope,
    }
    static = {
        "soft_cap": soft_cap,
        "out_dtype": None if out_dtype is None else check_out_dtype(out_dtype),
        "rope_style": rope[2:] if isinstance(rope, tuple) else (),
        "causal": causal,
        "return_lse": return_lse,
        "num_kv_splits": num_kv_splits,
        "split_tokens": split_tokens,
        "implementation": implementation,
    }
    max_kv_len = k.shape[0] if max_kv_len is None else min(max_kv_len, k.shape[0])
    return _flat(max_kv_len, tuple(static.items()), q, k, v, cu_q_lens, cu_kv_lens, traced)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _flat(max_kv_len, static, q, k, v, cu_q_lens, cu_kv_lens, traced):
    # Each token is a page of one slot, so the kernels read k and v in place, and a row is a run of
    # pages: of its page table there is the first column alone. (A copy to longer pages first was
    # never faster on CPU.)
    bounds = jax.lax.cummax(jnp.clip(cu_kv_lens, 0, k.shape[0]))
    given = traced | dict(static) | {
        "q": q, "k_pages": k[:, None], "v_pages": v[:, None], "page_table": bounds[:-1, None],
        "seq_lens": jnp.diff(bounds), "cu_q_lens": cu_q_lens, "layer": None, "layout": "NHD",
    }  # fmt: skip
    if given["rope_style"]:
        given["rope"] += given["rope_style"]
    static, arrays = check_call(given)
    return attend_checked((*static, ("run_pages", max_kv_len)), arrays, given["return_lse"])


def check_call(given: Mapping[str, Any]) -> tuple[Static, Arrays]:
    """Checks a call over pages at trace time; without cu_q_lens it has one query per row."""
    check_implementation(given["implementation"])
    q, k_pages, v_pages, layout = (given[x] for x in ("q", "k_pages", "v_pages", "layout"))
    k_shape, v_shape = check_pages(k_pages, v_pages, layout, given["layer"])
    v_pages = pool_of_v(k_pages, v_pages, layout)  # from here on: one pool is given twice
    single = "cu_q_lens" not in given
    arrays = check_batch(given)
    rows = arrays["seq_lens"].shape[0]
    check_float("q", q)
    check_shape(
        "q", q, f"{'num_seqs' if single else 'tokens'} num_q_heads head_dim",
        (rows if single else None, None, k_shape.head_dim),
    )  # fmt: skip
    check_kv_dtype("k_pages", k_pages, q.dtype)
    num_q_heads, num_kv_heads = q.shape[1], k_shape.num_kv_heads
    expect(
        0 < num_kv_heads <= num_q_heads and num_q_heads % num_kv_heads == 0,
        "q",
        f"num_q_heads to be a multiple of num_kv_heads={num_kv_heads}",
        f"{num_q_heads}"
        + other_layout(
            k_pages, layout, lambda n: n > 0 and num_q_heads > 0 and num_q_heads % n == 0
        ),
    )
    for name, shape in (("k_pages", k_shape), ("v_pages", v_shape)):
        check_native(name, shape.head_dim, given["implementation"])
    call = Call(q, k_pages, v_pages, k_shape, v_shape, rows, given)
    static, of_options = options.read_options(call)
    static["one_query_per_row"] = single
    if single:
        static["max_q_len"] = 1
    arrays = {"q": q, "k_pages": k_pages, "v_pages": v_pages} | arrays | of_options
    if "plan" in arrays:
        max_tree = arrays["tree"].shape[1] if "tree" in arrays else 0
        facts = facts_of(static, arrays)
        arrays["plan"] = words_of(given["plan"], facts, plan_words(rows, max_tree))
    return tuple(static.items()), arrays


def check_batch(given: Mapping[str, Any]) -> Arrays:
    """Checks the operands that describe the rows of a batch; returns all of them as i32."""
    page_table, seq_lens = (as_index(name, given[name]) for name in ("page_table", "seq_lens"))
    check_shape("seq_lens", seq_lens, "num_seqs", (None,))
    rows = seq_lens.shape[0]
    check_shape("page_table", page_table, "num_seqs pages_per_seq", (rows, None))
    cu_q_lens = given.get("cu_q_lens")
    cu_q_lens = as_index("cu_q_lens", np.arange(rows + 1) if cu_q_lens is None else cu_q_lens)
    check_shape("cu_q_lens", cu_q_lens, "num_seqs+1", (rows + 1,))
    num_seqs = given.get("num_seqs")
    num_seqs = as_index("num_seqs", rows if num_seqs is None else num_seqs)
    expect(num_seqs.size == 1 and num_seqs.ndim <= 1, "num_seqs", "a scalar or [1]", num_seqs.shape)
    num_seqs = num_seqs if num_seqs.ndim else num_seqs.reshape(1)
    return dict(zip(ROWS, (page_table, seq_lens, cu_q_lens, num_seqs), strict=True))


def attend_checked(static: Static, arrays: Arrays, return_lse: bool):
    """Runs a call that is checked."""
    out, lse = _attention(static, arrays)
    return (out, lse) if return_lse else out


def _with_layers(scale: jax.Array, num_layers: int | None) -> jax.Array:
    """A scale of one layer's heads as the public ops take it: stacked like the pages."""
    if scale.ndim != 1 or num_layers is None:
        return scale
    return jnp.broadcast_to(scale[None], (num_layers, *scale.shape))


def _reference(static: Static, arrays: Arrays) -> Any:
    known = dict(static)
    given: dict[str, Any] = options.of_reference(known, arrays) | {"return_lse": True}
    x = arrays
    if "run_pages" in known:
        run = jnp.arange(known["run_pages"], dtype=jnp.int32)
        x = x | {"page_table": x["page_table"] + run[None]}
    if "kv_pages" in x:
        kv_pages = x["kv_pages"]
        given |= {"layer": x["layer"] if kv_pages.ndim == 4 else None}
        given |= {"kv_scale": given.pop("k_scale", None), "v_head_dim": known["v_head_dim"]}
        return reference.mla_paged_attention(x["q"], kv_pages, *(x[name] for name in ROWS), **given)
    if not is_stacked(x["k_pages"], known["layout"]):
        del given["layer"]
    for name in ("k_scale", "v_scale"):
        if name in given:
            given[name] = _with_layers(given[name], _pages(known, x).num_layers)
    pages = (x["q"], x["k_pages"], x["v_pages"])
    if known["one_query_per_row"] and "tree" not in x:
        return reference.paged_attention(*pages, x["page_table"], x["seq_lens"], **given)
    return reference.ragged_paged_attention(*pages, *(x[name] for name in ROWS), **given)


@functools.cache  # one function for jax, which traces it once for each shape
def _reference_by_place(static: Static, names: tuple[str, ...]) -> Callable[..., Any]:
    return lambda *x: _reference(static, dict(zip(names, x, strict=True)))


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
    unit_rows: int = 16,
    has_plan: bool = False,
) -> int:
    """What the CUDA kernels work in, in 4-byte words: ScratchWords of ffi/cuda/attention/args.h.

    In front of it is the plan, unless the call is given one. Automatic splits (both 0) leave at
    most two partial results per worker, whatever the batch and the context; fixed splits leave one
    for each split of each decode row of `capacity` tokens. unit_rows: of packed rows, 16 but for
    latent rows (`_latent_unit_rows`).
    """
    tile_rows, tile_tokens = 16, 64
    unit_parts = unit_rows // tile_rows
    slots = 2 * max(384, 192 * unit_parts)  # by the most workers
    if split_tokens or num_kv_splits:
        splits = num_kv_splits
        if split_tokens:
            splits = -(-capacity // (-(-split_tokens // tile_tokens) * tile_tokens))
        uncut = isinstance(splits, int) and splits <= 1
        slots = 0 if uncut else max_seqs * num_kv_heads * splits
        slots *= -(-group_size // unit_rows) * unit_parts
    own = slots * (tile_rows * (v_head_dim + 2) + 1) + 1
    return own if has_plan else plan_words(max_seqs, max_tree) + own


def _latent_unit_rows(q: jax.Array) -> int:
    """Packed rows of a unit of the latent CUDA kernel, or of the one that serves f32."""
    if q.dtype.itemsize != 2 or q.shape[1] <= 16:
        return 16
    return 32 if q.shape[1] <= 32 else 64


def _pages(known: Mapping[str, Any], arrays: Arrays) -> PagesShape:
    """The named shape of the pool of V."""
    if "kv_pages" not in arrays:
        return pages_shape(arrays["v_pages"], known["layout"], "v")
    *layers, num_pages, page_size, _ = arrays["kv_pages"].shape
    return PagesShape(layers[0] if layers else None, num_pages, 1, page_size, known["v_head_dim"])


def _words(known: Mapping[str, Any], arrays: Arrays) -> int:
    """The same of a call on one device."""
    pages, q, page_table = _pages(known, arrays), arrays["q"], arrays["page_table"]
    pages_per_seq = known.get("run_pages", page_table.shape[1])
    return _cuda_workspace_words(
        max_seqs=page_table.shape[0],
        num_kv_heads=pages.num_kv_heads,
        group_size=q.shape[1] // pages.num_kv_heads,
        v_head_dim=pages.head_dim,
        capacity=pages_per_seq * pages.page_size,
        max_tree=arrays["tree"].shape[1] if "tree" in arrays else 0,
        num_kv_splits=known.get("num_kv_splits", 0),
        split_tokens=known.get("split_tokens", 0),
        unit_rows=_latent_unit_rows(q) if "kv_pages" in arrays else 16,
        has_plan="plan" in arrays,
    )


def _call(static: Static, arrays: Arrays):
    known = dict(static)
    counts_heads = {"q": 1} | options.heads_axes(arrays)
    if "kv_pages" in arrays:  # latent rows and their scale have no heads
        counts_heads["k_scale"] = None
    axes = {name: at_heads(x, counts_heads.get(name)) for name, x in arrays.items()}
    axes |= pools_at_heads(arrays, known.get("layout"))
    run = {"run_pages": known["run_pages"]} if "run_pages" in known else {}
    return tuple(
        ffi_call(
            TARGET,
            list(arrays.values()),
            {"operands": ",".join(arrays), **run, **options.attributes(known)},
            split=Split(axes, (f"- {KV_HEADS} -", f"- {KV_HEADS}"), fixed=PAGES),
            cuda_workspace_words=functools.partial(_words, known),
            implementation=known.get("implementation"),
            reference=_reference_by_place(
                tuple(x for x in static if x[0] != "implementation"), tuple(arrays)
            ),
        )
    )


@functools.cache
def _batched(static: Static) -> Callable[[Arrays], Any]:
    """`_call` that vmap runs one call after another."""
    return sequential_vmap(functools.partial(_call, static))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(static: Static, arrays: Arrays):
    return _batched(static)(arrays)


def _forward(static: Static, arrays: Arrays):
    return _batched(static)(arrays), arrays


def _backward(static: Static, arrays: Arrays, cotangents):
    _, pullback = jax.vjp(functools.partial(_reference, static), arrays)
    return pullback(cotangents)


_differentiable.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=0)
def _attention(static: Static, arrays: Arrays):
    pages = _pages(dict(static), arrays)

    def of_layer(scale):
        if "kv_pages" in arrays and not is_per_token(scale):
            return layer_scale(scale, arrays["layer"])[None]
        layer = None if pages.num_layers is None else arrays["layer"]
        return scale_of_layer(scale, layer, pages.num_kv_heads)

    scales = {x: of_layer(arrays[x]) for x in ("k_scale", "v_scale") if x in arrays}
    return _differentiable(static, arrays | scales)
