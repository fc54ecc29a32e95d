// SPDX-License-Identifier: Apache-2.0

// What a handler of moe_experts checks and reads of XLA's buffers.

#ifndef JAX_PAGED_COMMON_MOE_CHECKS_H_
#define JAX_PAGED_COMMON_MOE_CHECKS_H_

#include <string>
#include <utility>

#include "common/ffi_checks.h"
#include "common/moe_params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged {

// The operands and the result, in order.
struct MoeBuffers {
  const xla::ffi::AnyBuffer& x;
  const xla::ffi::AnyBuffer& gate_up;
  const xla::ffi::AnyBuffer& down;
  const xla::ffi::Buffer<xla::ffi::S32>& experts;
  const xla::ffi::Buffer<xla::ffi::F32>& weights;
  const xla::ffi::Buffer<xla::ffi::F32>& gate_up_scale;  // [0] = none
  const xla::ffi::Buffer<xla::ffi::F32>& down_scale;     // the same
  const xla::ffi::AnyBuffer& out;
};

inline std::string ReadMoe(const MoeBuffers& in, MoeParams* params) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  if (failed(ReadDtype(kMoeOp, "x", TypeOf(in.x), &params->dtype)) ||
      failed(
          ReadWeightDtype(kMoeOp, "gate_up", TypeOf(in.gate_up), TypeOf(in.x), &params->w_dtype)) ||
      failed(CheckType(kMoeOp, "down", TypeOf(in.down), TypeOf(in.gate_up))) ||
      failed(CheckType(kMoeOp, "out", TypeOf(in.out), TypeOf(in.x))) ||
      failed(CheckRank(kMoeOp, "x", Shape(in.x), 2)) ||
      failed(CheckRank(kMoeOp, "down", Shape(in.down), 3)) ||
      failed(CheckRank(kMoeOp, "experts", Shape(in.experts), 2))) {
    return error;
  }
  const int64_t num_tokens = params->num_tokens = Shape(in.x)[0];
  const int64_t hidden = params->hidden = Shape(in.x)[1];
  const int64_t num_experts = params->num_experts = Shape(in.down)[0];
  const int64_t inner = params->inner = Shape(in.down)[2];
  const int64_t k = params->experts_per_token = Shape(in.experts)[1];
  if (failed(CheckShape(kMoeOp, "down", Shape(in.down), {num_experts, hidden, inner})) ||
      failed(CheckShape(kMoeOp, "gate_up", Shape(in.gate_up), {num_experts, 2 * inner, hidden})) ||
      failed(CheckShape(kMoeOp, "experts", Shape(in.experts), {num_tokens, k})) ||
      failed(CheckShape(kMoeOp, "weights", Shape(in.weights), {num_tokens, k})) ||
      failed(CheckWeightScale(kMoeOp, "gate_up_scale", params->w_dtype, Shape(in.gate_up_scale),
                              {num_experts, 2 * inner})) ||
      failed(CheckWeightScale(kMoeOp, "down_scale", params->w_dtype, Shape(in.down_scale),
                              {num_experts, hidden})) ||
      failed(CheckShape(kMoeOp, "out", Shape(in.out), {num_tokens, hidden}))) {
    return error;
  }
  if (hidden % 8 != 0 || hidden < 8 || inner % 8 != 0 || inner < 8) {
    return Mismatch(kMoeOp, "gate_up", "hidden and inner sizes that are positive multiples of 8",
                    std::to_string(hidden) + " and " + std::to_string(inner));
  }
  params->x = static_cast<const char*>(in.x.untyped_data());
  params->gate_up = static_cast<const char*>(in.gate_up.untyped_data());
  params->down = static_cast<const char*>(in.down.untyped_data());
  params->experts = in.experts.typed_data();
  params->weights = in.weights.typed_data();
  const bool is_scaled = IsEightBit(params->w_dtype);
  params->gate_up_scale = is_scaled ? in.gate_up_scale.typed_data() : nullptr;
  params->down_scale = is_scaled ? in.down_scale.typed_data() : nullptr;
  params->out = static_cast<char*>(in.out.untyped_data());
  return "";
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_MOE_CHECKS_H_
