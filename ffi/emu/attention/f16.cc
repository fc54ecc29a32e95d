// SPDX-License-Identifier: Apache-2.0

#include "emu/attention/tensor_core.h"

namespace jax_paged::emu {

AttentionKernels Float16Kernels(const cuda::AttentionArgs& args, const cuda::DeviceLimits& limits) {
  return TensorCoreKernels<Float16>(args, limits);
}

}  // namespace jax_paged::emu
