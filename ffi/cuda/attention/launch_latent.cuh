// SPDX-License-Identifier: Apache-2.0

// The latent kernels and their launch, to be instantiated in inst/.

#ifndef JAX_PAGED_CUDA_ATTENTION_LAUNCH_LATENT_CUH_
#define JAX_PAGED_CUDA_ATTENTION_LAUNCH_LATENT_CUH_

#include <atomic>
#include <cstdint>

#include "cuda/attention/latent.cuh"
#include "cuda/attention/launch.h"
#include "cuda/device_limits.h"
#include "cuda/launch_kernel.h"
#include "cuda/shared_memory.h"

namespace jax_paged::cuda {

// One CTA per multiprocessor: at most 255 registers, of which O takes 128 with 64 rows.
template <typename T, int ROWS, bool EIGHT_BIT>
__global__ void __launch_bounds__(kLatentThreads, 1)
    LatentKernel(__grid_constant__ const AttentionArgs args) {
  prim::StartKernel();
  LatentCta<T, ROWS, EIGHT_BIT>(args);
}

template <typename T, int ROWS, bool EIGHT_BIT>
__global__ void __launch_bounds__(kLatentThreads, 1)
    LatentPrefillKernel(__grid_constant__ const AttentionArgs args) {
  prim::StartKernel();
  LatentPrefillCta<T, ROWS, EIGHT_BIT>(args);
}

template <typename T, bool EIGHT_BIT>
cudaError_t LaunchLatentAs(cudaStream_t stream, const DeviceLimits& limits, AttentionArgs args) {
  const auto launch = [&](auto kernel, const LatentShape& shape, int64_t ctas,
                          std::atomic<uint64_t>* allowed) {
    const cudaError_t error = AllowSharedMemory(kernel, limits.shared_bytes_per_cta, allowed);
    if (error != cudaSuccess) return error;
    args.stages = shape.stages;
    return LaunchKernel(kernel, ctas, kLatentThreads, shape.shared_bytes, stream, limits, args);
  };
  const LatentChoice choice = ChooseLatent(args, limits);
  cudaError_t error = cudaSuccess;
  WithLatentRows(choice.decode.rows, [&](auto rows) {
    static std::atomic<uint64_t> allowed{0};
    error =
        launch(LatentKernel<T, rows.value, EIGHT_BIT>, choice.decode, args.num_workers, &allowed);
  });
  if (error != cudaSuccess || choice.prefill.rows == 0) return error;
  WithLatentPrefillRows(choice.prefill.rows, [&](auto rows) {
    static std::atomic<uint64_t> allowed{0};
    const int64_t most = MaxPrefillUnits(args);
    const int64_t ctas = most < args.num_workers ? most : args.num_workers;
    error = launch(LatentPrefillKernel<T, rows.value, EIGHT_BIT>, choice.prefill, ctas, &allowed);
  });
  return error;
}

template <typename T>
cudaError_t LaunchLatent(cudaStream_t stream, const DeviceLimits& limits,
                         const AttentionArgs& args) {
  return IsEightBit(args.kv_dtype) ? LaunchLatentAs<T, /*EIGHT_BIT=*/true>(stream, limits, args)
                                   : LaunchLatentAs<T, /*EIGHT_BIT=*/false>(stream, limits, args);
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_LAUNCH_LATENT_CUH_
