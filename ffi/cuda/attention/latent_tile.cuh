// SPDX-License-Identifier: Apache-2.0

// What a warp of the latent kernel computes of a tile of 32 tokens: its part of the scores, then
// the softmax of its rows, then its columns of P V.

#ifndef JAX_PAGED_CUDA_ATTENTION_LATENT_TILE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_LATENT_TILE_CUH_

#include "cuda/attention/args.h"
#include "cuda/attention/latent_loader.cuh"
#include "cuda/attention/latent_traits.h"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/tensor_core.cuh"
#include "cuda/expand_bytes.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// A lane's part of its warp's result: of each 16 rows l/4 and l/4 + 8, and of each 8 of its columns
// two. The warps beside each other over the columns have the same m and l.
template <int ROWS, bool EIGHT_BIT>
struct LatentState {
  using Traits = LatentTraits<ROWS, EIGHT_BIT>;
  static constexpr int32_t kTiles = Traits::kValueDims / 8;

  float o[Traits::kRowTiles][kTiles][4];
  float m[Traits::kRowTiles][2];
  float l[Traits::kRowTiles][2];

  JAX_PAGED_DEVICE void Clear() {
    JAX_PAGED_UNROLL
    for (int32_t t = 0; t < Traits::kRowTiles; ++t) {
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < kTiles; ++n) {
        o[t][n][0] = o[t][n][1] = o[t][n][2] = o[t][n][3] = 0.0f;
      }
      m[t][0] = m[t][1] = kNegativeInfinity;
      l[t][0] = l[t][1] = 0.0f;
    }
  }
  JAX_PAGED_DEVICE static int32_t FirstRow() {
    return prim::WarpIndex() / Traits::kValueWarps * 16 * Traits::kRowTiles;
  }
  JAX_PAGED_DEVICE static int32_t FirstDim() {
    return prim::WarpIndex() % Traits::kValueWarps * Traits::kValueDims;
  }
};

// The packed rows' queries, with the sign of sm_scale, zeros beyond them.
template <int ROWS>
JAX_PAGED_DEVICE void FillLatentQueries(const AttentionArgs& args, const LatentJob& job,
                                        const LogitScale& scale, Shared<char> queries) {
  const uint32_t sign = scale.is_negative ? 0x80008000u : 0u;
  const int32_t lane = prim::LaneIndex();
  const int32_t row_chunks = args.head_dim / 8;
  const int32_t filled = RoundUp<int32_t>(args.head_dim, kLatentStep) / 8;
  JAX_PAGED_NO_UNROLL
  for (int32_t row = prim::WarpIndex(); row < ROWS; row += kLatentWarps) {
    const bool has_row = row < job.rows.count && !scale.is_zero;
    const int64_t head = has_row ? HeadIndex(args, job.segment, job.rows, row) : 0;
    const Global<const char> source = args.q + head * args.head_dim * 2;
    JAX_PAGED_UNROLL
    for (int32_t first = 0; first < kMaxLatentDim / 8; first += kWarpLanes) {
      const int32_t chunk = first + lane;
      if (chunk >= filled) continue;
      Word4 x = {0, 0, 0, 0};
      if (has_row && chunk < row_chunks) {
        x = prim::LoadConst((source + chunk * 16).template As<const Word4>());
        x = {x.x ^ sign, x.y ^ sign, x.z ^ sign, x.w ^ sign};
      }
      prim::Store((queries + LatentOffset(row, chunk)).template As<Word4>(), x);
    }
  }
}

// A stage's bytes as 16-bit elements.
template <typename T, typename Stored>
JAX_PAGED_DEVICE void ExpandLatentAs(const AttentionArgs& args, Shared<char> stage,
                                     Shared<char> tile) {
  const int32_t row_chunks = RoundUp<int32_t>(args.head_dim, kLatentStep) / 16;
  JAX_PAGED_NO_UNROLL
  for (int32_t i = prim::ThreadIndex(); i < kLatentTokens * row_chunks; i += kLatentThreads) {
    const int32_t row = i % kLatentTokens;
    const int32_t chunk = i / kLatentTokens;
    const Word4 bytes =
        prim::Load((stage + (row * kMaxLatentDim + chunk * 16)).template As<Word4>());
    const Pairs x[4] = {Expand<T>(bytes.x, Stored()), Expand<T>(bytes.y, Stored()),
                        Expand<T>(bytes.z, Stored()), Expand<T>(bytes.w, Stored())};
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      prim::Store(
          (tile + LatentOffset(row, 2 * chunk + half)).template As<Word4>(),
          Word4{x[2 * half].low, x[2 * half].high, x[2 * half + 1].low, x[2 * half + 1].high});
    }
  }
}

template <typename T>
JAX_PAGED_DEVICE void ExpandLatent(const AttentionArgs& args, Shared<char> stage,
                                   Shared<char> tile) {
  WithStored(args.kv_dtype,
             [&](auto stored) { ExpandLatentAs<T, decltype(stored)>(args, stage, tile); });
}

// The warp's 16 rows times `first_group` and, where it has two, the next group of 8 tokens.
template <typename T, int GROUPS>
JAX_PAGED_DEVICE void LatentProducts(const AttentionArgs& args, Shared<char> queries,
                                     Shared<char> tile, int32_t first_row, int32_t first_group,
                                     float (&s)[GROUPS][4]) {
  static_assert(GROUPS <= 2);
  const int32_t lane = prim::LaneIndex();
  const int32_t steps = CeilDiv<int32_t>(args.head_dim, kLatentStep);
  float odd[GROUPS][4] = {};  // two chains of mma, so that they wait less for each other
  JAX_PAGED_UNROLL_2
  for (int32_t step = 0; step < steps; ++step) {
    uint32_t b[GROUPS][4];  // dimensions 0-7, 8-15, 16-23, 24-31 of the step
    JAX_PAGED_UNROLL
    for (int32_t group = 0; group < GROUPS; ++group) {
      prim::LoadMatrix(
          b[group], tile + LatentOffset((first_group + group) * 8 + lane % 8, 4 * step + lane / 8));
    }
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      uint32_t a[4];
      prim::LoadMatrix(
          a, queries + LatentOffset(first_row + lane % 16, 4 * step + 2 * half + lane / 16));
      JAX_PAGED_UNROLL
      for (int32_t group = 0; group < GROUPS; ++group) {
        prim::Mma<T>(half == 0 ? s[group] : odd[group], a, b[group][2 * half],
                     b[group][2 * half + 1]);
      }
    }
  }
  JAX_PAGED_UNROLL
  for (int32_t i = 0; i < 4 * GROUPS; ++i) s[i / 4][i % 4] += odd[i / 4][i % 4];
}

// Computes the warp's part of the scores of the tile at `first_token` and leaves it in shared
// memory, -inf where a row does not see a token. `masks`: of the tokens that exist, 4 a word.
template <typename T, int ROWS, bool EIGHT_BIT>
JAX_PAGED_DEVICE void LatentScores(const AttentionArgs& args, const LatentJob& job,
                                   const KeyRange& seen_by_all, int32_t first_token, float k_scale,
                                   Shared<char> queries, Shared<char> tile, Shared<uint32_t> masks,
                                   Shared<float> scores) {
  using Traits = LatentTraits<ROWS, EIGHT_BIT>;
  const int32_t first_group = prim::WarpIndex() % Traits::kScoreWarps * Traits::kGroups;
  if (first_group >= Traits::kTokenGroups) return;  // fewer groups than warps
  const int32_t lane = prim::LaneIndex();
  const int32_t first_row = prim::WarpIndex() / Traits::kScoreWarps * 16;
  float s[Traits::kGroups][4] = {};
  LatentProducts<T>(args, queries, tile, first_row, first_group, s);
  JAX_PAGED_UNROLL
  for (int32_t group = 0; group < Traits::kGroups; ++group) {
    const int32_t in_tile = (first_group + group) * 8;
    const uint32_t exists = prim::Load(masks + in_tile / 4) & 0xfu;
    const uint32_t also = prim::Load(masks + (in_tile / 4 + 1)) & 0xfu;
    const uint32_t mask = exists | also << 4;
    const int32_t token = first_token + in_tile;
    const bool sees_all =
        mask == 0xffu && token >= seen_by_all.first && token + 8 <= seen_by_all.end;
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = first_row + lane / 4 + 8 * half;
      const int32_t column = lane % 4 * 2;
      Float2 x = {s[group][2 * half] * k_scale, s[group][2 * half + 1] * k_scale};
      if (!sees_all) {
        const KeyRange keys = LatentKeys(args, job, row);
        if (!(mask >> column & 1) || !keys.Contains(token + column)) x.x = kNegativeInfinity;
        if (!(mask >> (column + 1) & 1) || !keys.Contains(token + column + 1)) {
          x.y = kNegativeInfinity;
        }
      }
      prim::Store((scores + (row * kScorePitch + in_tile + column)).template As<Float2>(), x);
    }
  }
}

// The softmax of the warp's rows, and its columns of O move on by the tile.
template <typename T, int ROWS, bool EIGHT_BIT>
JAX_PAGED_DEVICE void LatentValues(const AttentionArgs& args, float scale, Shared<float> scores,
                                   Shared<char> tile, LatentState<ROWS, EIGHT_BIT>* state) {
  using Traits = LatentTraits<ROWS, EIGHT_BIT>;
  constexpr int32_t kSteps = kLatentTokens / 16;
  const int32_t lane = prim::LaneIndex();
  uint32_t a[Traits::kRowTiles][kSteps][4];
  JAX_PAGED_UNROLL
  for (int32_t t = 0; t < Traits::kRowTiles; ++t) {
    float s[Traits::kTokenGroups][4];
    float keep[2];
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = state->FirstRow() + t * 16 + lane / 4 + 8 * half;
      JAX_PAGED_UNROLL
      for (int32_t group = 0; group < Traits::kTokenGroups; ++group) {
        const int32_t at = row * kScorePitch + group * 8 + lane % 4 * 2;
        const Float2 x = prim::Load((scores + at).template As<Float2>());
        s[group][2 * half] = x.x;
        s[group][2 * half + 1] = x.y;
      }
      keep[half] = SoftmaxStep(scale, half, s, &state->m[t][half], &state->l[t][half]);
    }
    if (prim::Ballot(keep[0] != 1.0f || keep[1] != 1.0f)) {
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < state->kTiles; ++n) {
        JAX_PAGED_UNROLL
        for (int32_t i = 0; i < 4; ++i) state->o[t][n][i] *= keep[i / 2];
      }
    }
    JAX_PAGED_UNROLL
    for (int32_t step = 0; step < kSteps; ++step) {
      PackWeights<T>(s[2 * step], s[2 * step + 1], a[t][step]);
    }
  }
  const int32_t first_dim = state->FirstDim();
  JAX_PAGED_UNROLL
  for (int32_t step = 0; step < kSteps; ++step) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < state->kTiles; n += 2) {
      if (first_dim + n * 8 >= args.v_head_dim) continue;
      uint32_t b[4];  // dimensions 0-7 and 8-15, each tokens 0-7 and 8-15
      prim::LoadMatrixTransposed(
          b, tile + LatentOffset(step * 16 + lane % 16, first_dim / 8 + n + lane / 16));
      JAX_PAGED_UNROLL
      for (int32_t t = 0; t < Traits::kRowTiles; ++t) {
        prim::Mma<T>(state->o[t][n], a[t][step], b[0], b[1]);
        prim::Mma<T>(state->o[t][n + 1], a[t][step], b[2], b[3]);
      }
    }
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_LATENT_TILE_CUH_
