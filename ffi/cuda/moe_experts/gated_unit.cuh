// SPDX-License-Identifier: Apache-2.0

// What a lane of moe_experts makes of a gate and an up, and of a bias.

#ifndef JAX_PAGED_CUDA_MOE_EXPERTS_GATED_UNIT_CUH_
#define JAX_PAGED_CUDA_MOE_EXPERTS_GATED_UNIT_CUH_

#include <cstdint>
#include <type_traits>

#include "common/activations.h"
#include "cuda/moe_experts/args.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// x / (1 + 2^-z): x sigmoid(z), where z is in units of log2(e).
JAX_PAGED_DEVICE float TimesSigmoid(float x, float z) { return x / (1.0f + prim::Exp2(-z)); }

// x Phi(x) = max(x, 0) - a Phi(-a), a = |x|. A NaN fails each comparison and stays.
JAX_PAGED_DEVICE float Gelu(float x) {
  float a = x < 0.0f ? -x : x;
  a = a > kGeluLast ? kGeluLast : a;
  const float s = 1.0f / prim::Fma(a, kGeluShift, 1.0f);
  float p = GeluPower(kGeluPowers - 1);
  JAX_PAGED_UNROLL
  for (int32_t k = kGeluPowers - 2; k >= 0; --k) p = prim::Fma(p, s, GeluPower(k));
  const float tail = prim::Exp2(a * kGeluSquare * a) * p;
  return prim::Fma(-a, tail, x > 0.0f ? x : 0.0f);
}

// activation(gate) * up: jax_paged/ops/activations.py has the formulas. All lanes have the same
// activation.
JAX_PAGED_DEVICE float GatedUnit(Activation activation, float limit, float gate, float up) {
  if (activation == Activation::kSilu) return TimesSigmoid(gate, gate * kLog2E) * up;
  if (activation == Activation::kGelu) return Gelu(gate) * up;
  if (activation == Activation::kGeluTanh) {
    const float slope = prim::Fma(gate * kGeluTanh[1], gate, kGeluTanh[0]);
    return TimesSigmoid(gate, gate * slope) * up;
  }
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : (up < -limit ? -limit : up);
  return TimesSigmoid(gate, gate * kSwigluOaiAlpha) * (up + 1.0f);
}

// The limit of Activation::kSwigluOai; 0 with the others.
JAX_PAGED_DEVICE float MoeLimit(const MoeArgs& args) {
  return args.limit ? prim::LoadConst(args.limit) : 0.0f;
}

// T: x's dtype.
template <typename T>
JAX_PAGED_DEVICE float LoadMoeBias(const MoeBiasArgs& bias, int64_t element) {
  if constexpr (!std::is_same_v<T, float>) {
    if (!bias.is_float) {
      const Global<const char> from = bias.data + element * int64_t{sizeof(T)};
      return prim::ToFloat(prim::LoadConst(from.template As<const T>()));
    }
  }
  const Global<const char> from = bias.data + element * int64_t{sizeof(float)};
  return prim::LoadConst(from.template As<const float>());
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MOE_EXPERTS_GATED_UNIT_CUH_
