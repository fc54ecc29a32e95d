// SPDX-License-Identifier: Apache-2.0

// 8-bit K and V of a warp's tile to the 16-bit elements that mma takes (expand_bytes.cuh). Twice
// the shared memory traffic of 16-bit pages.

#ifndef JAX_PAGED_CUDA_ATTENTION_EXPAND_CUH_
#define JAX_PAGED_CUDA_ATTENTION_EXPAND_CUH_

#include "cuda/attention/traits.h"
#include "cuda/expand_bytes.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// A stage's K and V to `tile`: K, then V. A lane widens 16 bytes at a time.
template <typename T, typename Stored, int HEAD_DIM>
JAX_PAGED_DEVICE void ExpandStageAs(Shared<char> stage, Shared<char> tile) {
  using Traits = DecodeTraits<HEAD_DIM, PageKind::kEightBit>;
  constexpr int32_t kRowChunks = HEAD_DIM / 16;
  JAX_PAGED_UNROLL_4
  for (int32_t i = prim::LaneIndex(); i < 2 * Traits::kStoredChunks; i += kWarpLanes) {
    const bool is_v = i >= Traits::kStoredChunks;
    const int32_t within = is_v ? i - Traits::kStoredChunks : i;
    const int32_t row = within / kRowChunks;
    const int32_t chunk = within % kRowChunks;
    const Word4 bytes = prim::Load((stage + i * 16).template As<Word4>());
    const Pairs x[4] = {Expand<T>(bytes.x, Stored()), Expand<T>(bytes.y, Stored()),
                        Expand<T>(bytes.z, Stored()), Expand<T>(bytes.w, Stored())};
    const Shared<char> to = tile + (is_v ? Traits::kWarpTileBytes : 0);
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      prim::Store(
          (to + Traits::Offset(row, 2 * chunk + half)).template As<Word4>(),
          Word4{x[2 * half].low, x[2 * half].high, x[2 * half + 1].low, x[2 * half + 1].high});
    }
  }
}

template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void ExpandStage(const AttentionArgs& args, Shared<char> stage,
                                  Shared<char> tile) {
  switch (args.kv_dtype) {
    case Dtype::kFloat8E4M3:
      return ExpandStageAs<T, Float8E4M3, HEAD_DIM>(stage, tile);
    case Dtype::kFloat8E5M2:
      return ExpandStageAs<T, Float8E5M2, HEAD_DIM>(stage, tile);
    default:
      return ExpandStageAs<T, Int8, HEAD_DIM>(stage, tile);
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_EXPAND_CUH_
