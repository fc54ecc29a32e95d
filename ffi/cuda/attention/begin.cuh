// SPDX-License-Identifier: Apache-2.0

// What has to be done in each call before its attention kernels, whoever made its plan: counters
// and the ticket of the prefill units become 0, and the outputs that no unit writes are written:
// out = 0 and lse = -inf (or the sink) for rows without keys, lse = -inf for padding (never a
// sink). The planner does it where it runs in the call; where the plan is an operand, BeginCta
// does, by what the plan says of rows.
//
// Grid: any number of CTAs of kPlanThreads threads, which share the work. A warp looks at 32 rows
// at once. Bound by latency: one load behind another, then stores.

#ifndef JAX_PAGED_CUDA_ATTENTION_BEGIN_CUH_
#define JAX_PAGED_CUDA_ATTENTION_BEGIN_CUH_

#include <cstdint>

#include "cuda/attention/args.h"
#include "cuda/attention/logits.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

inline constexpr int32_t kPlanThreads = 256;
inline constexpr int32_t kPlanWarps = kPlanThreads / kWarpLanes;

JAX_PAGED_DEVICE void ClearCounters(const AttentionArgs& args) {
  const int64_t first = int64_t{prim::BlockIndex()} * kPlanThreads + prim::ThreadIndex();
  const int64_t step = int64_t{prim::GridSize()} * kPlanThreads;
  for (int64_t i = first; i < args.num_slots; i += step) prim::Store(args.arrivals + i, 0u);
  if (first == 0) prim::Store(args.ticket, 0u);
}

// Tokens begin, begin + step, ... below end, by `threads` threads of which this one is `thread`.
JAX_PAGED_DEVICE void FillEmpty(const AttentionArgs& args, int32_t begin, int32_t end, int32_t step,
                                bool with_sinks, int32_t thread, int32_t threads) {
  const int64_t words =
      int64_t{args.num_q_heads} * args.v_head_dim * args.out_bytes / int64_t{sizeof(Word2)};
  for (int32_t token = begin; token < end; token += step) {
    const Global<Word2> out = args.out.As<Word2>() + token * words;
    for (int64_t i = thread; i < words; i += threads) prim::Store(out + i, Word2{0, 0});
    for (int32_t i = thread; i < args.num_q_heads; i += threads) {
      prim::Store(args.lse + (int64_t{token} * args.num_q_heads + i),
                  with_sinks ? LoadSink(args, i) : kNegativeInfinity);
    }
  }
}

// Those of 32 rows that have queries and no keys, by a warp; `lengths`: of this lane's row.
JAX_PAGED_DEVICE void FillRows(const AttentionArgs& args, const RowLengths& lengths,
                               bool has_layer) {
  const bool is_empty = lengths.q_len > 0 && (lengths.seq_len == 0 || !has_layer);
  for (uint32_t rest = prim::Ballot(is_empty); rest != 0; rest &= rest - 1) {
    const int32_t lane = prim::PopCount((rest & (0u - rest)) - 1);
    const int32_t begin = prim::Shuffle(lengths.q_begin, lane);
    const int32_t end = begin + prim::Shuffle(lengths.q_len, lane);
    FillEmpty(args, begin, end, /*step=*/1, /*with_sinks=*/true, prim::LaneIndex(), kWarpLanes);
  }
}

// Tokens before the first row, and behind the last one.
JAX_PAGED_DEVICE void FillPadding(const AttentionArgs& args, int32_t first_token,
                                  int32_t end_token) {
  const int32_t cta = prim::BlockIndex(), ctas = prim::GridSize(), thread = prim::ThreadIndex();
  FillEmpty(args, cta, first_token, ctas, /*with_sinks=*/false, thread, kPlanThreads);
  FillEmpty(args, end_token + cta, args.num_tokens, ctas, /*with_sinks=*/false, thread,
            kPlanThreads);
}

// The whole of it, of a call with a plan.
JAX_PAGED_DEVICE void BeginCta(const AttentionArgs& args) {
  ClearCounters(args);
  const bool has_layer = HasLayer(args);
  const int32_t step = prim::GridSize() * kPlanThreads;
  for (int32_t base = (prim::BlockIndex() * kPlanWarps + prim::WarpIndex()) * kWarpLanes;
       base < args.max_seqs; base += step) {
    const int32_t row = base + prim::LaneIndex();
    RowLengths lengths = {0, 0, 0, 0};
    if (row < args.max_seqs) lengths = prim::LoadL2(args.row_lengths + row);
    FillRows(args, lengths, has_layer);
  }
  FillPadding(args, prim::LoadL2(args.row_lengths).q_begin,
              prim::LoadL2(args.row_lengths + args.max_seqs).q_begin);
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_BEGIN_CUH_
