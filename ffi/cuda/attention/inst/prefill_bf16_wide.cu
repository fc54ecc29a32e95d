#include "cuda/attention/launch_inst.cuh"

namespace jax_paged::cuda {

template cudaError_t LaunchPrefill<BFloat16, 128>(cudaStream_t, const DeviceLimits&, AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 192>(cudaStream_t, const DeviceLimits&, AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 256>(cudaStream_t, const DeviceLimits&, AttentionArgs);

}  // namespace jax_paged::cuda
