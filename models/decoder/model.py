# SPDX-License-Identifier: Apache-2.0
"""The decoder on paged KV: Qwen3-MoE, Qwen3, Qwen2, Llama, Mistral, Phi-3, Gemma 3, gpt-oss,
DeepSeek-V2 or DeepSeek-V3.

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
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_paged import AttentionPlan, KVState, StepBatch, attend_plan, pinned_apart
from jax_paged.checks import Implementation, check_choice, expect, is_eight_bit
from jax_paged.ops.rope import rope_tables

from .adapters import LayerAdapters, TokenAdapters
from .config import DecoderConfig
from .latent import LatentAttention
from .parameters import TensorSource
from .partition import Partition
from .parts import Attention, DenseMLP, ExpertsMLP, PinnedTokens, own_window, rms_norm
from .projections import WEIGHT_DTYPES, Projections, WeightDtype, param_value
from .stages import in_stages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Step:
    """What the layers of one group with one window share in a call."""

    batch: StepBatch
    plan: AttentionPlan | None
    cos: jax.Array  # a row per token
    sin: jax.Array
    live: jax.Array
    pinned: PinnedTokens | None
    implementation: Implementation = dataclasses.field(metadata={"static": True})


class Layer(Projections):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).

    With post-norms what attention and MLP give is normalised, too, before it is added.
    """

    attention_norm: nnx.Param
    mlp_norm: nnx.Param
    post_attention_norm: nnx.Param  # this one and the next only where the model has them
    post_mlp_norm: nnx.Param

    def __init__(
        self, config: DecoderConfig, layer: int, source: TensorSource, weight_dtype: WeightDtype,
        partition: Partition | None,
    ):  # fmt: skip
        self.eps, self.partition = config.rms_norm_eps, partition
        prefix = f"model.layers.{layer}."
        of_norms: Any = {"wide": config.wide_norms, "offset": config.norm_offset}
        self._set_norm("attention_norm", source, prefix + "input_layernorm.weight", **of_norms)
        self.attention: Attention | LatentAttention
        if config.latent is not None:
            self.attention = LatentAttention(
                source,
                prefix + "self_attn.",
                num_q_heads=config.num_q_heads,
                sizes=config.latent,
                eps=config.rms_norm_eps,
                sm_scale=config.attention_scale,
                weight_dtype=weight_dtype,
                partition=partition,
            )
        else:
            self.attention = Attention(
                source,
                prefix + "self_attn.",
                num_q_heads=config.num_q_heads,
                num_kv_heads=config.num_kv_heads,
                qkv_bias=config.qkv_bias,
                out_bias=config.out_bias,
                qk_norm=config.qk_norm,
                eps=config.rms_norm_eps,
                wide_norms=config.wide_norms,
                norm_offset=config.norm_offset,
                sinks=config.sinks,
                sm_scale=config.attention_scale,
                soft_cap=config.attention_soft_cap,
                fused=config.fused_projections,
                window=config.window(layer) or None,
                weight_dtype=weight_dtype,
                partition=partition,
            )
        norm = prefix + "post_attention_layernorm.weight"
        if config.post_norms:
            self._set_norm("post_attention_norm", source, norm, **of_norms)
            norm = prefix + "pre_feedforward_layernorm.weight"
        self._set_norm("mlp_norm", source, norm, **of_norms)
        same: Any = {
            "activation": config.activation, "limit": config.activation_limit,
            "weight_dtype": weight_dtype, "partition": partition,
        }  # fmt: skip
        self.is_mixture = config.moe_layers[layer]
        if self.is_mixture:
            self.mlp = ExpertsMLP(
                source,
                prefix + "mlp.",
                experts_per_token=config.experts_per_token,
                renormalize=config.norm_topk_prob,
                router_bias=config.router_bias,
                scores=config.router_scores,
                choice_bias=config.choice_bias,
                groups=config.expert_groups,
                groups_per_token=config.groups_per_token,
                scale=config.expert_scale,
                shared=config.shared_intermediate_size > 0,
                bias=config.expert_bias,
                **same,
            )
        else:
            self.mlp = DenseMLP(
                source,
                prefix + "mlp.",
                bias=config.mlp_bias,
                fused=config.fused_projections,
                **same,
            )
        if config.post_norms:
            norm = prefix + "post_feedforward_layernorm.weight"
            self._set_norm("post_mlp_norm", source, norm, **of_norms)

    def __call__(
        self, x, step: _Step, state: KVState, index: jax.Array, adapters: LayerAdapters | None
    ):
        with jax.named_scope("attention"):
            normed = rms_norm(x, self.attention_norm[...], self.eps)
            out, state = self.attention(
                normed,
                state,
                step.batch,
                step.cos,
                step.sin,
                layer=index,
                positions=jnp.arange(x.shape[0], dtype=jnp.int32),
                pinned=step.pinned,
                plan=step.plan,
                live=step.live,
                adapters=adapters,
                implementation=step.implementation,
            )
            if hasattr(self, "post_attention_norm"):
                out = rms_norm(out, self.post_attention_norm[...], self.eps)
            x = x + out
        loads = None
        with jax.named_scope("mlp"):
            normed = rms_norm(x, self.mlp_norm[...], self.eps)
            options: Any = {"live": step.live, "implementation": step.implementation}
            if isinstance(self.mlp, ExpertsMLP):
                out, loads = self.mlp.with_loads(normed, **options)
            else:
                out = self.mlp(normed, adapters=adapters, **options)
            if hasattr(self, "post_mlp_norm"):
                out = rms_norm(out, self.post_mlp_norm[...], self.eps)
        return x + out, state, loads


def _packed_layer(layer: Layer) -> Layer:
    layer.attention.pack()
    layer.mlp.pack()
    return layer


@functools.partial(jax.jit, static_argnames="graph")
def _run_layer(
    graph, weights, x, step: _Step, state: KVState, index: jax.Array,
    adapters: LayerAdapters | None,
):  # fmt: skip
    """One layer. A jit of its own: layers of one kind are traced and lowered once; XLA inlines."""
    return nnx.merge(graph, weights)(x, step, state, index, adapters)


class Decoder(Projections):
    """The whole model.

    Weights are per-layer leaves under an unrolled loop (a scan over stacked weights copies each
    layer's every step), stored [out, in] as published; q, k and v are one leaf, and so are gate and
    up. The residual stream has the weights' dtype, norms, softmaxes and logits are f32.

    Args:
      config: what it is.
      source: where the weights come from, in the wanted dtype (bf16 or f32).
      weight_dtype: "int4" = projections and experts are in 4 bits (`jax_paged.quantize_int4`), the
        head is int8; not over a mesh yet. "int8", or "fp8" or "fp8_e4m3" = projections,
        experts and the head are int8 or f8e4m3fn with a scale per output
        (`jax_paged.quantize_weight`), each quantized as it comes. Norms, biases, router and
        embedding stay. A head that is the embedding becomes an 8-bit
        copy. None = as the source.
      implementation: of the native ops: None = automatic, "native", "reference".
      mesh: the devices that share the model (`make_mesh`). None = one device. Tokens, batch and
        logits are whole on each; the pages of the state are split by KV heads (`create_state`).

      redundant_experts: slots of a layer beyond one for each expert, together a multiple of the
        devices: experts may move then, and busy ones be in several slots (`Engine.rebalance`). 0 =
        they may move. None = they stay where they are.
      pack: whether projections, experts and head are in the order in which the CPU's tiles read
        them, where they lie on a CPU; results have the same bits. `jax_paged.pack_weight` says
        where that is faster. A head that is the embedding becomes a copy. Not over a mesh.

    Raises:
      ValueError: the model cannot be split over the mesh.
    """

    embedding: nnx.Param
    norm: nnx.Param
    endless = True  # see `row_limit`

    def __init__(
        self,
        config: DecoderConfig,
        source: TensorSource,
        *,
        weight_dtype: WeightDtype = None,
        implementation: Implementation = None,
        mesh: Mesh | None = None,
        redundant_experts: int | None = None,
        pack: bool = False,
    ):
        check_choice("weight_dtype", weight_dtype, WEIGHT_DTYPES)
        can = redundant_experts is None or (mesh is not None and any(config.moe_layers))
        what = "None for a model without a mesh or without experts"
        expect(can, "redundant_experts", what, redundant_experts)
        expect(not pack or mesh is None, "pack", "False for a model with a mesh", pack)
        partition = None if mesh is None else Partition.create(config, mesh, redundant_experts)
        self.config, self.partition = config, partition
        self.implementation: Implementation = implementation
        self._set("embedding", source, "model.embed_tokens.weight")
        count = (partition or config).num_layers
        layers = (Layer(config, i, source, weight_dtype, partition) for i in range(count))
        self.layers = nnx.List(_packed_layer(layer) if pack else layer for layer in layers)
        of_norms: Any = {"wide": config.wide_norms, "offset": config.norm_offset}
        self._set_norm("norm", source, "model.norm.weight", **of_norms)
        if not config.tie_embeddings:
            self._load("head", weight_dtype, source, "lm_head.weight")
        elif weight_dtype is not None:
            self._quantize("head", weight_dtype, self.embedding)
        if pack:
            self.pack()

    def packed(self) -> "Decoder":
        """A model with the same weights, of which those that can be are packed."""
        own = nnx.merge(*nnx.split(self))
        expect(own.partition is None, "model", "one without a mesh", "one with a mesh")
        for layer in own.layers:
            _packed_layer(layer)
        own.pack()
        return own

    def pack(self) -> None:
        """Packs the head, and makes it where it is the embedding, which stays as it is."""
        if not hasattr(self, "head"):
            self.head = nnx.Param(param_value(self.embedding))
        super().pack()

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of the embedding, of what the layers pass on, and of KV pages by default."""
        return param_value(self.embedding).dtype

    def __call__(
        self,
        tokens: jax.Array,
        batch: StepBatch,
        state: KVState,
        *,
        logit_rows: jax.Array | None = None,
        adapters: TokenAdapters | None = None,
        loads: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        """Runs the tokens through the model; their K and V are added to the state's pages.

        Args:
          tokens: i32[T], the new tokens of the rows of `batch`, in row order, padding at the end
            (any id within the vocabulary; it costs no expert and reaches no row).
          batch: the step's view of the state, T tokens long.
          state: its pages have num_layers, num_kv_heads and head_dim of this model, and its dtype,
            another float one (attention computes in it) or an 8-bit one. The kind of a layer is
            "full" or the layer's window.
          logit_rows: i32[R] indices into tokens whose logits are wanted, e.g. each row's last
            token, `batch.cu_q_lens[1:] − 1`. −1 = none: such logits are 0 and cost little. Beyond
            the end: the last one. None = every token; the logits of padding are 0.
          adapters: low-rank adapters and the slot of each token (`AdaptedModel` makes them); None =
            none.
          loads: i32[num_layers, num_experts], tokens that experts have had so far. None = they are
            not counted.

        Returns:
          (f32[R or T, vocab_size] logits, state with updated pages), and the loads, if they were
          given, with those of the tokens added.

        Raises:
          ValueError: the state has not all layers, or a layer's kind or window is wrong.
        """
        count, mine = len(state.layer_kinds), len(self.layers)
        whole = f"all {mine} layers (run_layers takes a part)"
        expect(count == mine, "state", whole, count)
        if self.partition is not None and not self.partition.is_inside:
            whole = tokens, batch, logit_rows, loads
            logits, state, loads = self._on_mesh(self.partition, state, adapters, *whole)
        else:
            whole = tokens, batch, logit_rows, loads
            logits, state, loads = self._all_layers(state, adapters, *whole)
        return (logits, state) if loads is None else (logits, state, loads)

    def inside(self) -> "Decoder":
        """The same for calls inside of a `jax.shard_map` over its mesh.

        Each device then calls it with what it has of weights and pages, and each replica with rows
        of its own; all call it with as many tokens.
        """
        expect(self.partition is not None, "model", "one with a mesh", "one without")
        assert self.partition is not None
        own = nnx.merge(*nnx.split(self))
        partition = dataclasses.replace(self.partition, is_inside=True)
        parts = (
            (layer, layer.attention, layer.mlp, getattr(layer.mlp, "shared", None))
            for layer in own.layers
        )  # fmt: skip
        for module in (own, *itertools.chain.from_iterable(parts)):
            if module is not None:
                module.partition = partition
        return own

    def _on_mesh(self, partition: Partition, state, adapters, *whole):
        """`__call__` on each device of the mesh, with what it has of weights and pages."""
        graph, params = nnx.split(self)

        def local(params, *args):
            return nnx.merge(graph, params)._all_layers(*args)

        of_state: Any = partition.state_specs(state)
        same: Any = P()
        of_adapters = None if adapters is None else TokenAdapters(adapters.adapters.specs(), same)
        return jax.shard_map(
            local,
            mesh=partition.mesh,
            in_specs=(partition.specs(params), of_state, of_adapters, *[same] * len(whole)),
            out_specs=(same, of_state, same),
            check_vma=False,
        )(params, state, adapters, *whole)

    def _all_layers(self, state, adapters, tokens, batch, logit_rows, loads):
        live = (batch.slot_mapping if logit_rows is None else logit_rows) >= 0
        if self.partition is not None and self.partition.pp > 1:
            x, state = in_stages(self, tokens, batch, state, logit_rows, adapters)
            return self.logits(x, live=live), state, loads
        x = self.embed(tokens)
        x, state, loads = self._run_layers(x, batch, state, adapters, loads)
        if logit_rows is not None:
            x = jnp.take(x, logit_rows, axis=0, mode="clip")
        return self.logits(x, live=live), state, loads

    @jax.named_scope("embed")
    def embed(self, tokens: jax.Array) -> jax.Array:
        """[T, hidden_size], what the first layer takes."""
        # The barrier keeps XLA from widening a whole table of bf16 ahead of a loop of steps (CPU).
        table, tokens = jax.lax.optimization_barrier((self.embedding[...], tokens))
        own = self.partition
        x = table[tokens] if own is None else own.embedded(table, tokens)
        scale = self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def run_layers(
        self,
        x: jax.Array,
        batch: StepBatch,
        state: KVState,
        *,
        adapters: TokenAdapters | None = None,
    ) -> tuple[jax.Array, KVState]:
        """Runs x, [T, hidden_size], through the layers of `state`, which may be a range of them."""
        x, state, _ = self._run_layers(x, batch, state, adapters, None)
        return x, state

    def _run_layers(self, x, batch: StepBatch, state: KVState, adapters, loads):
        config, batches = self.config, batch.groups
        _check_kinds(config, state, batches)
        live = batch.slot_mapping >= 0
        steps: dict[tuple[int, int | None], _Step] = {}  # by group and window
        groups = [state.only(number) for number in range(len(state.groups))]
        for number in state.layers:
            group, index = state.find(number)
            kind = group, config.window(number)
            if kind not in steps:
                steps[kind] = self._step(number, x, batches[group], groups[group], live)
            layer = nnx.split(self.layers[number])
            own = None if adapters is None else adapters.layer(number)
            with jax.named_scope(f"layer_{number}"):
                x, groups[group], more = _run_layer(
                    *layer, x, steps[kind], groups[group], jnp.int32(index), own
                )
            if loads is not None and more is not None:
                loads = loads.at[number].add(more)
        parts = tuple(part.groups[0] for part in groups)
        return x, dataclasses.replace(state, groups=parts), loads

    def _step(self, number: int, x, batch: StepBatch, state: KVState, live: jax.Array) -> _Step:
        """What layer `number` and those like it need. XLA joins the tables that are equal."""
        config, pinned = self.config, None
        rope, window = config.rope_of(number), config.window(number)
        slides = batch.sliding_window is not None and not window  # by rows: they may do so for ever

        def tables(positions):
            return rope_tables(
                positions,
                rope.frequencies(config.head_dim),
                rope.attention_factor,
                context=config.context_length if slides else None,
            )

        of_tokens = tables(batch.positions)
        if slides:
            batch, of_pinned, positions = pinned_apart(batch)
            pinned = PinnedTokens(of_pinned, *tables(positions))
        plan = self._plan(x, state, batch, window)
        return _Step(batch, plan, *of_tokens, live, pinned, self.implementation)

    @jax.named_scope("plan")
    def _plan(
        self, x: jax.Array, state: KVState, batch: StepBatch, window: int | None
    ) -> AttentionPlan | None:
        """Of the layers of a state of one group that have this window."""
        dtype = x.dtype if is_eight_bit(state.k_pages) else state.k_pages.dtype
        heads = (self.partition or self.config).num_q_heads
        shape = (x.shape[0], heads, self.config.head_dim)
        return attend_plan(
            jax.ShapeDtypeStruct(shape, dtype),
            state,
            batch,
            layer=0,
            sliding_window=own_window(window, batch),
            implementation=self.implementation,
        )

    @jax.named_scope("logits")
    def logits(self, x: jax.Array, *, live: jax.Array | None = None) -> jax.Array:
        """f32[R, vocab_size] of what the last layer gave, [R, hidden_size]; live: of `linear`."""
        x = rms_norm(x, self.norm[...], self.config.rms_norm_eps)
        head = "head" if hasattr(self, "head") else "embedding"
        options: Any = {"live": live, "implementation": self.implementation}
        out = self._project(head, x, out_dtype=jnp.float32, **options)
        if (cap := self.config.logit_soft_cap) is not None:
            out = jnp.tanh(out / jnp.float32(cap)) * jnp.float32(cap)
        return out if self.partition is None else self.partition.whole_logits(out)


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
        own = config.kind(number)
        kinds = dict.fromkeys(["mla"] if own == "mla" else ["full", own])
        wanted = f"layer {number} of kind {' or '.join(map(repr, kinds))}"
        expect(kind in kinds, "state", wanted, repr(kind))
        slides = batches[state.find(number)[0]].sliding_window is not None
        ok = kind == window or not (window and slides)
        expect(ok, "state", "windows=False for a model with windows", "windows=True")
