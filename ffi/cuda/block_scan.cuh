// SPDX-License-Identifier: Apache-2.0

// A scan over the threads of a CTA, as the planners need it.

#ifndef JAX_PAGED_CUDA_BLOCK_SCAN_CUH_
#define JAX_PAGED_CUDA_BLOCK_SCAN_CUH_

#include <cstdint>

#include "cuda/prim.h"

namespace jax_paged::cuda {

// Inclusive scan by `join` over the threads of a CTA of `warps` warps, behind *so_far, to which x
// of all threads is then added. `warp_totals`: one of T per warp, which nobody still reads; there
// is one barrier, between its writes and its reads.
template <typename T, typename Join>
JAX_PAGED_DEVICE T BlockScan(T x, const Join& join, int32_t warps, Shared<T> warp_totals,
                             T* so_far) {
  const int32_t lane = prim::LaneIndex(), warp = prim::WarpIndex();
  JAX_PAGED_UNROLL
  for (int32_t distance = 1; distance < kWarpLanes; distance *= 2) {
    const T below = prim::ShuffleUp(x, distance);
    if (lane >= distance) x = join(below, x);
  }
  if (lane == kWarpLanes - 1) prim::Store(warp_totals + warp, x);
  prim::SyncThreads();
  T before = *so_far;
  for (int32_t i = 0; i < warps; ++i) {
    const T of_warp = prim::Load(warp_totals + i);
    if (i < warp) before = join(before, of_warp);
    *so_far = join(*so_far, of_warp);
  }
  return join(before, x);
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_BLOCK_SCAN_CUH_
