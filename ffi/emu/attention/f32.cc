// SPDX-License-Identifier: Apache-2.0

#include "cuda/attention/simt.cuh"
#include "emu/attention/kernels.h"

namespace jax_paged::emu {

AttentionKernels Float32Kernels(const cuda::AttentionArgs& args) {
  return {{},
          {},
          {cuda::RunSimt<float>, cuda::SimtSharedBytes(args.head_dim, args.v_head_dim)},
          {nullptr, 0}};
}

}  // namespace jax_paged::emu
