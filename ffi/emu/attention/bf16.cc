#include "cuda/attention/decode.cuh"
#include "cuda/attention/select.h"
#include "cuda/attention/simt.cuh"
#include "emu/attention/kernels.h"

namespace jax_paged::emu {

AttentionKernel BFloat16Kernel(const cuda::AttentionArgs& args) {
  AttentionKernel kernel = {[](const cuda::AttentionArgs& a) { cuda::SimtCta<BFloat16>(a).Run(); },
                            cuda::SimtSharedBytes(args.head_dim, args.v_head_dim)};
  if (!cuda::HasTensorCorePages(args)) return kernel;
  cuda::WithDecodeHeadDim(args.head_dim, args.v_head_dim, [&](auto head_dim) {
    kernel = {args.layout == Layout::kVllm5d ? cuda::DecodeCta<BFloat16, head_dim.value, true>
                                             : cuda::DecodeCta<BFloat16, head_dim.value>,
              cuda::DecodeTraits<head_dim.value>::SharedBytes(args.stages)};
  });
  return kernel;
}

}  // namespace jax_paged::emu
