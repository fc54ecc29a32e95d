# SPDX-License-Identifier: Apache-2.0
"""A test of the tests: bugs planted in the CUDA attention kernels are found by the emulator."""

import dataclasses
import subprocess
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import planting
import pytest
from attention_bugs import BUGS
from emulation import (
    FFI,
    MACHINE,
    Device,
    EmulationError,
    emulate,
    emulate_mla,
    library,
    open_library,
)
from planting import COMPILE, sites_of, sparse_memory, survivors
from rope_batches import tables
from touched import assert_reads_windows_only

from jax_paged.testing import Batch, Case, assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.mla import eight_bit as latent_eight_bit
from jax_paged.testing.mla import make_mla
from jax_paged.testing.options import eight_bit, random_parents, trees_of

KERNELS = """
#include "cuda/attention/decode.cuh"
#include "cuda/attention/latent.cuh"
#include "cuda/attention/prefill.cuh"
#include "emu/attention/kernels.h"
namespace jax_paged::emu {
AttentionKernels BFloat16Kernels(const cuda::AttentionArgs& args,
                                 const cuda::DeviceLimits& limits) {
  const cuda::LatentChoice latent = cuda::ChooseLatent(args, limits);
  if (latent.decode.rows > 0) {
    return {{}, latent, {cuda::LatentCta<BFloat16, 32, false>, latent.decode.shared_bytes},
            {cuda::LatentPrefillCta<BFloat16, 64, false>, latent.prefill.shared_bytes}};
  }
  return {cuda::ChooseKernels(args, limits, cuda::DecodeTraits<64>::SharedBytes,
                              cuda::PrefillTraits<64>::SharedBytes(cuda::PageKind::kRows), true),
          {},
          {args.layout == Layout::kVllm5d
               ? cuda::DecodeCta<BFloat16, 64, cuda::PageKind::kVllm5d>
               : cuda::DecodeCta<BFloat16, 64, cuda::PageKind::kRows>,
           cuda::DecodeTraits<64>::SharedBytes(args.stages)},
          {args.layout == Layout::kVllm5d
               ? cuda::PrefillCta<BFloat16, 64, cuda::PageKind::kVllm5d>
               : cuda::PrefillCta<BFloat16, 64, cuda::PageKind::kRows>,
           cuda::PrefillTraits<64>::SharedBytes(cuda::PageKind::kRows)}};
}
AttentionKernels Float16Kernels(const cuda::AttentionArgs&, const cuda::DeviceLimits&) {
  return {};
}
AttentionKernels Float32Kernels(const cuda::AttentionArgs&) { return {}; }
}  // namespace jax_paged::emu
#include "emu/attention/library.cc"
"""


def far_batch(layout, q_len=1) -> tuple[Batch, dict[str, Any]]:
    """A batch, and as the kernels get it, with its pages more than 2^31 bytes into a pool.

    Little of the pool is ever touched. `stored`: see `check`.
    """
    num_pages = 2**20  # of 4 KiB
    batch = make_batch(Case("far", 4, 2, 64, layout=layout), jnp.bfloat16, [q_len], [40])
    pools = []
    for pages in (batch.k_pages, batch.v_pages):
        memory = sparse_memory(num_pages * 4096)
        pool = np.frombuffer(memory, np.uint16).view(jnp.bfloat16).reshape(-1, *pages.shape[1:])
        pool[num_pages - len(pages) :] = pages
        pools.append(pool)
    table = batch.page_table + (num_pages - len(batch.k_pages))
    far = dataclasses.replace(
        batch, k_pages=pools[0], v_pages=pools[1], page_table=table.astype(np.int32)
    )
    return batch, {"stored": far}


def bf16_batches() -> Iterator[tuple[Batch, dict[str, Any]]]:
    """(batch, options) for the bf16 kernels of head_dim 64: between them they meet every bug."""
    case = Case("battery", 8, 2, 64)
    plain = {}
    batch = make_batch(case, jnp.bfloat16, [1, 1, 0, 1, 2, 1], [270, 1, 5, 0, 33, 64], num_tokens=9)
    yield batch, plain
    yield make_batch(case, jnp.bfloat16, [1, 40, 0, 70], [70, 150, 9, 70]), plain  # prefill
    long = make_batch(Case("odd_prefill", 8, 2, 64, page_size=5), jnp.bfloat16, [30], [140])
    long.page_table[0, 2] = 2_147_480_000  # a hole
    yield long, plain
    odd = Case("odd_pages", 8, 2, 64, page_size=5)
    batch = make_batch(odd, jnp.bfloat16, [1, 3, 1], [23, 9, 140])
    batch.page_table[0, 2] = 2_147_480_000  # a hole
    yield batch, plain
    longer = make_batch(case, jnp.bfloat16, [1, 1], [32, 16])
    longer.seq_lens[:] = 2**30  # clamped to the two pages of each row
    for pages in (longer.k_pages, longer.v_pages):
        pages[np.isnan(pages)] = 1
    longer.page_table[:] = [[0, 1], [2, 3]]
    yield longer, plain
    yield far_batch("HND")
    five = Case("vllm5d", 8, 2, 64, page_size=8, layout="vllm5d")
    batch = make_batch(five, jnp.bfloat16, [1, 3, 1], [23, 9, 140])
    batch.page_table[0, 1] = 2_147_480_000
    yield batch, plain
    yield far_batch("vllm5d")
    yield far_batch("vllm5d", q_len=20)
    batch = make_batch(five, jnp.bfloat16, [30, 1, 40], [150, 9, 77])
    batch.page_table[0, 2] = 2_147_480_000
    yield batch, plain
    edits = {
        "soft_cap": 0.7,
        "alibi_slopes": np.float32(2.0 ** -np.arange(1, 9)),
        "sinks": np.float32(np.linspace(-1, 3, 8)),
    }
    batch = make_batch(case, jnp.bfloat16, [1, 2, 0, 1, 70], [270, 33, 5, 0, 150], num_tokens=78)
    yield batch, edits
    # The unit of the last row is shared by two teams of workers.
    yield make_batch(case, jnp.bfloat16, [1, 1, 1], [300, 33, 600]), {"sinks": edits["sinks"]}
    window = {"sliding_window": 40}
    small = Case("windows", 8, 2, 64, page_size=8)
    yield make_batch(small, jnp.bfloat16, [1, 2, 70], [300, 73, 150], num_tokens=75), window
    yield make_batch(five, jnp.bfloat16, [1, 2], [145, 73]), window
    yield make_batch(five, jnp.bfloat16, [1, 30], [145, 131]), window
    pinned = {
        "sliding_window": np.int32([40, 100, 30]),
        "num_pinned": np.int32([20, 70, 0]),
        "slot_offset": np.int32([128, 0, 16]),
        "alibi_slopes": edits["alibi_slopes"],
    }
    batch = make_batch(case, jnp.bfloat16, [1, 2, 30], [300, 390, 150], num_tokens=35)
    batch.seq_lens[:] += pinned["slot_offset"]
    yield batch, pinned
    batch = make_batch(case, jnp.bfloat16, [1, 2, 30, 20], [300, 390, 400, 20], num_tokens=55)
    # Without ALiBi, so that the prefill kernel takes the last two rows.
    yield batch, {"sliding_window": 100, "num_pinned": np.int32([20, 70, 70, 15])}
    rng = np.random.default_rng(1)
    trees = trees_of([random_parents(rng, n, "tree") for n in (1, 2, 30)])
    yield make_batch(case, jnp.bfloat16, [1, 2, 30], [300, 390, 150], num_tokens=35), trees
    for rotary_dim, style in (64, "half"), (12, "interleaved"):
        turned = {"rope": tables(100, rotary_dim, style)}
        yield make_batch(case, jnp.bfloat16, [1, 2, 30], [90, 103, 120], num_tokens=35), turned
        yield make_batch(five, jnp.bfloat16, [1, 2, 30], [90, 103, 120]), turned
        later = dataclasses.replace(case, causal=False)  # queries see keys beyond the tables, too
        yield make_batch(later, jnp.bfloat16, [4, 30], [103, 120]), turned
    short = Case("short", 8, 2, 40, v_head_dim=24)
    yield make_batch(short, jnp.bfloat16, [1, 2, 30], [300, 39, 150]), plain
    longer_than_a_tile = {"sliding_window": 150}
    yield make_batch(Case("edge", 4, 1, 64), jnp.bfloat16, [70], [300]), longer_than_a_tile


def latent_batches() -> Iterator[tuple[Batch, dict[str, Any]]]:
    """The same for the bf16 latent kernels of 32 packed rows, and of 64 for prefill."""
    yield make_mla(64, 48, 20, [1, 1, 0, 1], [270, 1, 5, 0], dtype="bfloat16", num_tokens=6), {}
    yield make_mla(64, 64, 20, [1, 30, 9], [70, 150, 9], dtype="bfloat16", page_size=5), {}
    batch = make_mla(40, 32, 20, [1, 3], [140, 9], dtype="bfloat16", page_size=5)
    batch.page_table[0, 2] = 2_147_480_000  # a hole
    yield batch, {}
    batch = make_mla(64, 32, 20, [1], [40], dtype="bfloat16", page_size=16)
    num_pages = 2**21  # of 2 KiB
    memory = sparse_memory(num_pages * 2048)
    pool = np.frombuffer(memory, np.uint16).view(jnp.bfloat16).reshape(-1, *batch.k_pages.shape[1:])
    pool[num_pages - len(batch.k_pages) :] = batch.k_pages
    table = batch.page_table + (num_pages - len(batch.k_pages))
    far = dataclasses.replace(batch, k_pages=pool, page_table=table.astype(np.int32))
    yield batch, {"stored": far}


def check_all(loaded):
    """Runs every batch of bf16_batches and of latent_batches on one library."""
    for batch, options in bf16_batches():
        check(batch, loaded=loaded, **options)
    for batch, options in latent_batches():
        check(batch, loaded=loaded, run=emulate_mla, **options)


def check(
    batch, seeds=(0, 1, 2, 7), num_workers=5, loaded=None, stored=None, scales=(), run=emulate,
    stages=3, **options,
):  # fmt: skip
    """Runs a batch under several seeds against the oracle, and looks at what a window left out.

    With `stored`, the same batch in 8 bits with its scales, or far away, the kernels get that.
    """
    expected = dense_oracle(batch, **options)
    window = options.get("sliding_window") if "num_pinned" not in options else None
    options |= dict(scales)
    for seed in seeds:
        device = Device(num_workers=num_workers, stages=stages, seed=seed)
        buffers = {} if window else None
        given = batch if stored is None else stored
        result = run(given, device, loaded=loaded, buffers=buffers, **options)
        if window:
            assert_reads_windows_only(batch, window, buffers)
        assert_attention_close(*result, *expected, is_turned="rope" in options)


@pytest.fixture(scope="module")
def planted(request, tmp_path_factory):
    with planting.planted(
        planting.asked_for(BUGS, request), tmp_path_factory.mktemp,
        op="attention", source="kernels.cc",
        files={"kernels.cc": KERNELS}, load=open_library, level="-O1",
    ) as libraries:  # fmt: skip
        yield libraries


def test_the_kernels_as_they_are_pass():
    check_all(library())


def test_each_bug_has_its_place():
    assert planting.misplaced(BUGS, "cuda/attention") == []


@pytest.mark.deep
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name, planted):
    loaded = planted[name].result()
    with pytest.raises((EmulationError, AssertionError), match=BUGS[name][3]):
        check_all(loaded)


def battery():
    """Runs that pass every synchronisation of every attention kernel."""
    for dtype, head_dim, page_size in [
        ("bfloat16", 64, 16), ("float16", 192, 5), ("float32", 128, 16),
    ]:  # fmt: skip
        rope = tables(100, 20)
        case = Case("battery", 8, 2, head_dim, page_size=page_size)
        q_lens, seq_lens = [1, 1, 0, 1, 2, 1], [270, 1, 5, 0, 33, 64]
        check(make_batch(case, jnp.dtype(dtype), q_lens, seq_lens, num_tokens=9))
        prefill = make_batch(case, jnp.dtype(dtype), [20, 5], [140, 70])
        check(prefill, num_workers=2)  # fewer than prefill units
        check(make_batch(case, jnp.dtype(dtype), [1, 1, 20], [90, 33, 70]), rope=rope)
        check(make_batch(case, jnp.dtype(dtype), [1, 1], [270, 33]), stages=1)
    for q_lens, seq_lens in ([1, 1, 2], [270, 1, 33]), ([20, 5], [140, 70]):
        batch = make_batch(Case("battery", 8, 2, 64), jnp.bfloat16, q_lens, seq_lens)
        stored, real, scales = eight_bit(batch, "float8_e4m3fn", "token", np.random.default_rng(0))
        check(real, stored=stored, scales=scales)
    for kv_dtype in (None, "int8"):
        for heads in (5, 40):
            decode = make_mla(64, 48, heads, [1, 1, 1], [270, 1, 33], dtype="bfloat16")
            prefill = make_mla(64, 48, heads, [20, 5], [140, 70], dtype="float16")
            # Fewer workers than units, in the last two.
            for real, workers in ((decode, 5), (decode, 1), (prefill, 1)):
                stored, scales = None, {}
                if kv_dtype:
                    scales = {"kv_scale": np.float32(0.03)}
                    stored, real = latent_eight_bit(real, kv_dtype, scales["kv_scale"])
                check(real, stored=stored, scales=scales, num_workers=workers, run=emulate_mla)


@pytest.mark.deep
def test_every_barrier_fence_and_wait_is_needed_and_missed():
    loaded = library()
    sites = sites_of(loaded, battery)
    kinds = {kind for kind, _ in sites}
    assert kinds == {"SyncThreads", "SyncWarp", "ThreadFence", "CpAsyncWait"}
    assert len(sites) >= 20
    assert not survivors(loaded, battery, sites), "skipped without any finding"


@pytest.mark.deep
def test_ucontext_fibers_give_the_same_bits(tmp_path):
    (tmp_path / "kernels.cc").write_text(KERNELS, encoding="utf-8")
    sources = [tmp_path / "kernels.cc", *(FFI / "emu" / name for name in MACHINE)]
    flags = [*COMPILE, "-O1", "-I", FFI, "-DJAX_PAGED_EMU_UCONTEXT"]
    subprocess.run(["g++", *flags, "-shared", *sources, "-o", tmp_path / "it.so"], check=True)
    batch, _ = next(bf16_batches())
    for a, b in zip(
        emulate(batch, loaded=open_library(tmp_path / "it.so")), emulate(batch), strict=True
    ):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
