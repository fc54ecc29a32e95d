// SPDX-License-Identifier: Apache-2.0

// What a call of merge_attention_states is checked for, on CPU, on CUDA and in the emulator. Knows
// nothing of XLA.

#ifndef JAX_PAGED_COMMON_MERGE_CHECKS_H_
#define JAX_PAGED_COMMON_MERGE_CHECKS_H_

#include <string>
#include <utility>

#include "common/checks.h"

namespace jax_paged {

inline constexpr char kMergeStatesOp[] = "jax_paged.merge_attention_states";

// The operands and the results, in order.
struct MergeArrays {
  Array out_a, lse_a, out_b, lse_b;
  Array out, lse;
};

// Checks all and reads the dtype of the outs.
inline std::string ReadMergeStates(const MergeArrays& in, Dtype* dtype) {
  constexpr auto kOp = kMergeStatesOp;
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  const ShapeView shape = in.out_a.shape;
  if (failed(ReadDtype(kOp, "out_a", in.out_a.type, dtype)) ||
      failed(CheckType(kOp, "out_b", in.out_b.type, in.out_a.type)) ||
      failed(CheckType(kOp, "out", in.out.type, in.out_a.type)) ||
      failed(CheckType(kOp, "lse_a", in.lse_a.type, TypeOf<float>())) ||
      failed(CheckType(kOp, "lse_b", in.lse_b.type, TypeOf<float>())) ||
      failed(CheckType(kOp, "lse", in.lse.type, TypeOf<float>())) ||
      failed(CheckRank(kOp, "out_a", shape, 3)) || failed(CheckHeadDim(kOp, "out_a", shape[2])) ||
      failed(CheckSameShape(kOp, "out_b", in.out_b.shape, shape)) ||
      failed(CheckSameShape(kOp, "out", in.out.shape, shape)) ||
      failed(CheckShape(kOp, "lse_a", in.lse_a.shape, {shape[0], shape[1]})) ||
      failed(CheckShape(kOp, "lse_b", in.lse_b.shape, {shape[0], shape[1]}))) {
    return error;
  }
  return CheckShape(kOp, "lse", in.lse.shape, {shape[0], shape[1]});
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_MERGE_CHECKS_H_
