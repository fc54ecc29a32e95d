# SPDX-License-Identifier: Apache-2.0
"""A test of the tests: bugs planted where only nvcc looks, and in write_kv.

They stand in the inline PTX of prim.h, in the launches, in the handlers, and in all that write_kv
is made of. Each is compiled as the module is, and called through jit on the simulated device
(ffi/sim).
"""

import concurrent.futures
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planting import asked_for, misplaced, plant
from simulation import build, device, register, set_devices

from jax_paged import (
    attention_plan,
    merge_attention_states,
    ragged_paged_attention,
    write_kv,
)
from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.writes import bits, expected_write, make_pools, make_tokens, repeated_slots

# In the place of all instances of the attention kernels: those that the bugs are tried on.
INSTANCES = """
#include "cuda/attention/launch_inst.cuh"
namespace jax_paged::cuda {
JAX_PAGED_INSTANTIATE(LaunchDecode, BFloat16, 64, PageKind::kRows)
JAX_PAGED_INSTANTIATE(LaunchPrefill, BFloat16, 64, PageKind::kRows)
}  // namespace jax_paged::cuda
"""
ATTENTION = ("current_device.cc", "attention/handler.cc", "attention/launch.cu", "attention/few.cu")
WRITE = ("claim_slots.cu", "write_kv/handler.cc", "write_kv/launch.cu")
MERGE = ("merge_states/handler.cc", "merge_states/launch.cu")

UNEQUAL = "[Nn]ot equal"
DIFFERS = "error|not finite|lse|empty rows"  # the comparison with the oracle
PRIM, LAUNCH = "cuda/prim.h", "cuda/attention/launch_inst.cuh"
BF16_A = """: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, Float16>);
    asm volatile("""
# file, what stands there, what the bug makes of it, what must be said about it
BUGS = {
    # the inline PTX
    "registers of mma's a swapped": (
        PRIM, BF16_A, BF16_A.replace('"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])'), DIFFERS,
    ),
    "registers of mma's b swapped": (
        PRIM, BF16_A, BF16_A.replace('"r"(b0), "r"(b1)', '"r"(b1), "r"(b0)'), DIFFERS,
    ),
    "mma of the other dtype": (
        PRIM, "m16n8k16.row.col.f32.bf16.bf16.f32", "m16n8k16.row.col.f32.f16.f16.f32", DIFFERS,
    ),
    "trans dropped": (PRIM, ".x4.trans.shared", ".x4.shared", DIFFERS),
    "trans where none is due": (
        PRIM, "ldmatrix.sync.aligned.m8n8.x4.shared", "ldmatrix.sync.aligned.m8n8.x4.trans.shared",
        DIFFERS,
    ),
    "ldmatrix into other registers": (
        PRIM, "m8n8.x4.shared.b16 {%0, %1, %2, %3}", "m8n8.x4.shared.b16 {%0, %2, %1, %3}", DIFFERS,
    ),
    "wait_group with another count": (
        PRIM, "if (groups == 0) {\n    CpAsyncWaitGroup<0>();",
        "if (groups == 0) {\n    CpAsyncWaitGroup<1>();", "cp.async",
    ),
    "groups that are not committed": (
        PRIM, 'asm volatile("cp.async.commit_group;" ::: "memory");', "", "cp.async",
    ),
    "a copy that does not fill with zeros": (
        PRIM, '"r"(valid ? 16 : 0)', '"r"(16)', f"no known buffer|{DIFFERS}",
    ),
    "a copy of half of the bytes": (
        PRIM, "[%0], [%1], 16, %2;", "[%0], [%1], 8, %2;", "cp.async of 8 bytes that reads 16",
    ),
    "a pair packed the other way round": (
        PRIM, 'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));',
        'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(low), "f"(high));', DIFFERS,
    ),
    "an instruction that is not known": (
        PRIM, "ex2.approx.ftz.f32 %0, %1;", "lg2.approx.ftz.f32 %0, %1;", "unknown instruction",
    ),
    "a shuffle of half of the lanes": (
        PRIM, "__shfl_xor_sync(~0u, x, mask)", "__shfl_xor_sync(0xffffu, x, mask)",
        "shfl from lane|divergent warp",
    ),
    "a shuffle from above": (
        PRIM, "__shfl_up_sync(~0u, x, distance)", "__shfl_down_sync(~0u, x, distance)",
        f"{DIFFERS}|nobody has|no known|bounds|end",
    ),
    "what others wrote read from a cache": (
        PRIM, "return BitCast<Value>(__ldcg(reinterpret_cast<const uint4*>(p.get())));",
        "return BitCast<Value>(__ldg(reinterpret_cast<const uint4*>(p.get())));",
        "read-only load|L1",
    ),
    "a fence left out": (
        PRIM, 'ThreadFence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }',
        "ThreadFence() {}",
        "not published|not acquired",
    ),
    "a barrier of the warp in place of the CTA's": (
        PRIM, "SyncThreads() { __syncthreads(); }", "SyncThreads() { __syncwarp(); }",
        "race|nobody has written",
    ),
    # the launches
    "too little dynamic shared memory": (
        LAUNCH, "Traits::SharedBytes(args.stages), stream",
        "Traits::SharedBytes(args.stages) - 16, stream", "shared memory out of bounds",
    ),
    "no leave for much shared memory": (
        LAUNCH,
        "AllowSharedMemory(DecodeKernel<T, HEAD_DIM, PAGES>, limits.shared_bytes_per_cta",
        "AllowSharedMemory(DecodeKernel<T, HEAD_DIM, PAGES>, 48 * 1024",
        "bytes of dynamic shared memory, allowed are",
    ),
    "leave on the first device alone": (
        "cuda/shared_memory.h", "uint64_t{1} << device : 0", "uint64_t{1} : 0",
        "bytes of dynamic shared memory, allowed are",
    ),
    "limits of the first device": (
        "cuda/current_device.cc", "error = cudaDeviceGetAttribute(value, attribute, device);",
        "error = cudaDeviceGetAttribute(value, attribute, 0);", "of another device",
    ),
    "a CTA too few": (
        LAUNCH, "PAGES>, args.num_workers, kAttentionThreads",
        "PAGES>, args.num_workers - 1, kAttentionThreads", f"{DIFFERS}|nobody has",
    ),
    "another stream": (
        LAUNCH, "Traits::SharedBytes(args.stages), stream",
        "Traits::SharedBytes(args.stages), nullptr", "another stream",
    ),
    "more threads than the kernel is made for": (
        LAUNCH, "PAGES>, args.num_workers, kAttentionThreads",
        "PAGES>, args.num_workers, 2 * kAttentionThreads", "invalid grid or block",
    ),
    "a plan for the first call alone": (
        "cuda/attention/launch.cu", "  return LaunchKernel(PlanKernel",
        "  static bool planned = false;\n  if (planned) return cudaSuccess;\n  planned = true;\n"
        "  return LaunchKernel(PlanKernel",
        "nobody has",
    ),
    "lengths that the host has read": (
        "cuda/attention/launch.cu", "  return LaunchKernel(PlanKernel",
        "  const_cast<AttentionArgs&>(args).num_tokens = args.seq_lens.get()[0];\n"
        "  return LaunchKernel(PlanKernel",
        f"{DIFFERS}|nobody has|no known buffer",
    ),
    "counters cleared in the first call of a plan alone": (
        "cuda/attention/launch.cu", "  return LaunchKernel(BeginKernel",
        "  static bool begun = false;\n  if (begun) return cudaSuccess;\n  begun = true;\n"
        "  return LaunchKernel(BeginKernel",
        "nobody has initialised",
    ),
    "counters not cleared where there is a plan": (
        "cuda/attention/begin.cuh", "const AttentionArgs& args) {\n  ClearCounters(args);",
        "const AttentionArgs& args) {", "nobody has initialised",
    ),
    "rows without keys not filled where there is a plan": (
        "cuda/attention/begin.cuh", "    FillRows(args, lengths, has_layer);\n", "",
        f"{DIFFERS}|{UNEQUAL}",
    ),
    "padding not filled where there is a plan": (
        "cuda/attention/begin.cuh", "prim::LoadL2(args.row_lengths + args.max_seqs).q_begin",
        "args.num_tokens", DIFFERS,
    ),
    "a layer that is not there read by a plan": (
        "cuda/attention/segment.cuh", "  if (!HasLayer(args)) range.end = range.begin;\n", "",
        f"no known buffer|out of bounds|race|{UNEQUAL}",
    ),
    "a plan for another number of workers": (
        "cuda/attention/launch.cu", "  args->num_workers = NumWorkers(",
        "  args->num_workers = (args->out ? 1 : 2) * NumWorkers(", f"{DIFFERS}|nobody has",
    ),
    # launches that overlap (sm_90)
    "a kernel that does not wait for the launch before it": (
        PRIM, '  asm volatile("griddepcontrol.wait;" ::: "memory");\n', "",
        "before griddepcontrol.wait",
    ),
    "a kernel that waits too late": (
        LAUNCH, "  prim::StartKernel();\n  DecodeCta<T, HEAD_DIM, PAGES>(args);",
        "  DecodeCta<T, HEAD_DIM, PAGES>(args);\n  prim::StartKernel();",
        "before griddepcontrol.wait",
    ),
    "launches that overlap on a device that cannot": (
        "cuda/current_device.cc", "major >= 9", "major >= 8", "below sm_90",
    ),
    # the handlers
    "lse for a workspace": (
        "cuda/attention/handler.cc", "MakeArgs(call, ArrayOf(*workspace), &args)",
        "MakeArgs(call, ArrayOf(*lse), &args)", "workspace",
    ),
    "states in the place of each other": (
        "cuda/merge_states/handler.cc", "{out_a.untyped_data(), lse_a.typed_data(), out_b",
        "{out_a.untyped_data(), lse_b.typed_data(), out_b", UNEQUAL,
    ),
    "an argument of another width": (
        "cuda/merge_states/launch.cu",
        "MergeStatesKernel<float><<<grid, kMergeThreads, /*smem=*/0, stream>>>(args);",
        "{\n        const struct { int32_t of_32_bits; MergeArgs rest; } wrong = {0, args};\n"
        "        void* list[] = {const_cast<void*>(static_cast<const void*>(&wrong))};\n"
        "        const auto* stub = reinterpret_cast<const void*>(MergeStatesKernel<float>);\n"
        "        cudaLaunchKernel(stub, dim3(grid), dim3(kMergeThreads), list, 0, stream);\n"
        "      }",
        f"no known buffer|out of bounds|misaligned|{UNEQUAL}",
    ),
    "a grid of merge that is one too small": (
        "cuda/merge_states/launch.cu", "static_cast<unsigned>(ctas);",
        "static_cast<unsigned>(ctas - 1);", f"{UNEQUAL}|invalid grid",
    ),
    # write_kv
    "slots in 32 bits": (
        "common/page_view.h",
        "return layer * strides.layer + strides.Offset(slot / page_size, head, slot % page_size);",
        "return static_cast<int32_t>(layer * strides.layer +\n"
        "    strides.Offset(slot / page_size, head, slot % page_size));",
        f"no known buffer|out of bounds|{UNEQUAL}",
    ),
    "K alone": (
        "cuda/write_kv/args.h", "return 2 * args.tokens.num_tokens;",
        "return args.tokens.num_tokens;", UNEQUAL,
    ),
    "a CTA of write_kv too many": (
        "cuda/write_kv/launch.cu", "<<<NumCtas(args), ", "<<<NumCtas(args) + 1, ",
        f"no known buffer|out of bounds|{UNEQUAL}",
    ),
    "of two tokens for a slot both": (
        "cuda/write_kv/kernel.cuh",
        "  if (IsOverwritten<kWriteKvThreads>(args.tokens, token, slot)) return;\n", "",
        f"race|{UNEQUAL}",
    ),
    "whether a slot comes again, asked by each warp alone": (
        "cuda/written_tokens.cuh", "return any != 0;", "return vote != 0;", f"race|{UNEQUAL}",
    ),
    "the token behind not looked at": (
        "cuda/written_tokens.cuh", "begin > token ? begin : token + 1",
        "begin > token + 1 ? begin : token + 2", f"race|{UNEQUAL}",
    ),
    "the last tokens not looked at": (
        "cuda/written_tokens.cuh",
        "  if (prim::ThreadIndex() == 0) look(4 * fours, tokens.num_tokens);\n", "",
        f"race|{UNEQUAL}",
    ),
    # the table of slots, of more tokens than a CTA looks through
    "a table that is not cleared": (
        "cuda/claim_slots.cu",
        "const cudaError_t cleared = cudaMemsetAsync(tokens.table.get(), 0xff, bytes, stream);",
        "const cudaError_t cleared = bytes ? cudaSuccess : cudaErrorInvalidValue;",
        "nobody has initialised",
    ),
    "a table that is cleared in the first call alone": (
        "cuda/claim_slots.cu",
        "const cudaError_t cleared = cudaMemsetAsync(tokens.table.get(), 0xff, bytes, stream);",
        "static bool done = false;\n"
        "  const cudaError_t cleared = done ? cudaSuccess :\n"
        "      cudaMemsetAsync(tokens.table.get(), 0xff, bytes, stream);\n  done = true;",
        "nobody has initialised",
    ),
    "a table cleared in part": (
        "cuda/claim_slots.cu", "* sizeof(int32_t);", "* sizeof(int16_t);", "nobody has initialised",
    ),
    "the first of many tokens for a slot": (
        "cuda/written_tokens.cuh",
        "if (holder < token) prim::AtomicMax(tokens.table + entry, token);",
        "if (holder > token) prim::AtomicCompareExchange(tokens.table + entry, holder, token);",
        f"race|{UNEQUAL}",
    ),
    "the largest of the tokens not kept": (
        "cuda/written_tokens.cuh",
        "if (holder < token) prim::AtomicMax(tokens.table + entry, token);", "", f"race|{UNEQUAL}",
    ),
    "an entry taken without a comparison": (
        "cuda/written_tokens.cuh", "prim::LoadConst(tokens.slot_mapping + holder) == slot) {",
        "true) {", f"race|no known buffer|out of bounds|{UNEQUAL}",
    ),
    "a search that does not go round": (
        "cuda/written_tokens.cuh",
        "return (entry + 1) & static_cast<uint32_t>(tokens.table_words - 1);", "return entry + 1;",
        "out of bounds|no known buffer",
    ),
    "a table of twice the size": (
        "cuda/written_tokens.h", "tokens.table_words = SlotTableWords(num_tokens);",
        "tokens.table_words = 2 * SlotTableWords(num_tokens);",
        "outside of the buffers|no known buffer",
    ),
    "the claims of the last tokens left out": (
        "cuda/written_tokens.h", "CeilDiv(tokens.num_tokens, kClaimThreads)",
        "tokens.num_tokens / kClaimThreads", f"race|no known buffer|out of bounds|{UNEQUAL}",
    ),
    "K's tokens written to V": (
        "cuda/write_kv/args.h", "MakeWriteKvPool(in.v_pool, in.v_pages, in.v)",
        "MakeWriteKvPool(in.v_pool, in.v_pages, in.k)", f"no known buffer|out of bounds|{UNEQUAL}",
    ),
}  # fmt: skip


# What is tried on a device whose launches overlap.
OVERLAPS = tuple(BUGS[name][1] for name in BUGS if name.startswith("a kernel that"))


def sources_of(file):
    """What is compiled for a bug in a file, and what is tried."""
    if any(name in file for name in ("claim_slots", "write_kv", "written_tokens", "page_view")):
        return WRITE, check_write
    if "merge_states" in file:
        return MERGE, check_merge
    return ATTENTION, check_attention


def check_attention(loaded, name):
    """Decode and prefill on two devices, and a recorded graph replayed with other lengths."""
    case = Case("sim", 8, 2, 64, page_size=8)
    shapes = [
        ([1, 1, 30, 0, 1], [300, 64, 90, 9, 0], 40),
        ([1, 1, 30, 0, 1], [17, 200, 33, 70, 5], 40),
    ]
    batches = [
        make_batch(case, jnp.bfloat16, q, kv, num_tokens=n, pages_per_seq=40, num_pages=999, seed=i)
        for i, (q, kv, n) in enumerate(shapes)
    ]
    for seed, ordinal in itertools.product(range(3), (0, 1)):
        set_devices(loaded, device(seed=seed, ordinal=ordinal))
        run_attention(batches[0], name)
    run_planned(batches[0], name)
    set_devices(loaded, device(seed=2))
    run_attention(batches[0], name)
    loaded.sim_set_replays(1)
    try:
        run_attention(batches[1], name)
    finally:
        loaded.sim_set_replays(0)


def run_attention(batch, name):
    arguments, options = batch.ragged()
    out, lse = ragged_paged_attention(*arguments, **options, return_lse=True, implementation=name)
    assert_attention_close(np.asarray(out), np.asarray(lse), *dense_oracle(batch))


def run_planned(batch, name):
    """A plan, and calls that use it: two with the layer of the batch, one with none."""
    arguments, options = batch.ragged()
    options |= {"implementation": name}
    plan = attention_plan(*arguments, layout=options["layout"], implementation=name)
    for _ in range(2):
        call = ragged_paged_attention(*arguments, **options, plan=plan, return_lse=True)
        assert_attention_close(*map(np.asarray, call), *dense_oracle(batch))
    stacked = [x[None] for x in arguments[1:3]]
    nowhere = options | {"layer": jnp.int32(2**20)}
    out = ragged_paged_attention(arguments[0], *stacked, *arguments[3:], **nowhere, plan=plan)
    np.testing.assert_array_equal(np.asarray(out).astype("f4"), 0)


def check_overlap(loaded, name):
    """Decode and prefill on a device whose launches overlap."""
    case = Case("sim", 8, 2, 64, page_size=8)
    batch = make_batch(case, jnp.bfloat16, [1, 1, 30, 0, 1], [300, 64, 90, 9, 1], num_tokens=40)
    set_devices(loaded, device(90))
    run_attention(batch, name)
    run_planned(batch, name)


def check_merge(loaded, name):
    set_devices(loaded, device())
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((40, 6, 64), "f4") for _ in "ab")
    lse_a, lse_b = (rng.standard_normal((40, 6), "f4") for _ in "ab")
    for x in ([a, lse_a, b, lse_b], [b, lse_b, a, lse_a]):
        expected = merge_attention_states(*x, implementation="reference")
        got = merge_attention_states(*x, implementation=name)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def check_write(loaded, name):
    set_devices(loaded, device())
    few = ([4, 9, -1, 30, 0], [4, 4, 9, 4, 9], [20] * 300, [7, *[-1] * 200, 7, *[-1] * 9])
    many = (repeated_slots(kind, 2100, 40_000) for kind in ("few slots", "one place of the table"))
    for slots in (*few, *many):
        pools = make_pools(8, num_layers=2, num_pages=7 if len(slots) <= 300 else 5000)
        tokens = make_tokens(len(slots))
        written = write_kv(
            *map(jnp.array, pools), *map(jnp.asarray, tokens), jnp.asarray(slots, jnp.int32),
            layer=1, implementation=name,
        )  # fmt: skip
        for pool, out, pages, new in zip("kv", written, pools, tokens, strict=True):
            expected = expected_write(pages, new, slots, 1, "HND", pool)
            np.testing.assert_array_equal(bits(out), bits(expected))
    # A slot beyond 2^31 bytes.
    pages = 2**31 // (512 * 2 * 16) + 9
    k_pages = jax.jit(lambda: jnp.zeros((pages, 1, 16, 512), jnp.bfloat16))()
    v_pages = jnp.zeros((pages, 1, 16, 8), jnp.bfloat16)
    slot = jnp.array([pages * 16 - 3], jnp.int32)
    k, v = jnp.ones((1, 1, 512), jnp.bfloat16), jnp.ones((1, 1, 8), jnp.bfloat16)
    k_pages, v_pages = write_kv(k_pages, v_pages, k, v, slot, implementation=name)
    for out in (k_pages, v_pages):
        np.testing.assert_array_equal(np.asarray(out[-1, 0, -3]).astype("f4"), 1)


def compiled(folder, file, old, new):
    """A library with a bug; file is None: without one."""
    if file is not None:
        path, _, name = file.rpartition("/")
        plant(folder, f"{path}/{name}", old, new)
    ffi = folder / "ffi"
    (ffi / "cuda/attention/few.cu").write_text(INSTANCES, encoding="utf-8")
    names, _ = sources_of(file)
    architectures = (90,) if old in OVERLAPS else (80,)
    sources = [ffi / "cuda" / name for name in names]
    return build(ffi, sources, architectures=architectures, workers=1)


@pytest.fixture(scope="module")
def libraries(request, tmp_path_factory):
    """Bug name → future of its library, two being compiled at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(compiled, tmp_path_factory.mktemp("bug"), *bug[:3])
            for name, bug in asked_for(BUGS, request).items()
        }


def test_each_bug_has_its_place():
    assert misplaced(BUGS) == []


@pytest.mark.deep
@pytest.mark.sim
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name, libraries):
    implementation = "sim_" + re.sub(r"\W", "_", name)
    loaded = register(libraries[name].result(), implementation)
    _, check = sources_of(BUGS[name][0])
    if BUGS[name][1] in OVERLAPS:
        check = check_overlap
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError, AssertionError), match=BUGS[name][3]
    ):
        check(loaded, implementation)


@pytest.mark.deep
@pytest.mark.sim
@pytest.mark.parametrize("file", ["cuda/attention/launch.cu", "cuda/merge_states/launch.cu",
                                  "cuda/write_kv/launch.cu"])  # fmt: skip
def test_without_a_bug_nothing_is_found(file, tmp_path):
    path = compiled(tmp_path, file, "namespace jax_paged::cuda {\nnamespace {",
                    "namespace jax_paged::cuda {\n\nnamespace {")  # fmt: skip
    name = "sim_" + file.split("/")[1]
    sources_of(file)[1](register(path, name), name)
