# SPDX-License-Identifier: Apache-2.0
"""The decoder: by configuration Qwen3-MoE, dense Qwen3 or Llama, over a paged KV state.

    model = Decoder(config, source)                      # a TensorSource: checkpoint or random
    logits, state = model(tokens, batch, state)          # f32[tokens, vocab_size]
    logits, state = model(tokens, batch, state, logit_rows=last)    # f32[len(last), vocab_size]

tokens is i32[T], flat over the rows of the batch; batch is the `StepBatch` that reserving and
stepping the state gave for just these tokens; state is the `KVState`, whose pages come back with
the tokens' K and V in them. Decode, prefill, chunks of a prefill and any mix of them are this one
call. The weights are module state, the cache is not: under jit, donate the state.

A model whose layers have windows takes such a state, too; one with `layer_kinds` frees what they no
longer see. A state with some of the layers only serves a pipeline stage:

    x = model.embed(tokens)                              # the first stage
    x, state = model.run_layers(x, batch, state)         # each stage, with its own state and batch
    logits = model.logits(x)                             # the last stage
"""

import dataclasses
import functools
from typing import Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_paged import (
    AttentionPlan,
    KVState,
    StepBatch,
    attend,
    attend_plan,
    kv_dtype,
    linear,
    moe_experts,
    quantize_weight,
    write_qkv,
)
from jax_paged.checks import Implementation, check_choice, expect, is_eight_bit
from jax_paged.ops.rope import rope_tables

from .adapters import LayerAdapters, TokenAdapters
from .config import DecoderConfig
from .moe import gated_mlp, route
from .parameters import TensorSource

WeightDtype = Literal["int8", "fp8", "fp8_e4m3"] | None
WEIGHT_DTYPES: tuple[WeightDtype, ...] = (None, "int8", "fp8", "fp8_e4m3")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / √(mean(x²) + eps) · weight over the last axis; the mean and root are f32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + jnp.float32(eps))
    return normed.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Step:
    """What the layers of one group with one window share in a call."""

    batch: StepBatch
    plan: AttentionPlan | None
    cos: jax.Array  # a row per token
    sin: jax.Array
    live: jax.Array
    implementation: Implementation = dataclasses.field(metadata={"static": True})


class _Projections(nnx.Module):
    """A module with projections: each is a leaf, `name`, and an 8-bit one also `name`_scale."""

    def _load(
        self, name: str, weight_dtype: WeightDtype, source: TensorSource, *tensors: str, axis=0
    ) -> None:
        """Sets a projection, quantized from f32 so that it is rounded once."""
        if weight_dtype is None:
            setattr(self, name, nnx.Param(source(*tensors, axis=axis)))
        else:
            self._quantize(name, weight_dtype, source(*tensors, axis=axis, dtype=jnp.float32))

    def _quantize(self, name: str, weight_dtype: str, weight: jax.Array) -> None:
        quantize = functools.partial(quantize_weight, dtype=kv_dtype(weight_dtype))
        if isinstance(weight, jax.ShapeDtypeStruct):  # of an `abstract_source`
            quantize = functools.partial(jax.eval_shape, quantize)
        codes, scale = quantize(weight)
        setattr(self, name, nnx.Param(codes))
        setattr(self, name + "_scale", nnx.Param(scale))

    def _scale(self, name: str) -> jax.Array | None:
        return getattr(self, name + "_scale")[...] if hasattr(self, name + "_scale") else None

    def _project(
        self, name: str, x: jax.Array, adapters: LayerAdapters | None = None, **options
    ) -> jax.Array:
        out = linear(x, getattr(self, name)[...], weight_scale=self._scale(name), **options)
        return out if adapters is None else adapters.add(name, x, out, options["implementation"])


def _own_window(window: int | None, batch: StepBatch) -> jax.Array | None:
    """The window that a layer gives to `attend`: none where pages slide away with it."""
    return jnp.int32(window) if window and batch.sliding_window is None else None


class Attention(_Projections):
    """Self-attention of one layer: projections, RoPE, the paged cache."""

    def __init__(
        self, config: DecoderConfig, layer: int, source: TensorSource, weight_dtype: WeightDtype
    ):
        self.config, self.window = config, config.window(layer)
        prefix = f"model.layers.{layer}.self_attn."
        qkv = [f"{prefix}{name}_proj" for name in "qkv"]
        self._load("qkv", weight_dtype, source, *(name + ".weight" for name in qkv))
        self._load("out", weight_dtype, source, prefix + "o_proj.weight")
        if config.attention_bias:
            self.qkv_bias = nnx.Param(source(*(name + ".bias" for name in qkv)))
            self.out_bias = nnx.Param(source(prefix + "o_proj.bias"))
        if config.qk_norm:
            self.q_norm = nnx.Param(source(prefix + "q_norm.weight"))
            self.k_norm = nnx.Param(source(prefix + "k_norm.weight"))

    def __call__(
        self, x, step: _Step, state: KVState, index: jax.Array, adapters: LayerAdapters | None
    ):
        config, tokens = self.config, x.shape[0]
        qkv = self._project("qkv", x, adapters, implementation=step.implementation)
        if config.attention_bias:
            qkv = qkv + self.qkv_bias[...][None, :]
        if not is_eight_bit(state.k_pages):  # bf16 pages under f32 weights: ops take equal dtypes
            qkv = qkv.astype(state.k_pages.dtype)
        q, state = write_qkv(
            qkv,
            state,
            step.batch,
            step.cos,
            step.sin,
            positions=jnp.arange(tokens, dtype=jnp.int32),
            q_norm=self.q_norm[...] if config.qk_norm else None,
            k_norm=self.k_norm[...] if config.qk_norm else None,
            eps=config.rms_norm_eps,
            num_q_heads=config.num_q_heads,
            layer=index,
            implementation=step.implementation,
        )
        window = _own_window(self.window, step.batch)
        attended = attend(
            q,
            state,
            step.batch,
            layer=index,
            sliding_window=window,
            plan=step.plan,
            implementation=step.implementation,
        )
        attended = cast(jax.Array, attended).reshape(tokens, -1).astype(x.dtype)
        out = self._project("out", attended, adapters, implementation=step.implementation)
        if config.attention_bias:
            out = out + self.out_bias[...][None, :]
        return out, state


class DenseMLP(_Projections):
    """The gated MLP of a dense layer."""

    gate_up: nnx.Param
    down: nnx.Param

    def __init__(
        self, config: DecoderConfig, layer: int, source: TensorSource, weight_dtype: WeightDtype
    ):
        self.has_bias = config.mlp_bias
        prefix = f"model.layers.{layer}.mlp."
        gate_up = (prefix + "gate_proj", prefix + "up_proj")
        self._load("gate_up", weight_dtype, source, *(name + ".weight" for name in gate_up))
        self._load("down", weight_dtype, source, prefix + "down_proj.weight")
        if config.mlp_bias:
            self.gate_up_bias = nnx.Param(source(*(name + ".bias" for name in gate_up)))
            self.down_bias = nnx.Param(source(prefix + "down_proj.bias"))

    def __call__(self, x, step: _Step, adapters: LayerAdapters | None):
        biases = (self.gate_up_bias[...], self.down_bias[...]) if self.has_bias else ()
        weights = (self.gate_up[...], self.down[...], *biases)
        return gated_mlp(
            x,
            *weights,
            gate_up_scale=self._scale("gate_up"),
            down_scale=self._scale("down"),
            adapters=adapters,
            implementation=step.implementation,
        )


class ExpertsMLP(_Projections):
    """The mixture of experts of a layer: router and stacked experts."""

    gate_up: nnx.Param
    down: nnx.Param

    def __init__(
        self, config: DecoderConfig, layer: int, source: TensorSource, weight_dtype: WeightDtype
    ):
        self.config = config
        prefix = f"model.layers.{layer}.mlp."
        experts = prefix + "experts."
        self.router = nnx.Param(source(prefix + "gate.weight"))
        gate_up = (experts + "gate_proj.weight", experts + "up_proj.weight")
        self._load("gate_up", weight_dtype, source, *gate_up, axis=1)
        self._load("down", weight_dtype, source, experts + "down_proj.weight")

    def __call__(self, x, step: _Step, adapters: LayerAdapters | None):
        del adapters  # experts have none
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
            gate_up_scale=self._scale("gate_up"),
            down_scale=self._scale("down"),
            live=step.live,
            implementation=implementation,
        )


class Layer(nnx.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: DecoderConfig, layer: int, source: TensorSource, weight_dtype: WeightDtype
    ):
        self.eps = config.rms_norm_eps
        prefix = f"model.layers.{layer}."
        self.attention_norm = nnx.Param(source(prefix + "input_layernorm.weight"))
        self.attention = Attention(config, layer, source, weight_dtype)
        self.mlp_norm = nnx.Param(source(prefix + "post_attention_layernorm.weight"))
        mlp = ExpertsMLP if config.moe_layers[layer] else DenseMLP
        self.mlp = mlp(config, layer, source, weight_dtype)

    def __call__(
        self, x, step: _Step, state: KVState, index: jax.Array, adapters: LayerAdapters | None
    ):
        normed = rms_norm(x, self.attention_norm[...], self.eps)
        out, state = self.attention(normed, step, state, index, adapters)
        x = x + out
        x = x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps), step, adapters)
        return x, state


@functools.partial(jax.jit, static_argnames="graph")
def _run_layer(
    graph, weights, x, step: _Step, state: KVState, index: jax.Array,
    adapters: LayerAdapters | None,
):  # fmt: skip
    """One layer. A jit of its own: layers of one kind are traced and lowered once; XLA inlines."""
    return nnx.merge(graph, weights)(x, step, state, index, adapters)


class Decoder(_Projections):
    """The whole model.

    Weights are per-layer leaves under an unrolled loop (a scan over stacked weights copies each
    layer's every step), stored [out, in] as published; q, k and v are one leaf, and so are gate and
    up. The residual stream has the weights' dtype, norms, softmaxes and logits are f32.

    Args:
      config: what it is.
      source: where the weights come from, in the wanted dtype (bf16 or f32).
      weight_dtype: "int8", or "fp8" or "fp8_e4m3" = projections, experts and the head are int8 or
        f8e4m3fn with a scale per output (`jax_paged.quantize_weight`), each quantized as it comes;
        norms, biases, router and embedding stay. A head that is the embedding becomes an 8-bit
        copy. None = as the source.
      implementation: of the native ops: None = automatic, "native", "reference".
    """

    def __init__(
        self,
        config: DecoderConfig,
        source: TensorSource,
        *,
        weight_dtype: WeightDtype = None,
        implementation: Implementation = None,
    ):
        check_choice("weight_dtype", weight_dtype, WEIGHT_DTYPES)
        self.config = config
        self.implementation: Implementation = implementation
        embedding = source("model.embed_tokens.weight")
        self.embedding = nnx.Param(embedding)
        self.layers = nnx.List(
            Layer(config, i, source, weight_dtype) for i in range(config.num_layers)
        )
        self.norm = nnx.Param(source("model.norm.weight"))
        if not config.tie_embeddings:
            self._load("head", weight_dtype, source, "lm_head.weight")
        elif weight_dtype is not None:
            self._quantize("head", weight_dtype, embedding)

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of the embedding, of what the layers pass on, and of KV pages by default."""
        return self.embedding_value.dtype

    @property
    def embedding_value(self) -> jax.Array | jax.ShapeDtypeStruct:
        """The embedding, or its shape in a model of shapes, which `[...]` would not give."""
        has_getter = hasattr(type(self.embedding), "get_value")  # not in flax 0.12.0
        return self.embedding.get_value() if has_getter else self.embedding.value

    def __call__(
        self,
        tokens: jax.Array,
        batch: StepBatch,
        state: KVState,
        *,
        logit_rows: jax.Array | None = None,
        adapters: TokenAdapters | None = None,
    ) -> tuple[jax.Array, KVState]:
        """Runs the tokens through the model; their K and V are added to the state's pages.

        Args:
          tokens: i32[T], the new tokens of the rows of `batch`, in row order, padding at the end
            (any id within the vocabulary; it costs no expert and reaches no row).
          batch: the step's view of the state, T tokens long.
          state: its pages have num_layers, num_kv_heads and head_dim of this model, and its dtype,
            another float one (attention computes in it) or an 8-bit one. The kind of a layer is
            "full" or the layer's window.
          logit_rows: i32[R] indices into tokens whose logits are wanted, e.g. each row's last
            token, `batch.cu_q_lens[1:] − 1`; clamped into range. None = every token.
          adapters: low-rank adapters and the slot of each token (`AdaptedModel` makes them); None =
            none.

        Returns:
          (f32[R or T, vocab_size] logits, state with updated pages).

        Raises:
          ValueError: the state has not all layers, or a layer's kind or window is wrong.
        """
        count = len(state.layer_kinds)
        whole = f"all {self.config.num_layers} layers (run_layers takes a part)"
        expect(count == self.config.num_layers, "state", whole, count)
        x, state = self.run_layers(self.embed(tokens), batch, state, adapters=adapters)
        if logit_rows is not None:
            x = jnp.take(x, logit_rows, axis=0, mode="clip")
        return self.logits(x), state

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[T, hidden_size], what the first layer takes."""
        # The barrier keeps XLA from widening a whole table of bf16 ahead of a loop of steps (CPU).
        table, tokens = jax.lax.optimization_barrier((self.embedding[...], tokens))
        return table[tokens]

    def run_layers(
        self,
        x: jax.Array,
        batch: StepBatch,
        state: KVState,
        *,
        adapters: TokenAdapters | None = None,
    ) -> tuple[jax.Array, KVState]:
        """Runs x, [T, hidden_size], through the layers of `state`, which may be a range of them."""
        config, batches = self.config, batch.groups
        _check_kinds(config, state, batches)
        cos, sin = rope_tables(
            batch.positions, config.rope.frequencies(config.head_dim), config.rope.attention_factor
        )
        live = batch.slot_mapping >= 0
        steps: dict[tuple[int, int | None], _Step] = {}  # by group and window
        groups = [state.only(number) for number in range(len(state.groups))]
        for number in state.layers:
            group, index = state.find(number)
            kind = group, config.window(number)
            if kind not in steps:
                of_group = batches[group]
                plan = self._plan(x, groups[group], of_group, kind[1])
                steps[kind] = _Step(of_group, plan, cos, sin, live, self.implementation)
            layer = nnx.split(self.layers[number])
            own = None if adapters is None else adapters.layer(number)
            x, groups[group] = _run_layer(
                *layer, x, steps[kind], groups[group], jnp.int32(index), own
            )
        parts = tuple(part.groups[0] for part in groups)
        return x, dataclasses.replace(state, groups=parts)

    def _plan(
        self, x: jax.Array, state: KVState, batch: StepBatch, window: int | None
    ) -> AttentionPlan | None:
        """Of the layers of a state of one group that have this window."""
        dtype = x.dtype if is_eight_bit(state.k_pages) else state.k_pages.dtype
        shape = (x.shape[0], self.config.num_q_heads, self.config.head_dim)
        return attend_plan(
            jax.ShapeDtypeStruct(shape, dtype),
            state,
            batch,
            layer=0,
            sliding_window=_own_window(window, batch),
            implementation=self.implementation,
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """f32[R, vocab_size] of what the last layer gave, [R, hidden_size]."""
        x = rms_norm(x, self.norm[...], self.config.rms_norm_eps)
        head = "head" if hasattr(self, "head") else "embedding"
        return self._project(head, x, out_dtype=jnp.float32, implementation=self.implementation)


def _check_kinds(config: DecoderConfig, state: KVState, batches: tuple[StepBatch, ...]) -> None:
    """Checks that the layers are the model's, and that each finds a group that keeps what it sees.

    In pools that keep all, a row's own window and the layer's would have to be applied both.
    """
    last = state.layers[-1]
    expect(last < config.num_layers, "state", f"layers below {config.num_layers}", last)
    expect(
        len(batches) == len(state.groups), "batch", f"one of {len(state.groups)} groups of layers",
        len(batches),
    )  # fmt: skip
    for number, kind in zip(state.layers, state.layer_kinds, strict=True):
        window = config.window(number)
        wanted = f"layer {number} of kind 'full'" + (f" or {window}" if window else "")
        expect(kind in ("full", window), "state", wanted, repr(kind))
        slides = batches[state.find(number)[0]].sliding_window is not None
        ok = kind == window or not (window and slides)
        expect(ok, "state", "windows=False for a model with windows", "windows=True")
