// SPDX-License-Identifier: Apache-2.0

// One call of moe_experts. Knows nothing of XLA or of a device.

#ifndef JAX_PAGED_COMMON_MOE_PARAMS_H_
#define JAX_PAGED_COMMON_MOE_PARAMS_H_

#include <cstdint>

#include "common/activations.h"
#include "common/dtypes.h"

namespace jax_paged {

inline constexpr char kMoeOp[] = "jax_paged.moe_experts";

// What is added to a product: [num_experts, outputs] in x's dtype or f32; null: nothing.
struct MoeBias {
  const char* data;
  Dtype dtype;
};

struct MoeParams {
  const char* x;           // [num_tokens, hidden], dtype
  const char* gate_up;     // [num_experts, 2 inner, hidden], w_dtype: gate rows first
  const char* down;        // [num_experts, hidden, inner], w_dtype
  const int32_t* experts;  // [num_tokens, experts_per_token]
  const float* weights;    // the same
  // Of 8-bit experts; null where there are none such. Those of blocks cover kScaleBlock outputs and
  // as much of the depth; gate and up begin with a block each.
  const float* gate_up_scale;        // [num_experts, 2 inner]
  const float* down_scale;           // [num_experts, hidden]
  const float* gate_up_block_scale;  // [num_experts, 2, blocks of inner, blocks of hidden]
  const float* down_block_scale;     // [num_experts, blocks of hidden, blocks of inner]
  MoeBias gate_up_bias;              // [num_experts, 2 inner]
  MoeBias down_bias;                 // [num_experts, hidden]
  const float* limit;                // scalar, of Activation::kSwigluOai; null with the others
  char* out;                         // [num_tokens, hidden], out_dtype
  int64_t num_tokens;
  int64_t experts_per_token;
  int64_t num_experts;
  int64_t hidden;
  int64_t inner;
  Dtype dtype;
  Dtype w_dtype;
  Dtype out_dtype;  // dtype or f32
  Activation activation;
};

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_MOE_PARAMS_H_
