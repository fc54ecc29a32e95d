// SPDX-License-Identifier: Apache-2.0

// Dynamic shared memory above the 48 KiB that every kernel may have, and how much of what it shares
// with the L1 cache is for it.

#ifndef JAX_PAGED_CUDA_SHARED_MEMORY_H_
#define JAX_PAGED_CUDA_SHARED_MEMORY_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace jax_paged::cuda {

// Raises a kernel's limit to `bytes`, the most that the device has, once per device. All of the
// shared memory is for it then: left to itself the driver goes by one CTA, and where two should run
// on a multiprocessor the second may not come.
template <typename Kernel>
cudaError_t AllowSharedMemory(Kernel kernel, int32_t bytes, std::atomic<uint64_t>* done) {
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (bit != 0 && (done->load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess) done->fetch_or(bit, std::memory_order_relaxed);
  return error;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_SHARED_MEMORY_H_
