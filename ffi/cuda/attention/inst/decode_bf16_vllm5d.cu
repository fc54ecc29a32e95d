#include "cuda/attention/launch_inst.cuh"

namespace jax_paged::cuda {

template cudaError_t LaunchDecode<BFloat16, 64, true>(cudaStream_t, const DeviceLimits&,
                                                      AttentionArgs);
template cudaError_t LaunchDecode<BFloat16, 80, true>(cudaStream_t, const DeviceLimits&,
                                                      AttentionArgs);
template cudaError_t LaunchDecode<BFloat16, 96, true>(cudaStream_t, const DeviceLimits&,
                                                      AttentionArgs);
template cudaError_t LaunchDecode<BFloat16, 112, true>(cudaStream_t, const DeviceLimits&,
                                                       AttentionArgs);
template cudaError_t LaunchDecode<BFloat16, 128, true>(cudaStream_t, const DeviceLimits&,
                                                       AttentionArgs);
template cudaError_t LaunchDecode<BFloat16, 192, true>(cudaStream_t, const DeviceLimits&,
                                                       AttentionArgs);
template cudaError_t LaunchDecode<BFloat16, 256, true>(cudaStream_t, const DeviceLimits&,
                                                       AttentionArgs);

}  // namespace jax_paged::cuda
