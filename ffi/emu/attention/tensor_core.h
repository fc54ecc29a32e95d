// SPDX-License-Identifier: Apache-2.0

// The kernels of a call whose Q has 16-bit elements, as the emulator runs them.

#ifndef JAX_PAGED_EMU_ATTENTION_TENSOR_CORE_H_
#define JAX_PAGED_EMU_ATTENTION_TENSOR_CORE_H_

#include "cuda/attention/decode.cuh"
#include "cuda/attention/latent.cuh"
#include "cuda/attention/prefill.cuh"
#include "cuda/attention/select.h"
#include "cuda/attention/simt.cuh"
#include "emu/attention/kernels.h"

namespace jax_paged::emu {

template <typename T, bool EIGHT_BIT>
void ChooseLatentKernels(AttentionKernels* kernels) {
  const cuda::LatentChoice& latent = kernels->latent;
  cuda::WithLatentRows(latent.decode.rows, [&](auto rows) {
    kernels->decode = {cuda::LatentCta<T, rows.value, EIGHT_BIT>, latent.decode.shared_bytes};
  });
  cuda::WithLatentPrefillRows(latent.prefill.rows, [&](auto rows) {
    kernels->prefill = {cuda::LatentPrefillCta<T, rows.value, EIGHT_BIT>,
                        latent.prefill.shared_bytes};
  });
}

template <typename T>
AttentionKernels TensorCoreKernels(const cuda::AttentionArgs& args,
                                   const cuda::DeviceLimits& limits) {
  AttentionKernels kernels = {};
  kernels.decode = {cuda::RunSimt<T>, cuda::SimtSharedBytes(args.head_dim, args.v_head_dim)};
  kernels.latent = cuda::ChooseLatent(args, limits);
  if (kernels.latent.decode.rows > 0) {
    if (IsEightBit(args.kv_dtype)) {
      ChooseLatentKernels<T, /*EIGHT_BIT=*/true>(&kernels);
    } else {
      ChooseLatentKernels<T, /*EIGHT_BIT=*/false>(&kernels);
    }
    return kernels;
  }
  cuda::WithDecodeHeadDim(args.head_dim, args.v_head_dim, [&](auto head_dim) {
    using Prefill = cuda::PrefillTraits<head_dim.value>;
    cuda::WithPageKind(args, [&](auto pages) {
      using Decode = cuda::DecodeTraits<head_dim.value, pages.value>;
      kernels.choice =
          cuda::ChooseKernels(args, limits, Decode::SharedBytes, Prefill::SharedBytes(pages.value),
                              Decode::kTakesTreesAndPins);
      if (kernels.choice.decode.stages > 0) {
        kernels.decode = {cuda::DecodeCta<T, head_dim.value, pages.value>,
                          Decode::SharedBytes(args.stages)};
      }
      kernels.prefill = {cuda::PrefillCta<T, head_dim.value, pages.value>,
                         Prefill::SharedBytes(pages.value)};
    });
  });
  return kernels;
}

}  // namespace jax_paged::emu

#endif  // JAX_PAGED_EMU_ATTENTION_TENSOR_CORE_H_
