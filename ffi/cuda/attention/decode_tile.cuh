// SPDX-License-Identifier: Apache-2.0

// What a warp of the decode kernel computes of its 16 tokens of a tile: logits, softmax, sums of V.

#ifndef JAX_PAGED_CUDA_ATTENTION_DECODE_TILE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_DECODE_TILE_CUH_

#include "cuda/attention/args.h"
#include "cuda/attention/decode_bytes.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/tensor_core.cuh"
#include "cuda/attention/traits.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// A lane's part of a warp's result: two rows, and of each 8 columns two.
template <int HEAD_DIM>
struct DecodeState {
  float o[HEAD_DIM / 8][4];
  float m[2];
  float l[2];
  float v_scale;  // what O is in units of: with scales of V per token the largest so far
                  // (l and O: also of 2^-DecodeTraits::kWeightLift)

  JAX_PAGED_DEVICE void Clear() {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < HEAD_DIM / 8; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    m[0] = m[1] = kNegativeInfinity;
    l[0] = l[1] = 0.0f;
    v_scale = 1.0f;
  }
};

// The scales of tokens `column` and `column` + 1 of each 8, from those of a stage's 16 tokens.
struct LaneScales {
  Float2 of[2];

  JAX_PAGED_DEVICE LaneScales(Shared<float> per_token, int32_t column) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < 2; ++n) of[n] = prim::Load((per_token + (n * 8 + column)).As<Float2>());
  }
  // Multiplies the lane's products or weights with them, and with `factor`.
  JAX_PAGED_DEVICE void Apply(float factor, float (&x)[2][4]) const {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < 2; ++n) {
      JAX_PAGED_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        x[n][2 * half] *= of[n].x * factor;
        x[n][2 * half + 1] *= of[n].y * factor;
      }
    }
  }
  // The largest of the 16 tokens, whatever their sign; all lanes take part.
  JAX_PAGED_DEVICE float Largest() const {
    float top = 0.0f;
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < 2; ++n) {
      top = prim::Max(top, prim::Max(prim::Max(of[n].x, -of[n].x), prim::Max(of[n].y, -of[n].y)));
    }
    top = prim::Max(top, prim::ShuffleXor(top, 1));
    return prim::Max(top, prim::ShuffleXor(top, 2));
  }
};

// Sets the scores to -inf of keys in the row's tree that are no ancestors of the query.
JAX_PAGED_DEVICE void MaskTree(const AttentionArgs& args, const Segment& segment,
                               const UnitRows& rows, int32_t first_token, float (&s)[2][4]) {
  const int32_t lane = OpaqueLane();
  const RowTree tree = segment.Tree();
  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    const int32_t packed = rows.first + lane / 4 + 8 * half;
    const TreeQuery query =
        FindQuery(args, tree, QueryPosition(segment.lengths, args.by_group_size(packed)));
    uint32_t seen = 0;
    JAX_PAGED_NO_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t key = first_token + i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (SeesKey(args, tree, query, key)) seen |= 1u << i;
    }
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      if (!(seen >> i & 1)) s[i / 2][2 * half + i % 2] = kNegativeInfinity;
    }
  }
}

// One warp tile of 16 tokens. `token_mask` says which of them exist; `sees_all`, that all rows of
// the unit see those. `scales`: of 8-bit pages, those of the stage's K and V per token.
template <typename T, int HEAD_DIM, PageKind PAGES, typename Queries>
JAX_PAGED_DEVICE void DecodeTile(const AttentionArgs& args, const Segment& segment,
                                 const UnitRows& rows, Shared<char> k_tile, uint32_t token_mask,
                                 int32_t first_token, bool sees_all, float scale,
                                 Shared<float> scales, const Queries& queries,
                                 DecodeState<HEAD_DIM>* state) {
  using Traits = DecodeTraits<HEAD_DIM, PAGES>;
  const int32_t lane = OpaqueLane();
  const int32_t column = lane % 4 * 2;

  float s[2][4] = {};  // 16 rows x 16 tokens
  if constexpr (Traits::kIsEightBit) {
    MultiplyByteKeys<HEAD_DIM>(args.kv_dtype, k_tile, lane, queries, s);
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 8; ++i) s[i / 4][i % 4] *= queries.Factor(i % 4 / 2, lane);
    if (args.k_scale.per_token) LaneScales(scales, column).Apply(1.0f, s);
  } else {
    JAX_PAGED_UNROLL
    for (int32_t k = 0; k < HEAD_DIM / 16; ++k) {
      uint32_t b[4];  // tokens 0-7 and 8-15, each dimensions 0-7 and 8-15 of the step
      const int32_t row = lane % 8 + lane / 16 * 8;
      prim::LoadMatrix(b, k_tile + Traits::Offset(row, 2 * k + lane / 8 % 2));
      uint32_t a[4];
      queries.Operand(k, a);
      prim::Mma<T>(s[0], a, b[0], b[1]);
      prim::Mma<T>(s[1], a, b[2], b[3]);
    }
  }

  if (args.logits.edits()) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      EditLogits<Traits::kTakesTreesAndPins>(args, segment, rows, lane / 4 + 8 * half, half,
                                             first_token + column, s);
    }
  }
  if (token_mask != 0xffffu || !sees_all) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const KeyRange keys =
          SeenKeys<Traits::kTakesTreesAndPins>(args, segment, rows, lane / 4 + 8 * half);
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < 2; ++n) {
        JAX_PAGED_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          const int32_t token = n * 8 + column + i;
          const bool is_seen =
              (token_mask >> token & 1) &&
              Sees<Traits::kTakesTreesAndPins>(args, segment, keys, first_token + token);
          if (!is_seen) s[n][2 * half + i] = kNegativeInfinity;
        }
      }
    }
  }

  if (segment.tree_size > 0 && !sees_all) MaskTree(args, segment, rows, first_token, s);

  float o_factor = 1.0f;
  if constexpr (Traits::kIsEightBit) {
    if (args.v_scale.per_token) {
      const float old = state->v_scale;
      state->v_scale = prim::Max(old, LaneScales(scales + kWarpTokens, column).Largest());
      o_factor = old / state->v_scale;
    }
  }
  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    const float keep =
        SoftmaxStep<Traits::kWeightLift>(scale, half, s, &state->m[half], &state->l[half]);
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < HEAD_DIM / 8; ++n) {
      state->o[n][2 * half] *= keep * o_factor;
      state->o[n][2 * half + 1] *= keep * o_factor;
    }
  }

  if constexpr (Traits::kIsEightBit) {
    const Shared<char> v_tile = k_tile + Traits::kByteTileBytes;
    if (args.v_scale.per_token) {
      LaneScales(scales + kWarpTokens, column).Apply(1.0f / state->v_scale, s);
      uint32_t p[2][4];
      PackWeights<Float16>(s[0], s[1], p[0]);
      // What that rounded away, where a scale does so even to the weight 1 of a lone key.
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        float (&x)[4] = s[i / 2];
        x[i % 2 * 2] -= prim::ToFloat(Float16{static_cast<uint16_t>(p[0][i] & 0xffffu)});
        x[i % 2 * 2 + 1] -= prim::ToFloat(Float16{static_cast<uint16_t>(p[0][i] >> 16)});
      }
      PackWeights<Float16>(s[0], s[1], p[1]);
      MultiplyByteValues<HEAD_DIM>(args.kv_dtype, v_tile, lane, p, state->o);
    } else {
      uint32_t p[1][4];
      PackWeights<Float16>(s[0], s[1], p[0]);
      MultiplyByteValues<HEAD_DIM>(args.kv_dtype, v_tile, lane, p, state->o);
    }
    return;
  }
  uint32_t a[4];
  PackWeights<T>(s[0], s[1], a);
  const Shared<char> v_tile = k_tile + Traits::kWarpTileBytes;
  uint32_t exists[2] = {};
  if constexpr (PAGES == PageKind::kVllm5d) {
    exists[0] = PairMask(token_mask, column);
    exists[1] = PairMask(token_mask, column + 8);
  }
  JAX_PAGED_UNROLL
  for (int32_t n = 0; n < HEAD_DIM / 16; ++n) {
    uint32_t b[4];  // dimensions 0-7 and 8-15 of the step, each tokens 0-7 and 8-15
    if constexpr (PAGES == PageKind::kVllm5d) {
      const int32_t dim = n * 16 + lane % 8 + lane / 16 * 8;
      prim::LoadMatrix(b, v_tile + Traits::TransposedOffset(dim, lane / 8 % 2));
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) b[i] &= exists[i % 2];
    } else {
      prim::LoadMatrixTransposed(b, v_tile + Traits::Offset(lane % 16, 2 * n + lane / 16));
    }
    prim::Mma<T>(state->o[2 * n], a, b[0], b[1]);
    prim::Mma<T>(state->o[2 * n + 1], a, b[2], b[3]);
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_DECODE_TILE_CUH_
