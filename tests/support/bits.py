# SPDX-License-Identifier: Apache-2.0
"""Equality of results, bit by bit."""

from collections.abc import Sequence

import jax
import numpy as np


def assert_same_bits(
    a: Sequence[np.ndarray | jax.Array], b: Sequence[np.ndarray | jax.Array]
) -> None:
    """Both results, (out, lse) pairs for example, hold the same bytes."""
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
