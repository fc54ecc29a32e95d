# SPDX-License-Identifier: Apache-2.0
"""Cases of `moe_experts`, and what each gives in float64, expert by expert."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.ops.linear import quantize_weight


def make_case(tokens, num_experts, k, hidden=16, inner=24, seed=0, dtype: Any = np.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden))
    gate_up = rng.standard_normal((num_experts, 2 * inner, hidden)) / hidden**0.5
    down = rng.standard_normal((num_experts, hidden, inner)) / inner**0.5
    experts = np.array([rng.permutation(num_experts)[:k] for _ in range(tokens)]).reshape(-1, k)
    weights = rng.random((tokens, k))
    as_jax = [jnp.asarray(a, dtype) for a in (x, gate_up, down)]
    return [*as_jax, jnp.asarray(experts, jnp.int32), jnp.asarray(weights, jnp.float32)]


def oracle(x, gate_up, down, experts, weights):
    x, gate_up, down, weights = (np.asarray(a, np.float64) for a in (x, gate_up, down, weights))
    out = np.zeros_like(x)
    inner = down.shape[2]
    for t in range(len(x)):
        for expert, weight in zip(np.asarray(experts)[t], weights[t], strict=True):
            gate, up = np.split(gate_up[expert] @ x[t], [inner])
            out[t] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def quantized(kind, case):
    """The case with 8-bit experts, its scales, and the case with what they stand for."""
    x, gate_up, down, *rest = case
    gate_up, gate_up_scale = quantize_weight(gate_up, dtype=kind)
    down, down_scale = quantize_weight(down, dtype=kind)
    meant = (
        np.asarray(codes, "f8") * np.asarray(scale, "f8")[..., None]
        for codes, scale in ((gate_up, gate_up_scale), (down, down_scale))
    )
    scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    return [x, gate_up, down, *rest], scales, [x, *meant, *rest]
