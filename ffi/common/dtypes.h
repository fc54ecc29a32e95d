// SPDX-License-Identifier: Apache-2.0

// Storage types of q, K, V and the output, and their scalar conversions.
//
// Plain C++17, no intrinsics: the conversions here serve the generic kernels, on any architecture.

#ifndef JAX_PAGED_COMMON_DTYPES_H_
#define JAX_PAGED_COMMON_DTYPES_H_

#include <cstdint>
#include <cstring>

namespace jax_paged {

enum class Dtype : int {
  kBFloat16 = 0,
  kFloat16 = 1,
  kFloat32 = 2,
  kFloat8E4M3 = 3,  // the finite kind: no infinities, largest 448
  kFloat8E5M2 = 4,
  kInt8 = 5
};
inline constexpr int kNumDtypes = 3;  // that kernels compute in: the first ones

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// 8-bit storage of K and V.
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};
struct Int8 {
  int8_t value;
};

// Outputs, and as much of the depth, of 8-bit weights that share a scale where blocks have one.
inline constexpr int32_t kScaleBlock = 128;

inline bool IsEightBit(Dtype dtype) { return static_cast<int>(dtype) >= kNumDtypes; }

// The largest number that an 8-bit dtype has.
inline float LargestCode(Dtype dtype) {
  return dtype == Dtype::kInt8 ? 127.0f : (dtype == Dtype::kFloat8E4M3 ? 448.0f : 57344.0f);
}

inline int64_t ByteWidth(Dtype dtype) {
  return IsEightBit(dtype) ? 1 : (dtype == Dtype::kFloat32 ? 4 : 2);
}

inline uint32_t FloatBits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatFromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float ToFloat(float x) { return x; }

inline float ToFloat(BFloat16 x) { return FloatFromBits(static_cast<uint32_t>(x.bits) << 16); }

inline float ToFloat(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // inf, NaN: keep the payload
    return FloatFromBits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // No subnormal floats on the way: XLA's threads treat them as 0.
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  return FloatFromBits(sign | (magnitude < 0x400u ? FloatBits(subnormal) : normal));
}

inline float ToFloat(Float8E5M2 x) { return ToFloat(Float16{static_cast<uint16_t>(x.bits << 8)}); }

// A half with the same fields has its exponent 8 too low; NaN is the one pattern of all ones.
inline float ToFloat(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t half = magnitude == 0x7fu ? 0x7fffu : magnitude << 7;
  return ToFloat(Float16{static_cast<uint16_t>((x.bits & 0x80u) << 8 | half)}) * 256.0f;
}

inline float ToFloat(Int8 x) { return static_cast<float>(x.value); }

inline void FromFloat(float x, float* out) { *out = x; }

// Round to nearest even; NaN stays NaN.
inline void FromFloat(float x, BFloat16* out) {
  const uint32_t bits = FloatBits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((bits >> 16) | 0x40u);
    return;
  }
  out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Round to nearest even, subnormals included; beyond the range: infinity; NaN stays NaN.
inline void FromFloat(float x, Float16* out) {
  const uint32_t bits = FloatBits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520, halfway between the largest half and infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves multiples of 2^-24
    half = FloatBits(FloatFromBits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_DTYPES_H_
