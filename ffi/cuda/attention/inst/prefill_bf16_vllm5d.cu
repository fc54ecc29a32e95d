#include "cuda/attention/launch_inst.cuh"

namespace jax_paged::cuda {

template cudaError_t LaunchPrefill<BFloat16, 64, PageKind::kVllm5d>(cudaStream_t,
                                                                    const DeviceLimits&,
                                                                    AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 80, PageKind::kVllm5d>(cudaStream_t,
                                                                    const DeviceLimits&,
                                                                    AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 96, PageKind::kVllm5d>(cudaStream_t,
                                                                    const DeviceLimits&,
                                                                    AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 112, PageKind::kVllm5d>(cudaStream_t,
                                                                     const DeviceLimits&,
                                                                     AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 128, PageKind::kVllm5d>(cudaStream_t,
                                                                     const DeviceLimits&,
                                                                     AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 192, PageKind::kVllm5d>(cudaStream_t,
                                                                     const DeviceLimits&,
                                                                     AttentionArgs);
template cudaError_t LaunchPrefill<BFloat16, 256, PageKind::kVllm5d>(cudaStream_t,
                                                                     const DeviceLimits&,
                                                                     AttentionArgs);

}  // namespace jax_paged::cuda
