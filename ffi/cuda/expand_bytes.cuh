// SPDX-License-Identifier: Apache-2.0

// Bytes of 8-bit codes to the 16-bit numbers that mma takes.
//
// Bytes are widened two at a time, without a look at single elements: moved to where a 16-bit
// number of the same value, or of the value over a power of two, has its fields, then multiplied
// (fp8), or made the low bits of two numbers with a known exponent and subtracted (int8). All of it
// is exact. The patterns that have no such number (infinity and NaN) go the slow way, four bytes at
// a time. About 3 instructions per element.

#ifndef JAX_PAGED_CUDA_EXPAND_BYTES_CUH_
#define JAX_PAGED_CUDA_EXPAND_BYTES_CUH_

#include <type_traits>

#include "common/dtypes.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

inline constexpr uint32_t kSigns = 0x80008000u;  // of a pair; also the pair -0, -0

// Four stored bytes as two pairs, the lower bytes first.
struct Pairs {
  uint32_t low;
  uint32_t high;
};

// Each byte in the upper half of a 16-bit number.
JAX_PAGED_DEVICE Pairs SpreadBytes(uint32_t bytes) {
  return {prim::PermuteBytes(bytes, 0, 0x1404), prim::PermuteBytes(bytes, 0, 0x3424)};
}

template <typename T, typename Stored>
JAX_PAGED_DEVICE Pairs ExpandSlowly(uint32_t bytes) {
  float x[4];
  JAX_PAGED_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    x[i] = prim::ToFloat(Stored{static_cast<uint8_t>(bytes >> (8 * i))});
  }
  return {prim::PackPair<T>(x[0], x[1]), prim::PackPair<T>(x[2], x[3])};
}

// sign, 7 bits of exponent and mantissa moved down by SHIFT, times 2^k.
template <typename T, int SHIFT>
JAX_PAGED_DEVICE uint32_t MoveFields(uint32_t spread, uint32_t power) {
  constexpr uint32_t kMask = (0x7f00u >> SHIFT) * 0x10001u;
  return prim::FmaPair<T>((spread & kSigns) | (spread >> SHIFT & kMask), power, kSigns);
}

template <typename T>
JAX_PAGED_DEVICE Pairs Expand(uint32_t bytes, Float8E4M3) {
  constexpr bool kIsBf16 = std::is_same_v<T, BFloat16>;
  // All ones is NaN: then bit 7 of magnitude + 1 is set.
  if (((bytes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) {
    return ExpandSlowly<T, Float8E4M3>(bytes);
  }
  constexpr uint32_t kPower = (kIsBf16 ? 0x7b80u : 0x5c00u) * 0x10001u;  // 2^120, 2^8
  const Pairs spread = SpreadBytes(bytes);
  return {MoveFields<T, kIsBf16 ? 4 : 1>(spread.low, kPower),
          MoveFields<T, kIsBf16 ? 4 : 1>(spread.high, kPower)};
}

template <typename T>
JAX_PAGED_DEVICE Pairs Expand(uint32_t bytes, Float8E5M2) {
  if constexpr (std::is_same_v<T, Float16>) {
    return SpreadBytes(bytes);
  } else {
    // Exponent all ones: infinity and NaN.
    if (((bytes & 0x7c7c7c7cu) + 0x04040404u) & 0x80808080u) {
      return ExpandSlowly<T, Float8E5M2>(bytes);
    }
    constexpr uint32_t kPower = 0x77807780u;  // 2^112
    const Pairs spread = SpreadBytes(bytes);
    return {MoveFields<T, 3>(spread.low, kPower), MoveFields<T, 3>(spread.high, kPower)};
  }
}

// x = (2^k + its lower 7 bits) - (2^k + its sign bit): k is 7 for bf16, 10 for f16.
template <typename T>
JAX_PAGED_DEVICE Pairs Expand(uint32_t bytes, Int8) {
  constexpr bool kIsBf16 = std::is_same_v<T, BFloat16>;
  constexpr uint32_t kExponent = kIsBf16 ? 0x43u : 0x64u;  // the upper byte of 2^k
  constexpr uint32_t kMinusOne = kIsBf16 ? 0xbf80bf80u : 0xbc00bc00u;
  const uint32_t lower = bytes & 0x7f7f7f7fu;
  const uint32_t sign = bytes & 0x80808080u;
  const auto subtract = [&](uint32_t selector) {
    return prim::FmaPair<T>(prim::PermuteBytes(sign, kExponent, selector), kMinusOne,
                            prim::PermuteBytes(lower, kExponent, selector));
  };
  return {subtract(0x4140), subtract(0x4342)};
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_EXPAND_BYTES_CUH_
