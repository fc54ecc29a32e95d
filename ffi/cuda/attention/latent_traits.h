// SPDX-License-Identifier: Apache-2.0

// Sizes of the latent kernel and the layout of its shared memory. Plain C++, shared with the
// emulator.

#ifndef JAX_PAGED_CUDA_ATTENTION_LATENT_TRAITS_H_
#define JAX_PAGED_CUDA_ATTENTION_LATENT_TRAITS_H_

#include <cstdint>
#include <type_traits>

#include "cuda/attention/args.h"
#include "cuda/attention/select.h"
#include "cuda/device_limits.h"

namespace jax_paged::cuda {

inline constexpr int32_t kLatentThreads = 256;
inline constexpr int32_t kLatentWarps = 8;
inline constexpr int32_t kLatentTokens = 32;        // KV tokens that a CTA takes at once
inline constexpr int32_t kMaxLatentDim = 576;       // of a stored row
inline constexpr int32_t kMaxLatentValueDim = 512;  // of what of it is V
inline constexpr int32_t kLatentStep = 32;          // dimensions of a step of Q K^T, two of mma

inline constexpr int32_t kLatentRowBytes = kMaxLatentDim * 2;
inline constexpr int32_t kLatentTileBytes = kLatentTokens * kLatentRowBytes;
inline constexpr int32_t kLatentStoredBytes = kLatentTokens * kMaxLatentDim;  // of 8-bit rows
// In floats: the float2 of four rows fill the banks.
inline constexpr int32_t kScorePitch = kLatentTokens + 8;
inline constexpr int32_t kSumPitch = kMaxLatentValueDim + 8;  // of O

// Rows are multiples of 128 bytes, so chunks of 16 are xored with the row: ldmatrix then reads
// chunks of 8 rows from different bank groups.
JAX_PAGED_HOST_DEVICE constexpr int32_t LatentOffset(int32_t row, int32_t chunk) {
  return row * kLatentRowBytes + (chunk ^ (row & 7)) * 16;
}

// In this order: Q, the widened tile of 8-bit pages, the stages, the scores, which tokens exist.
// When a job ends O takes the place of what is before the scores, LatentEnd theirs.
template <int ROWS, bool EIGHT_BIT>
struct LatentTraits {
  // S: a warp has 16 rows and so many groups of 8 tokens; of 16 rows there are more warps than
  // groups.
  static constexpr int32_t kTokenGroups = kLatentTokens / 8;
  static constexpr int32_t kScoreWarps = kLatentWarps * 16 / ROWS;  // side by side over the tokens
  static constexpr int32_t kGroups = kTokenGroups > kScoreWarps ? kTokenGroups / kScoreWarps : 1;
  // O: a warp has one or two tiles of 16 rows, so that a fragment of V feeds two mma, and so many
  // columns.
  static constexpr int32_t kRowTiles = ROWS > 16 ? 2 : 1;
  static constexpr int32_t kValueWarps = kLatentWarps * 16 * kRowTiles / ROWS;
  static constexpr int32_t kValueDims = kMaxLatentValueDim / kValueWarps;

  static constexpr int32_t kExpandedOffset = ROWS * kLatentRowBytes;
  static constexpr int32_t kRingOffset = kExpandedOffset + (EIGHT_BIT ? kLatentTileBytes : 0);
  static constexpr int32_t kStageBytes = EIGHT_BIT ? kLatentStoredBytes : kLatentTileBytes;
  static constexpr int32_t kScoreBytes = ROWS * kScorePitch * 4;

  JAX_PAGED_HOST_DEVICE static constexpr int32_t ScoresOffset(int32_t stages) {
    return kRingOffset + stages * kStageBytes;
  }
  JAX_PAGED_HOST_DEVICE static constexpr int32_t MasksOffset(int32_t stages) {
    return ScoresOffset(stages) + kScoreBytes;
  }
  JAX_PAGED_HOST_DEVICE static constexpr int32_t SharedBytes(int32_t stages) {
    return MasksOffset(stages) + stages * kLatentWarps * 4 + 16;  // the last: a ticket
  }
};

// Whether the latent kernel takes a call. The op has no options but windows; f32 goes to simt.cuh.
inline bool IsForLatent(const AttentionArgs& args) {
  return args.is_latent && !HasTreesOrPins(args) && !args.logits.edits() && !args.cos &&
         args.head_dim <= kMaxLatentDim && args.v_head_dim <= kMaxLatentValueDim &&
         (!IsEightBit(args.kv_dtype) || args.head_dim % 16 == 0);
}

// Packed rows of a CTA (0: the device is too small for any) and the stages of its ring: as many
// rows as wanted where two stages fit, then as many stages as fit.
struct LatentShape {
  int32_t rows;
  int32_t stages;
  int32_t shared_bytes;
};

inline LatentShape ShapeLatent(const DeviceLimits& limits, int32_t rows, bool is_eight_bit) {
  for (; rows >= 16; rows /= 2) {
    for (int32_t stages = kMaxStages; stages >= kMinStages; --stages) {
      const int32_t bytes =
          rows == 64   ? (is_eight_bit ? LatentTraits<64, true>::SharedBytes(stages)
                                       : LatentTraits<64, false>::SharedBytes(stages))
          : rows == 32 ? (is_eight_bit ? LatentTraits<32, true>::SharedBytes(stages)
                                       : LatentTraits<32, false>::SharedBytes(stages))
                       : (is_eight_bit ? LatentTraits<16, true>::SharedBytes(stages)
                                       : LatentTraits<16, false>::SharedBytes(stages));
      if (bytes <= limits.shared_bytes_per_cta) return {rows, stages, bytes};
    }
  }
  return {0, 0, 0};
}

// Which latent kernels serve a call.
struct LatentChoice {
  LatentShape decode;   // no rows: simt.cuh serves the call
  LatentShape prefill;  // no rows: the other serves all
};

inline LatentChoice ChooseLatent(const AttentionArgs& args, const DeviceLimits& limits) {
  LatentChoice choice = {};
  if (!IsForLatent(args)) return choice;
  const bool is_eight_bit = IsEightBit(args.kv_dtype);
  choice.decode = ShapeLatent(limits, LatentRows(args.group_size), is_eight_bit);
  if (choice.decode.rows > 0 && args.num_tokens > 1 &&
      int64_t{args.num_tokens} * args.group_size > choice.decode.rows) {
    // 64 rows or 16: no device has room for 32 and not for 64.
    choice.prefill = ShapeLatent(limits, kMaxLatentRows, is_eight_bit);
    if (choice.prefill.rows < kMaxLatentRows)
      choice.prefill = ShapeLatent(limits, 16, is_eight_bit);
  }
  return choice;
}

// Calls f(std::integral_constant<int, ROWS>) for the rows of a LatentShape.
template <typename F>
void WithLatentRows(int32_t rows, F&& f) {
  if (rows == 64) {
    f(std::integral_constant<int, 64>());
  } else if (rows == 32) {
    f(std::integral_constant<int, 32>());
  } else {
    f(std::integral_constant<int, 16>());
  }
}
template <typename F>
void WithLatentPrefillRows(int32_t rows, F&& f) {
  if (rows == 64) {
    f(std::integral_constant<int, 64>());
  } else {
    f(std::integral_constant<int, 16>());
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_LATENT_TRAITS_H_
