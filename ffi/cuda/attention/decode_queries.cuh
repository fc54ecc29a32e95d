// SPDX-License-Identifier: Apache-2.0

// The decode kernel's Q: a unit's packed rows as mma takes them.

#ifndef JAX_PAGED_CUDA_ATTENTION_DECODE_QUERIES_CUH_
#define JAX_PAGED_CUDA_ATTENTION_DECODE_QUERIES_CUH_

#include <cstddef>

#include "cuda/attention/args.h"
#include "cuda/attention/rope.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/tensor_core.cuh"
#include "cuda/attention/traits.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Puts the unit's queries into a tile in shared memory, turned where rope says so: 4 rows a warp.
template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void FillQueryTile(const AttentionArgs& args, const Segment& segment,
                                    const UnitRows& rows, const LogitScale& scale,
                                    Shared<char> tile) {
  using Traits = DecodeTraits<HEAD_DIM>;
  constexpr int32_t kRows = kTileRows / kWarps;
  const int32_t first_row = prim::WarpIndex() * kRows;
  for (int32_t i = prim::LaneIndex(); i < kRows * Traits::kRowChunks; i += kWarpLanes) {
    const int32_t row = first_row + i / Traits::kRowChunks;
    const int32_t chunk = i % Traits::kRowChunks;
    prim::Store((tile + Traits::Offset(row, chunk)).template As<Word4>(),
                LoadQueries<T>(args, segment, rows, scale, row, chunk));
  }
  if (args.cos) {
    prim::SyncWarp();  // the warp's rows
    TurnQueries<T, HEAD_DIM, kRows, /*TREES_AND_PINS=*/true>(args, segment, rows, tile, first_row);
  }
  prim::SyncThreads();  // the tile
}

// A k-step of a tile of queries as the A operand of mma.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void QueryOperand(Shared<char> tile, int32_t step, uint32_t (&a)[4]) {
  const int32_t lane = prim::LaneIndex();
  prim::LoadMatrix(a, tile + DecodeTraits<HEAD_DIM>::Offset(lane % 16, 2 * step + lane / 16));
}

// The unit's queries as the A operand of mma, in registers. `exchange`: an ExchangeShared.
template <typename T, int HEAD_DIM, bool SHARED>
class DecodeQueries {
 public:
  // Turned queries pass through the place of the sums, which no warp touches before all have taken
  // their queries: FinishSegment has a barrier before and behind its use.
  JAX_PAGED_DEVICE explicit DecodeQueries(Shared<char> exchange)
      : tile_(exchange + offsetof(ExchangeShared, sums)) {
    static_assert(DecodeTraits<HEAD_DIM>::kQueryTileBytes <= sizeof(ExchangeShared::sums));
  }
  JAX_PAGED_DEVICE void Load(const AttentionArgs& args, const Segment& segment,
                             const UnitRows& rows, const LogitScale& scale);
  JAX_PAGED_DEVICE void Operand(int32_t step, uint32_t (&a)[4]) const {
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 4; ++i) a[i] = q_[step][i];
  }

 private:
  Shared<char> tile_;
  uint32_t q_[HEAD_DIM / 16][4];
};

template <typename T, int HEAD_DIM, bool SHARED>
JAX_PAGED_DEVICE void DecodeQueries<T, HEAD_DIM, SHARED>::Load(const AttentionArgs& args,
                                                               const Segment& segment,
                                                               const UnitRows& rows,
                                                               const LogitScale& scale) {
  if (args.cos) {
    FillQueryTile<T, HEAD_DIM>(args, segment, rows, scale, tile_);
    JAX_PAGED_UNROLL
    for (int32_t k = 0; k < HEAD_DIM / 16; ++k) QueryOperand<HEAD_DIM>(tile_, k, q_[k]);
    return;
  }
  const int32_t row = prim::LaneIndex() / 4;
  const int32_t column = prim::LaneIndex() % 4 * 2;
  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    const bool valid = row + 8 * half < rows.count && !scale.is_zero;
    const int64_t head = valid ? HeadIndex(args, segment, rows, row + 8 * half) : 0;
    const Global<const char> source = args.q + (head * args.head_dim + column) * int64_t{sizeof(T)};
    const uint32_t sign = scale.is_negative ? 0x80008000u : 0u;
    JAX_PAGED_UNROLL
    for (int32_t k = 0; k < HEAD_DIM / 16; ++k) {
      q_[k][half] = q_[k][half + 2] = 0;
      if (valid && k * 16 < args.head_dim) {
        q_[k][half] = prim::LoadConst((source + k * 32).template As<const uint32_t>()) ^ sign;
      }
      if (valid && k * 16 + 8 < args.head_dim) {
        q_[k][half + 2] =
            prim::LoadConst((source + (k * 32 + 16)).template As<const uint32_t>()) ^ sign;
      }
    }
  }
}

// The same in shared memory behind `exchange`, for all warps: with O they would not fit in the
// registers.
template <typename T, int HEAD_DIM>
class DecodeQueries<T, HEAD_DIM, /*SHARED=*/true> {
 public:
  JAX_PAGED_DEVICE explicit DecodeQueries(Shared<char> exchange)
      : tile_(exchange + sizeof(ExchangeShared)) {}

  // FinishSegment parts the reads from the next Load.
  JAX_PAGED_DEVICE void Load(const AttentionArgs& args, const Segment& segment,
                             const UnitRows& rows, const LogitScale& scale) {
    FillQueryTile<T, HEAD_DIM>(args, segment, rows, scale, tile_);
  }
  JAX_PAGED_DEVICE void Operand(int32_t step, uint32_t (&a)[4]) const {
    QueryOperand<HEAD_DIM>(tile_, step, a);
  }

 private:
  Shared<char> tile_;
};

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_DECODE_QUERIES_CUH_
