// SPDX-License-Identifier: Apache-2.0

// What a device can hold. Plain C++, shared with the emulator.

#ifndef JAX_PAGED_CUDA_DEVICE_LIMITS_H_
#define JAX_PAGED_CUDA_DEVICE_LIMITS_H_

#include <cstdint>

namespace jax_paged::cuda {

inline constexpr int32_t kReservedBytes = 1024;  // of shared memory per CTA, by the driver

struct DeviceLimits {
  int32_t multiprocessors;
  int32_t shared_bytes_per_cta;  // with opt-in
  int32_t shared_bytes_per_multiprocessor;
  bool overlaps_launches;  // launch_kernel.h
};

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_DEVICE_LIMITS_H_
