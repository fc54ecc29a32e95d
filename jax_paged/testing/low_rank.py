# SPDX-License-Identifier: Apache-2.0
"""Cases of `lora`, and what each gives in float64, token by token."""

from typing import Any

import jax.numpy as jnp
import numpy as np

# The product a · x is rounded to the dtype: errors of half a unit in the last place of values up to
# 4, and up to 2 behind b. So is the sum with the base, which experts.ROUNDING is for.
TOLERANCES = {"float32": 2e-6, "float16": 0.004, "bfloat16": 0.03}


def make_case(tokens, num_adapters, depth, part_sizes, rank, dtype: Any = "float32", seed=0):
    """x, a, b, adapters, some of which are none, and a base."""
    rng = np.random.default_rng([seed, tokens])
    inner, out = len(part_sizes) * rank, sum(part_sizes)

    def draw(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    adapters = rng.integers(-1, num_adapters + 1, tokens)
    return (
        draw(tokens, depth), draw(num_adapters, inner, depth, scale=depth**-0.5),
        draw(num_adapters, out, rank, scale=rank**-0.5), jnp.asarray(adapters, jnp.int32),
        draw(tokens, out),
    )  # fmt: skip


def oracle(x, a, b, adapters, base, part_sizes):
    out = np.array(base, np.float64)
    x, a, b = (np.asarray(v, np.float64) for v in (x, a, b))
    rank, ends = b.shape[2], np.cumsum(part_sizes)
    for t, adapter in enumerate(np.asarray(adapters)):
        if 0 <= adapter < len(a):
            inner = a[adapter] @ x[t]
            for part, (end, size) in enumerate(zip(ends, part_sizes, strict=True)):
                own = inner[part * rank : (part + 1) * rank]
                out[t, end - size : end] += b[adapter, end - size : end] @ own
    return out
