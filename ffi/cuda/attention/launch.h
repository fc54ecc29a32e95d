// Launch interface of the CUDA attention kernels, and what a launch looks like. Knows nothing of XLA.

#ifndef JAX_PAGED_CUDA_ATTENTION_LAUNCH_H_
#define JAX_PAGED_CUDA_ATTENTION_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtypes.h"
#include "cuda/attention/args.h"

namespace jax_paged::cuda {

// What a device can hold.
struct DeviceLimits {
  int32_t multiprocessors;
  int32_t shared_bytes_per_cta;             // with opt-in
  int32_t shared_bytes_per_multiprocessor;
};

// Of the current device; read once per device.
cudaError_t GetDeviceLimits(DeviceLimits* limits);

// Plans and runs a call: fills args.num_workers and args.stages, then launches the planner and the
// attention kernel. The rest of args is filled by the caller.
cudaError_t LaunchAttention(cudaStream_t stream, Dtype dtype, const DeviceLimits& limits,
                            AttentionArgs args);

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_LAUNCH_H_
