# SPDX-License-Identifier: Apache-2.0
"""Values of 8 bits and their scales."""

import jax
import jax.numpy as jnp

from jax_paged.checks import is_per_token

QMAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}  # largest stored value


def layer_scale(scale, layer) -> jax.Array:
    """Of a scale per layer, or one for all, that of one layer."""
    return jnp.take(scale, layer, axis=0, mode="clip") if scale.ndim else scale


def scale_of_layer(scale, layer, num_kv_heads: int) -> jax.Array | None:
    """A scale of one layer (None: of pages without a layer axis) as the native ops take it.

    A scale that is given becomes [num_kv_heads]. None, and a pool of scales per token, stay.
    """
    if scale is None or is_per_token(scale):
        return scale
    return head_scale(scale, layer, num_kv_heads, stacked=layer is not None)


def head_scale(scale, layer, num_kv_heads: int, *, stacked: bool) -> jax.Array:
    """A scale that is not per token, of one layer of stacked pages, as [num_kv_heads]."""
    if stacked:
        scale = layer_scale(scale, layer)
    return jnp.broadcast_to(scale, (num_kv_heads,))


def quantize(x, scale, dtype) -> jax.Array:
    """x / scale as an 8-bit dtype: rounded to nearest even, clamped to ±QMAX; NaN stays NaN.

    scale broadcasts against x; where it is 0, x is 0 too and so is the result. int8 has no NaN: 0.
    """
    limit = jnp.float32(QMAX[dtype.name])
    x = x.astype(jnp.float32) / jnp.where(scale == 0, jnp.float32(1), scale)
    x = jnp.clip(x, -limit, limit)
    if dtype == jnp.int8:
        x = jnp.where(jnp.isnan(x), jnp.float32(0), jnp.round(x))
    return x.astype(dtype)


def token_scale(x, dtype) -> jax.Array:
    """The scale of each token and head: max |x| / QMAX, [tokens, num_kv_heads].

    Times 1 / QMAX, which is what XLA makes of it anyway: so the native ops have the same bits.
    """
    return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) * jnp.float32(1 / QMAX[dtype.name])
