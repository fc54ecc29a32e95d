// SPDX-License-Identifier: Apache-2.0

// What a call of moe_experts is checked for, on CPU, on CUDA and in the emulator. Knows nothing of
// XLA.

#ifndef JAX_PAGED_COMMON_MOE_CHECKS_H_
#define JAX_PAGED_COMMON_MOE_CHECKS_H_

#include <string>
#include <utility>

#include "common/checks.h"
#include "common/moe_params.h"

namespace jax_paged {

// The operands and the result, in order.
struct MoeArrays {
  Array x, gate_up, down, experts, weights;
  Array gate_up_scale, down_scale;  // [0] = none
  Array out;
};

inline std::string ReadMoe(const MoeArrays& in, MoeParams* params) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  if (failed(ReadDtype(kMoeOp, "x", in.x.type, &params->dtype)) ||
      failed(ReadWeightDtype(kMoeOp, "gate_up", in.gate_up.type, in.x.type, &params->w_dtype)) ||
      failed(CheckType(kMoeOp, "down", in.down.type, in.gate_up.type)) ||
      failed(CheckType(kMoeOp, "out", in.out.type, in.x.type)) ||
      failed(CheckType(kMoeOp, "experts", in.experts.type, TypeOf<int32_t>())) ||
      failed(CheckType(kMoeOp, "weights", in.weights.type, TypeOf<float>())) ||
      failed(CheckType(kMoeOp, "gate_up_scale", in.gate_up_scale.type, TypeOf<float>())) ||
      failed(CheckType(kMoeOp, "down_scale", in.down_scale.type, TypeOf<float>())) ||
      failed(CheckRank(kMoeOp, "x", in.x.shape, 2)) ||
      failed(CheckRank(kMoeOp, "down", in.down.shape, 3)) ||
      failed(CheckRank(kMoeOp, "experts", in.experts.shape, 2))) {
    return error;
  }
  const int64_t num_tokens = params->num_tokens = in.x.shape[0];
  const int64_t hidden = params->hidden = in.x.shape[1];
  const int64_t num_experts = params->num_experts = in.down.shape[0];
  const int64_t inner = params->inner = in.down.shape[2];
  const int64_t k = params->experts_per_token = in.experts.shape[1];
  if (failed(CheckShape(kMoeOp, "down", in.down.shape, {num_experts, hidden, inner})) ||
      failed(CheckShape(kMoeOp, "gate_up", in.gate_up.shape, {num_experts, 2 * inner, hidden})) ||
      failed(CheckShape(kMoeOp, "experts", in.experts.shape, {num_tokens, k})) ||
      failed(CheckShape(kMoeOp, "weights", in.weights.shape, {num_tokens, k})) ||
      failed(CheckWeightScale(kMoeOp, "gate_up_scale", params->w_dtype, in.gate_up_scale.shape,
                              {num_experts, 2 * inner})) ||
      failed(CheckWeightScale(kMoeOp, "down_scale", params->w_dtype, in.down_scale.shape,
                              {num_experts, hidden})) ||
      failed(CheckShape(kMoeOp, "out", in.out.shape, {num_tokens, hidden}))) {
    return error;
  }
  if (hidden % 8 != 0 || hidden < 8 || inner % 8 != 0 || inner < 8) {
    return Mismatch(kMoeOp, "gate_up", "hidden and inner sizes that are positive multiples of 8",
                    std::to_string(hidden) + " and " + std::to_string(inner));
  }
  params->x = static_cast<const char*>(in.x.data);
  params->gate_up = static_cast<const char*>(in.gate_up.data);
  params->down = static_cast<const char*>(in.down.data);
  params->experts = static_cast<const int32_t*>(in.experts.data);
  params->weights = static_cast<const float*>(in.weights.data);
  const bool is_scaled = IsEightBit(params->w_dtype);
  params->gate_up_scale = is_scaled ? static_cast<const float*>(in.gate_up_scale.data) : nullptr;
  params->down_scale = is_scaled ? static_cast<const float*>(in.down_scale.data) : nullptr;
  params->out = static_cast<char*>(in.out.data);
  return "";
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_MOE_CHECKS_H_
