// SPDX-License-Identifier: Apache-2.0

// One call of moe_experts. Knows nothing of XLA or of a device.

#ifndef JAX_PAGED_COMMON_MOE_PARAMS_H_
#define JAX_PAGED_COMMON_MOE_PARAMS_H_

#include <cstdint>

#include "common/dtypes.h"

namespace jax_paged {

inline constexpr char kMoeOp[] = "jax_paged.moe_experts";

struct MoeParams {
  const char* x;               // [num_tokens, hidden], dtype
  const char* gate_up;         // [num_experts, 2 inner, hidden], w_dtype: gate rows first
  const char* down;            // [num_experts, hidden, inner], w_dtype
  const int32_t* experts;      // [num_tokens, experts_per_token]
  const float* weights;        // the same
  const float* gate_up_scale;  // [num_experts, 2 inner]; null where the experts have x's dtype, and
  const float* down_scale;     // [num_experts, hidden]     so is down_scale
  char* out;                   // [num_tokens, hidden], dtype
  int64_t num_tokens;
  int64_t experts_per_token;
  int64_t num_experts;
  int64_t hidden;
  int64_t inner;
  Dtype dtype;
  Dtype w_dtype;
};

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_MOE_PARAMS_H_
