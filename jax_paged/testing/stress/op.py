# SPDX-License-Identifier: Apache-2.0
"""What an op under stress is."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
DTYPES = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
WILD = np.array([-(2**31), -7, -1, 0, 1, 2, 5, 2**16, 2**31 - 1])


@dataclasses.dataclass(frozen=True)
class Op:
    """An op under stress.

    Attributes:
      factors: values of each option, the simplest first.
      run: (row, seed, implementation) → the error as a share of what is allowed, 0 where the
        result is exact. It raises AssertionError if the result is wrong.
      weight: how often the op is drawn.
    """

    factors: Mapping[str, Sequence[Any]]
    run: Callable[[Row, int, str], float]
    weight: int = 1
