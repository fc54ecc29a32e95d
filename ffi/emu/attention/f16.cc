#include "cuda/attention/decode.cuh"
#include "cuda/attention/prefill.cuh"
#include "cuda/attention/select.h"
#include "cuda/attention/simt.cuh"
#include "emu/attention/kernels.h"

namespace jax_paged::emu {

AttentionKernels Float16Kernels(const cuda::AttentionArgs& args, const cuda::DeviceLimits& limits) {
  AttentionKernels kernels = {};
  kernels.decode = {[](const cuda::AttentionArgs& a) { cuda::SimtCta<Float16>(a).Run(); },
                    cuda::SimtSharedBytes(args.head_dim, args.v_head_dim)};
  cuda::WithDecodeHeadDim(args.head_dim, args.v_head_dim, [&](auto head_dim) {
    using Prefill = cuda::PrefillTraits<head_dim.value>;
    cuda::WithPageKind(args, [&](auto pages) {
      using Decode = cuda::DecodeTraits<head_dim.value, pages.value>;
      kernels.choice = cuda::ChooseKernels(args, limits, Decode::SharedBytes, Prefill::kSharedBytes,
                                           Decode::kTakesTrees);
      if (kernels.choice.decode.stages > 0) {
        kernels.decode = {cuda::DecodeCta<Float16, head_dim.value, pages.value>,
                          Decode::SharedBytes(args.stages)};
      }
    });
    kernels.prefill = {cuda::PrefillCta<Float16, head_dim.value>, Prefill::kSharedBytes};
  });
  return kernels;
}

}  // namespace jax_paged::emu
