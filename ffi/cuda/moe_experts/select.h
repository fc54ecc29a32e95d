// SPDX-License-Identifier: Apache-2.0

// Which kernels serve a call: one list for the launch on a GPU and the emulator.

#ifndef JAX_PAGED_CUDA_MOE_EXPERTS_SELECT_H_
#define JAX_PAGED_CUDA_MOE_EXPERTS_SELECT_H_

#include "cuda/moe_experts/args.h"

namespace jax_paged::cuda {

// Calls run.template operator()<T, W>() for the types of x and of the experts.
template <typename Run>
auto SelectMoe(const MoeParams& in, Run run) {
  const auto with = [&](auto x) {
    using T = decltype(x);
    switch (in.w_dtype) {
      case Dtype::kInt8:
        return run.template operator()<T, Int8>();
      case Dtype::kFloat8E4M3:
        return run.template operator()<T, Float8E4M3>();
      default:
        return run.template operator()<T, T>();
    }
  };
  switch (in.dtype) {
    case Dtype::kBFloat16:
      return with(BFloat16());
    case Dtype::kFloat16:
      return with(Float16());
    default:
      return with(float());
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MOE_EXPERTS_SELECT_H_
