// SPDX-License-Identifier: Apache-2.0

// The emulated attention kernels: planner, decode and prefill, where launch.cu would run them.

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/attention_call.h"
#include "cuda/attention/make_args.h"
#include "cuda/attention/plan.cuh"
#include "cuda/attention/select.h"
#include "emu/attention/kernels.h"
#include "emu/call.h"
#include "emu/machine.h"

namespace jax_paged::emu {
namespace {

std::string Attention(Call& in) {
  AttentionCall call;
  std::string error = AttentionReader(&in, &call).Read(in.Result("out"), in.Result("lse"));
  cuda::AttentionArgs args;
  if (error.empty()) error = cuda::MakeArgs(call, in.Result("workspace"), &args);
  if (!error.empty()) return error;
  EmulatedCall& launch = in.launch();
  args.num_workers = launch.num_workers;
  args.stages = launch.stages;
  const Dtype dtype = call.dtype;
  const cuda::DeviceLimits limits = {launch.num_workers, launch.shared_bytes_per_cta,
                                     launch.shared_bytes_per_multiprocessor};
  const AttentionKernels kernels =
      dtype == Dtype::kBFloat16
          ? BFloat16Kernels(args, limits)
          : (dtype == Dtype::kFloat16 ? Float16Kernels(args, limits) : Float32Kernels(args));
  const bool is_latent = kernels.latent.decode.rows > 0;
  args.prefill_rows = is_latent ? kernels.latent.prefill.rows : kernels.choice.prefill_rows;
  if (is_latent) {
    args.unit_rows = kernels.latent.decode.rows;
    args.stages = std::min(launch.stages, kernels.latent.decode.stages);
  }
  launch.chosen_stages = is_latent ? kernels.latent.decode.stages : kernels.choice.decode.stages;
  launch.chosen_ctas = is_latent ? 1 : kernels.choice.decode.ctas_per_multiprocessor;
  launch.chosen_prefill_rows = args.prefill_rows;
  launch.chosen_latent_rows = kernels.latent.decode.rows;
  error = Launch({launch.plan_ctas, cuda::kPlanThreads, sizeof(cuda::PlanShared), launch.seed},
                 [&] { cuda::PlanCta(args); });
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

}  // namespace
}  // namespace jax_paged::emu

extern "C" {

const char* emulate_attention(EmulatedCall* call) {
  return jax_paged::emu::Emulate(call, jax_paged::emu::Attention);
}

int64_t attention_workspace_words(int64_t max_seqs, int64_t num_kv_heads, int64_t group_size,
                                  int64_t v_head_dim, int64_t capacity, int64_t num_kv_splits,
                                  int64_t split_tokens, int64_t max_tree, int64_t unit_rows) {
  return jax_paged::cuda::WorkspaceWords({max_seqs, num_kv_heads, group_size, v_head_dim, capacity,
                                          num_kv_splits, split_tokens, max_tree, unit_rows});
}

}  // extern "C"
