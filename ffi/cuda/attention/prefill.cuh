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
// Shared memory: (rows + 4 x tokens) x head_dim x 2 bytes + 1 KiB: 97 KiB for head_dim 128 and 256,
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
#include "cuda/attention/prefill_tile.cuh"
#include "cuda/attention/prefill_unit.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// The unit in shared memory, and the ticket for the next. Returns with the stages and the look-ups
// still being read by other warps.
template <typename T, int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE void PrefillTiles(const AttentionArgs& args, Shared<uint32_t> ticket) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Loader = PrefillLoader<HEAD_DIM, PAGES>;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Shared<WarpKeys> warp_keys =
      Traits::template Field<WarpKeys>(offsetof(typename Traits::State, warp_keys)) +
      prim::WarpIndex();
  if (prim::LaneIndex() == 0) prim::Store(warp_keys, FindWarpKeys<HEAD_DIM>(args));

  const int32_t first_tile = unit.first_key / Traits::kTokens;
  Loader loader(UnitKeys(args, unit, unit.rows.count - 1).end);
  loader.Find(args, first_tile);
  loader.Publish(args, first_tile);
  loader.Find(args, first_tile + 1);
  loader.Publish(args, first_tile + 1);
  prim::SyncThreads();  // the look-ups of the first two tiles
  if (loader.HasTile(first_tile)) Loader::Issue(args, first_tile);
  const LogitScale scale = LoadScale(args);
  FillQueries<T, HEAD_DIM>(args, scale);
  if (prim::ThreadIndex() == 0) prim::Store(ticket, prim::AtomicIncrement(args.ticket, ~0u));

  PrefillState<HEAD_DIM> state;
  state.Clear();
  JAX_PAGED_NO_UNROLL
  for (int32_t tile = first_tile; loader.HasTile(tile); ++tile) {
    prim::CpAsyncWait(0);
    if constexpr (Loader::kIsVllm5d) Loader::ClearMissing(tile);
    // The tile and the look-ups of the next one are there (and the queries); the stage and the
    // look-ups of the tile before have been read.
    prim::SyncThreads();
    if (loader.HasTile(tile + 1)) Loader::Issue(args, tile + 1);
    loader.Find(args, tile + 2);
    const int32_t first_token = tile * Traits::kTokens;
    const KeyRange any = prim::Load(warp_keys).any;
    if (first_token < any.end && first_token + Traits::kTokens > any.first) {
      float s[Traits::kRowTiles][Traits::kTokens / 8][4] = {};
      PrefillScores<T, HEAD_DIM>(Loader::KTile(tile), s);
      if (args.logits.edits()) PrefillEdit<HEAD_DIM>(args, first_token, s);
      const KeyRange all = prim::Load(warp_keys).all;
      bool sees_all = first_token >= all.first && first_token + Traits::kTokens <= all.end;
      JAX_PAGED_UNROLL
      for (int32_t word = 0; word < Traits::kMaskWords; ++word) {
        sees_all = sees_all && prim::Load(Loader::TokenMasks(tile) + word) == ~0u;
      }
      if (!sees_all) {
        PrefillMask<HEAD_DIM>(args, Loader::TokenMasks(tile), first_token, s);
      }
      PrefillSoftmax<HEAD_DIM>(scale.factor, s, &state);
      PrefillValues<T, HEAD_DIM, PAGES>(Loader::VTile(tile), s, &state);
    }
    loader.Publish(args, tile + 2);
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
  const int32_t num_units =
      HasLayer(args) ? static_cast<int32_t>(prim::LoadL2(args.first_prefill + args.max_seqs)) : 0;
  int32_t index = prim::BlockIndex();
  while (index < num_units) {
    if (prim::WarpIndex() == 0) {
      const PrefillUnit found = FindPrefillUnit(args, index);
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
