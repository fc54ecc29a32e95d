// SPDX-License-Identifier: Apache-2.0

// Sizes of the decode kernel and the layout of its shared memory, of which prefill.cuh takes how a
// row of Q, K or V lies there.

#ifndef JAX_PAGED_CUDA_ATTENTION_TRAITS_H_
#define JAX_PAGED_CUDA_ATTENTION_TRAITS_H_

#include <cstddef>
#include <cstdint>

#include "cuda/attention/segment.cuh"

namespace jax_paged::cuda {

inline constexpr int32_t kWarps = kAttentionThreads / kWarpLanes;
inline constexpr int32_t kWarpTokens = kTileTokens / kWarps;  // of a tile, one warp's
static_assert(kWarpTokens == 16, "a warp's tokens are one k-step of mma.m16n8k16");

// After the rings: what the warps tell each other.
struct ExchangeShared {
  static constexpr int32_t kColumns = 32;      // of O that are summed over the warps at a time
  static constexpr int32_t kColumnPitch = 40;  // floats; rows then start 8 banks apart

  alignas(16) float sums[kWarps * kTileRows * kColumnPitch];
  float m[kWarps * kTileRows];
  float l[kWarps * kTileRows];
  uint32_t token_masks[kWarps * kMaxStages];
  MergeShared<> merge;
};

// How rows of 8-bit elements lie in shared memory: as DecodeTraits has those of 16-bit ones, in
// 16-byte chunks of which ldmatrix reads those of 8 rows at once. Where two rows fill the banks,
// the chunk index is xored with half the row.
template <int HEAD_DIM>
struct ByteRows {
  static constexpr int32_t kChunks = HEAD_DIM / 16;
  static constexpr int32_t kXor = kChunks % 8 == 0 ? 7 : (kChunks % 4 == 0 ? 3 : 0);
  static constexpr int32_t kRowBytes = (kXor != 0 ? kChunks : kChunks | 1) * 16;

  JAX_PAGED_HOST_DEVICE static constexpr int32_t Offset(int32_t row, int32_t chunk) {
    return PairOffset(row, chunk / 2, chunk % 2);
  }
  // Of chunk 2 pair + half, so written that ldmatrix needs few addresses: those of pairs 4 or 2
  // apart differ by a constant.
  JAX_PAGED_HOST_DEVICE static constexpr int32_t PairOffset(int32_t row, int32_t pair,
                                                            int32_t half) {
    constexpr int32_t kPairs = kXor == 0 ? 1 : (kXor + 1) / 2;
    if (kXor == 0) return row * kRowBytes + half * 16 + pair * 32;
    const int32_t moved = half ^ ((kXor == 3 ? row >> 1 : row) & kXor);
    return row * kRowBytes + (moved ^ pair % kPairs * 2) * 16 + pair / kPairs * kPairs * 32;
  }
};

template <int HEAD_DIM, PageKind PAGES = PageKind::kRows>
struct DecodeTraits {
  static_assert(HEAD_DIM % 16 == 0, "one k-step of mma.m16n8k16 takes 16 dimensions");

  static constexpr int32_t kRowChunks = HEAD_DIM / 8;  // of 16 bytes
  // ldmatrix reads 8 rows at once: their 16-byte chunks must lie in different bank groups. Where a
  // row is a multiple of 128 bytes the chunk index is xored with the row, else rows are padded to
  // an odd number of chunks.
  static constexpr bool kSwizzled = kRowChunks % 8 == 0;
  static constexpr int32_t kRowBytes = (kSwizzled ? kRowChunks : kRowChunks | 1) * 16;
  static constexpr int32_t kWarpTileBytes = kWarpTokens * kRowBytes;
  // Whether rows may have a tree or pinned tokens. The others have no register left for
  // them: simt.cuh takes their place.
  static constexpr bool kTakesTreesAndPins =
      PAGES == PageKind::kRows || (PAGES == PageKind::kEightBit && HEAD_DIM <= 192);
  // Whether rope may be inside attention.
  static constexpr bool kTakesRope = PAGES != PageKind::kEightBit;
  // 8-bit pages: a stage holds their bytes as they are, K, then V, then the scales of the tokens' K
  // and V.
  static constexpr bool kIsEightBit = PAGES == PageKind::kEightBit;
  static constexpr int32_t kByteTileBytes = kWarpTokens * ByteRows<HEAD_DIM>::kRowBytes;
  static constexpr int32_t kScalesOffset = 2 * kByteTileBytes;
  static constexpr int32_t kStageBytes =  // K, then V
      kIsEightBit ? kScalesOffset + 2 * kWarpTokens * 4 : 2 * kWarpTileBytes;
  // The logarithm (2) of what the weights of a softmax are multiplied with on their way into P,
  // which is f16 there: else one below 2^-25 of the largest would be 0.
  static constexpr int kWeightLift = kIsEightBit ? 15 : 0;
  static constexpr int32_t kLoads = kWarpTokens * kRowChunks / kWarpLanes;  // per lane, of K or V
  static_assert(kWarpTokens * kRowChunks % kWarpLanes == 0);
  static constexpr bool kSharedQueries = HEAD_DIM > 128;  // else they fit in registers
  static constexpr int32_t kQueryTileBytes = kTileRows * kRowBytes;
  static constexpr int32_t kQueryBytes =  // with 8-bit pages a factor for each row comes behind
      kQueryTileBytes + (kIsEightBit ? kTileRows * 4 : 0);

  JAX_PAGED_HOST_DEVICE static constexpr int32_t Offset(int32_t row, int32_t chunk) {
    return row * kRowBytes + (kSwizzled ? chunk ^ (row & 7) : chunk) * 16;
  }
  // Where V is stored transposed (vllm5d): a row is one dimension of 16 tokens, two chunks. Four
  // rows fill the banks, so the chunks of every other four are swapped.
  JAX_PAGED_HOST_DEVICE static constexpr int32_t TransposedOffset(int32_t dim, int32_t chunk) {
    return dim * kWarpTokens * 2 + (chunk ^ (dim >> 2 & 1)) * 16;
  }
  JAX_PAGED_HOST_DEVICE static constexpr int32_t RingBytes(int32_t stages) {
    return kWarps * stages * kStageBytes;
  }
  JAX_PAGED_HOST_DEVICE static constexpr int32_t SharedBytes(int32_t stages) {
    return RingBytes(stages) + static_cast<int32_t>(sizeof(ExchangeShared)) +
           (kSharedQueries ? kQueryBytes : 0);
  }
};

// The lane; what is computed from it is computed where it is used, not kept in registers.
JAX_PAGED_DEVICE int32_t OpaqueLane() {
  // The mask tells the compiler that it is not negative.
  return prim::Opaque(prim::ThreadIndex()) & (kWarpLanes - 1);
}

// The bits of two 16-bit elements that stand for tokens `token` and `token` + 1: all, of those in
// the mask.
JAX_PAGED_DEVICE uint32_t PairMask(uint32_t token_mask, int32_t token) {
  return (token_mask >> token & 1) * 0xffffu | (token_mask >> (token + 1) & 1) * 0xffff0000u;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_TRAITS_H_
