# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-V2, 2024), over pages that hold one row per token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jax_paged import (
    AttentionPlan,
    KVState,
    StepBatch,
    attend,
    merge_attention_states,
    ragged_attention,
    write,
)
from jax_paged.checks import (
    Implementation,
    check_choice,
    check_size,
    expect,
    is_eight_bit,
    kind_text,
)
from jax_paged.ops.rope import apply_rope

from .adapters import LayerAdapters
from .config import LatentConfig
from .parameters import TensorSource
from .partition import Partition, put
from .parts import PinnedTokens, rms_norm
from .projections import WEIGHT_DTYPES, Projections, WeightDtype

# Steps with so many tokens per row or more have prompts.
_PROMPT_TOKENS = 4


class LatentAttention(Projections):
    """Self-attention of one layer whose K and V of all heads are made of one vector per token.

    A page holds c ‖ r: c, the normalised latent vector, and r, the rotated part of the keys. The
    key of head h is W_UK[h] c ‖ r, its value W_UV[h] c. Of tokens in pages neither is made: W_UK[h]
    is applied to the query, and W_UV[h] to what comes out (`mla_paged_attention`). Of the tokens of
    prompts both are made, while they are new.

    Args:
      source: where the weights come from. It is asked for `q_proj.weight`, or `q_a_proj.weight`,
        `q_a_layernorm.weight` and `q_b_proj.weight`; for `kv_a_proj_with_mqa.weight`,
        `kv_a_layernorm.weight`, `kv_b_proj.weight` and `o_proj.weight`.
      prefix: what these names begin with, "model.layers.0.self_attn." for one.
      num_q_heads: heads.
      sizes: of the parts of heads and rows.
      eps: of the norms.
      sm_scale: of logits; None = that of a head, (nope_dim + rope_dim) ** −0.5.
      weight_dtype: of the projections, as for `Decoder`. Those from latent vectors to K and V,
        which are applied head by head, stay in the dtype of the source.
      partition: as for `Attention`. Each device has some of the heads, and all of the rows.

    Raises:
      ValueError: the tensors do not fit the sizes.
    """

    qkv: nnx.Param  # rows of q, then those of c and r
    qkv_down: nnx.Param  # instead of it, with a q_rank: of the vector that q is made of, c and r
    q_up: nnx.Param  # this one and the next only with a q_rank
    q_norm: nnx.Param
    kv_norm: nnx.Param
    k_up: nnx.Param  # [heads, nope_dim, kv_rank]
    v_up: nnx.Param  # [heads, v_dim, kv_rank]
    out: nnx.Param

    def __init__(
        self,
        source: TensorSource,
        prefix: str,
        *,
        num_q_heads: int,
        sizes: LatentConfig,
        eps: float = 1e-6,
        sm_scale: float | None = None,
        weight_dtype: WeightDtype = None,
        partition: Partition | None = None,
    ):
        check_choice("weight_dtype", weight_dtype, WEIGHT_DTYPES)
        self.partition = partition
        self.num_q_heads, self.sizes, self.eps = check_size("num_q_heads", num_q_heads), sizes, eps
        head_dim = sizes.nope_dim + sizes.rope_dim
        self.sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        q_rows, order = num_q_heads * head_dim, None
        leaf, first, rows = "qkv", "q_proj", q_rows
        if sizes.q_rank is not None:
            leaf, first, rows = "qkv_down", "q_a_proj", sizes.q_rank
            self._set_norm("q_norm", source, prefix + "q_a_layernorm.weight")
            self._load("q_up", weight_dtype, source, prefix + "q_b_proj.weight")
            self._check_rows("q_up", prefix, q_rows)
        elif partition is not None:
            order = _beside_each(rows, sizes.row_dim, partition.tp)
        names = [f"{prefix}{name}.weight" for name in (first, "kv_a_proj_with_mqa")]
        both = rows, sizes.row_dim
        self._load(leaf, weight_dtype, source, *names, order=order, sizes=both)
        self._check_rows(leaf, prefix, sum(both) if order is None else len(order))
        self._set_norm("kv_norm", source, prefix + "kv_a_layernorm.weight")
        self._set_up(source, prefix + "kv_b_proj.weight")
        self._load("out", weight_dtype, source, prefix + "o_proj.weight")
        if partition is not None:
            self.num_q_heads = partition.num_q_heads

    def _check_rows(self, name: str, prefix: str, wanted: int) -> None:
        found = self._shape(name)[0]
        expect(found == wanted, f"{prefix}{name}", f"{wanted} rows of {self.sizes}", found)

    def _set_up(self, source: TensorSource, name: str) -> None:
        """Sets what makes K and V of a latent vector, whose rows take turns by head."""
        sizes, own = self.sizes, self.partition
        rows = sizes.nope_dim + sizes.v_dim
        both = source(name) if own is None else own.read("kv_up", source, (name,), 0, None, None)
        wanted = self.num_q_heads * rows, sizes.kv_rank
        found = both.shape if own is None else own.shape_in_stage("kv_up", both.shape)
        expect(found == wanted, name, f"shape {wanted} of {sizes}", found)

        def by_head(both: jax.Array) -> list[jax.Array]:
            return jnp.split(both.reshape(-1, rows, sizes.kv_rank), [sizes.nope_dim], axis=1)

        places = None if own is None else [own.sharding(leaf, 3) for leaf in ("k_up", "v_up")]
        if isinstance(both, jax.ShapeDtypeStruct):
            made = jax.eval_shape(by_head, both)
            made = made if places is None else map(put, made, places)
        else:
            made = by_head(both) if places is None else jax.jit(by_head, out_shardings=places)(both)
        self.k_up, self.v_up = map(nnx.Param, made)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        state: KVState,
        batch: StepBatch,
        cos: Float[Array, "max_positions half"],
        sin: Float[Array, "max_positions half"],
        *,
        layer: Int[Array, ""] | int,
        positions: Int[Array, "tokens"] | None = None,
        pinned: PinnedTokens | None = None,
        plan: AttentionPlan | None = None,
        live: Bool[Array, "tokens"] | None = None,
        adapters: LayerAdapters | None = None,
        implementation: Implementation = None,
        **options: Any,
    ) -> tuple[jax.Array, KVState]:
        """Adds the tokens' rows to the pages of an "mla" layer, and attends.

        Args:
          x, state, batch, layer, positions, pinned, live: as for `Attention`.
          cos, sin: of rope_dim dimensions, a row per position.
          plan, adapters: None. There are none for such layers.
          implementation, options: as for `attend`.

        Returns:
          ([tokens, hidden] in x's dtype, the state with the rows).

        Raises:
          ValueError: there is a plan or an adapter, or as `write` and `attend`.
        """
        for name, given in (("plan", plan), ("adapters", adapters)):
            expect(given is None, name, "None for latent attention", kind_text(given))
        positions = batch.positions if positions is None else positions
        turns: Any = {"cos": cos[positions], "sin": sin[positions], "style": self.sizes.style}
        q_nope, q_rope, latent, rotated = self._project_parts(
            x, live=live, implementation=implementation
        )
        turned = apply_rope(q_rope, **turns)
        with jax.named_scope("write"):
            rotated = apply_rope(rotated[:, None], **turns)[:, 0]
            row = jnp.concatenate([latent, rotated], axis=1)
            state = write(row, None, state, batch, layer=layer, implementation=implementation)
        pages = state.groups[state.find(layer)[0]].k_pages
        dtype = x.dtype if is_eight_bit(pages) else pages.dtype  # ops take equal dtypes
        options = {"layer": layer, "implementation": implementation} | options
        with jax.named_scope("attend"):
            if len(options) == 2 and self._has_prompts(x.shape[0], batch, pages):
                row = row.astype(dtype)
                values = self._attend_in_two(q_nope, turned, row, state, batch, **options)
            else:
                values, lse = self._attend_rows(q_nope, turned, dtype, state, batch, **options)
            if pinned is not None:
                turned = apply_rope(q_rope, pinned.cos, pinned.sin, style=self.sizes.style)
                others = self._attend_rows(q_nope, turned, dtype, state, pinned.batch, **options)
                values, _ = merge_attention_states(
                    values, lse, *others, implementation=implementation
                )
        flat = values.reshape(x.shape[0], -1)
        out = self._project_all("out", flat, None, live=live, implementation=implementation)
        return out, state

    def _has_prompts(self, num_tokens: int, batch: StepBatch, pages: jax.Array) -> bool:
        """Whether a step is worth it to make K and V of its tokens.

        8-bit rows are read as they are stored. Trees, windows and shared pages have no case there.
        """
        is_plain = batch.tree is None and batch.levels is None and batch.sliding_window is None
        is_plain = is_plain and not is_eight_bit(pages)
        return is_plain and num_tokens >= _PROMPT_TOKENS * batch.page_table.shape[0]

    def _attend_rows(
        self, q_nope: jax.Array, q_rope: jax.Array, dtype: DTypeLike, state: KVState,
        batch: StepBatch, **options: Any,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """([tokens, heads, v_dim] in q_nope's dtype, lse) over rows, with absorbed weights.

        Args:
          dtype: that attention computes in.
        """
        absorbed = _each_head("thn,hnr->thr", q_nope, self.k_up[...], dtype)
        q = jnp.concatenate([absorbed, q_rope.astype(dtype)], axis=2)
        own: dict[str, Any] = {"sm_scale": self.sm_scale, "v_head_dim": self.sizes.kv_rank}
        out, lse = attend(q, state, batch, return_lse=True, **(own | options))
        return _each_head("thr,hvr->thv", out, self.v_up[...], q_nope.dtype), lse

    def _attend_in_two(
        self, q_nope: jax.Array, q_rope: jax.Array, row: jax.Array, state: KVState,
        batch: StepBatch, *, layer: Any, implementation: Implementation,
    ) -> jax.Array:  # fmt: skip
        """The same of tokens of prompts: over each other by their K and V, over the rest by rows.

        Between two tokens K and V cost a third of what rows do (192 + 128 products per head and not
        576 + 512). Rows that have no other tokens have the same bits whether others have any.
        """
        sizes, shape = self.sizes, (*q_nope.shape[:2], self.sizes.rope_dim)
        latent, rotated = jnp.split(row, [sizes.kv_rank], axis=1)
        k_nope = _each_head("tr,hnr->thn", latent, self.k_up[...], row.dtype)
        v = _each_head("tr,hvr->thv", latent, self.v_up[...], row.dtype)
        k = jnp.concatenate([k_nope, jnp.broadcast_to(rotated[:, None], shape)], axis=2)
        q = jnp.concatenate([q_nope, q_rope], axis=2).astype(row.dtype)
        among, lse = ragged_attention(
            q, k, v, batch.cu_q_lens, batch.cu_q_lens, batch.num_seqs, sm_scale=self.sm_scale,
            max_kv_len=batch.max_q_len, return_lse=True, implementation=implementation,
        )  # fmt: skip
        among = among.astype(q_nope.dtype)
        before = jnp.maximum(batch.seq_lens - jnp.diff(batch.cu_q_lens), 0)

        def with_others() -> jax.Array:
            others = self._attend_rows(
                q_nope, q_rope, row.dtype, state, dataclasses.replace(batch, seq_lens=before),
                causal=False, layer=layer, implementation=implementation,
            )  # fmt: skip
            return merge_attention_states(among, lse, *others, implementation=implementation)[0]

        return jax.lax.cond(jnp.any(before > 0), with_others, lambda: among)

    def _project_parts(self, x, **options: Any) -> tuple[jax.Array, ...]:
        """(the parts of q [tokens, heads, …] that do not turn and that do, the same of the row)."""
        sizes = self.sizes
        first = "qkv" if sizes.q_rank is None else "qkv_down"
        qkv = self._project(first, x, **options)
        q, row = jnp.split(qkv, [qkv.shape[1] - sizes.row_dim], axis=1)
        if sizes.q_rank is not None:
            q = rms_norm(q, self.q_norm[...], self.eps)
            q = self._project("q_up", q, **options)
        q = q.reshape(x.shape[0], self.num_q_heads, -1)
        latent, rotated = jnp.split(row, [sizes.kv_rank], axis=1)
        latent = rms_norm(latent, self.kv_norm[...], self.eps)
        return *jnp.split(q, [sizes.nope_dim], axis=2), latent, rotated


def _beside_each(rows: int, others: int, parts: int) -> np.ndarray:
    """The order of rows and others behind them, where each part of the rows gets all others."""
    first, behind = np.split(np.arange(rows + others), [rows])
    return np.concatenate([np.r_[own, behind] for own in np.split(first, parts)])


def _each_head(axes: str, x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A product of each head with its own weights, summed in f32 and rounded once."""
    x = x.astype(weight.dtype)
    return jnp.einsum(axes, x, weight, preferred_element_type=jnp.float32).astype(dtype)
