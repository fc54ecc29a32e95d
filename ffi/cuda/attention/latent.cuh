// SPDX-License-Identifier: Apache-2.0

// Attention on latent rows (MLA), on tensor cores (bf16, f16; rows of 16 or 8 bits): one stored row
// of up to 576 elements is K of all heads, and its first 512 are V.
//
// Packed rows are a token's query heads, for several tokens one after the other. A CTA of 8 warps
// has ROWS of them, 16, 32 or 64, and takes 32 tokens at a time, which it reads once for both
// products: O of 64 rows and 512 columns just fits in the registers of 8 warps, 128 a lane.
//   warp   of S = Q K^T 16 rows and 16 tokens (8, where a CTA has fewer than 64 rows; of 16 rows
//          four warps do it all), of O = P V 32 rows (16) and 128 columns (64)
//   lane   rows l/4 and l/4 + 8; of each 8 columns the two at 2(l%4)
// Pipeline, per tile:
//   1. wait for the tile's cp.async, syncthreads   the tile is there for all; the stage of the tile
//                                                  before, and its scores, have been read
//   2. issue the tile that is stages - 1 ahead into that stage
//   3. 8-bit rows: widen the stage's bytes into a tile of 16-bit elements, syncthreads
//   4. S, masked, to shared memory, syncthreads
//   5. each warp: the softmax in log2 of all 32 tokens of its rows (the warps beside it compute the
//      same), O = O a + P V; K and V by ldmatrix from the same tile
// No warp adds to what another has; O leaves through shared memory, by whole rows.
//
// Two kinds of launch (args.prefill_rows of each tells the planner which rows it may list). The
// first walks the pieces of stream-K ranges (plan.cuh), for rows with few packed rows. The second
// draws prefill units of up to 64 packed rows, longest first; tokens that the last query of a unit
// does not see are not read.
//
// A row is filled with zeros to a multiple of 32 elements. Where the tables name no page the tile
// is zero and masked.
//
// Shared memory: ROWS x 1152 bytes for Q, 36 KiB a stage (8-bit: 18 KiB, and 36 KiB once), ROWS x
// 160 for the scores: 226 KiB of 227 for 64 rows and 4 stages. One CTA per multiprocessor.
// Bound by memory bandwidth for 16 heads, by the rate of mma.sync for 128: docs/kernels.md.
// FlashMLA (V is the front of K in shared memory, columns over warps).

#ifndef JAX_PAGED_CUDA_ATTENTION_LATENT_CUH_
#define JAX_PAGED_CUDA_ATTENTION_LATENT_CUH_

#include <cstddef>

#include "cuda/attention/args.h"
#include "cuda/attention/decode_tile.cuh"
#include "cuda/attention/latent_loader.cuh"
#include "cuda/attention/latent_tile.cuh"
#include "cuda/attention/latent_traits.h"
#include "cuda/attention/prefill_unit.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Computes a job; its result is in *state. Begins with all warps done with shared memory.
template <typename T, int ROWS, bool EIGHT_BIT>
JAX_PAGED_DEVICE void LatentTiles(const AttentionArgs& args, const LatentJob& job,
                                  LatentState<ROWS, EIGHT_BIT>* state) {
  using Traits = LatentTraits<ROWS, EIGHT_BIT>;
  const int32_t stages = args.stages;
  const Shared<char> queries = prim::SharedMemory();
  const Shared<char> ring = queries + Traits::kRingOffset;
  const Shared<float> scores = (queries + Traits::ScoresOffset(stages)).template As<float>();
  const Shared<uint32_t> masks = (queries + Traits::MasksOffset(stages)).template As<uint32_t>();
  const LogitScale scale = LoadScale(args);
  const float k_scale = EIGHT_BIT ? HeadScale(args.k_scale, job.rows.kv_head) : 1.0f;
  const KeyRange seen_by_all = {LatentKeys(args, job, job.rows.count - 1).first,
                                LatentKeys(args, job, 0).end};

  LatentLoader<EIGHT_BIT> loader(args, job, ring, masks);
  for (int32_t i = 0; i < stages - 1; ++i) loader.Issue(args, i);
  FillLatentQueries<ROWS>(args, job, scale, queries);
  state->Clear();
  int32_t stage = 0;
  const int32_t num_tiles = job.NumTiles();
  JAX_PAGED_NO_UNROLL
  for (int32_t i = 0; i < num_tiles; ++i) {
    prim::CpAsyncWait(stages - 2);
    // The tile, and before the first one the queries, are there; the stage, the scores and the
    // widened tile of the tile before have been read.
    prim::SyncThreads();
    loader.Issue(args, stage == 0 ? stages - 1 : stage - 1);
    Shared<char> tile = ring + stage * Traits::kStageBytes;
    if constexpr (EIGHT_BIT) {
      const Shared<char> expanded = queries + Traits::kExpandedOffset;
      ExpandLatent<T>(args, tile, expanded);
      tile = expanded;
      prim::SyncThreads();  // the widened tile
    }
    LatentScores<T, ROWS, EIGHT_BIT>(args, job, seen_by_all, job.begin + i * kLatentTokens, k_scale,
                                     queries, tile, masks + stage * kLatentWarps, scores);
    prim::SyncThreads();  // the scores
    LatentValues<T, ROWS, EIGHT_BIT>(args, scale.factor, scores, tile, state);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
}

// What takes the place of the scores when a job ends.
template <int ROWS>
struct LatentEnd {
  MergeShared<kLatentThreads> merge;
  float m[ROWS];
  float l[ROWS];
};

// Puts a job's result into shared memory.
template <int ROWS, bool EIGHT_BIT>
JAX_PAGED_DEVICE void KeepLatent(const AttentionArgs& args,
                                 const LatentState<ROWS, EIGHT_BIT>& state) {
  using Traits = LatentTraits<ROWS, EIGHT_BIT>;
  using End = LatentEnd<ROWS>;
  static_assert(sizeof(End) <= Traits::kScoreBytes);
  static_assert(ROWS * kSumPitch * 4 <= Traits::ScoresOffset(kMinStages));
  const int32_t lane = prim::LaneIndex();
  const Shared<float> sums = prim::SharedMemory().As<float>();
  const Shared<char> end = prim::SharedMemory() + Traits::ScoresOffset(args.stages);
  const Shared<float> ms = (end + offsetof(End, m)).template As<float>();
  const Shared<float> ls = (end + offsetof(End, l)).template As<float>();
  // Of V; that of K is in the scores.
  const float v_scale = EIGHT_BIT ? HeadScale(args.v_scale, /*kv_head=*/0) : 1.0f;
  prim::SyncThreads();  // tiles and scores have been read
  JAX_PAGED_UNROLL
  for (int32_t t = 0; t < Traits::kRowTiles; ++t) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = state.FirstRow() + t * 16 + lane / 4 + 8 * half;
      float l = state.l[t][half];
      l += prim::ShuffleXor(l, 1);
      l += prim::ShuffleXor(l, 2);
      if (state.FirstDim() == 0 && lane % 4 == 0) {
        prim::Store(ms + row, state.m[t][half]);
        prim::Store(ls + row, l);
      }
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < state.kTiles; ++n) {
        const float (&o)[4] = state.o[t][n];
        const int32_t at = row * kSumPitch + state.FirstDim() + n * 8 + lane % 4 * 2;
        prim::Store((sums + at).template As<Float2>(),
                    Float2{o[2 * half] * v_scale, o[2 * half + 1] * v_scale});
      }
    }
  }
  prim::SyncThreads();  // O, m and l
}

// Sends it from there to where it goes, so that whole rows leave at a time.
template <typename T, int ROWS, bool EIGHT_BIT>
JAX_PAGED_DEVICE void SendLatent(const AttentionArgs& args, const LatentJob& job,
                                 const Destination& to) {
  using End = LatentEnd<ROWS>;
  const Shared<float> sums = prim::SharedMemory().As<float>();
  const Shared<char> end =
      prim::SharedMemory() + LatentTraits<ROWS, EIGHT_BIT>::ScoresOffset(args.stages);
  const Shared<float> ms = (end + offsetof(End, m)).template As<float>();
  const Shared<float> ls = (end + offsetof(End, l)).template As<float>();
  const int32_t row_quads = args.v_head_dim / 4;
  for (int32_t i = prim::ThreadIndex(); i < job.rows.count * row_quads; i += kLatentThreads) {
    const int32_t row = i / row_quads;
    const int32_t column = (i - row * row_quads) * 4;
    const Float4 four = prim::Load((sums + (row * kSumPitch + column)).template As<Float4>());
    const float m = prim::Load(ms + row), l = prim::Load(ls + row);
    RowWriter<T, ROWS>(args, job.segment, job.rows, to, row, m, l, /*with_ml=*/column == 0)
        .Write(args, column, four);
  }
}

// The CTA's range of pieces.
template <typename T, int ROWS, bool EIGHT_BIT>
JAX_PAGED_DEVICE void LatentCta(const AttentionArgs& args) {
  using Traits = LatentTraits<ROWS, EIGHT_BIT>;
  WorkRange range = MyRange(args);
  if (range.begin >= range.end) return;
  LatentJob job;
  if (!FirstSegment</*TREES_AND_PINS=*/false>(args, range, &job.segment)) return;
  do {
    job.rows = RowsOf<ROWS>(args, job.segment);
    job.begin = TileToken</*TREES_AND_PINS=*/false>(args, job.segment, 0);
    job.end = job.begin + job.segment.num_tiles * kTileTokens;
    const int32_t seen = LatentKeys(args, job, job.rows.count - 1).end;
    if (job.end > seen) job.end = seen;
    LatentState<ROWS, EIGHT_BIT> state;
    LatentTiles<T, ROWS, EIGHT_BIT>(args, job, &state);
    KeepLatent<ROWS, EIGHT_BIT>(args, state);
    // Looked up again: kept, they would not fit in the registers.
    range = MyRange(args);
    job.segment.row = prim::Opaque(job.segment.row);
    LoadRow</*TREES_AND_PINS=*/false>(args, &job.segment);
    job.segment.position = prim::LoadConst<int64_t>(args.first_position + job.segment.row) +
                           job.segment.unit * PositionsPerUnit(args, job.segment) +
                           job.segment.piece;
    job.rows = RowsOf<ROWS>(args, job.segment);
    const Destination to = DestinationOf(args, range, job.segment, job.rows);
    SendLatent<T, ROWS, EIGHT_BIT>(args, job, to);
    const Shared<char> end = prim::SharedMemory() + Traits::ScoresOffset(args.stages);
    MergeIfLast<T, ROWS, kLatentThreads>(args, job.segment, job.rows, to,
                                         end + offsetof(LatentEnd<ROWS>, merge));
    prim::SyncThreads();  // all of shared memory may be overwritten
  } while (NextSegment</*TREES_AND_PINS=*/false>(args, range, &job.segment));
}

// The prefill units that the CTA draws: first the one of its own number, then by tickets. No other
// CTA adds to a unit: bits do not depend on the draws.
template <typename T, int ROWS, bool EIGHT_BIT>
JAX_PAGED_DEVICE void LatentPrefillCta(const AttentionArgs& args) {
  using Traits = LatentTraits<ROWS, EIGHT_BIT>;
  const Shared<uint32_t> ticket =
      (prim::SharedMemory() + (Traits::SharedBytes(args.stages) - 16)).template As<uint32_t>();
  if (!HasLayer(args)) return;
  int32_t index = prim::BlockIndex();
  while (index < prim::LoadL2(args.first_prefill + args.max_seqs)) {
    const PrefillUnit unit = FindPrefillUnit</*TREES_AND_PINS=*/false>(args, index);
    if (prim::ThreadIndex() == 0) prim::Store(ticket, prim::AtomicIncrement(args.ticket, ~0u));
    LatentJob job;
    job.segment = PrefillSegment(unit);
    job.segment.first_key = unit.first_key;
    job.rows = unit.rows;
    job.begin = unit.first_key / kLatentTokens * kLatentTokens;
    job.end = LatentKeys(args, job, job.rows.count - 1).end;
    LatentState<ROWS, EIGHT_BIT> state;
    LatentTiles<T, ROWS, EIGHT_BIT>(args, job, &state);
    Destination to = {};
    to.is_output = true;
    KeepLatent<ROWS, EIGHT_BIT>(args, state);
    SendLatent<T, ROWS, EIGHT_BIT>(args, job, to);
    index = prim::GridSize() + static_cast<int32_t>(prim::Load(ticket));
    prim::SyncThreads();  // all of shared memory may be overwritten
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_LATENT_CUH_
