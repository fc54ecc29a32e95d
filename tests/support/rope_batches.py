# SPDX-License-Identifier: Apache-2.0
"""A batch and tables for rope inside attention."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_paged.ops.rope import Rope, inverse_frequencies, rope_tables
from jax_paged.testing import Batch, Case, make_batch

CASE = Case("small", 8, 2, 64, page_size=16)


def tables(max_positions: int, rotary_dim: int = 64, style: Any = "half") -> Rope:
    positions = jnp.arange(max_positions, dtype=jnp.int32)
    cos, sin = rope_tables(positions, inverse_frequencies(rotary_dim, 1e4))
    return Rope(cos, sin, style)


def batch_of(dtype: Any = jnp.float32, **changes: Any) -> Batch:
    case = dataclasses.replace(CASE, **changes)
    return make_batch(case, jnp.dtype(dtype), [1, 20, 3], [130, 60, 3], num_tokens=26, seed=2)
