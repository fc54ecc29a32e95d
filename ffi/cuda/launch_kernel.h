// SPDX-License-Identifier: Apache-2.0

// Launches of kernels that wait by themselves for what is before them on the stream
// (prim::WaitForPrevious): from sm_90 on their CTAs may come onto the device while the launch
// before them still runs (programmatic dependent launch), which hides most of a launch's latency.

#ifndef JAX_PAGED_CUDA_LAUNCH_KERNEL_H_
#define JAX_PAGED_CUDA_LAUNCH_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device_limits.h"

namespace jax_paged::cuda {

// kernel<<<ctas, threads, shared_bytes, stream>>>(args)
template <typename Args>
cudaError_t LaunchKernel(void (*kernel)(Args), int64_t ctas, int32_t threads, int32_t shared_bytes,
                         cudaStream_t stream, const DeviceLimits& limits, const Args& args) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = limits.overlaps_launches ? 1 : 0;
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&args))};
  cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
  return cudaGetLastError();
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_LAUNCH_KERNEL_H_
