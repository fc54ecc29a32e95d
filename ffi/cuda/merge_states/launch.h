// SPDX-License-Identifier: Apache-2.0

// Launch interface of the CUDA merge_attention_states kernel. Knows nothing of XLA.

#ifndef JAX_PAGED_CUDA_MERGE_STATES_LAUNCH_H_
#define JAX_PAGED_CUDA_MERGE_STATES_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtypes.h"

namespace jax_paged::cuda {

struct MergeCall {
  const void* out_a;  // [num_heads, head_dim], dtype, as out_b and out
  const float* lse_a;
  const void* out_b;
  const float* lse_b;
  void* out;
  float* lse;         // [num_heads]: tokens x query heads
  int64_t num_heads;  // num_heads * head_dim below 2^31 * 256 * 4
  int64_t head_dim;   // a multiple of 8
};

cudaError_t LaunchMergeStates(cudaStream_t stream, Dtype dtype, const MergeCall& call);

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MERGE_STATES_LAUNCH_H_
