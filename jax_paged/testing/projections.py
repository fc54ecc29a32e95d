# SPDX-License-Identifier: Apache-2.0
"""Cases of `linear`, and what each gives in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np

EXTREMES = {jnp.int8: (127, -128), jnp.float8_e4m3fn: (448, -448)}


def make_case(rows, depth, columns, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, depth)), rng.standard_normal((columns, depth))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def make_codes(kind, rows, depth, columns, dtype=jnp.float32, seed=0):
    """x, 8-bit weights of every finite code, and scales that make products of order 1."""
    x, _ = make_case(rows, depth, 1, dtype, seed)
    rng = np.random.default_rng(seed + 1)
    weight = rng.integers(0, 256, (columns, depth), np.uint8).view(kind)
    weight = np.where(np.isnan(weight.astype(np.float32)), kind(0), weight)
    weight[:, 0], weight[:, -1] = EXTREMES[kind]
    scale = rng.uniform(0.5, 1.5, columns) / weight.astype(np.float32).std()
    return x, jnp.asarray(weight), jnp.asarray(scale, jnp.float32)


def quantize_blocks(weight, kind: Any = jnp.float8_e4m3fn):
    """8-bit weights [..., out, in], scales of blocks of 128 x 128, and what they stand for."""
    wide = np.asarray(weight, np.float64)
    *leading, rows, depth = wide.shape
    padding = [(0, 0)] * len(leading) + [(0, -rows % 128), (0, -depth % 128)]
    blocks = np.pad(wide, padding)
    blocks = blocks.reshape(*leading, blocks.shape[-2] // 128, 128, blocks.shape[-1] // 128, 128)
    scale = (np.abs(blocks).max((-3, -1)) / EXTREMES[kind][0]).astype(np.float32)
    each = np.repeat(np.repeat(scale, 128, -2), 128, -1)[..., :rows, :depth].astype(np.float64)
    codes = wide / each
    codes = np.asarray(codes if kind != jnp.int8 else np.rint(codes), np.float32).astype(kind)
    return jnp.asarray(codes), jnp.asarray(scale), codes.astype(np.float64) * each


def oracle(x, weight, scale: Any = 1):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T * np.asarray(scale, "f8")
