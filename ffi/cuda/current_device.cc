// SPDX-License-Identifier: Apache-2.0

#include "cuda/current_device.h"

#include <cstdint>
#include <mutex>

namespace jax_paged::cuda {

cudaError_t GetDeviceLimits(DeviceLimits* limits) {
  constexpr int kMaxDevices = 64;
  static std::mutex mutex;
  static DeviceLimits known[kMaxDevices];  // multiprocessors 0: not asked yet
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  if (device < kMaxDevices && known[device].multiprocessors > 0) {
    *limits = known[device];
    return cudaSuccess;
  }
  int32_t major = 0;
  const struct {
    cudaDeviceAttr attribute;
    int32_t* value;
  } wanted[] = {
      {cudaDevAttrMultiProcessorCount, &limits->multiprocessors},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &limits->shared_bytes_per_cta},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &limits->shared_bytes_per_multiprocessor},
      {cudaDevAttrComputeCapabilityMajor, &major},
  };
  for (const auto& [attribute, value] : wanted) {
    error = cudaDeviceGetAttribute(value, attribute, device);
    if (error != cudaSuccess) return error;
  }
  limits->overlaps_launches = major >= 9;
  if (device < kMaxDevices) known[device] = *limits;
  return cudaSuccess;
}

}  // namespace jax_paged::cuda
