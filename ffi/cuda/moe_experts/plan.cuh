// SPDX-License-Identifier: Apache-2.0

// The planner of moe_experts: sorts the pairs (token, chosen expert) of a turn by expert, each
// expert's by token, and cuts them into tiles of at most tile_tokens pairs of one expert. Ids that
// are no expert are left out, so nothing is read for them.
//
// One CTA of up to 32 warps. A counting sort: each warp owns a run of pairs and, in shared memory,
// a count for every expert.
//   1. each warp counts its pairs, 32 at a time; of lanes with the same expert the first one adds
//   2. a thread per expert sums over the warps; prefix sums over the experts give each where its
//      pairs and its tiles begin, and its counts become where each warp's pairs go
//   3. each warp goes through its pairs again and puts them there
// Shared memory: at most 32 KiB of counts, and 256 bytes. Bound: latency, two passes over at most
// kMoeTurnPairs integers.

#ifndef JAX_PAGED_CUDA_MOE_EXPERTS_PLAN_CUH_
#define JAX_PAGED_CUDA_MOE_EXPERTS_PLAN_CUH_

#include <cstdint>

#include "common/integers.h"
#include "cuda/block_scan.cuh"
#include "cuda/moe_experts/args.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

inline constexpr int32_t kMoePlanWarps = 32;  // at most
inline constexpr int32_t kMoePlanSumWords = 2 * kMoePlanWarps;

// A power of two: as many as have pairs to sort and room for their counts.
inline int32_t MoePlanWarps(const MoeArgs& args) {
  int32_t warps = 1;
  while (warps < kMoePlanWarps && warps * kWarpLanes < args.num_pairs &&
         2 * warps * args.num_experts <= kMoeMaxExperts) {
    warps *= 2;
  }
  return warps;
}

inline int32_t MoePlanSharedBytes(const MoeArgs& args) {
  return (MoePlanWarps(args) * args.num_experts + kMoePlanSumWords) * 4;
}

class MoePlanCta {
 public:
  JAX_PAGED_DEVICE MoePlanCta(const MoeArgs& args, int32_t warps)
      : args_(args),
        warps_(warps),
        sums_(prim::SharedMemory().As<int32_t>()),
        counts_(sums_ + kMoePlanSumWords) {}

  JAX_PAGED_DEVICE void Run() {
    const int32_t threads = warps_ * kWarpLanes;
    for (int32_t i = prim::ThreadIndex(); i < warps_ * args_.num_experts; i += threads) {
      prim::Store(counts_ + i, 0);
    }
    prim::SyncThreads();
    SortPairs(/*writes=*/false);
    prim::SyncThreads();
    PlaceExperts(threads);
    prim::SyncThreads();
    SortPairs(/*writes=*/true);
  }

 private:
  // Adds each of the warp's pairs to the count of its expert; with `writes`, puts it where that
  // count says.
  JAX_PAGED_DEVICE void SortPairs(bool writes) {
    const int32_t warp = prim::WarpIndex(), lane = prim::LaneIndex();
    const int32_t steps = CeilDiv<int32_t>(args_.num_pairs, kWarpLanes);
    const int32_t own_steps = CeilDiv<int32_t>(steps, warps_);
    const Shared<int32_t> counts = counts_ + warp * args_.num_experts;
    for (int32_t step = warp * own_steps; step < (warp + 1) * own_steps; ++step) {
      const int32_t pair = step * kWarpLanes + lane;
      const int32_t id = pair < args_.num_pairs ? prim::LoadConst(args_.experts + pair) : -1;
      const int32_t expert = id < args_.num_experts ? id : -1;
      const uint32_t same = prim::MatchAny(expert);
      const int32_t before = prim::PopCount(same & ((1u << lane) - 1));
      const int32_t count = expert < 0 ? 0 : prim::Load(counts + expert);
      if (writes && expert >= 0) prim::Store(args_.pairs + (count + before), pair);
      prim::SyncWarp();
      if (expert >= 0 && before == 0) {
        prim::Store(counts + expert, count + prim::PopCount(same));
      }
      prim::SyncWarp();
    }
  }

  // From the counts of each warp: where its pairs go, the tiles, and how many there are.
  JAX_PAGED_DEVICE void PlaceExperts(int32_t threads) {
    int32_t first_pair = 0, first_tile = 0;  // of the experts from `begin` on
    for (int32_t begin = 0; begin < args_.num_experts; begin += threads) {
      const int32_t expert = begin + prim::ThreadIndex();
      int32_t total = 0;
      if (expert < args_.num_experts) {
        for (int32_t warp = 0; warp < warps_; ++warp) {
          total += prim::Load(counts_ + (warp * args_.num_experts + expert));
        }
      }
      const int32_t tiles = CeilDiv<int32_t>(total, args_.tile_tokens);
      int32_t first = Prefix(total, sums_, &first_pair);
      const int32_t tile = Prefix(tiles, sums_ + kMoePlanWarps, &first_tile);
      for (int32_t i = 0; i < tiles; ++i) {
        const int32_t skipped = i * args_.tile_tokens;
        const int32_t left = total - skipped;
        prim::Store(
            args_.tiles + (tile + i),
            MoeTile{expert, first + skipped, left < args_.tile_tokens ? left : args_.tile_tokens,
                    /*unused=*/0});
      }
      if (total == 0) continue;
      for (int32_t warp = 0; warp < warps_; ++warp) {
        const Shared<int32_t> count = counts_ + (warp * args_.num_experts + expert);
        const int32_t pairs = prim::Load(count);
        prim::Store(count, first);
        first += pairs;
      }
    }
    if (prim::ThreadIndex() == 0) prim::Store(args_.num_tiles, first_tile);
  }

  // *sum plus x of the threads before; adds x of all threads to *sum. `sums`: a word per warp, not
  // those of the call before: its barrier is what ends the reads of the one before that.
  JAX_PAGED_DEVICE int32_t Prefix(int32_t x, Shared<int32_t> sums, int32_t* sum) {
    const auto add = [](int32_t a, int32_t b) { return a + b; };
    return BlockScan(x, add, warps_, sums, sum) - x;
  }

  const MoeArgs& args_;
  int32_t warps_;
  Shared<int32_t> sums_;
  Shared<int32_t> counts_;
};

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MOE_EXPERTS_PLAN_CUH_
