// SPDX-License-Identifier: Apache-2.0

// C interface of the emulated moe_experts kernels, for ctypes (test_cuda_emulated_moe.py).

#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda/moe_experts/combine.cuh"
#include "cuda/moe_experts/gemm.cuh"
#include "cuda/moe_experts/plan.cuh"
#include "cuda/moe_experts/select.h"
#include "cuda/moe_experts/simt.cuh"
#include "emu/machine.h"

namespace {

namespace cuda = jax_paged::cuda;
namespace emu = jax_paged::emu;

struct RunTurn {
  const jax_paged::MoeParams& params;
  const cuda::MoeArgs& args;
  int32_t num_ctas;  // of the persistent kernels
  uint32_t seed;

  template <typename T, typename W>
  std::string operator()() const {
    std::string error;
    if (args.num_pairs > 0) {
      const int32_t warps = cuda::MoePlanWarps(args);
      error = emu::Launch({1, warps * emu::kWarpSize, cuda::MoePlanSharedBytes(args), seed},
                          [&] { cuda::MoePlanCta(args, warps).Run(); });
      if (error.empty()) error = Product<T, W, /*IS_GATED=*/true>();
      if (error.empty()) error = Product<T, W, /*IS_GATED=*/false>();
    }
    if (!error.empty()) return error;
    const int32_t ctas = static_cast<int32_t>(cuda::MoeCombineCtas(args));
    return emu::Launch({ctas, cuda::kMoeCombineThreads, /*shared_bytes=*/0, seed},
                       [&] { cuda::MoeCombineThread<T>(args); });
  }

  template <typename T, typename W, bool IS_GATED>
  std::string Product() const {
    if constexpr (!std::is_same_v<T, float>) {
      if (cuda::UsesMoeTensorCores(params)) {
        const int32_t shared_bytes = cuda::MoeStage<W>::kSharedBytes;
        return emu::Launch({num_ctas, cuda::kMoeThreads, shared_bytes, seed},
                           [&] { cuda::MoeGemmCta<T, W, IS_GATED>(args); });
      }
    }
    return emu::Launch({num_ctas, cuda::kMoeThreads, /*shared_bytes=*/0, seed},
                       [&] { cuda::MoeSimtCta<T, W, IS_GATED>(args); });
  }
};

}  // namespace

extern "C" {

// The test has the same struct, field by field.
struct EmulatedMoe {
  const char* x;
  const char* gate_up;
  const char* down;
  const int32_t* experts;
  const float* weights;
  const float* gate_up_scale;  // null: none
  const float* down_scale;
  char* out;
  int32_t* workspace;
  int64_t num_tokens;
  int64_t experts_per_token;
  int64_t num_experts;
  int64_t hidden;
  int64_t inner;
  int64_t workspace_words;
  int32_t dtype;    // Dtype
  int32_t w_dtype;  // Dtype
  int32_t num_ctas;
  uint32_t seed;
  void* gate_up_touched;  // null, or uint8 per byte
  void* down_touched;
};

// Returns "" or what went wrong.
const char* emulate_moe(const EmulatedMoe* in) {
  static std::string error;
  jax_paged::MoeParams params = {};
  params.x = in->x;
  params.gate_up = in->gate_up;
  params.down = in->down;
  params.experts = in->experts;
  params.weights = in->weights;
  params.gate_up_scale = in->gate_up_scale;
  params.down_scale = in->down_scale;
  params.out = in->out;
  params.num_tokens = in->num_tokens;
  params.experts_per_token = in->experts_per_token;
  params.num_experts = in->num_experts;
  params.hidden = in->hidden;
  params.inner = in->inner;
  params.dtype = static_cast<jax_paged::Dtype>(in->dtype);
  params.w_dtype = static_cast<jax_paged::Dtype>(in->w_dtype);
  error = cuda::CheckMoeArgs(params, in->workspace_words);
  if (!error.empty()) return error.c_str();

  const int64_t x_bytes = in->num_tokens * in->hidden * jax_paged::ByteWidth(params.dtype);
  const int64_t pair_bytes = in->num_tokens * in->experts_per_token * 4;
  const int64_t down_elements = in->num_experts * in->hidden * in->inner;
  const int64_t w_bytes = jax_paged::ByteWidth(params.w_dtype);
  emu::ClearRegions();
  emu::AddRegion("x", in->x, x_bytes, /*is_input=*/true);
  emu::AddRegion("gate_up", in->gate_up, 2 * down_elements * w_bytes, true,
                 static_cast<uint8_t*>(in->gate_up_touched));
  emu::AddRegion("down", in->down, down_elements * w_bytes, true,
                 static_cast<uint8_t*>(in->down_touched));
  emu::AddRegion("experts", in->experts, pair_bytes, true);
  emu::AddRegion("weights", in->weights, pair_bytes, true);
  if (in->gate_up_scale) {
    emu::AddRegion("gate_up_scale", in->gate_up_scale, in->num_experts * 2 * in->inner * 4, true);
    emu::AddRegion("down_scale", in->down_scale, in->num_experts * in->hidden * 4, true);
  }
  emu::AddRegion("out", in->out, x_bytes, /*is_input=*/false);
  emu::AddRegion("workspace", in->workspace, in->workspace_words * 4, false);
  const int64_t turn = cuda::MoeTurnTokens(in->num_tokens, in->experts_per_token);
  for (int64_t token = 0; token < in->num_tokens && error.empty(); token += turn) {
    const cuda::MoeArgs args = cuda::MakeMoeArgs(params, in->workspace, token);
    error = cuda::SelectMoe(params, RunTurn{params, args, in->num_ctas, in->seed});
  }
  return error.c_str();
}

int64_t moe_workspace_words(int64_t num_tokens, int64_t experts_per_token, int64_t num_experts,
                            int64_t hidden, int64_t inner, int64_t element_bytes) {
  return cuda::MoeWorkspaceWords(num_tokens, experts_per_token, num_experts, hidden, inner,
                                 element_bytes);
}

}  // extern "C"
