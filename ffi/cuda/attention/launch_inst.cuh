// SPDX-License-Identifier: Apache-2.0

// Kernels and launches to be instantiated in inst/.

#ifndef JAX_PAGED_CUDA_ATTENTION_LAUNCH_INST_CUH_
#define JAX_PAGED_CUDA_ATTENTION_LAUNCH_INST_CUH_

#include <atomic>
#include <cstdint>

#include "cuda/attention/decode.cuh"
#include "cuda/attention/launch.h"
#include "cuda/attention/prefill.cuh"
#include "cuda/attention/simt.cuh"
#include "cuda/attention/traits.h"
#include "cuda/device_limits.h"
#include "cuda/launch_kernel.h"
#include "cuda/shared_memory.h"

namespace jax_paged::cuda {

// Two CTAs per multiprocessor: at most 255 registers.
template <typename T, int HEAD_DIM, PageKind PAGES>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    DecodeKernel(__grid_constant__ const AttentionArgs args) {
  prim::StartKernel();
  DecodeCta<T, HEAD_DIM, PAGES>(args);
}

template <typename T, int HEAD_DIM, PageKind PAGES>
cudaError_t LaunchDecode(cudaStream_t stream, const DeviceLimits& limits,
                         const AttentionArgs& args) {
  using Traits = DecodeTraits<HEAD_DIM, PAGES>;
  static std::atomic<uint64_t> allowed{0};
  const cudaError_t error =
      AllowSharedMemory(DecodeKernel<T, HEAD_DIM, PAGES>, limits.shared_bytes_per_cta, &allowed);
  if (error != cudaSuccess) return error;
  return LaunchKernel(DecodeKernel<T, HEAD_DIM, PAGES>, args.num_workers, kAttentionThreads,
                      Traits::SharedBytes(args.stages), stream, limits, args);
}

// Two CTAs per multiprocessor: at most 255 registers, of which O and S take 192 at head_dim 128.
template <typename T, int HEAD_DIM, PageKind PAGES>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    PrefillKernel(__grid_constant__ const AttentionArgs args) {
  prim::StartKernel();
  PrefillCta<T, HEAD_DIM, PAGES>(args);
}

template <typename T, int HEAD_DIM, PageKind PAGES>
cudaError_t LaunchPrefill(cudaStream_t stream, const DeviceLimits& limits,
                          const AttentionArgs& args) {
  static std::atomic<uint64_t> allowed{0};
  constexpr int32_t kSharedBytes = PrefillTraits<HEAD_DIM>::SharedBytes(PAGES);
  const int32_t ctas = PrefillCtasPerMultiprocessor(limits, kSharedBytes);
  if (ctas == 0) return cudaErrorInvalidConfiguration;
  const cudaError_t error =
      AllowSharedMemory(PrefillKernel<T, HEAD_DIM, PAGES>, limits.shared_bytes_per_cta, &allowed);
  if (error != cudaSuccess) return error;
  const int64_t most = MaxPrefillUnits(args);
  const int64_t resident = int64_t{limits.multiprocessors} * ctas;
  return LaunchKernel(PrefillKernel<T, HEAD_DIM, PAGES>, most < resident ? most : resident,
                      kAttentionThreads, kSharedBytes, stream, limits, args);
}

template <typename T>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    SimtKernel(__grid_constant__ const AttentionArgs args) {
  prim::StartKernel();
  RunSimt<T>(args);
}

template <typename T>
cudaError_t LaunchSimt(cudaStream_t stream, const DeviceLimits& limits, const AttentionArgs& args) {
  static std::atomic<uint64_t> allowed{0};
  const int32_t shared_bytes = SimtSharedBytes(args.head_dim, args.v_head_dim);
  if (shared_bytes > limits.shared_bytes_per_cta) return cudaErrorInvalidConfiguration;
  const cudaError_t error = AllowSharedMemory(SimtKernel<T>, limits.shared_bytes_per_cta, &allowed);
  if (error != cudaSuccess) return error;
  return LaunchKernel(SimtKernel<T>, args.num_workers, kAttentionThreads, shared_bytes, stream,
                      limits, args);
}

}  // namespace jax_paged::cuda

// For files of inst/: one launch for narrow heads, for wide ones, or for all.
#define JAX_PAGED_INSTANTIATE(Launch, T, DIM, PAGES)                            \
  template cudaError_t Launch<T, DIM, PAGES>(cudaStream_t, const DeviceLimits&, \
                                             const AttentionArgs&);
#define JAX_PAGED_INSTANTIATE_NARROW(Launch, T, PAGES) \
  JAX_PAGED_INSTANTIATE(Launch, T, 64, PAGES)          \
  JAX_PAGED_INSTANTIATE(Launch, T, 80, PAGES)          \
  JAX_PAGED_INSTANTIATE(Launch, T, 96, PAGES)          \
  JAX_PAGED_INSTANTIATE(Launch, T, 112, PAGES)
#define JAX_PAGED_INSTANTIATE_WIDE(Launch, T, PAGES) \
  JAX_PAGED_INSTANTIATE(Launch, T, 128, PAGES)       \
  JAX_PAGED_INSTANTIATE(Launch, T, 192, PAGES)       \
  JAX_PAGED_INSTANTIATE(Launch, T, 256, PAGES)
#define JAX_PAGED_INSTANTIATE_ALL(Launch, T, PAGES) \
  JAX_PAGED_INSTANTIATE_NARROW(Launch, T, PAGES)    \
  JAX_PAGED_INSTANTIATE_WIDE(Launch, T, PAGES)

#endif  // JAX_PAGED_CUDA_ATTENTION_LAUNCH_INST_CUH_
