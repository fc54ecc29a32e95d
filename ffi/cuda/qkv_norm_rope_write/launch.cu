// SPDX-License-Identifier: Apache-2.0

// The launch of qkv_norm_rope_write. kernel.cuh says how it works.

#include "cuda/claim_slots.h"
#include "cuda/qkv_norm_rope_write/kernel.cuh"
#include "cuda/qkv_norm_rope_write/launch.h"
#include "cuda/qkv_norm_rope_write/select.h"

namespace jax_paged::cuda {
namespace {

template <typename T, int VEC>
__global__ void __launch_bounds__(kQkvThreads, /*CTAs per SM:*/ 8)
    QkvKernel(__grid_constant__ const QkvArgs args) {
  prim::AllowNext();
  QkvCta<T, VEC>(args);
}

struct Launch {
  cudaStream_t stream;
  const QkvArgs& args;

  template <typename T, int VEC>
  cudaError_t operator()() const {
    QkvKernel<T, VEC><<<NumCtas(args), kQkvThreads, kQkvSharedBytes, stream>>>(args);
    return cudaGetLastError();
  }
};

}  // namespace

cudaError_t LaunchQkv(cudaStream_t stream, Dtype dtype, const QkvArgs& args) {
  if (args.tokens.num_tokens == 0) return cudaSuccess;
  const cudaError_t claimed = ClaimSlots(stream, args.tokens);
  return claimed == cudaSuccess ? SelectQkv(dtype, args, Launch{stream, args}) : claimed;
}

}  // namespace jax_paged::cuda
