// SPDX-License-Identifier: Apache-2.0

// Which keys the rows of a prefill unit see. A tile that some row of a warp does not see whole has
// a bit for each row and token: a lane finds those of one row, before the products, when registers
// are free. So trees and pinned tokens cost the products nothing.

#ifndef JAX_PAGED_CUDA_ATTENTION_PREFILL_MASK_CUH_
#define JAX_PAGED_CUDA_ATTENTION_PREFILL_MASK_CUH_

#include <cstddef>
#include <cstdint>

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/prefill_unit.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/tree.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// What the calling warp's rows see.
template <int HEAD_DIM>
JAX_PAGED_DEVICE Shared<WarpKeys> MyWarpKeys() {
  using Traits = PrefillTraits<HEAD_DIM>;
  return Traits::template Field<WarpKeys>(offsetof(typename Traits::State, warp_keys)) +
         OpaqueThread() / kWarpLanes;
}

// All lanes take part.
template <int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE WarpKeys FindWarpKeys(const AttentionArgs& args) {
  constexpr bool kTreesAndPins = DecodeTraits<HEAD_DIM, PAGES>::kTakesTreesAndPins;
  constexpr bool kTakesRope = DecodeTraits<HEAD_DIM, PAGES>::kTakesRope;
  constexpr int32_t kWarpRows = PrefillTraits<HEAD_DIM>::kWarpRows;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const int32_t row = FirstWarpRow<HEAD_DIM>() + OpaqueThread() % kWarpRows;
  WarpKeys keys = {{INT32_MAX, 0}, {0, INT32_MAX}};  // without rows: sees nothing
  if (row < unit.rows.count) {
    keys.any = keys.all = UnitKeys<kTreesAndPins>(args, unit, row);
  }
  if (kTakesRope && !AllHaveAngles<kTreesAndPins>(args, PrefillSegment(unit))) {
    keys.all = {INT32_MAX, 0};
  }
  JAX_PAGED_UNROLL
  for (int32_t step = 1; step < kWarpRows; step *= 2) {
    const WarpKeys other = {
        {prim::ShuffleXor(keys.any.first, step), prim::ShuffleXor(keys.any.end, step)},
        {prim::ShuffleXor(keys.all.first, step), prim::ShuffleXor(keys.all.end, step)}};
    if (other.any.first < keys.any.first) keys.any.first = other.any.first;
    if (other.any.end > keys.any.end) keys.any.end = other.any.end;
    if (other.all.first > keys.all.first) keys.all.first = other.all.first;
    if (other.all.end < keys.all.end) keys.all.end = other.all.end;
  }
  if (kTreesAndPins && unit.tree_size > 0) {  // within the tree each row sees other keys
    const int32_t root = PrefillSegment(unit).Tree().root;
    if (keys.all.end > root) keys.all.end = root;
  }
  if (kTreesAndPins && args.num_pinned) keys.any.first = 0;
  return keys;
}

// Whether all rows of the calling warp see the whole tile at `first_token`.
template <int HEAD_DIM>
JAX_PAGED_DEVICE bool SeesAll(Shared<uint32_t> token_masks, int32_t first_token) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const KeyRange all = prim::Load(MyWarpKeys<HEAD_DIM>()).all;
  bool result = first_token >= all.first && first_token + Traits::kTokens <= all.end;
  JAX_PAGED_UNROLL
  for (int32_t word = 0; word < Traits::kMaskWords; ++word) {
    result = result && prim::Load(token_masks + word) == ~0u;
  }
  return result;
}

// Bits [first, end) of 32.
JAX_PAGED_DEVICE uint32_t RangeMask(int32_t first, int32_t end) {
  const auto below = [](int32_t n) { return n <= 0 ? 0u : (n >= 32 ? ~0u : (1u << n) - 1); };
  return below(end) & ~below(first);
}

// Of 32 tokens from `first_token`, those that a query in a tree sees or that are not in the tree.
JAX_PAGED_DEVICE uint32_t TreeMask(const AttentionArgs& args, const RowTree& tree,
                                   const TreeQuery& query, int32_t first_token) {
  uint32_t mask = ~0u;
  JAX_PAGED_NO_UNROLL
  for (int32_t i = first_token < tree.root ? tree.root - first_token : 0; i < 32; ++i) {
    if (!SeesKey(args, tree, query, first_token + i)) mask &= ~(1u << i);
  }
  return mask;
}

// Finds what the warp's rows see of the tile at `first_token`, of tokens that exist.
template <int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE void FillRowMasks(const AttentionArgs& args, int32_t first_token,
                                   Shared<uint32_t> token_masks, Shared<uint32_t> row_masks) {
  using Traits = PrefillTraits<HEAD_DIM>;
  constexpr bool kTreesAndPins = DecodeTraits<HEAD_DIM, PAGES>::kTakesTreesAndPins;
  constexpr bool kTakesRope = DecodeTraits<HEAD_DIM, PAGES>::kTakesRope;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const int32_t row = FirstWarpRow<HEAD_DIM>() + lane;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const KeyRange keys = kTakesRope ? SeenKeys<kTreesAndPins>(args, segment, unit.rows, row)
                                   : VisibleKeys<kTreesAndPins>(args, segment, unit.rows, row);
  JAX_PAGED_UNROLL
  for (int32_t word = 0; word < Traits::kMaskWords && lane < Traits::kWarpRows; ++word) {
    const int32_t token = first_token + word * 32;
    uint32_t mask = RangeMask(keys.first - token, keys.end - token);
    if (kTreesAndPins && args.num_pinned) {
      const int32_t pinned = NumPinned(args, unit.row);
      mask |= RangeMask(0, (pinned < keys.end ? pinned : keys.end) - token);
    }
    mask &= prim::Load(token_masks + word);
    if (kTreesAndPins && unit.tree_size > 0 && mask != 0 && token + 32 > segment.Tree().root) {
      const int32_t query = args.by_group_size(unit.rows.first + row);
      mask &= TreeMask(args, segment.Tree(),
                       FindQuery(args, segment.Tree(), QueryPosition(unit.lengths, query)), token);
    }
    prim::Store(row_masks + (word * Traits::kRows + row), mask);
  }
  prim::SyncWarp();
}

// Sets the scores to -inf that the warp's rows do not see.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillMask(
    Shared<uint32_t> row_masks,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t lane = OpaqueThread() % kWarpLanes;
      const int32_t row = FirstWarpRow<HEAD_DIM>() + r * 16 + half * 8 + lane / 4;
      JAX_PAGED_UNROLL
      for (int32_t word = 0; word < Traits::kMaskWords; ++word) {
        const uint32_t mask = prim::Load(row_masks + (word * Traits::kRows + row)) >> lane % 4 * 2;
        JAX_PAGED_UNROLL
        for (int32_t n = 0; n < 4; ++n) {
          JAX_PAGED_UNROLL
          for (int32_t i = 0; i < 2; ++i) {
            if (!(mask >> (n * 8 + i) & 1)) s[r][word * 4 + n][2 * half + i] = kNegativeInfinity;
          }
        }
      }
    }
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_PREFILL_MASK_CUH_
