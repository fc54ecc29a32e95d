// SPDX-License-Identifier: Apache-2.0

// What the handlers of linear and moe_experts check packed weights for (linear/packed.h).

#ifndef JAX_PAGED_CPU_LINEAR_PACKED_CHECKS_H_
#define JAX_PAGED_CPU_LINEAR_PACKED_CHECKS_H_

#include <cstdint>
#include <string>

#include "common/checks.h"
#include "cpu/linear/kernels.h"

namespace jax_paged::cpu {

// Of a bf16 panel two elements of the depth lie side by side.
inline int64_t PanelDepth(Dtype w_dtype) { return w_dtype == Dtype::kBFloat16 ? 2 : 1; }

// Checks the shape of packed weights, [leading axes, panels, depth, 16] or with bf16 [..., depth /
// 2, 32], and that there is a kernel for them.
inline std::string CheckPacked(const char* op, const char* argument, Dtype x_dtype, Dtype w_dtype,
                               ShapeView got, size_t leading, int64_t depth) {
  const int64_t pair = PanelDepth(w_dtype);
  const int64_t* const dims = got.dims + leading;
  if (dims[1] * pair != depth || dims[2] != kPanelOutputs * pair) {
    return Mismatch(op, argument,
                    "panels of shape [..., " + std::to_string(depth / pair) + ", " +
                        std::to_string(kPanelOutputs * pair) + "] where it is packed",
                    ShapeText(got.dims, got.rank));
  }
  if (!ChosenLinearKernels().Of(x_dtype, w_dtype).many_packed) {
    return Mismatch(op, argument, "no packed weights of 8 bits beside bf16 on this processor",
                    ShapeText(got.dims, got.rank));
  }
  return "";
}

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_LINEAR_PACKED_CHECKS_H_
