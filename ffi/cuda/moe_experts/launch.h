// SPDX-License-Identifier: Apache-2.0

// Launch interface of the CUDA kernels of moe_experts. Knows nothing of XLA.

#ifndef JAX_PAGED_CUDA_MOE_EXPERTS_LAUNCH_H_
#define JAX_PAGED_CUDA_MOE_EXPERTS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "cuda/device_limits.h"
#include "cuda/moe_experts/args.h"

namespace jax_paged::cuda {

// As many persistent CTAs as a turn can have items, or as run at a time.
inline unsigned MoeCtas(const DeviceLimits& limits, const MoeArgs& args, int64_t items_per_tile,
                        int32_t ctas_per_multiprocessor) {
  const int64_t tiles = MaxMoeTiles(args.num_pairs, args.num_experts, args.tile_tokens);
  const int64_t items = tiles * items_per_tile;
  const int64_t resident = int64_t{limits.multiprocessors} * ctas_per_multiprocessor;
  return static_cast<unsigned>(items < resident ? items : resident);
}

// All turns of a call that CheckMoeArgs takes: planner, gate and up, down, combination.
cudaError_t LaunchMoe(cudaStream_t stream, const DeviceLimits& limits, const MoeParams& params,
                      int32_t* workspace);

// The two products of a turn on tensor cores. Instantiated in inst/.
template <typename T, typename W>
cudaError_t LaunchMoeGemms(cudaStream_t stream, const DeviceLimits& limits, const MoeArgs& args);

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MOE_EXPERTS_LAUNCH_H_
