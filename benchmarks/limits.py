"""The limits that the benchmarks are measured against: memory read bandwidth and FMA rate.

Both are measured in the same run as the kernels, by C code compiled on the spot (`limits.c`), on as
many threads as the process may use, each on its own memory.

    python benchmarks/limits.py
"""

import ctypes
import functools
import os
import subprocess
import tempfile
import time
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


def _all_threads_seconds(call) -> float:
    """Wall seconds of one call per thread, all at once (ctypes releases the GIL)."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(lambda _: None, range(NUM_THREADS)))
        start = time.perf_counter()
        list(pool.map(call, range(NUM_THREADS)))
        return time.perf_counter() - start


def read_gb_per_s(total_bytes: int = 2**29, repeats: int = 7) -> float:
    """Median read bandwidth of all threads in GB/s (10⁹), far beyond the caches."""
    each = total_bytes // NUM_THREADS // 512 * 512
    data = [np.ones(each // 8, np.uint64) for _ in range(NUM_THREADS)]

    def read(thread: int):
        return _library().read_all(data[thread].ctypes.data, each, 1)

    seconds = sorted(_all_threads_seconds(read) for _ in range(repeats))
    return each * NUM_THREADS / seconds[repeats // 2] / 1e9


def fma_gflop_per_s(count: int = 20_000_000, repeats: int = 5) -> float:
    """Median f32 fused multiply-add rate of all threads in GFLOP/s."""
    library = _library()
    seconds = sorted(
        _all_threads_seconds(lambda _: library.multiply_add(count, 0.5, 0.25))
        for _ in range(repeats)
    )
    flops = 2 * 12 * library.vector_width() * count * NUM_THREADS
    return flops / seconds[repeats // 2] / 1e9


if __name__ == "__main__":
    bandwidth, peak = read_gb_per_s(), fma_gflop_per_s()
    print(f"{NUM_THREADS} threads: read {bandwidth:.1f} GB/s, {peak:.0f} GFLOP/s f32")
