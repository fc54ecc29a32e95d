// SPDX-License-Identifier: Apache-2.0

// Projection kernels for x86 with AVX-512 F, BW, DQ and VL.
// Rules for this file: isa.h.

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
#include "cpu/isa/isa.h"
#include "cpu/linear/kernels.h"

#define JAX_PAGED_ISA avx512

JAX_PAGED_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
// clang-format off: in this order
#include "cpu/isa/vec_avx512.h"
#include "cpu/attention/common.h"
#include "cpu/attention/dot.h"
#include "cpu/linear/kernel.h"
#include "cpu/linear/packed.h"
#include "cpu/linear/many.h"
#include "cpu/linear/int4.h"
#include "cpu/linear/int4_many.h"
// clang-format on
namespace jax_paged::cpu::avx512 {
constexpr LinearKernelTable kLinear = {
    {{kSameWeights<BFloat16>, kSameWeights<Float16>, kSameWeights<float>}},
    kCodeWeights<Int8>,
    kCodeWeights<Float8E4M3>,
    {kInt4<BFloat16>, kInt4<Float16>, kInt4<float>}};
}
JAX_PAGED_END_TARGET

namespace jax_paged::cpu {

const LinearKernelTable& Avx512LinearKernels() { return avx512::kLinear; }

}  // namespace jax_paged::cpu
