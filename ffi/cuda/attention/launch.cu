// SPDX-License-Identifier: Apache-2.0

#include "cuda/attention/launch.h"
#include "cuda/attention/plan.cuh"
#include "cuda/attention/prefill_unit.cuh"
#include "cuda/attention/traits.h"
#include "cuda/launch_kernel.h"

namespace jax_paged::cuda {
namespace {

__global__ void __launch_bounds__(kPlanThreads, 1)
    PlanKernel(__grid_constant__ const AttentionArgs args) {
  prim::StartKernel();
  PlanCta(args);
}

__global__ void __launch_bounds__(kPlanThreads, 1)
    BeginKernel(__grid_constant__ const AttentionArgs args) {
  prim::StartKernel();
  BeginCta(args);
}

// One CTA, and others where there is much to fill or to clear.
int64_t PlanCtas(const DeviceLimits& limits, int64_t work) {
  constexpr int64_t kPerCta = 16384;
  const int64_t most = limits.multiprocessors - 1;
  return 1 + (work / kPerCta < most ? work / kPerCta : most);
}

int64_t BeginWork(const AttentionArgs& args) {
  return args.num_slots + int64_t{args.num_tokens} * args.num_q_heads;
}

template <typename T>
cudaError_t LaunchAs(cudaStream_t stream, const DeviceLimits& limits, const AttentionArgs& args) {
  cudaError_t error = cudaSuccess;
  if (ChooseLatent(args, limits).decode.rows > 0) return LaunchLatent<T>(stream, limits, args);
  const auto launch = [&](auto head_dim) {
    WithPageKind(args, [&](auto pages) {
      error = args.stages == 0 ? LaunchSimt<T>(stream, limits, args)
                               : LaunchDecode<T, head_dim.value, pages.value>(stream, limits, args);
      if (error == cudaSuccess && args.prefill_rows > 0) {
        error = LaunchPrefill<T, head_dim.value, pages.value>(stream, limits, args);
      }
    });
  };
  if (!WithDecodeHeadDim(args.head_dim, args.v_head_dim, launch)) {
    error = LaunchSimt<T>(stream, limits, args);
  }
  return error;
}

}  // namespace

void ShapeLaunches(Dtype dtype, const DeviceLimits& limits, AttentionArgs* args) {
  const LatentChoice latent =
      dtype == Dtype::kFloat32 ? LatentChoice{} : ChooseLatent(*args, limits);
  if (latent.decode.rows > 0) {
    args->unit_rows = latent.decode.rows;
    args->stages = latent.decode.stages;
    args->prefill_rows = latent.prefill.rows;
    args->num_workers =
        limits.multiprocessors < kMaxLatentWorkers ? limits.multiprocessors : kMaxLatentWorkers;
    args->heads_together = 1;
    return;
  }
  KernelChoice choice = {};
  const auto choose = [&](auto head_dim) {
    WithPageKind(*args, [&](auto pages) {
      using Decode = DecodeTraits<head_dim.value, pages.value>;
      choice = ChooseKernels(*args, limits, Decode::SharedBytes,
                             PrefillTraits<head_dim.value>::SharedBytes(pages.value),
                             Decode::kTakesTreesAndPins);
    });
  };
  if (dtype != Dtype::kFloat32) WithDecodeHeadDim(args->head_dim, args->v_head_dim, choose);
  const bool is_simt = choice.decode.stages == 0;
  args->stages = choice.decode.stages;
  args->prefill_rows = choice.prefill_rows;
  args->num_workers = NumWorkers(limits, is_simt ? 2 : choice.decode.ctas_per_multiprocessor);
  args->heads_together = HeadsTogether(args->num_kv_heads, args->num_workers);
}

cudaError_t LaunchPlan(cudaStream_t stream, const DeviceLimits& limits, const AttentionArgs& args) {
  const int64_t tree_pairs = int64_t{args.max_seqs} * args.max_tree * args.max_tree / 2;
  const int64_t ctas = PlanCtas(limits, tree_pairs + (args.out ? BeginWork(args) : 0));
  return LaunchKernel(PlanKernel, ctas, kPlanThreads, sizeof(PlanShared), stream, limits, args);
}

cudaError_t LaunchBegin(cudaStream_t stream, const DeviceLimits& limits,
                        const AttentionArgs& args) {
  return LaunchKernel(BeginKernel, PlanCtas(limits, BeginWork(args)), kPlanThreads,
                      /*shared_bytes=*/0, stream, limits, args);
}

cudaError_t LaunchAttention(cudaStream_t stream, Dtype dtype, const DeviceLimits& limits,
                            const AttentionArgs& args) {
  if (args.num_tokens == 0) return cudaSuccess;
  const cudaError_t error =
      args.has_plan ? LaunchBegin(stream, limits, args) : LaunchPlan(stream, limits, args);
  if (error != cudaSuccess) return error;
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
