# SPDX-License-Identifier: Apache-2.0
"""Cases of `moe_experts`, and what each gives in float64, expert by expert."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.ops.linear import quantize_weight

from .projections import quantize_blocks

# Half a unit in the last place of an output, which biases make large: it counts beside an absolute
# tolerance.
ROUNDING = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-9}


def make_case(tokens, num_experts, k, hidden=16, inner=24, seed=0, dtype: Any = np.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden))
    gate_up = rng.standard_normal((num_experts, 2 * inner, hidden)) / hidden**0.5
    down = rng.standard_normal((num_experts, hidden, inner)) / inner**0.5
    experts = np.array([rng.permutation(num_experts)[:k] for _ in range(tokens)]).reshape(-1, k)
    weights = rng.random((tokens, k))
    as_jax = [jnp.asarray(a, dtype) for a in (x, gate_up, down)]
    return [*as_jax, jnp.asarray(experts, jnp.int32), jnp.asarray(weights, jnp.float32)]


def make_options(case, activation="silu", bias_dtype: Any = None, seed=1) -> dict[str, Any]:
    """An activation, and biases where they have a dtype, as `moe_experts` takes them.

    The limit is one that cuts about every second gate and up.
    """
    down = case[2]
    num_experts, hidden, inner = down.shape
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"activation": activation}
    if activation == "swiglu_oai":
        options["limit"] = 0.75
    if bias_dtype is not None:
        for name, outputs in (("gate_up_bias", 2 * inner), ("down_bias", hidden)):
            bias = rng.standard_normal((num_experts, outputs))
            options[name] = jnp.asarray(bias, bias_dtype)
    return options


def activate(gate, up, activation="silu", limit: Any = None):
    """What an activation makes of a gate and an up, in float64."""
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    with np.errstate(over="ignore"):
        if activation == "silu":
            return gate / (1 + np.exp(-gate)) * up
        if activation == "gelu":
            return gate * np.vectorize(math.erfc)(-gate / 2**0.5) / 2 * up
        if activation == "gelu_tanh":
            z = (8 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
            return gate / (1 + np.exp(-z)) * up
        gate, up = np.minimum(gate, limit), np.minimum(np.maximum(up, -limit), limit)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def oracle(
    x, gate_up, down, experts, weights, *, gate_up_bias: Any = 0, down_bias: Any = 0,
    activation="silu", limit=None,
):  # fmt: skip
    """`moe_experts` in float64, one expert of one token after the other."""
    x, gate_up, down, weights = (np.asarray(a, np.float64) for a in (x, gate_up, down, weights))
    out = np.zeros_like(x)
    num_experts, hidden, inner = down.shape
    gate_up_bias = np.broadcast_to(np.asarray(gate_up_bias, "f8"), (num_experts, 2 * inner))
    down_bias = np.broadcast_to(np.asarray(down_bias, "f8"), (num_experts, hidden))
    for t in range(len(x)):
        for expert, weight in zip(np.asarray(experts)[t], weights[t], strict=True):
            gate, up = np.split(gate_up[expert] @ x[t] + gate_up_bias[expert], [inner])
            h = activate(gate, up, activation, limit)
            out[t] += weight * (down[expert] @ h + down_bias[expert])
    return out


def quantized(kind, case, blocks=False):
    """The case with 8-bit experts, its scales, and the case with what they stand for.

    The scales are those of outputs or of blocks.
    """
    x, gate_up, down, *rest = case
    if blocks:
        num_experts, two_inner, hidden = gate_up.shape
        paired = gate_up.reshape(num_experts, 2, two_inner // 2, hidden)
        codes, scale, wide = quantize_blocks(paired, kind)
        down, down_scale, down_wide = quantize_blocks(down, kind)
        scale = scale.reshape(num_experts, -1, scale.shape[-1])
        scales = {"gate_up_scale": scale, "down_scale": down_scale}
        meant = (wide.reshape(gate_up.shape), down_wide)
        return [x, codes.reshape(gate_up.shape), down, *rest], scales, [x, *meant, *rest]
    gate_up, gate_up_scale = quantize_weight(gate_up, dtype=kind)
    down, down_scale = quantize_weight(down, dtype=kind)
    meant = (
        np.asarray(codes, "f8") * np.asarray(scale, "f8")[..., None]
        for codes, scale in ((gate_up, gate_up_scale), (down, down_scale))
    )
    scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    return [x, gate_up, down, *rest], scales, [x, *meant, *rest]
