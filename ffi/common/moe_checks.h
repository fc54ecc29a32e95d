// SPDX-License-Identifier: Apache-2.0

// What a call of moe_experts is checked for, on CPU, on CUDA and in the emulator. Knows nothing of
// XLA.

#ifndef JAX_PAGED_COMMON_MOE_CHECKS_H_
#define JAX_PAGED_COMMON_MOE_CHECKS_H_

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "common/checks.h"
#include "common/integers.h"
#include "common/moe_params.h"

namespace jax_paged {

// The operands and the result, in order.
struct MoeArrays {
  Array x, gate_up, down, experts, weights;
  Array gate_up_scale, down_scale;       // [0] = none
  Array gate_up_bias, down_bias, limit;  // the same
  Array out;
};

// A bias of x's dtype or f32, or [0]: none.
inline std::string ReadMoeBias(const char* argument, const Array& in, ArrayType x,
                               std::initializer_list<int64_t> dims, MoeBias* bias) {
  *bias = {nullptr, Dtype::kFloat32};
  if (in.type != x && in.type != TypeOf<float>()) {
    return Mismatch(kMoeOp, argument, TypeText(x) + " or float32", TypeText(in.type));
  }
  if (in.shape.rank == 1) return CheckShape(kMoeOp, argument, in.shape, {0});
  *bias = {static_cast<const char*>(in.data), static_cast<Dtype>(in.type)};
  return CheckShape(kMoeOp, argument, in.shape, dims);
}

inline std::string ReadMoe(const MoeArrays& in, std::string_view activation, MoeParams* params) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  if (failed(ReadDtype(kMoeOp, "x", in.x.type, &params->dtype)) ||
      failed(ReadWeightDtype(kMoeOp, "gate_up", in.gate_up.type, in.x.type, &params->w_dtype)) ||
      failed(CheckType(kMoeOp, "down", in.down.type, in.gate_up.type)) ||
      failed(CheckType(kMoeOp, "experts", in.experts.type, TypeOf<int32_t>())) ||
      failed(CheckType(kMoeOp, "weights", in.weights.type, TypeOf<float>())) ||
      failed(CheckType(kMoeOp, "gate_up_scale", in.gate_up_scale.type, TypeOf<float>())) ||
      failed(CheckType(kMoeOp, "down_scale", in.down_scale.type, TypeOf<float>())) ||
      failed(CheckType(kMoeOp, "limit", in.limit.type, TypeOf<float>())) ||
      failed(ReadActivation(kMoeOp, activation, &params->activation)) ||
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
  const int64_t hidden_blocks = CeilDiv(hidden, kScaleBlock);
  const int64_t inner_blocks = CeilDiv(inner, kScaleBlock);
  const bool is_clamped = params->activation == Activation::kSwigluOai;
  if (failed(CheckShape(kMoeOp, "down", in.down.shape, {num_experts, hidden, inner})) ||
      failed(CheckShape(kMoeOp, "gate_up", in.gate_up.shape, {num_experts, 2 * inner, hidden})) ||
      failed(CheckShape(kMoeOp, "experts", in.experts.shape, {num_tokens, k})) ||
      failed(CheckShape(kMoeOp, "weights", in.weights.shape, {num_tokens, k})) ||
      failed(CheckWeightScale(kMoeOp, "gate_up_scale", params->w_dtype, in.gate_up_scale.shape,
                              {num_experts, 2 * inner},
                              {num_experts, 2 * inner_blocks, hidden_blocks})) ||
      failed(CheckWeightScale(kMoeOp, "down_scale", params->w_dtype, in.down_scale.shape,
                              {num_experts, hidden}, {num_experts, hidden_blocks, inner_blocks})) ||
      failed(ReadMoeBias("gate_up_bias", in.gate_up_bias, in.x.type, {num_experts, 2 * inner},
                         &params->gate_up_bias)) ||
      failed(ReadMoeBias("down_bias", in.down_bias, in.x.type, {num_experts, hidden},
                         &params->down_bias)) ||
      failed(is_clamped ? CheckShape(kMoeOp, "limit", in.limit.shape, {})
                        : CheckShape(kMoeOp, "limit", in.limit.shape, {0})) ||
      failed(CheckShape(kMoeOp, "out", in.out.shape, {num_tokens, hidden}))) {
    return error;
  }
  if (in.out.type != in.x.type && in.out.type != TypeOf<float>()) {
    return Mismatch(kMoeOp, "out", TypeText(in.x.type) + " or float32", TypeText(in.out.type));
  }
  params->out_dtype = static_cast<Dtype>(in.out.type);
  if (hidden % 8 != 0 || hidden < 8 || inner % 8 != 0 || inner < 8) {
    return Mismatch(kMoeOp, "gate_up", "hidden and inner sizes that are positive multiples of 8",
                    std::to_string(hidden) + " and " + std::to_string(inner));
  }
  params->x = static_cast<const char*>(in.x.data);
  params->gate_up = static_cast<const char*>(in.gate_up.data);
  params->down = static_cast<const char*>(in.down.data);
  params->experts = static_cast<const int32_t*>(in.experts.data);
  params->weights = static_cast<const float*>(in.weights.data);
  const auto scale = [&](const Array& array, size_t rank) {
    const bool has = IsEightBit(params->w_dtype) && array.shape.rank == rank;
    return has ? static_cast<const float*>(array.data) : nullptr;
  };
  params->gate_up_scale = scale(in.gate_up_scale, /*rank=*/2);
  params->down_scale = scale(in.down_scale, /*rank=*/2);
  params->gate_up_block_scale = scale(in.gate_up_scale, /*rank=*/3);
  params->down_block_scale = scale(in.down_scale, /*rank=*/3);
  params->limit = is_clamped ? static_cast<const float*>(in.limit.data) : nullptr;
  params->out = static_cast<char*>(in.out.data);
  return "";
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_MOE_CHECKS_H_
