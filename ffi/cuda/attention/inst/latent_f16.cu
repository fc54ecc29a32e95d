// SPDX-License-Identifier: Apache-2.0

#include "cuda/attention/launch_latent.cuh"

namespace jax_paged::cuda {

template cudaError_t LaunchLatent<Float16>(cudaStream_t, const DeviceLimits&, const AttentionArgs&);

}  // namespace jax_paged::cuda
