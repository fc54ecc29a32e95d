# SPDX-License-Identifier: Apache-2.0
"""The limits that the benchmarks are measured against: memory read bandwidth and FMA rate.

Both are measured in the same run as the kernels, by C code compiled on the spot (`limits.c`), on as
many threads as the process may use, each on its own memory.

    python benchmarks/limits.py
"""

import ctypes
import dataclasses
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

NUM_THREADS = len(os.sched_getaffinity(0))


@functools.cache
def _library() -> ctypes.CDLL:
    target = Path(tempfile.mkdtemp()) / "limits.so"
    source = Path(__file__).with_name("limits.c")
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            source,
            "-o",
            target,
        ],
        check=True,
    )
    library = ctypes.CDLL(str(target))
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.read_all.restype = ctypes.c_uint64
    library.multiply_add.argtypes = [ctypes.c_int64, ctypes.c_float, ctypes.c_float]
    library.multiply_add.restype = ctypes.c_float
    return library


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS)


@dataclasses.dataclass(frozen=True)
class Limit:
    """What this machine does at best: a call does so much work (bytes or operations), no more."""

    call: Callable[[], object]
    work: float

    def rate(self, repeats: int = 7) -> float:
        """Median work per second over 10⁹: GB/s or GFLOP/s."""
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            self.call()
            seconds.append(time.perf_counter() - start)
        return self.work / sorted(seconds)[repeats // 2] / 1e9


def _on_all_threads(call: Callable[[int], object]) -> Callable[[], object]:
    """One call per thread, all at once (ctypes releases the GIL)."""
    return lambda: list(_threads().map(call, range(NUM_THREADS)))


@functools.cache
def reads(total_bytes: int = 2**28) -> Limit:
    """Reading memory far beyond the caches, each thread its own part, the fastest way of some.

    numpy asks for huge pages of memory.
    """
    each = total_bytes // NUM_THREADS // 2048 * 2048
    data = [np.ones(each // 8, np.uint64) for _ in range(NUM_THREADS)]

    def read_by(way: int, thread: int):
        return _library().read_all(data[thread].ctypes.data, each, way)

    ways = [
        Limit(_on_all_threads(functools.partial(read_by, way)), each * NUM_THREADS)
        for way in range(6)
    ]
    return max(ways, key=Limit.rate)


@functools.cache
def multiply_adds(count: int = 10_000_000) -> Limit:
    """f32 fused multiply-adds in registers."""
    library = _library()
    call = _on_all_threads(lambda _: library.multiply_add(count, 0.5, 0.25))
    return Limit(call, 2 * 12 * library.vector_width() * count * NUM_THREADS)


if __name__ == "__main__":
    bandwidth, peak = reads().rate(), multiply_adds().rate()
    print(f"{NUM_THREADS} threads: read {bandwidth:.1f} GB/s, {peak:.0f} GFLOP/s f32")
