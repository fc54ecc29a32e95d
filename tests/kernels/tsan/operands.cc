// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "calls.h"
#include "common/dtypes.h"

namespace jax_paged::tsan {
namespace {

Array Make(XLA_FFI_DataType type, std::vector<int64_t> dims, unsigned char fill) {
  Array array = {type, std::move(dims), Memory()};
  array.memory = Memory(static_cast<size_t>(array.size()) * WidthOf(type), fill);
  return array;
}

template <typename T>
void StoreElement(char* data, int64_t i, float x) {
  T element;
  FromFloat(x, &element);
  std::memcpy(data + i * static_cast<int64_t>(sizeof(T)), &element, sizeof(T));
}

template <typename T>
float LoadElement(const char* data, int64_t i) {
  T element;
  std::memcpy(&element, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return ToFloat(element);
}

}  // namespace

Array Random(XLA_FFI_DataType type, std::vector<int64_t> dims, float size) {
  Array array = Make(type, std::move(dims), 0);
  std::mt19937 bits(static_cast<uint32_t>(array.size()));
  char* const data = array.memory.data();
  for (int64_t i = 0; i < array.size(); ++i) {
    const uint32_t word = static_cast<uint32_t>(bits());
    const float x = size * (static_cast<float>(word >> 9) * 0x1p-22f - 1.0f);
    if (type == kF32) {
      StoreElement<float>(data, i, x);
    } else if (type == kBf16) {
      StoreElement<BFloat16>(data, i, x);
    } else if (type == kF16) {
      StoreElement<Float16>(data, i, x);
    } else {  // codes without the lowest bit of fp8's exponents, so none is NaN
      data[i] = static_cast<char>(word & 0xf3u);
    }
  }
  return array;
}

Array Ints(std::vector<int64_t> dims, const std::vector<int32_t>& values) {
  Array array = Make(kS32, std::move(dims), 0);
  std::memcpy(array.memory.data(), values.data(), array.memory.size());
  return array;
}

Array Floats(std::vector<int64_t> dims, const std::vector<float>& values) {
  Array array = Make(kF32, std::move(dims), 0);
  std::memcpy(array.memory.data(), values.data(), array.memory.size());
  return array;
}

Array None(XLA_FFI_DataType type) { return Make(type, {0}, 0); }

Array Unused(XLA_FFI_DataType type, std::vector<int64_t> dims) {
  const bool is_int8 = type == kInt8;
  return Make(type, std::move(dims), is_int8 ? 0x7f : 0xff);  // all ones are NaN in every float
}

float ElementOf(XLA_FFI_DataType type, const char* data, int64_t i) {
  if (type == kF32) return LoadElement<float>(data, i);
  if (type == kBf16) return LoadElement<BFloat16>(data, i);
  return LoadElement<Float16>(data, i);
}

std::vector<int32_t> Shuffled(int64_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(7));
  return ids;
}

}  // namespace jax_paged::tsan
