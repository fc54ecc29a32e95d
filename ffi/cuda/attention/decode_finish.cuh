// SPDX-License-Identifier: Apache-2.0

// The end of a segment in the decode kernel: the warps' results become one.

#ifndef JAX_PAGED_CUDA_ATTENTION_DECODE_FINISH_CUH_
#define JAX_PAGED_CUDA_ATTENTION_DECODE_FINISH_CUH_

#include <cstddef>

#include "cuda/attention/args.h"
#include "cuda/attention/decode_tile.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/traits.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Adds up the warps' results and sends them where they go.
template <typename T, int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE void FinishSegment(const AttentionArgs& args, const WorkRange& range,
                                    const Segment& segment, const UnitRows& rows,
                                    Shared<char> exchange, DecodeState<HEAD_DIM>* state) {
  constexpr int32_t kPitch = ExchangeShared::kColumnPitch;
  constexpr int32_t kColumns = ExchangeShared::kColumns;
  constexpr int32_t kQuads = kColumns / 4;
  using Traits = DecodeTraits<HEAD_DIM, PAGES>;
  constexpr float kUnlift = 1.0f / (1 << Traits::kWeightLift);
  static_assert(kTileRows * kQuads == kAttentionThreads, "one float4 per thread");
  const Shared<float> sums = (exchange + offsetof(ExchangeShared, sums)).As<float>();
  const Shared<float> ms = (exchange + offsetof(ExchangeShared, m)).As<float>();
  const Shared<float> ls = (exchange + offsetof(ExchangeShared, l)).As<float>();
  const int32_t lane = prim::LaneIndex();
  const int32_t warp = prim::WarpIndex();
  const int32_t lane_row = lane / 4;

  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    float l = state->l[half] * kUnlift;
    l += prim::ShuffleXor(l, 1);
    l += prim::ShuffleXor(l, 2);
    if (lane % 4 == 0) {
      prim::Store(ms + (warp * kTileRows + lane_row + 8 * half), state->m[half]);
      prim::Store(ls + (warp * kTileRows + lane_row + 8 * half), l);
    }
  }
  prim::SyncThreads();
  float factor[2];
  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    float m = kNegativeInfinity;
    for (int32_t w = 0; w < kWarps; ++w) {
      m = prim::Max(m, prim::Load(ms + (w * kTileRows + lane_row + 8 * half)));
    }
    factor[half] = prim::Exp2(state->m[half] - Base(m)) * kUnlift * state->v_scale;
  }

  const Destination to = DestinationOf(args, range, segment, rows);
  const int32_t row = prim::ThreadIndex() / kQuads;
  float row_m = kNegativeInfinity;
  float row_l = 0.0f;
  for (int32_t w = 0; w < kWarps; ++w) {
    row_m = prim::Max(row_m, prim::Load(ms + (w * kTileRows + row)));
  }
  for (int32_t w = 0; w < kWarps; ++w) {
    const float m = prim::Load(ms + (w * kTileRows + row));
    row_l = prim::Fma(prim::Load(ls + (w * kTileRows + row)), prim::Exp2(m - Base(row_m)), row_l);
  }
  const int32_t column = prim::ThreadIndex() % kQuads * 4;
  const bool has_row = row < rows.count;
  const RowWriter<T> writer(args, segment, rows, to, row, row_m, row_l, has_row && column == 0);
  JAX_PAGED_UNROLL
  for (int32_t first = 0; first < HEAD_DIM; first += kColumns) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < kColumns / 8; ++n) {
      if (first + n * 8 >= HEAD_DIM) continue;
      const float (&o)[4] = state->o[first / 8 + n];
      JAX_PAGED_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row_at = (warp * kTileRows + lane_row + 8 * half) * kPitch + n * 8;
        const Float2 x = {o[2 * half] * factor[half], o[2 * half + 1] * factor[half]};
        if constexpr (!Traits::kIsEightBit) {
          prim::Store((sums + (row_at + lane % 4 * 2)).As<Float2>(), x);
        } else if (n % 2 == 0) {  // even dimensions of 16; the odd ones are in the next 8 sums
          const float (&odd)[4] = state->o[first / 8 + n + 1];
          prim::Store(
              (sums + (row_at + lane % 4 * 4)).As<Float4>(),
              Float4{x.x, odd[2 * half] * factor[half], x.y, odd[2 * half + 1] * factor[half]});
        }
      }
    }
    prim::SyncThreads();
    if (has_row && first + column < args.v_head_dim) {
      Float4 sum = {0, 0, 0, 0};
      for (int32_t w = 0; w < kWarps; ++w) {
        const Float4 x =
            prim::Load((sums + ((w * kTileRows + row) * kPitch + column)).As<Float4>());
        sum.x += x.x;
        sum.y += x.y;
        sum.z += x.z;
        sum.w += x.w;
      }
      writer.Write(args, first + column, sum);
    }
    prim::SyncThreads();  // sums, and after the last columns m and l, may be overwritten
  }
  MergeIfLast<T>(args, segment, rows, to, exchange + offsetof(ExchangeShared, merge));
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_DECODE_FINISH_CUH_
