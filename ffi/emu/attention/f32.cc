#include "cuda/attention/simt.cuh"
#include "emu/attention/kernels.h"

namespace jax_paged::emu {

AttentionKernel Float32Kernel(const cuda::AttentionArgs& args) {
  return {[](const cuda::AttentionArgs& a) { cuda::SimtCta<float>(a).Run(); },
          cuda::SimtSharedBytes(args.head_dim, args.v_head_dim)};
}

}  // namespace jax_paged::emu
