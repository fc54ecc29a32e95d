# SPDX-License-Identifier: Apache-2.0
"""Memory for weights in huge pages (2 MiB), where Linux has some to give.

With pages of 4 KiB a processor looks up an address for each 64 lines that it reads, and stops
fetching ahead. Zen 4 reads weights 5 to 60 % faster from huge ones (docs/performance.md).
"""

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

_PAGE = 2 << 20
_BLOCK = 32 << 20  # that arrays of up to a quarter of it share
_ALIGNMENT = 64  # bytes: an array that starts there becomes a CPU device's memory as it is


class _Blocks:
    """Hands out pieces of a block, and then of the next one. A block lives as long as a piece."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block, self._used = np.empty(0, np.uint8), 0

    def take(self, size: int) -> np.ndarray:
        """`size` bytes, which nobody else has."""
        if size > _BLOCK // 4:
            return _mapped(size)[:size]
        with self._lock:
            if self._used + size > self._block.size:
                self._block, self._used = _mapped(_BLOCK), 0
            piece = self._block[self._used : self._used + size]
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return piece


_blocks = _Blocks()


def empty(shape: Sequence[int], dtype: np.dtype, *, lasts: bool = True) -> np.ndarray:
    """`np.empty` in huge pages; `jax.device_put` makes it an array of a CPU without a copy.

    Args:
      lasts: False = in memory of its own, as numpy gets it: a block is free when all pieces are.
    """
    size = math.prod(shape) * dtype.itemsize
    if lasts:
        memory = _blocks.take(size)
    else:
        memory = _aligned(np.empty(size + _ALIGNMENT, np.uint8), _ALIGNMENT)[:size]
    return memory.view(dtype).reshape(shape)


def moved(x: Any) -> Any:
    """A copy of an array, or of each array of a pytree, in huge pages.

    What is no array of one CPU device stays as it is: a shape, for example.
    """
    return jax.tree.map(_moved, x)


def _moved(x: Any) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.is_fully_addressable:
        return x
    if [device.platform for device in x.devices()] != ["cpu"]:
        return x
    out = empty(x.shape, x.dtype)
    np.copyto(out, np.asarray(x))
    return jax.device_put(out, x.sharding)


def _mapped(size: int) -> np.ndarray:
    """At least `size` bytes that begin with a huge page, or where there are none, aligned ones."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return _aligned(np.empty(size + _ALIGNMENT, np.uint8), _ALIGNMENT)
    size = -(-size // _PAGE) * _PAGE
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(memory, np.uint8), _PAGE)[:size]


def _aligned(memory: np.ndarray, alignment: int) -> np.ndarray:
    return memory[-memory.ctypes.data % alignment :]
