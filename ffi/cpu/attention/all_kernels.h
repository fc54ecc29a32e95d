// SPDX-License-Identifier: Apache-2.0

// All kernels of one instruction set, and the table of them. Included by inst/*.cc only, behind the
// vectors of the set, see isa.h.

#ifndef JAX_PAGED_CPU_ATTENTION_ALL_KERNELS_H_
#define JAX_PAGED_CPU_ATTENTION_ALL_KERNELS_H_

// clang-format off: in this order
#include "cpu/attention/common.h"
#include "cpu/attention/dot.h"
#include "cpu/attention/logits.h"
#include "cpu/attention/stage.h"
#include "cpu/attention/decode.h"
#include "cpu/attention/prefill.h"
#include "cpu/attention/unit.h"
#include "cpu/write/kernel_qkv.h"
#include "cpu/attention/merge.h"
// clang-format on

namespace jax_paged::cpu::JAX_PAGED_ISA {

constexpr Kernels AllKernels(const char* isa) {
  return {isa,
          {RunItems<BFloat16>, RunItems<Float16>, RunItems<float>},
          /*run_words=*/nullptr,
          {FoldUnit<BFloat16>, FoldUnit<Float16>, FoldUnit<float>},
          {QkvQueries<BFloat16>, QkvQueries<Float16>, QkvQueries<float>},
          {QkvPages<BFloat16>, QkvPages<Float16>, QkvPages<float>},
          {MergeHeads<BFloat16>, MergeHeads<Float16>, MergeHeads<float>}};
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_ALL_KERNELS_H_
