// SPDX-License-Identifier: Apache-2.0

// Bytes of 8-bit codes to the 16-bit numbers that mma takes. All of it is exact, without branches,
// and the same on all architectures; NaN and infinity stay what they are.
//
//   e5m2 -> f16   a half has the same fields: its upper byte is the code
//   e4m3 -> f16   one conversion for two (sm_89 and later); before, the fields are moved to where a
//                 half over 2^8 has them, and multiplied
//   int8 -> f16   code + 128 as the low bits of a number from 1024 on, minus 1152
//   fp8  -> bf16  by f16 and f32; before sm_89 e4m3 as above, over 2^120
//   int8 -> bf16  as the low bits of two numbers with a known exponent, and subtracted
//
// Instructions for four bytes, as pairs of neighbours:
//           to f16, sm_80   to f16, sm_89   to bf16, sm_80   to bf16, sm_89
//   e4m3         12               2               12                8
//   e5m2          2               2                8                8
//   int8          5               5                8                8

#ifndef JAX_PAGED_CUDA_EXPAND_BYTES_CUH_
#define JAX_PAGED_CUDA_EXPAND_BYTES_CUH_

#include <type_traits>

#include "common/dtypes.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Calls f(stored) with a value of the 8-bit type.
template <typename F>
JAX_PAGED_DEVICE void WithStored(Dtype dtype, F&& f) {
  if (dtype == Dtype::kFloat8E4M3) {
    f(Float8E4M3());
  } else if (dtype == Dtype::kFloat8E5M2) {
    f(Float8E5M2());
  } else {
    f(Int8());
  }
}

// Which of the bytes 0 to 3 of a word become a pair of numbers: i and j, then k and l.
template <uint32_t I, uint32_t J, uint32_t K, uint32_t L>
struct ByteOrder {
  static constexpr uint32_t kI = I, kJ = J, kK = K, kL = L;
};
using Neighbours = ByteOrder<0, 1, 2, 3>;
using Alternate = ByteOrder<0, 2, 1, 3>;

// Four stored bytes as two pairs of numbers: of bytes i and j, and of k and l.
struct Pairs {
  uint32_t low;
  uint32_t high;
};

// Selectors of PermuteBytes. Bytes i and j in the upper halves of two 16-bit numbers, below them
// zeros of the second operand, or, of the upper number, the sign of the lower.
JAX_PAGED_HOST_DEVICE constexpr uint32_t SpreadBytes(uint32_t i, uint32_t j) {
  return j << 12 | 4 << 8 | i << 4 | 4;
}
JAX_PAGED_HOST_DEVICE constexpr uint32_t SpreadSigned(uint32_t i, uint32_t j) {
  return j << 12 | (8 + i) << 8 | i << 4 | 4;
}
// Bytes i and j in the lower halves, above them byte 0 of the second operand.
JAX_PAGED_HOST_DEVICE constexpr uint32_t LowerBytes(uint32_t i, uint32_t j) {
  return 4 << 12 | j << 8 | 4 << 4 | i;
}
// The signs of bytes i and j in all bits of two 16-bit numbers.
JAX_PAGED_HOST_DEVICE constexpr uint32_t SignMasks(uint32_t i, uint32_t j) {
  return 0x8888u + j * 0x1100u + i * 0x11u;
}

inline constexpr uint32_t kMinusZeros = 0x80008000u;  // of a pair; added, it changes nothing

// Codes of e4m3 by moving their 7 bits below the sign down by SHIFT; the result times `power` is
// their value. `signs`: of each byte, whether it is NaN.
template <typename T, int SHIFT>
JAX_PAGED_DEVICE uint32_t MoveFields(uint32_t bytes, uint32_t signs, uint32_t i, uint32_t j,
                                     uint32_t power) {
  constexpr uint32_t kMask = (0x8000u | 0x7f00u >> SHIFT) * 0x10001u;
  // The shift brings signs to where they were: down from the number's own, or the one above.
  const int32_t spread = static_cast<int32_t>(prim::PermuteBytes(bytes, 0, SpreadSigned(i, j)));
  const uint32_t nan = prim::PermuteBytes(signs, 0, SignMasks(i, j));
  const uint32_t fields = (static_cast<uint32_t>(spread >> SHIFT) & kMask) | nan;
  return prim::FmaPair<T>(fields, power, kMinusZeros);
}

// Two halves as numbers of T.
template <typename T>
JAX_PAGED_DEVICE uint32_t FromHalves(uint32_t halves) {
  if constexpr (std::is_same_v<T, Float16>) return halves;
  return prim::PackPair<T>(prim::ToFloat(Float16{static_cast<uint16_t>(halves & 0xffffu)}),
                           prim::ToFloat(Float16{static_cast<uint16_t>(halves >> 16)}));
}

template <typename T, typename Order = Neighbours>
JAX_PAGED_DEVICE Pairs Expand(uint32_t bytes, Float8E4M3) {
  if (prim::ConvertsFp8()) {
    if constexpr (!std::is_same_v<Order, Neighbours>) {
      constexpr uint32_t kOrder = Order::kL << 12 | Order::kK << 8 | Order::kJ << 4 | Order::kI;
      bytes = prim::PermuteBytes(bytes, 0, kOrder);
    }
    const Word2 halves = prim::HalvesOfE4M3(bytes);
    return {FromHalves<T>(halves.x), FromHalves<T>(halves.y)};
  }
  // All ones is NaN: then magnitude + 1 sets the sign.
  const uint32_t signs = (bytes & 0x7f7f7f7fu) + 0x01010101u;
  constexpr bool kIsBf16 = std::is_same_v<T, BFloat16>;
  constexpr int kShift = kIsBf16 ? 4 : 1;
  constexpr uint32_t kPower = (kIsBf16 ? 0x7b80u : 0x5c00u) * 0x10001u;  // 2^120, 2^8
  return {MoveFields<T, kShift>(bytes, signs, Order::kI, Order::kJ, kPower),
          MoveFields<T, kShift>(bytes, signs, Order::kK, Order::kL, kPower)};
}

template <typename T, typename Order = Neighbours>
JAX_PAGED_DEVICE Pairs Expand(uint32_t bytes, Float8E5M2) {
  return {FromHalves<T>(prim::PermuteBytes(bytes, 0, SpreadBytes(Order::kI, Order::kJ))),
          FromHalves<T>(prim::PermuteBytes(bytes, 0, SpreadBytes(Order::kK, Order::kL)))};
}

template <typename T, typename Order = Neighbours>
JAX_PAGED_DEVICE Pairs Expand(uint32_t bytes, Int8) {
  if constexpr (std::is_same_v<T, Float16>) {
    const uint32_t above = bytes ^ 0x80808080u;  // code + 128
    const auto subtract = [&](uint32_t selector) {
      return prim::FmaPair<T>(prim::PermuteBytes(above, 0x64u, selector), 0x3c003c00u, 0xe480e480u);
    };
    return {subtract(LowerBytes(Order::kI, Order::kJ)), subtract(LowerBytes(Order::kK, Order::kL))};
  } else {
    // x = (2^7 + its lower 7 bits) - (2^7 + its sign bit).
    const uint32_t lower = bytes & 0x7f7f7f7fu;
    const uint32_t sign = bytes & 0x80808080u;
    const auto subtract = [&](uint32_t selector) {
      return prim::FmaPair<T>(prim::PermuteBytes(sign, 0x43u, selector), 0xbf80bf80u,
                              prim::PermuteBytes(lower, 0x43u, selector));
    };
    return {subtract(LowerBytes(Order::kI, Order::kJ)), subtract(LowerBytes(Order::kK, Order::kL))};
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_EXPAND_BYTES_CUH_
