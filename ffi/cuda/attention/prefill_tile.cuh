// SPDX-License-Identifier: Apache-2.0

// What a warp of the prefill kernel computes of a tile: logits, softmax, sums of V. And Q, on its
// way in.

#ifndef JAX_PAGED_CUDA_ATTENTION_PREFILL_TILE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_PREFILL_TILE_CUH_

#include "cuda/attention/args.h"
#include "cuda/attention/prefill_unit.cuh"
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
template <typename T, int HEAD_DIM>
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
                LoadQueries<T, HEAD_DIM>(args, segment, unit.rows, scale, row, chunk));
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

// Products become logits, where that takes more than a factor.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillEdit(
    const AttentionArgs& args, int32_t first_token,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
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

// Sets the scores to -inf that the warp's rows do not see.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillMask(
    const AttentionArgs& args, Shared<uint32_t> token_masks, int32_t first_token,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      // Looked up for each row: kept, it would not fit in the registers of sm_80.
      const int32_t lane = OpaqueThread() % kWarpLanes;
      const PrefillUnit unit = LoadUnit<HEAD_DIM>();
      const int32_t first_row = FirstWarpRow<HEAD_DIM>();
      const int32_t row = first_row + r * 16 + half * 8 + lane / 4;
      KeyRange keys = UnitKeys(args, unit, row);
      keys.first -= first_token + lane % 4 * 2;
      keys.end -= first_token + lane % 4 * 2;
      JAX_PAGED_UNROLL
      for (int32_t word = 0; word < Traits::kMaskWords; ++word) {
        const uint32_t mask = prim::Load(token_masks + word) >> lane % 4 * 2;
        JAX_PAGED_UNROLL
        for (int32_t n = 0; n < 4; ++n) {
          JAX_PAGED_UNROLL
          for (int32_t i = 0; i < 2; ++i) {
            const bool is_seen = (mask >> (n * 8 + i) & 1) && keys.Contains(word * 32 + n * 8 + i);
            if (!is_seen) s[r][word * 4 + n][2 * half + i] = kNegativeInfinity;
          }
        }
      }
    }
  }
}

// Scores become weights; m, l and O move on.
template <int HEAD_DIM>
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
      keep[r][half] = SoftmaxStep(scale, half, s[r], &state->m[r][half], &state->l[r][half]);
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

// O += P V.
template <typename T, int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE void PrefillValues(
    Shared<char> v_tile,
    const float (&p)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4],
    PrefillState<HEAD_DIM>* state) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  JAX_PAGED_UNROLL
  for (int32_t k = 0; k < Traits::kTokens / 16; ++k) {
    uint32_t a[Traits::kRowTiles][4];
    JAX_PAGED_UNROLL
    for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
      PackWeights<T>(p[r][2 * k], p[r][2 * k + 1], a[r]);
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
        prim::Mma<T>(state->o[r][2 * n], a[r], b[0], b[1]);
        prim::Mma<T>(state->o[r][2 * n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_PREFILL_TILE_CUH_
