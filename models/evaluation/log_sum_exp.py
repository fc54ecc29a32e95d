# SPDX-License-Identifier: Apache-2.0
"""The logarithm of a sum of exponentials along rows of logits, which is what they are scaled by."""

import jax
import jax.numpy as jnp

_BLOCK = 4096  # columns


def log_sum_exp(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(ln Σ_v exp(logits[r, v]), max_v logits[r, v]), each f32[R], of f32[R, V].

    Blocks of columns are added onto each other, then the sums of a row. XLA takes five times as
    long on a CPU for a sum along rows, and keeps all exponentials in memory.
    """
    vocab_size, largest = logits.shape[1], jnp.max(logits, axis=-1)
    width = min(_BLOCK, vocab_size)

    def add(block, sums):
        start = jnp.minimum(block * width, vocab_size - width)  # the last one overlaps
        part = jax.lax.dynamic_slice_in_dim(logits, start, width, axis=1) - largest[:, None]
        is_new = start + jnp.arange(width, dtype=jnp.int32) >= block * width
        return sums + jnp.exp(jnp.where(is_new[None], part, -jnp.inf))

    zeros, blocks = jnp.zeros((logits.shape[0], width), jnp.float32), -(-vocab_size // width)
    sums = jax.lax.fori_loop(jnp.int32(0), jnp.int32(blocks), add, zeros)
    return largest + jnp.log(jnp.sum(sums, axis=-1)), largest
