// SPDX-License-Identifier: Apache-2.0

// Kernels and launches to be instantiated in inst/.

#ifndef JAX_PAGED_CUDA_MOE_EXPERTS_LAUNCH_INST_CUH_
#define JAX_PAGED_CUDA_MOE_EXPERTS_LAUNCH_INST_CUH_

#include <atomic>
#include <cstdint>

#include "cuda/moe_experts/gemm.cuh"
#include "cuda/moe_experts/launch.h"
#include "cuda/shared_memory.h"

namespace jax_paged::cuda {

// Three CTAs per multiprocessor, where their shared memory allows it: at most 168 registers.
template <typename T, typename W, bool IS_GATED>
__global__ void __launch_bounds__(kMoeThreads, 3)
    MoeGemmKernel(__grid_constant__ const MoeArgs args) {
  MoeGemmCta<T, W, IS_GATED>(args);
}

template <typename T, typename W, bool IS_GATED>
cudaError_t LaunchMoeGemm(cudaStream_t stream, const DeviceLimits& limits, const MoeArgs& args) {
  constexpr int32_t kSharedBytes = MoeStage<W>::kSharedBytes;
  static std::atomic<uint64_t> allowed{0};
  if (kSharedBytes > limits.shared_bytes_per_cta) return cudaErrorInvalidConfiguration;
  const cudaError_t error =
      AllowSharedMemory(MoeGemmKernel<T, W, IS_GATED>, limits.shared_bytes_per_cta, &allowed);
  if (error != cudaSuccess) return error;
  const int32_t fit = limits.shared_bytes_per_multiprocessor / (kSharedBytes + kReservedBytes);
  const unsigned ctas = MoeCtas(limits, args, MoeProduct<IS_GATED>(args).num_blocks,
                                fit < 1   ? 1
                                : fit > 3 ? 3
                                          : fit);
  MoeGemmKernel<T, W, IS_GATED><<<ctas, kMoeThreads, kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

template <typename T, typename W>
cudaError_t LaunchMoeGemms(cudaStream_t stream, const DeviceLimits& limits, const MoeArgs& args) {
  const cudaError_t error = LaunchMoeGemm<T, W, /*IS_GATED=*/true>(stream, limits, args);
  return error == cudaSuccess ? LaunchMoeGemm<T, W, /*IS_GATED=*/false>(stream, limits, args)
                              : error;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MOE_EXPERTS_LAUNCH_INST_CUH_
