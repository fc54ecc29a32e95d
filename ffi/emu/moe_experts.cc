// SPDX-License-Identifier: Apache-2.0

// The emulated moe_experts kernels.

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "common/moe_checks.h"
#include "cuda/moe_experts/combine.cuh"
#include "cuda/moe_experts/gemm.cuh"
#include "cuda/moe_experts/plan.cuh"
#include "cuda/moe_experts/select.h"
#include "cuda/moe_experts/simt.cuh"
#include "emu/call.h"
#include "emu/machine.h"

namespace jax_paged::emu {
namespace {

struct RunTurn {
  const MoeParams& params;
  const cuda::MoeArgs& args;
  const EmulatedCall& launch;

  template <typename T, typename W>
  std::string operator()() const {
    std::string error;
    if (args.num_pairs > 0) {
      const int32_t warps = cuda::MoePlanWarps(args);
      error = Launch({1, warps * kWarpSize, cuda::MoePlanSharedBytes(args), launch.seed},
                     [&] { cuda::MoePlanCta(args, warps).Run(); });
      if (error.empty()) error = Product<T, W, /*IS_GATED=*/true>();
      if (error.empty()) error = Product<T, W, /*IS_GATED=*/false>();
    }
    if (!error.empty()) return error;
    const bool is_wide = params.out_dtype == Dtype::kFloat32;
    const auto combine = is_wide ? cuda::MoeCombineThread<float> : cuda::MoeCombineThread<T>;
    const int32_t ctas = static_cast<int32_t>(cuda::MoeCombineCtas(args));
    return Launch({ctas, cuda::kMoeCombineThreads, /*shared_bytes=*/0, launch.seed},
                  [&] { combine(args); });
  }

  template <typename T, typename W, bool IS_GATED>
  std::string Product() const {
    if constexpr (!std::is_same_v<T, float>) {
      if (cuda::UsesMoeTensorCores(params)) {
        const int32_t shared_bytes = cuda::MoeStage<W>::kSharedBytes;
        return Launch({launch.num_workers, cuda::kMoeThreads, shared_bytes, launch.seed},
                      [&] { cuda::MoeGemmCta<T, W, IS_GATED>(args); });
      }
    }
    return Launch({launch.num_workers, cuda::kMoeThreads, /*shared_bytes=*/0, launch.seed},
                  [&] { cuda::MoeSimtCta<T, W, IS_GATED>(args); });
  }
};

std::string MoeExperts(Call& in) {
  MoeParams params = {};
  const Array workspace = in.Result("workspace");
  std::string error =
      ReadMoe({in.Find("x"), in.Find("gate_up"), in.Find("down"), in.Find("experts"),
               in.Find("weights"), in.Find("gate_up_scale"), in.Find("down_scale"),
               in.Find("gate_up_bias"), in.Find("down_bias"), in.Find("limit"), in.Result("out")},
              in.Attribute<std::string_view>("activation", ""), &params);
  if (error.empty()) error = cuda::CheckMoeArgs(params, workspace.shape.count());
  const int64_t turn = cuda::MoeTurnTokens(params.num_tokens, params.experts_per_token);
  for (int64_t token = 0; token < params.num_tokens && error.empty(); token += turn) {
    const cuda::MoeArgs args =
        cuda::MakeMoeArgs(params, static_cast<int32_t*>(workspace.data), token);
    error = cuda::SelectMoe(params, RunTurn{params, args, in.launch()});
  }
  return error;
}

}  // namespace
}  // namespace jax_paged::emu

extern "C" {

const char* emulate_moe_experts(EmulatedCall* call) {
  return jax_paged::emu::Emulate(call, jax_paged::emu::MoeExperts);
}

int64_t moe_experts_workspace_words(int64_t num_tokens, int64_t experts_per_token,
                                    int64_t num_experts, int64_t hidden, int64_t inner,
                                    int64_t element_bytes) {
  return jax_paged::cuda::MoeWorkspaceWords(num_tokens, experts_per_token, num_experts, hidden,
                                            inner, element_bytes);
}

}  // extern "C"
