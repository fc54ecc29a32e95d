#include "cuda/attention/launch_inst.cuh"

namespace jax_paged::cuda {

template cudaError_t LaunchDecode<Float16, 64, PageKind::kEightBit>(cudaStream_t,
                                                                    const DeviceLimits&,
                                                                    AttentionArgs);
template cudaError_t LaunchDecode<Float16, 80, PageKind::kEightBit>(cudaStream_t,
                                                                    const DeviceLimits&,
                                                                    AttentionArgs);
template cudaError_t LaunchDecode<Float16, 96, PageKind::kEightBit>(cudaStream_t,
                                                                    const DeviceLimits&,
                                                                    AttentionArgs);
template cudaError_t LaunchDecode<Float16, 112, PageKind::kEightBit>(cudaStream_t,
                                                                     const DeviceLimits&,
                                                                     AttentionArgs);
template cudaError_t LaunchDecode<Float16, 128, PageKind::kEightBit>(cudaStream_t,
                                                                     const DeviceLimits&,
                                                                     AttentionArgs);
template cudaError_t LaunchDecode<Float16, 192, PageKind::kEightBit>(cudaStream_t,
                                                                     const DeviceLimits&,
                                                                     AttentionArgs);
template cudaError_t LaunchDecode<Float16, 256, PageKind::kEightBit>(cudaStream_t,
                                                                     const DeviceLimits&,
                                                                     AttentionArgs);

}  // namespace jax_paged::cuda
