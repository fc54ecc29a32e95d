# SPDX-License-Identifier: Apache-2.0
"""How many pages fit: an estimate from shapes, before anything is allocated.

Of a model on a mesh it is that of one device: its part of the weights, and its heads of each page.
"""

import bisect
import dataclasses
import math
from pathlib import Path
from typing import Any

import jax

from jax_paged.checks import INT32_MAX
from jax_paged.ops.batch import pages_for

from ..decoder.generation import PAGE_SIZE
from ..decoder.protocol import Model, split_model
from ..serving.groups import engine_state

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of weights and KV pages of a device beside what there is; None = not known."""

    free_bytes: int | None
    weight_bytes: int
    page_bytes: int  # of a page in all layers
    kv_bytes: int  # of all pages; with groups fewer layers have as many
    num_pages: int  # of each replica
    num_devices: int = 1

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else _gib(self.free_bytes)
        tokens = f"{self.num_pages * PAGE_SIZE:,} tokens"
        whose = (
            "memory" if self.num_devices == 1 else f"memory of each of {self.num_devices} devices"
        )
        return (
            f"{whose}: {free} free; weights {_gib(self.weight_bytes)}, "
            f"KV {_gib(self.kv_bytes)} ({self.num_pages:,} pages, {tokens})"
        )


def estimate(
    shapes: Model, *, max_seqs: int, pages: int | None, share: float, kv_dtype: str = "auto",
    groups: bool = False, max_tokens: int = 256,
) -> Estimate:  # fmt: skip
    """What a server of this model takes.

    Args:
      shapes: the model, its weights may be shapes.
      pages: how many; None = as many as `share` of what weights leave free holds, but no more than
        max_seqs requests of the model's whole context need.
      groups, max_tokens: of the engine.

    Raises:
      ValueError: not even one page fits.
    """
    arrays = jax.tree.leaves(split_model(shapes)[1])
    weight_bytes = sum(_bytes(array) for array in arrays)
    partition = getattr(shapes, "partition", None)

    pages_per_seq = pages_for(shapes.config.context_length, PAGE_SIZE)

    def state_bytes(num_pages: int) -> int:
        create = engine_state(
            shapes, num_pages=num_pages, max_seqs=max_seqs, pages_per_seq=pages_per_seq,
            max_tokens=max_tokens, groups=groups, kv_dtype=kv_dtype,
        )  # fmt: skip
        return sum(map(_bytes, jax.tree.leaves(jax.eval_shape(create))))

    of_one = state_bytes(1)  # with what does not grow with the pages
    page_bytes = state_bytes(2) - of_one

    def kv_bytes(num_pages: int) -> int:
        return state_bytes(num_pages) - of_one + page_bytes

    free = free_bytes()
    if pages is None:
        most = min(max_seqs * pages_per_seq, (INT32_MAX - 1) // PAGE_SIZE)
        room = math.inf if free is None else share * max(free - weight_bytes, 0)
        pages = bisect.bisect_right(range(1, most + 1), room, key=kv_bytes)
        if pages < 1:
            raise ValueError(
                f"kv-memory-share: expected room for a page of {page_bytes} bytes, got none: "
                f"{_gib(free or 0)} are free, weights take {_gib(weight_bytes)}"
            )
    num_devices = 1 if partition is None else partition.mesh.size
    return Estimate(free, weight_bytes, page_bytes, kv_bytes(pages), pages, num_devices)


def free_bytes() -> int | None:
    """Memory of a device that programs may take; None where it does not tell."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":  # devices of this process share what there is
        found = _host_bytes()
        return None if found is None else found // jax.local_device_count()
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
    """Of what a device has of an array or of its shape."""
    if not hasattr(array, "dtype"):
        return 0
    sharding = getattr(array, "sharding", None)
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
