// SPDX-License-Identifier: Apache-2.0

// Shape checks of the handlers. Python checks the same first with the caller's names; these defend
// the kernels against calls that came another way. Each returns "" or one line: argument, expected,
// got.

#ifndef JAX_PAGED_COMMON_CHECKS_H_
#define JAX_PAGED_COMMON_CHECKS_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/dtypes.h"
#include "common/page_view.h"

namespace jax_paged {

// The element type of an array: a Dtype, an index, or something else with a number of XLA's.
enum class ArrayType : int { kInt32 = -1, kFirstOther = 1000 };

constexpr ArrayType TypeOf(Dtype dtype) { return static_cast<ArrayType>(dtype); }

template <typename T>
constexpr ArrayType TypeOf();
template <>
constexpr ArrayType TypeOf<float>() {
  return TypeOf(Dtype::kFloat32);
}
template <>
constexpr ArrayType TypeOf<int32_t>() {
  return ArrayType::kInt32;
}

struct ShapeView {
  const int64_t* dims;
  size_t rank;

  int64_t operator[](size_t i) const { return dims[i]; }
  int64_t count() const {
    int64_t elements = 1;
    for (size_t i = 0; i < rank; ++i) elements *= dims[i];
    return elements;
  }
};

inline std::string ShapeText(const int64_t* dims, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

inline std::string Mismatch(const char* op, const char* argument, const std::string& expected,
                            const std::string& got) {
  return std::string(op) + ": " + argument + " expected " + expected + ", got " + got;
}

inline std::string CheckSameShape(const char* op, const char* argument, ShapeView got,
                                  ShapeView expected) {
  bool same = got.rank == expected.rank;
  for (size_t i = 0; same && i < got.rank; ++i) same = got[i] == expected[i];
  if (same) return "";
  return Mismatch(op, argument, "shape " + ShapeText(expected.dims, expected.rank),
                  ShapeText(got.dims, got.rank));
}

inline std::string CheckShape(const char* op, const char* argument, ShapeView got,
                              std::initializer_list<int64_t> expected) {
  return CheckSameShape(op, argument, got, {expected.begin(), expected.size()});
}

// An operand or a result.
struct Array {
  void* data = nullptr;  // an array without elements may have none
  ArrayType type = ArrayType::kFirstOther;
  ShapeView shape = {nullptr, 0};
  bool is_given = false;
};

inline std::string TypeText(ArrayType type) {
  constexpr const char* kNames[] = {"bfloat16",      "float16",     "float32",
                                    "float8_e4m3fn", "float8_e5m2", "int8"};
  const int number = static_cast<int>(type);
  if (type == ArrayType::kInt32) return "int32";
  if (type >= ArrayType::kFirstOther) {
    return "XLA element type " + std::to_string(number - static_cast<int>(ArrayType::kFirstOther));
  }
  return kNames[number];
}

inline std::string CheckType(const char* op, const char* argument, ArrayType got,
                             ArrayType expected) {
  if (got == expected) return "";
  return Mismatch(op, argument, TypeText(expected), TypeText(got));
}

inline bool IsEightBit(ArrayType type) {
  return type >= TypeOf(Dtype::kFloat8E4M3) && type <= TypeOf(Dtype::kInt8);
}

inline std::string ReadDtype(const char* op, const char* argument, ArrayType type, Dtype* dtype) {
  if (type < TypeOf(Dtype::kBFloat16) || type > TypeOf(Dtype::kFloat32)) {
    return Mismatch(op, argument, "bfloat16, float16 or float32", TypeText(type));
  }
  *dtype = static_cast<Dtype>(type);
  return "";
}

// The same for pages, which may be 8-bit.
inline std::string ReadKvDtype(const char* op, const char* argument, ArrayType type, Dtype* dtype) {
  if (!IsEightBit(type)) return ReadDtype(op, argument, type, dtype);
  *dtype = static_cast<Dtype>(type);
  return "";
}

// The same for pages beside q, whose dtype they have, or they are 8-bit.
inline std::string ReadKvDtype(const char* op, const char* argument, ArrayType type, ArrayType q,
                               Dtype* dtype) {
  if (type == q || IsEightBit(type)) return ReadKvDtype(op, argument, type, dtype);
  return Mismatch(op, argument, TypeText(q) + " or 8-bit", TypeText(type));
}

// The dtype of an output: q's or fp8.
inline std::string ReadOutDtype(const char* op, const char* argument, ArrayType type, Dtype q,
                                Dtype* dtype) {
  if (type == TypeOf(Dtype::kFloat8E4M3) || type == TypeOf(Dtype::kFloat8E5M2)) {
    *dtype = static_cast<Dtype>(type);
    return "";
  }
  *dtype = q;
  return CheckType(op, argument, type, TypeOf(q));
}

// Weights have the dtype of x, or they are int8 or fp8 (E4M3).
inline std::string ReadWeightDtype(const char* op, const char* argument, ArrayType type,
                                   ArrayType x, Dtype* dtype) {
  const bool quantized = type == TypeOf(Dtype::kInt8) || type == TypeOf(Dtype::kFloat8E4M3);
  if (quantized || type == x) return ReadKvDtype(op, argument, type, dtype);
  return Mismatch(op, argument, TypeText(x) + " or int8 or float8_e4m3fn", TypeText(type));
}

inline std::string CheckRank(const char* op, const char* argument, ShapeView got, size_t rank) {
  if (got.rank == rank) return "";
  return Mismatch(op, argument, "rank " + std::to_string(rank), ShapeText(got.dims, got.rank));
}

// Scales go with 8-bit weights, and with no others: then they are [0]. There is one for each
// output, or for each block of kScaleBlock outputs and as much of the depth: then the rank is
// higher by one.
inline std::string CheckWeightScale(const char* op, const char* argument, Dtype weight,
                                    ShapeView got, std::initializer_list<int64_t> of_outputs,
                                    std::initializer_list<int64_t> of_blocks) {
  if (!IsEightBit(weight)) return CheckShape(op, argument, got, {0});
  return CheckShape(op, argument, got, got.rank == of_blocks.size() ? of_blocks : of_outputs);
}

// Reads the shape of a pool, with or without a leading num_layers axis; page_view.h has the axes.
inline std::string ReadPoolShape(const char* op, const char* argument, ShapeView pages,
                                 Layout layout, Pool pool, int64_t element_bytes,
                                 PoolShape* shape) {
  const bool is_atoms = layout == Layout::kVllm5d && pool == Pool::kKeys;
  const size_t rank = is_atoms ? 5 : 4;  // without num_layers
  if (pages.rank != rank && pages.rank != rank + 1) {
    return Mismatch(op, argument, is_atoms ? "rank 5 or 6" : "rank 4 or 5",
                    ShapeText(pages.dims, pages.rank));
  }
  const int64_t* dims = pages.dims + (pages.rank - rank);
  if (is_atoms && dims[4] * element_bytes != kKeyAtomBytes) {
    return Mismatch(op, argument, "a last axis of 16 bytes", ShapeText(pages.dims, pages.rank));
  }
  *shape = {/*num_layers=*/pages.rank == rank + 1 ? pages[0] : 1,
            /*num_pages=*/dims[0],
            /*num_kv_heads=*/dims[1],
            /*page_size=*/dims[2],
            /*head_dim=*/dims[3],
            element_bytes,
            layout,
            pool};
  if (layout == Layout::kRpa && dims[2] % 2 != 0) {
    return Mismatch(op, argument, "2 * num_kv_heads rows in each slot",
                    ShapeText(pages.dims, pages.rank));
  }
  if (layout == Layout::kNhd || layout == Layout::kRpa) {
    shape->page_size = dims[1];
    shape->num_kv_heads = dims[2] / shape->rows_per_head();
  } else if (layout == Layout::kVllm5d) {
    shape->page_size = dims[3];
    shape->head_dim = is_atoms ? dims[2] * dims[4] : dims[2];
  }
  if (shape->num_kv_heads < 1 || shape->page_size < 1 || shape->head_dim < 1) {
    return Mismatch(op, argument, "num_kv_heads, page_size and head_dim of at least 1",
                    ShapeText(pages.dims, pages.rank));
  }
  return "";
}

// Whether K and V pools agree in all but head_dim.
inline std::string CheckSamePool(const char* op, const PoolShape& k, const PoolShape& v,
                                 ShapeView v_pages) {
  if (k.num_layers == v.num_layers && k.num_pages == v.num_pages &&
      k.num_kv_heads == v.num_kv_heads && k.page_size == v.page_size) {
    return "";
  }
  return Mismatch(op, "v_pages", "the axes of k_pages (head_dim may differ)",
                  ShapeText(v_pages.dims, v_pages.rank));
}

inline std::string CheckHeadDim(const char* op, const char* argument, int64_t head_dim) {
  constexpr int64_t kMaxHeadDim = 512;
  if (head_dim % 8 == 0 && head_dim >= 8 && head_dim <= kMaxHeadDim) return "";
  return Mismatch(op, argument, "head_dim a multiple of 8 up to 512", std::to_string(head_dim));
}

inline std::string ReadLayout(const char* op, const char* text, size_t length, Layout* layout) {
  const std::string name(text, length);
  if (name == "HND") {
    *layout = Layout::kHnd;
  } else if (name == "NHD") {
    *layout = Layout::kNhd;
  } else if (name == "vllm5d") {
    *layout = Layout::kVllm5d;
  } else if (name == "rpa") {
    *layout = Layout::kRpa;
  } else {
    return Mismatch(op, "layout", "\"HND\", \"NHD\", \"vllm5d\" or \"rpa\"", "\"" + name + "\"");
  }
  return "";
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_CHECKS_H_
