// SPDX-License-Identifier: Apache-2.0

// The emulated attention kernels: planner, decode and prefill, where launch.cu would run them, and
// the planner as an op of its own.

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/attention_call.h"
#include "common/shaped_operands.h"
#include "cuda/attention/begin.cuh"
#include "cuda/attention/make_args.h"
#include "cuda/attention/plan.cuh"
#include "cuda/attention/select.h"
#include "emu/attention/kernels.h"
#include "emu/call.h"
#include "emu/machine.h"

namespace jax_paged::emu {
namespace {

// The kernels of a call, and in `args` what they go by, as for launch.cu's ShapeLaunches; but the
// test says how many workers and stages there are.
AttentionKernels ShapeLaunches(Dtype dtype, EmulatedCall* launch, cuda::AttentionArgs* args) {
  args->num_workers = launch->num_workers;
  args->heads_together = cuda::HeadsTogether(args->num_kv_heads, args->num_workers);
  args->stages = launch->stages;
  const cuda::DeviceLimits limits = {launch->num_workers, launch->shared_bytes_per_cta,
                                     launch->shared_bytes_per_multiprocessor,
                                     /*overlaps_launches=*/false};
  const AttentionKernels kernels =
      dtype == Dtype::kBFloat16
          ? BFloat16Kernels(*args, limits)
          : (dtype == Dtype::kFloat16 ? Float16Kernels(*args, limits) : Float32Kernels(*args));
  const cuda::LatentShape& latent = kernels.latent.decode;
  if (latent.rows > 0) {
    args->unit_rows = latent.rows;
    args->stages = std::min(launch->stages, latent.stages);
    args->prefill_rows = kernels.latent.prefill.rows;
  } else {
    args->prefill_rows = kernels.choice.prefill_rows;
    if (kernels.choice.decode.stages == 0) args->stages = 0;
  }
  launch->chosen_stages = latent.rows > 0 ? latent.stages : kernels.choice.decode.stages;
  launch->chosen_ctas = latent.rows > 0 ? 1 : kernels.choice.decode.ctas_per_multiprocessor;
  launch->chosen_prefill_rows = args->prefill_rows;
  launch->chosen_latent_rows = latent.rows;
  return kernels;
}

std::string Attention(Call& in) {
  AttentionCall call;
  std::string error = AttentionReader(&in, &call).Read(in.Result("out"), in.Result("lse"));
  cuda::AttentionArgs args;
  if (error.empty()) error = cuda::MakeArgs(call, in.Result("workspace"), &args);
  if (!error.empty()) return error;
  EmulatedCall& launch = in.launch();
  const AttentionKernels kernels = ShapeLaunches(call.dtype, &launch, &args);
  const bool is_latent = kernels.latent.decode.rows > 0;
  error = Launch({launch.plan_ctas, cuda::kPlanThreads, sizeof(cuda::PlanShared), launch.seed},
                 [&] { args.has_plan ? cuda::BeginCta(args) : cuda::PlanCta(args); });
  const auto run = [&](const AttentionKernel& kernel, int64_t num_ctas) {
    return Launch(
        {static_cast<int32_t>(num_ctas), is_latent ? cuda::kLatentThreads : cuda::kAttentionThreads,
         kernel.shared_bytes, launch.seed},
        [&] { kernel.run(args); });
  };
  if (error.empty()) error = run(kernels.decode, args.num_workers);
  if (error.empty() && args.prefill_rows > 0) {
    const int64_t units = cuda::MaxPrefillUnits(args);
    if (is_latent) args.stages = std::min(launch.stages, kernels.latent.prefill.stages);
    error = run(kernels.prefill, units < args.num_workers ? units : args.num_workers);
  }
  return error;
}

std::string Plan(Call& in) {
  ShapedOperands operands(&in);
  AttentionCall call;
  std::string error =
      AttentionReader(&operands, &call).Read(operands.Find("out"), operands.Find("lse"));
  cuda::AttentionArgs args;
  if (error.empty()) error = cuda::MakePlanArgs(call, in.Result("plan"), &args);
  if (!error.empty()) return error;
  EmulatedCall& launch = in.launch();
  ShapeLaunches(call.dtype, &launch, &args);
  return Launch({launch.plan_ctas, cuda::kPlanThreads, sizeof(cuda::PlanShared), launch.seed},
                [&] { cuda::PlanCta(args); });
}

}  // namespace
}  // namespace jax_paged::emu

extern "C" {

const char* emulate_attention(EmulatedCall* call) {
  return jax_paged::emu::Emulate(call, jax_paged::emu::Attention);
}
const char* emulate_attention_plan(EmulatedCall* call) {
  return jax_paged::emu::Emulate(call, jax_paged::emu::Plan);
}

int64_t attention_plan_words(int64_t max_seqs, int64_t max_tree) {
  jax_paged::cuda::WorkspaceShape shape = {};
  shape.max_seqs = max_seqs;
  shape.max_tree = max_tree;
  return jax_paged::cuda::PlanWords(shape);
}

int64_t attention_workspace_words(int64_t max_seqs, int64_t num_kv_heads, int64_t group_size,
                                  int64_t v_head_dim, int64_t capacity, int64_t num_kv_splits,
                                  int64_t split_tokens, int64_t max_tree, int64_t unit_rows) {
  const jax_paged::cuda::WorkspaceShape shape = {max_seqs,     num_kv_heads, group_size,
                                                 v_head_dim,   capacity,     num_kv_splits,
                                                 split_tokens, max_tree,     unit_rows};
  return jax_paged::cuda::PlanWords(shape) + jax_paged::cuda::ScratchWords(shape);
}

}  // extern "C"
