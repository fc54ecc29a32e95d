# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: which pairs of dimensions turn, and by which angles.

With style "half" (NeoX, Llama, Qwen) dimension i turns together with i + rotary_dim / 2, with
"interleaved" (GPT-J) 2 i with 2 i + 1; dimensions from rotary_dim on stay as they are.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

from jax_paged.checks import RopeStyle


class Rope(NamedTuple):
    """Tables as `rope_tables` makes them, and which dimensions turn together.

    For the option `rope` of attention, where K is stored as it was before the rotary embedding.

    >>> rope = Rope(*rope_tables(jnp.arange(32), inverse_frequencies(8, 1e4)))
    >>> rope.cos.shape, rope.style
    ((32, 4), 'half')
    """

    cos: jax.Array  # f32[max_positions, rotary_dim / 2]
    sin: jax.Array  # the same
    style: RopeStyle = "half"


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """theta ** (−2 i / head_dim) for i < head_dim / 2, float64: radians per position.

    >>> print(inverse_frequencies(4, 100.0))
    [1.  0.1]
    """
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def llama3_frequencies(
    frequencies: np.ndarray,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> np.ndarray:
    """Llama 3.1's long-context frequencies: slow ones divided by `factor`, fast ones kept.

    A dimension that turns at most low_freq_factor times within the original context is slow, one
    that turns at least high_freq_factor times is fast; in between the two are blended linearly in
    the number of turns.
    """
    turns = original_context * frequencies / (2 * math.pi)
    keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor


def yarn_frequencies(
    frequencies: np.ndarray,
    *,
    theta: float,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> np.ndarray:
    """YaRN (Peng et al. 2023): as `llama3_frequencies`, blended linearly in the dimension's index.

    Dimensions that turn more than beta_fast times in the original context are kept, those that turn
    less than beta_slow times are divided by `factor`; `truncate` rounds the two bounds outwards.
    """
    half = len(frequencies)
    head_dim = 2 * half

    def index_with(turns: float) -> float:
        return head_dim * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_with(beta_fast), index_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    slow = np.clip((np.arange(half, dtype=np.float64) - low) / width, 0, 1)
    return (1 - slow) * frequencies + slow * frequencies / factor


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """What YaRN multiplies cos and sin by, to sharpen attention over the stretched context."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """How much YaRN sharpens a context that is stretched so: 0.1 · weight · ln(factor) + 1.

    DeepSeek multiplies the scale of logits by the square of it, with weight = mscale_all_dim.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def dynamic_frequencies(
    head_dim: int,
    theta: float,
    *,
    factor: float,
    original_context: int,
    length: Int[Array, "..."] | int,
) -> Float[Array, "... half"]:
    """Dynamic NTK: `inverse_frequencies` of a theta that grows with the length of the text.

    theta · (factor · length / original_context − (factor − 1)) ** (head_dim / (head_dim − 2)) where
    length is beyond original_context, theta up to it. All keys of a row must have been turned with
    the same theta: turn them again, or take the longest length that the row will reach.

    Args:
      length: tokens of the row, or of each token's row; may be traced.

    Returns:
      f32[..., head_dim / 2] for `rope_tables`.
    """
    length = jnp.maximum(jnp.asarray(length).astype(jnp.float32), jnp.float32(original_context))
    stretch = jnp.float32(factor / original_context) * length - jnp.float32(factor - 1)
    # log2 theta rather than theta: a power of a power, rounded once.
    log_theta = jnp.float32(math.log2(theta)) + jnp.float32(head_dim / (head_dim - 2)) * jnp.log2(
        stretch
    )
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / jnp.float32(head_dim)
    return jnp.exp2(-log_theta[..., None] * exponents.reshape((1,) * log_theta.ndim + (-1,)))


def longrope_frequencies(
    frequencies: np.ndarray,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_context: int,
    length: Int[Array, "..."] | int,
) -> Float[Array, "... half"]:
    """LongRoPE (Ding et al. 2024): one divisor per dimension, searched for short and long texts.

    frequencies / short_factor for lengths up to original_context, / long_factor beyond it; of
    `length` the same holds as in `dynamic_frequencies`. The tables are also to be multiplied with
    `longrope_attention_factor`.
    """
    for name, divisors in (("short_factor", short_factor), ("long_factor", long_factor)):
        if len(divisors) != len(frequencies):
            raise ValueError(
                f"{name}: expected {len(frequencies)} numbers, one per frequency, "
                f"got {len(divisors)}"
            )
    short, long = (
        jnp.asarray(frequencies / np.asarray(divisors, np.float64), jnp.float32)
        for divisors in (short_factor, long_factor)
    )
    is_long = (jnp.asarray(length) > original_context)[..., None]
    one_row = (1,) * (is_long.ndim - 1) + (-1,)
    return jnp.where(is_long, long.reshape(one_row), short.reshape(one_row))


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """What LongRoPE multiplies cos and sin by, for a context `factor` times the original one."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def rope_tables(
    positions: Int[Array, "tokens"],
    frequencies: np.ndarray | Float[Array, "... half"],
    scale: float = 1.0,
    *,
    context: int | None = None,
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """(cos, sin) of position · frequency, times scale: f32[tokens, rotary_dim / 2] each.

    Args:
      frequencies: [rotary_dim / 2] for all tokens, or [tokens, rotary_dim / 2]. Models whose layers
        differ in theta make a pair of tables for each theta.
      context: angles of positions up to this one are f32 products, as models have been trained
        with. They are wrong by up to 2⁻²⁴ of themselves, so by whole turns in the end. Positions
        beyond, any int32, are turned by whole contexts more, which is exact to 1e-6. Needs numpy
        frequencies [rotary_dim / 2]. None: all angles are products.

    >>> cos, sin = rope_tables(jnp.array([0, 1]), inverse_frequencies(4, 1e4))
    >>> print(cos.shape, cos[0], sin[0])
    (2, 2) [1. 1.] [0. 0.]
    """
    near = positions if context is None else positions % context
    per_position = jnp.atleast_2d(jnp.asarray(frequencies, jnp.float32))
    angles = near.astype(jnp.float32)[:, None] * per_position
    cos, sin = jnp.cos(angles) * jnp.float32(scale), jnp.sin(angles) * jnp.float32(scale)
    if context is None:
        return cos, sin
    angles = _exact_angles(positions // context, context * np.asarray(frequencies, np.float64))
    more_cos, more_sin = jnp.cos(angles), jnp.sin(angles)
    return cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin


def _exact_angles(
    times: Int[Array, "tokens"], angles: Float64[np.ndarray, "half"]
) -> Float[Array, "tokens half"]:
    """times · angles modulo 2π, within [−π, π]: f32[tokens, half].

    Turns are integers of 64 bits, of which 2⁶⁴ are a whole one; the product's upper half is enough.
    """
    whole = 2**32
    turns = np.mod(angles / (2 * math.pi), 1.0) * whole
    high = np.floor(turns)
    low = np.floor((turns - high) * whole)
    high, low = (jnp.asarray((x % whole).astype(np.uint32))[None] for x in (high, low))
    factor = times.astype(jnp.uint32)[:, None]
    turned = factor * high + _upper_half(factor, low)
    signed = jax.lax.bitcast_convert_type(turned, jnp.int32).astype(jnp.float32)
    return signed * jnp.float32(2 * math.pi / whole)


def _upper_half(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of a · b, both uint32."""
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (other >> half)


def apply_rope(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    *,
    style: RopeStyle = "half",
) -> Float[Array, "tokens heads head_dim"]:
    """Turns each head's pairs by the tables' angles; f32 inside, rounded once.

    Args:
      x: [tokens, heads, head_dim], any float dtype; the result has the same.
      cos, sin: f32[tokens, rotary_dim / 2], from `rope_tables`; rotary_dim is at most head_dim.
      style: "half" turns (x[i], x[i + rotary_dim / 2]), "interleaved" (x[2 i], x[2 i + 1]).
    """
    half = cos.shape[-1]
    turning, rest = jnp.split(x, [2 * half], axis=-1)
    turning = turning.astype(jnp.float32)
    if style == "half":
        first, second = jnp.split(turning, 2, axis=-1)
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    pair = (first * cos - second * sin, second * cos + first * sin)
    if style == "half":
        turned = jnp.concatenate(pair, axis=-1)
    else:
        turned = jnp.stack(pair, axis=-1).reshape(turning.shape)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
