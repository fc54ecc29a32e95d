// SPDX-License-Identifier: Apache-2.0

// What the decode and the prefill kernel do alike to rows that lie as mma.m16n8k16 has them: a lane
// has rows l/4 and l/4 + 8, and of each 8 columns the two at 2(l%4).

#ifndef JAX_PAGED_CUDA_ATTENTION_TENSOR_CORE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_TENSOR_CORE_CUH_

#include <cstdint>

#include "cuda/attention/args.h"
#include "cuda/attention/logits.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// 8 columns of a packed row of Q, with the sign of sm_scale; 0 beyond the unit's rows and beyond
// head_dim.
template <typename T>
JAX_PAGED_DEVICE Word4 LoadQueries(const AttentionArgs& args, const Segment& segment,
                                   const UnitRows& rows, const LogitScale& scale, int32_t row,
                                   int32_t chunk) {
  const uint32_t sign = scale.is_negative ? 0x80008000u : 0u;
  Word4 x = {0, 0, 0, 0};
  if (row < rows.count && !scale.is_zero && chunk * 8 < args.head_dim) {
    const int64_t head = HeadIndex(args, segment, rows, row);
    x = prim::LoadConst((args.q + (head * args.head_dim + chunk * 8) * int64_t{sizeof(T)})
                            .template As<const Word4>());
    x = {x.x ^ sign, x.y ^ sign, x.z ^ sign, x.w ^ sign};
  }
  return x;
}

// The scores of the lane's row l/4 + 8 half become weights times 2^LIFT, *m and *l move on. Returns
// what the row's O so far is to be multiplied with.
template <int LIFT = 0, int N>
JAX_PAGED_DEVICE float SoftmaxStep(float scale, int32_t half, float (&s)[N][4], float* m,
                                   float* l) {
  float top = prim::Max(s[0][2 * half], s[0][2 * half + 1]);
  JAX_PAGED_UNROLL
  for (int32_t n = 1; n < N; ++n) {
    top = prim::Max(top, prim::Max(s[n][2 * half], s[n][2 * half + 1]));
  }
  top = prim::Max(top, prim::ShuffleXor(top, 1));
  top = prim::Max(top, prim::ShuffleXor(top, 2));
  const float new_m = prim::Max(*m, top * scale);
  const float base = Base(new_m);
  const float keep = prim::Exp2(*m - base);
  *m = new_m;
  const float subtract = LIFT == 0 ? -base : LIFT - base;
  float sum = 0.0f;
  JAX_PAGED_UNROLL
  for (int32_t n = 0; n < N; ++n) {
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      float& weight = s[n][2 * half + i];
      weight = prim::Exp2(prim::Fma(weight, scale, subtract));
      sum += weight;
    }
  }
  *l = prim::Fma(*l, keep, sum);
  return keep;
}

// Of scales of V per token: the largest so far, to begin with. No division by 0.
inline constexpr float kSmallestScale = 1.17549435e-38f;

// The scale of a unit's K or V where it is one per head.
JAX_PAGED_DEVICE float HeadScale(const DeviceKvScale& scale, int32_t kv_head) {
  return scale.data && !scale.per_token ? prim::LoadConst(scale.data + kv_head) : 1.0f;
}

// The weights of 16 tokens, 8 in each, as the A operand: the C layout of S is the A layout of P. l
// sums the unrounded weights: rounding is unbiased.
template <typename T>
JAX_PAGED_DEVICE void PackWeights(const float (&first)[4], const float (&second)[4],
                                  uint32_t (&a)[4]) {
  JAX_PAGED_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    const float (&x)[4] = i < 2 ? first : second;
    a[i] = prim::PackPair<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_TENSOR_CORE_CUH_
