# SPDX-License-Identifier: Apache-2.0
"""Random batches of rows with and without token trees."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.testing import (
    Batch,
    Case,
    make_batch,
)
from jax_paged.testing.options import random_parents, trees_of

MAX_TREE = 70


def build(seed: int) -> tuple[Batch, dict[str, Any], dict[str, Any]]:
    """A batch of rows with and without trees, options for op and oracle, and for the op alone."""
    rng = np.random.default_rng([seed, 77])

    def pick(*values):
        return values[rng.integers(len(values))]

    group, heads = pick(1, 2, 4, 8, 24), pick(1, 2)
    head_dim, v_head_dim = pick((64, None), (40, 72), (128, None))
    case = Case(
        "tree", group * heads, heads, head_dim, pick(1, 5, 16, 64), v_head_dim,
        pick("HND", "NHD", "vllm5d"), pick(None, 2),
    )  # fmt: skip
    dtype = pick("float32", "bfloat16", "float16")
    if case.layout == "vllm5d":
        case = dataclasses.replace(case, head_dim=64, v_head_dim=None)
    rows = int(rng.integers(1, 6))
    parents, q_lens, seq_lens = [], [], []
    for row in range(rows):
        kind = pick("chain", "tree", "forest", "none", "tree")
        kind = "chain" if row == rows - 1 and row > 0 and pick(True, False) else kind
        size = 0 if kind == "none" else int(pick(1, 2, 5, 12, 30, MAX_TREE))
        parents.append(random_parents(rng, size, kind))
        q_lens.append(int(rng.integers(0, 20)) if not size else int(rng.integers(1, size + 1)))
        seq_lens.append(max(size, q_lens[-1]) + int(pick(0, 1, 17, 100, 300)))
    order = rng.permutation(rows)
    parents, q_lens, seq_lens = (
        [x[i] for i in order] for x in (parents, q_lens, seq_lens)
    )  # fmt: skip
    batch = make_batch(
        case, jnp.dtype(dtype), q_lens, seq_lens, num_tokens=sum(q_lens) + 2, seed=seed
    )
    options: dict[str, Any] = trees_of(parents)
    if pick(True, False):
        options["sliding_window"] = int(pick(1, 3, 20, 90))
    if pick(True, False):
        options["alibi_slopes"] = np.float32(2.0 ** -np.linspace(1, 8, case.num_q_heads))
    if pick(True, False, False):
        options["soft_cap"] = 3.0
    if pick(True, False, False):
        options["sinks"] = rng.standard_normal(case.num_q_heads).astype("f4")
    split = pick({}, {"num_kv_splits": 1}, {"num_kv_splits": 3}, {"split_tokens": 48})
    return batch, options, split
