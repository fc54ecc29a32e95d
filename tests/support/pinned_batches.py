# SPDX-License-Identifier: Apache-2.0
"""A batch whose rows have windows and pinned tokens, before and after they slid."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.testing import (
    WILD_PAGE,
    Batch,
    Case,
    make_batch,
)

PAGE = 16
SMALL = Case("small", 8, 2, 64, page_size=PAGE)
Q_LENS, SEQ_LENS = [1, 4, 30, 1, 1], [300, 210, 150, 5, 0]
WINDOW, PINNED = np.int32([90, 40, 33, 20, 20]), np.int32([20, 16, 1, 9, 3])


def small_batch(dtype: Any = jnp.float32, **changes: Any) -> Batch:
    case = dataclasses.replace(SMALL, **changes)
    return make_batch(case, jnp.dtype(dtype), Q_LENS, SEQ_LENS, num_tokens=40, seed=3)


def slid(batch: Batch) -> tuple[Batch, np.ndarray]:
    """The batch with the pages gone that no window shows, and how far each row slid."""
    table = np.full_like(batch.page_table, WILD_PAGE)
    offsets = np.zeros(len(Q_LENS), np.int32)
    for row, (q_len, seq_len) in enumerate(zip(Q_LENS, SEQ_LENS, strict=True)):
        first = seq_len - q_len - (WINDOW[row] - PINNED[row]) + 1  # that the first query sees
        keep = -(-int(PINNED[row]) // PAGE)
        gone = max(0, first // PAGE - keep)
        offsets[row] = gone * PAGE
        rest = np.delete(batch.page_table[row], np.arange(keep, keep + gone))
        table[row, : len(rest)] = rest
    return dataclasses.replace(batch, page_table=table), offsets
