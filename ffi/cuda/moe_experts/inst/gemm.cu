// SPDX-License-Identifier: Apache-2.0

#include "cuda/moe_experts/launch_inst.cuh"

namespace jax_paged::cuda {

template cudaError_t LaunchMoeGemms<BFloat16, BFloat16>(cudaStream_t, const DeviceLimits&,
                                                        const MoeArgs&);
template cudaError_t LaunchMoeGemms<BFloat16, Int8>(cudaStream_t, const DeviceLimits&,
                                                    const MoeArgs&);
template cudaError_t LaunchMoeGemms<BFloat16, Float8E4M3>(cudaStream_t, const DeviceLimits&,
                                                          const MoeArgs&);
template cudaError_t LaunchMoeGemms<Float16, Float16>(cudaStream_t, const DeviceLimits&,
                                                      const MoeArgs&);
template cudaError_t LaunchMoeGemms<Float16, Int8>(cudaStream_t, const DeviceLimits&,
                                                   const MoeArgs&);
template cudaError_t LaunchMoeGemms<Float16, Float8E4M3>(cudaStream_t, const DeviceLimits&,
                                                         const MoeArgs&);

}  // namespace jax_paged::cuda
