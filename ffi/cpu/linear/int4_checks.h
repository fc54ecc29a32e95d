// SPDX-License-Identifier: Apache-2.0

// What the handlers of linear and moe_experts check 4-bit weights for (linear/int4.h).

#ifndef JAX_PAGED_CPU_LINEAR_INT4_CHECKS_H_
#define JAX_PAGED_CPU_LINEAR_INT4_CHECKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/checks.h"
#include "cpu/linear/kernels.h"

namespace jax_paged::cpu {

// Reads 4-bit weights of one matrix, or of some, one behind the other: their first panel. Codes are
// u32[matrices, out / 16, depth / 8, 16], scales [matrices, out / 16, groups, 16], or with offsets
// [..., groups, 2, 16]; `leading` axes come before the panels, 0 or 1.
inline std::string ReadInt4(const char* op, const char* codes_name, const Array& codes,
                            const char* scales_name, const Array& scales, size_t leading,
                            Int4Panel* first) {
  const size_t rank = leading + 3;
  std::string error = CheckRank(op, codes_name, codes.shape, rank);
  if (!error.empty()) return error;
  if (scales.shape.rank != rank + 1) error = CheckRank(op, scales_name, scales.shape, rank);
  if (!error.empty()) return error;
  Dtype dtype;
  error = ReadDtype(op, scales_name, scales.type, &dtype);
  if (!error.empty()) return error;
  if (dtype == Dtype::kBFloat16) return Mismatch(op, scales_name, "dtype f16 or f32", "bf16");
  const bool has_offsets = scales.shape.rank == rank + 1;
  const int64_t* const dims = codes.shape.dims;
  const int64_t panels = dims[leading], depth = 8 * dims[leading + 1];
  const int64_t groups = scales.shape[leading + 1];
  if (groups < 1 || depth % groups != 0 || depth / groups % 32 != 0) {
    return Mismatch(op, scales_name, "groups of a multiple of 32 elements of the depth",
                    ShapeText(scales.shape.dims, scales.shape.rank));
  }
  std::vector<int64_t> expected(dims, dims + leading);
  expected.insert(expected.end(), {panels, groups});
  if (has_offsets) expected.push_back(2);
  expected.push_back(kPanelOutputs);
  error = CheckSameShape(op, scales_name, scales.shape, {expected.data(), expected.size()});
  if (!error.empty()) return error;
  if (dims[leading + 2] != kPanelOutputs) {
    return Mismatch(op, codes_name, "panels of 16 outputs",
                    ShapeText(codes.shape.dims, codes.shape.rank));
  }
  *first = {static_cast<const uint32_t*>(codes.data),
            scales.data,
            groups * (has_offsets ? 2 : 1) * kPanelOutputs * ByteWidth(dtype),
            depth / groups,
            groups,
            dtype == Dtype::kFloat16,
            has_offsets};
  return "";
}

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_LINEAR_INT4_CHECKS_H_
