# SPDX-License-Identifier: Apache-2.0
"""Routing as the released Qwen3-MoE does it, and the gated MLP of dense layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged import linear
from jax_paged.checks import Implementation
from jax_paged.ops.activations import Activation, check_activation, gated_product

from .adapters import LayerAdapters


def gated_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    *,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    activation: Activation = "silu",
    limit: Any = None,
    adapters: LayerAdapters | None = None,
    add_up: Callable[[jax.Array], jax.Array] | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """down · (activation(gate · x) ⊙ up · x), with the biases that are given.

    x is [tokens, hidden], gate_up [2 · inner, hidden] with the gate's rows first, down [hidden,
    inner]; the scales are those of 8-bit weights. activation and limit are those of `moe_experts`.
    The projections and the gated product are rounded to x's dtype. Where each device has a part of
    the inner width, add_up makes their sum of its own, which it gets in f32.
    """
    limit = check_activation(activation, limit)
    with jax.named_scope("gate_up"):
        hidden = linear(x, gate_up, weight_scale=gate_up_scale, implementation=implementation)
        if adapters is not None:
            hidden = adapters.add("gate_up", x, hidden, implementation)
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias[None, :]
    gate, up = jnp.split(hidden, 2, axis=-1)
    inner = gated_product(gate, up, activation, limit)
    out_dtype = None if add_up is None else jnp.float32
    with jax.named_scope("down"):
        out = linear(
            inner, down, weight_scale=down_scale, out_dtype=out_dtype, implementation=implementation
        )
        if adapters is not None:
            out = adapters.add("down", inner, out, implementation)
        if add_up is not None:
            out = add_up(out)
        return out if down_bias is None else out + down_bias[None, :]


def route(
    router_logits: Float[Array, "tokens experts"], experts_per_token: int, *, renormalize: bool
) -> tuple[Int[Array, "tokens k"], Float[Array, "tokens k"]]:
    """The chosen experts of each token and their weights: softmax over all experts, then top-k.

    Args:
      router_logits: [tokens, num_experts]; the softmax is f32.
      renormalize: scale the chosen weights to sum to 1 (`norm_topk_prob`).

    Returns:
      (experts i32[tokens, k], weights f32[tokens, k]), largest weight first; of equal ones the
      expert with the smaller index.
    """
    probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, experts_per_token)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts.astype(jnp.int32), weights
