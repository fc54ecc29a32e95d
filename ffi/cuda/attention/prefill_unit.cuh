// SPDX-License-Identifier: Apache-2.0

// The prefill kernel's units, and the sizes and the layout of its shared memory: which packed rows
// a CTA has, and which of them a warp.

#ifndef JAX_PAGED_CUDA_ATTENTION_PREFILL_UNIT_CUH_
#define JAX_PAGED_CUDA_ATTENTION_PREFILL_UNIT_CUH_

#include <cstddef>

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/select.h"
#include "cuda/attention/traits.h"
#include "cuda/prim.h"
#include "cuda/warp_search.cuh"

namespace jax_paged::cuda {

inline constexpr int32_t kPrefillStages = 2;
inline constexpr int32_t kMaskSlots = 4;  // a tile's mask is written two tiles before it is read

struct PrefillUnit {
  RowLengths lengths;
  int32_t row;
  int32_t first_key;  // tokens before it are left of every window, and not read unless pinned
  int32_t num_keys;   // tokens that the unit's last row sees
  int32_t tree_size;  // of the row, where that is no chain
  UnitRows rows;
};

// Keys that some row of a warp sees, and those that all its rows see.
struct WarpKeys {
  KeyRange any;
  KeyRange all;
};

// After the queries and the stages.
template <int TOKENS>
struct PrefillShared {
  PrefillUnit unit;  // here and not in registers, which are short; so are the next
  WarpKeys warp_keys[kWarps];
  // In the pool, in rows of a token and head (vllm5d: bytes); -1: no such token.
  int64_t offsets[kPrefillStages * TOKENS];
  uint32_t token_masks[kMaskSlots * TOKENS / kWarpLanes];
  uint32_t ticket;
  float scale;            // LogitScale::factor
  float v_scale[kWarps];  // with scales of V per token: the largest so far, which O is in units of
  int64_t v_offsets[kPrefillStages * TOKENS / 8];  // vllm5d: of V, by 8 tokens; offsets are of K
};

template <int HEAD_DIM>
struct PrefillTraits {
  using Row = DecodeTraits<HEAD_DIM>;  // how a row of Q, K or V lies in shared memory

  static constexpr int32_t kRows = PrefillRows(HEAD_DIM);
  static constexpr int32_t kWarpRows = kRows / kWarps;
  static constexpr int32_t kRowTiles = kWarpRows / 16;           // of an mma.m16n8k16, per warp
  static constexpr int32_t kTokens = HEAD_DIM <= 128 ? 64 : 32;  // of a KV tile
  static constexpr int32_t kMaskWords = kTokens / kWarpLanes;
  static constexpr int32_t kTileBytes = kTokens * Row::kRowBytes;
  static constexpr int32_t kStageBytes = 2 * kTileBytes;  // K, then V
  static constexpr int32_t kQueryBytes = kRows * Row::kRowBytes;
  static constexpr int32_t kLoads = kTokens * Row::kRowChunks / kAttentionThreads;  // of K or V
  static_assert(kTokens * Row::kRowChunks % kAttentionThreads == 0);
  static_assert(kWarpRows * Row::kRowChunks % kWarpLanes == 0);

  using State = PrefillShared<kTokens>;
  static constexpr int32_t kStateOffset = kQueryBytes + kPrefillStages * kStageBytes;
  static constexpr int32_t kSharedBytes = kStateOffset + static_cast<int32_t>(sizeof(State));

  // Which keys of a tile the rows see (prefill_mask.cuh), behind all.
  static constexpr int32_t kRowMaskBytes = kRows * kMaskWords * 4;
  // 8-bit pages: the second stage's place has the bytes of two stages; behind all come the scales
  // of tokens, K's and V's of kScaleSlots tiles. The masks take the place of bytes that have been
  // widened.
  static constexpr int32_t kByteTileBytes = kTokens * HEAD_DIM;
  static constexpr int32_t kBytesOffset = kQueryBytes + kStageBytes;
  static constexpr int32_t kScaleSlots = 3;  // copied two tiles before they are read
  static_assert(kPrefillStages * 2 * kByteTileBytes <= kStageBytes);
  static_assert(kRowMaskBytes <= 2 * kByteTileBytes);
  JAX_PAGED_HOST_DEVICE static constexpr int32_t SharedBytes(PageKind pages) {
    return kSharedBytes +
           (pages == PageKind::kEightBit ? kScaleSlots * 2 * kTokens * 4 : kRowMaskBytes);
  }

  // Row::Offset(row, 2 * step + half) for half 0 or 1, so written that steps 4 apart differ by a
  // constant, and ldmatrix needs a register for each of four addresses only.
  JAX_PAGED_HOST_DEVICE static constexpr int32_t StepOffset(int32_t row, int32_t step,
                                                            int32_t half) {
    if (!Row::kSwizzled) return row * Row::kRowBytes + half * 16 + step * 32;
    return row * Row::kRowBytes + ((half ^ (row & 7)) ^ step % 4 * 2) * 16 + step / 4 * 128;
  }

  // Where V is stored transposed (vllm5d): a row is one dimension of a tile's tokens, 128 or 64
  // bytes. The chunks of 8 rows that ldmatrix reads at once lie in different bank groups.
  JAX_PAGED_HOST_DEVICE static constexpr int32_t TransposedOffset(int32_t dim, int32_t chunk) {
    return dim * kTokens * 2 + (chunk ^ (kTokens == 64 ? dim & 7 : dim >> 1 & 3)) * 16;
  }

  template <typename T>
  JAX_PAGED_DEVICE static Shared<T> Field(size_t offset) {
    return (prim::SharedMemory() + (kStateOffset + static_cast<int32_t>(offset))).template As<T>();
  }
};

// The unit that the CTA is at.
template <int HEAD_DIM>
JAX_PAGED_DEVICE PrefillUnit LoadUnit() {
  using Traits = PrefillTraits<HEAD_DIM>;
  return prim::Load(Traits::template Field<PrefillUnit>(offsetof(typename Traits::State, unit)));
}

// The unit as a segment, of which only row, tree and lengths mean something here.
JAX_PAGED_DEVICE Segment PrefillSegment(const PrefillUnit& unit) {
  Segment segment = {};
  segment.row = unit.row;
  segment.tree_size = unit.tree_size;
  segment.lengths = unit.lengths;
  return segment;
}

// The keys that a packed row of the unit sees, as VisibleKeys has them.
template <bool TREES_AND_PINS>
JAX_PAGED_DEVICE KeyRange UnitKeys(const AttentionArgs& args, const PrefillUnit& unit,
                                   int32_t row) {
  return VisibleKeys<TREES_AND_PINS>(args, PrefillSegment(unit), unit.rows, row);
}

// A warp's work.
template <bool TREES_AND_PINS>
JAX_PAGED_DEVICE PrefillUnit FindPrefillUnit(const AttentionArgs& args, int32_t index) {
  const int32_t rank = WarpSearch(args.max_seqs, [&](int32_t i) {
    return prim::LoadConst<int64_t>(args.first_prefill + i) <= index;
  });
  PrefillUnit unit;
  unit.row = prim::LoadConst<int32_t>(args.prefill_order + rank);
  unit.lengths = prim::LoadConst<RowLengths>(args.row_lengths + unit.row);
  unit.tree_size =
      TREES_AND_PINS && args.max_tree > 0 ? prim::LoadConst<int32_t>(args.row_trees + unit.row) : 0;
  const int32_t packed_rows = unit.lengths.q_len * args.group_size;
  const int32_t within =
      index - static_cast<int32_t>(prim::LoadConst<int64_t>(args.first_prefill + rank));
  const int32_t from_last = within / args.num_kv_heads;
  unit.rows.kv_head = within - from_last * args.num_kv_heads;
  unit.rows.first = ((packed_rows - 1) / args.prefill_rows - from_last) * args.prefill_rows;
  const int32_t rest = packed_rows - unit.rows.first;
  unit.rows.count = rest < args.prefill_rows ? rest : args.prefill_rows;
  unit.first_key = unit.tree_size > 0
                       ? RowFirstKey<TREES_AND_PINS>(args, unit.row, unit.lengths, unit.tree_size)
                       : UnitKeys<TREES_AND_PINS>(args, unit, 0).first;
  unit.num_keys = UnitKeys<TREES_AND_PINS>(args, unit, unit.rows.count - 1).end;
  return unit;
}

// The thread's index; what is computed from it is computed where it is used, not kept in registers.
JAX_PAGED_DEVICE int32_t OpaqueThread() {
  // The mask tells the compiler that it is not negative.
  return prim::Opaque(prim::ThreadIndex()) & (kAttentionThreads - 1);
}

template <int HEAD_DIM>
JAX_PAGED_DEVICE int32_t FirstWarpRow() {
  return OpaqueThread() / kWarpLanes * PrefillTraits<HEAD_DIM>::kWarpRows;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_PREFILL_UNIT_CUH_
