// SPDX-License-Identifier: Apache-2.0

// Launch interface of the CUDA qkv_norm_rope_write kernel. Knows nothing of XLA.

#ifndef JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_LAUNCH_H_
#define JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "cuda/qkv_norm_rope_write/args.h"

namespace jax_paged::cuda {

cudaError_t LaunchQkv(cudaStream_t stream, Dtype dtype, const QkvArgs& args);

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_LAUNCH_H_
