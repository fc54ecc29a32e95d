// SPDX-License-Identifier: Apache-2.0

// f32 to 8 bits. To fp8 in integer arithmetic: the instructions for it begin with sm_89.

#ifndef JAX_PAGED_CUDA_CODES_CUH_
#define JAX_PAGED_CUDA_CODES_CUH_

#include "common/dtypes.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// The nearest code, ties to even, clamped to the largest; NaN: all ones.
template <int MANTISSA_BITS, int BIAS, uint32_t LARGEST_CODE>
JAX_PAGED_DEVICE uint32_t Fp8Code(float x) {
  constexpr int kShift = 23 - MANTISSA_BITS;
  constexpr uint32_t kRebias = (127 - BIAS) << MANTISSA_BITS;
  constexpr uint32_t kLargest = (LARGEST_CODE + kRebias) << kShift;  // as bits of a float
  constexpr uint32_t kSmallestNormal = (127 - BIAS + 1) << 23;
  // A float whose last bit is worth the smallest code: a sum with it rounds there.
  constexpr uint32_t kMagic = (127 + 24 - BIAS - MANTISSA_BITS) << 23;
  const uint32_t bits = prim::BitCast<uint32_t>(x);
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude >= kLargest) return sign | LARGEST_CODE;
  if (magnitude < kSmallestNormal) {
    const float sum = prim::BitCast<float>(magnitude) + prim::BitCast<float>(kMagic);
    return sign | (prim::BitCast<uint32_t>(sum) & 0xffu);
  }
  const uint32_t half = (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1);
  return sign | (((magnitude + half) >> kShift) - kRebias);
}

JAX_PAGED_DEVICE uint32_t Fp8Code(Dtype dtype, float x) {
  return dtype == Dtype::kFloat8E4M3 ? Fp8Code<3, 7, 0x7e>(x) : Fp8Code<2, 15, 0x7b>(x);
}

// The codes of x / scale in one word.
JAX_PAGED_DEVICE uint32_t Fp8Quad(Dtype dtype, const Float4& x, float scale) {
  return Fp8Code(dtype, x.x / scale) | Fp8Code(dtype, x.y / scale) << 8 |
         Fp8Code(dtype, x.z / scale) << 16 | Fp8Code(dtype, x.w / scale) << 24;
}

// The nearest int8, ties to even, clamped to 127 either way; NaN: 0.
JAX_PAGED_DEVICE uint32_t Int8Code(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has the number in its low bits
  const float low = x < -127.0f ? -127.0f : x;
  const float y = low > 127.0f ? 127.0f : low;
  return y == y ? prim::BitCast<uint32_t>(y + kRound) & 0xffu : 0u;
}

// The code of x in any 8-bit dtype.
JAX_PAGED_DEVICE uint32_t EightBitCode(Dtype dtype, float x) {
  return dtype == Dtype::kInt8 ? Int8Code(x) : Fp8Code(dtype, x);
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_CODES_CUH_
