# SPDX-License-Identifier: Apache-2.0
"""What decoders are made of: attention over pages, and MLPs.

`Decoder` is made of them, and so may be a model of your own. They take their weights from a
`TensorSource` by the names of Hugging Face; a source may rename them.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_paged import (
    AttentionPlan,
    KVState,
    StepBatch,
    attend,
    linear,
    merge_attention_states,
    moe_experts,
    write_qkv,
)
from jax_paged.checks import (
    Implementation,
    RopeStyle,
    check_choice,
    check_size,
    expect,
    is_eight_bit,
)
from jax_paged.ops.activations import Activation, check_activation

from .adapters import LayerAdapters
from .config import Scores
from .moe import gated_mlp, route
from .parameters import CHOICE_BIAS, TensorSource
from .partition import Partition
from .placement import chosen_slots
from .projections import WEIGHT_DTYPES, Projections, WeightDtype, param_value


@jax.named_scope("norm")
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / √(mean(x²) + eps) · weight over the last axis; the mean and root are f32.

    What the weight multiplies is rounded to x's dtype; beside a wider weight the product is.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + jnp.float32(eps))
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if weight.dtype == x.dtype:
        return normed.astype(x.dtype) * weight
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


def own_window(window: int | None, batch: StepBatch) -> jax.Array | None:
    """The window that a layer gives to `attend`: none where pages slide away with it."""
    return jnp.int32(window) if window and batch.sliding_window is None else None


class PinnedTokens(NamedTuple):
    """Of rows with windows: how a step's queries meet pinned tokens, as `pinned_apart` tells."""

    batch: StepBatch
    cos: jax.Array  # f32[tokens, rotary_dim / 2], of the positions among them
    sin: jax.Array


class Attention(Projections):
    """Self-attention of one layer: projections, RMSNorm of q and k, RoPE, and the paged cache.

    What stands before it and around it, a norm and a residual, is up to the caller.

    Args:
      source: where the weights come from. It is asked for `q_proj.weight`, `k_proj.weight`,
        `v_proj.weight` and `o_proj.weight`, [out, in] each, for their `….bias`, [out], and for
        `q_norm.weight` and `k_norm.weight`, [head_dim].
      prefix: what these names begin with, "model.layers.0.self_attn." for one.
      num_q_heads, num_kv_heads: head_dim follows from the columns of `o_proj.weight`.
      qkv_bias, out_bias: whether q, k and v have biases, and the output.
      qk_norm: whether each head of q and k is normalised before RoPE.
      eps: of these norms.
      wide_norms, norm_offset: whether their weights stay f32, and what is added to them.
      sinks: whether `sinks` has a logit for each head, as for `attend`.
      sm_scale, soft_cap: as for `attend`.
      fused: `qkv_proj.weight` and `qkv_proj.bias` stand for those of q, k and v.
      window: how many tokens a query sees, itself included. None = all.
      style: of RoPE, as for `write_qkv`.
      weight_dtype: of the projections, as for `Decoder`.
      partition: of a model over several devices. None = one device.

    Raises:
      ValueError: the tensors do not fit the heads.
    """

    qkv: nnx.Param
    out: nnx.Param
    qkv_bias: nnx.Param  # this one and those below only where the model has them
    out_bias: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param
    sinks: nnx.Param

    def __init__(
        self,
        source: TensorSource,
        prefix: str,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        eps: float = 1e-6,
        wide_norms: bool = False,
        norm_offset: int = 0,
        sinks: bool = False,
        sm_scale: float | None = None,
        soft_cap: float | None = None,
        fused: bool = False,
        window: int | None = None,
        style: RopeStyle = "half",
        weight_dtype: WeightDtype = None,
        partition: Partition | None = None,
    ):
        check_choice("weight_dtype", weight_dtype, WEIGHT_DTYPES)
        self.partition = partition
        self.num_q_heads = check_size("num_q_heads", num_q_heads)
        self.window = None if window is None else check_size("window", window)
        self.eps = eps
        self.style: RopeStyle = style
        self.sm_scale, self.soft_cap = sm_scale, soft_cap
        qkv = [prefix + "qkv_proj"] if fused else [f"{prefix}{name}_proj" for name in "qkv"]
        self._load("out", weight_dtype, source, prefix + "o_proj.weight")
        width = self._shape("out")[1]
        kv_width = width // num_q_heads * num_kv_heads
        sizes = (width, kv_width, kv_width)
        order = None if partition is None else partition.order("qkv", sizes)
        names = [name + ".weight" for name in qkv]
        self._load("qkv", weight_dtype, source, *names, order=order, sizes=sizes)
        copies = 1 if partition is None else partition.kv_copies
        self._check_heads(prefix, check_size("num_kv_heads", num_kv_heads) * copies)
        if partition is not None:
            self.num_q_heads = partition.num_q_heads
        if qkv_bias:
            self._set("qkv_bias", source, *(name + ".bias" for name in qkv), order=order)
        if out_bias:
            self._set("out_bias", source, prefix + "o_proj.bias")
        if qk_norm:
            for name in ("q_norm", "k_norm"):
                tensor = f"{prefix}{name}.weight"
                self._set_norm(name, source, tensor, wide=wide_norms, offset=norm_offset)
        if sinks:
            self._set("sinks", source, prefix + "sinks")

    def _check_heads(self, prefix: str, num_kv_heads: int) -> None:
        rows, columns = self._shape("qkv")[0], self._shape("out")[1]
        head_dim, rest = divmod(columns, self.num_q_heads)
        what = f"columns of num_q_heads={self.num_q_heads} heads"
        expect(rest == 0, prefix + "o_proj.weight", what, columns)
        wanted = (self.num_q_heads + 2 * num_kv_heads) * head_dim
        what = f"{wanted} rows for {self.num_q_heads} + 2 · {num_kv_heads} heads of {head_dim}"
        expect(rows == wanted, prefix + "qkv_proj.weight", what, rows)

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
        **options,
    ) -> tuple[jax.Array, KVState]:
        """Adds the tokens' K and V to the pages of a layer, and attends.

        Args:
          x: [tokens, hidden], the step's tokens.
          state, batch, layer, positions: as for `write_qkv`.
          cos, sin: as for `write_qkv`, a row per position. Where their rotary_dim is below
            head_dim, the other dimensions stay. Frequencies of 0 turn nothing.
          pinned: the queries meet pinned tokens so; `batch` is that of the windows, then.
          live: as for `linear`: for the tokens of a step `batch.slot_mapping >= 0`. None = all.
          adapters: low-rank adapters of the layer, which a `Decoder` gets; None = none.
          plan, implementation, options: as for `attend`. The layer's own `sm_scale`, `soft_cap` and
            `sinks` come where none are given.

        Returns:
          ([tokens, hidden] in x's dtype, the state with K and V).
        """
        tokens, pages = x.shape[0], state.groups[state.find(layer)[0]].k_pages
        given: dict[str, Any] = {"live": live, "implementation": implementation}
        qkv = self._project("qkv", x, adapters, **given)
        if hasattr(self, "qkv_bias"):
            qkv = qkv + self.qkv_bias[...][None, :]
        if not is_eight_bit(pages):  # bf16 pages under f32 weights: ops take equal dtypes
            qkv = qkv.astype(pages.dtype)
        of_queries: Any = {
            "q_norm": self.q_norm[...] if hasattr(self, "q_norm") else None,
            "k_norm": self.k_norm[...] if hasattr(self, "k_norm") else None,
            "eps": self.eps, "num_q_heads": self.num_q_heads, "rotary_dim": 2 * cos.shape[1],
            "style": self.style, "layer": layer, "implementation": implementation,
        }  # fmt: skip
        with jax.named_scope("write_qkv"):
            q, state = write_qkv(
                qkv, state, batch, cos, sin, positions=positions, **of_queries
            )  # fmt: skip
        same: dict[str, Any] = {
            "sm_scale": self.sm_scale, "soft_cap": self.soft_cap, "layer": layer,
            "implementation": implementation,
        } | options  # fmt: skip
        own: dict[str, Any] = {
            "sinks": self.sinks[...] if hasattr(self, "sinks") else None, "plan": plan,
            "sliding_window": own_window(self.window, batch.groups[state.find(layer)[0]]),
        } | same  # fmt: skip
        with jax.named_scope("attend"):
            if pinned is None:
                attended = attend(q, state, batch, **own)
            else:
                seen = attend(q, state, batch, return_lse=True, **own)
                each = jnp.arange(tokens, dtype=jnp.int32)
                q, state = write_qkv(
                    qkv, state, pinned.batch, pinned.cos, pinned.sin, positions=each, **of_queries
                )
                others = attend(q, state, pinned.batch, return_lse=True, **same)
                attended, _ = merge_attention_states(*seen, *others, implementation=implementation)
        attended = cast(jax.Array, attended).reshape(tokens, -1).astype(x.dtype)
        out = self._project_all("out", attended, adapters, **given)
        if hasattr(self, "out_bias"):
            out = out + self.out_bias[...][None, :]
        return out, state


class _GatedMLP(Projections):
    """What MLPs with a gate have in common."""

    gate_up: nnx.Param
    down: nnx.Param
    gate_up_bias: nnx.Param  # this one and the next only where the MLP has biases
    down_bias: nnx.Param

    def _set_activation(self, activation: Activation, limit: float | None) -> None:
        checked = check_activation(activation, limit)
        self.activation: Activation = activation
        self.limit = None if checked is None else float(checked)

    def _options(self, implementation: Implementation) -> dict[str, Any]:
        """What `gated_mlp` and `moe_experts` take by the same names."""
        has_bias = hasattr(self, "down_bias")
        return {
            "gate_up_scale": self._scale("gate_up"),
            "down_scale": self._scale("down"),
            "gate_up_bias": self.gate_up_bias[...] if has_bias else None,
            "down_bias": self.down_bias[...] if has_bias else None,
            "activation": self.activation,
            "limit": self.limit,
            "implementation": implementation,
        }


class DenseMLP(_GatedMLP):
    """The gated MLP of a dense layer: down · (activation(gate · x) ⊙ up · x).

    Args:
      source, prefix: as for `Attention`. Asked for are `gate_proj.weight`, `up_proj.weight`,
        `down_proj.weight` and their biases.
      bias: whether all three have one.
      activation, limit: as for `moe_experts`. The limit is a number here.
      fused: `gate_up_proj.weight` and `gate_up_proj.bias` stand for those of gate and up.
      weight_dtype, partition: as for `Attention`.

    Raises:
      ValueError: there is no such activation, or it has no such limit.
    """

    def __init__(
        self,
        source: TensorSource,
        prefix: str,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        limit: float | None = None,
        fused: bool = False,
        weight_dtype: WeightDtype = None,
        partition: Partition | None = None,
    ):
        check_choice("weight_dtype", weight_dtype, WEIGHT_DTYPES)
        self.partition = partition
        self._set_activation(activation, limit)
        parts = ["gate_up"] if fused else ["gate", "up"]
        names = [f"{prefix}{part}_proj" for part in parts]
        self._load("down", weight_dtype, source, prefix + "down_proj.weight")
        inner = self._shape("down")[1]
        sizes = (inner, inner)
        order = None if partition is None else partition.order("gate_up", sizes)
        weights = [name + ".weight" for name in names]
        self._load("gate_up", weight_dtype, source, *weights, order=order, sizes=sizes)
        if bias:
            self._set("gate_up_bias", source, *(name + ".bias" for name in names), order=order)
            self._set("down_bias", source, prefix + "down_proj.bias")

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        *,
        live: Bool[Array, "tokens"] | None = None,
        adapters: LayerAdapters | None = None,
        implementation: Implementation = None,
    ) -> jax.Array:
        """[tokens, hidden] of x, [tokens, hidden]; live, adapters: as for `Attention`."""
        options = self._options(implementation)
        if self.partition is not None:
            options["add_up"] = functools.partial(self.partition.add_up, dtype=x.dtype)
        weights = self._weight("gate_up"), self._weight("down")
        return gated_mlp(x, *weights, live=live, adapters=adapters, **options)


class ExpertsMLP(_GatedMLP):
    """A mixture of experts: a router takes the best experts of each token.

    Args:
      source, prefix: as for `Attention`. Asked for are the router, `gate.weight` [experts, hidden],
        and `experts.gate_proj.weight`, `experts.up_proj.weight` [experts, inner, hidden] and
        `experts.down_proj.weight` [experts, hidden, inner]. The biases are called `….bias`, without
        the last dimension.
      experts_per_token: at most as many as there are experts.
      renormalize: whether the weights of a token's experts are scaled to sum to 1.
      router_bias, bias: whether the router has one, and whether the experts have them.
      scores, groups, groups_per_token, scale: as for `route`.
      choice_bias: whether `gate.e_score_correction_bias`, f32[experts], is what `route` takes so.
      shared: whether all tokens pass a `DenseMLP` of `shared_experts.`, too.
      activation, limit: of the experts, as for `DenseMLP`.
      weight_dtype: of the experts, as for `Decoder`.
      partition: as for `Attention`.

    Raises:
      ValueError: there are not so many experts, no such activation, or it has no such limit.
    """

    router: nnx.Param
    router_bias: nnx.Param  # only where the router has one
    choice_bias: nnx.Param  # the same
    places: nnx.Param  # i32[experts, slots of one at most], -1 = none; only where experts may move

    def __init__(
        self,
        source: TensorSource,
        prefix: str,
        *,
        experts_per_token: int,
        renormalize: bool = False,
        router_bias: bool = False,
        scores: Scores = "softmax",
        choice_bias: bool = False,
        groups: int = 1,
        groups_per_token: int = 1,
        scale: float = 1.0,
        shared: bool = False,
        bias: bool = False,
        activation: Activation = "silu",
        limit: float | None = None,
        weight_dtype: WeightDtype = None,
        partition: Partition | None = None,
    ):
        check_choice("weight_dtype", weight_dtype, WEIGHT_DTYPES)
        self.partition = partition
        self._set_activation(activation, limit)
        self.experts_per_token = check_size("experts_per_token", experts_per_token)
        self.renormalize, self.scale = renormalize, scale
        self.scores: Scores = scores
        self.groups, self.groups_per_token = groups, groups_per_token
        experts = prefix + "experts."
        self._set("router", source, prefix + "gate.weight")
        names = [experts + "gate_proj", experts + "up_proj"]
        weights = (name + ".weight" for name in names)
        count, slots = self._shape("router")[0], None
        if partition is not None:
            slots = partition.first_slots(count)
        self._load("gate_up", weight_dtype, source, *weights, axis=1, slots=slots)
        self._load("down", weight_dtype, source, experts + "down_proj.weight", slots=slots)
        if slots is not None and partition is not None:
            is_shape = isinstance(param_value(self.down), jax.ShapeDtypeStruct)
            self.places = nnx.Param(partition.places(slots, count, as_shape=is_shape))
        if router_bias:
            self._set("router_bias", source, prefix + "gate.bias")
        if choice_bias:
            self._set("choice_bias", source, f"{prefix}gate.{CHOICE_BIAS}", dtype=jnp.float32)
        if bias:
            biases = (name + ".bias" for name in names)
            self._set("gate_up_bias", source, *biases, axis=1, slots=slots)
            self._set("down_bias", source, experts + "down_proj.bias", slots=slots)
        text = f"at most the {count} experts of {prefix}gate.weight"
        expect(experts_per_token <= count, "experts_per_token", text, experts_per_token)
        if shared:
            self.shared = DenseMLP(
                source, prefix + "shared_experts.", activation=activation, limit=limit,
                weight_dtype=weight_dtype, partition=partition,
            )  # fmt: skip

    def pack(self) -> None:
        super().pack()
        if hasattr(self, "shared"):
            self.shared.pack()

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        *,
        live: Bool[Array, "tokens"] | None = None,
        implementation: Implementation = None,
    ) -> jax.Array:
        """[tokens, hidden] of x, [tokens, hidden].

        Args:
          live: as for `moe_experts`: tokens that are padding cost no expert. For the tokens of a
            step `batch.slot_mapping >= 0`.
        """
        return self.with_loads(x, live=live, implementation=implementation)[0]

    def with_loads(
        self,
        x: Float[Array, "tokens hidden"],
        *,
        live: Bool[Array, "tokens"] | None = None,
        implementation: Implementation = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(what a call gives, i32[experts], how many of the tokens have chosen each)."""
        with jax.named_scope("router"):
            router = self.router[...]
            same: dict[str, Any] = {"live": live, "implementation": implementation}
            logits = linear(x, router, out_dtype=jnp.float32, **same)
            if hasattr(self, "router_bias"):
                logits = logits + self.router_bias[...].astype(jnp.float32)[None, :]
            choice_bias = self.choice_bias[...] if hasattr(self, "choice_bias") else None
            experts, weights = route(
                logits, self.experts_per_token, renormalize=self.renormalize, scores=self.scores,
                choice_bias=choice_bias, groups=self.groups,
                groups_per_token=self.groups_per_token, scale=self.scale,
            )  # fmt: skip
        with jax.named_scope("experts"):
            options = self._options(implementation)
            used = experts
            if live is not None:
                used = jnp.where(live[:, None], experts, jnp.int32(-1))
            loads = _loads(used, logits.shape[1])
            of_experts = self._weight("gate_up"), self._weight("down")
            if self.partition is None:
                out = moe_experts(x, *of_experts, experts, weights, live=live, **options)
                return self._with_shared(out, x, same), loads

            def run(x, experts, weights):
                return moe_experts(
                    x, *of_experts, experts, weights, out_dtype=jnp.float32, **options
                )

            if hasattr(self, "places"):
                used = chosen_slots(self.places[...], x, used)
            count = of_experts[1].shape[0]
            out = self.partition.over_experts(run, x, used, weights, count)
            return self._with_shared(out, x, same), loads

    def _with_shared(self, out, x, options: dict[str, Any]) -> jax.Array:
        if not hasattr(self, "shared"):
            return out
        with jax.named_scope("shared"):
            return out + self.shared(x, **options)


def _loads(experts: jax.Array, count: int) -> jax.Array:
    """i32[count], how often each expert occurs; XLA leaves it out where nobody asks."""
    bins = jnp.where(experts >= 0, experts, jnp.int32(count)).ravel()
    return jnp.zeros(count, jnp.int32).at[bins].add(1, mode="drop")
