// SPDX-License-Identifier: Apache-2.0

// What a warp of the prefill kernel computes of a tile: logits, softmax, sums of V. And Q, on its
// way in.

#ifndef JAX_PAGED_CUDA_ATTENTION_PREFILL_TILE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_PREFILL_TILE_CUH_

#include <cstddef>
#include <type_traits>

#include "cuda/attention/args.h"
#include "cuda/attention/prefill_unit.cuh"
#include "cuda/attention/rope.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/tensor_core.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// A lane's part of a warp's result.
template <int HEAD_DIM>
struct PrefillState {
  static constexpr int32_t kRowTiles = PrefillTraits<HEAD_DIM>::kRowTiles;

  float o[kRowTiles][HEAD_DIM / 8][4];
  float m[kRowTiles][2];
  float l[kRowTiles][2];

  JAX_PAGED_DEVICE void Clear() {
    JAX_PAGED_UNROLL
    for (int32_t r = 0; r < kRowTiles; ++r) {
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < HEAD_DIM / 8; ++n) {
        o[r][n][0] = o[r][n][1] = o[r][n][2] = o[r][n][3] = 0.0f;
      }
      m[r][0] = m[r][1] = kNegativeInfinity;
      l[r][0] = l[r][1] = 0.0f;
    }
  }
};

// Puts the warp's rows of Q into its rows of shared memory.
template <typename T, int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE void FillQueries(const AttentionArgs& args, const LogitScale& scale) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Row = typename Traits::Row;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  JAX_PAGED_UNROLL_4
  for (int32_t i = OpaqueThread() % kWarpLanes; i < Traits::kWarpRows * Row::kRowChunks;
       i += kWarpLanes) {
    const int32_t row = first_row + i / Row::kRowChunks;
    const int32_t chunk = i % Row::kRowChunks;
    prim::Store((prim::SharedMemory() + Row::Offset(row, chunk)).template As<Word4>(),
                LoadQueries<T>(args, segment, unit.rows, scale, row, chunk));
  }
  if constexpr (DecodeTraits<HEAD_DIM, PAGES>::kTakesRope) {
    if (args.cos) {
      prim::SyncWarp();  // the warp's rows
      TurnQueries<T, HEAD_DIM, Traits::kWarpRows,
                  DecodeTraits<HEAD_DIM, PAGES>::kTakesTreesAndPins>(
          args, segment, unit.rows, prim::SharedMemory(), first_row);
    }
  }
}

// S = Q K^T of the warp's rows with one tile.
template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillScores(
    Shared<char> k_tile,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  JAX_PAGED_UNROLL
  for (int32_t k = 0; k < HEAD_DIM / 16; ++k) {
    uint32_t a[Traits::kRowTiles][4];
    JAX_PAGED_UNROLL
    for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
      prim::LoadMatrix(a[r], prim::SharedMemory() +
                                 Traits::StepOffset(first_row + r * 16 + lane % 16, k, lane / 16));
    }
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < Traits::kTokens / 16; ++n) {
      uint32_t b[4];  // tokens 0-7 and 8-15, each dimensions 0-7 and 8-15 of the step
      const int32_t token = n * 16 + lane % 8 + lane / 16 * 8;
      prim::LoadMatrix(b, k_tile + Traits::StepOffset(token, k, lane / 8 % 2));
      JAX_PAGED_UNROLL
      for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
        prim::Mma<T>(s[r][2 * n], a[r], b[0], b[1]);
        prim::Mma<T>(s[r][2 * n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// Multiplies the warp's products with the scales of a tile's tokens.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillApply(
    Shared<float> scales,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t column = OpaqueThread() % 4 * 2;
  JAX_PAGED_UNROLL
  for (int32_t n = 0; n < Traits::kTokens / 8; ++n) {
    const Float2 of = prim::Load((scales + (n * 8 + column)).template As<Float2>());
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 2 * Traits::kRowTiles; ++i) {
      s[i / 2][n][i % 2 * 2] *= of.x;
      s[i / 2][n][i % 2 * 2 + 1] *= of.y;
    }
  }
}

// Of a power of two.
JAX_PAGED_DEVICE float Reciprocal(float power) {
  return prim::BitCast<float>((254u << 23) - prim::BitCast<uint32_t>(power));
}

template <int HEAD_DIM>
JAX_PAGED_DEVICE void ScaleValues(float factor, PrefillState<HEAD_DIM>* state) {
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < PrefillState<HEAD_DIM>::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < HEAD_DIM / 8; ++n) {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) state->o[r][n][i] *= factor;
    }
  }
}

// What the warp's O is in units of, with scales of V per token.
template <int HEAD_DIM>
JAX_PAGED_DEVICE Shared<float> ValueUnit() {
  using Traits = PrefillTraits<HEAD_DIM>;
  return Traits::template Field<float>(offsetof(typename Traits::State, v_scale)) +
         OpaqueThread() / kWarpLanes;
}

// Scales of V per token: O is in units of the power of two at or above all of them so far, so that
// the weights times scales stay within the range of f16. Before a tile's softmax.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void RaiseUnit(Shared<float> scales, PrefillState<HEAD_DIM>* state) {
  const float old = prim::Load(ValueUnit<HEAD_DIM>());
  float top = old;
  JAX_PAGED_UNROLL
  for (int32_t i = 0; i < PrefillTraits<HEAD_DIM>::kTokens; i += kWarpLanes) {
    const float scale = prim::Load(scales + (i + OpaqueThread() % kWarpLanes));
    top = prim::Max(top, prim::Max(scale, -scale));
  }
  JAX_PAGED_UNROLL
  for (int32_t step = 1; step < kWarpLanes; step *= 2) {
    top = prim::Max(top, prim::ShuffleXor(top, step));
  }
  // At most 2^126, so that the reciprocal is normal.
  uint32_t bits = (prim::BitCast<uint32_t>(top) + 0x7fffffu) & 0x7f800000u;
  if (bits > 253u << 23) bits = 253u << 23;
  const float unit = prim::BitCast<float>(bits);
  if (unit == old) return;
  ScaleValues(old * Reciprocal(unit), state);
  prim::SyncWarp();  // all have read it
  if (OpaqueThread() % kWarpLanes == 0) prim::Store(ValueUnit<HEAD_DIM>(), unit);
  prim::SyncWarp();
}

// Multiplies the warp's products.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void MultiplyScores(
    float factor,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < Traits::kTokens / 8; ++n) {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) s[r][n][i] *= factor;
    }
  }
}

// Products become logits, where that takes more than a factor.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillEdit(
    const AttentionArgs& args, int32_t first_token,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  Segment segment = PrefillSegment(unit);
  segment.tree_size = 0;  // where ALiBi asks for it the decode kernel takes the row (select.h)
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      EditLogits</*TREES_AND_PINS=*/false>(args, segment, unit.rows,
                                           first_row + r * 16 + half * 8 + lane / 4, half,
                                           first_token + lane % 4 * 2, s[r]);
    }
  }
}

// Scores become weights times 2^LIFT; m, l and O move on.
template <int HEAD_DIM, int LIFT>
JAX_PAGED_DEVICE void PrefillSoftmax(
    float scale,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4],
    PrefillState<HEAD_DIM>* state) {
  using Traits = PrefillTraits<HEAD_DIM>;
  float keep[Traits::kRowTiles][2];
  bool moves = false;
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      keep[r][half] = SoftmaxStep<LIFT>(scale, half, s[r], &state->m[r][half], &state->l[r][half]);
      moves = moves || keep[r][half] != 1.0f;
    }
  }
  if (prim::Ballot(moves) == 0) return;
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < HEAD_DIM / 8; ++n) {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) state->o[r][n][i] *= keep[r][i / 2];
    }
  }
}

// O += P V. `scales`: of V per token (8-bit pages), with which P is multiplied; else not looked at.
template <typename T, int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE void PrefillValues(
    Shared<char> v_tile, bool has_scales, Shared<float> scales,
    const float (&p)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4],
    PrefillState<HEAD_DIM>* state) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Weight = std::conditional_t<PAGES == PageKind::kEightBit, Float16, T>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  JAX_PAGED_UNROLL
  for (int32_t k = 0; k < Traits::kTokens / 16; ++k) {
    uint32_t a[Traits::kRowTiles][4];
    JAX_PAGED_UNROLL
    for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
      PackWeights<Weight>(p[r][2 * k], p[r][2 * k + 1], a[r]);
    }
    if (PAGES == PageKind::kEightBit && has_scales) {
      const float factor = Reciprocal(prim::Load(ValueUnit<HEAD_DIM>()));
      const Shared<float> of = scales + (k * 16 + lane % 4 * 2);
      const Float2 x = prim::Load(of.template As<Float2>());
      const Float2 y = prim::Load((of + 8).template As<Float2>());
      JAX_PAGED_UNROLL
      for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
        float scaled[2][4];
        JAX_PAGED_UNROLL
        for (int32_t i = 0; i < 8; ++i) {
          const Float2 of_tokens = i < 4 ? x : y;
          scaled[i / 4][i % 4] =
              p[r][2 * k + i / 4][i % 4] * ((i % 2 == 0 ? of_tokens.x : of_tokens.y) * factor);
        }
        PackWeights<Weight>(scaled[0], scaled[1], a[r]);
      }
    }
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < HEAD_DIM / 16; ++n) {
      uint32_t b[4];  // dimensions 0-7 and 8-15 of the step, each tokens 0-7 and 8-15
      if constexpr (PAGES == PageKind::kVllm5d) {
        const int32_t dim = n * 16 + lane % 8 + lane / 16 * 8;
        prim::LoadMatrix(b, v_tile + Traits::TransposedOffset(dim, 2 * k + lane / 8 % 2));
      } else {
        prim::LoadMatrixTransposed(b,
                                   v_tile + Traits::StepOffset(k * 16 + lane % 16, n, lane / 16));
      }
      JAX_PAGED_UNROLL
      for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
        prim::Mma<Weight>(state->o[r][2 * n], a[r], b[0], b[1]);
        prim::Mma<Weight>(state->o[r][2 * n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_PREFILL_TILE_CUH_
