// What both handlers ask of XLA's buffers.

#ifndef JAX_PAGED_CPU_FFI_CHECKS_H_
#define JAX_PAGED_CPU_FFI_CHECKS_H_

#include <string>

#include "common/checks.h"
#include "common/dtypes.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cpu {

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

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_FFI_CHECKS_H_
