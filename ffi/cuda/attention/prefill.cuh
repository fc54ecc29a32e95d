// SPDX-License-Identifier: Apache-2.0

// Attention for many queries per row, on tensor cores (bf16, f16).
//
// Grid: persistent CTAs of 4 warps. Each takes the prefill unit of its own number (plan.cuh), then
// draws tickets. A unit is whole, no other CTA adds to it: bits do not depend on the draws.
//   CTA    128 packed rows (64 above head_dim 128): queries in order, the heads of a group inside,
//          so that one KV head's tiles serve the whole group; KV tiles of 64 tokens (32 above 128),
//          from the first token in the window of the unit's first query to the last that its last
//          query sees, shared by all warps
//   warp   32 rows (16): each fragment of K and V feeds two mma.m16n8k16 (one)
//   lane   of each 16 rows l/4 and l/4 + 8; of each 8 columns the two at 2(l%4)
// Pipeline, per tile:
//   wait for the tile's cp.async, syncthreads   the loads of all are visible to all, and all warps
//                                               are done with the tile before
//   issue the next tile into the other stage
//   S = Q K^T, softmax in log2, O = O a + P V   S, P and O in registers; Q, K and V by ldmatrix
//   look up the tokens of the tile after next   thread t: page and offset of token t; any page size
//                                               costs the same
// Warps whose rows see nothing of a tile only load. Only tiles at a warp's diagonal, at the edge of
// its windows, at the end and with missing pages are masked. O is rescaled only when a maximum of
// the warp has moved.
//
// A page that does not exist is not read: its tokens are masked, its V is zero. Keys that no query
// of the unit sees are not read either. A NaN in the V of a later token reaches an earlier query
// (as 0 x NaN) if a query of the same warp sees a key of that KV tile: less far than in decode.cuh,
// which reads all of the row's tokens for each unit.
//
// Pages of layout vllm5d (template argument PAGES; page_size a multiple of 8): 16 bytes of a page
// are 8 dimensions of a token of K, which go to the same place in the stage, or 8 tokens of a
// dimension of V, which is kept transposed and read by ldmatrix without .trans. Of such 8 tokens
// some may not exist, at the two ends of what the unit sees: the thread that copied them sets those
// to zero between its wait and the barrier, so that the products cost no mask.
//
// 8-bit pages: two stages hold bytes, and one tile of 16-bit numbers takes the place of the other
// stage. Each thread widens what it has copied, between the barrier and one more; so K and V are
// widened once for all warps. A scale of K per head is one of the logits, one of V is multiplied
// with O at the end. Those per token come by cp.async of 4 bytes, K's go to the products, V's to P,
// as in decode.cuh.
//
// Shared memory: (rows + 4 x tokens) x head_dim x 2 bytes + 2 KiB: 98 KiB for head_dim 128 and 256,
// so two CTAs per multiprocessor of 228 KiB, and one of 100 KiB. Bound by the tensor cores' rate
// for mma.sync, above head_dim 128 by shared memory; docs/kernels/prefill.md has the arithmetic.
// FlashAttention 2 (loop over KV tiles inside a query tile), FlashInfer (packed rows).
//
// prefill_unit.cuh has the units and the sizes, prefill_loader.cuh the loads, prefill_tile.cuh what
// a warp computes of a tile, prefill_finish.cuh its results' way out.

#ifndef JAX_PAGED_CUDA_ATTENTION_PREFILL_CUH_
#define JAX_PAGED_CUDA_ATTENTION_PREFILL_CUH_

#include <cstddef>

#include "cuda/attention/args.h"
#include "cuda/attention/prefill_finish.cuh"
#include "cuda/attention/prefill_loader.cuh"
#include "cuda/attention/prefill_mask.cuh"
#include "cuda/attention/prefill_tile.cuh"
#include "cuda/attention/prefill_unit.cuh"
#include "cuda/attention/rope.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Rope inside attention: the keys of a tile, a quarter by each warp.
template <typename T, int HEAD_DIM, bool TREES_AND_PINS>
JAX_PAGED_DEVICE void TurnTile(const AttentionArgs& args, Shared<char> k_tile,
                               int32_t first_token) {
  constexpr int32_t kRows = PrefillTraits<HEAD_DIM>::kTokens / kWarps;
  const Segment segment = PrefillSegment(LoadUnit<HEAD_DIM>());
  const int32_t first_row = OpaqueThread() / kWarpLanes * kRows;
  TurnRows<T, HEAD_DIM, kRows>(args, k_tile, first_row, [&](int32_t row) {
    return TokenAt<TREES_AND_PINS>(args, segment, first_token + first_row + row);
  });
}

// The unit in shared memory, and the ticket for the next. Returns with the stages and the look-ups
// still being read by other warps.
template <typename T, int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE void PrefillTiles(const AttentionArgs& args, Shared<uint32_t> ticket) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Loader = PrefillLoader<HEAD_DIM, PAGES>;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  constexpr bool kTakesTreesAndPins = Loader::kTakesTreesAndPins;
  const WarpKeys found = FindWarpKeys<HEAD_DIM, PAGES>(args);
  if (prim::LaneIndex() == 0) prim::Store(MyWarpKeys<HEAD_DIM>(), found);

  const int32_t first_tile =
      kTakesTreesAndPins && args.num_pinned ? 0 : unit.first_key / Traits::kTokens;
  Loader loader;
  loader.Find(args, first_tile);
  loader.Publish(args, first_tile);
  loader.Find(args, first_tile + 1);
  loader.Publish(args, first_tile + 1);
  if (Loader::kIsEightBit && prim::LaneIndex() == 0) {
    prim::Store(ValueUnit<HEAD_DIM>(), kSmallestScale);
  }
  prim::SyncThreads();  // the look-ups of the first two tiles
  if (Loader::HasTile(args, first_tile)) Loader::Issue(args, first_tile);
  LogitScale scale = LoadScale(args);
  // A scale of K per head is one of the logits.
  if constexpr (Loader::kIsEightBit) {
    const float k_scale = HeadScale(args.k_scale, unit.rows.kv_head);
    scale.is_negative = scale.is_negative != (k_scale < 0.0f);
    scale.is_zero = scale.is_zero || k_scale == 0.0f;
    if (!args.logits.edits() && !scale.is_zero) scale.factor *= prim::Max(k_scale, -k_scale);
  }
  FillQueries<T, HEAD_DIM, PAGES>(args, scale);
  const Shared<float> factor =
      Traits::template Field<float>(offsetof(typename Traits::State, scale));
  if (prim::ThreadIndex() == 0) {
    prim::Store(factor, scale.factor);
    prim::Store(ticket, prim::AtomicIncrement(args.ticket, ~0u));
  }

  constexpr int kLift = DecodeTraits<HEAD_DIM, PAGES>::kWeightLift;
  PrefillState<HEAD_DIM> state;
  state.Clear();
  JAX_PAGED_NO_UNROLL
  for (int32_t tile = first_tile; Loader::HasTile(args, tile); ++tile) {
    prim::CpAsyncWait(0);
    if constexpr (Loader::kIsVllm5d) Loader::ClearMissing(tile);
    // The tile and the look-ups of the next one are there (and the queries); the stage and the
    // look-ups of the tile before have been read.
    prim::SyncThreads();
    if (Loader::HasTile(args, tile + 1)) Loader::Issue(args, tile + 1);
    loader.Find(args, tile + 2);
    if constexpr (Loader::kIsEightBit) {
      Loader::template Widen<T>(args, tile);
      loader.Publish(args, tile + 2);  // here, so that no register keeps what was found
      prim::SyncThreads();             // all of the tile
    }
    const int32_t first_token = Loader::FirstToken(args, tile);
    if constexpr (Loader::kTakesRope) {
      if (args.cos) {
        TurnTile<T, HEAD_DIM, kTakesTreesAndPins>(args, Loader::KTile(tile), first_token);
        prim::SyncThreads();  // the turned keys
      }
    }
    const KeyRange any = prim::Load(MyWarpKeys<HEAD_DIM>()).any;
    if (first_token < any.end && first_token + Traits::kTokens > any.first) {
      if (!SeesAll<HEAD_DIM>(Loader::TokenMasks(tile), first_token)) {
        FillRowMasks<HEAD_DIM, PAGES>(args, first_token, Loader::TokenMasks(tile),
                                      Loader::RowMasks(tile));
      }
      float s[Traits::kRowTiles][Traits::kTokens / 8][4] = {};
      PrefillScores<T, HEAD_DIM>(Loader::KTile(tile), s);
      if constexpr (Loader::kIsEightBit) {
        if (args.k_scale.per_token) PrefillApply<HEAD_DIM>(Loader::Scales(tile), s);
      }
      if (args.logits.edits()) {
        if constexpr (Loader::kIsEightBit) {
          const float k_scale = HeadScale(args.k_scale, LoadUnit<HEAD_DIM>().rows.kv_head);
          MultiplyScores<HEAD_DIM>(prim::Max(k_scale, -k_scale), s);
        }
        PrefillEdit<HEAD_DIM>(args, first_token, s);
      }
      // Asked again: kept, it would cost a register.
      if (!SeesAll<HEAD_DIM>(Loader::TokenMasks(tile), first_token)) {
        PrefillMask<HEAD_DIM>(Loader::RowMasks(tile), s);
      }
      const Shared<float> v_scales = Loader::Scales(tile) + Traits::kTokens;
      if (Loader::kIsEightBit && args.v_scale.per_token) {  // apart, for want of registers
        RaiseUnit<HEAD_DIM>(v_scales, &state);
        PrefillSoftmax<HEAD_DIM, kLift>(prim::Load(factor), s, &state);
        PrefillValues<T, HEAD_DIM, PAGES>(Loader::VTile(tile), true, v_scales, s, &state);
      } else {
        PrefillSoftmax<HEAD_DIM, kLift>(prim::Load(factor), s, &state);
        PrefillValues<T, HEAD_DIM, PAGES>(Loader::VTile(tile), false, v_scales, s, &state);
      }
    }
    if constexpr (!Loader::kIsEightBit) loader.Publish(args, tile + 2);
  }
  if constexpr (Loader::kIsEightBit) {
    constexpr float kUnlift = 1.0f / (1 << kLift);
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 2 * Traits::kRowTiles; ++i) state.l[i / 2][i % 2] *= kUnlift;
    ScaleValues(kUnlift, &state);
    ScaleValues(args.v_scale.per_token ? prim::Load(ValueUnit<HEAD_DIM>())
                                       : HeadScale(args.v_scale, LoadUnit<HEAD_DIM>().rows.kv_head),
                &state);
  }
  FinishPrefill<T, HEAD_DIM>(args, state);
}

template <typename T, int HEAD_DIM, PageKind PAGES = PageKind::kRows>
JAX_PAGED_DEVICE void PrefillCta(const AttentionArgs& args) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const Shared<PrefillUnit> unit =
      Traits::template Field<PrefillUnit>(offsetof(typename Traits::State, unit));
  const Shared<uint32_t> ticket =
      Traits::template Field<uint32_t>(offsetof(typename Traits::State, ticket));
  // Below 2^31: each unit has more than 16 of num_tokens x num_q_heads packed rows to itself.
  if (!HasLayer(args)) return;
  int32_t index = prim::BlockIndex();
  while (index < prim::LoadL2(args.first_prefill + args.max_seqs)) {
    if (prim::WarpIndex() == 0) {
      const PrefillUnit found =
          FindPrefillUnit<PrefillLoader<HEAD_DIM, PAGES>::kTakesTreesAndPins>(args, index);
      if (prim::LaneIndex() == 0) prim::Store(unit, found);
    }
    prim::SyncThreads();  // the unit; the last ticket has been read
    PrefillTiles<T, HEAD_DIM, PAGES>(args, ticket);
    prim::SyncThreads();  // the ticket; unit, stages and look-ups may be overwritten
    index = prim::GridSize() + static_cast<int32_t>(prim::Load(ticket));
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_PREFILL_CUH_
