"""The decoder: by configuration Qwen3-MoE, dense Qwen3 or Llama, over a paged KV state.

    model = Decoder(config, source)                      # a TensorSource: checkpoint or random
    logits, state = model(tokens, batch, state)          # f32[tokens, vocab_size]
    logits, state = model(tokens, batch, state, logit_rows=last)    # f32[len(last), vocab_size]

tokens is i32[T], flat over the rows of the batch; batch is the `StepBatch` that reserving and
stepping the state gave for just these tokens; state is the `KVState`, whose pages come back with
the tokens' K and V in them. Decode, prefill, chunks of a prefill and any mix of them are this one
call. The weights are module state, the cache is not: under jit, donate the state.
"""

import dataclasses
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_paged import linear, moe_experts, qkv_norm_rope_write, ragged_paged_attention
from jax_paged._ffi import Implementation
from jax_paged.rope import rope_tables

from .config import DecoderConfig
from .moe import gated_mlp, route
from .parameters import TensorSource

if TYPE_CHECKING:
    from jax_paged.pages import StepBatch
    from jax_paged.state import KVState


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / √(mean(x²) + eps) · weight over the last axis; the mean and root are f32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + jnp.float32(eps))
    return normed.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


@dataclasses.dataclass(frozen=True)
class _Step:
    """What all layers of one call share."""

    batch: "StepBatch"
    cos: jax.Array
    sin: jax.Array
    live: jax.Array
    layout: str
    implementation: Implementation


class Attention(nnx.Module):
    """Self-attention of one layer: projections, RoPE, the paged cache."""

    def __init__(self, config: DecoderConfig, layer: int, source: TensorSource):
        self.config, self.layer = config, layer
        prefix = f"model.layers.{layer}.self_attn."
        qkv = [f"{prefix}{name}_proj" for name in "qkv"]
        self.qkv = nnx.Param(source(*(name + ".weight" for name in qkv)))
        self.out = nnx.Param(source(prefix + "o_proj.weight"))
        if config.attention_bias:
            self.qkv_bias = nnx.Param(source(*(name + ".bias" for name in qkv)))
            self.out_bias = nnx.Param(source(prefix + "o_proj.bias"))
        if config.qk_norm:
            self.q_norm = nnx.Param(source(prefix + "q_norm.weight"))
            self.k_norm = nnx.Param(source(prefix + "k_norm.weight"))

    def __call__(self, x, step: _Step, pools: tuple):
        config, tokens = self.config, x.shape[0]
        k_pages, v_pages, *scales = pools
        qkv = linear(x, self.qkv[...], implementation=step.implementation)
        if config.attention_bias:
            qkv = qkv + self.qkv_bias[...][None, :]
        options = {
            "layer": jnp.int32(self.layer),
            "k_scale": scales[0],
            "v_scale": scales[1],
            "layout": step.layout,
            "implementation": step.implementation,
        }
        batch = step.batch
        q, k_pages, v_pages, *written = qkv_norm_rope_write(
            qkv,
            k_pages,
            v_pages,
            jnp.arange(tokens, dtype=jnp.int32),  # the step's tables have a row per token
            batch.slot_mapping,
            step.cos,
            step.sin,
            q_norm=self.q_norm[...] if config.qk_norm else None,
            k_norm=self.k_norm[...] if config.qk_norm else None,
            eps=config.rms_norm_eps,
            num_q_heads=config.num_q_heads,
            **options,
        )
        scales = written or scales  # those per token are written
        options |= {"k_scale": scales[0], "v_scale": scales[1]}
        attended = ragged_paged_attention(
            q,
            k_pages,
            v_pages,
            batch.page_table,
            batch.seq_lens,
            batch.cu_q_lens,
            batch.num_seqs,
            tree=batch.tree,
            tree_sizes=batch.tree_sizes,
            **options,
        )
        attended = cast(jax.Array, attended).reshape(tokens, -1)
        out = linear(attended, self.out[...], implementation=step.implementation)
        if config.attention_bias:
            out = out + self.out_bias[...][None, :]
        return out, (k_pages, v_pages, *scales)


class DenseMLP(nnx.Module):
    """The gated MLP of a dense layer."""

    def __init__(self, config: DecoderConfig, layer: int, source: TensorSource):
        self.has_bias = config.mlp_bias
        prefix = f"model.layers.{layer}.mlp."
        gate_up = (prefix + "gate_proj", prefix + "up_proj")
        self.gate_up = nnx.Param(source(*(name + ".weight" for name in gate_up)))
        self.down = nnx.Param(source(prefix + "down_proj.weight"))
        if config.mlp_bias:
            self.gate_up_bias = nnx.Param(source(*(name + ".bias" for name in gate_up)))
            self.down_bias = nnx.Param(source(prefix + "down_proj.bias"))

    def __call__(self, x, step: _Step):
        biases = (self.gate_up_bias[...], self.down_bias[...]) if self.has_bias else ()
        weights = (self.gate_up[...], self.down[...], *biases)
        return gated_mlp(x, *weights, implementation=step.implementation)


class ExpertsMLP(nnx.Module):
    """The mixture of experts of a layer: router and stacked experts."""

    def __init__(self, config: DecoderConfig, layer: int, source: TensorSource):
        self.config = config
        prefix = f"model.layers.{layer}.mlp."
        experts = prefix + "experts."
        self.router = nnx.Param(source(prefix + "gate.weight"))
        self.gate_up = nnx.Param(
            source(experts + "gate_proj.weight", experts + "up_proj.weight", axis=1)
        )
        self.down = nnx.Param(source(experts + "down_proj.weight"))

    def __call__(self, x, step: _Step):
        implementation = step.implementation
        router = self.router[...]
        logits = linear(x, router, out_dtype=jnp.float32, implementation=implementation)
        experts, weights = route(
            logits, self.config.experts_per_token, renormalize=self.config.norm_topk_prob
        )
        return moe_experts(
            x,
            self.gate_up[...],
            self.down[...],
            experts,
            weights,
            live=step.live,
            implementation=implementation,
        )


class Layer(nnx.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, layer: int, source: TensorSource):
        self.eps = config.rms_norm_eps
        prefix = f"model.layers.{layer}."
        self.attention_norm = nnx.Param(source(prefix + "input_layernorm.weight"))
        self.attention = Attention(config, layer, source)
        self.mlp_norm = nnx.Param(source(prefix + "post_attention_layernorm.weight"))
        mlp = ExpertsMLP if config.moe_layers[layer] else DenseMLP
        self.mlp = mlp(config, layer, source)

    def __call__(self, x, step: _Step, pools: tuple):
        normed = rms_norm(x, self.attention_norm[...], self.eps)
        out, pools = self.attention(normed, step, pools)
        x = x + out
        x = x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps), step)
        return x, pools


class Decoder(nnx.Module):
    """The whole model.

    Weights are per-layer leaves under an unrolled loop (a scan over stacked weights copies each
    layer's every step), stored [out, in] as published; q, k and v are one leaf, and so are gate and
    up. The residual stream has the weights' dtype, norms, softmaxes and logits are f32.

    Args:
      config: what it is.
      source: where the weights come from, in the wanted dtype (bf16 or f32).
      implementation: of the native ops: None = automatic, "native", "reference".
    """

    def __init__(
        self, config: DecoderConfig, source: TensorSource, *, implementation: Implementation = None
    ):
        self.config = config
        self.implementation: Implementation = implementation
        self.embedding = nnx.Param(source("model.embed_tokens.weight"))
        self.layers = nnx.List(Layer(config, i, source) for i in range(config.num_layers))
        self.norm = nnx.Param(source("model.norm.weight"))
        if not config.tie_embeddings:
            self.head = nnx.Param(source("lm_head.weight"))

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of the weights, and of the KV pages that go with them unless they are 8-bit."""
        return self.embedding[...].dtype

    def __call__(
        self,
        tokens: jax.Array,
        batch: "StepBatch",
        state: "KVState",
        *,
        logit_rows: jax.Array | None = None,
    ) -> tuple[jax.Array, "KVState"]:
        """Runs the tokens through the model; their K and V are added to the state's pages.

        Args:
          tokens: i32[T], the new tokens of the rows of `batch`, in row order, padding at the end
            (any id within the vocabulary; it costs no expert and reaches no row).
          batch: the step's view of the state, T tokens long.
          state: its pages have num_layers, num_kv_heads and head_dim of this model, and its dtype
            or an 8-bit one.
          logit_rows: i32[R] indices into tokens whose logits are wanted, e.g. each row's last
            token, `batch.cu_q_lens[1:] − 1`; clamped into range. None = every token.

        Returns:
          (f32[R or T, vocab_size] logits, state with updated pages).
        """
        config = self.config
        cos, sin = rope_tables(
            batch.positions, config.rope.frequencies(config.head_dim), config.rope.attention_factor
        )
        end = batch.cu_q_lens[batch.num_seqs.reshape(())]
        live = jnp.arange(tokens.shape[0], dtype=jnp.int32) < end
        step = _Step(batch, cos, sin, live, state.layout, self.implementation)
        x = self.embedding[...][tokens]
        pools = (state.k_pages, state.v_pages, state.k_scale, state.v_scale)
        for layer in self.layers:
            x, pools = layer(x, step, pools)
        if logit_rows is not None:
            x = jnp.take(x, logit_rows, axis=0, mode="clip")
        x = rms_norm(x, self.norm[...], config.rms_norm_eps)
        head = self.embedding if config.tie_embeddings else self.head
        logits = linear(x, head[...], out_dtype=jnp.float32, implementation=self.implementation)
        names = ("k_pages", "v_pages", "k_scale", "v_scale")
        return logits, dataclasses.replace(state, **dict(zip(names, pools, strict=True)))
