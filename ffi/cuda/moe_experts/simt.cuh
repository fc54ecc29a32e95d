// SPDX-License-Identifier: Apache-2.0

// The two grouped products of moe_experts on plain multiply-adds: f32, and what gemm.cuh does not
// take (8-bit experts whose rows are no whole chunks of 16 bytes).
//
// Grid: persistent CTAs of 4 warps; a warp's item is a tile of the plan (up to 8 pairs of one
// expert) and 8 pairs of rows of its weights: row i of gate and of up, or rows 2i and 2i + 1 of
// down. A pair of rows at a time, a lane takes 8 of every 256 of the depth, for all tokens, and the
// lanes add up by shuffles. No shared memory; x and h come from L1 but for the first row. The order
// of a sum depends on the depth alone.
//
// Bound by memory up to some 8 tokens per expert; beyond, weights come again from L2 for every 8.

#ifndef JAX_PAGED_CUDA_MOE_EXPERTS_SIMT_CUH_
#define JAX_PAGED_CUDA_MOE_EXPERTS_SIMT_CUH_

#include <cstdint>
#include <type_traits>

#include "common/integers.h"
#include "cuda/moe_experts/args.h"
#include "cuda/moe_experts/gemm.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

inline constexpr int32_t kMoeSimtRowPairs = 8;  // of an item
inline constexpr int32_t kMoeSimtDepth = 8;     // that a lane takes at once

// kMoeSimtDepth neighbours as floats, from an address aligned to 8 bytes, or to 16.
template <typename T>
JAX_PAGED_DEVICE void LoadEight(Global<const char> from, float (&x)[8]) {
  using Word = std::conditional_t<sizeof(T) == 1, Word2, Word4>;
  constexpr int32_t kElements = static_cast<int32_t>(sizeof(Word) / sizeof(T));
  struct Elements {
    T of[kElements];
  };
  JAX_PAGED_UNROLL
  for (int32_t i = 0; i < 8; i += kElements) {
    const Global<const char> part = from + i * int64_t{sizeof(T)};
    const Elements in = prim::BitCast<Elements>(prim::LoadConst(part.template As<const Word>()));
    JAX_PAGED_UNROLL
    for (int32_t j = 0; j < kElements; ++j) x[i + j] = prim::ToFloat(in.of[j]);
  }
}

template <typename T>
JAX_PAGED_DEVICE void StoreAs(Global<char> to, float x) {
  if constexpr (std::is_same_v<T, float>) {
    prim::Store(to.template As<float>(), x);
  } else {
    const uint32_t pair = prim::PackPair<T>(x, 0.0f);
    prim::Store(to.template As<T>(), T{static_cast<uint16_t>(pair)});
  }
}

template <typename T, typename W, bool IS_GATED>
JAX_PAGED_DEVICE void MoeSimtCta(const MoeArgs& args) {
  const MoeProduct<IS_GATED> product(args);
  const int32_t row_pairs = IS_GATED ? product.num_rows : product.num_rows / 2;
  const int32_t blocks = CeilDiv<int32_t>(row_pairs, kMoeSimtRowPairs);
  const Global<const int32_t> num_tiles = args.num_tiles, pairs = args.pairs;
  const Global<const char> source = IS_GATED ? args.x : Global<const char>(args.h);
  const float limit = IS_GATED ? MoeLimit(args) : 0.0f;
  const int32_t num_items = prim::LoadConst(num_tiles) * blocks;
  const int32_t warps = kMoeThreads / kWarpLanes, lane = prim::LaneIndex();
  for (int32_t i = prim::BlockIndex() * warps + prim::WarpIndex(); i < num_items;
       i += prim::GridSize() * warps) {
    const MoeTile tile = prim::LoadConst((args.tiles + i / blocks).template As<const MoeTile>());
    int32_t pair_of[kMoeSimtTokens], row_of[kMoeSimtTokens];  // of the token: its row of x or h
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < kMoeSimtTokens; ++n) {
      const bool is_token = n < tile.count;
      pair_of[n] = is_token ? prim::LoadConst(pairs + (tile.first + n)) : 0;
      row_of[n] = IS_GATED ? pair_of[n] / args.experts_per_token : is_token ? tile.first + n : 0;
    }
    const int32_t first = i % blocks * kMoeSimtRowPairs;
    const int32_t last = first + kMoeSimtRowPairs;
    for (int32_t unit = first; unit < (last < row_pairs ? last : row_pairs); ++unit) {
      const int32_t rows[2] = {IS_GATED ? unit : 2 * unit,
                               IS_GATED ? product.num_rows + unit : 2 * unit + 1};
      float sums[2][kMoeSimtTokens] = {};
      for (int32_t d = lane * kMoeSimtDepth; d < product.depth; d += kWarpLanes * kMoeSimtDepth) {
        float w[2][8];
        JAX_PAGED_UNROLL
        for (int32_t r = 0; r < 2; ++r) {
          const int64_t element = product.WeightRow(tile.expert, rows[r]) * product.depth + d;
          LoadEight<W>(product.weights + element * int64_t{sizeof(W)}, w[r]);
        }
        float block_scale[2] = {1.0f, 1.0f};
        if (sizeof(W) == 1 && product.block_scale) {  // rows 2i and 2i + 1 are of one block
          block_scale[0] = product.BlockScale(tile.expert, 0, rows[0], d);
          block_scale[1] =
              IS_GATED ? product.BlockScale(tile.expert, 1, rows[0], d) : block_scale[0];
        }
        JAX_PAGED_UNROLL
        for (int32_t n = 0; n < kMoeSimtTokens; ++n) {
          if (n >= tile.count) break;
          float x[8];
          const int64_t element = int64_t{row_of[n]} * product.depth + d;
          LoadEight<T>(source + element * int64_t{sizeof(T)}, x);
          float part[2] = {};
          JAX_PAGED_UNROLL
          for (int32_t j = 0; j < 8; ++j) {
            part[0] = prim::Fma(w[0][j], x[j], part[0]);
            part[1] = prim::Fma(w[1][j], x[j], part[1]);
          }
          sums[0][n] = prim::Fma(part[0], block_scale[0], sums[0][n]);
          sums[1][n] = prim::Fma(part[1], block_scale[1], sums[1][n]);
        }
      }
      float scale[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f};
      if (product.scale || product.bias.data) {
        JAX_PAGED_UNROLL
        for (int32_t r = 0; r < 2; ++r) {
          const int64_t at = product.WeightRow(tile.expert, rows[r]);
          if (product.scale) scale[r] = prim::LoadConst(product.scale + at);
          if (product.bias.data) bias[r] = LoadMoeBias<T>(product.bias, at);
        }
      }
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < kMoeSimtTokens; ++n) {
        if (n >= tile.count) break;
        JAX_PAGED_UNROLL
        for (int32_t mask = kWarpLanes / 2; mask > 0; mask /= 2) {
          sums[0][n] += prim::ShuffleXor(sums[0][n], mask);
          sums[1][n] += prim::ShuffleXor(sums[1][n], mask);
        }
        if (lane != n) continue;
        const float first_sum = prim::Fma(sums[0][n], scale[0], bias[0]);
        const float second_sum = prim::Fma(sums[1][n], scale[1], bias[1]);
        if constexpr (IS_GATED) {
          const int64_t element = int64_t{tile.first + n} * product.num_rows + unit;
          StoreAs<T>(args.h + element * int64_t{sizeof(T)},
                     GatedUnit(args.activation, limit, first_sum, second_sum));
        } else {
          const int64_t element = int64_t{pair_of[n]} * product.num_rows + 2 * unit;
          prim::Store((args.y + element).template As<Float2>(), Float2{first_sum, second_sum});
        }
      }
    }
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MOE_EXPERTS_SIMT_CUH_
