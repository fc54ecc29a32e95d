# SPDX-License-Identifier: Apache-2.0
"""The activations of gated MLPs: what they make of a gate and an up."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.checks import check_choice, check_float, check_shape, expect

Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
SWIGLU_OAI_ALPHA = 1.702


def gated_product(
    gate: jax.Array, up: jax.Array, activation: Activation = "silu", limit: Any = None
) -> jax.Array:
    """activation(gate) ⊙ up, as gated MLPs have it between their projections.

    | activation | what comes of a gate g and an up u |
    |---|---|
    | `"silu"` | g · sigmoid(g) · u (SwiGLU) |
    | `"gelu"` | g · Φ(g) · u, Φ the normal distribution, by erf (GeGLU) |
    | `"gelu_tanh"` | ½ · g · (1 + tanh(√(2/π) · (g + 0.044715 · g³))) · u |
    | `"swiglu_oai"` | g' · sigmoid(1.702 · g') · (u' + 1), g' = min(g, limit), u' = u in ±limit |

    All is in f32, and the product is rounded once.

    Args:
      gate, up: [..., inner], bf16, f16 or f32.
      limit: f32 scalar, as `check_activation` gives it.

    Returns:
      [..., inner] in gate's dtype.
    """
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    if activation == "swiglu_oai":
        g = jnp.minimum(g, limit)
        out = g * jax.nn.sigmoid(SWIGLU_OAI_ALPHA * g) * (jnp.clip(u, -limit, limit) + 1)
    elif activation == "silu":
        out = jax.nn.silu(g) * u
    else:
        out = jax.nn.gelu(g, approximate=activation == "gelu_tanh") * u
    return out.astype(gate.dtype)


def check_activation(activation: Any, limit: Any) -> Any:
    """Checks the name of an activation and its limit; returns the limit as f32, or None."""
    check_choice("activation", activation, ACTIVATIONS)
    if activation != "swiglu_oai":
        text = f"None beside activation={activation!r}"
        expect(limit is None, "limit", text, limit)
        return None
    expect(limit is not None, "limit", "a scalar beside activation='swiglu_oai'", None)
    if not isinstance(limit, jax.Array):
        limit = np.asarray(limit, np.float32)
        check_shape("limit", limit, "", ())
        expect(0 < limit < np.inf, "limit", "a finite number above 0", limit.item())
        return limit
    check_float("limit", limit)
    check_shape("limit", limit, "", ())
    return limit.astype(jnp.float32)
