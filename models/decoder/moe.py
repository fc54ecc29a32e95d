# SPDX-License-Identifier: Apache-2.0
"""Routing as the released Qwen3-MoE, gpt-oss and DeepSeek do it, and the MLP of dense layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_paged import Int4Weight, PackedWeight, linear
from jax_paged.checks import Implementation
from jax_paged.ops.activations import Activation, check_activation, gated_product

from .adapters import LayerAdapters
from .config import Scores


def gated_mlp(
    x: jax.Array,
    gate_up: jax.Array | PackedWeight | Int4Weight,
    down: jax.Array | PackedWeight | Int4Weight,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    *,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    activation: Activation = "silu",
    limit: Any = None,
    live: Bool[Array, "tokens"] | None = None,
    adapters: LayerAdapters | None = None,
    add_up: Callable[[jax.Array], jax.Array] | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """down · (activation(gate · x) ⊙ up · x), with the biases that are given.

    x is [tokens, hidden], gate_up [2 · inner, hidden] with the gate's rows first, down [hidden,
    inner]; the scales are those of 8-bit weights. activation and limit are those of `moe_experts`,
    live is that of `linear`.
    The projections and the gated product are rounded to x's dtype. Where each device has a part of
    the inner width, add_up makes their sum of its own, which it gets in f32.
    """
    limit = check_activation(activation, limit)
    options: Any = {"live": live, "implementation": implementation}
    with jax.named_scope("gate_up"):
        hidden = linear(x, gate_up, weight_scale=gate_up_scale, **options)
        if adapters is not None:
            hidden = adapters.add("gate_up", x, hidden, implementation)
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias[None, :]
    gate, up = jnp.split(hidden, 2, axis=-1)
    inner = gated_product(gate, up, activation, limit)
    out_dtype = None if add_up is None else jnp.float32
    with jax.named_scope("down"):
        out = linear(inner, down, weight_scale=down_scale, out_dtype=out_dtype, **options)
        if adapters is not None:
            out = adapters.add("down", inner, out, implementation)
        if add_up is not None:
            out = add_up(out)
        return out if down_bias is None else out + down_bias[None, :]


def route(
    router_logits: Float[Array, "tokens experts"],
    experts_per_token: int,
    *,
    renormalize: bool,
    scores: Scores = "softmax",
    choice_bias: Float[Array, "experts"] | None = None,
    groups: int = 1,
    groups_per_token: int = 1,
    scale: float = 1.0,
) -> tuple[Int[Array, "tokens k"], Float[Array, "tokens k"]]:
    """The chosen experts of each token and their weights: the largest of scores of all experts.

    Args:
      router_logits: [tokens, num_experts]; scores are f32.
      renormalize: scale the chosen weights to sum to 1 (`norm_topk_prob`). Of a softmax that is a
        softmax over the chosen logits alone, as gpt-oss has it.
      scores: "softmax" over all experts, or the "sigmoid" of each.
      choice_bias: added to the scores while experts are chosen, not to their weights (DeepSeek-V3).
      groups: equal groups of neighbouring experts, of which only the best groups_per_token may be
        chosen from. How good one is says its best expert; of sigmoids, the sum of its best two.
      scale: what the weights are multiplied by in the end (`routed_scaling_factor`).

    Returns:
      (experts i32[tokens, k], weights f32[tokens, k]), the most wanted first; of equal ones the
      expert with the smaller index.

    Groups are those of DeepSeek-V2 (2024, section 2.2.2) and V3 (2024, section 2.1.2).
    """
    router_logits = router_logits.astype(jnp.float32)
    is_sigmoid = scores == "sigmoid"
    own = jax.nn.sigmoid(router_logits) if is_sigmoid else jax.nn.softmax(router_logits, axis=-1)
    wanted = own
    if choice_bias is not None:
        wanted = own + choice_bias.astype(jnp.float32)[None, :]
    if groups_per_token < groups:
        grouped = wanted.reshape(-1, groups, wanted.shape[1] // groups)
        of_groups = jax.lax.top_k(grouped, 2 if is_sigmoid else 1)[0].sum(axis=-1)
        _, best = jax.lax.top_k(of_groups, groups_per_token)
        is_best = jax.nn.one_hot(best, groups, dtype=jnp.bool_).any(axis=1)
        wanted = jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(wanted.shape)
    weights, experts = jax.lax.top_k(wanted, experts_per_token)
    if choice_bias is not None:
        weights = jnp.take_along_axis(own, experts, axis=1)
    if renormalize:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        # Sigmoids may all be 0.
        weights = weights / (total + jnp.float32(1e-20) if is_sigmoid else total)
    if scale != 1:
        weights = weights * jnp.float32(scale)
    return experts.astype(jnp.int32), weights
