// SPDX-License-Identifier: Apache-2.0

// Rope inside attention, for the kernels on tensor cores: rows of Q and of K are turned where they
// lie in shared memory, in place, each by one warp. Turned elements are rounded to their dtype: so
// the products are those of keys that were turned before they were written to the pages.
//
// A lane turns four elements at a time, two words of a row: those of the two halves (half style) or
// two that are side by side (interleaved). Angles come as pairs of floats, mostly from the L2
// cache; those of four rows are in flight at a time.

#ifndef JAX_PAGED_CUDA_ATTENTION_ROPE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_ROPE_CUH_

#include "cuda/attention/args.h"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/tensor_core.cuh"
#include "cuda/attention/traits.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// cos and sin of two neighbouring angles of a position; of the nearest one that the tables have.
struct TwoAngles {
  Float2 cos;
  Float2 sin;

  JAX_PAGED_DEVICE void Load(const AttentionArgs& args, int32_t position, int32_t first) {
    const int64_t at =
        int64_t{Clamp<int32_t>(position, 0, args.max_positions - 1)} * args.rope_half + first;
    cos = prim::LoadConst((args.cos + at).template As<const Float2>());
    sin = prim::LoadConst((args.sin + at).template As<const Float2>());
  }
};

template <typename T>
JAX_PAGED_DEVICE Float2 PairToFloats(uint32_t pair) {
  return {prim::ToFloat(T{static_cast<uint16_t>(pair & 0xffffu)}),
          prim::ToFloat(T{static_cast<uint16_t>(pair >> 16)})};
}

// Low halves of two words, then the high ones; and back.
JAX_PAGED_DEVICE void SwapHalves(uint32_t* x, uint32_t* y) {
  const uint32_t low = prim::PermuteBytes(*x, *y, 0x5410u);
  *y = prim::PermuteBytes(*x, *y, 0x7632u);
  *x = low;
}

// Turns a pair of first and one of second elements.
template <typename T>
JAX_PAGED_DEVICE void TurnPairs(const TwoAngles& by, uint32_t* first, uint32_t* second) {
  const Float2 a = PairToFloats<T>(*first);
  const Float2 b = PairToFloats<T>(*second);
  *first = prim::PackPair<T>(prim::Fma(-b.x, by.sin.x, a.x * by.cos.x),
                             prim::Fma(-b.y, by.sin.y, a.y * by.cos.y));
  *second = prim::PackPair<T>(prim::Fma(a.x, by.sin.x, b.x * by.cos.x),
                              prim::Fma(a.y, by.sin.y, b.y * by.cos.y));
}

// Turns ROWS rows of a tile, from `first_row` on. position_of(row) is where row `first_row` + row
// stands in its sequence. All lanes of a warp take part and see, after it, what the others have
// done; before it, they see the rows.
template <typename T, int HEAD_DIM, int ROWS, typename PositionOf>
JAX_PAGED_DEVICE void TurnRows(const AttentionArgs& args, Shared<char> tile, int32_t first_row,
                               PositionOf position_of) {
  constexpr int32_t kAtOnce = 4;
  static_assert(ROWS % kAtOnce == 0);
  const auto word_at = [tile](int32_t row, int32_t dim) {
    return (tile + (DecodeTraits<HEAD_DIM>::Offset(row, dim / 8) + dim % 8 * 2))
        .template As<uint32_t>();
  };
  JAX_PAGED_NO_UNROLL
  for (int32_t i = OpaqueLane(); i < args.rope_half / 2; i += kWarpLanes) {
    const int32_t first_dim = args.rope_interleaved ? 4 * i : 2 * i;
    const int32_t second_dim = args.rope_interleaved ? 4 * i + 2 : args.rope_half + 2 * i;
    JAX_PAGED_NO_UNROLL
    for (int32_t begin = 0; begin < ROWS; begin += kAtOnce) {
      TwoAngles by[kAtOnce];
      JAX_PAGED_UNROLL
      for (int32_t r = 0; r < kAtOnce; ++r) by[r].Load(args, position_of(begin + r), 2 * i);
      JAX_PAGED_UNROLL
      for (int32_t r = 0; r < kAtOnce; ++r) {
        const Shared<uint32_t> at = word_at(first_row + begin + r, first_dim);
        const Shared<uint32_t> second_at = word_at(first_row + begin + r, second_dim);
        uint32_t x = prim::Load(at);
        uint32_t y = prim::Load(second_at);
        if (args.rope_interleaved) SwapHalves(&x, &y);
        TurnPairs<T>(by[r], &x, &y);
        if (args.rope_interleaved) SwapHalves(&x, &y);
        prim::Store(at, x);
        prim::Store(second_at, y);
      }
    }
  }
  prim::SyncWarp();  // the turned rows
}

// Rows of Q, where they lie in a tile, `first_row` of which is packed row `first_row` of the unit.
template <typename T, int HEAD_DIM, int ROWS, bool TREES_AND_PINS>
JAX_PAGED_DEVICE void TurnQueries(const AttentionArgs& args, const Segment& segment,
                                  const UnitRows& rows, Shared<char> tile, int32_t first_row) {
  TurnRows<T, HEAD_DIM, ROWS>(args, tile, first_row, [&](int32_t row) {
    return QueryToken<TREES_AND_PINS>(args, segment, rows, first_row + row);
  });
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_ROPE_CUH_
