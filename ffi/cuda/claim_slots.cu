// SPDX-License-Identifier: Apache-2.0

// The launches that fill the table of slots. written_tokens.cuh says how it works.

#include "cuda/claim_slots.h"
#include "cuda/written_tokens.cuh"

namespace jax_paged::cuda {
namespace {

__global__ void __launch_bounds__(kClaimThreads)
    ClaimSlotsKernel(__grid_constant__ const WrittenTokens tokens) {
  ClaimSlot(tokens);
}

}  // namespace

cudaError_t ClaimSlots(cudaStream_t stream, const WrittenTokens& tokens) {
  if (!tokens.table) return cudaSuccess;
  const size_t bytes = static_cast<size_t>(tokens.table_words) * sizeof(int32_t);
  const cudaError_t cleared = cudaMemsetAsync(tokens.table.get(), 0xff, bytes, stream);
  if (cleared != cudaSuccess) return cleared;
  ClaimSlotsKernel<<<NumClaimCtas(tokens), kClaimThreads, /*smem=*/0, stream>>>(tokens);
  return cudaGetLastError();
}

}  // namespace jax_paged::cuda
