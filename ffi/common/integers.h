// SPDX-License-Identifier: Apache-2.0

// Arithmetic of sizes, for the host and for kernels. In 64 bits, unless it is asked for 32:
// CeilDiv<int32_t>(a, b).

#ifndef JAX_PAGED_COMMON_INTEGERS_H_
#define JAX_PAGED_COMMON_INTEGERS_H_

#include <cstdint>
#include <type_traits>

#include "common/host_device.h"

namespace jax_paged {

// a / b rounded up; neither is negative.
template <typename T = int64_t>
JAX_PAGED_HOST_DEVICE constexpr T CeilDiv(std::common_type_t<T> a, std::common_type_t<T> b) {
  return (a + b - 1) / b;
}

// a rounded up to a multiple of b.
template <typename T = int64_t>
JAX_PAGED_HOST_DEVICE constexpr T RoundUp(std::common_type_t<T> a, std::common_type_t<T> b) {
  return CeilDiv<T>(a, b) * b;
}

template <typename T = int64_t>
JAX_PAGED_HOST_DEVICE constexpr T Clamp(std::common_type_t<T> x, std::common_type_t<T> low,
                                        std::common_type_t<T> high) {
  return x < low ? low : (x > high ? high : x);
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_INTEGERS_H_
