// SPDX-License-Identifier: Apache-2.0

// Launch interface of the table of slots. Knows nothing of XLA.

#ifndef JAX_PAGED_CUDA_CLAIM_SLOTS_H_
#define JAX_PAGED_CUDA_CLAIM_SLOTS_H_

#include <cuda_runtime_api.h>

#include "cuda/written_tokens.h"

namespace jax_paged::cuda {

// Fills the table; launches nothing where the tokens need none.
cudaError_t ClaimSlots(cudaStream_t stream, const WrittenTokens& tokens);

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_CLAIM_SLOTS_H_
