// SPDX-License-Identifier: Apache-2.0

// A search by a warp: 32 probes at a time.

#ifndef JAX_PAGED_CUDA_WARP_SEARCH_CUH_
#define JAX_PAGED_CUDA_WARP_SEARCH_CUH_

#include <cstdint>

#include "common/integers.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// The last i below `count` of which `holds`: it does of 0, and of none behind one of which it does
// not. All lanes take part, and get it.
template <typename Predicate>
JAX_PAGED_DEVICE int32_t WarpSearch(int32_t count, const Predicate& holds) {
  int32_t low = 0;
  int32_t high = count;
  while (high - low > 1) {
    const int32_t step = CeilDiv<int32_t>(high - low, kWarpLanes);
    const int32_t probe = low + prim::LaneIndex() * step;
    const uint32_t held = prim::Ballot(probe < high && holds(probe));
    low += (prim::PopCount(held) - 1) * step;
    if (high > low + step) high = low + step;
  }
  return low;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_WARP_SEARCH_CUH_
