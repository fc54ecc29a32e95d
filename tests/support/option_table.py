# SPDX-License-Identifier: Apache-2.0
"""The table of options in pairs, which all implementations run."""

import functools
import os
from typing import Any

from jax_paged.testing.options import (
    ATTENTION_FACTORS,
    cover_pairs,
)

LONG = os.environ.get("JAX_PAGED_LONG") == "1"
NUM_CASES = 3000 if LONG else 500


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
    """NUM_CASES rows that cover all pairs."""
    return cover_pairs(ATTENTION_FACTORS, NUM_CASES, seed=4)


@functools.cache
def num_covering() -> int:
    """How many rows of the table cover all pairs."""
    return len(cover_pairs(ATTENTION_FACTORS, 0, seed=4))
