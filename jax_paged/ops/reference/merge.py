# SPDX-License-Identifier: Apache-2.0
"""The merge of attention states in jax.numpy."""

import jax
import jax.numpy as jnp


def merge_attention_states(out_a, lse_a, out_b, lse_b):
    """`jax_paged.merge_attention_states` in jax.numpy. Differentiable."""
    empty_a, empty_b = jnp.isneginf(lse_a), jnp.isneginf(lse_b)
    both = ~(empty_a | empty_b)
    # What is masked is replaced beforehand, so that no NaN of it reaches a gradient as 0 · NaN.
    zero = jnp.float32(0)
    logs = [jnp.where(both, lse, zero) for lse in (lse_a, lse_b)]
    top = jax.lax.stop_gradient(jnp.maximum(*logs))
    weight_a, weight_b = (jnp.exp(log - top) for log in logs)
    total = weight_a + weight_b

    def share(out, weight):
        kept = jnp.where(both[..., None], out.astype(jnp.float32), zero)
        return kept * (weight / total)[..., None]

    merged = (share(out_a, weight_a) + share(out_b, weight_b)).astype(out_a.dtype)
    nothing = jnp.zeros((), out_a.dtype)
    other = jnp.where(empty_a[..., None], jnp.where(empty_b[..., None], nothing, out_b), out_a)
    out = jnp.where(both[..., None], merged, other)
    lse = jnp.where(both, top + jnp.log(total), jnp.where(empty_a, lse_b, lse_a))
    return out, lse
