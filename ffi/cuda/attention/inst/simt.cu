// SPDX-License-Identifier: Apache-2.0

#include "cuda/attention/launch_inst.cuh"

namespace jax_paged::cuda {

template cudaError_t LaunchSimt<BFloat16>(cudaStream_t, const DeviceLimits&, const AttentionArgs&);
template cudaError_t LaunchSimt<Float16>(cudaStream_t, const DeviceLimits&, const AttentionArgs&);
template cudaError_t LaunchSimt<float>(cudaStream_t, const DeviceLimits&, const AttentionArgs&);

}  // namespace jax_paged::cuda
