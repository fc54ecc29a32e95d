// SPDX-License-Identifier: Apache-2.0

// The calls that are run: of every handler, and so large that it shares its work among threads.

#ifndef JAX_PAGED_TESTS_TSAN_CALLS_H_
#define JAX_PAGED_TESTS_TSAN_CALLS_H_

#include <cstdint>
#include <vector>

#include "xla_mock.h"

namespace jax_paged::tsan {

inline constexpr auto kF32 = XLA_FFI_DataType_F32;
inline constexpr auto kF16 = XLA_FFI_DataType_F16;
inline constexpr auto kBf16 = XLA_FFI_DataType_BF16;
inline constexpr auto kFp8 = XLA_FFI_DataType_F8E4M3FN;
inline constexpr auto kInt8 = XLA_FFI_DataType_S8;
inline constexpr auto kS32 = XLA_FFI_DataType_S32;

std::vector<Call> AttentionCalls();  // and of MLA
std::vector<Call> OtherCalls();

// Uniform in (-size, size), or random codes; never NaN. Contents depend on the shape alone.
Array Random(XLA_FFI_DataType type, std::vector<int64_t> dims, float size = 1.0f);
Array Ints(std::vector<int64_t> dims, const std::vector<int32_t>& values);
Array Floats(std::vector<int64_t> dims, const std::vector<float>& values);
// An operand that is not given.
Array None(XLA_FFI_DataType type);
// Memory that no handler may read: NaN, or the largest numbers of int8.
Array Unused(XLA_FFI_DataType type, std::vector<int64_t> dims);

// Element i of floats, as a float.
float ElementOf(XLA_FFI_DataType type, const char* data, int64_t i);

// A permutation of 0 ... count - 1.
std::vector<int32_t> Shuffled(int64_t count);

}  // namespace jax_paged::tsan

#endif  // JAX_PAGED_TESTS_TSAN_CALLS_H_
