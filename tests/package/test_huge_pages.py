# SPDX-License-Identifier: Apache-2.0
"""Memory for weights: whose it is, when it is free again, and that jax takes it as it is."""

import gc
import mmap
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import Int4Weight, quantize_int4
from jax_paged.native import huge_pages

F32 = np.dtype(np.float32)


def mapping_of(x):
    """The memory that a view is part of."""
    while isinstance(x, np.ndarray):
        x = x.base
    return x.obj if isinstance(x, memoryview) else x


@pytest.mark.parametrize("lasts", [True, False])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (1 << 22,)])
def test_an_array_of_a_cpu_has_the_memory_without_a_copy(shape, lasts):
    memory = huge_pages.empty(shape, np.dtype(jnp.bfloat16), lasts=lasts)
    memory[...] = 3
    assert (memory.shape, memory.dtype) == (shape, jnp.bfloat16)
    assert memory.ctypes.data % 64 == 0
    x = jax.device_put(memory, jax.devices("cpu")[0])
    assert x.shape == shape
    assert bool((x == 3).all())
    if memory.size:
        assert x.unsafe_buffer_pointer() == memory.ctypes.data


def test_no_byte_is_handed_out_twice():
    def fill(number):
        memory = huge_pages.empty((number % 50 * 999 + 1,), F32)
        memory[...] = number
        return memory

    with ThreadPoolExecutor(8) as threads:
        arrays = list(threads.map(fill, range(400)))
    for number, memory in enumerate(arrays):
        assert (memory == number).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without huge pages")
def test_a_block_is_free_when_all_of_its_pieces_are():
    size = (3 << 20,)  # floats: more than a quarter of a block, so a mapping of its own
    own = weakref.ref(mapping_of(huge_pages.empty(size, F32)))
    pieces = [huge_pages.empty((1 << 20,), F32) for _ in range(24)]  # of at least three blocks
    blocks = [weakref.ref(mapping_of(piece)) for piece in pieces]
    kept = pieces[12]
    del pieces
    gc.collect()
    assert own() is None
    assert blocks[0]() is None
    assert blocks[12]() is mapping_of(kept)


def test_arrays_of_a_pytree_are_moved_and_shapes_stay():
    weight = quantize_int4(jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64) / 1e3)
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    moved, same, text = huge_pages.moved((weight, shape, "text"))
    assert isinstance(moved, Int4Weight)
    assert same is shape
    assert text == "text"
    for x, y in zip(jax.tree.leaves(weight), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)
        assert x.unsafe_buffer_pointer() != y.unsafe_buffer_pointer()


def test_what_is_traced_stays():
    assert float(jax.jit(lambda x: huge_pages.moved(x) + 1)(1.0)) == 2


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without huge pages")
def test_the_system_is_asked_for_huge_pages():
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("the system has no huge pages to give")
    memory = huge_pages.empty((1 << 24,), F32)
    address = memory.ctypes.data
    mappings = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(),
        re.DOTALL | re.MULTILINE,
    )  # fmt: skip
    flags = [x for begin, end, x in mappings if int(begin, 16) <= address < int(end, 16)]
    assert len(flags) == 1
    assert "hg" in flags[0].split()
