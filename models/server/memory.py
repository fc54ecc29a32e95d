# SPDX-License-Identifier: Apache-2.0
"""How many pages fit: an estimate from shapes, before anything is allocated."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax

from jax_paged.ops.batch import pages_for

from ..decoder.generation import PAGE_SIZE, create_state
from ..decoder.protocol import Model, split_model

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of weights and KV pages beside what there is; None = not known."""

    free_bytes: int | None
    weight_bytes: int
    page_bytes: int
    num_pages: int

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else _gib(self.free_bytes)
        kv = self.num_pages * self.page_bytes
        tokens = f"{self.num_pages * PAGE_SIZE:,} tokens"
        return (
            f"memory: {free} free; weights {_gib(self.weight_bytes)}, "
            f"KV {_gib(kv)} ({self.num_pages:,} pages, {tokens})"
        )


def estimate(
    shapes: Model, *, max_seqs: int, pages: int | None, share: float, kv_dtype: str = "auto"
) -> Estimate:
    """What a server of this model takes.

    Args:
      shapes: the model, its weights may be shapes.
      pages: how many; None = as many as `share` of what weights leave free holds, but no more than
        max_seqs requests of the model's whole context need.

    Raises:
      ValueError: not even one page fits.
    """
    arrays = jax.tree.leaves(split_model(shapes)[1])
    weight_bytes = sum(_bytes(array) for array in arrays)

    def state_bytes(num_pages: int) -> int:
        state = jax.eval_shape(
            lambda: create_state(
                shapes, num_pages=num_pages, max_seqs=1, pages_per_seq=1, kv_dtype=kv_dtype
            )
        )
        return sum(map(_bytes, jax.tree.leaves(state)))

    page_bytes = state_bytes(2) - state_bytes(1)
    free = free_bytes()
    if pages is None:
        most = max_seqs * pages_for(shapes.config.context_length, PAGE_SIZE)
        room = math.inf if free is None else share * max(free - weight_bytes, 0)
        pages = int(min(room // page_bytes, most))
        if pages < 1:
            raise ValueError(
                f"kv-memory-share: expected room for a page of {page_bytes} bytes, got none: "
                f"{_gib(free or 0)} are free, weights take {_gib(weight_bytes)}"
            )
    return Estimate(free, weight_bytes, page_bytes, pages)


def free_bytes() -> int | None:
    """Memory of the device that programs may take; None where it does not tell."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def _host_bytes() -> int | None:
    """What Linux says is available, within the bound of the control group."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            texts = [(group / name).read_text(encoding="ascii") for name in (limit, used)]
            found.append(max(int(texts[0]) - int(texts[1]), 0))
        except (OSError, ValueError):  # another version, or no limit ("max")
            continue
    return min(found, default=None)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize if hasattr(array, "dtype") else 0


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
