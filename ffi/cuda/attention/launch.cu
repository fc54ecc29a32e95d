// SPDX-License-Identifier: Apache-2.0

#include "cuda/attention/launch.h"
#include "cuda/attention/plan.cuh"
#include "cuda/attention/prefill_unit.cuh"
#include "cuda/attention/traits.h"

namespace jax_paged::cuda {
namespace {

__global__ void __launch_bounds__(kPlanThreads, 1)
    PlanKernel(__grid_constant__ const AttentionArgs args) {
  PlanCta(args);
}

template <typename T>
cudaError_t LaunchAs(cudaStream_t stream, const DeviceLimits& limits, AttentionArgs args) {
  cudaError_t error = cudaSuccess;
  const LatentChoice latent = ChooseLatent(args, limits);
  if (latent.decode.rows > 0) return LaunchLatent<T>(stream, limits, args, latent);
  const auto launch = [&](auto head_dim) {
    WithPageKind(args, [&](auto pages) {
      using Decode = DecodeTraits<head_dim.value, pages.value>;
      const KernelChoice choice =
          ChooseKernels(args, limits, Decode::SharedBytes,
                        PrefillTraits<head_dim.value>::kSharedBytes, Decode::kTakesTreesAndPins);
      args.prefill_rows = choice.prefill_rows;
      error = choice.decode.stages == 0
                  ? LaunchSimt<T>(stream, limits, args)
                  : LaunchDecode<T, head_dim.value, pages.value>(stream, limits, args);
      if constexpr (pages.value != PageKind::kEightBit) {
        if (error == cudaSuccess && args.prefill_rows > 0) {
          error = LaunchPrefill<T, head_dim.value, pages.value>(stream, limits, args);
        }
      }
    });
  };
  if (!WithDecodeHeadDim(args.head_dim, args.v_head_dim, launch)) {
    error = LaunchSimt<T>(stream, limits, args);
  }
  return error;
}

}  // namespace

cudaError_t LaunchPlan(cudaStream_t stream, const DeviceLimits& limits, const AttentionArgs& args) {
  // One CTA plans; the others help where there is much to fill or to clear.
  constexpr int64_t kPerCta = 16384;
  const int64_t tree_pairs = int64_t{args.max_seqs} * args.max_tree * args.max_tree / 2;
  const int64_t work =
      (args.num_slots + int64_t{args.num_tokens} * args.num_q_heads + tree_pairs) / kPerCta;
  const int64_t most = limits.multiprocessors;
  const int64_t ctas = 1 + (work < most - 1 ? work : most - 1);
  PlanKernel<<<static_cast<unsigned>(ctas), kPlanThreads, sizeof(PlanShared), stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchAttention(cudaStream_t stream, Dtype dtype, const DeviceLimits& limits,
                            AttentionArgs args) {
  if (args.num_tokens == 0) return cudaSuccess;
  switch (dtype) {
    case Dtype::kBFloat16:
      return LaunchAs<BFloat16>(stream, limits, args);
    case Dtype::kFloat16:
      return LaunchAs<Float16>(stream, limits, args);
    case Dtype::kFloat32:
      return LaunchSimt<float>(stream, limits, args);
    default:  // 8-bit: not a dtype of queries
      return cudaErrorInvalidValue;
  }
}

}  // namespace jax_paged::cuda
