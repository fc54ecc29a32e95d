// SPDX-License-Identifier: Apache-2.0

// Launch interface of the CUDA write_kv kernel. Knows nothing of XLA.

#ifndef JAX_PAGED_CUDA_WRITE_KV_LAUNCH_H_
#define JAX_PAGED_CUDA_WRITE_KV_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "cuda/write_kv/args.h"

namespace jax_paged::cuda {

cudaError_t LaunchWriteKv(cudaStream_t stream, const WriteKvArgs& args);

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_WRITE_KV_LAUNCH_H_
