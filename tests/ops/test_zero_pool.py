# SPDX-License-Identifier: Apache-2.0
"""Pools of zeros, and that on Linux their memory is in huge pages, also after updates in place."""

import mmap
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import KVState
from jax_paged.native import load
from jax_paged.ops.write import write_kv
from jax_paged.ops.zero_pool import TARGET, zero_pool


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    return 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 5, 7), (3, 1 << 20)])
def test_all_are_zero_of_the_shape_and_dtype(shape, dtype):
    memory = np.full((1 << 22,), 7, np.uint8)  # likely to be handed out again
    del memory
    pool = zero_pool(shape, jnp.dtype(dtype))
    assert (pool.shape, pool.dtype) == (shape, jnp.dtype(dtype))
    assert not np.asarray(pool).astype(np.float32).any()


def test_two_pools_are_two_buffers():
    a, b = (zero_pool((4, 1000), jnp.dtype("float32")) for _ in range(2))
    assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()


def test_without_native_code_it_is_xla_s(monkeypatch):
    monkeypatch.setattr(load, "targets", lambda _: ())
    text = zero_pool.lower((5, 7), jnp.dtype("bfloat16")).as_text()
    assert TARGET not in text
    assert "broadcast" in text or "constant" in text


def test_under_an_outer_jit_and_as_shapes_alone():
    pools = jax.jit(lambda: (zero_pool((3, 5), jnp.dtype("int8")),) * 2)()
    assert [pool.sum() for pool in pools] == [0, 0]
    shape = jax.eval_shape(lambda: zero_pool((3, 5), jnp.dtype("bfloat16")))
    assert (shape.shape, shape.dtype) == ((3, 5), jnp.bfloat16)


def are_huge(*pools: jax.Array) -> bool:
    """Whether the pools lie in huge pages, but for their ends."""
    return all(
        huge_bytes(x.unsafe_buffer_pointer() + x.nbytes // 2) >= x.nbytes // 2 for x in pools
    )


@pytest.fixture
def _huge_pages():
    """Skips where the system gives none to a program that asks."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no huge pages to ask for")
    memory = mmap.mmap(-1, 1 << 25, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    values = np.frombuffer(memory, np.uint8)
    values[:] = 1
    if huge_bytes(values.ctypes.data + values.nbytes // 2) < values.nbytes // 2:
        pytest.skip("this system gives no huge pages")


@pytest.mark.usefixtures("_huge_pages")
@pytest.mark.parametrize("mib", [8, 20, 40])
def test_memory_that_was_used_before_becomes_huge_pages_too(mib):
    fill = jax.jit(lambda size: jnp.full(size << 20, 7, jnp.int8), static_argnums=0)
    for sizes in ((31,), (20, 21, 22)):  # freeing the first teaches malloc to keep the others
        used = [fill(size).block_until_ready() for size in sizes]
        del used
    for attempt in range(3):  # the system may have no free ones for a moment
        pool = zero_pool((mib << 20,), jnp.dtype("int8"))
        assert not np.asarray(pool).any()
        if are_huge(pool):
            return
        time.sleep(attempt)
    raise AssertionError("the pool does not lie in huge pages")


@pytest.mark.usefixtures("_huge_pages")
def test_pools_stay_in_huge_pages():
    kv = KVState.create(
        num_layers=2, num_pages=2048, page_size=16, num_kv_heads=4, head_dim=64, max_seqs=2,
        pages_per_seq=4, dtype="bfloat16",
    )  # fmt: skip
    assert are_huge(kv.k_pages, kv.v_pages)

    def step(kv):
        kv, _ = kv.reserve([0], 20)
        kv, batch, _ = kv.step([0], [20], num_tokens=20)
        k = jnp.ones((20, 4, 64), jnp.bfloat16)
        k_pages, v_pages = write_kv(kv.k_pages, kv.v_pages, k, k, batch.slot_mapping, layer=1)
        return kv.replace(k_pages=k_pages, v_pages=v_pages)

    kv = jax.jit(step, donate_argnums=0)(kv)
    assert are_huge(kv.k_pages, kv.v_pages)
    assert float(kv.k_pages.astype(jnp.float32).sum()) == 20 * 4 * 64
