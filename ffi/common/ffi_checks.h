// What the handlers ask of XLA's buffers. The one file here that knows XLA; kernels do not include
// it.

#ifndef JAX_PAGED_COMMON_FFI_CHECKS_H_
#define JAX_PAGED_COMMON_FFI_CHECKS_H_

#include <string>
#include <string_view>
#include <utility>

#include "common/checks.h"
#include "common/dtypes.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged {

template <typename Buffer>
ShapeView Shape(const Buffer& buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().size()};
}

inline std::string TypeText(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::BF16:
      return "bfloat16";
    case xla::ffi::DataType::F16:
      return "float16";
    case xla::ffi::DataType::F32:
      return "float32";
    default:
      return "XLA element type " + std::to_string(static_cast<int>(type));
  }
}

inline std::string ReadDtype(const char* op, const char* argument, xla::ffi::DataType type,
                             Dtype* dtype) {
  switch (type) {
    case xla::ffi::DataType::BF16:
      *dtype = Dtype::kBFloat16;
      return "";
    case xla::ffi::DataType::F16:
      *dtype = Dtype::kFloat16;
      return "";
    case xla::ffi::DataType::F32:
      *dtype = Dtype::kFloat32;
      return "";
    default:
      return Mismatch(op, argument, "bfloat16, float16 or float32", TypeText(type));
  }
}

inline std::string CheckType(const char* op, const char* argument, xla::ffi::DataType got,
                             xla::ffi::DataType expected) {
  if (got == expected) return "";
  return Mismatch(op, argument, TypeText(expected), TypeText(got));
}

// Checks the operands and results of jax_paged.write_kv and reads the two pools.
inline std::string ReadWriteKv(const xla::ffi::AnyBuffer& k_pages,
                               const xla::ffi::AnyBuffer& v_pages, const xla::ffi::AnyBuffer& k,
                               const xla::ffi::AnyBuffer& v, ShapeView slot_mapping,
                               ShapeView layer, std::string_view layout_name,
                               const xla::ffi::AnyBuffer& k_result,
                               const xla::ffi::AnyBuffer& v_result, PoolShape* k_pool,
                               PoolShape* v_pool) {
  constexpr char kOp[] = "jax_paged.write_kv";
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  Dtype k_dtype = Dtype::kFloat32, v_dtype = Dtype::kFloat32;
  Layout layout = Layout::kHnd;
  if (failed(ReadDtype(kOp, "k_pages", k_pages.element_type(), &k_dtype)) ||
      failed(ReadDtype(kOp, "v_pages", v_pages.element_type(), &v_dtype)) ||
      failed(CheckType(kOp, "k", k.element_type(), k_pages.element_type())) ||
      failed(CheckType(kOp, "v", v.element_type(), v_pages.element_type())) ||
      failed(CheckType(kOp, "k_pages result", k_result.element_type(), k_pages.element_type())) ||
      failed(CheckType(kOp, "v_pages result", v_result.element_type(), v_pages.element_type())) ||
      failed(ReadLayout(kOp, layout_name.data(), layout_name.size(), &layout)) ||
      failed(ReadPoolShape(kOp, "k_pages", Shape(k_pages), layout, ByteWidth(k_dtype), k_pool)) ||
      failed(ReadPoolShape(kOp, "v_pages", Shape(v_pages), layout, ByteWidth(v_dtype), v_pool)) ||
      failed(CheckSamePool(kOp, *k_pool, *v_pool, Shape(v_pages))) ||
      failed(CheckSameShape(kOp, "k_pages result", Shape(k_result), Shape(k_pages))) ||
      failed(CheckSameShape(kOp, "v_pages result", Shape(v_result), Shape(v_pages))) ||
      failed(CheckRank(kOp, "slot_mapping", slot_mapping, 1)) ||
      failed(CheckShape(kOp, "layer", layer, {}))) {
    return error;
  }
  const int64_t num_tokens = slot_mapping[0], heads = k_pool->num_kv_heads;
  if (failed(CheckShape(kOp, "k", Shape(k), {num_tokens, heads, k_pool->head_dim}))) return error;
  return CheckShape(kOp, "v", Shape(v), {num_tokens, heads, v_pool->head_dim});
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_FFI_CHECKS_H_
