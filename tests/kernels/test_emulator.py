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

# file, what stands there, what the bug makes of it, what must be said about it
DIFFERS = "error|not finite|lse"  # the comparison with the oracle
BUGS = {
    "no zero fill": (
        "decode_loader.cuh",
        "const bool valid = mask >> row & 1;\n        const bool has_k",
        "const bool valid = true;\n        const bool has_k",
        "not finite",
    ),
    "ring loaded one stage too far": (
        "decode.cuh", "s < stages - 1", "s < stages", "while the cp.async",
    ),
    "loads into the stage being read": (
        "decode.cuh", "stage == 0 ? stages - 1 : stage - 1", "stage", "cp.async|race",
    ),
    "page table off by one": (
        "segment.cuh", "row * args.table_width + (index - behind)",
        "row * args.table_width + (index - behind) + 1",
        f"out of bounds|{DIFFERS}",
    ),
    "page id not checked": (
        "decode_loader.cuh", "page_id_ >= 0 && page_id_ < args.num_pages", "page_id_ != -1",
        "k_pages out of bounds",
    ),
    "32-bit page address": (
        "decode_loader.cuh", "? args.k_strides.Offset(page_id_",
        "? (int32_t)args.k_strides.Offset(page_id_", "k_pages out of bounds",
    ),
    "32-bit page address of vllm5d": (
        "decode_loader.cuh", "v_offset = args.v_strides.Offset(page_id_",
        "v_offset = (int32_t)args.v_strides.Offset(page_id_", "v_pages out of bounds",
    ),
    "values of tokens that do not exist": (
        "decode_tile.cuh", "b[i] &= exists[i % 2]", "b[i] &= ~0u", "not finite",
    ),
    "second half masked like the first": (
        "decode_tile.cuh", "PairMask(token_mask, column + 8)", "PairMask(token_mask, column)",
        DIFFERS,
    ),
    "key of the future": (
        "segment.cuh", "position < 0 ? 0 : position + 1", "position < 0 ? 0 : position + 2",
        DIFFERS,
    ),
    "mask one token too long": (
        "decode_tile.cuh", "(token_mask >> token & 1) &&", "", DIFFERS,
    ),
    "pinned tokens not read": (
        "segment.cuh", "token < NumPinned(args, segment.row)", "token < 0", DIFFERS,
    ),
    "pinned tokens masked": (
        "segment.cuh", "key < NumPinned(args, segment.row)", "key < 0", DIFFERS,
    ),
    "one tile of the gap": (
        "segment.cuh", "if (tile >= gap.begin) tile += gap.size;",
        "if (tile > gap.begin) tile += gap.size;", DIFFERS,
    ),
    "slid rows as if they had not": (
        "logits.cuh", "slot < NumPinned(args, row)) return 0;", "slot >= 0) return 0;", DIFFERS,
    ),
    "wrong partial slot": (
        "segment.cuh", "begin >= range.begin ? 1 : 0", "begin > range.begin ? 1 : 0",
        "race|nobody has written|error",
    ),
    "first to arrive merges": (
        "segment.cuh", "before == limit", "before == 0", "nobody has written|not published",
    ),
    "partial result read through L1": (
        "segment.cuh", "prim::LoadL2(part)", "prim::LoadConst<Float4>(part)",
        "L1 may serve",
    ),
    "ranges overlap": (
        "segment.cuh", "range.end = range.begin + header.chunk;",
        "range.end = range.begin + header.chunk + 3;",
        "race|write after write",
    ),
    "counters not cleared": (
        "begin.cuh", "prim::Store(args.arrivals + i, 0u);", "", "nobody has initialised",
    ),
    "empty rows not filled": (
        "begin.cuh", "prim::Ballot(is_empty)", "prim::Ballot(false)", "not finite",
    ),
    "length not clamped": (
        "logits.cuh", "Clamp<int32_t>(stored, 0, args.capacity)", "stored",
        "page_table out of bounds",
    ),
    "barrier in one warp only": (
        "segment.cuh", "  prim::Store(tops + thread, top);\n  prim::SyncThreads();",
        "  prim::Store(tops + thread, top);\n  if (thread < 32) prim::SyncThreads();",
        "race|nobody has written",
    ),
    "thread that leaves before a barrier": (
        "decode.cuh", "if (range.begin >= range.end) return;",
        "if (range.begin >= range.end || prim::ThreadIndex() == 40) return;", "deadlock.*ended",
    ),
    "shuffle in half a warp": (
        "decode_finish.cuh", "    l += prim::ShuffleXor(l, 1);\n",
        "    if (lane < 16) l += prim::ShuffleXor(l, 1);\n",
        "divergent|deadlock",
    ),
    "exchange buffer too small": (
        "traits.h", "sums[kWarps * kTileRows * kColumnPitch]", "sums[kTileRows * kColumnPitch]",
        "shared memory out of bounds|race|error",
    ),
    "prefill: invalid rows not zeroed": (
        "prefill_loader.cuh", "prim::CpAsync16(v_tile + Row",
        "if (rows[i] >= 0) prim::CpAsync16(v_tile + Row",
        "nobody has|not finite",
    ),
    "prefill: keys read beyond head_dim": (
        "prefill_loader.cuh", "rows[i] >= 0 && chunk * 8 < args.head_dim", "rows[i] >= 0",
        "not finite|out of bounds",
    ),
    "prefill: columns beyond V's head_dim written": (
        "prefill_finish.cuh", "if (chunk * 8 >= args.v_head_dim) continue;", "",
        f"out of bounds|race|write after write|{DIFFERS}",
    ),
    "keys read beyond head_dim": (
        "decode_loader.cuh", "has_k = valid && chunk * 8 < args.head_dim;", "has_k = valid;",
        "not finite|out of bounds",
    ),
    "columns beyond V's head_dim written": (
        "decode_finish.cuh", "first + column < args.v_head_dim", "first + column < HEAD_DIM",
        f"out of bounds|race|write after write|{DIFFERS}",
    ),
    "prefill: waits too late": (
        "prefill.cuh", "prim::CpAsyncWait(0)", "prim::CpAsyncWait(1)", "while the cp.async",
    ),
    "prefill: loads into the stage being read": (
        "prefill_loader.cuh", "const Shared<char> k_tile = KTile(tile);",
        "const Shared<char> k_tile = KTile(tile + 1);",
        "cp.async|race|nobody has",
    ),
    "prefill: no barrier between tiles": (
        "prefill.cuh", "the tile before have been read.\n    prim::SyncThreads();",
        "the tile before have been read.\n    if (tile == 0) prim::SyncThreads();", "race",
    ),
    "prefill: mask overwritten while it is read": (
        "prefill_unit.cuh", "kMaskSlots = 4", "kMaskSlots = 2", "race",
    ),
    "prefill: masks too few tiles": (
        "prefill_mask.cuh", "first_token + Traits::kTokens <= all.end",
        "first_token + Traits::kTokens <= prim::Load(MyWarpKeys<HEAD_DIM>()).any.end",
        DIFFERS,
    ),
    "prefill: diagonal of the unit's first row": (
        "prefill_unit.cuh", "(args, unit, unit.rows.count - 1).end", "(args, unit, 0).end", DIFFERS,
    ),
    "prefill: diagonal one token too far": (
        "prefill_mask.cuh", "token, keys.end - token)", "token, keys.end + 1 - token)", DIFFERS,
    ),
    "prefill: masks of rows read before they are there": (
        "prefill_mask.cuh", "+ row), mask);\n  }\n  prim::SyncWarp();",
        "+ row), mask);\n  }", "race",
    ),
    "prefill: masks of rows where other warps have theirs": (
        "prefill_mask.cuh", "(word * Traits::kRows + row), mask",
        "(word * Traits::kRows + lane), mask",
        f"race|{DIFFERS}",
    ),
    "prefill: pinned tokens seen by queries before them": (
        "prefill_mask.cuh", "(pinned < keys.end ? pinned : keys.end)", "pinned", DIFFERS,
    ),
    "prefill: the last tile of pinned tokens left out": (
        "tree.cuh", "pinned / TILE_TOKENS + (pinned % TILE_TOKENS != 0)", "pinned / TILE_TOKENS",
        DIFFERS,
    ),
    "prefill: pinned tokens not read": (
        "prefill_loader.cuh", "token < NumPinned(args, unit.row))", "token < 0)", DIFFERS,
    ),
    "prefill: the gap behind pinned tokens begins a tile late": (
        "prefill_loader.cuh", "if (tile >= gap.begin)", "if (tile > gap.begin)", DIFFERS,
    ),
    "prefill: a tree seen as a chain": (
        "prefill_mask.cuh", "mask &= TreeMask(", "(void)TreeMask(", DIFFERS,
    ),
    "prefill: the tree of another node": (
        "prefill_mask.cuh", "SeesKey(args, tree, query, first_token + i)",
        "SeesKey(args, tree, query, first_token + i + 1)",
        f"out of bounds|{DIFFERS}",
    ),
    "prefill: keys in the tree seen by all": (
        "prefill_mask.cuh", "if (keys.all.end > root) keys.all.end = root;", ";", DIFFERS,
    ),
    "prefill: page id not checked": (
        "prefill_loader.cuh", "page_id_ >= 0 && page_id_ < args.num_pages", "page_id_ != -1",
        "k_pages out of bounds",
    ),
    "prefill: O not rescaled": (
        "prefill_tile.cuh", "keep[r][half] != 1.0f", "keep[r][half] > 1.0f", DIFFERS,
    ),
    "prefill: rows beyond the unit written": (
        "prefill_finish.cuh", "\n    if (row >= unit.rows.count) break;", "",
        f"out of bounds|race|write after write|{DIFFERS}",
    ),
    "prefill: units drawn twice": (
        "prefill.cuh", "index = prim::GridSize() +", "index = 1 +", "race|write after write",
    ),
    "prefill: ticket not cleared": (
        "begin.cuh", "if (first == 0) prim::Store(args.ticket, 0u);", "",
        "nobody has initialised",
    ),
    "prefill: values of vllm5d tokens that do not exist": (
        "prefill_loader.cuh", "if (mask == 0xffu) return;", "return;", "not finite",
    ),
    "prefill: values of vllm5d cleared by another thread": (
        "prefill_loader.cuh", "const int32_t eight = thread % kEights;\n    const uint32_t mask",
        "const int32_t eight = (thread + 1) % kEights;\n    const uint32_t mask",
        "cp.async|race|nobody has",
    ),
    "prefill: values of vllm5d cleared before they are there": (
        "prefill.cuh", "prim::CpAsyncWait(0);\n    if constexpr (Loader::kIsVllm5d)",
        "if (!Loader::kIsVllm5d) prim::CpAsyncWait(0);\n    if constexpr (Loader::kIsVllm5d)",
        "cp.async",
    ),
    "prefill: values of vllm5d read from other chunks": (
        "prefill_tile.cuh", "2 * k + lane / 8 % 2", "k + lane / 8 % 2", DIFFERS,
    ),
    "prefill: 8 values of vllm5d for the first alone": (
        "prefill_loader.cuh", "(token | 7) < unit.first_key", "token < unit.first_key",
        f"not read|{DIFFERS}",
    ),
    "prefill: values of vllm5d left of the window read": (
        "prefill_loader.cuh", "(token | 7) < unit.first_key || ", "", "outside of the windows",
    ),
    "prefill: keys of vllm5d left of the window read": (
        "prefill_loader.cuh", "token >= LoadUnit<HEAD_DIM>().first_key &&", "",
        "outside of the windows",
    ),
    "rope: turned the other way": ("rope.cuh", "prim::Fma(-b.x", "prim::Fma(b.x", DIFFERS),
    "rope: pairs of the half style where they are interleaved": (
        "rope.cuh", "if (args.rope_interleaved) SwapHalves(&x, &y);\n        TurnPairs",
        "TurnPairs", DIFFERS,
    ),
    "rope: keys of another place": (
        "decode.cuh", "segment, first_token + row);", "segment, first_token + row + 1);", DIFFERS,
    ),
    "rope: keys beyond the tables": (
        "segment.cuh",
        "  if (args.cos && !HasAngle(args, TokenAt<TREES_AND_PINS>(args, segment, token))) "
        "return false;\n",
        "", DIFFERS,
    ),
    "rope: prefill keys beyond the tables": (
        "prefill_loader.cuh", "kTakesRope && args.cos && !HasAngle", "false && !HasAngle", DIFFERS,
    ),
    "rope: a query beyond the tables beside others": (
        "decode.cuh", "  if (!AllHaveAngles<TREES_AND_PINS>(args, segment)) return {0, 0};\n", "",
        DIFFERS,
    ),
    "rope: such a query in a prefill unit": (
        "prefill_mask.cuh", "kTakesRope && !AllHaveAngles", "false && !AllHaveAngles", DIFFERS,
    ),
    "rope: such a query sees": (
        "segment.cuh", "return has_angle ? keys : KeyRange{0, 0};", "return keys;", DIFFERS,
    ),
    "rope: no barrier behind turned keys": (
        "prefill.cuh", "        prim::SyncThreads();  // the turned keys\n", "", "race",
    ),
    "prefill: 32-bit page address of vllm5d": (
        "prefill_loader.cuh", "LayerOffset(args, args.v_strides) + args",
        "LayerOffset(args, args.v_strides) + (int32_t)args", DIFFERS,
    ),
    "window one token too long": (
        "logits.cuh", "position - window + 1", "position - window", "outside of the windows",
    ),
    "work begins at token 0": (
        "segment.cuh", "segment->first_tile += left;", "", f"not read|{DIFFERS}",
    ),
    "tokens left of the window read": (
        "segment.cuh", "return token >= segment.first_key ||", "return true ||",
        "outside of the windows",
    ),
    "values of vllm5d left of the window read": (
        "decode_loader.cuh", "(token | 7) >= segment_.first_key", "true", "outside of the windows",
    ),
    "a query sees the window of the first": (
        "decode.cuh", "first_token >= seen_by_all.first && ", "", DIFFERS,
    ),
    "a sink for each split": (
        "segment.cuh", "l = prim::Fma(ml.y, factor, l);",
        "l = prim::Fma(ml.y + prim::Exp2(LoadSink(args, QueryHead(args, rows, row)) * kLog2E - "
        "Base(ml.x)), factor, l);",
        DIFFERS,
    ),
    "the sink of another head": (
        "segment.cuh", "LoadSink(args, QueryHead(args, rows, row))", "LoadSink(args, 0)", DIFFERS,
    ),
    "a sink for padding": (
        "begin.cuh", "args.num_tokens, ctas, /*with_sinks=*/false", "args.num_tokens, ctas, true",
        "lse: empty rows",
    ),
    "soft cap before the scale": (
        "logits.cuh", "edit.factor /= args.logits.soft_cap",
        "edit.factor = 1.0f / args.logits.soft_cap", DIFFERS,
    ),
    "distance to the row's last query": (
        "segment.cuh", "first_key - position)", "first_key - segment.lengths.seq_len + 1)", DIFFERS,
    ),
    "prefill: tokens left of the window read": (
        "prefill_loader.cuh", "if (token < unit.first_key &&", "if (false &&",
        "outside of the windows",
    ),
    "prefill: the edge of the windows not masked": (
        "prefill_mask.cuh", "first_token >= all.first && ", "", DIFFERS,
    ),
    "prefill: a tile that the warp's last row sees left out": (
        "prefill_mask.cuh", "if (other.any.end > keys.any.end)",
        "if (other.any.end < keys.any.end)",
        DIFFERS,
    ),
    "latent: rows that do not exist not zeroed": (
        "latent_loader.cuh", "prim::CpAsync16(tile + at", "if (valid) prim::CpAsync16(tile + at",
        "nobody has|not finite",
    ),
    "latent: page id not checked": (
        "latent_loader.cuh", "page_id_ >= 0 && page_id_ < args.num_pages", "page_id_ != -1",
        "kv_pages out of bounds",
    ),
    "latent: 32-bit page address": (
        "latent_loader.cuh", "exists ? args.k_strides.Offset",
        "exists ? (int32_t)args.k_strides.Offset", "kv_pages out of bounds",
    ),
    "latent: tokens that no query sees": (
        "latent.cuh", "if (job.end > seen) job.end = seen;", "", "not finite|error",
    ),
    "latent: loads into the stage being read": (
        "latent.cuh", "stage == 0 ? stages - 1 : stage - 1", "stage", "cp.async|race",
    ),
    "latent: waits too late": (
        "latent.cuh", "prim::CpAsyncWait(stages - 2)", "prim::CpAsyncWait(stages - 1)",
        "while the cp.async",
    ),
    "latent: masks of the stage before": (
        "latent.cuh", "masks + stage * kLatentWarps", "masks + (stage ^ 1) * kLatentWarps",
        f"race|nobody has|{DIFFERS}",
    ),
    "latent: the mask of four tokens for eight": (
        "latent_tile.cuh", "exists | also << 4", "exists | exists << 4", DIFFERS,
    ),
    "latent: diagonal one token too far": (
        "latent_tile.cuh", "token + 8 <= seen_by_all.end", "token + 8 <= seen_by_all.end + 1",
        DIFFERS,
    ),
    "latent: O not rescaled": (
        "latent_tile.cuh", "keep[0] != 1.0f || keep[1] != 1.0f", "keep[0] != 1.0f", DIFFERS,
    ),
    "latent: columns of another warp": (
        "latent_tile.cuh", "prim::WarpIndex() % Traits::kValueWarps * Traits::kValueDims",
        "prim::WarpIndex() / 2 % Traits::kValueWarps * Traits::kValueDims",
        f"race|nobody has|{DIFFERS}",
    ),
    "latent: queries beyond the unit's": (
        "latent_tile.cuh", "row < job.rows.count && !scale.is_zero", "!scale.is_zero",
        "q out of bounds",
    ),
    "latent: a prefill unit drawn twice": (
        "latent.cuh", "index = prim::GridSize() +", "index = 1 +", "race|write after write",
    ),
    "latent: scores overwritten while they are read": (
        "latent.cuh", "  prim::SyncThreads();  // tiles and scores have been read\n", "", "race",
    ),
}  # fmt: skip


# The kernels that the planted bugs are tried on: one head_dim, so that they compile in a second.
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
