// SPDX-License-Identifier: Apache-2.0

// Launch interface of the CUDA write_kv kernel. Knows nothing of XLA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/page_view.h"

namespace jax_paged::cuda {

// One pool (K or V) and the tokens to be written to it.
struct WriteKvPool {
  char* pages;         // first byte of the pool, laid out as strides say
  const char* tokens;  // [num_tokens, num_kv_heads, row]
  PoolSlots slots;
  int32_t row_bytes;  // head_dim * sizeof(element)
};

struct WriteKvParams {
  WriteKvPool pools[2];         // K, V
  const int32_t* slot_mapping;  // [num_tokens]
  const int32_t* layer;         // scalar
  int32_t num_tokens;
  int32_t num_kv_heads;
  Layout layout;
};

cudaError_t LaunchWriteKv(cudaStream_t stream, const WriteKvParams& params);

}  // namespace jax_paged::cuda
