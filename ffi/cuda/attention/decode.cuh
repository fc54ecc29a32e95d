// SPDX-License-Identifier: Apache-2.0

// Attention for few queries per row, on tensor cores (bf16, f16).
//
// Grid: args.num_workers persistent CTAs of 4 warps; each walks the pieces of its range (plan.cuh).
// A unit's 16 packed rows (the query heads of a group, or several queries of them) are the M of
// mma.m16n8k16, so each K and V element is read once from the pages for all of them.
//   CTA    a tile of 64 KV tokens at a time
//   warp   16 of them, with its own softmax state (m, l, O) and its own ring of K and V stages; the
//          warps meet only at the end of a segment
//   lane   rows l/4 and l/4 + 8; of each 8 columns the two at 2(l%4)
// Pipeline of a warp, per tile:
//   1. wait for the stage's cp.async, syncwarp: the loads of all lanes are visible, and all lanes
//      are done with the stage of the tile before
//   2. issue the tile that is stages - 1 ahead into that stage
//   3. S = Q K^T, softmax in log2, O = O a + P V: O in registers, K and V by ldmatrix; Q in
//      registers, or in shared memory above head_dim 128
// The loader runs ahead across segments, so the rings never drain. A ring of one stage, where no
// more fit, has no tile ahead; the other warps compute while one waits. The page id of a tile is
// read one tile before its loads are issued. Tokens left of the row's window are not read.
//
// Pages of layout vllm5d (template argument PAGES; page_size a multiple of 8): 16 bytes of a page
// are 8 dimensions of a token of K, which go to the same place in the ring, or 8 tokens of a
// dimension of V, which is kept transposed and read by ldmatrix without .trans. Of such 8 tokens
// some may not exist: the V operand is masked, since 0 x NaN is NaN.
//
// 8-bit pages: a stage holds the bytes as they are stored and, where tokens have scales, those. A
// lane widens what ldmatrix gives it in registers, always to f16 (decode_bytes.cuh); Q, if it is
// bf16, becomes f16 times a power of two per row, and P is f16. A scale of K is multiplied with the
// products. One of V per head is multiplied with O at the end; those per token with P, over the
// largest one so far, which scales O: so P stays within the range of f16.
//
// Shared memory: 4 warps x stages x 2 x 16 rows (96 KiB for head_dim 128, 3 stages) + 12 KiB.
// Bound by memory bandwidth: at head_dim 128 and 4.3 TB/s on 132 SMs a warp tile of 8 KiB takes 250
// ns, 440 clocks or 1760 issue slots; its 32 mma, 16 ldmatrix and about 620 issue slots fit in. Of
// 8-bit pages a tile takes half the time and about 560 issue slots. FlashDecoding (split KV),
// LeanAttention (stream-K ranges), FlashInfer (GQA group as M).
//
// decode_loader.cuh has the loads, decode_queries.cuh Q, decode_tile.cuh step 3, decode_finish.cuh
// the end of a segment.

#ifndef JAX_PAGED_CUDA_ATTENTION_DECODE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_DECODE_CUH_

#include <cstddef>
#include <type_traits>

#include "cuda/attention/args.h"
#include "cuda/attention/decode_bytes.cuh"
#include "cuda/attention/decode_finish.cuh"
#include "cuda/attention/decode_loader.cuh"
#include "cuda/attention/decode_queries.cuh"
#include "cuda/attention/decode_tile.cuh"
#include "cuda/attention/rope.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/traits.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Keys that every row of the unit sees.
template <bool TREES_AND_PINS>
JAX_PAGED_DEVICE KeyRange SeenByAll(const AttentionArgs& args, const Segment& segment,
                                    const UnitRows& rows) {
  if (!AllHaveAngles<TREES_AND_PINS>(args, segment)) return {0, 0};
  KeyRange keys = {VisibleKeys<TREES_AND_PINS>(args, segment, rows, rows.count - 1).first,
                   VisibleKeys<TREES_AND_PINS>(args, segment, rows, 0).end};
  if (segment.tree_size > 0) {  // what rows see does not ascend there
    if (keys.end > segment.Tree().root) keys.end = segment.Tree().root;
    if (args.sliding_window) keys.first = keys.end;
  }
  return keys;
}

template <typename T, int HEAD_DIM, PageKind PAGES = PageKind::kRows>
JAX_PAGED_DEVICE void DecodeCta(const AttentionArgs& args) {
  using Traits = DecodeTraits<HEAD_DIM, PAGES>;
  const WorkRange range = MyRange(args);
  if (range.begin >= range.end) return;
  const int32_t stages = args.stages;
  const int32_t warp = prim::WarpIndex();
  const Shared<char> exchange = prim::SharedMemory() + Traits::RingBytes(stages);
  using Queries =
      std::conditional_t<Traits::kIsEightBit, HalfQueries<T, HEAD_DIM, Traits::kSharedQueries>,
                         DecodeQueries<T, HEAD_DIM, Traits::kSharedQueries>>;
  Queries queries(exchange);
  const Shared<char> ring = prim::SharedMemory() + warp * stages * Traits::kStageBytes;
  const Shared<uint32_t> token_masks =
      (exchange + offsetof(ExchangeShared, token_masks)).As<uint32_t>() + warp * kMaxStages;
  const LogitScale scale = LoadScale(args);

  Segment segment;
  if (!FirstSegment<Traits::kTakesTreesAndPins>(args, range, &segment)) return;
  DecodeLoader<HEAD_DIM, PAGES> loader(args, range, segment, ring, token_masks);
  for (int32_t s = 0; s < stages - 1; ++s) loader.Issue(args, range, s);

  int32_t stage = 0;
  bool has_segment = true;
  while (has_segment) {
    const UnitRows rows = RowsOf(args, segment);
    queries.Load(args, segment, rows, scale);
    DecodeState<HEAD_DIM> state;
    state.Clear();
    if constexpr (Traits::kIsEightBit) {
      state.v_scale =
          args.v_scale.per_token ? kSmallestScale : HeadScale(args.v_scale, rows.kv_head);
    }
    const KeyRange seen_by_all = SeenByAll<Traits::kTakesTreesAndPins>(args, segment, rows);
    for (int32_t tile = 0; tile < segment.num_tiles; ++tile) {
      const int32_t first_token =
          TileToken<Traits::kTakesTreesAndPins>(args, segment, tile) + warp * kWarpTokens;
      prim::CpAsyncWait(stages > 1 ? stages - 2 : 0);
      // Every lane's copies into this stage are done, and every lane has read the stage before it.
      prim::SyncWarp();
      loader.Issue(args, range, stage == 0 ? stages - 1 : stage - 1);
      if (stages == 1) {  // that was this tile
        prim::CpAsyncWait(0);
        prim::SyncWarp();
      }
      const Shared<char> stored = ring + stage * Traits::kStageBytes;
      if constexpr (Traits::kTakesRope) {
        if (args.cos) {
          TurnRows<T, HEAD_DIM, kWarpTokens>(args, stored, 0, [&](int32_t row) {
            return TokenAt<Traits::kTakesTreesAndPins>(args, segment, first_token + row);
          });
        }
      }
      DecodeTile<T, HEAD_DIM, PAGES>(
          args, segment, rows, stored, prim::Load(token_masks + stage), first_token,
          first_token >= seen_by_all.first && first_token + kWarpTokens <= seen_by_all.end,
          scale.factor, (stored + Traits::kScalesOffset).template As<float>(), queries, &state);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    FinishSegment<T, HEAD_DIM, PAGES>(args, range, segment, rows, exchange, &state);
    has_segment = NextSegment<Traits::kTakesTreesAndPins>(args, range, &segment);
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_DECODE_CUH_
