// SPDX-License-Identifier: Apache-2.0

// The launch of write_kv. kernel.cuh says how it works.

#include "cuda/claim_slots.h"
#include "cuda/write_kv/kernel.cuh"
#include "cuda/write_kv/launch.h"
#include "cuda/write_kv/select.h"

namespace jax_paged::cuda {
namespace {

template <typename KWord, typename VWord>
__global__ void __launch_bounds__(kWriteKvThreads)
    WriteKvKernel(__grid_constant__ const WriteKvArgs args) {
  prim::AllowNext();
  WriteKvCta<KWord, VWord>(args);
}

struct Launch {
  cudaStream_t stream;
  const WriteKvArgs& args;

  template <typename KWord, typename VWord>
  cudaError_t operator()() const {
    WriteKvKernel<KWord, VWord>
        <<<NumCtas(args), kWriteKvThreads, kWriteKvSharedBytes, stream>>>(args);
    return cudaGetLastError();
  }
};

}  // namespace

cudaError_t LaunchWriteKv(cudaStream_t stream, const WriteKvArgs& args) {
  if (args.tokens.num_tokens == 0 || args.tokens.num_slots == 0) return cudaSuccess;
  const cudaError_t claimed = ClaimSlots(stream, args.tokens);
  return claimed == cudaSuccess ? SelectWriteKv(args, Launch{stream, args}) : claimed;
}

}  // namespace jax_paged::cuda
