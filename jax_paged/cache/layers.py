# SPDX-License-Identifier: Apache-2.0
"""What a layer does with the cache: writes of its new K and V, and attention over them.

These are `write_kv`, `qkv_norm_rope_write`, `ragged_paged_attention` and their MLA twins with what
the state and the step's batch know filled in: pages, layout, scales, slots, lengths, windows and
trees. Forgotten at an op, each of these gives wrong numbers and no error.
"""

import dataclasses
import inspect
from typing import Any, Unpack

import jax
from jaxtyping import Array, Float, Int

from jax_paged.cache.pools import KVGroup
from jax_paged.cache.state import KVState
from jax_paged.checks import Implementation, RopeStyle, expect, kind_text
from jax_paged.ops.attention import LayerOptions, ragged_paged_attention
from jax_paged.ops.attention_plan import attention_plan
from jax_paged.ops.batch import StepBatch
from jax_paged.ops.cascade import (
    cascade_attention,
    mla_cascade_attention,
    shared_levels,
)
from jax_paged.ops.mla import mla_paged_attention, write_mla_kv
from jax_paged.ops.options import documented
from jax_paged.ops.plan import AttentionPlan
from jax_paged.ops.qkv import qkv_norm_rope_write
from jax_paged.ops.rope import Rope
from jax_paged.ops.write import write_kv

_OF_LATENT = inspect.signature(mla_paged_attention).parameters


def write(
    k: Float[Array, "tokens ..."],
    v: Float[Array, "tokens num_kv_heads v_head_dim"] | None,
    state: KVState,
    batch: StepBatch,
    *,
    layer: Int[Array, ""] | int,
    implementation: Implementation = None,
) -> KVState:
    """Writes K and V of a step's tokens into the pages of a layer; returns the state with them.

    Args:
      k, v: as for `write_kv`. Of an "mla" layer k is [tokens, latent + rope], as kv for
        `write_mla_kv`, and v is None.
      state: called eagerly, its pages are donated: use the returned state.
      batch: of `state.step`.
      layer: its number in the model. It may be traced where the state has one group of layers.
      implementation: as for `write_kv`.

    Raises:
      ValueError, NotImplementedError: as `write_kv`; the batch is of another state, the layer is
        not in this one, or there is a v where none should be.

    >>> import jax.numpy as jnp, jax_paged as jp
    >>> state = jp.KVState.create(num_layers=1, num_pages=2, page_size=4, num_kv_heads=1,
    ...                           head_dim=8, max_seqs=1, pages_per_seq=2, dtype=jnp.float32)
    >>> state, batch, _ = state.append([0], 1)
    >>> ones = jnp.ones((1, 1, 8))
    >>> state = jp.write(ones, 3 * ones, state, batch, layer=0)
    >>> print(jp.attend(jnp.ones((1, 2, 8)), state, batch, layer=0)[0, :, 0])
    [3. 3.]
    """
    number, group, batch, layer = _look_up(state, batch, layer)
    if group.is_latent:
        expect(v is None, "v", "None for a layer of latent rows", kind_text(v))
        k_pages = write_mla_kv(
            group.k_pages, k, batch.slot_mapping, layer=layer, kv_scale=group.k_scale
        )
        return state.with_pages(number, k_pages, None)
    expect(v is not None, "v", "an array for a layer with K and V", "None")
    assert v is not None
    written = write_kv(
        group.k_pages, group.v_pages, k, v, batch.slot_mapping, layer=layer, k_scale=group.k_scale,
        v_scale=group.v_scale, layout=group.layout, implementation=implementation,
    )  # fmt: skip
    return state.with_pages(number, *written)


def write_qkv(
    qkv: Float[Array, "tokens width"],
    state: KVState,
    batch: StepBatch,
    cos: Float[Array, "max_positions half"],
    sin: Float[Array, "max_positions half"],
    *,
    layer: Int[Array, ""] | int,
    num_q_heads: int,
    positions: Int[Array, "tokens"] | None = None,
    q_norm: Float[Array, "head_dim"] | None = None,
    k_norm: Float[Array, "head_dim"] | None = None,
    eps: float = 1e-6,
    rotary_dim: int | None = None,
    style: RopeStyle = "half",
    implementation: Implementation = None,
) -> tuple[jax.Array, KVState]:
    """`qkv_norm_rope_write` into the pages of a layer; returns (q, the state with K and V).

    Args:
      qkv, cos, sin, num_q_heads, q_norm, k_norm, eps, rotary_dim, style, implementation: as for
        `qkv_norm_rope_write`.
      state, batch, layer: as for `write`.
      positions: row of cos and sin for each token. None: `batch.positions`. For tables that have a
        row per token, `rope_tables(batch.positions, …)`, give 0, 1, 2, ….

    Raises:
      ValueError, NotImplementedError: as `qkv_norm_rope_write`; the batch is of another state, or
        the layer is not in this one or has latent rows.

    >>> import jax.numpy as jnp, jax_paged as jp
    >>> state = jp.KVState.create(num_layers=1, num_pages=2, page_size=4, num_kv_heads=1,
    ...                           head_dim=8, max_seqs=1, pages_per_seq=2, dtype=jnp.float32)
    >>> state, batch, _ = state.append([0], 1)
    >>> cos, sin = jp.rope_tables(jnp.arange(8), jp.inverse_frequencies(8, 1e4))
    >>> q, state = jp.write_qkv(jnp.ones((1, 32)), state, batch, cos, sin, layer=0, num_q_heads=2)
    >>> print(q.shape, float(state.v_pages.sum()))
    (1, 2, 8) 8.0
    """
    number, group, batch, layer = _look_up(state, batch, layer)
    expect(not group.is_latent, "layer", "one with K and V", "one of latent rows")
    q, *written = qkv_norm_rope_write(
        qkv, group.k_pages, group.v_pages, batch.positions if positions is None else positions,
        batch.slot_mapping, cos, sin, q_norm=q_norm, k_norm=k_norm, eps=eps,
        num_q_heads=num_q_heads, rotary_dim=rotary_dim, style=style, layer=layer,
        k_scale=group.k_scale, v_scale=group.v_scale, layout=group.layout,
        implementation=implementation,
    )  # fmt: skip
    return q, state.with_pages(number, *written)


@documented
def attend(
    q: Float[Array, "tokens num_q_heads head_dim"],
    state: KVState,
    batch: StepBatch,
    *,
    layer: Int[Array, ""] | int,
    v_head_dim: int | None = None,
    **options: Unpack[LayerOptions],
):
    """Attends a step's tokens to their rows in a layer: `ragged_paged_attention`.

    Of an "mla" layer `mla_paged_attention`, with its options. Where the batch tells what rows share
    (`step`, cascade=True), `cascade_attention` takes its place: the result is the same, rounding
    aside. With `rope` each row is read for itself.

    Args:
      q: [tokens, num_q_heads, head_dim]; of an "mla" layer absorbed, with latent + rope.
      state, batch: as for `write`. K and V of the step's tokens must have been written.
      layer: as for `write`.
      v_head_dim: of an "mla" layer, the latent size; else None.
      sliding_window: of the layer, where its group keeps all tokens. None: the windows of the rows,
        where they have any.
      return_lse: as for `paged_attention`.
      {options}

    Returns:
      As `ragged_paged_attention`.

    Raises:
      ValueError, NotImplementedError: as these ops; the batch is of another state, the layer is not
        in this one, an option is not the layer's, or rows and layer both have windows.

    >>> import jax.numpy as jnp, jax_paged as jp
    >>> state = jp.KVState.create(num_layers=1, num_pages=2, page_size=4, num_kv_heads=1,
    ...                           head_dim=8, max_seqs=1, pages_per_seq=2, dtype=jnp.float32)
    >>> state, batch, _ = state.append([0], 3, num_tokens=3)
    >>> v = jnp.arange(3.0)[:, None, None] * jnp.ones((3, 1, 8))
    >>> state = jp.write(0 * v, v, state, batch, layer=0)
    >>> print(jp.attend(jnp.ones((3, 2, 8)), state, batch, layer=0)[:, 0, 0])
    [0.  0.5 1. ]
    """
    _, group, batch, layer = _look_up(state, batch, layer)
    rows = (batch.page_table, batch.seq_lens, batch.cu_q_lens, batch.num_seqs)
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    of_rows = _of_rows(batch, given)
    together: Any
    each: Any
    if group.is_latent:
        for name in given:
            expect(name in _OF_LATENT, name, "None for a layer of latent rows", "a value")
        expect("sm_scale" in given, "sm_scale", "a number for a layer of latent rows", None)
        expect(v_head_dim is not None, "v_head_dim", "an int for a layer of latent rows", None)
        assert v_head_dim is not None
        del of_rows["max_q_len"]  # a hint for other kernels
        pools: Any = (group.k_pages,)
        of_pages = {"kv_scale": group.k_scale, "v_head_dim": v_head_dim}
        together, each = mla_cascade_attention, mla_paged_attention
    else:
        expect(v_head_dim is None, "v_head_dim", "None for a layer with K and V", v_head_dim)
        pools = group.k_pages, group.v_pages
        of_pages = {
            "k_scale": group.k_scale, "v_scale": group.v_scale, "layout": group.layout
        }  # fmt: skip
        together, each = cascade_attention, ragged_paged_attention
    of_pages["layer"] = layer
    if batch.levels is None or "rope" in given:
        return each(q, *pools, *rows, **of_pages, **(given | of_rows))

    levels, window = batch.levels, given.pop("sliding_window", None)
    if window is not None:
        of_layer = dataclasses.replace(batch, levels=None)
        levels = shared_levels(of_layer, group.table.page_size, max(len(levels), 2), window)
    given.pop("plan", None)  # of calls for each row
    return together(q, *pools, levels, *rows[2:], **of_pages, **given)


@documented
def attend_plan(
    q: Float[Array, "tokens num_q_heads head_dim"] | jax.ShapeDtypeStruct,
    state: KVState,
    batch: StepBatch,
    *,
    layer: Int[Array, ""] | int,
    sliding_window: Int[Array, "..."] | int | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
    rope: Rope | tuple[Any, ...] | None = None,
    num_kv_splits: int | None = None,
    split_tokens: int | None = None,
    implementation: Implementation = None,
) -> AttentionPlan | None:
    """Plans `attend` for a step: `attention_plan`, once for all layers that are alike.

    On CUDA an attention call begins by cutting its rows into equal shares of work. With a plan the
    layers of a step share that. Layers are alike that are of one kind of the state, have the same
    window and the same static options. out and lse have the same bits as without a plan.

    Args:
      q: as for `attend`; a `jax.ShapeDtypeStruct` will do.
      state, batch: as for `attend`. Pages are not read; they may be those before the step's K and V
        were written.
      layer: any of the layers.
      {options}

    Returns:
      What `attend` takes as `plan`. None for an "mla" layer: its calls plan for themselves.

    Raises:
      ValueError, NotImplementedError: as `attend`.

    >>> import jax.numpy as jnp, jax_paged as jp
    >>> state = jp.KVState.create(num_layers=2, num_pages=2, page_size=4, num_kv_heads=1,
    ...                           head_dim=8, max_seqs=1, pages_per_seq=2, dtype=jnp.float32)
    >>> state, batch, _ = state.append([0], 1)
    >>> q, v = jnp.ones((1, 2, 8)), jnp.ones((1, 1, 8))
    >>> plan = jp.attend_plan(q, state, batch, layer=0)
    >>> for layer in (0, 1):
    ...     state = jp.write(0 * v, (2 + layer) * v, state, batch, layer=layer)
    ...     print(jp.attend(q, state, batch, layer=layer, plan=plan)[0, :, 0])
    [2. 2.]
    [3. 3.]
    """
    given: dict[str, Any] = {
        "sliding_window": sliding_window, "alibi_slopes": alibi_slopes, "rope": rope,
        "num_kv_splits": num_kv_splits, "split_tokens": split_tokens,
    }  # fmt: skip
    given = {name: x for name, x in given.items() if x is not None}
    _, group, batch, _ = _look_up(state, batch, layer)
    if group.is_latent:
        return None
    return attention_plan(
        q, group.k_pages, group.v_pages, batch.page_table, batch.seq_lens, batch.cu_q_lens,
        batch.num_seqs, layout=group.layout, implementation=implementation,
        **(given | _of_rows(batch, given)),
    )  # fmt: skip


def _of_rows(batch: StepBatch, given: dict[str, Any]) -> dict[str, Any]:
    """The options that the batch knows."""
    options = {
        "num_pinned": batch.num_pinned, "slot_offset": batch.slot_offset, "tree": batch.tree,
        "tree_sizes": batch.tree_sizes, "max_q_len": batch.max_q_len,
    }  # fmt: skip
    if batch.sliding_window is not None:
        text = "None where the rows of the state have windows"
        expect("sliding_window" not in given, "sliding_window", text, "a window")
        options["sliding_window"] = batch.sliding_window
    return options


def _look_up(
    state: KVState, batch: StepBatch, layer: Any
) -> tuple[int, KVGroup, StepBatch, Any]:  # fmt: skip
    """(number of the group, the group, its batch, the layer's number in its pools)."""
    expect(isinstance(state, KVState), "state", "a KVState", kind_text(state))
    expect(isinstance(batch, StepBatch), "batch", "the StepBatch of state.step", kind_text(batch))
    number, layer = state.find(layer)
    group, batches = state.groups[number], batch.groups
    expect(
        len(batches) == len(state.groups), "batch", f"one of {len(state.groups)} groups of layers",
        len(batches),
    )  # fmt: skip
    batch, table = batches[number], group.table
    wanted = table.pages_per_seq, table.windows is not None
    have = batch.page_table.shape[1], batch.sliding_window is not None
    if have != wanted:
        text = "pages_per_seq={} and windows={}"
        expect(
            False, "batch", f"one of this state, with {text.format(*wanted)}", text.format(*have)
        )
    return number, group, batch, layer
