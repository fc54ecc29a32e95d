#include "cuda/attention/launch_inst.cuh"

namespace jax_paged::cuda {

template cudaError_t LaunchPrefill<BFloat16, 64>(cudaStream_t, const DeviceLimits&, AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 80>(cudaStream_t, const DeviceLimits&, AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 96>(cudaStream_t, const DeviceLimits&, AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 112>(cudaStream_t, const DeviceLimits&, AttentionArgs);

}  // namespace jax_paged::cuda
