// SPDX-License-Identifier: Apache-2.0

// What handlers share that update a pool in place.

#ifndef JAX_PAGED_CUDA_IN_PLACE_H_
#define JAX_PAGED_CUDA_IN_PLACE_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "common/ffi_checks.h"

namespace jax_paged::cuda {

// XLA aliases results to operands and copies beforehand where it cannot; be safe if it did not.
template <size_t POOLS>
cudaError_t CopyUnlessAliased(cudaStream_t stream, const PagesOfCall (&pages)[POOLS]) {
  for (const auto& [from, to] : pages) {
    if (from.untyped_data() == to.untyped_data() || to.size_bytes() == 0) continue;
    const cudaError_t error = cudaMemcpyAsync(to.untyped_data(), from.untyped_data(),
                                              to.size_bytes(), cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_IN_PLACE_H_
