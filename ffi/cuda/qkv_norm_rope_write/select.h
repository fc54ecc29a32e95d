// SPDX-License-Identifier: Apache-2.0

// Which instance of the kernel serves a call: one list for the launch on a GPU and the emulator.

#ifndef JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_SELECT_H_
#define JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_SELECT_H_

#include "cuda/qkv_norm_rope_write/args.h"

namespace jax_paged::cuda {

// Calls run.template operator()<T, VEC>() for the element type and the elements of a chunk.
template <typename Run>
auto SelectQkv(Dtype dtype, const QkvArgs& args, Run run) {
  if (dtype == Dtype::kFloat32) {
    if (args.chunk_elements == 4) return run.template operator()<float, 4>();
    return run.template operator()<float, 2>();
  }
  if (dtype == Dtype::kFloat16) {
    if (args.chunk_elements == 8) return run.template operator()<Float16, 8>();
    if (args.chunk_elements == 4) return run.template operator()<Float16, 4>();
    return run.template operator()<Float16, 2>();
  }
  if (args.chunk_elements == 8) return run.template operator()<BFloat16, 8>();
  if (args.chunk_elements == 4) return run.template operator()<BFloat16, 4>();
  return run.template operator()<BFloat16, 2>();
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_SELECT_H_
