// SPDX-License-Identifier: Apache-2.0

// Projection kernels for x86 with AVX-512 BF16: bf16 by dot products of words, the rest as with
// AVX-512. Rules for this file: isa.h.

// gcc 12 takes the "undefined" operand inside its own AVX-512 intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>
#include <math.h>

#include <cstddef>
#include <cstdint>

#include "common/activations.h"
#include "common/dtypes.h"
#include "common/integers.h"
#include "common/page_view.h"
#include "common/params.h"
#include "common/tree.h"
#include "cpu/attention/kernels.h"
#include "cpu/isa/code_tables.h"
#include "cpu/isa/isa.h"
#include "cpu/linear/kernels.h"

#define JAX_PAGED_ISA avx512bf16
#define JAX_PAGED_DOT_BFLOAT16

JAX_PAGED_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")
// clang-format off: in this order
#include "cpu/isa/vec_avx512.h"
#include "cpu/isa/vec_avx512_codes.h"
#include "cpu/attention/common.h"
#include "cpu/attention/dot.h"
#include "cpu/linear/kernel.h"
#include "cpu/linear/packed.h"
#include "cpu/linear/many.h"
#include "cpu/linear/int4.h"
#include "cpu/linear/int4_many.h"
// clang-format on
namespace jax_paged::cpu::avx512bf16 {
constexpr LinearKernels kBFloat16 = kSameWeights<BFloat16>;
template <typename C>
constexpr LinearKernels kCodes = {WordStride,
                                  LoadLinearRows<BFloat16>,
                                  OrderRows<CodeWord<C>>,
                                  kPackedRows,
                                  kWordDepth<CodeWord<C>>,
                                  LinearSums<CodeWord<C>>,
                                  /*few_packed=*/nullptr,
                                  ManySums<CodeWord<C>, /*PACKED=*/false>,
                                  /*many_packed=*/nullptr,
                                  kManyRows<CodeWord<C>>,
                                  kManyPackedRows,
                                  /*read_as_it_lies=*/0,
                                  GateSums,
                                  StoreLinearSums};
constexpr LinearKernels kInt8 = kCodes<Int8>;
constexpr LinearKernels kFp8 = kCodes<Float8E4M3>;
}  // namespace jax_paged::cpu::avx512bf16
JAX_PAGED_END_TARGET

namespace jax_paged::cpu {

const LinearKernelTable& Avx512Bf16LinearKernels() {
  static const LinearKernelTable table = [] {
    LinearKernelTable all = Avx512LinearKernels();
    constexpr int kX = static_cast<int>(Dtype::kBFloat16);
    all.same.of[kX] = avx512bf16::kBFloat16;
    all.int8.of[kX] = avx512bf16::kInt8;
    all.fp8.of[kX] = avx512bf16::kFp8;
    all.int4[kX] = avx512bf16::kInt4<BFloat16>;
    return all;
  }();
  return table;
}

}  // namespace jax_paged::cpu
