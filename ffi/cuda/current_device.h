// SPDX-License-Identifier: Apache-2.0

// What the handlers ask the CUDA runtime about the device that they run on.

#ifndef JAX_PAGED_CUDA_CURRENT_DEVICE_H_
#define JAX_PAGED_CUDA_CURRENT_DEVICE_H_

#include <cuda_runtime_api.h>

#include "cuda/device_limits.h"

namespace jax_paged::cuda {

// Asked once per device.
cudaError_t GetDeviceLimits(DeviceLimits* limits);

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_CURRENT_DEVICE_H_
