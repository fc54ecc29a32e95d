// SPDX-License-Identifier: Apache-2.0

// The end of a unit in the prefill kernel: each warp writes its rows.

#ifndef JAX_PAGED_CUDA_ATTENTION_PREFILL_FINISH_CUH_
#define JAX_PAGED_CUDA_ATTENTION_PREFILL_FINISH_CUH_

#include "cuda/attention/args.h"
#include "cuda/attention/logits.cuh"
#include "cuda/attention/prefill_tile.cuh"
#include "cuda/attention/prefill_unit.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/codes.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// The warp's rows times `factor`, through its rows of Q in shared memory, so that stores are 16
// bytes.
template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void WriteRows(const AttentionArgs& args, const PrefillState<HEAD_DIM>& state,
                                const float (&factor)[PrefillTraits<HEAD_DIM>::kRowTiles][2]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Row = typename Traits::Row;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  prim::SyncWarp();  // every lane has read the queries
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = first_row + r * 16 + half * 8 + lane / 4;
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < HEAD_DIM / 8; ++n) {
        const float x = state.o[r][n][2 * half] * factor[r][half];
        const float y = state.o[r][n][2 * half + 1] * factor[r][half];
        prim::Store(
            (prim::SharedMemory() + (Row::Offset(row, n) + lane % 4 * 4)).template As<uint32_t>(),
            factor[r][half] == 0.0f ? 0u : prim::PackPair<T>(x, y));
      }
    }
  }
  prim::SyncWarp();  // the rows are there
  JAX_PAGED_UNROLL_4
  for (int32_t i = lane; i < Traits::kWarpRows * Row::kRowChunks; i += kWarpLanes) {
    const int32_t row = first_row + i / Row::kRowChunks;
    const int32_t chunk = i % Row::kRowChunks;
    if (row >= unit.rows.count) break;
    if (chunk * 8 >= args.v_head_dim) continue;
    const int64_t head = HeadIndex(args, segment, unit.rows, row);
    prim::Store(
        (args.out + (head * args.v_head_dim + chunk * 8) * int64_t{sizeof(T)}).template As<Word4>(),
        prim::Load((prim::SharedMemory() + Row::Offset(row, chunk)).template As<Word4>()));
  }
}

// The same for an fp8 output: f32 numbers of one half of the columns fill the rows of Q, then those
// of the other; the code that rounds them stands in a loop, not in every column's place.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void WriteFp8Rows(const AttentionArgs& args, const PrefillState<HEAD_DIM>& state,
                                   const float (&factor)[PrefillTraits<HEAD_DIM>::kRowTiles][2]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Row = typename Traits::Row;
  constexpr int32_t kBlocks = HEAD_DIM / 16;  // of 8 columns in a half
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  const float scale = OutScale(args);
  JAX_PAGED_UNROLL
  for (int32_t part = 0; part < 2; ++part) {
    prim::SyncWarp();  // every lane has read the queries, or the first half
    JAX_PAGED_UNROLL
    for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
      JAX_PAGED_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = first_row + r * 16 + half * 8 + lane / 4;
        const bool is_empty = factor[r][half] == 0.0f;
        JAX_PAGED_UNROLL
        for (int32_t n = 0; n < kBlocks; ++n) {
          const float (&o)[4] = state.o[r][part * kBlocks + n];
          const Float2 x = {is_empty ? 0.0f : o[2 * half] * factor[r][half],
                            is_empty ? 0.0f : o[2 * half + 1] * factor[r][half]};
          const int32_t chunk = n * 2 + lane % 4 / 2;
          prim::Store((prim::SharedMemory() + (Row::Offset(row, chunk) + lane % 2 * 8))
                          .template As<Float2>(),
                      x);
        }
      }
    }
    prim::SyncWarp();  // the half is there
    JAX_PAGED_NO_UNROLL
    for (int32_t i = lane; i < Traits::kWarpRows * Row::kRowChunks; i += kWarpLanes) {
      const int32_t row = first_row + i / Row::kRowChunks;
      const int32_t chunk = i % Row::kRowChunks;
      if (row >= unit.rows.count) break;
      const int32_t column = part * (HEAD_DIM / 2) + chunk * 4;
      if (column >= args.v_head_dim) continue;
      const int64_t head = HeadIndex(args, segment, unit.rows, row);
      const Float4 x =
          prim::Load((prim::SharedMemory() + Row::Offset(row, chunk)).template As<Float4>());
      prim::Store((args.out + (head * args.v_head_dim + column)).template As<uint32_t>(),
                  Fp8Quad(args.out_dtype, x, scale));
    }
  }
}

// Writes the warp's results.
template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void FinishPrefill(const AttentionArgs& args,
                                    const PrefillState<HEAD_DIM>& state) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  float factor[Traits::kRowTiles][2];  // 0: no key was seen
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = first_row + r * 16 + half * 8 + lane / 4;
      float l = state.l[r][half];
      l += prim::ShuffleXor(l, 1);
      l += prim::ShuffleXor(l, 2);
      const int32_t head = row < unit.rows.count ? QueryHead(args, unit.rows, row) : 0;
      const SoftmaxEnd end = EndSoftmax(state.m[r][half], l, LoadSink(args, head));
      factor[r][half] = end.factor;
      if (lane % 4 == 0 && row < unit.rows.count) {
        prim::Store(args.lse + HeadIndex(args, segment, unit.rows, row), end.lse);
      }
    }
  }
  if (args.out_bytes == 1) {  // fp8
    WriteFp8Rows<HEAD_DIM>(args, state, factor);
  } else {
    WriteRows<T, HEAD_DIM>(args, state, factor);
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_PREFILL_FINISH_CUH_
